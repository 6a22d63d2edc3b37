"""Clients that are slow, greedy, hostile or gone, in a few seconds; `make soak` does the same for long, on a process."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.helpers.hostile import BODIES, REFUSED, SCHEMAS, TAKEN
from tests.helpers.served import Heard, InThread, Questions, caller, goes_away, hear, in_thread, slow_reader

TEXT = {"prompt": "class Stack:\n", "max_tokens": 60, "temperature": 0, "ignore_eos": True, "speculative": "off"}
"""Every step is a piece of text."""
LONG = [100 + number % 300 for number in range(1500)]
"""A prompt that is read in six parts."""
LONGEST = 20.0
"""Seconds that nobody waits here, on a machine with much else to do."""


@pytest.fixture(scope="module")
def nano(loaded: Any) -> Iterator[InThread]:
    with in_thread(lambda: loaded, max_num_seqs=4, max_waiting=64, drain_seconds=5) as running:
        yield running


def run(url: str, *bodies: dict[str, Any]) -> list[Heard]:
    """Streams, all at once."""

    async def all_of_them() -> list[Heard]:
        async with caller(url) as http:
            return list(await asyncio.gather(*(hear(http, {**TEXT, **body}) for body in bodies)))

    return asyncio.run(all_of_them())


def test_clients_that_go_away_at_any_moment_leave_no_row_taken(nano: InThread) -> None:
    draw = random.Random(3)

    async def all_of_them() -> None:
        moments = ("connecting", "half a request", "a request", "some text", "all") * 8
        bodies = [{**TEXT, "max_tokens": draw.choice((1, 40)), "n": draw.choice((1, 2))} for _ in moments]
        streams = [{**body, "stream": draw.random() < 0.7} for body in bodies]
        await asyncio.gather(
            *(goes_away(nano.port, body, moment, 0.1 * draw.random()) for body, moment in zip(streams, moments, strict=True))
        )

    asyncio.run(all_of_them())
    nano.until_idle(LONGEST)
    model_thread = nano.server.model_thread
    assert model_thread.scheduler.num_running == model_thread.scheduler.num_waiting == 0
    assert not nano.server._queues


def test_a_client_that_reads_nothing_holds_nobody_up_and_gives_its_row_back(nano: InThread) -> None:
    slow = slow_reader(nano.port, {**TEXT, "max_tokens": 250, "stream_speculative": True})
    try:
        (other,) = run(nano.url, {})
        assert len(other.arrived) > 1
        nano.until_idle(LONGEST)  # though not a byte was read
    finally:
        slow.close()


def test_others_get_their_tokens_while_a_long_prompt_is_read(nano: InThread) -> None:
    async def scenario() -> tuple[Heard, Heard]:
        async with caller(nano.url) as http:
            other = asyncio.create_task(hear(http, {**TEXT, "max_tokens": 200}))
            while not nano.at_work():
                await asyncio.sleep(0.01)
            long = await hear(http, {**TEXT, "prompt": LONG, "max_tokens": 4})
            return await other, long

    other, long = asyncio.run(scenario())
    assert sum(long.began < at < long.arrived[0] for at in other.arrived) >= 4


def test_who_comes_first_is_written_first_though_one_client_asks_for_much(nano: InThread) -> None:
    short = {**TEXT, "max_tokens": 30}

    async def scenario() -> tuple[Heard, list[Heard]]:
        async with caller(nano.url) as http:
            ask = Questions(nano, http, short)
            _, (second,), later = await ask.begin(8), await ask.begin(1), await ask.begin(12)
            return await second, await asyncio.gather(*later)

    second, later = asyncio.run(scenario())
    assert sum(one.arrived[0] < second.arrived[0] for one in later) <= 4, "those that got rows together with it at most"


def test_a_fifth_method_gets_its_turn_though_four_others_are_asked_for_all_the_time(nano: InThread) -> None:
    """Four methods have rows at a time. Their clients, five of each, ask again at once: there is always one that waits for a
    row of its method."""
    short = {**TEXT, "max_tokens": 24}
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

    assert asyncio.run(scenario()).text == run(nano.url, short)[0].text


@pytest.mark.slow
def test_hostile_schemas_end_and_stall_nobody(nano: InThread) -> None:
    """All of them at once, beside a stream."""

    async def scenario() -> tuple[Heard, list[httpx.Response]]:
        async with caller(nano.url) as http:
            other = asyncio.create_task(hear(http, {**TEXT, "max_tokens": 200}))
            while not nano.at_work():
                await asyncio.sleep(0.01)
            asked = []
            for schema in SCHEMAS.values():
                format_ = {"type": "json_schema", "json_schema": {"schema": schema()}}
                body = {"prompt": "x = ", "max_tokens": 12, "temperature": 0, "response_format": format_}
                asked.append(http.post("/v1/completions", json=body))
            answers = await asyncio.gather(*asked)
            return await other, answers

    other, answers = asyncio.run(scenario())
    found = {name: answer.status_code for name, answer in zip(SCHEMAS, answers, strict=True)}
    assert found == {name: 400 if name in REFUSED else 200 for name in SCHEMAS}
    assert max(other.gaps) < LONGEST / 4
    nano.until_idle(LONGEST)


@pytest.mark.parametrize("name", BODIES)
def test_a_hostile_body_is_answered_in_a_sentence_and_never_with_500(nano: InThread, name: str) -> None:
    answer = nano.http.post("/v1/completions", content=BODIES[name].encode(), headers={"Content-Type": "application/json"})
    assert answer.status_code == (200 if name in TAKEN else 400), answer.text
    if name not in TAKEN:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
    nano.until_idle(LONGEST)
