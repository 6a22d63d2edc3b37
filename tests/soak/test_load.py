"""Many clients at once, for a while: every answer is the right one, and who goes away leaves nothing behind."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import httpx
import pytest

import skipstone
from skipstone.utils.limits import METHOD_STATE_BYTES
from tests.helpers.served import Busy, Process, caller, goes_away, hear, p95, serving

pytestmark = pytest.mark.soak

SECONDS = float(os.environ.get("SKIPSTONE_SOAK_SECONDS", "300"))
"""How long clients go on asking."""
CLIENTS = 50
GREEDY = (None, "off", "prompt_lookup", "auto", {"method": "layerskip", "exit_layer": 8})
"""What requests name, None where they name nothing: five methods, of which four have rows at a time."""
COUPLED = ("off", "prompt_lookup", "auto")
"""Methods that draw with the target's noise, so that a seed says what is drawn."""
LENGTHS = (1, 8, 24, 48, 96)
"""Tokens that are asked for."""
DISCONNECTED = 1000
MORE_MEMORY = 0.05
"""Share of the resident memory after a warm-up that clients who went may have added."""
KV_CACHE_BYTES = 256 << 20
"""What a server may take for keys and values while methods change with every request."""
SLACK_BYTES = 256 << 20
"""What allocators keep, and the draft model: beside everything that has a limit of its own."""
LOOPING = 4
"""Clients that loop over plain completions while a draft model is loaded."""
GOES = ("connecting", "half a request", "a request", "some text", "all")


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
    """Those that come with the package."""
    lines = (files("skipstone.assets") / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines]


def pool() -> list[Case]:
    """Of every prompt one request, greedy or, every third, drawn with a seed; methods and lengths in turns."""
    model, tokenizer = skipstone.load(None)
    greedy, coupled, lengths = itertools.cycle(GREEDY), itertools.cycle(COUPLED), itertools.cycle(LENGTHS)
    cases = []
    for number, prompt in enumerate(prompts()):
        most = next(lengths)
        drawn = number % 3 == 2
        options: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": number} if drawn else {}
        wanted = {"tokenizer": tokenizer, "max_new_tokens": most, "do_sample": drawn, **options}
        text = skipstone.generate(model, prompt, "autoregressive", **wanted).text
        assert isinstance(text, str)
        body = {"prompt": prompt, "max_tokens": most, "temperature": 0, **options, "stream_options": {"include_usage": True}}
        named = next(coupled) if drawn else next(greedy)
        cases.append(Case(body | ({} if named is None else {"speculative": named}), text))
    return cases


async def ask_on(http: httpx.AsyncClient, cases: Sequence[Case], draw: random.Random, until: float, seen: Seen) -> None:
    """A client with one request at a time. It obeys when it is told to wait."""
    while time.perf_counter() < until:
        case = draw.choice(cases)
        try:
            heard = await hear(http, case.body)
        except Busy as busy:
            seen.refused += 1
            await asyncio.sleep(busy.seconds)
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


def test_fifty_clients_that_stream_get_the_texts_of_generate_and_no_error_but_429() -> None:
    cases, seen = pool(), Seen()

    async def all_clients(url: str) -> None:
        until = time.perf_counter() + SECONDS
        async with caller(url) as http:
            draws = [random.Random(number) for number in range(CLIENTS)]
            await asyncio.gather(*(ask_on(http, cases, draw, until, seen) for draw in draws))

    with serving("--max-waiting", "24") as served:
        before = served.resident()
        asyncio.run(all_clients(served.url))
        served.until_idle()
        grown = served.resident() / before - 1
    print(f"\n{CLIENTS} clients, {SECONDS:g} s: {seen.answers} answers, {seen.tokens / SECONDS:.0f} tokens a second,")
    print(f"{seen.refused} times 429; 95 % of first pieces within {p95(seen.first):.2f} s, of gaps within", end=" ")
    print(f"{1000 * p95(seen.between):.0f} ms; memory {grown:+.1%} since the start")
    assert not seen.wrong, f"{len(seen.wrong)} of {seen.answers}, the first: {seen.wrong[0]}"
    assert seen.answers > CLIENTS
    assert seen.refused, "more clients than rows and places to wait: some have to be told to come again"


