"""One client is slow, greedy or hostile: what the others see of it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.helpers.served import Heard, Process, caller, hear, heard_at_last, p95, serving, slow_reader

pytestmark = pytest.mark.soak

TEXT = {"prompt": "class Stack:\n", "max_tokens": 300, "temperature": 0, "ignore_eos": True, "speculative": "off"}
"""What others ask for: every step is a piece of text."""
FACTOR, MORE = 4.0, 0.1
"""The others' 95th percentile may be so many times what it is without the one client, and so many seconds more."""
SLOW_READERS = 3


@pytest.fixture(scope="module")
def served() -> Iterator[Process]:
    with serving("--max-waiting", "128", "--request-timeout", "120") as process:
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
