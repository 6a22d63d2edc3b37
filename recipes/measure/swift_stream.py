"""SWIFT along a stream of prompts beside plain decoding: what it costs while it searches, what is left of that afterwards.

    python recipes/measure/swift_stream.py PROMPTS... [--model PATH] [--tokens 64] [--windows 10] [--setting NAME=VALUE ...]

PROMPTS: .jsonl files with a "prompt", taken in turns. Every prompt is continued by both, one right after the other, in changing
order. Speed is decoding without the prefill. "search": judging and timing passes, proposals. "bookkeeping": what SWIFT's state
does at every step but for timing passes, proposals again among it. "rest": what a step has besides passes more than a plain
one, verifying a tree and keeping what was written among it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

import skipstone
from skipstone import Autoregressive, Swift
from skipstone.methods.swift.state import SwiftState
from skipstone.methods.swift.timings import Timings


class Watch:
    """Seconds inside some functions, without those inside others that they call."""

    def __init__(self) -> None:
        self.seconds, self.inside = 0.0, False

    def on(self, kind: type, name: str, counted: bool = True) -> None:
        """Watch a method of a class from now on."""
        plain: Callable[..., Any] = getattr(kind, name)

        def watched(*given: Any, **more: Any) -> Any:
            if self.inside is counted:
                return plain(*given, **more)
            self.inside, began = counted, time.perf_counter()
            try:
                return plain(*given, **more)
            finally:
                self.inside = not counted
                self.seconds += (1 if counted else -1) * (time.perf_counter() - began)

        setattr(kind, name, watched)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path, nargs="+")
    parser.add_argument("--model", default=None)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--windows", type=int, default=10)
    parser.add_argument("--setting", action="append", default=[])
    given = parser.parse_args()
    warnings.simplefilter("ignore", RuntimeWarning)  # a slow request is what this looks for
    model, tokenizer = skipstone.load(given.model)
    swift = Swift(**{name: yaml.safe_load(value) for name, _, value in (one.partition("=") for one in given.setting)})
    files = [[json.loads(line)["prompt"] for line in path.read_text().splitlines()] for path in given.prompts]
    texts = [text for turn in itertools.zip_longest(*files) for text in turn if text is not None]
    parts: list[dict[str, Any]] = []
    watch = Watch()
    for name in ("time_pass", "candidate", "most_drafts", "leaves", "record", "evaluated"):
        watch.on(SwiftState, name)
    watch.on(Timings, "time_next", counted=False)
    for index, text in enumerate(texts):
        ids = tokenizer(text, return_tensors="pt")["input_ids"][0][:512]
        order = [("plain", Autoregressive()), ("swift", swift)]
        part: dict[str, Any] = {}
        watch.seconds = 0.0
        for name, method in order if index % 2 else reversed(order):
            out = skipstone.generate(model, ids, method, max_new_tokens=given.tokens, do_sample=False)
            assert out.new_tokens is not None
            part[name] = (out.new_tokens[0], out.stats)
        if part["plain"][0] != part["swift"][0]:
            print(f"prompt {index}: the texts differ; `skipstone check` tells a tie from a bug")
        part["own"] = watch.seconds
        part["known"] = swift.report(model)
        parts.append(part)
    print("| tokens | evaluations | searching | steps that drafted | x plain | search | bookkeeping | rest |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    size = -(-len(parts) // given.windows)
    for first in range(0, len(parts), size):
        print(row(parts[first : first + size], sum(one["swift"][1].tokens for one in parts[: first + size])))
    print(row(parts, "all"))


def row(parts: list[dict[str, Any]], until: Any) -> str:
    """One line of the table, of some prompts."""
    mine, base = ([part[name][1] for part in parts] for name in ("swift", "plain"))
    seconds, tokens = sum(one.seconds for one in mine), sum(one.tokens for one in mine)
    plain = sum(one.seconds for one in base) / sum(one.tokens for one in base)
    search = sum(one.seconds_search for one in mine) / seconds
    own = sum(part["own"] for part in parts) / seconds
    plain_rest = sum(one.seconds_other for one in base) / sum(one.turns for one in base)
    rest = sum(one.seconds_other - plain_rest * one.turns for one in mine) / seconds
    drafted = sum(one.drafting for one in mine) / sum(one.steps for one in mine)
    known = parts[-1]["known"]
    return (
        f"| {until} | {known['evaluations']} | {'yes' if known['searching'] else 'no'} | {100 * drafted:.0f} % "
        f"| {plain * tokens / seconds:.2f} | {100 * search:.1f} % | {100 * own:.1f} % | {100 * rest:.1f} % |"
    )


if __name__ == "__main__":
    main()
