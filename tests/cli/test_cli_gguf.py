"""The verbs of the command line on a GGUF file: its blocks are decoded and measured as they are stored."""

import json
from pathlib import Path
from typing import Any

import pytest

from skipstone.cli.option_groups import GenerationModelOptions
from skipstone.engines.native import library
from skipstone.serving.server import Server
from skipstone.serving.settings import ServerSettings
from tests.helpers.batches import greedy, request, texts, write
from tests.helpers.commandline import LAYERSKIP, assert_refused, document, run, succeed
from tests.helpers.gguf_files import WrittenModel, write_model
from tests.helpers.machine import llama
from tests.helpers.served import without_socket

PROMPT, TOKENS = "ABBA(x,y):", 12
GENERATED = ("--prompt", PROMPT, "--max-new-tokens", TOKENS)

pytestmark = [
    pytest.mark.skipif(library.missing() is not None, reason=str(library.missing())),
    pytest.mark.filterwarnings("ignore:.* x the speed of plain decoding:RuntimeWarning"),
]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> WrittenModel:
    return write_model(tmp_path_factory.mktemp("files") / "tiny.gguf", llama(), "Q8_0")


@pytest.fixture(scope="module")
def plain(written: WrittenModel) -> str:
    """The text of plain decoding."""
    return document("generate", written.path, *GENERATED, "--method", "autoregressive")["text"]


def test_all_methods_write_the_same_text(written: WrittenModel, plain: str, tmp_path: Path) -> None:
    assert len(plain) >= TOKENS
    draft = write_model(tmp_path / "draft.gguf", llama(layers=2), "Q4_0").path
    for method in (LAYERSKIP, ("--method", f"speculative draft_model={draft}")):
        found = document("generate", written.path, *GENERATED, *method)
        assert found["text"] == plain
        assert found["stats"]["drafted"] > 0


def test_batch_and_serve_write_the_text_of_generate(written: WrittenModel, plain: str, tmp_path: Path) -> None:
    body, output = greedy(PROMPT, TOKENS), tmp_path / "out.jsonl"
    succeed("batch", write(tmp_path / "in.jsonl", [request("a", body)]), output, "--model", written.path)
    assert texts(output) == {"a": plain}
    model = GenerationModelOptions(str(written.path))
    with without_socket(Server(model.load, ServerSettings("tiny", None))) as client:
        assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == plain


def test_chat_says_that_a_file_has_no_template(written: WrittenModel) -> None:
    said = succeed("chat", written.path, "--max-new-tokens", 3, stdin="ABBA\n")
    assert "tiny.gguf has no chat template" in said.stderr
    assert said.stdout.strip()


def test_env_tells_the_blocks_and_their_bytes(written: WrittenModel) -> None:
    sizes = [weight.numel() // 32 * 34 for weight in written.model.parameters() if weight.dim() == 2]
    said = {"kind": "Q8_0", "computed": "Q8_0", "matrices": len(sizes), "path": "computed as stored"}
    assert document("env", written.path)["matrices"] == [said | {"stored_bytes": sum(sizes), "computed_bytes": sum(sizes)}]
    paths = [(one["matrices"], one["path"]) for one in document("env", written.path, "--quantize", "int4")["matrices"]]
    embedding, head = (1, "computed as stored"), (1, "quantised to int8")
    assert sorted(paths) == sorted([embedding, head, (len(sizes) - 2, "quantised to int4")])


def test_env_tells_what_is_not_computed_as_stored(tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny.gguf", llama(), "Q5_1").path
    assert [one["path"] for one in document("env", path)["matrices"]] == ["dequantised to float32"]
    path = write_model(tmp_path / "tiny.gguf", llama(), "Q8_0", "plamo").path
    assert "since it cannot be mapped: has the architecture 'plamo'" in document("env", path)["model_path"]
    assert_refused(run("env", "missing.gguf"), "no such folder or file")


def test_measurements_are_of_the_blocks_as_stored(written: WrittenModel, plain: str, tmp_path: Path) -> None:
    lens = document("inspect", written.path, *GENERATED)
    assert "".join(lens["texts"]) == plain
    assert lens["engine"] == "native"
    assert lens["top"][-1] == lens["tokens"], "the last layer chooses the tokens"
    assert len(lens["agreement"]) == written.model.config.num_hidden_layers
    out, methods = tmp_path / "r.jsonl", ("--method", "hf-generate", "--method", "autoregressive", *LAYERSKIP)
    said = succeed("bench", "run", written.path, "--out", out, *methods, "--num-prompts", 2, "--max-new-tokens", 8)
    assert "hf-generate: no row, transformers cannot compute the blocks of a GGUF file" in " ".join(said.stdout.split())
    lines: list[dict[str, Any]] = [json.loads(line) for line in out.read_text().splitlines()]
    (about,) = (line for line in lines if line["kind"] == "model")
    matrices = document("env", written.path)["matrices"][0]["stored_bytes"]
    embedding = written.model.get_input_embeddings().weight.numel() // 32 * 34
    norms = sum(4 * weight.numel() for weight in written.model.parameters() if weight.dim() == 1)
    assert about["ceiling"]["weight_bytes_per_token"] == matrices - embedding + norms
    assert [set(line["rows"]) for line in lines if line["kind"] == "prompt"] == [{"autoregressive", "layerskip"}] * 2


def test_check_compares_the_blocks_with_float64(written: WrittenModel) -> None:
    small = ("--num-prompts", 2, "--max-new-tokens", 8, "--samples", 100)
    found = document("check", written.path, *LAYERSKIP, *small)
    assert found["passed"]
    assert sum("the same weights in float64" in one["name"] for one in found["findings"]) == 2
