"""Many clients at once, for a while: every answer is the right one, and who goes away leaves nothing behind."""

import asyncio
import itertools
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest

import skipstone
from skipstone.engines.native.threads import VARIABLE
from skipstone.utils.limits import METHOD_STATE_BYTES
from tests.helpers.served import Busy, Process, caller, goes_away, hear, p95, serving

pytestmark = pytest.mark.soak

SECONDS = float(os.environ.get("SKIPSTONE_SOAK_SECONDS", "300"))
CLIENTS = 50
GREEDY = (None, "off", "prompt_lookup", "auto", {"method": "layerskip", "exit_layer": 8})
"""What requests name, None where they name nothing: five methods, of which four have rows at a time."""
COUPLED = ("off", "prompt_lookup", "auto")
"""Methods that draw with the target's noise, so that a seed says what is drawn."""
DISCONNECTED = 1000
MORE_MEMORY = 0.05
"""Share of the resident memory after a warm-up that clients who went may have added."""
KV_CACHE_BYTES = 256 << 20
"""What a server may take for keys and values while methods change with every request."""
SLACK_BYTES = 256 << 20
"""What allocators keep, and the draft model: beside everything that has a limit of its own."""
DISTURBED_CLIENTS = 6
LOOPING = 4
"""Clients that loop over plain completions while a draft model is loaded."""


@dataclass
class Case:
    """A request and the text that `skipstone.generate` writes for it."""

    body: dict[str, Any]
    text: str


@dataclass
class Seen:
    """What all clients together have seen. first, between: seconds to the first piece of text, and between two."""

    answers: int = 0
    refused: int = 0
    tokens: int = 0
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def prompts() -> list[str]:
    lines = (files("skipstone.assets") / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines]


def pool(methods: Sequence[Any] = GREEDY, lengths: Sequence[int] = (1, 8, 24, 48, 96), **loading: Any) -> list[Case]:
    """Of every prompt one request, greedy or, every third if there are several methods, drawn with a seed."""
    model, tokenizer = skipstone.load(None, **loading)
    cases = []
    for number, prompt in enumerate(prompts()):
        options: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": number}
        draws = number % 3 == 2 and len(methods) > 1
        options, new = options if draws else {}, lengths[number % len(lengths)]
        wanted = {"tokenizer": tokenizer, "max_new_tokens": new, "do_sample": draws, **options}
        text = skipstone.generate(model, prompt, "autoregressive", **wanted).text
        body = {"prompt": prompt, "max_tokens": new, "temperature": 0, **options, "stream_options": {"include_usage": True}}
        method = COUPLED[number % len(COUPLED)] if draws else methods[number % len(methods)]
        cases.append(Case(body | ({} if method is None else {"speculative": method}), str(text)))
    return cases


async def ask_on(http: httpx.AsyncClient, cases: Iterator[Case], until: float, seen: Seen) -> None:
    """A client with one request at a time. It obeys when it is told to wait."""
    while time.perf_counter() < until:
        case = next(cases)
        try:
            heard = await hear(http, case.body)
        except Busy as busy:
            seen.refused += 1
            await asyncio.sleep(*busy.args)
            continue
        except (httpx.HTTPError, RuntimeError) as error:
            seen.wrong.append(f"{type(error).__name__}: {error}, asked {case.body}")
            continue
        seen.answers += 1
        seen.tokens += heard.usage["completion_tokens"]
        seen.between += heard.gaps
        seen.first += [heard.arrived[0] - heard.began] if heard.arrived else []
        if heard.text != case.text:
            seen.wrong.append(f"{heard.text!r}, and not {case.text!r}, asked {case.body}")


async def ask_all(url: str, clients: Sequence[Iterator[Case]], seen: Seen) -> None:
    """All clients at once, for SECONDS."""
    until = time.perf_counter() + SECONDS
    async with caller(url) as http:
        await asyncio.gather(*(ask_on(http, cases, until, seen) for cases in clients))


def drawn(cases: Sequence[Case], seed: int) -> Iterator[Case]:
    draw = random.Random(seed)
    while True:
        yield draw.choice(cases)


def test_fifty_clients_that_stream_get_the_texts_of_generate_and_no_error_but_429() -> None:
    cases, seen = pool(), Seen()
    with serving("--max-waiting", "24") as served:
        before = served.resident()
        asyncio.run(ask_all(served.url, [drawn(cases, number) for number in range(CLIENTS)], seen))
        served.until_idle()
        grown = served.resident() / before - 1
    print(f"\n{CLIENTS} clients, {SECONDS:g} s: {seen.answers} answers, {seen.tokens / SECONDS:.0f} tokens a second,")
    print(f"{seen.refused} times 429; 95 % of first pieces within {p95(seen.first):.2f} s, of gaps within", end=" ")
    print(f"{1000 * p95(seen.between):.0f} ms; memory {grown:+.1%} since the start")
    assert not seen.wrong, f"{len(seen.wrong)} of {seen.answers}, the first: {seen.wrong[0]}"
    assert seen.answers > CLIENTS
    assert seen.refused, "more clients than rows and places to wait: some have to be told to come again"


