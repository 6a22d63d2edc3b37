"""llama.cpp itself on exported files, by the server that SKIPSTONE_LLAMA_SERVER names, or an installed `llama-server`."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from recipes.measure.llama_cpp_draft import wait_until_ready
from skipstone.engines.model_runner import ModelRunner
from skipstone.export.draft import DraftLayers
from skipstone.export.gguf.vocabulary import vocabulary_of
from skipstone.export.gguf.write_gguf import DRAFT, TARGET, write_pair
from tests.helpers import support
from tests.helpers.byte_level import CORPUS, RULES, SIZE, byte_level, plain
from tests.helpers.served import HOST, free_port

pytestmark = pytest.mark.clients

SERVER = os.environ.get("SKIPSTONE_LLAMA_SERVER") or shutil.which("llama-server")
PATIENCE = 120.0  # seconds in which a server must be ready
NEW = 32  # tokens of a text
EXACT = ("-fa", "off", "-ctk", "f32", "-ctv", "f32", "-ctkd", "f32", "-ctvd", "f32")
"""Keys and values in float32, as transformers has them."""
TEXTS = [
    *CORPUS,
    "  two spaces\tand\ta tab\n\n\nthree lines \n",
    "It's 2024-12-31; we'LL see 1000000 of them, I'D say!",
    "zażółć gęślą jaźń — 漢字かな 한국어 ١٢٣ ½ ²",
    "x=[1,2,3];y={'a':4}//comment___here",
    "<think>in between</think>",
]
ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama 3": ("llama", {"rope_parameters": ROPE | {"original_max_position_embeddings": 16}}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "smollm3": ("smollm3", {}),
}


@contextmanager
def served(*arguments: Any) -> Iterator[httpx.Client]:
    if SERVER is None:
        pytest.skip("there is no llama-server: name one by SKIPSTONE_LLAMA_SERVER")
    port = free_port()
    command = [SERVER, *map(str, arguments), "--host", HOST, "--port", str(port), "-t", "1", "-c", "512", "-np", "1"]
    with (
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process,
        httpx.Client(base_url=f"http://{HOST}:{port}", timeout=PATIENCE) as http,
    ):
        try:
            wait_until_ready(process, http)
            yield http
        finally:
            process.terminate()


def written(http: httpx.Client, ids: list[int]) -> dict[str, Any]:
    request = {"prompt": ids, "n_predict": NEW, "temperature": 0, "ignore_eos": True, "return_tokens": True}
    return http.post("/completion", json=request | {"cache_prompt": False}).raise_for_status().json()


@pytest.mark.parametrize("name", MODELS)
def test_greedy_texts_are_transformers_own(name: str, tmp_path: Path) -> None:
    """Of the target, and of the target with the draft. Texts that transformers itself nearly decides otherwise are left out.
    The tokenizer's end of a text is never written: llama.cpp would end there, whatever the model says."""
    kind, fields = MODELS[name]
    model = plain(kind, **fields, eos_token_id=None)
    keeps, folder = DraftLayers((0, 1), 4), tmp_path / "pair"
    runner = ModelRunner(model, "eager")
    write_pair(runner, vocabulary_of(byte_level("qwen2"), model), keeps, folder, "F32", "tiny")
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, SIZE, (length,), generator=generator) for length in (3, 9, 20, 30, 41)]
    expected = [support.margin(model, prompt, max_new_tokens=NEW, suppress_tokens=[1]) for prompt in prompts]
    pairs = [(prompt, text) for prompt, (text, smallest) in zip(prompts, expected, strict=True) if smallest > support.TIE]
    assert len(pairs) >= 3
    drafts = accepted = 0
    with served("-m", folder / TARGET, *EXACT[:6]) as http:
        assert [written(http, prompt.tolist())["tokens"] for prompt, _ in pairs] == [text for _, text in pairs]
    speculative = ("-md", folder / DRAFT, "--spec-type", "draft-simple", "--spec-draft-n-max", "4")
    with served("-m", folder / TARGET, *speculative, *EXACT) as http:
        for prompt, text in pairs:
            answer = written(http, prompt.tolist())
            assert answer["tokens"] == text
            drafts, accepted = drafts + answer["timings"]["draft_n"], accepted + answer["timings"]["draft_n_accepted"]
    assert 0 < accepted < drafts


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_a_text_has_the_tokenizer_s_tokens(rule: str, begins: bool, tmp_path: Path) -> None:
    model, tokenizer = plain("llama"), byte_level(rule, begins)
    folder = tmp_path / "pair"
    write_pair(ModelRunner(model, "eager"), vocabulary_of(tokenizer, model), DraftLayers((0,), 4), folder, "F32", "tiny")
    with served("-m", folder / TARGET) as http:
        for text in TEXTS:
            request = {"content": text, "add_special": True, "parse_special": True}
            assert http.post("/tokenize", json=request).json()["tokens"] == tokenizer(text)["input_ids"], text
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert http.post("/detokenize", json={"tokens": ids}).json()["content"] == text
