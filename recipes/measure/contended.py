"""Speed of the native engine's threads while other processes use cores.

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

SPIN_PROGRAM = "import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
SETTLE_SECONDS = 0.2  # until spinning processes have their cores


@contextmanager
def spinning_processes(cores: list[int]) -> Iterator[None]:
    """Run a spinning process on each of these cores."""
    processes = [subprocess.Popen([sys.executable, "-c", SPIN_PROGRAM.format(core=core)]) for core in cores]
    time.sleep(SETTLE_SECONDS)
    try:
        yield
    finally:
        for one in processes:
            one.kill()
            one.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--new", type=int, default=96)
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    counts = [1, len(cores)]
    loaded = {count: load(count) for count in counts}
    tokenizer = loaded[1][1]
    task = named("self")
    prompts = [tokenizer.encode(task.ask(row)[0]) for row in task.records(None)]
    core_sets = {"none": [], f"core {cores[-1]}": cores[-1:], "every core": cores}
    speeds: dict[tuple[str, int], list[float]] = {(cores_name, count): [] for cores_name in core_sets for count in counts}
    print(f"load {os.getloadavg()[0]:.2f}, {len(cores)} cores, {args.rounds} rounds of {args.new} tokens")
    for round_number in range(args.rounds):
        for cores_name, busy_cores in core_sets.items():
            with spinning_processes(busy_cores):
                for count in counts if round_number % 2 else counts[::-1]:
                    speeds[cores_name, count].append(decode(loaded[count][0], prompts[round_number % len(prompts)], args.new))
    print("\n| taken | threads | tokens/s | x 1 thread, free | x 1 thread, same |\n| --- | --- | --- | --- | --- |")
    free_speeds = speeds["none", 1]
    for (cores_name, count), cell_speeds in speeds.items():
        speed_range = f"{statistics.median(cell_speeds):.0f} ({min(cell_speeds):.0f}-{max(cell_speeds):.0f})"
        ratios = f"{format_ratios(cell_speeds, free_speeds)} | {format_ratios(cell_speeds, speeds[cores_name, 1])}"
        print(f"| {cores_name} | {count} | {speed_range} | {ratios} |")


def format_ratios(speeds: list[float], other: list[float]) -> str:
    """The ratios of the rounds: median and range."""
    ratios = [a / b for a, b in zip(speeds, other, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def load(threads: int) -> tuple[Any, Any]:
    """The bundled model, its native engine with this number of threads, and the tokenizer."""
    os.environ[THREADS] = str(threads)
    model, tokenizer = skipstone.load()
    model.generation_config.eos_token_id = None  # all texts are equally long
    decode(model, tokenizer.encode("Once"), 8)
    return model, tokenizer


def decode(model: Any, ids: list[int], new: int) -> float:
    """New tokens per second of one text, including its prefill."""
    prompt, began = torch.tensor([ids]), time.perf_counter()
    options = {"engine": "native", "max_new_tokens": new, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    out = skipstone.generate(model, prompt, "autoregressive", **options)
    assert out.new_tokens is not None
    return len(out.new_tokens[0]) / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
