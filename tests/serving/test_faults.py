"""Clients that are slow, greedy, hostile or gone, and what one of them can make the server keep."""

import asyncio
import gc
import json
import logging
import random
import time
import tracemalloc
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import httpx
import pytest
import torch

import skipstone
from skipstone.decoding.request import Request
from skipstone.serving import grammar, unread_events
from skipstone.serving.api_schemas import CompletionBody
from skipstone.serving.pending_request import (
    LENGTH,
    PendingRequest,
    RequestEnd,
    RequestEvent,
    StepOutput,
    TokenLogprobs,
    merge_outputs,
)
from skipstone.serving.step_details import RejectedBranch, StepDetails, TokenDetails
from tests.helpers.hostile import BODIES, REFUSED, SCHEMAS, TAKEN
from tests.helpers.served import SLOW, Heard, InThread, begin, caller, goes_away, hear, refusal, slow_reader

TEXT = {"prompt": "class Stack:\n", "max_tokens": 60, "temperature": 0, "ignore_eos": True, "speculative": "off"}

LONGEST = 20.0


def run(url: str, **body: Any) -> Heard:
    async def stream() -> Heard:
        async with caller(url) as http:
            return await hear(http, {**TEXT, **body})

    return asyncio.run(stream())


def test_clients_that_go_away_at_any_moment_leave_no_row_taken(nano: InThread) -> None:
    draw = random.Random(3)

    async def all_of_them() -> None:
        moments = ("connecting", "half a request", "a request", "some text", "all") * 8
        bodies = [{**TEXT, "max_tokens": draw.choice((1, 40)), "n": draw.choice((1, 2))} for _ in moments]
        for body in bodies:
            body["stream"] = draw.random() < 0.7
        both = zip(bodies, moments, strict=True)
        await asyncio.gather(*(goes_away(nano.port, body, moment, 0.1 * draw.random()) for body, moment in both))

    asyncio.run(all_of_them())
    nano.until_idle(LONGEST)
    scheduler = nano.server.model_thread.scheduler
    assert scheduler.num_running == scheduler.num_waiting == 0
    assert not nano.server._queues


def test_a_client_that_reads_nothing_holds_nobody_up_and_gives_its_row_back(nano: InThread) -> None:
    slow = slow_reader(nano.port, {**TEXT, "max_tokens": 120, "stream_speculative": True})
    try:
        other = run(nano.url)
        assert len(other.arrived) > 1
        nano.until_idle(LONGEST)  # though not a byte was read
    finally:
        slow.close()


def test_who_comes_first_is_written_first_though_one_client_asks_for_much(nano: InThread) -> None:
    short = {**TEXT, "max_tokens": 16}

    async def scenario() -> tuple[Heard, list[Heard]]:
        async with caller(nano.url) as http:
            _, (second,), later = await begin(nano, http, short, 8, 1, 12)
            return await second, await asyncio.gather(*later)

    second, later = asyncio.run(scenario())
    assert sum(one.arrived[0] < second.arrived[0] for one in later) <= 4, "those that got rows together with it at most"


def test_a_fifth_method_gets_its_turn_though_four_others_are_asked_for_all_the_time(nano: InThread) -> None:
    """Four methods have rows at a time. Their clients, five of each, ask again at once: there is always one that waits for a
    row of its method."""
    short = {**TEXT, "max_tokens": 12}
    methods = ["off", "prompt_lookup", "layerskip exit_layer=6", "layerskip exit_layer=8"]

    async def scenario() -> Heard:
        over = asyncio.Event()
        async with caller(nano.url) as http:

            async def again_and_again(method: str) -> None:
                while not over.is_set():
                    await hear(http, {**short, "speculative": method})

            others = [asyncio.create_task(again_and_again(method)) for method in methods * 5]
            while nano.server.model_thread.scheduler.num_running < 4 * 4:
                await asyncio.sleep(0.01)
            fifth = await asyncio.wait_for(hear(http, {**short, "speculative": "layerskip exit_layer=10"}), LONGEST)
            over.set()
            await asyncio.gather(*others)
            return fifth

    assert asyncio.run(scenario()).text == run(nano.url, **short).text


