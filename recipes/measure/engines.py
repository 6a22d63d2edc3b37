"""Speed of the engines compared with transformers and llama.cpp: end to end, in one run, alternating prompt by prompt.

    python recipes/measure/engines.py [MODEL] [--dtype float32] [--quantize int8] [--rounds 5] [--new 128] [--max-prompts 8]
        [--method "layerskip exit_layer=6"] ... [--llama-cpp "PYTHON MODEL.gguf"] [--prompts FILE] [--without transformers]

Prints tokens per second (including the prefill, all prompts together, medians over rounds) of transformers' `generate`, of
llama.cpp (to_gguf.py), of plain decoding on the eager and the native engine, of every --method on the native engine, and of all
prompts as one batch, with their ratios, and whether their texts are those of plain decoding. It also prints their share of the
speed that the memory's bandwidth allows (measured before and after every round), the milliseconds of passes of 1 to 32 rows
after 150 tokens, and of a prefill of 512 tokens. --prompts: JSON lines with "prompt"; default: the bundled model's own. All
texts have --new tokens. A GGUF file as MODEL is computed as it is stored, by the native engine only. gguf_files.py measures the
starts and the memory of such files. Measure on an idle machine.
"""

import argparse
import json
import shlex
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import skipstone
from skipstone.engines.host_transfer import left_padded
from skipstone.engines.kv_cache import KVCache
from skipstone.engines.mapped_loading import load_to_measure
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.native.threads import cores
from skipstone.engines.native.weights import quantised_bytes
from skipstone.lab.bench.peers.ggml import SETTLES, LlamaCppProcess
from skipstone.lab.bench.peers.hf import HFGenerate
from skipstone.lab.tasks.data_sets import named
from skipstone.lab.timing import machine
from skipstone.models.mapped_model import MappedModel
from skipstone.models.passes import Pass

CONTEXT = 150  # tokens before the passes that are timed
PREFILL = 512  # tokens of the prefill that is timed
REPEATS = 40  # passes of each width

Answer = tuple[list[int], float]  # (new ids, seconds)
CPU = torch.device("cpu")


@dataclass
class Measurements:
    """speeds: row -> tokens per second of every round. texts: row -> new ids of every prompt. bandwidths: bytes per second of
    every round, the larger of those before and after it."""

    speeds: dict[str, list[float]]
    texts: dict[str, list[list[int]]]
    bandwidths: list[float]


class LlamaCpp:
    """llama.cpp in a process of its own. command: "PYTHON MODEL.gguf"."""

    def __init__(self, command: str) -> None:
        python, path = shlex.split(command)
        self._worker = LlamaCppProcess(python, path, str(cores()))
        self.name = f"llama.cpp {Path(path).stem.rpartition('-')[2]}"

    def __call__(self, ids: list[int], new: int) -> Answer:
        began = time.perf_counter()
        answer = self._worker(ids=ids, new=new, stop=[], drafts=0, threshold=0)
        seconds = time.perf_counter() - began
        time.sleep(SETTLES)
        return answer["ids"], seconds


