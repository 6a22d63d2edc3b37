"""`echo`: an answer that begins with its prompt, and what the model thinks of the prompt's own tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.helpers.served import InThread, in_thread, refusal

TEXT = "class Stack:\n    def __init__(self):\n        self.items = []\n"
LONG = [100 + number % 300 for number in range(700)]
"""A prompt that is read in three parts."""


@pytest.fixture(scope="module")
def nano(loaded: Any) -> Iterator[InThread]:
    with in_thread(lambda: loaded, max_num_seqs=2, max_waiting=16, drain_seconds=5) as running:
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
    special = loaded[1].all_special_tokens  # are no text
    texts = ["" if text in special else text for text in told["tokens"]]
    assert told["text_offset"] == [len("".join(texts[:place])) for place in range(len(ids) + 1)]


def test_the_answer_begins_with_its_prompt_and_goes_on_as_without(nano: InThread) -> None:
    body = {"prompt": [TEXT, "import os\n"], "n": 2, "max_tokens": 12, "temperature": 0}
    plain = nano.http.post("/v1/completions", json=body).json()["choices"]
    for more in ({}, {"logprobs": 0}):
        echoed = nano.http.post("/v1/completions", json={**body, **more, "echo": True}).json()["choices"]
        prompts = [text for text in body["prompt"] for _ in range(2)]
        assert [one["text"] for one in echoed] == [text + one["text"] for text, one in zip(prompts, plain, strict=True)]
    assert nano.at_work() == 0


MARKED = "é x 你好 😀\n"
"""A text whose characters are of several tokens each."""


def test_offsets_are_places_in_the_text(nano: InThread, loaded: Any) -> None:
    """Of a token that goes on with a character: the character's."""
    tokenizer = loaded[1]
    ids = tokenizer(MARKED)["input_ids"]
    assert ids[0] in tokenizer.all_special_ids
    assert len(ids) > len(MARKED) + 1
    body = {"prompt": MARKED, "max_tokens": 4, "temperature": 0, "echo": True, "logprobs": 1}
    choice = nano.http.post("/v1/completions", json=body).json()["choices"][0]
    decoded = [tokenizer.decode(ids[:place], skip_special_tokens=True).rstrip("\ufffd") for place in range(len(ids) + 1)]
    assert choice["logprobs"]["text_offset"][: len(ids) + 1] == [len(text) for text in decoded]
    new = zip(choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"], strict=True)
    assert all(choice["text"][place:].startswith(text) for place, text in list(new)[len(ids) :])


def test_a_character_that_the_prompt_begins_and_the_answer_ends_is_whole(nano: InThread, loaded: Any) -> None:
    tokenizer = loaded[1]
    *begin, first, last = tokenizer("a 你")["input_ids"]
    assert tokenizer.decode([first]) == tokenizer.decode([last]) == "\ufffd"
    for token, completed, place in ((last, "你", 2), (tokenizer.convert_tokens_to_ids("b"), "b", 3)):
        body = {"prompt": [*begin, first], "max_tokens": 1, "temperature": 0, "logit_bias": {str(token): 100}}
        plain = nano.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        assert plain == completed
        echoed = {**body, "echo": True, "logprobs": 0}
        choice = nano.http.post("/v1/completions", json=echoed).json()["choices"][0]
        assert choice["text"] == tokenizer.decode([*begin, first, token], skip_special_tokens=True)
        assert "".join(chunk["text"] for chunk in streamed(nano, echoed)) == choice["text"]
        assert choice["logprobs"]["text_offset"][-1] == place


def test_a_prompt_of_one_token_has_nothing_to_tell(nano: InThread) -> None:
    body = {"prompt": [100], "max_tokens": 1, "echo": True, "logprobs": 1}
    told = nano.http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert told["token_logprobs"][0] is None
    assert len(told["tokens"]) == 2


def streamed(nano: InThread, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of a stream's chunks."""
    lines = nano.http.post("/v1/completions", json={**body, "stream": True}).text.splitlines()
    return [choice for line in lines if line.startswith("data: {") for choice in json.loads(line[5:])["choices"]]


@pytest.mark.parametrize("new", [0, 9])
def test_a_stream_tells_the_prompt_first_and_comes_to_the_same(nano: InThread, new: int) -> None:
    body = {"prompt": [TEXT, "import os\n"], "max_tokens": new, "temperature": 0, "echo": True, "logprobs": 1}
    whole = nano.http.post("/v1/completions", json=body).json()["choices"]
    chunks = streamed(nano, body)
    for index, prompt in enumerate(body["prompt"]):
        own = [chunk for chunk in chunks if chunk["index"] == index]
        assert own[0]["text"] == prompt
        assert "".join(chunk["text"] for chunk in own) == whole[index]["text"]
        told = [chunk["logprobs"] for chunk in own if chunk["logprobs"]]
        for name, expected in whole[index]["logprobs"].items():
            assert [one for each in told for one in each[name]] == expected
        assert own[-1]["finish_reason"] == whole[index]["finish_reason"] == "length"


@pytest.mark.parametrize("more", [{}, {"logprobs": 0}, {"n": 2}])
def test_of_no_new_tokens_there_is_the_prompt(nano: InThread, loaded: Any, more: dict[str, Any]) -> None:
    body = {"prompt": TEXT, "max_tokens": 0, "echo": True, **more}
    answer = nano.http.post("/v1/completions", json=body).json()
    ids = loaded[1](TEXT)["input_ids"]
    assert [one["text"] for one in answer["choices"]] == [TEXT] * more.get("n", 1)
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (len(ids), 0)
    told = answer["choices"][0]["logprobs"]
    if "logprobs" not in more:
        assert told is None
    else:
        own = chances(loaded, ids).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
        assert told["token_logprobs"][1:] == pytest.approx(own.tolist(), abs=1e-3)
    assert nano.at_work() == 0


def test_no_tokens_and_no_echo_is_nothing_to_answer(nano: InThread) -> None:
    answer = nano.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 0})
    assert answer.status_code == 400
    assert "max_tokens=0 needs echo" in refusal(answer)