@pytest.mark.slow
def test_hostile_schemas_end_and_stall_nobody(nano: InThread) -> None:
    async def scenario() -> tuple[Heard, list[httpx.Response]]:
        async with caller(nano.url) as http:
            other = asyncio.create_task(hear(http, {**TEXT, "max_tokens": 200}))
            while not nano.at_work():
                await asyncio.sleep(0.01)
            formats = [{"type": "json_schema", "json_schema": {"schema": schema()}} for schema in SCHEMAS.values()]
            bodies = [{"prompt": "x = ", "max_tokens": 12, "temperature": 0, "response_format": one} for one in formats]
            answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for body in bodies))
            return await other, answers

    other, answers = asyncio.run(scenario())
    result = {name: answer.status_code for name, answer in zip(SCHEMAS, answers, strict=True)}
    assert result == {name: 400 if name in REFUSED else 200 for name in SCHEMAS}
    endless = dict(zip(SCHEMAS, answers, strict=True))
    for name in ("an intersection of patterns", "many patterns of names"):
        assert "the schema takes more than 2 s of a processor" in refusal(endless[name])
    assert max(other.gaps) < LONGEST / 4
    nano.until_idle(LONGEST)


@pytest.mark.parametrize("name", BODIES)
def test_a_hostile_body_is_answered_in_a_sentence_and_never_with_500(nano: InThread, name: str) -> None:
    answer = nano.http.post("/v1/completions", content=BODIES[name].encode(), headers={"Content-Type": "application/json"})
    assert answer.status_code == (200 if name in TAKEN else 400), answer.text
    assert name in TAKEN or refusal(answer)


BODY = {"prompt": "a = 1\n", "max_tokens": 900, "n": 4, "temperature": 0, "ignore_eos": True, "speculative": "off"}
BODY["logprobs"] = 20
LIMIT = 1 << 18


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
    logprobs = [
        TokenLogprobs(-1.5 * number, [(1000 + number + one, -2.5 * one - number) for one in range(20)]) for _ in range(3)
    ]
    seen = [TokenDetails(5000 + number, 0.1 * number, 0.2 * number, None, 3, False) for _ in range(3)]
    refused = [RejectedBranch(1, [TokenDetails(7000 + number, 0.3 * number, 0.4 * number)]) for _ in range(4)]
    tokens = [3000 + number + one for one in range(3)]
    return StepOutput(number, tokens, ["drafted"] * 3, logprobs, 4, "x", "y", (0.1 * number, 0.2), StepDetails(seen, refused))


def test_events_count_as_about_what_they_take() -> None:
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
    compiler = nano.server.parser._grammar_compiler

    def wait_for_memory() -> None:
        """An answer may arrive before its request is freed."""
        for _ in range(1000):
            if not compiler._taken:
                return
            time.sleep(0.01)
        raise AssertionError("grammars of requests that have ended take memory")

    wait_for_memory()
    monkeypatch.setattr(grammar, "GRAMMAR_BYTES", 5 << 20)  # one grammar of 3 MiB
    assert nano.http.post("/v1/completions", json=body).status_code == 200
    wait_for_memory()
    never = nano.http.post("/v1/completions", json={**body, "n": 16})
    assert never.status_code == 400
    assert "fewer texts" in refusal(never)
    keeps = nano.server.parser.compile_grammar(CompletionBody(**body))
    later = nano.http.post("/v1/completions", json=body)
    assert later.status_code == 429
    assert later.headers["Retry-After"]
    del keeps
    wait_for_memory()
    assert nano.http.post("/v1/completions", json=body).status_code == 200


def piece(step: int, *tokens: int) -> StepOutput:
    logprobs = [TokenLogprobs(-float(token), [(token, -float(token))]) for token in tokens]
    return StepOutput(step, list(tokens), ["bonus"] * len(tokens), logprobs, 3, "layerskip", f"step {step}", (1.0, 2.0))


def test_what_came_of_a_request_is_one_piece_with_the_tokens_of_all_and_its_end_stays_behind_it() -> None:
    one, other = (PendingRequest(Request(torch.tensor([1, 2]), 8), skipstone.Autoregressive()) for _ in range(2))
    end, silent = RequestEnd(LENGTH), replace(piece(4, 1), logprobs=None)
    events = [(one, piece(0, 7)), (other, silent), (one, piece(1, 8, 9)), (one, end), (other, silent)]
    assert merge_outputs(events) == [
        (one, replace(piece(1, 7, 8, 9), reason="step 1")),
        (other, replace(silent, tokens=[1, 1], origin=["bonus"] * 2)),
        (one, end),
    ]
    assert events[0][1] == piece(0, 7), "what was told is as it was"
