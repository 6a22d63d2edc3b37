"""A client that does not read its stream costs a bounded number of bytes and holds nobody up."""

from __future__ import annotations

import gc
import json
import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest

from skipstone.serving import unread
from skipstone.serving.details import Branch, Details, Seen
from skipstone.serving.jobs import Likely, Piece
from tests.helpers.served import SLOW, InThread, in_thread, slow_reader

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
    with in_thread(lambda: loaded, rows=4, waiting=64, drain=5) as running:
        yield running


def pieces_alive() -> int:
    """Bytes of all events that the process still has, whoever keeps them."""
    return sum(unread.event_bytes(one) for one in gc.get_objects() if isinstance(one, Piece))


def test_what_is_not_read_stays_below_the_limit_and_the_client_is_told(
    nano: InThread, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(unread, "UNREAD_BYTES", LIMIT)
    slow = slow_reader(nano.port, {**BODY, "stream_speculative": "full"})
    try:
        with caplog.at_level(logging.WARNING):
            engine, end = nano.server.engine, time.monotonic() + SLOW
            while not nano.server.open_streams or engine.running or engine.waits:
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


def test_events_count_as_about_what_they_take() -> None:
    """By Python's own count of what was allocated."""
    tracemalloc = pytest.importorskip("tracemalloc")

    def piece(number: int) -> Piece:
        likely = [Likely(-1.5 * number, [(1000 + number + one, -2.5 * one - number) for one in range(20)]) for _ in range(3)]
        seen = [Seen(5000 + number, 0.1 * number, 0.2 * number, None, 3, False) for _ in range(3)]
        refused = [Branch(1, [Seen(7000 + number, 0.3 * number, 0.4 * number)]) for _ in range(4)]
        tokens = [3000 + number + one for one in range(3)]
        return Piece(number, tokens, ["drafted"] * 3, likely, 4, "x", "y", (0.1 * number, 0.2), Details(seen, refused))

    tracemalloc.start()
    try:
        pieces = [piece(number) for number in range(1, 300)]
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert taken / 2 < sum(map(unread.event_bytes, pieces)) < 2 * taken