def settings() -> Iterator[dict[str, Any]]:
    """Ever new ones, of methods whose greedy text is that of plain decoding."""
    for count in itertools.count():
        yield {"method": "layerskip", "exit_layer": 2 + count % 11, "num_speculative_tokens": 1 + count % 16}
        yield {"method": "speculative", "num_speculative_tokens": 1 + count % 16}
        yield {"method": "lookahead", "window": 2 + count % 7, "ngram": 2 + count % 4, "guesses": 1 + count % 9}
        yield {"method": "recycle", "num_speculative_tokens": 1 + count % 32, "num_candidates": 1 + count % 8}
        yield {"method": "prompt_lookup", "num_speculative_tokens": 1 + count % 24}
        yield {"method": "jacobi", "block": 2 + count % 24}


def greedy_pool(dtype: str, count: int = 24) -> list[Case]:
    """Of some prompts one greedy request each, without a method."""
    model, tokenizer = skipstone.load(None, dtype=dtype)
    options = {"tokenizer": tokenizer, "max_new_tokens": 24, "do_sample": False}
    texts = {one: skipstone.generate(model, one, "autoregressive", **options).text for one in prompts()[:count]}
    body = {"max_tokens": 24, "temperature": 0, "stream_options": {"include_usage": True}}
    return [Case({"prompt": one, **body}, str(text)) for one, text in texts.items()]


class ChangingSettings(Sequence[Case]):
    """Requests of a pool, each with settings of its own."""

    def __init__(self, cases: list[Case]) -> None:
        self._cases, self._settings = cases, settings()

    def __len__(self) -> int:
        return len(self._cases)

    def __getitem__(self, place: Any) -> Any:
        case = self._cases[place]
        return Case({**case.body, "speculative": next(self._settings)}, case.text)


def test_settings_that_change_with_every_request_and_a_draft_model_loaded_under_load_take_bounded_memory() -> None:
    cases, seen = greedy_pool("bfloat16"), Seen()
    plain = [Case({**one.body, "speculative": "off"}, one.text) for one in cases]
    by_draft_model = [Case({**one.body, "speculative": "speculative"}, one.text) for one in cases]

    async def all_clients(url: str) -> None:
        now = time.perf_counter()
        async with caller(url) as http:
            looping = [ask_on(http, plain, random.Random(one), now + SECONDS, seen) for one in range(LOOPING)]
            loading = ask_on(http, by_draft_model, random.Random(-1), now + SECONDS, seen)
            changing = ask_on(http, ChangingSettings(cases), random.Random(-2), now + SECONDS, seen)
            await asyncio.gather(*looping, loading, changing)

    options = ("--dtype", "bfloat16", "--max-model-len", "1024", "--kv-cache-memory-bytes", str(KV_CACHE_BYTES))
    with serving(*options) as served:
        before = served.resident()
        asyncio.run(all_clients(served.url))
        served.until_idle()
        grown = served.resident() - before
    print(f"\n{seen.answers} answers in {SECONDS:g} s, settings change with every request: memory {grown / 2**20:+.0f} MiB")
    assert not seen.wrong, f"{len(seen.wrong)} of {seen.answers}, the first: {seen.wrong[0]}"
    assert seen.answers > LOOPING
    assert grown < KV_CACHE_BYTES + METHOD_STATE_BYTES + SLACK_BYTES


def leave(served: Process, count: int, draw: random.Random) -> None:
    """So many clients, 40 at a time, that go away at moments of all kinds; then until nobody is served any more."""

    async def all_clients() -> None:
        places = asyncio.Semaphore(40)

        async def one(number: int) -> None:
            body = {"prompt": draw.choice(texts), "max_tokens": draw.choice((1, 20, 200)), "stream": draw.random() < 0.7}
            body |= {"n": draw.choice((1, 1, 3)), "speculative": draw.choice(("off", "auto", "prompt_lookup"))}
            async with places:
                await goes_away(served.port, body, GOES[number % len(GOES)], draw.random())

        await asyncio.gather(*(one(number) for number in range(count)))

    texts = prompts()
    asyncio.run(all_clients())
    served.until_idle()


def test_a_thousand_clients_that_go_away_leave_no_row_taken_and_no_memory_behind() -> None:
    draw = random.Random(1)
    with serving("--max-waiting", "64") as served:
        leave(served, DISCONNECTED, draw)
        warm = served.resident()
        leave(served, DISCONNECTED, draw)
        grown = served.resident() / warm - 1
        print(f"\n{DISCONNECTED} clients went: {warm / 2**20:.0f} MiB before, {grown:+.2%} after")
        answer = served.http.post("/v1/completions", json={"prompt": "def f(", "max_tokens": 4, "temperature": 0})
        assert answer.status_code == 200
    assert grown < MORE_MEMORY