def disturb(served: Process, over: threading.Event) -> int:
    """Until `over`, processes that compute come and go, and the server may use one CPU or all. Returns how many came."""
    draw, cpus, started = random.Random(3), os.sched_getaffinity(0), 0
    while not over.is_set():
        affinity = draw.choice([cpus, {draw.choice(sorted(cpus))}])
        set_affinity(served, affinity)
        spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(draw.randint(1, 2 * len(cpus)))]
        started += len(spinning)
        over.wait(draw.choice([0.1, 0.5, 2.0]))
        for one in spinning:
            one.kill()
            one.wait()
        set_affinity(served, cpus)
        over.wait(draw.choice([0.1, 0.5, 2.0]))
    return started


def set_affinity(served: Process, cpus: set[int]) -> None:
    for thread in Path(f"/proc/{served.running.pid}/task").iterdir():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cpus)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="affinities are Linux's")
@pytest.mark.parametrize("threads", ["", "5"])
def test_texts_are_the_same_while_cores_and_threads_come_and_go(threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cases, seen, over, started = pool(), Seen(), threading.Event(), list[int]()
    monkeypatch.setenv(VARIABLE, threads)
    with serving("--max-waiting", "24") as served:
        disturbing = threading.Thread(target=lambda: started.append(disturb(served, over)))
        disturbing.start()
        try:
            asyncio.run(ask_all(served.url, [drawn(cases, number) for number in range(DISTURBED_CLIENTS)], seen))
        finally:
            over.set()
            disturbing.join()
        served.until_idle()
    print(f"\n{sum(started)} processes came and went: {seen.answers} answers, {seen.tokens / SECONDS:.0f} tokens a second")
    assert not seen.wrong, f"{len(seen.wrong)} of {seen.answers}, the first: {seen.wrong[0]}"
    assert seen.answers > DISTURBED_CLIENTS
    assert sum(started) > 1


def settings() -> Iterator[dict[str, Any]]:
    """Ever new ones, of methods whose greedy text is that of plain decoding."""
    for count in itertools.count():
        yield {"method": "layerskip", "exit_layer": 2 + count % 11, "num_speculative_tokens": 1 + count % 16}
        yield {"method": "speculative", "num_speculative_tokens": 1 + count % 16}
        yield {"method": "lookahead", "window": 2 + count % 7, "ngram": 2 + count % 4, "guesses": 1 + count % 9}
        yield {"method": "recycle", "num_speculative_tokens": 1 + count % 32, "num_candidates": 1 + count % 8}
        yield {"method": "prompt_lookup", "num_speculative_tokens": 1 + count % 24}
        yield {"method": "jacobi", "block": 2 + count % 24}


def test_settings_that_change_with_every_request_and_a_draft_model_loaded_under_load_take_bounded_memory() -> None:
    cases, seen = pool([None], [24], dtype="bfloat16"), Seen()

    def by(method: Any) -> Iterator[Case]:
        return (Case({**case.body, "speculative": method}, case.text) for case in drawn(cases, 0))

    pairs = zip(drawn(cases, 1), settings(), strict=False)
    changing = (Case({**case.body, "speculative": method}, case.text) for case, method in pairs)
    clients = [*(by("off") for _ in range(LOOPING)), by("speculative"), changing]
    options = ("--dtype", "bfloat16", "--max-model-len", "1024", "--kv-cache-memory-bytes", str(KV_CACHE_BYTES))
    with serving(*options) as served:
        before = served.resident()
        asyncio.run(ask_all(served.url, clients, seen))
        served.until_idle()
        grown = served.resident() - before
    print(f"\n{seen.answers} answers in {SECONDS:g} s, settings change with every request: memory {grown / 2**20:+.0f} MiB")
    assert not seen.wrong, f"{len(seen.wrong)} of {seen.answers}, the first: {seen.wrong[0]}"
    assert seen.answers > LOOPING
    assert grown < KV_CACHE_BYTES + METHOD_STATE_BYTES + SLACK_BYTES


def test_a_thousand_clients_that_go_away_leave_no_row_taken_and_no_memory_behind() -> None:
    draw, texts = random.Random(1), prompts()
    moments = itertools.cycle(("connecting", "half a request", "a request", "some text", "all"))

    async def all_clients(port: int) -> None:
        places = asyncio.Semaphore(40)

        async def one() -> None:
            body = {"prompt": draw.choice(texts), "max_tokens": draw.choice((1, 20, 200)), "stream": draw.random() < 0.7}
            body |= {"n": draw.choice((1, 1, 3)), "speculative": draw.choice(("off", "auto", "prompt_lookup"))}
            async with places:
                await goes_away(port, body, next(moments), draw.random())

        await asyncio.gather(*(one() for _ in range(DISCONNECTED)))

    with serving("--max-waiting", "64") as served:
        resident = []
        for _ in range(2):
            asyncio.run(all_clients(served.port))
            served.until_idle()
            resident.append(served.resident())
        grown = resident[1] / resident[0] - 1
        print(f"\n{DISCONNECTED} clients went: {resident[0] / 2**20:.0f} MiB before, {grown:+.2%} after")
        answer = served.http.post("/v1/completions", json={"prompt": "def f(", "max_tokens": 4, "temperature": 0})
        assert answer.status_code == 200
    assert grown < MORE_MEMORY
