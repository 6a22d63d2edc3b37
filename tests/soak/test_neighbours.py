"""One client is slow, greedy or hostile: what the others see of it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.helpers.hostile import REFUSED, SCHEMAS
from tests.helpers.served import Heard, Process, Questions, caller, hear, heard_at_last, p95, serving, slow_reader

pytestmark = pytest.mark.soak

TEXT = {"prompt": "class Stack:\n", "max_tokens": 300, "temperature": 0, "ignore_eos": True, "speculative": "off"}
"""What others ask for: every step is a piece of text."""
FACTOR, MORE = 4.0, 0.1
"""The others' 95th percentile may be so many times what it is without the one client, and so many seconds more."""
ROWS, SLOW_READERS = 8, 3
LONGEST_GAP = 30.0
"""Seconds without a piece of text that nobody has to bear, whatever others do, on a machine with much else to do."""


@pytest.fixture(scope="module")
def served() -> Iterator[Process]:
    with serving("--max-num-seqs", str(ROWS), "--max-waiting", "128", "--request-timeout", "120") as process:
        yield process


async def streams(url: str, count: int, **more: Any) -> list[Heard]:
    """So many clients at once, each with one answer."""
    async with caller(url) as http:
        return list(await asyncio.gather(*(heard_at_last(http, {**TEXT, **more}) for _ in range(count))))


def gaps(heard: list[Heard]) -> list[float]:
    return [gap for one in heard for gap in one.gaps]


def test_a_client_that_reads_a_byte_a_second_harms_nobody(served: Process) -> None:
    """Compared with as many clients that ask for the same and read it."""
    long = {**TEXT, "prompt": "import os\n", "max_tokens": 1900, "stream_speculative": True}

    async def beside_readers() -> list[Heard]:
        async with caller(served.url) as http:
            readers = [asyncio.create_task(hear(http, long)) for _ in range(SLOW_READERS)]
            found = await streams(served.url, 3)
            await asyncio.gather(*readers)
            return found

    without = p95(gaps(asyncio.run(beside_readers())))
    slow = [slow_reader(served.port, long) for _ in range(SLOW_READERS)]
    over = threading.Event()

    def read() -> None:
        while not over.wait(1.0):
            for one in slow:
                one.recv(1)

    reading = threading.Thread(target=read)
    reading.start()
    beside = p95(gaps(asyncio.run(streams(served.url, 3))))
    written = all_written(served)
    over.set()
    reading.join()
    for one in slow:
        one.close()
    served.until_idle()
    print(f"\n95 % of gaps within {1000 * without:.1f} ms beside readers, {1000 * beside:.1f} ms beside slow ones", end="; ")
    print(f"their texts were written after {written:.1f} s")
    assert beside < FACTOR * without + MORE


def all_written(served: Process) -> float:
    """Waits until no text has a row: a client that does not read holds none up. Returns for how many seconds."""
    began = time.monotonic()
    served.until_idle()
    return time.monotonic() - began


def test_a_long_prompt_holds_nobody_up(served: Process) -> None:
    alone = asyncio.run(streams(served.url, 2))

    async def beside() -> tuple[list[Heard], Heard]:
        async with caller(served.url) as http:
            others = asyncio.create_task(streams(served.url, 2, max_tokens=900))
            await asyncio.sleep(0.2)
            long = await hear(http, {**TEXT, "prompt": [100 + n % 300 for n in range(1900)], "max_tokens": 8})
            return await others, long

    others, long = asyncio.run(beside())
    between = [sum(long.began < at < long.arrived[0] for at in one.arrived) for one in others]
    waited = long.arrived[0] - long.began
    print(f"\n1900 tokens were read in {waited:.2f} s; meanwhile the others got {between} pieces, ", end="")
    print(f"their longest gap was {1000 * max(gaps(others)):.0f} ms, alone {1000 * max(gaps(alone)):.0f} ms")
    assert min(between) >= 4, "a part of the prompt, a step of the others, and so on"
    assert max(gaps(others)) < LONGEST_GAP


def test_a_flood_by_one_client_delays_another_by_those_before_it_alone(served: Process) -> None:
    """First come, first served: nothing that is asked later begins earlier, but what takes rows together with it."""
    many = 48
    short = {**TEXT, "max_tokens": 60}

    async def scenario() -> tuple[list[Heard], Heard, list[Heard]]:
        async with caller(served.url) as http:
            ask = Questions(served, http, short)
            flood, (second,), later = await ask.begin(many), await ask.begin(1), await ask.begin(many)
            return await asyncio.gather(*flood), await second, await asyncio.gather(*later)

    flood, second, later = asyncio.run(scenario())
    overtaken = sum(one.arrived[0] < second.arrived[0] for one in later)
    print(f"\nbehind {many} others the second client waited {second.arrived[0] - second.began:.2f} s;", end=" ")
    print(f"the flood took {max(one.seconds for one in flood):.2f} s; {overtaken} of {many} later ones were before it")
    assert overtaken <= ROWS


def test_a_polite_client_gets_its_answer_in_spite_of_one_that_never_waits() -> None:
    """A client that asks again at once with every 429, over and over, and one that waits as it is told. How long is printed."""
    with serving("--max-num-seqs", "4", "--max-waiting", "8") as served:

        async def rude(http: httpx.AsyncClient, over: asyncio.Event) -> None:
            while not over.is_set():
                answer = await http.post("/v1/completions", json={**TEXT, "max_tokens": 40})
                assert answer.status_code in (200, 429)
                await asyncio.sleep(0.02)

        async def scenario() -> list[float]:
            over, times = asyncio.Event(), list[float]()
            async with caller(served.url) as http:
                flood = [asyncio.create_task(rude(http, over)) for _ in range(24)]
                await asyncio.sleep(1)
                for _ in range(5):
                    began = time.perf_counter()
                    await asyncio.wait_for(heard_at_last(http, {**TEXT, "max_tokens": 40}), 300)
                    times.append(time.perf_counter() - began)
                over.set()
                await asyncio.gather(*flood)
            return times

        times = asyncio.run(scenario())
    print(f"\nbeside 24 connections that never wait, answers took {', '.join(f'{one:.1f}' for one in times)} s")


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_hostile_schema_stalls_nobody(served: Process, name: str) -> None:
    body = {**TEXT, "ignore_eos": False, "max_tokens": 200, "response_format": format_of(SCHEMAS[name]())}

    async def scenario() -> tuple[list[Heard], httpx.Response, float]:
        others = asyncio.create_task(streams(served.url, 2, max_tokens=400))
        while not served.at_work():
            await asyncio.sleep(0.02)
        began = time.perf_counter()
        answer = await asyncio.to_thread(served.http.post, "/v1/completions", json=body)
        seconds = time.perf_counter() - began
        return await others, answer, seconds

    others, answer, seconds = asyncio.run(scenario())
    served.until_idle()
    print(f"\n{name}: {answer.status_code} after {seconds:.2f} s, others' longest gap {max(gaps(others)):.2f} s")
    assert answer.status_code in ((400,) if name in REFUSED else (200, 504))
    assert max(gaps(others)) < LONGEST_GAP


def format_of(schema: dict[str, Any]) -> dict[str, Any]:
    """As `response_format`."""
    return {"type": "json_schema", "json_schema": {"name": "hostile", "schema": schema}}
