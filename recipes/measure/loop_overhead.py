"""What a step of the loop costs outside the model's layers: drafting, verification, bookkeeping, transfers.

    python recipes/measure/loop_overhead.py [--layers 10 --hidden 64 --tokens 128 --rounds 8]

A small Llama with random weights decodes plainly, with LayerSkip, with self-speculative drafts and with prompt lookup. The time
in the model's layers, embedding and head is taken away from that of the call; what is left is divided by the number of turns.
Two checkouts are compared by running the script in turns with PYTHONPATH=OTHER/src. Prints a table in Markdown and, as its last
line, one JSON document: the smallest and the median milliseconds a turn over the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import skipstone
from skipstone import LayeredModel

METHODS: dict[str, dict[str, Any]] = {
    "autoregressive": {},
    "layerskip": {"exit_layer": 3, "num_speculative_tokens": 4},
    "self_speculative": {"skip_attention": (2, 4, 6), "skip_mlp": (3, 5), "num_speculative_tokens": 4},
    "prompt_lookup": {},
}
INSIDE = ("run", "embed", "logits")
"""Calls of `LayeredModel` whose time is the model's own."""


def model(layers: int, hidden: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).eval()


@contextmanager
def clocked() -> Iterator[list[float]]:
    """Add up the seconds inside the model; nested calls count once."""
    seconds, depth, own = [0.0], [0], {name: getattr(LayeredModel, name) for name in INSIDE}

    def timed(call: Any) -> Any:
        def around(*given: Any, **more: Any) -> Any:
            depth[0] += 1
            began = time.perf_counter()
            try:
                return call(*given, **more)
            finally:
                depth[0] -= 1
                if not depth[0]:
                    seconds[0] += time.perf_counter() - began

        return around

    for name, call in own.items():
        setattr(LayeredModel, name, timed(call))
    try:
        yield seconds
    finally:
        for name, call in own.items():
            setattr(LayeredModel, name, call)


def outside(network: LlamaForCausalLM, method: dict[str, Any], tokens: int) -> float:
    """Milliseconds a turn outside the model."""
    ids = torch.arange(32)[None] % 7
    with clocked() as inside:
        began = time.perf_counter()
        steps = list(skipstone.stream(network, ids, method, max_new_tokens=tokens, do_sample=False))
        seconds = time.perf_counter() - began
    return 1000 * (seconds - inside[0]) / len(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=8)
    given = parser.parse_args()
    warnings.simplefilter("ignore", RuntimeWarning)
    network = model(given.layers, given.hidden)
    found: dict[str, list[float]] = {name: [] for name in METHODS}
    for round_number in range(given.rounds + 1):
        for name, settings in METHODS.items():
            milliseconds = outside(network, {"method": name, **settings}, given.tokens)
            if round_number:  # the first round warms up
                found[name].append(milliseconds)
    print("| method | least ms a turn | median |\n| --- | --- | --- |")
    for name, values in found.items():
        print(f"| {name} | {min(values):.3f} | {statistics.median(values):.3f} |")
    rows = {name: {"least": min(values), "median": statistics.median(values)} for name, values in found.items()}
    print(json.dumps({"kind": "loop-overhead", "settings": vars(given), "rows": rows}))


if __name__ == "__main__":
    main()
