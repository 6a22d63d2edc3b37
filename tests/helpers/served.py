"""Servers to talk to over a real socket, in a thread of the tests or as a process of their own, and clients that stream."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import quantiles
from typing import Any

import httpx
import psutil
import uvicorn
from starlette.testclient import TestClient

from skipstone.assets import NANO
from skipstone.serving.app import make_app
from skipstone.serving.server import Server
from skipstone.serving.settings import ServerSettings

HOST = "127.0.0.1"
ROOT = Path(__file__).parents[2]
TEMPLATE = (
    "{% for tool in tools or [] %}# {{ tool.function.name }}\n{% endfor %}"
    "{% for message in messages %}# {{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}def{% endif %}"
)
SLOW = 300.0
"""Seconds that a machine with much else to do may take for anything here."""


def free_port() -> int:
    with socket.socket() as one:
        one.bind((HOST, 0))
        return one.getsockname()[1]


def refusal(response: httpx.Response) -> str:
    """The sentence of an error, in OpenAI's shape."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] in (response.status_code, "context_length_exceeded")
    return error["message"]


class Place:
    """Where a server answers. http: a client of it."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://{HOST}:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=SLOW)

    def until_ready(self, seconds: float = SLOW) -> float:
        """Waits until the server takes requests, for so many seconds at most. Returns how many seconds that took."""
        began = time.monotonic()
        while (passed := time.monotonic() - began) < seconds:
            try:
                if self.http.get("/health").status_code == 200:
                    return passed
            except httpx.TransportError:
                assert self.lives, self.said()
            time.sleep(0.05)
        raise AssertionError(f"the server is not ready after {seconds:g} s: {self.said()}")

    @property
    def lives(self) -> bool:
        raise NotImplementedError

    def said(self) -> str:
        return ""

    def chunks(self, body: dict[str, Any], path: str = "/v1/completions") -> list[dict[str, Any]]:
        """The chunks of a stream, which are those of an answer that is read as a whole."""
        lines = self.http.post(path, json={**body, "stream": True}).text.splitlines()
        return [json.loads(line[5:]) for line in lines if line.startswith("data: {")]

    def choices(self, body: dict[str, Any], path: str = "/v1/completions") -> list[dict[str, Any]]:
        return [choice for chunk in self.chunks(body, path) for choice in chunk["choices"]]

    def counted(self, name: str) -> float:
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"skipstone:{name}{{"))

    def at_work(self) -> float:
        return self.counted("num_requests_running") + self.counted("num_requests_waiting")

    def until_idle(self, seconds: float = SLOW) -> None:
        """AssertionError if after so many seconds there is still a text that has a row or waits for one."""
        end = time.monotonic() + seconds
        while left := self.at_work():
            assert time.monotonic() < end, f"{left:g} texts have a row or wait for one, of clients that have gone"
            time.sleep(0.05)


class InThread(Place):
    def __init__(self, server: Server, api_key: str | None = None) -> None:
        super().__init__()
        self.server = server
        config = uvicorn.Config(make_app(server, api_key), host=HOST, port=self.port, log_level="error", ws="none")
        self.uvicorn = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.uvicorn.run, daemon=True)
        self.thread.start()

    @property
    def lives(self) -> bool:
        return self.thread.is_alive()

    def stop(self) -> None:
        self.http.close()
        self.uvicorn.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive()


@contextmanager
def in_thread(load: Callable[[], tuple[Any, Any]], **settings: Any) -> Iterator[InThread]:
    """A server in a thread that takes requests. load: as of `Server`. settings: as of `ServerSettings`."""
    running = InThread(Server(load, ServerSettings(**settings)))
    running.until_ready()
    yield running
    running.stop()


@contextmanager
def without_socket(server: Server, api_key: str | None = None) -> Iterator[TestClient]:
    """A client of a server that has loaded its model and listens at no port."""
    with TestClient(make_app(server, api_key)) as client:
        while client.get("/health").status_code != 200:
            time.sleep(0.01)
        yield client


class Process(Place):
    """`skipstone serve` on the bundled model, which is not started yet. options: of the command. module: that is run."""

    process: subprocess.Popen[bytes] | None = None

    def __init__(self, *options: str, module: str = "skipstone") -> None:
        super().__init__()
        self.command = [sys.executable, "-m", module, "serve", "--port", str(self.port), "--drain-timeout", "2", *options]
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `stop`)

    def start(self) -> float:
        self.process = subprocess.Popen(self.command, stdout=self.log, stderr=self.log, env=dict(os.environ), cwd=ROOT)
        return self.until_ready()

    @property
    def lives(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def running(self) -> psutil.Process:
        assert self.process is not None
        return psutil.Process(self.process.pid)

    def said(self) -> str:
        self.log.seek(0)
        return self.log.read().decode(errors="replace")[-4000:]

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(30)

    def worked(self) -> float:
        """Seconds of processors that it has used, which say more of a start than the clock where others compute as well."""
        times = self.running.cpu_times()
        return times.user + times.system

    def resident(self) -> int:
        return self.running.memory_info().rss

    def stop(self) -> None:
        self.http.close()
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(SLOW)
            except subprocess.TimeoutExpired:
                self.process.kill()
                raise
        self.log.close()


def with_template(folder: Path) -> Path:
    """The bundled model with a chat template, which it has none of, in a new folder below."""
    path = folder / "nano"
    shutil.copytree(NANO, path, ignore=shutil.ignore_patterns("heads"))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


def without_run(value: Any) -> Any:
    """An answer without the parts that belong to one run of a server: ids, times, and what was cached or drafted."""
    if isinstance(value, list):
        return [without_run(one) for one in value]
    if not isinstance(value, dict):
        return value
    run = ("id", "created", "created_at", "cached_tokens", "input_tokens_details", "prompt_tokens_details")
    return {name: without_run(inner) for name, inner in value.items() if name not in (*run, "completion_tokens_details")}


@contextmanager
def serving(*options: str) -> Iterator[Process]:
    process = Process(*options)
    try:
        process.start()
        yield process
    finally:
        process.stop()


class Busy(Exception):
    """A client was told to come again, after so many seconds."""


@dataclass
class Heard:
    """What a stream brought. began: when it was asked for. arrived: when each piece of text came. Both in seconds of
    `time.perf_counter`. usage: of the last chunk that has one."""

    began: float = field(default_factory=time.perf_counter)
    text: str = ""
    arrived: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in pairwise(self.arrived)]

    @property
    def seconds(self) -> float:
        return self.arrived[-1] - self.began

    def take(self, line: str) -> None:
        """A line of a stream. RuntimeError for one that tells of an error."""
        if not line.startswith("data: {"):
            return
        chunk = json.loads(line[5:])
        if "error" in chunk:
            raise RuntimeError(str(chunk["error"]))
        self.usage = chunk.get("usage") or self.usage
        for text in filter(None, (choice["text"] for choice in chunk["choices"])):
            self.text += text
            self.arrived.append(time.perf_counter())


async def hear(http: httpx.AsyncClient, body: dict[str, Any]) -> Heard:
    """A streamed answer to the end. Busy for a 429, which has to say when to come again; RuntimeError for any other error."""
    heard = Heard()
    async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        if response.status_code == 429:
            raise Busy(float(response.headers["Retry-After"]))
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            heard.take(line)
    return heard


async def heard_at_last(http: httpx.AsyncClient, body: dict[str, Any]) -> Heard:
    """The same by a client that comes again when it is told to. Its times are those of the request that was taken."""
    while True:
        try:
            return await hear(http, body)
        except Busy as busy:
            await asyncio.sleep(*busy.args)


def caller(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=SLOW, limits=httpx.Limits(max_connections=None))


def p95(values: Sequence[float]) -> float:
    return quantiles(values, n=20)[-1]


def request_bytes(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    lines = ["POST /v1/completions HTTP/1.1", f"Host: {HOST}", "Content-Type: application/json", "Connection: close"]
    return "\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""]).encode() + content


def slow_reader(port: int, body: dict[str, Any]) -> socket.socket:
    """A connection that has asked for a stream, has room for very little of it and reads nothing by itself."""
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    one.settimeout(SLOW)
    one.connect((HOST, port))
    one.sendall(request_bytes({**body, "stream": True}))
    return one


async def goes_away(port: int, body: dict[str, Any], after: str, seconds: float) -> None:
    """A client that leaves without a word. after: "connecting", "half a request", "a request" (and so many seconds), "some
    text" or "all"."""
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        request = request_bytes(body)
        if after != "connecting":
            writer.write(request[: len(request) // 2] if after == "half a request" else request)
            await writer.drain()
        if after == "a request":
            await asyncio.sleep(seconds)
        elif after == "some text":
            await reader.read(512)
        elif after == "all":
            await asyncio.wait_for(reader.read(), SLOW)
    finally:
        writer.transport.abort()  # a reset, not a farewell


async def begin(served: Place, http: httpx.AsyncClient, body: dict[str, Any], *counts: int) -> list[list[asyncio.Task[Heard]]]:
    """Groups of so many equal questions. The server takes each group before the next one begins."""
    groups: list[list[asyncio.Task[Heard]]] = []
    for count in counts:
        groups.append([asyncio.create_task(hear(http, body)) for _ in range(count)])
        asked = [task for group in groups for task in group]
        while served.at_work() + sum(task.done() for task in asked) < len(asked):
            await asyncio.sleep(0.01)
    return groups
