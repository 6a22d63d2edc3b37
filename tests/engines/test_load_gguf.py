"""A model in a GGUF file is loaded, decoded and refused like one in a folder."""

import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import skipstone
from skipstone.engines import mapped_loading
from skipstone.engines.loading import expect_config, load_model, load_tokenizer
from skipstone.engines.mapped_loading import load_for_decoding
from skipstone.engines.native import library
from skipstone.models.gguf.reader import GgufError, GgufFile
from skipstone.models.mapped_model import MappedModel
from tests.helpers import commandline, families
from tests.helpers.gguf_files import write_model
from tests.helpers.pairwise import slow_except

NATIVE = pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))
LAYERSKIP = skipstone.LayerSkip(exit_layer=2, num_speculative_tokens=3)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny.gguf", families.cached("llama")).path


def test_a_file_is_the_model_that_was_written(path: Path) -> None:
    found, expected = load_model(path), families.cached("llama").state_dict()
    assert found.dtype == torch.float32
    assert all(torch.equal(weight, expected[name]) for name, weight in found.state_dict().items())
    expect_config(path)
    model, tokenizer = skipstone.load(path)
    text = skipstone.generate(model, "ABBA", LAYERSKIP, tokenizer=tokenizer, max_new_tokens=8, do_sample=False).text
    method = "layerskip exit_layer=2 num_speculative_tokens=3"
    out = commandline.succeed("generate", path, "--prompt", "ABBA", "--method", method, "--max-new-tokens", "8")
    assert text[0] in out.stdout


@pytest.mark.parametrize("share", [0.0001, 0.002, 0.5, 0.99999])
def test_a_file_that_is_cut_off_is_said_to_be(share: float, path: Path) -> None:
    whole, cut = path.read_bytes(), path.with_name("cut.gguf")
    cut.write_bytes(whole[: max(5, int(share * len(whole)))])
    for attempt in (load_model, load_tokenizer, expect_config):
        with pytest.raises(ValueError, match=r"cut\.gguf is cut off.*fetch it again"):
            attempt(cut)


@pytest.mark.parametrize(("name", "message"), [("output_norm", "has model.norm.weight in I32"), ("blk.0.ffn_up", "in I32")])
def test_weights_in_other_types_are_refused(name: str, message: str, path: Path) -> None:
    content, title = bytearray(path.read_bytes()), f"{name}.weight".encode()
    dimensions = content.index(title) + len(title)
    content[dimensions + 4 + 8 * content[dimensions]] = gguf.GGMLQuantizationType.I32
    path.write_bytes(content)
    for attempt in (load_for_decoding, load_model):
        with pytest.raises(GgufError, match=message):
            attempt(path)


@NATIVE
def test_transformers_reads_an_unknown_tokenizer_and_not_the_weights(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"gpt-2", b"other"))
    with pytest.warns(RuntimeWarning, match="cuts texts into words as 'other': transformers reads it"):
        model, tokenizer = load_for_decoding(path)
    assert isinstance(model, MappedModel)
    assert tokenizer.decode([5, 17]) == chr(33 + 5) + chr(33 + 17)


@NATIVE
def test_the_weights_of_a_file_must_fit_into_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_model(tmp_path / "tiny.gguf", families.build("llama", vocab=96), "Q8_0").path
    needed = sum(one.nbytes for one in GgufFile(path).tensors.values() if len(one.shape) == 2)
    monkeypatch.setattr(mapped_loading, "available_memory_bytes", lambda: needed)
    load_for_decoding(path)
    monkeypatch.setattr(mapped_loading, "available_memory_bytes", lambda: needed - 1)
    with pytest.raises(ValueError, match=r"are free: end other programs, or quantise them: int4 needs"):
        load_for_decoding(path)
    monkeypatch.setattr(mapped_loading, "available_memory_bytes", lambda: 0)
    with pytest.raises(ValueError, match=r"are free: end other programs$"):
        load_for_decoding(write_model(tmp_path / "tiny.gguf", families.build("llama", vocab=96), "Q4_0").path)


@pytest.mark.parametrize("packed", slow_except([True], [False, True]))
def test_its_text_is_that_of_transformers(packed: bool, tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny.gguf", families.cached("llama"), "Q8_0" if packed else "F32").path
    ids = torch.tensor([[5, 17, 3, 60, 22]])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name).eval()
    expected = theirs.generate(ids, max_new_tokens=20, do_sample=False)[0, 5:].tolist()
    for engine in ("eager", "auto"):
        model, tokenizer = skipstone.load(path, engine=engine)
        output = skipstone.generate(model, ids, LAYERSKIP, max_new_tokens=20, do_sample=False)
        assert output.new_tokens == [expected]
        assert tokenizer.decode(ids[0]) == "".join(chr(33 + token) for token in ids[0].tolist())
    same = torch.equal(theirs.model.layers[0].mlp.up_proj.weight, families.cached("llama").model.layers[0].mlp.up_proj.weight)
    assert same != packed


def test_what_is_no_file_of_a_known_architecture_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04 and so on")
    for attempt in (skipstone.load, load_tokenizer, expect_config):
        with pytest.raises(OSError, match=r"not a GGUF file, it begins with b'PK.*expected b'GGUF'.*model\.gguf"):
            attempt(path)
    write_model(path, families.cached("llama"), architecture="plamo")
    with pytest.raises(ValueError, match=r"model\.gguf cannot be loaded.*plamo"):
        load_model(path)


@NATIVE
def test_another_architecture_is_read_by_transformers(tmp_path: Path) -> None:
    model = families.cached("llama")
    names = ["output_norm", *(f"blk.{layer}.{name}" for layer in range(4) for name in ("attn_norm", "ffn_norm"))]
    biases = {f"{name}.bias": np.zeros(model.config.hidden_size, np.float32) for name in names}
    path, written = write_model(tmp_path / "model.gguf", model, "Q8_0", "stablelm", biases)
    with pytest.warns(RuntimeWarning, match="has the architecture 'stablelm'.*: transformers unpacks it"):
        found, _ = load_for_decoding(path)
    assert found.config.model_type == "stablelm"
    assert torch.equal(found.model.layers[3].mlp.up_proj.weight, written.model.layers[3].mlp.up_proj.weight)
    path, _ = write_model(tmp_path / "model.gguf", model, "Q8_0", "stablelm")
    with pytest.raises(ValueError, match=r"model\.gguf does not fit its config: it lacks .*bias"):
        load_model(path)


@pytest.mark.parametrize(("package", "architecture"), [("gguf", None), ("accelerate", "plamo")])
def test_a_missing_package_is_one_sentence(
    package: str, architecture: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "tiny.gguf", families.cached("llama"), "Q8_0", architecture).path
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf'need {package}: pip install "skipstone\[quantised\]"$'):
        load_model(path)
