"""Speed and latency of servers under load by concurrent streaming clients.

    skipstone serve MODEL --port 8000 --max-waiting 256      # in another terminal; or llama.cpp's server
    python recipes/measure/serving.py --prompts FILE.jsonl [--url http://127.0.0.1:8000 ...] [--clients 1 8 50] [--seconds 20]
        [--rounds 3] [--new 60] [--speculative off] [--tokenizer FOLDER] [--fresh 0.5]

FILE: lines with a "prompt". FOLDER: a tokenizer's; prompts are then sent as token ids, equal for every server. --fresh: share
of the requests that get a random first line, so that no server knows their prompts. The servers take turns, --seconds for
each number of clients in every round, and get the same requests. A server that has answered a run needs another --seed. Prints
for every number of clients and server: tokens per second (median of the rounds and range), milliseconds to the first token, per
further token and between chunks (median and 95th percentile), and errors. All answers are greedy, so each answer to a prompt
must equal the server's first one.
"""

import argparse
import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx
from transformers import AutoTokenizer


@dataclass
class ClientStatistics:
    """Measurements of all clients of a server. speeds: tokens per second of every round. first, each, between: seconds to the
    first token of an answer, per further token, and between its chunks. texts: the first answer to every prompt. differing:
    number of later answers with another text."""

    tokens: int = 0
    speeds: list[float] = field(default_factory=list)
    answers: int = 0
    refused: int = 0
    differing: int = 0
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    each: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    texts: dict[Any, str] = field(default_factory=dict)


Prompt = str | tuple[int, ...]
Encode = Callable[[str], Prompt]


async def one_answer(client: httpx.AsyncClient, prompt: Prompt, body: dict[str, Any], results: ClientStatistics) -> None:
    """Stream one answer and record its times."""
    began, text = time.perf_counter(), ""
    arrivals: list[float] = []  # times of chunks with text
    tokens = 0
    async with client.stream("POST", "/v1/completions", json={**body, "prompt": prompt}) as response:
        if response.status_code == 429:
            results.refused += 1
            await asyncio.sleep(float(response.headers.get("Retry-After", 1)))
            return
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data:") or line.endswith("[DONE]"):
                continue
            chunk, now = json.loads(line[5:]), time.perf_counter()
            if "error" in chunk:
                raise RuntimeError(str(chunk["error"]))
            if usage := chunk.get("usage"):
                tokens = usage["completion_tokens"]
            if chunk["choices"] and chunk["choices"][0].get("text"):
                text += chunk["choices"][0]["text"]
                arrivals.append(now)
    results.answers += 1
    results.tokens += tokens
    results.first += [one - began for one in arrivals[:1]]
    results.between += [after - before for before, after in pairwise(arrivals)]
    results.each += [(arrivals[-1] - arrivals[0]) / (tokens - 1)] if len(arrivals) > 1 else []
    results.differing += results.texts.setdefault(prompt, text) != text


async def load(
    results: ClientStatistics,
    url: str,
    clients: int,
    prompts: list[Prompt],
    encode: Encode,
    seed: str,
    asked: argparse.Namespace,
) -> None:
    """Run clients, each with one request at a time, and add their measurements."""
    began, tokens = time.perf_counter(), results.tokens
    body = {"max_tokens": asked.new, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    body |= {"speculative": asked.speculative} if asked.speculative else {}

    async def client(number: int) -> None:
        turn, numbers = number, random.Random(f"{seed} {number}")
        limits = httpx.Limits(max_keepalive_connections=0)  # some servers close a connection after a hundred requests
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
            while time.perf_counter() - began < asked.seconds:
                prompt: Any = prompts[turn % len(prompts)]
                if numbers.random() < asked.fresh:
                    prompt = encode(f"{numbers.getrandbits(32)}\n") + prompt
                try:
                    await one_answer(http, prompt, body, results)
                except (httpx.HTTPError, RuntimeError) as error:
                    results.errors.append(f"{type(error).__name__}: {error}")
                turn += 1

    await asyncio.gather(*(client(number) for number in range(clients)))
    results.speeds.append((results.tokens - tokens) / (time.perf_counter() - began))


def format_milliseconds(values: list[float]) -> str:
    """Median and 95th percentile, in milliseconds."""
    if len(values) < 2:
        return "-"
    return f"{1000 * median(values):.1f} ({1000 * quantiles(values, n=20)[-1]:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", nargs="+", default=["http://127.0.0.1:8000"])
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 50])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new", type=int, default=60)
    parser.add_argument("--speculative")
    parser.add_argument("--tokenizer")
    parser.add_argument("--fresh", type=float, default=0.0)
    parser.add_argument("--seed", default="0")
    asked = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(asked.tokenizer) if asked.tokenizer else None

    def encode(text: str) -> Prompt:
        return tuple(tokenizer(text)["input_ids"]) if tokenizer else text

    prompts = [encode(json.loads(line)["prompt"]) for line in asked.prompts.read_text(encoding="utf-8").splitlines()]
    columns = ("clients", "server", "tokens/s", "to the first token, ms (p95)", "each further one", "between chunks")
    columns += ("answers", "429", "errors", "other texts")
    print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    for num_clients in asked.clients:
        of_servers = {url: ClientStatistics() for url in asked.url}
        for number in range(asked.rounds):
            seed = f"{asked.seed} {num_clients} {number}"
            for url, results in of_servers.items():
                asyncio.run(load(results, url, num_clients, prompts, encode, seed, asked))
        for url, results in of_servers.items():
            speeds = f"{median(results.speeds):.0f} ({min(results.speeds):.0f}-{max(results.speeds):.0f})"
            counts = f"{results.answers} | {results.refused} | {len(results.errors)} | {results.differing}"
            times = " | ".join(format_milliseconds(each) for each in (results.first, results.each, results.between))
            print(f"| {num_clients} | {url} | {speeds} | {times} | {counts} |", flush=True)
            for error in results.errors[:3]:
                print(error)


if __name__ == "__main__":
    main()
