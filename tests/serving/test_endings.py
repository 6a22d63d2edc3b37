"""A process whose model is lost ends by itself, with a status that makes a supervisor start another one."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from skipstone.serving.model_thread import THREAD_FAILED
from tests.helpers.served import HOST, Process, request_bytes

ENDS = 60
"""Seconds that an end takes on a machine with much else to do; alone it takes one or two."""
LONG = {
    "prompt": "def add(a, b):",
    "max_tokens": 900,
    "temperature": 0,
    "ignore_eos": True,
    "speculative": "off",
    "stream": True,
}


@contextmanager
def process(*options: str, module: str = "skipstone") -> Iterator[Process]:
    """One that is not started yet."""
    one = Process(*options, module=module)
    try:
        yield one
    finally:
        one.stop()


@pytest.mark.slow
def test_when_the_model_s_thread_dies_streams_are_told_and_the_process_ends() -> None:
    """Though it may drain for long, and somebody has sent half a request and says no more."""
    with process("--drain-timeout", "600", module="tests.helpers.dying") as served:
        served.start()
        assert served.process is not None
        with (
            socket.create_connection((HOST, served.port)) as half,
            served.http.stream("POST", "/v1/completions", json=LONG) as response,
        ):
            half.sendall(request_bytes(LONG)[:-1])
            lines = response.iter_lines()
            assert "choices" in next(lines)
            served.process.send_signal(signal.SIGUSR1)
            told = [line for line in lines if line.startswith("data:")]
            assert json.loads(told[-2][5:])["error"]["message"] == THREAD_FAILED
            assert told[-1] == "data: [DONE]"
            assert served.process.wait(ENDS) == 1


def test_a_model_that_cannot_be_loaded_ends_the_process_with_a_sentence(tmp_path: Path) -> None:
    with process(str(tmp_path / "nothing")) as served:
        (tmp_path / "nothing").mkdir()
        (tmp_path / "nothing" / "config.json").write_text("[]")
        assert served.begin().wait(ENDS) == 2
        (line,) = [line for line in served.said().splitlines() if "the model could not be loaded" in line]
        assert "nothing" in line
        assert "Traceback" not in served.said()
