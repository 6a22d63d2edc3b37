"""One client is slow, or the server is killed: what the others see of it."""

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.helpers.served import SLOW, Process, caller, hear, heard_at_last, p95, serving, slow_reader

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


def test_a_client_that_reads_a_byte_a_second_harms_nobody(served: Process) -> None:
    """Compared with as many clients that ask for the same and read it."""
    long = {**TEXT, "prompt": "import os\n", "max_tokens": 1900, "stream_speculative": True}

    async def p95_of_gaps(readers: int) -> float:
        async with caller(served.url) as http:
            reading = [asyncio.create_task(hear(http, long)) for _ in range(readers)]
            heard = await asyncio.gather(*(heard_at_last(http, TEXT) for _ in range(3)))
            await asyncio.gather(*reading)
            return p95([gap for one in heard for gap in one.gaps])

    without = asyncio.run(p95_of_gaps(SLOW_READERS))
    slow = [slow_reader(served.port, long) for _ in range(SLOW_READERS)]
    over = threading.Event()

    def read() -> None:
        while not over.wait(1.0):
            for one in slow:
                one.recv(1)

    reading = threading.Thread(target=read)
    reading.start()
    beside = asyncio.run(p95_of_gaps(0))
    began = time.monotonic()
    served.until_idle()  # a client that does not read holds no row
    written = time.monotonic() - began
    over.set()
    reading.join()
    for one in slow:
        one.close()
    served.until_idle()
    print(f"\n95 % of gaps within {1000 * without:.1f} ms beside readers, {1000 * beside:.1f} ms beside slow ones", end="; ")
    print(f"their texts were written after {written:.1f} s")
    assert beside < FACTOR * without + MORE


PROMPT = "def binary_search(items, wanted):\n    low, high = 0, len(items)\n"
NEW = 1500
HEALTHY = 10.0
"""Seconds that a start takes at most, on a machine with nothing else to do."""


def answer_at_last(url: str, asked: list[float]) -> str:
    """A client that asks again, every half second, until it has a whole answer. asked: gets the time of every question."""
    body = {"prompt": PROMPT, "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
    began = time.monotonic()
    while time.monotonic() - began < 3 * SLOW:
        asked.append(time.monotonic())
        try:
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=SLOW)
            if answer.status_code == 200:
                return answer.json()["choices"][0]["text"]
            assert answer.status_code == 503, answer.text
            assert answer.headers["Retry-After"]
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise AssertionError("no answer at all")


def test_a_server_that_was_killed_is_healthy_again_soon_and_a_client_that_asks_again_gets_its_answer() -> None:
    served, asked = Process(), list[float]()
    try:
        first = served.start()
        expected = answer_at_last(served.url, [])
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(answer_at_last, served.url, asked)
            while not served.counted("num_requests_running"):
                time.sleep(0.01)
            served.kill()
            again, worked = served.start(), served.worked()
            assert answer.result() == expected
        assert len(asked) > 1, "it was killed before the answer was whole"
        served.until_idle()
    finally:
        served.stop()
    print(f"\nready after {first:.1f} s; killed with -9, ready again after {again:.1f} s", end=" ")
    print(f"({worked:.1f} s of processors); asked {len(asked)} times")
    assert again < HEALTHY