def arguments() -> argparse.Namespace:
    """Arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantize")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--method", action="append", default=[])
    parser.add_argument("--llama-cpp")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--max-prompts", type=int, default=8)
    parser.add_argument("--without", nargs="*", default=[], choices=["transformers", "eager"])
    return parser.parse_args()


def main() -> None:
    args = arguments()
    dtype = args.dtype if args.dtype == "auto" else getattr(torch, args.dtype)
    loaded = load_to_measure(args.model, dtype=dtype)
    model, tokenizer = loaded
    left_out = ["transformers", "eager"] if isinstance(loaded[0], MappedModel) else args.without
    model.generation_config.eos_token_id = None  # all texts are equally long
    if args.prompts is None:
        task = named("self")
        texts = [task.ask(row)[0] for row in task.records(None)[::5]]
    else:
        texts = [json.loads(line)["prompt"] for line in args.prompts.read_text().splitlines() if line.strip()]
    prompts = [tokenizer(text)["input_ids"] for text in texts[: args.max_prompts]]

    def generate_with_transformers(ids: list[int], new: int) -> Answer:
        prompt, began = torch.tensor([ids]), time.perf_counter()
        options = {"max_new_tokens": new, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
        return HFGenerate().generate(model, prompt, options, 0).tokens, time.perf_counter() - began

    def skipstone_decoder(engine: str, method: str) -> Callable[[list[int], int], Answer]:
        quantization = {"quantize": args.quantize if engine == "native" else None}

        def call(ids: list[int], new: int) -> Answer:
            prompt, began = torch.tensor([ids]), time.perf_counter()
            options: dict[str, Any] = {"engine": engine, "max_new_tokens": new, "do_sample": False, **quantization}
            out = skipstone.generate(model, prompt, method, attention_mask=torch.ones_like(prompt), **options)
            assert out.new_tokens is not None
            return out.new_tokens[0], time.perf_counter() - began

        return call

    decoders: dict[str, Callable[[list[int], int], Answer]] = {}
    if "transformers" not in left_out:
        decoders["transformers"] = generate_with_transformers
    if args.llama_cpp:
        peer = LlamaCpp(args.llama_cpp)
        decoders[peer.name] = peer
    if "eager" not in left_out:
        decoders["eager, plain"] = skipstone_decoder("eager", "autoregressive")
    decoders["native, plain"] = skipstone_decoder("native", "autoregressive")
    decoders.update({f"native, {method}": skipstone_decoder("native", method) for method in args.method})

    def decode_batch(new: int) -> tuple[list[list[int]], float]:
        ids, mask = left_padded(prompts)
        began = time.perf_counter()
        options: dict[str, Any] = {"engine": "native", "max_new_tokens": new, "do_sample": False, "quantize": args.quantize}
        out = skipstone.generate(model, ids, "autoregressive", attention_mask=mask, **options)
        assert out.new_tokens is not None
        return out.new_tokens, time.perf_counter() - began

    measurements = measure(decoders, decode_batch, prompts, args.rounds, args.new)
    weights = f"{model.dtype} weights{f', {args.quantize} on the native engine' if args.quantize else ''}"
    report(measurements, len(prompts), args.new, weights)
    runner = ModelRunner(model, "native", args.quantize)
    print(f"\n{runner.engine.detail}")
    report_shares(measurements, bytes_of_a_token(model, args.quantize, statistics.mean(map(len, prompts)) + args.new / 2))
    report_passes(runner)


def bytes_of_a_token(model: Any, quantize: str | None, length: float) -> float:
    """Bytes that one token of plain decoding reads after `length` others: weights, keys and values."""
    return quantised_bytes(model, quantize) + machine.kv_bytes(model) * length


def measure(
    decoders: dict[str, Callable[[list[int], int], Answer]],
    decode_batch: Callable[[int], tuple[list[list[int]], float]],
    prompts: list[list[int]],
    rounds: int,
    new: int,
) -> Measurements:
    """Time all decoders alternately, prompt by prompt, then all prompts as one batch. An untimed round warms up."""
    batch = f"native, plain, batch of {len(prompts)}"
    speeds: dict[str, list[float]] = {name: [] for name in (*decoders, batch)}
    texts: dict[str, list[list[int]]] = {}
    bandwidths = [machine.bandwidth(CPU)]
    for round_number in range(rounds + 1):
        answers: dict[str, list[Answer]] = {name: [] for name in decoders}
        for ids in prompts:
            for name, call in decoders.items():
                answers[name].append(call(ids, new))
        for name, row_answers in answers.items():
            texts[name] = [ids for ids, _ in row_answers]
            if round_number:
                speeds[name].append(sum(len(ids) for ids, _ in row_answers) / sum(seconds for _, seconds in row_answers))
        texts[batch], seconds = decode_batch(new)
        if round_number:
            speeds[batch].append(sum(map(len, texts[batch])) / seconds)
        bandwidths.append(machine.bandwidth(CPU))
    return Measurements(speeds, texts, [max(pair) for pair in pairwise(bandwidths[1:])])


def report_shares(measurements: Measurements, token_bytes: float) -> None:
    """Print the share of the speed that the memory allows, round by round. token_bytes: that a token reads."""
    ceilings = [bandwidth / token_bytes for bandwidth in measurements.bandwidths]
    print(
        f"A token of plain decoding reads {token_bytes / 1e6:.1f} MB; {min(measurements.bandwidths) / 1e9:.1f} to "
        f"{max(measurements.bandwidths) / 1e9:.1f} GB/s of memory allow {min(ceilings):.0f} to {max(ceilings):.0f} tokens/s."
    )
    for name, speeds in measurements.speeds.items():
        if name == "native, plain" or name.startswith("llama.cpp"):
            shares = [speed / ceiling for speed, ceiling in zip(speeds, ceilings, strict=True)]
            print(f"{name}: {statistics.median(shares):.2f} ({min(shares):.2f}-{max(shares):.2f}) of that, round by round")


def report(measurements: Measurements, prompts: int, new: int, weights: str) -> None:
    """Print the table in Markdown. A ratio is the median of the rounds' ratios."""
    print(f"{prompts} prompts x {new} tokens, {weights}")
    yardsticks = [
        name for name in measurements.speeds if name.startswith(("transformers", "llama.cpp")) or name == "native, plain"
    ]
    print(f"\n| | tokens/s | {' | '.join(f'x {name}' for name in yardsticks)} | texts of native, plain |")
    print(f"| --- | --- | {'--- | ' * len(yardsticks)}--- |")
    for name, speeds in measurements.speeds.items():
        ratios = [statistics.median(a / b for a, b in zip(speeds, measurements.speeds[one], strict=True)) for one in yardsticks]
        same = sum(a == b for a, b in zip(measurements.texts[name], measurements.texts["native, plain"], strict=True))
        speed_range = f"{statistics.median(speeds):.1f} ({min(speeds):.1f}-{max(speeds):.1f})"
        print(f"| {name} | {speed_range} | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} | {same}/{prompts} |")


