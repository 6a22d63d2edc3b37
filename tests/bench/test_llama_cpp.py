"""The llama.cpp peer, with a stand-in for llama-cpp-python that keeps the rules of its memory and whose next tokens are known."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from skipstone.bench.peers.ggml import LlamaCpp, Worker, worker
from skipstone.timing.measure import measure
from tests.bench.fakes.llama_cpp import following
from tests.helpers import families

V = 97
PROMPT = [5, 9, 3, 5, 9]
Make = Callable[..., LlamaCpp]


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A peer over a file of the stand-in. drafts: None, "prompt-lookup", or the stand-in's settings of a draft model."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "fakes"))
    worker.cache_clear()

    def file(name: str, **settings: Any) -> str:
        (tmp_path / name).write_text(json.dumps({"vocabulary": V, "wrong": 1000, "sure": 9.0} | settings))
        return str(tmp_path / name)

    def make(drafts: str | dict[str, Any] | None = None, vocabulary: int = V, **more: Any) -> LlamaCpp:
        own = file("draft-F16.gguf", **drafts) if isinstance(drafts, dict) else drafts
        return LlamaCpp(file("model-F32.gguf", vocabulary=vocabulary), drafts=own, **more)

    return make


def text(count: int, stop: int | None = None) -> list[int]:
    """What the stand-in's model writes behind the prompt."""
    found, model = list(PROMPT), SimpleNamespace(vocabulary=V, wrong=1000)
    while len(found) < len(PROMPT) + count and (stop is None or found[-1] != stop):
        found.append(following(model, found))
    return found[len(PROMPT) :]


DRAFTS = {
    "plainly": None,
    "with its prompt lookup": "prompt-lookup",
    "with a draft model that is right": {},
    "with a draft model that is wrong at times": {"wrong": 3},
    "with a draft model that is always wrong": {"wrong": 1},
    "with a draft model that is never sure": {"sure": 0.1},
}


@pytest.mark.parametrize("drafts", DRAFTS.values(), ids=DRAFTS)
@pytest.mark.parametrize("count", [1, 2, 40, 700])
def test_it_writes_what_the_model_writes(peer: Make, drafts: Any, count: int) -> None:
    model, one = families.cached("llama"), peer(drafts, num_draft_tokens=5)
    one.check(model)
    for _ in range(2):  # the second call begins on memory that is full of the first
        found = measure(model, one, torch.tensor(PROMPT), {"max_new_tokens": count}, 0)
        assert found.tokens == text(count)
        assert found.first_seconds is not None
        assert 0 < found.first_seconds <= found.seconds


@pytest.mark.parametrize("drafts", DRAFTS.values(), ids=DRAFTS)
def test_it_ends_at_a_stop_token(peer: Make, drafts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, stop = families.cached("llama"), text(30)[20]
    monkeypatch.setattr(model.generation_config, "eos_token_id", [stop, 96])
    found = peer(drafts).generate(model, torch.tensor([PROMPT]), {"max_new_tokens": 60}, 0)
    assert found.tokens == text(60, stop)


def test_a_long_prompt_goes_in_parts(peer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.PROMPT", [n % V for n in range(1300)])
    found = peer({"wrong": 5}).generate(families.cached("llama"), torch.tensor([PROMPT]), {"max_new_tokens": 9}, 0)
    assert found.tokens == text(9)


def test_drafts_save_passes(peer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in this process, where passes can be counted."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "fakes"))
    import llama_cpp

    from skipstone.bench.peers import ggml_worker

    passes: list[int] = []
    decode = llama_cpp.llama_decode
    monkeypatch.setattr(
        llama_cpp, "llama_decode", lambda context, batch: passes.append(batch.n_tokens) or decode(context, batch)
    )
    one = peer({})
    target = ggml_worker.Context(one.file, 1)
    drafter = ggml_worker.DraftModel(one.drafts, 1)
    asked = {"ids": PROMPT, "new": 13, "stop": [], "drafts": 3, "threshold": 0.5}
    assert ggml_worker.written(target, drafter, asked)["ids"] == text(13)
    own = [rows for rows in passes if rows == 4]
    assert len(own) == 3, "12 tokens behind the first one, four a pass"
    assert len(passes) == 1 + 3 + 3 * 3, "the prompt, three passes, and three drafts before each"


def test_what_cannot_be_is_said_in_one_sentence(peer: Make, tmp_path: Path) -> None:
    model = families.cached("llama")
    with pytest.raises(ValueError, match=r"F32.gguf has 96 tokens, the model 97$"):
        peer(vocabulary=96).check(model)
    with pytest.raises(ValueError, match=r"llama-cpp: llama.cpp cannot load .*nothing.gguf$"):
        LlamaCpp(str(tmp_path / "nothing.gguf")).check(model)
    with pytest.raises(ValueError, match=r"llama-cpp: python=/nowhere: No such file"):
        peer(python="/nowhere").check(model)
    with pytest.raises(ValueError, match="drafts must be a path, found 3"):
        peer(drafts=3).check(model)
    with pytest.raises(ValueError, match="num_draft_tokens must be"):
        peer(num_draft_tokens=0).check(model)


def test_without_llama_cpp_python_the_missing_module_is_named(peer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH")
    with pytest.raises(ValueError, match="llama-cpp: ModuleNotFoundError: No module named 'llama_cpp'"):
        Worker(sys.executable, peer().file, "1")
