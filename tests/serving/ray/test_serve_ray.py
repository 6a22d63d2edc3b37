"""`skipstone serve --ray` on this machine: texts, conversations that stay, full replicas, a dead one, more of them.

One cluster serves all tests. It begins with one replica and has two after the first test that loads it.
"""

import asyncio
import functools
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

import skipstone
from tests.helpers.served import SLOW, Process, caller, hear, heard_at_last, refusal

pytestmark = pytest.mark.ray

ROWS, WAITING = 2, 4
"""Texts that a replica writes at a time, and requests that may wait for one."""
OPTIONS = ("--ray", "--min-replicas", "1", "--max-replicas", "2", "--max-num-seqs", str(ROWS), "--max-waiting", str(WAITING))
UNHURRIED = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60"}
"""Seconds that the proxy has to start; after three times 5 where nobody says, Serve ends it and starts another one."""
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
"""What clients of the cluster have to know, for the one that comes by its address."""
REPLICA = "ServeReplica:skipstone:replica"
"""In the name of a process: a replica, from its beginning on."""
LONG: dict[str, Any] = {"prompt": "def long(", "max_tokens": 2000, "temperature": 0, "ignore_eos": True, "speculative": "off"}
"""A request that keeps a row for a hundred times as long as a short one does."""
SHORT: dict[str, Any] = {"prompt": "def add(a, b):", "max_tokens": 20, "temperature": 0, "speculative": "off"}
DEFS = [f"def function_{number}(a, b):\n    " for number in range(12)]


@pytest.fixture(scope="module")
def served() -> Iterator[Process]:
    """The command, with one replica or two."""
    process = Process(*OPTIONS, module="tests.helpers.hasty")
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {**UNHURRIED, **TOKEN}.items():
                patch.setenv(name, value)
            process.start()
        yield process
    finally:
        process.stop()


def replicas(served: Process) -> int:
    """How many take requests."""
    return served.http.get("/health").json()["replicas"]


def until(served: Process, count: int) -> None:
    """Waits for so many replicas."""
    began = time.monotonic()
    while time.monotonic() - began < SLOW:
        if replicas(served) == count:
            return
        time.sleep(0.2)
    raise AssertionError(f"{replicas(served)} replicas, and not {count}: {served.said()}")


@pytest.fixture(scope="module")
def two(served: Process) -> Process:
    """The same when it has two replicas, which requests that wait have brought about. They are given up when Serve begins the
    second one: it stays, and begins sooner where nothing else computes."""

    async def load() -> None:
        async with caller(served.url) as http:
            asked = [asyncio.create_task(again(http)) for _ in range(ROWS + WAITING - 1)]
            began = time.monotonic()
            while len(processes(REPLICA)) < 2 and time.monotonic() - began < SLOW:
                await asyncio.sleep(0.1)
            for one in asked:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def again(http: httpx.AsyncClient) -> None:
        while True:
            await hear(http, LONG)

    assert replicas(served) == 1
    asyncio.run(load())
    until(served, 2)
    return served


def workers() -> list[psutil.Process]:
    """The processes of the replicas that take requests."""
    return processes(f"ray::{REPLICA}")


def processes(named: str) -> list[psutil.Process]:
    """Those below this one that have this in their names."""
    found = []
    for one in psutil.Process().children(recursive=True):
        try:
            if named in one.cmdline()[0]:
                found.append(one)
        except (psutil.Error, IndexError):
            continue
    return found


@functools.cache
def expected() -> dict[str, str]:
    """Prompts, and the texts that the bundled model writes behind them."""
    model, tokenizer = skipstone.load()
    tokens = SHORT["max_tokens"]
    found = {}
    for prompt in DEFS:
        out = skipstone.generate(model, prompt, "autoregressive", tokenizer=tokenizer, max_new_tokens=tokens)
        assert isinstance(out.text, str)
        found[prompt] = out.text
    return found


async def texts(url: str, prompts: list[str]) -> list[str]:
    """What streams of these prompts bring, all at once."""
    async with caller(url) as http:
        asked = (heard_at_last(http, {**SHORT, "prompt": prompt}) for prompt in prompts)
        return [one.text for one in await asyncio.gather(*asked)]


def metric(served: Process, session: str, name: str) -> float:
    """The sum of a metric's samples at the replica of a conversation."""
    lines = served.http.get("/metrics", headers={"x-session-id": session}).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def written(served: Process, session: str) -> float:
    """Answers that the replica of a conversation has completed."""
    return metric(served, session, "skipstone:request_success_total{")


def running(served: Process, session: str) -> float:
    """Requests that the replica of a conversation is decoding."""
    return metric(served, session, "skipstone:num_requests_running{")


def test_streams_and_whole_answers_are_the_texts_of_generate(two: Process) -> None:
    wanted = [expected()[prompt] for prompt in DEFS[:6]]
    assert len(set(wanted)) > 3
    assert asyncio.run(texts(two.url, DEFS[:6])) == wanted
    answers = [two.http.post("/v1/completions", json={**SHORT, "prompt": prompt}) for prompt in DEFS[:6]]
    assert [one.json()["choices"][0]["text"] for one in answers] == wanted


def test_a_stream_comes_piece_by_piece(two: Process) -> None:
    session = {"x-session-id": "streamed"}
    with two.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}, headers=session) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.iter_lines()
        pieces = [next(lines) for _ in range(20)]
        assert sum(line.startswith("data: {") for line in pieces) >= 8
        assert running(two, "streamed") == 1, "the text was not complete yet"


