"""A server under load: clients that stream, all at once, for a while.

    skipstone serve MODEL --port 8000 --max-waiting 256      # in another terminal; or llama.cpp's server
    python recipes/measure/serving.py --prompts FILE.jsonl [--url http://127.0.0.1:8000] [--clients 1 8 50] [--seconds 60]
        [--new 60] [--speculative off]

FILE: lines with a "prompt". Of every number of clients: tokens a second, milliseconds to the first token and between tokens
(median and 95th percentile), and errors. Every answer to a prompt has to be the same text as the first one to it: all are
greedy.
"""

import argparse
import asyncio
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx


@dataclass
class Seen:
    """What clients saw. texts: the first answer to every prompt. differing: later ones that were other texts."""

    tokens: int = 0
    answers: int = 0
    refused: int = 0
    differing: int = 0
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)


async def one_answer(client: httpx.AsyncClient, prompt: str, body: dict[str, Any], seen: Seen) -> None:
    """A streamed answer, and its times."""
    began, last, text = time.perf_counter(), None, ""
    async with client.stream("POST", "/v1/completions", json={**body, "prompt": prompt}) as response:
        if response.status_code == 429:
            seen.refused += 1
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
                seen.tokens += usage["completion_tokens"]
            if chunk["choices"] and chunk["choices"][0].get("text"):
                text += chunk["choices"][0]["text"]
                (seen.first if last is None else seen.between).append(now - (began if last is None else last))
                last = now
    seen.answers += 1
    seen.differing += seen.texts.setdefault(prompt, text) != text


async def load(url: str, prompts: list[str], clients: int, seconds: float, body: dict[str, Any]) -> tuple[Seen, float]:
    """So many clients, each with one request at a time."""
    seen, began = Seen(), time.perf_counter()

    async def client(number: int) -> None:
        turn = number
        async with httpx.AsyncClient(base_url=url, timeout=120) as http:
            while time.perf_counter() - began < seconds:
                try:
                    await one_answer(http, prompts[turn % len(prompts)], body, seen)
                except (httpx.HTTPError, RuntimeError) as error:
                    seen.errors.append(f"{type(error).__name__}: {error}")
                turn += 1

    await asyncio.gather(*(client(number) for number in range(clients)))
    return seen, time.perf_counter() - began


def told(values: list[float]) -> str:
    """Median and 95th percentile, in milliseconds."""
    if len(values) < 2:
        return "-"
    return f"{1000 * median(values):.0f} ({1000 * quantiles(values, n=20)[-1]:.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 50])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--new", type=int, default=60)
    parser.add_argument("--speculative")
    asked = parser.parse_args()
    prompts = [json.loads(line)["prompt"] for line in asked.prompts.read_text(encoding="utf-8").splitlines()]
    body = {"max_tokens": asked.new, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    body |= {"speculative": asked.speculative} if asked.speculative else {}
    columns = ("clients", "tokens a second", "to the first token, ms (p95)", "between chunks, ms (p95)")
    columns += ("answers", "429", "errors", "other texts")
    print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    for clients in asked.clients:
        seen, seconds = asyncio.run(load(asked.url, prompts, clients, asked.seconds, body))
        counts = f"{seen.answers} | {seen.refused} | {len(seen.errors)} | {seen.differing}"
        print(f"| {clients} | {seen.tokens / seconds:.0f} | {told(seen.first)} | {told(seen.between)} | {counts} |")
        for error in seen.errors[:3]:
            print(error)


if __name__ == "__main__":
    main()
