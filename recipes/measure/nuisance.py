"""Speed-up of `auto` while the machine changes: from half-way on with a busy core or one thread, or with batches of 1, 8 and 1
rows. For each half: the speed-up over plain decoding, prompt by prompt, and the number of changes of the drafter.

    python recipes/measure/nuisance.py [MODEL] --prompts FILE.jsonl [--count 24] [--new 100] [--dtype float32]

MODEL: a folder or hub id; default: the bundled model. FILE: lines with a "prompt".
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import skipstone
from skipstone.engines.model_runner import ModelRunner
from skipstone.lab.inspect.policy_replay import replay_decisions
from skipstone.methods.auto.auto import Auto


@contextmanager
def busy_core() -> Iterator[None]:
    """Run another process that computes."""
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        other.kill()
        other.wait()


@contextmanager
def one_thread(model: Any) -> Iterator[None]:
    """Limit the native engine and its int4 copy to one thread."""
    runner = ModelRunner(model)
    engines: list[Any] = [runner.engine, runner.in_fewer_bits("int4").engine]
    before = [one.threads for one in engines]
    try:
        for one in engines:
            one.threads = 1
        yield
    finally:
        for one, threads in zip(engines, before, strict=True):
            one.threads = threads


def seconds(model: Any, ids: list[torch.Tensor], method: Any, new: int) -> float:
    """Seconds of one batch, including the prefill."""
    longest = max(map(len, ids))
    padded = torch.stack([torch.nn.functional.pad(one, (longest - len(one), 0)) for one in ids])
    mask = torch.stack([torch.nn.functional.pad(torch.ones_like(one), (longest - len(one), 0)) for one in ids])
    stats = skipstone.generate(model, padded, method, attention_mask=mask, max_new_tokens=new, do_sample=False).stats
    assert stats is not None
    return stats.seconds + stats.seconds_prefill


def speed_up(model: Any, batches: list[list[torch.Tensor]], method: Any, new: int) -> float:
    """Plain decoding's time over the method's; both alternate batch by batch."""
    times = [0.0, 0.0]
    for turn, batch in enumerate(batches):
        for index in (0, 1) if turn % 2 else (1, 0):
            times[index] += seconds(model, batch, ("autoregressive", method)[index], new)
    return times[0] / times[1]


def switches(log: Path) -> tuple[int, float]:
    """(changes of the drafter in a log, tokens of the log)."""
    count, tokens, last = 0, 0.0, None
    for one in replay_decisions(log, time.perf_counter):
        count, last = count + (one.again.current != last), one.again.current
        tokens += one.tokens
    return count, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--new", type=int, default=100)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    lines = args.prompts.read_text(encoding="utf-8").splitlines()[: args.count]
    print("| scenario | x plain before | x plain after | changes of the drafter per 1,000 tokens |\n| --- | --- | --- | --- |")
    for name in ("calm", "a busy core from half-way", "one thread from half-way", "1, then 8, then 1 rows"):
        model, tokenizer = skipstone.load(args.model, dtype=getattr(torch, args.dtype))
        prompts = [torch.tensor(tokenizer(json.loads(line)["prompt"])["input_ids"][-400:]) for line in lines]
        single_prompts, half = [[one] for one in prompts], len(prompts) // 2
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "steps.jsonl"
            method = Auto(log=str(log), use_profile=False)
            before = speed_up(model, single_prompts[:half], method, args.new)
            if name.startswith("a busy"):
                with busy_core():
                    after = speed_up(model, single_prompts[half:], method, args.new)
            elif name.startswith("one"):
                with one_thread(model):
                    after = speed_up(model, single_prompts[half:], method, args.new)
            elif name.startswith("1,"):
                batches_of_eight = [prompts[start : start + 8] for start in range(0, len(prompts) - 7, 8)]
                speed_up_of_eight = speed_up(model, batches_of_eight, method, args.new)
                after = speed_up(model, single_prompts[half:], method, args.new)
                print(f"| 8 rows | - | {speed_up_of_eight:.2f} | - |")
            else:
                after = speed_up(model, single_prompts[half:], method, args.new)
            count, tokens = switches(log)
        print(f"| {name} | {before:.2f} | {after:.2f} | {1000 * count / tokens:.1f} |", flush=True)


if __name__ == "__main__":
    main()
