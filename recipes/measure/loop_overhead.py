"""Time of a decoding step outside the model's layers: drafting, verification, bookkeeping, transfers.

    python recipes/measure/loop_overhead.py [--layers 10 --hidden 64 --tokens 128 --rounds 8] [--nano] [--engine native]

A small Llama with random weights, or the bundled model, decodes plainly (greedily, and sampling with processors), with
LayerSkip, with self-speculative drafts and with prompt lookup. The result is the time of all steps but the prompt's, minus the
time in the engine's calls, per turn. The bundled model's weights fill the processor's caches at every pass, so the loop's code
and data come from memory again. The last row times whole calls of one new token, including the engine. There the check for
changed weights counts most. `--layers 26 --hidden 2048` has the shape of 1B parameters. To compare two checkouts, run the
script alternately with PYTHONPATH=OTHER/src. Prints a table in Markdown and, as its last line, one JSON document: the smallest
and the median milliseconds per turn or call over the rounds.
"""

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
from skipstone import ModelRunner
from skipstone.engines.engine import ENGINES

GREEDY = {"do_sample": False}
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 1}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "autoregressive": ({"method": "autoregressive"}, GREEDY),
    "autoregressive, sampling with processors": ({"method": "autoregressive"}, SAMPLED),
    "layerskip": ({"method": "layerskip", "exit_layer": 3, "num_speculative_tokens": 4}, GREEDY),
    "self_speculative": (
        {"method": "self_speculative", "skip_attention": (2, 4, 6), "skip_mlp": (3, 5), "num_speculative_tokens": 4},
        GREEDY,
    ),
    "prompt_lookup": ({"method": "prompt_lookup"}, GREEDY),
}
"""Row of the table -> method and options."""
ONE_TOKEN = "whole call of one token"
CALLS = 8
"""Calls of one token in a round."""
ENGINE_CALLS = ("run", "embed", "normed", "project", "greedy_tokens", "chain")
"""Methods of an engine that are timed."""


def random_llama(layers: int, hidden: int) -> LlamaForCausalLM:
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
def time_engine(engine: Any) -> Iterator[list[float]]:
    """Add up the seconds inside an engine's calls."""
    seconds = [0.0]

    def timed(call: Any) -> Any:
        def timed_call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                seconds[0] += time.perf_counter() - began

        return timed_call

    for name in ENGINE_CALLS:
        setattr(engine, name, timed(getattr(engine, name)))
    try:
        yield seconds
    finally:
        for name in ENGINE_CALLS:
            delattr(engine, name)


def time_outside(network: Any, engine: str, row: tuple[dict[str, Any], dict[str, Any]], tokens: int) -> float:
    """Milliseconds per turn outside the engine."""
    ids = torch.arange(32)[None] % 7
    method, options = row
    steps = skipstone.stream(network, ids, method, engine=engine, max_new_tokens=tokens, **options)
    next(steps)  # the prompt
    with time_engine(ModelRunner(network, engine).engine) as inside:
        began = time.perf_counter()
        turns = len(list(steps))
        seconds = time.perf_counter() - began
    return 1000 * (seconds - inside[0]) / turns


def one_token_call(network: Any, engine: str) -> float:
    """Milliseconds of a whole call that decodes one new token."""
    ids = torch.arange(32)[None] % 7
    began = time.perf_counter()
    for _ in range(CALLS):
        skipstone.generate(network, ids, "autoregressive", engine=engine, max_new_tokens=1, do_sample=False)
    return 1000 * (time.perf_counter() - began) / CALLS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--nano", action="store_true")
    parser.add_argument("--engine", default="auto", choices=ENGINES)
    args = parser.parse_args()
    warnings.simplefilter("ignore", RuntimeWarning)
    network = skipstone.load()[0] if args.nano else random_llama(args.layers, args.hidden)
    network.generation_config.eos_token_id = None
    times: dict[str, list[float]] = {name: [] for name in (*CASES, ONE_TOKEN)}
    for round_number in range(args.rounds + 1):
        for name in times:
            is_call = name == ONE_TOKEN
            milliseconds = (
                one_token_call(network, args.engine)
                if is_call
                else time_outside(network, args.engine, CASES[name], args.tokens)
            )
            if round_number:  # the first round warms up
                times[name].append(milliseconds)
    print(f"engine {ModelRunner(network, args.engine).engine.name}")
    print("| method | least ms a turn or call | median |\n| --- | --- | --- |")
    for name, values in times.items():
        print(f"| {name} | {min(values):.3f} | {statistics.median(values):.3f} |")
    rows = {name: {"least": min(values), "median": statistics.median(values)} for name, values in times.items()}
    print(json.dumps({"kind": "loop-overhead", "settings": vars(args), "rows": rows}))


if __name__ == "__main__":
    main()