@torch.inference_mode()
def report_passes(runner: ModelRunner) -> None:
    """Print milliseconds of a pass with logits by its rows, and of a prefill without logits on both engines."""
    ids = torch.arange(max(CONTEXT + 32, PREFILL))[None] % runner.embeddings

    def run(model: ModelRunner, store: KVCache, start: int, stop: int, logits: bool) -> float:
        positions, began = torch.arange(start, stop)[None], time.perf_counter()
        at = Pass(positions, positions, None, slice(0, 1), stop, start)
        hidden = model.run(model.embed(ids[:, start:stop], positions), at, store, range(model.depth))
        if logits:
            model.logits(hidden)
        return 1000 * (time.perf_counter() - began)

    def store_of(model: ModelRunner) -> KVCache:
        store = KVCache(1, model.depth, PREFILL)
        store.reserve(PREFILL)
        return store

    store = store_of(runner)
    run(runner, store, 0, CONTEXT, True)
    widths = (1, 2, 4, 8, 16, 32)
    times: dict[int, list[float]] = {rows: [] for rows in widths}
    for _ in range(REPEATS):
        for rows in widths:
            times[rows].append(run(runner, store, CONTEXT, CONTEXT + rows, True))
    print(f"\n| rows of a pass | {' | '.join(map(str, widths))} |\n| --- | {'--- | ' * len(widths)}")
    print(f"| ms | {' | '.join(f'{statistics.median(times[rows]):.2f}' for rows in widths)} |")
    print(f"| least ms | {' | '.join(f'{min(times[rows]):.2f}' for rows in widths)} |")
    if runner.max_positions >= PREFILL:
        runners = {"native": runner}
        if not isinstance(runner.model, MappedModel):
            runners["eager"] = ModelRunner(runner.model, "eager")
        stores = {name: store_of(model) for name, model in runners.items()}
        prefill_times: dict[str, list[float]] = {name: [] for name in runners}
        for _ in range(6):
            for name, model in runners.items():
                prefill_times[name].append(run(model, stores[name], 0, PREFILL, False))
        prefill_text = ", ".join(f"{name} {min(values):.1f} ms" for name, values in prefill_times.items())
        print(f"\nprefill of {PREFILL} tokens, the least of six: {prefill_text}")


if __name__ == "__main__":
    main()
