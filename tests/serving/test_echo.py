"""`echo`: an answer that begins with its prompt, and what the model thinks of the prompt's own tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.helpers.served import InThread, in_thread

TEXT = "class Stack:\n    def __init__(self):\n        self.items = []\n"
LONG = [100 + number % 300 for number in range(700)]
"""A prompt that is read in three parts."""


@pytest.fixture(scope="module")
def nano(loaded: Any) -> Iterator[InThread]:
    with in_thread(lambda: loaded, rows=2, waiting=16, drain=5) as running:
        yield running


def chances(loaded: Any, ids: list[int]) -> torch.Tensor:
    """Log-probabilities [T - 1, V] of what follows every token but the last, by transformers."""
    with torch.inference_mode():
        return loaded[0](torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)


@pytest.mark.parametrize("prompt", [TEXT, LONG], ids=["text", "tokens"])
def test_the_log_probabilities_of_a_prompt_are_those_of_the_model(nano: InThread, loaded: Any, prompt: Any) -> None:
    ids = loaded[1](prompt)["input_ids"] if isinstance(prompt, str) else prompt
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 2}
    told = nano.http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    right = chances(loaded, ids)
    assert {len(each) for each in told.values()} == {len(ids) + 1}
    assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
    own = right.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert told["token_logprobs"][1:-1] == pytest.approx(own.tolist(), abs=1e-3)
    best = [max(each.values()) for each in told["top_logprobs"][1:-1]]
    assert best == pytest.approx(right.max(-1).values.tolist(), abs=1e-3)
    offsets = [len("".join(told["tokens"][:place])) for place in range(len(ids) + 1)]
    assert told["text_offset"] == offsets


def test_the_answer_begins_with_its_prompt_and_goes_on_as_without(nano: InThread) -> None:
    body = {"prompt": [TEXT, "import os\n"], "n": 2, "max_tokens": 12, "temperature": 0}
    plain = nano.http.post("/v1/completions", json=body).json()["choices"]
    for more in ({}, {"logprobs": 0}):
        echoed = nano.http.post("/v1/completions", json={**body, **more, "echo": True}).json()["choices"]
        prompts = [text for text in body["prompt"] for _ in range(2)]
        assert [one["text"] for one in echoed] == [text + one["text"] for text, one in zip(prompts, plain, strict=True)]
    assert nano.at_work() == 0


def test_a_prompt_of_one_token_has_nothing_to_tell(nano: InThread) -> None:
    body = {"prompt": [100], "max_tokens": 1, "echo": True, "logprobs": 1}
    told = nano.http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert told["token_logprobs"][0] is None
    assert len(told["tokens"]) == 2


def test_a_stream_echoes_nothing(nano: InThread) -> None:
    answer = nano.http.post("/v1/completions", json={"prompt": "a", "echo": True, "stream": True})
    assert answer.status_code == 400
    assert "echo" in answer.json()["error"]["message"]
