"""A server that is killed in the middle of an answer and started again."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.helpers.served import SLOW, Process

pytestmark = pytest.mark.soak

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
