"""How much longer `auto` takes than plain decoding for the first request of a fresh process.

    python recipes/measure/first_request.py [--models nano FOLDER ...] [--tokens 30 64 256] [--modes greedy sampled]
        [--caches empty filled] [--runs 20] [--method auto]

Every request runs in a process of its own, and the two methods take turns. Two times are compared: from the start of the
process and from the call, each to the last token. The method may take 1.05 times as long as plain decoding and 10 ms. An empty
cache is empty for every process. `skipstone tune` fills the other one before. Prints a Markdown table of medians over all
pairs of processes that ran one after the other, because a virtual machine's speed changes from minute to minute. The last
column has what is left of the allowed time, the smaller of both, in milliseconds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import NamedTuple

from skipstone.decoding.request import generation_options
from skipstone.engines.mapped_loading import load_for_decoding
from skipstone.utils.processor_watch import ProcessorWatch, busy_warning

PROMPT, SEED = "The capital of France is", 7
SHARE, SECONDS = 1.05, 0.010
TUNE_SECONDS = "20"


class Times(NamedTuple):
    """Seconds to the last token, and the share of its time that the process waited for a processor."""

    from_start: float
    from_call: float
    waited_share: float


def decode_once(model: str, method: str, tokens: int, mode: str, started: float) -> None:
    """Decode one request and print its `Times`. started: the process's start in seconds of `time.perf_counter`."""
    import torch

    import skipstone

    with ProcessorWatch() as watch:
        loaded, tokenizer = load_for_decoding(None if model == "nano" else model)
        temperature = 0.0 if mode == "greedy" else 1.0
        options = generation_options(max_new_tokens=tokens, temperature=temperature, ignore_eos=True)
        ids = torch.tensor([tokenizer(PROMPT)["input_ids"]], dtype=torch.int64)
        options["attention_mask"] = torch.ones_like(ids)
        called = last = time.perf_counter()
        for _ in skipstone.stream(loaded, ids, method, tokenizer=tokenizer, seed=SEED, **options):
            last = time.perf_counter()
    print(json.dumps([last - started, last - called, watch.waited_share or 0.0]))


def timed(arguments: list[str], cache: Path | None) -> Times:
    """One request in a new process. cache: None for an empty one."""
    with tempfile.TemporaryDirectory() as empty:
        environment = os.environ | {"SKIPSTONE_CACHE": str(cache or empty)}
        command = [sys.executable, __file__, "--request", *arguments, str(time.perf_counter())]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return Times(*json.loads(done.stdout.splitlines()[-1]))


def fill(cache: Path, model: str) -> None:
    """Make a copy of the weights, and learn."""
    command = [sys.executable, "-m", "skipstone", "tune", *([] if model == "nano" else [model]), "--prompt", PROMPT]
    environment = os.environ | {"SKIPSTONE_CACHE": str(cache)}
    subprocess.run([*command, "--budget-seconds", TUNE_SECONDS], env=environment, check=True, stdout=sys.stderr)


def compare(asked: argparse.Namespace, folder: Path) -> list[float]:
    """Print a line for every combination. Returns the waited shares of all processes."""
    from skipstone.lab.timing.machine import cpu  # which imports transformers; `skipstone generate` does not

    print(f"{cpu()}, {os.cpu_count()} processors, {asked.runs} processes of each; s from the start, and from the call\n")
    columns = [f"{since}, {side}" for since in ("start", "call") for side in ("plain", "method", "ratio")]
    print(f"| {' | '.join(['model', 'cache', 'tokens', 'mode', *columns, 'ms left'])} |\n|{' --- |' * 11}", flush=True)
    waited, filled = list[float](), dict[str, Path]()
    for model, cache, tokens, mode in product(asked.models, asked.caches, asked.tokens, asked.modes):
        if cache == "filled" and model not in filled:
            fill(place := folder / model.replace("/", "_"), model)
            filled[model] = place
        methods = "autoregressive", asked.method
        found: dict[str, list[Times]] = {method: [] for method in methods}
        for _, method in product(range(asked.runs), methods):
            found[method].append(timed([model, method, str(tokens), mode], filled[model] if cache == "filled" else None))
        cells, left = list[str](), list[float]()
        for place in (0, 1):
            pairs = [tuple(times[place] for times in pair) for pair in zip(*found.values(), strict=True)]
            cells += [f"{statistics.median(column):.3f}" for column in zip(*pairs, strict=True)]
            cells.append(f"{statistics.median(own / plain for plain, own in pairs):.3f}")
            left.append(statistics.median(SHARE * plain + SECONDS - own for plain, own in pairs))
        waited += [times.waited_share for one in found.values() for times in one]
        cells.append(f"{1000 * min(left):.1f}")
        print(f"| {Path(model).name} | {cache} | {tokens} | {mode} | {' | '.join(cells)} |", flush=True)
    return waited


def main() -> None:
    if sys.argv[1:2] == ["--request"]:
        model, method, tokens, mode, started = sys.argv[2:]
        decode_once(model, method, int(tokens), mode, float(started))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["nano"], help="nano, or folders")
    parser.add_argument("--tokens", nargs="*", type=int, default=[30, 64, 256])
    parser.add_argument("--modes", nargs="*", default=["greedy", "sampled"], choices=["greedy", "sampled"])
    parser.add_argument("--caches", nargs="*", default=["empty", "filled"], choices=["empty", "filled"])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--method", default="auto")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        waited = compare(asked, Path(folder))
    if (warning := busy_warning(statistics.median(waited))) is not None:
        print(f"\n{warning}")


if __name__ == "__main__":
    main()
