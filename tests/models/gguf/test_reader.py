"""The reader finds what the gguf package finds, and refuses whatever is damaged."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from skipstone.models.gguf.reader import BLOCK_TYPES, GgufFile

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
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
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
