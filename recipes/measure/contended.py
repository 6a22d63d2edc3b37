"""What the native engine's threads are worth where other processes hold cores.

    python recipes/measure/contended.py [--rounds 12] [--new 96]

Plain greedy decoding of the bundled model by one thread and by as many as there are cores: with the cores free, with a process
that spins on one core, and with one that spins on each. All take turns, text by text. Prints a table in Markdown: tokens/s
and the rounds' ratios to one thread with free cores and to one with the same cores taken, each as the median and the range. The
native engine promises that several threads with a lost core are never slower than half of one. Measure on an idle machine: the
first line says the load before.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import skipstone
from skipstone.engines.native.threads import VARIABLE as THREADS
from skipstone.lab.tasks.data_sets import named

SPIN = "import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
SETTLES = 0.2  # seconds until what spins has its core


@contextmanager
def taken(cores: list[int]) -> Iterator[None]:
    """A process spins on each of these cores."""
    spinning = [subprocess.Popen([sys.executable, "-c", SPIN.format(core=core)]) for core in cores]
    time.sleep(SETTLES)
    try:
        yield
    finally:
        for one in spinning:
            one.kill()
            one.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--new", type=int, default=96)
    asked = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    counts = [1, len(cores)]
    loaded = {count: load(count) for count in counts}
    tokenizer = loaded[1][1]
    task = named("self")
    prompts = [tokenizer.encode(task.ask(row)[0]) for row in task.records(None)]
    places = {"none": [], f"core {cores[-1]}": cores[-1:], "every core": cores}
    speeds: dict[tuple[str, int], list[float]] = {(place, count): [] for place in places for count in counts}
    print(f"load {os.getloadavg()[0]:.2f}, {len(cores)} cores, {asked.rounds} rounds of {asked.new} tokens")
    for number in range(asked.rounds):
        for place, these in places.items():
            with taken(these):
                for count in counts if number % 2 else counts[::-1]:
                    speeds[place, count].append(decode(loaded[count][0], prompts[number % len(prompts)], asked.new))
    print("\n| taken | threads | tokens/s | x 1 thread, free | x 1 thread, same |\n| --- | --- | --- | --- | --- |")
    free = speeds["none", 1]
    for (place, count), found in speeds.items():
        pace = f"{statistics.median(found):.0f} ({min(found):.0f}-{max(found):.0f})"
        print(f"| {place} | {count} | {pace} | {beside(found, free)} | {beside(found, speeds[place, 1])} |")


def beside(found: list[float], other: list[float]) -> str:
    """The rounds' own ratios: the median and the range."""
    ratios = [a / b for a, b in zip(found, other, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def load(threads: int) -> tuple[Any, Any]:
    """The bundled model, whose native engine has this many threads from its first use on, and its tokenizer."""
    os.environ[THREADS] = str(threads)
    model, tokenizer = skipstone.load()
    model.generation_config.eos_token_id = None  # all texts are equally long
    decode(model, tokenizer.encode("Once"), 8)
    return model, tokenizer


def decode(model: Any, ids: list[int], new: int) -> float:
    """New tokens a second of one text, prefill included."""
    prompt, began = torch.tensor([ids]), time.perf_counter()
    options = {"engine": "native", "max_new_tokens": new, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    out = skipstone.generate(model, prompt, "autoregressive", **options)
    assert out.new_tokens is not None
    return len(out.new_tokens[0]) / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
