"""What one client can make the server keep: events that it does not read, grammars."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import time
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import pytest
import torch

import skipstone
from skipstone.decoding.request import Request
from skipstone.serving import grammar, unread_events
from skipstone.serving.pending_request import PendingRequest, RequestEnd, RequestEvent, StepOutput, TokenLogprobs
from skipstone.serving.schemas import CompletionBody
from skipstone.serving.step_details import RejectedBranch, StepDetails, TokenDetails
from tests.helpers.served import SLOW, InThread, in_thread, refusal, slow_reader

BODY = {
    "prompt": "a = 1\n",
    "max_tokens": 900,
    "n": 4,
    "temperature": 0,
    "ignore_eos": True,
    "speculative": "off",
    "logprobs": 20,
}
LIMIT = 1 << 18


@pytest.fixture(scope="module")
def nano(loaded: Any) -> Iterator[InThread]:
    with in_thread(lambda: loaded, max_num_seqs=4, max_waiting=64, drain_seconds=5) as running:
        yield running


def pieces_alive() -> int:
    """Bytes of all events that the process still has, whoever keeps them."""
    return sum(unread_events.event_bytes(one) for one in gc.get_objects() if isinstance(one, StepOutput))


@pytest.mark.slow
def test_what_is_not_read_stays_below_the_limit_and_the_client_is_told(
    nano: InThread, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(unread_events, "UNREAD_BYTES", LIMIT)
    slow = slow_reader(nano.port, {**BODY, "stream_speculative": "full"})
    try:
        with caplog.at_level(logging.WARNING):
            model_thread, end = nano.server.model_thread, time.monotonic() + SLOW
            while not nano.server.open_streams or model_thread.scheduler.num_running or model_thread.scheduler.num_waiting:
                assert time.monotonic() < end, "its rows are not free"
                time.sleep(0.01)
            assert nano.http.post("/v1/completions", json={**BODY, "max_tokens": 4}).status_code == 200
        assert pieces_alive() < 2 * LIMIT
        assert any("unread" in one.message for one in caplog.records)
        got = b""
        while b"[DONE]" not in got:
            part = slow.recv(1 << 16)
            assert part, "the stream ended without a word"
            got += part
    finally:
        slow.close()
    events = [line[6:] for line in got.decode().splitlines() if line.startswith("data: {")]
    said = json.loads(events[-1])["error"]
    assert said["code"] == 503
    assert "faster" in said["message"]


def test_of_several_answers_the_one_with_the_most_unread_bytes_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unread_events, "UNREAD_BYTES", LIMIT)
    requests = [PendingRequest(Request(torch.tensor([1]), 9), skipstone.Autoregressive()) for _ in range(2)]
    answers = WeakSet(kept := [unread_events.UnreadEvents([one]) for one in requests])
    few, many = kept
    few.put(few.requests[0], a_piece(0))
    while unread_events.largest_beyond_limit(answers) is None:
        many.put(many.requests[0], a_piece(1))
        assert sum(one.nbytes for one in kept) < LIMIT + 100_000
    assert unread_events.largest_beyond_limit(answers) is many
    many.drop()
    assert unread_events.largest_beyond_limit(answers) is None

    async def read() -> list[RequestEvent]:
        return [(await one.take(whole_steps=True))[1] for one in kept]

    written, dropped = asyncio.run(read())
    assert isinstance(written, StepOutput)
    assert isinstance(dropped, RequestEnd)
    assert dropped.status == 503


def a_piece(number: int) -> StepOutput:
    """What is told of a step of three tokens."""
    logprobs = [
        TokenLogprobs(-1.5 * number, [(1000 + number + one, -2.5 * one - number) for one in range(20)]) for _ in range(3)
    ]
    seen = [TokenDetails(5000 + number, 0.1 * number, 0.2 * number, None, 3, False) for _ in range(3)]
    refused = [RejectedBranch(1, [TokenDetails(7000 + number, 0.3 * number, 0.4 * number)]) for _ in range(4)]
    tokens = [3000 + number + one for one in range(3)]
    return StepOutput(number, tokens, ["drafted"] * 3, logprobs, 4, "x", "y", (0.1 * number, 0.2), StepDetails(seen, refused))


def test_events_count_as_about_what_they_take() -> None:
    """By Python's own count of what was allocated."""
    tracemalloc = pytest.importorskip("tracemalloc")

    tracemalloc.start()
    try:
        pieces = [a_piece(number) for number in range(1, 300)]
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert taken / 2 < sum(map(unread_events.event_bytes, pieces)) < 2 * taken


def test_a_schema_for_which_there_is_no_memory_is_refused_by_http(nano: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    body = {**BODY, "max_tokens": 20, "ignore_eos": False, "n": 1}
    body["response_format"] = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    monkeypatch.setattr(grammar, "GRAMMAR_BYTES", 6 << 20)
    assert nano.http.post("/v1/completions", json=body).status_code == 200
    never = nano.http.post("/v1/completions", json={**body, "n": 16})
    assert never.status_code == 400
    assert "fewer texts" in refusal(never)
    keeps = nano.server.parser.compile_grammar(CompletionBody(**body))
    later = nano.http.post("/v1/completions", json=body)
    assert later.status_code == 429
    assert later.headers["Retry-After"]
    del keeps
    assert nano.http.post("/v1/completions", json=body).status_code == 200