def test_a_conversation_stays_on_one_replica_and_conversations_are_spread(two: Process) -> None:
    def answer(name: str, prompt: str) -> dict[str, Any]:
        body = {**SHORT, "prompt": prompt, "ignore_eos": True}
        return two.http.post("/v1/completions", json=body, headers={"x-session-id": name}).json()

    prompt, reused = "# 0\n" + "def add(a, b):\n    return a + b\n" * 9, []
    for _ in range(3):
        completion = answer("talk 0", prompt)
        prompt += completion["choices"][0]["text"]
        usage = completion["usage"]
        reused.append(usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"])
    assert min(reused[1:]) > 0.5, f"the replica of a conversation holds its prefix, found {reused}"
    names = [f"talk {number}" for number in range(40)]  # all on one of two replicas: 2 ** -39
    before = [written(two, name) for name in names]
    answer("talk 0", prompt)
    grown = [written(two, name) - count for name, count in zip(names, before, strict=True)]
    assert grown[0] == 1
    assert set(grown) == {0, 1}


def test_a_conversation_whose_replica_is_full_goes_to_another_one(two: Process) -> None:
    body = {**LONG, "prompt_cache_key": "one"}

    async def long_one(http: httpx.AsyncClient, begun: asyncio.Event) -> None:
        async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    begun.set()

    async def go() -> int:
        async with caller(two.url) as http:
            begun = [asyncio.Event() for _ in range(ROWS)]
            long = [asyncio.create_task(long_one(http, one)) for one in begun]
            await asyncio.gather(*(one.wait() for one in begun))
            answer = await hear(http, {**SHORT, "prompt_cache_key": "one"})
            assert answer.text
            left = sum(not one.done() for one in long)
            for one in long:
                one.cancel()
            await asyncio.gather(*long, return_exceptions=True)
            return left

    assert asyncio.run(asyncio.wait_for(go(), SLOW)) == ROWS, (
        "the short answer came while its replica still wrote both long ones"
    )


def test_more_than_may_wait_are_told_to_come_again_and_health_answers(two: Process) -> None:
    """Serve counts requests that wait a moment after it let them in, so that a burst may pass as a whole. Clients who ask again
    and again come one by one, and there is no room: there are twice as many of them as rows and places to wait."""
    body = {**LONG, "max_tokens": 300, "stream": True}

    async def until_refused(http: httpx.AsyncClient) -> tuple[str, str]:
        while True:
            async with http.stream("POST", "/v1/completions", json=body) as response:
                text = await response.aread()
            if response.status_code == 429:
                return response.headers["retry-after"], refusal(response)
            assert response.status_code == 200, text

    async def go() -> list[tuple[str, str]]:
        async with caller(two.url) as http:
            asked = [asyncio.create_task(until_refused(http)) for _ in range(2 * (2 * ROWS + WAITING))]
            refused, _ = await asyncio.wait(asked, timeout=SLOW, return_when=asyncio.FIRST_COMPLETED)
            assert (await http.get("/health")).status_code == 200
            for one in asked:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            return [one.result() for one in refused]

    found = asyncio.run(go())
    assert found
    assert set(found) == {("1", "the queues of all replicas are full; ask again later")}


def test_a_client_that_goes_away_frees_its_row(two: Process) -> None:
    for _ in range(2 * ROWS + 1):
        with two.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}, headers={"x-session-id": "gone"}) as one:
            next(one.iter_lines())
    answer = two.http.post("/v1/completions", json=SHORT, headers={"x-session-id": "gone"}, timeout=SLOW)
    assert answer.status_code == 200

    began = time.monotonic()
    while running(two, "gone") and time.monotonic() - began < SLOW:
        time.sleep(0.1)
    assert running(two, "gone") == 0


def test_one_replica_is_killed_under_load_and_only_what_it_wrote_fails(two: Process) -> None:
    wanted = expected()
    wrong: list[str] = []
    right = 0
    killed, dead = asyncio.Event(), workers()[0].pid

    async def client(http: httpx.AsyncClient, number: int) -> None:
        nonlocal right
        left = 6  # answers after the death of the replica
        turn = number
        while left:
            prompt = DEFS[turn % len(DEFS)]
            turn += 1
            try:
                heard = await heard_at_last(http, {**SHORT, "prompt": prompt, "prompt_cache_key": f"client {number}"})
                assert heard.text == wanted[prompt]
                right += 1
            except (httpx.HTTPError, RuntimeError) as error:
                wrong.append(f"{type(error).__name__}: {error}")
            left -= killed.is_set()

    async def go() -> None:
        async with caller(two.url) as http:
            clients = [asyncio.create_task(client(http, number)) for number in range(2 * ROWS + 1)]
            while right < 10 and not any(one.done() for one in clients):  # none of them ends before, but by an error
                await asyncio.sleep(0.02)
            os.kill(dead, signal.SIGKILL)
            killed.set()
            await asyncio.gather(*clients)

    asyncio.run(asyncio.wait_for(go(), SLOW))
    assert right > 20
    assert len(wrong) <= ROWS, wrong
    assert all("the replica that wrote this has ended" in one for one in wrong), wrong
    began = time.monotonic()
    while len(new := {one.pid for one in workers()} - {dead}) < 2 and time.monotonic() - began < SLOW:
        time.sleep(0.1)
    assert len(new) == 2, "Serve starts another one"
    until(two, 2)


def test_a_cluster_without_enough_cpus_is_said(two: Process) -> None:
    """Asked of the cluster that runs, by its address and with its token."""
    said = " ".join(part for one in psutil.Process().children(recursive=True) for part in one.cmdline())
    address = said.partition("--gcs-address=")[2].split()[0]
    command = [sys.executable, "-m", "skipstone", "serve", "--ray", "--ray-address", address, "--replicas", "99"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=SLOW, env={**os.environ, **TOKEN})
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("skipstone: 99 replicas need 1 CPU and 0.0 GiB each, and the Ray cluster has room for ")
    assert replicas(two) == 2, "what runs there goes on"
