"""The llama.cpp peer, over a stand-in for llama-cpp-python whose next tokens are known."""

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from skipstone.lab.bench.peers.ggml import LlamaCpp
from skipstone.lab.bench.plan import create_entries
from skipstone.lab.timing.measure import measure
from tests.helpers import families
from tests.helpers.fakes.llama_cpp import following
from tests.helpers.pairwise import round_robin

V = 97
PROMPT = [5, 9, 3, 5, 9]
Make = Callable[..., LlamaCpp]


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A peer over a file of the stand-in. drafts: None, "prompt-lookup", or the stand-in's settings of a draft model."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "helpers" / "fakes"))

    def written(name: str, settings: dict[str, Any]) -> str:
        (tmp_path / name).write_text(json.dumps({"vocabulary": V, "wrong": 1000} | settings))
        return str(tmp_path / name)

    def make(drafts: Any = None, name: str = "model-F32.gguf", **more: Any) -> LlamaCpp:
        own = {key: more.pop(key) for key in (*more,) if key not in {one.name for one in fields(LlamaCpp)}}
        other = written("draft-F16.gguf", drafts | {"type": 1}) if isinstance(drafts, dict) else drafts
        return LlamaCpp(**{"file": written(name, own), "drafts": other} | more)

    return make


def text(count: int, stop: int | None = None) -> list[int]:
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


@round_robin(drafts=[pytest.param(drafts, id=name) for name, drafts in DRAFTS.items()], count=[40, 1])
def test_it_writes_what_the_model_writes(peer: Make, drafts: Any, count: int) -> None:
    model, one = families.cached("llama"), peer(drafts, num_draft_tokens=5)
    one.check(model)
    for _ in range(2):  # the second call begins on memory that is full of the first
        found = measure(model, one, torch.tensor(PROMPT), {"max_new_tokens": count}, 0)
        assert found.tokens == text(count)
        assert found.first_seconds is not None
        assert 0 < found.first_seconds <= found.seconds


@pytest.mark.parametrize("name", ["plainly", "with a draft model that is wrong at times"])
def test_it_ends_at_a_stop_token(peer: Make, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, stop = families.cached("llama"), text(30)[20]
    monkeypatch.setattr(model.generation_config, "eos_token_id", [stop, 96])
    found = peer(DRAFTS[name]).generate(model, torch.tensor([PROMPT]), {"max_new_tokens": 60}, 0)
    assert found.tokens == text(60, stop)


def test_a_long_prompt_goes_in_parts(peer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.PROMPT", [n % V for n in range(1300)])
    found = peer({"wrong": 5}).generate(families.cached("llama"), torch.tensor([PROMPT]), {"max_new_tokens": 9}, 0)
    assert found.tokens == text(9)


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"vocabulary": 96}, r"F32.gguf has 96 tokens, the model 97$"),
    ({"file": "nothing.gguf"}, r"llama-cpp: llama.cpp cannot load nothing.gguf$"),
    ({"python": "/nowhere"}, r"llama-cpp: python=/nowhere: No such file"),
    ({"num_draft_tokens": 512}, "num_draft_tokens must be at most 511, found 512"),
    ({"drafts": {"vocabulary": 96}}, r"draft-F16.gguf has 96 tokens, .*model-F32.gguf has 97$"),
    ({"room": False}, r"llama.cpp has no room for 4096 tokens of"),
]


@pytest.mark.parametrize(("kind", "own", "lossless"), [(0, False, True), (15, False, False), (15, True, True)])
def test_a_quantised_file_is_another_model_unless_the_model_is_read_from_it(
    peer: Make, monkeypatch: pytest.MonkeyPatch, kind: int, own: bool, lossless: bool
) -> None:
    model, file = families.cached("llama"), peer(type=kind).file
    monkeypatch.setattr(model.config, "name_or_path", file if own else "elsewhere")
    ((entry,), _) = create_entries([{"method": "llama-cpp", "file": file}], model, False)
    assert entry.lossless is lossless


@pytest.mark.parametrize(("settings", "said"), MISTAKES)
def test_what_cannot_be_is_said_in_one_sentence(peer: Make, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        peer(**settings).check(families.cached("llama"))


def test_a_text_that_is_too_long_is_refused_and_the_next_one_is_not(peer: Make) -> None:
    model, one = families.cached("llama"), peer(positions=40)
    with pytest.raises(ValueError, match="prompt and text have 41 tokens, and there is room for 40"):
        one.generate(model, torch.tensor([PROMPT]), {"max_new_tokens": 36}, 0)
    assert one.generate(model, torch.tensor([PROMPT]), {"max_new_tokens": 35}, 0).tokens == text(35)


def test_a_process_that_ends_midway_says_why_and_is_started_again(peer: Make) -> None:
    model, one = families.cached("llama"), peer(ends_at=20)
    for _ in range(2):
        with pytest.raises(ValueError, match="llama-cpp: out of luck"):
            one.generate(model, torch.tensor([PROMPT]), {"max_new_tokens": 30}, 0)
        assert one.generate(model, torch.tensor([PROMPT]), {"max_new_tokens": 9}, 0).tokens == text(9)
