"""The reader finds what the gguf package finds, and refuses whatever is damaged."""

import random
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from skipstone.engines.model_runner import ModelRunner
from skipstone.models.gguf.reader import BLOCK_TYPES, GgufError, GgufFile
from skipstone.models.gguf.tokenizer import gguf_tokenizer
from skipstone.models.mapped_config import UnmappableError
from skipstone.models.mapped_gguf import map_gguf
from tests.helpers import families
from tests.helpers.gguf_files import finish, write_model
from tests.helpers.native import NATIVE_ONLY

pytestmark = NATIVE_ONLY
ROWS = np.arange(3 * 256, dtype=np.float32).reshape(3, 256)


def write(path: Path, alignment: int | None = None) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    if alignment:
        writer.add_custom_alignment(alignment)
    writer.add_float32("a.float", 1e-6)
    writer.add_float64("a.double", 0.1)
    writer.add_int64("a.long", -(2**40))
    writer.add_uint64("an.unsigned", 2**63 + 1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.text", "naïve 🙂")
    writer.add_array("some.texts", ["", "a", "🙂", "b" * 300])
    writer.add_array("some.numbers", [1, 2, -3])
    writer.add_array("some.floats", [1.5, -2.0])
    writer.add_array("some.bools", [True, False])
    kinds = gguf.GGMLQuantizationType
    writer.add_tensor("one.weight", ROWS)
    writer.add_tensor("norm.weight", ROWS[0, :5].copy())
    writer.add_tensor("half.weight", ROWS.astype(np.float16))
    for kind in (kinds.Q8_0, kinds.Q4_0, kinds.BF16):
        writer.add_tensor(f"{kind.name}.weight", gguf.quants.quantize(ROWS, kind), raw_dtype=kind)
    finish(writer)
    return path


@pytest.mark.parametrize("alignment", [None, 8, 256])
def test_it_finds_what_the_gguf_package_finds(alignment: int | None, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", alignment)
    found, expected = GgufFile(path), gguf.GGUFReader(path)
    assert found.architecture == "llama"
    for key, field in expected.fields.items():
        if not key.startswith("GGUF."):
            assert as_lists(found.metadata[key]) == pytest.approx(field.contents()), key
    assert found.metadata["a.float"] == 1e-6
    assert [*found.tensors] == [one.name for one in expected.tensors]
    content = path.read_bytes()
    for one in expected.tensors:
        tensor = found.tensors[one.name]
        assert (tensor.kind, tensor.shape[::-1], tensor.nbytes) == (one.tensor_type.name, tuple(one.shape), one.n_bytes)
        assert tensor.data.tobytes() == one.data.tobytes() == content[tensor.offset :][: tensor.nbytes]


def as_lists(value: Any) -> Any:
    if isinstance(value, list):
        return [one.decode() for one in value]
    return value.tolist() if isinstance(value, np.ndarray) else value


def test_the_block_types_are_those_of_ggml() -> None:
    for kind, sizes in gguf.GGML_QUANT_SIZES.items():
        assert BLOCK_TYPES[kind.name] == (kind.value, *sizes)


SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
NUMBERS = (0, 1, 8, 9, 12, 13, 33, 255, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
MAX_BYTES = 1 << 20
"""Memory that reading a file of 50 KB may take; an unchecked count would take gigabytes."""


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_a_damaged_file_is_an_error_or_reads(name: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "whole.gguf", families.build(name, layers=1, vocab=40, **SIZES), "Q8_0").path
    content, damaged = path.read_bytes(), tmp_path / "damaged.gguf"
    end = min(one.offset for one in GgufFile(path).tensors.values())
    draw, outcomes = random.Random(0), {"read": 0, "refused": 0, "left to transformers": 0}
    tracemalloc.start()
    for length in [*range(0, end, 7), end + 1, len(content) // 2, len(content) - 1]:
        damaged.write_bytes(content[:length])
        with pytest.raises(GgufError):
            GgufFile(damaged)
    for _ in range(600):
        changed, place = bytearray(content), draw.randrange(4, end)
        size = draw.choice((4, 8))
        if draw.random() < 0.3:
            changed[place] ^= 1 << draw.randrange(8)
        else:
            changed[place : place + size] = (draw.choice(NUMBERS) % 256**size).to_bytes(size, "little")
        damaged.write_bytes(changed)
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        outcomes[outcome(damaged)] += 1
        assert tracemalloc.get_traced_memory()[1] - before < MAX_BYTES
    tracemalloc.stop()
    assert min(outcomes.values()) > 5, outcomes


def outcome(path: Path) -> str:
    try:
        model, file = map_gguf(path)
        gguf_tokenizer(file)
        assert ModelRunner(model, "native").engine.nbytes  # packs the weights
    except GgufError:
        return "refused"
    except UnmappableError:
        return "left to transformers"
    assert all(len(one.data) == one.nbytes for one in file.tensors.values())
    return "read"


CHANGES: dict[str, tuple[bytes, bytes, str]] = {
    "another magic": (b"GGUF", b"GGML", "begins with b'GGML'"),
    "version 1": (b"GGUF\3\0\0\0", b"GGUF\1\0\0\0", "version 1"),
    "big-endian": (b"GGUF\3\0\0\0", b"GGUF\0\0\0\3", "big-endian"),
    "a name twice": (b"half.weight", b"Q8_0.weight", "'Q8_0.weight' twice"),
    "a key twice": (b"a.bool", b"a.long", "'a.long' twice"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_damaged_is_named(change: str, tmp_path: Path) -> None:
    old, new, message = CHANGES[change]
    path = write(tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    with pytest.raises(GgufError, match=message):
        GgufFile(path)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("offset", 0, "begins at 0, expected"),  # overlaps the first
        ("offset", 3073, "begins at 3073, expected"),
        ("offset", 2**64 - 32, "begins at"),
        ("kind", 33, "unknown type 33"),
        ("kind", 12, "in Q4_K has the sizes"),  # rows of 5
        ("rows", 2**63, "bytes are expected"),
        ("rows", 0, "has the sizes"),
        ("dimensions", 5, "has 5 dimensions"),
    ],
)
def test_tensors_lie_one_after_another_inside_the_file(place: str, value: int, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf")
    content = bytearray(path.read_bytes())
    begin = content.index(b"norm.weight") + len(b"norm.weight")  # then: dimensions, the only one, the type, the offset
    begin, size = {"dimensions": (begin, 4), "rows": (begin + 4, 8), "kind": (begin + 12, 4), "offset": (begin + 16, 8)}[place]
    content[begin : begin + size] = value.to_bytes(size, "little")
    path.write_bytes(content)
    with pytest.raises(GgufError, match=message):
        GgufFile(path)


def test_split_files_are_one_model(tmp_path: Path) -> None:
    paths = [write_part(tmp_path / f"model-{number + 1:05}-of-00003.gguf", number) for number in range(3)]
    for path in paths:
        file = GgufFile(path)
        assert [*file.tensors] == ["part.0", "part.1", "part.2"]
        assert [one.data.view(np.float32)[0] for one in file.tensors.values()] == [0, 1, 2]
        assert file.architecture == "llama"
        assert [one[0] for one in file.identity] == [*map(str, paths)]
    paths[2].rename(tmp_path / "kept")
    with pytest.raises(GgufError, match=r"needs model-00003-of-00003\.gguf: put it into the same folder"):
        GgufFile(paths[0])
    (tmp_path / "kept").rename(tmp_path / "alone.gguf")
    with pytest.raises(GgufError, match="misnamed, its name says part 1 of 1, its contents part 2"):
        GgufFile(tmp_path / "alone.gguf")
    write_part(paths[2], 1)
    with pytest.raises(GgufError, match="its contents part 1"):
        GgufFile(paths[0])


def write_part(path: Path, number: int) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.no", number)
    writer.add_uint16("split.count", 3)
    writer.add_int32("split.tensors.count", 3)
    writer.add_tensor(f"part.{number}", np.full(4, number, dtype=np.float32))
    finish(writer)
    return path
