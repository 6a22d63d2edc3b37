"""`auto` where the machine changes under it: a core that is busy from half-way, one thread from half-way, a batch of one row,
of eight, and of one again. Of each half: x plain decoding, prompt by prompt in turns, and how often the drafter changed.

    python recipes/measure/nuisance.py [MODEL] --prompts FILE.jsonl [--count 24] [--new 100] [--dtype float32]

MODEL: a folder or hub id, the bundled model without it. FILE: lines with a "prompt".
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
    """Another process computes."""
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        other.kill()
        other.wait()


@contextmanager
def one_thread(model: Any) -> Iterator[None]:
    """The native engine, and its copy in int4, compute with one thread."""
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
    """Of one batch, prefill included."""
    longest = max(map(len, ids))
    padded = torch.stack([torch.nn.functional.pad(one, (longest - len(one), 0)) for one in ids])
    mask = torch.stack([torch.nn.functional.pad(torch.ones_like(one), (longest - len(one), 0)) for one in ids])
    stats = skipstone.generate(model, padded, method, attention_mask=mask, max_new_tokens=new, do_sample=False).stats
    assert stats is not None
    return stats.seconds + stats.seconds_prefill


def ratio(model: Any, batches: list[list[torch.Tensor]], method: Any, new: int) -> float:
    """Plain decoding's time over the method's, each batch in turns."""
    times = [0.0, 0.0]
    for turn, batch in enumerate(batches):
        for which in (0, 1) if turn % 2 else (1, 0):
            times[which] += seconds(model, batch, ("autoregressive", method)[which], new)
    return times[0] / times[1]


def switches(log: Path) -> tuple[int, float]:
    """Changes of the drafter in a log, and the tokens in which they were made."""
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
    asked = parser.parse_args()
    lines = asked.prompts.read_text(encoding="utf-8").splitlines()[: asked.count]
    print("| scenario | x plain before | x plain after | changes of the drafter per 1,000 tokens |\n| --- | --- | --- | --- |")
    for name in ("calm", "a busy core from half-way", "one thread from half-way", "1, then 8, then 1 rows"):
        model, tokenizer = skipstone.load(asked.model, dtype=getattr(torch, asked.dtype))
        prompts = [torch.tensor(tokenizer(json.loads(line)["prompt"])["input_ids"][-400:]) for line in lines]
        alone, half = [[one] for one in prompts], len(prompts) // 2
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "steps.jsonl"
            method = Auto(log=str(log), use_profile=False)
            before = ratio(model, alone[:half], method, asked.new)
            if name.startswith("a busy"):
                with busy_core():
                    after = ratio(model, alone[half:], method, asked.new)
            elif name.startswith("one"):
                with one_thread(model):
                    after = ratio(model, alone[half:], method, asked.new)
            elif name.startswith("1,"):
                eights = [prompts[start : start + 8] for start in range(0, len(prompts) - 7, 8)]
                eight = ratio(model, eights, method, asked.new)
                after = ratio(model, alone[half:], method, asked.new)
                print(f"| 8 rows | - | {eight:.2f} | - |")
            else:
                after = ratio(model, alone[half:], method, asked.new)
            count, tokens = switches(log)
        print(f"| {name} | {before:.2f} | {after:.2f} | {1000 * count / tokens:.1f} |", flush=True)


if __name__ == "__main__":
    main()
