"""The server at its socket: when it says that it is ready, what it says of a busy port, and how it ends."""

import json
import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from skipstone.cli.serve import API_KEY
from skipstone.serving.run_server import listen
from skipstone.serving.server import Server
from skipstone.serving.settings import ServerSettings
from skipstone.serving.sockets import bound_socket, url_of
from tests.helpers.commandline import run
from tests.helpers.served import HOST, SLOW, Process

LONG = {"prompt": "def add(a, b):", "max_tokens": 1500, "temperature": 0, "ignore_eos": True, "speculative": "off"}
SHORT = {**LONG, "max_tokens": 1}
ENDS = 60


def until(met: Callable[[], bool]) -> None:
    end = time.monotonic() + ENDS
    while not met():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def streamed(url: str, body: dict[str, Any], begun: threading.Event, path: str = "/v1/completions", **more: Any) -> list[str]:
    result = []
    with httpx.stream("POST", f"{url}{path}", json={**body, "stream": True}, timeout=SLOW, **more) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data:"):
                result.append(line[5:].strip())
                begun.set()
    return result


@pytest.fixture
def clients() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def served_by(load: Any, drain: float, scenario: Callable[[str], Any], clients: ThreadPoolExecutor) -> Any:
    """Run a scenario in a thread. It ends the server by a signal, which goes to the main thread."""
    server = Server(load, ServerSettings(max_num_seqs=2, drain_seconds=drain))

    def guarded(url: str) -> Any:
        try:
            return scenario(url)
        except BaseException:
            server.failed()  # no signal: a second one would end the tests
            raise

    with bound_socket(HOST, 0) as at:
        found: Future[Any] = clients.submit(guarded, url_of(at))
        whole = listen(server, at)
    result = found.result(ENDS)
    assert whole
    return result


def stream_and_stop(url: str, clients: ThreadPoolExecutor, body: dict[str, Any], path: str = "/v1/completions") -> Future[Any]:
    """A stream of a server that has got SIGTERM when its first event had come."""
    begun = threading.Event()
    until(lambda: answers(url))
    stream = clients.submit(streamed, url, body, begun, path)
    assert begun.wait(ENDS)
    os.kill(os.getpid(), signal.SIGTERM)
    return stream


def test_after_sigterm_streams_are_written_to_their_end_and_new_requests_refused(
    loaded: Any, clients: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = list[str]()
    monkeypatch.setattr(Server, "prepare_in_background", lambda server: prepared.append(server.state))

    def scenario(url: str) -> tuple[list[str], httpx.Response, httpx.Response]:
        stream = stream_and_stop(url, clients, {**LONG, "max_tokens": 250})
        until(lambda: not answers(url))
        health, refused = httpx.get(f"{url}/health"), httpx.post(f"{url}/v1/completions", json=SHORT)
        return stream.result(ENDS), health, refused

    events, health, refused = served_by(lambda: loaded, 60, scenario, clients)
    assert prepared == ["ready"]
    assert (health.status_code, health.json()["status"]) == (503, "stopping")
    assert refused.status_code == 503
    assert refused.json()["error"]["message"]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
def test_what_is_not_written_within_the_drain_time_ends_by_an_error(
    loaded: Any, clients: ThreadPoolExecutor, path: str
) -> None:
    response = {"input": "class A:", "max_output_tokens": 1500, "temperature": 0, "speculative": "off"}
    body = LONG if path == "/v1/completions" else response
    events = served_by(lambda: loaded, 0.05, lambda url: stream_and_stop(url, clients, body, path).result(ENDS), clients)
    assert any("the server was stopped" in event for event in events[-3:])


def test_it_says_ready_when_it_is_and_not_before(
    loaded: Any, clients: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    may_load = threading.Event()

    def load() -> Any:
        assert may_load.wait(ENDS)
        return loaded

    def said(word: str) -> bool:
        return any(word in record.getMessage().lower() for record in caplog.records if record.levelno >= logging.INFO)

    def scenario(url: str) -> tuple[bool, bool]:
        until(lambda: httpx.get(f"{url}/health", timeout=ENDS).status_code == 503)
        before = said("ready: ")
        may_load.set()
        until(lambda: answers(url))
        after = said(f"ready: {url}")
        os.kill(os.getpid(), signal.SIGTERM)
        return before, after

    caplog.set_level(logging.INFO, "skipstone")
    assert served_by(load, 5, scenario, clients) == (False, True)


def test_a_busy_port_is_reported_before_a_model_is_loaded(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind((HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        (tmp_path / "config.json").write_text("this is looked at when the model is loaded")
        result = run("serve", str(tmp_path), "--port", str(port))
    assert result.exit_code == 2
    assert f"{HOST}:{port}" in result.stderr
    assert "--port" in result.stderr
    assert "config.json" not in result.stderr


def test_a_host_that_is_none_of_this_machine_s_is_reported() -> None:
    with pytest.raises(OSError, match="--host"):
        bound_socket("no such host", 0)
    with pytest.raises(OSError, match=r"192\.0\.2\.1:0"):
        bound_socket("192.0.2.1", 0)
    with bound_socket(HOST, 0) as at, pytest.raises(ConnectionRefusedError):  # until it listens
        socket.create_connection(at.getsockname())


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux closes such connections")
def test_a_connection_whose_client_reads_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skipstone.serving.sockets.UNREAD_TIMEOUT_SECONDS", 1)
    with bound_socket(HOST, 0) as at:
        at.listen()
        with socket.create_connection(at.getsockname()), at.accept()[0] as connection:
            connection.setblocking(False)
            with suppress(BlockingIOError):
                while True:
                    connection.send(b"x" * 65536)
            until(lambda: connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0)


@pytest.mark.slow
def test_a_process_drains_at_the_first_signal_and_ends_at_once_at_the_second(
    clients: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY, "sk-test")
    served = Process("--max-num-seqs", "2", "--drain-timeout", "120", "--log-format", "json")
    key = {"Authorization": "Bearer sk-test"}
    try:
        served.start()
        assert served.process is not None
        assert served.http.post("/v1/completions", json=SHORT).status_code == 401
        begun = threading.Event()
        stream = clients.submit(streamed, served.url, LONG, begun, headers=key)
        assert begun.wait(SLOW)
        served.process.send_signal(signal.SIGTERM)
        assert json.loads(stream.result(SLOW)[-2])["choices"][0]["finish_reason"] == "length"
        assert served.process.wait(ENDS) == 0
        lines = [json.loads(line) for line in served.said().splitlines() if line.startswith("{")]
        info = [(line["route"], line["status"]) for line in lines if line["message"] == "request"]
        assert info == [("/v1/completions", 401), ("/v1/completions", 200)]
        assert any(f"ready: {served.url}" in line["message"] for line in lines)
        assert not re.search("def add|sk-test", served.said())

        served.start()
        begun = threading.Event()
        cut = clients.submit(streamed, served.url, {**LONG, "n": 16}, begun, headers=key)
        assert begun.wait(SLOW)
        served.process.send_signal(signal.SIGTERM)
        until(lambda: not answers(served.url))
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(ENDS) == -signal.SIGTERM
        assert isinstance(cut.exception(SLOW), httpx.TransportError)
    finally:
        served.stop()
