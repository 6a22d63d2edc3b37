"""Speed of the native engine next to programs that a user would run instead, on the same weights.

    python recipes/measure/engines.py [MODEL] [--ours "quantize=int8" ...] [--llama-cpp FOLDER --gguf FILE ...]
        [--openvino PYTHON --ir FOLDER ...] [--transformers] [--rounds 5]

Every row runs in processes of its own, which take turns in every round. Each one decodes 64 tokens plainly after a prompt of
one token, and prefills 512 tokens, three times after an untimed time. Then it computes passes of 1 to 128 rows with logits
behind 150 tokens. --ours: settings of `skipstone.load` for a row, separated by spaces; several times. "" is the model as
stored. SKIPSTONE_NATIVE_LEVEL names another instruction set for our rows. --llama-cpp: the folder of llama-bench; every FILE is
a row. --openvino: a Python that has openvino-genai; every FOLDER of a model is a row. --transformers adds a row of
transformers' `generate`.

Prints two Markdown tables with medians of the rounds and their range, and the processor's name. A ratio is the median of the
rounds' ratios to the first row. *bandwidth* is the share of what the memory's speed, measured afterwards, allows a token that
reads all weights. *peak* is the largest resident memory, mapped files included. Measure on an idle machine.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from skipstone.utils.processor_watch import machine_seconds

DECODED, PREFILL, CONTEXT = 64, 512, 150
WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128)
REPEATS, PASSES = 3, 15
"""Measurements of each process: of decoding and of the prefill, and of each pass."""


class Speeds(NamedTuple):
    """Tokens per second of decoding and of a prefill. passes: milliseconds of a pass by its rows, or nothing. share: of the
    memory's bandwidth, if it is known. peak: MB of the process, 0 if it does not tell."""

    decoding: float
    prefill: float
    passes: list[float]
    share: float | None = None
    peak: float = 0.0


def timed_speeds(seconds: Callable[[int, int], float]) -> tuple[float, float]:
    """Tokens per second of decoding and of a prefill. seconds: of a call with this many tokens of prompt and new tokens."""
    times = [(seconds(1, DECODED), seconds(PREFILL, 1)) for _ in range(REPEATS + 1)][1:]
    decoding, prefill = (statistics.median(values) for values in zip(*times, strict=True))
    return DECODED / decoding, PREFILL / prefill


def skipstone_speeds(model_name: str, settings: dict[str, str]) -> Speeds:
    """Speeds of skipstone in this process."""
    import torch

    import skipstone
    from skipstone.engines.mapped_loading import load_for_decoding
    from skipstone.engines.model_runner import ModelRunner
    from skipstone.engines.native.weights import quantised_bytes
    from skipstone.lab.timing import machine

    options: dict[str, Any] = settings | ({"dtype": getattr(torch, settings["dtype"])} if "dtype" in settings else {})
    model, _ = load_for_decoding(model_name or None, **options)

    def seconds(prompt: int, new: int) -> float:
        options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "max_new_tokens": new}
        ids, began = torch.arange(prompt)[None] % 256, time.perf_counter()
        skipstone.generate(model, ids, "autoregressive", attention_mask=torch.ones_like(ids), **options)
        return time.perf_counter() - began

    decoding, prefill = timed_speeds(seconds)
    passes = pass_milliseconds(ModelRunner(model))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    token_bytes = quantised_bytes(model, settings.get("quantize")) + machine.kv_bytes(model) * DECODED / 2
    return Speeds(decoding, prefill, passes, decoding * token_bytes / machine.bandwidth(torch.device("cpu")), peak)


def pass_milliseconds(runner: Any) -> list[float]:
    """Milliseconds of a pass with logits, by its rows."""
    import torch

    from skipstone.engines.kv_cache import KVCache
    from skipstone.models.passes import Pass

    store = KVCache(1, runner.depth, CONTEXT + max(WIDTHS))
    store.reserve(CONTEXT + max(WIDTHS))
    ids = torch.arange(CONTEXT + max(WIDTHS))[None] % 256

    def run(start: int, stop: int) -> float:
        positions, began = torch.arange(start, stop)[None], time.perf_counter()
        at = Pass(positions, positions, None, slice(0, 1), stop, start)
        runner.logits(runner.run(runner.embed(ids[:, start:stop], positions), at, store, range(runner.depth)))
        return 1000 * (time.perf_counter() - began)

    with torch.inference_mode():
        run(0, CONTEXT)
        times = [[run(CONTEXT, CONTEXT + rows) for rows in WIDTHS] for _ in range(PASSES)]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def transformers_speeds(model_name: str) -> Speeds:
    """Speeds of transformers' `generate` in this process."""
    import torch

    from skipstone.engines.loading import load

    model: Any = load(model_name or None)[0]
    model.generation_config.eos_token_id = None

    def seconds(prompt: int, new: int) -> float:
        ids, began = torch.arange(prompt)[None] % 256, time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
        return time.perf_counter() - began

    return Speeds(*timed_speeds(seconds), [])


OPENVINO_PROGRAM = f"""
import json, statistics, sys, time
import numpy, openvino, openvino_genai
pipeline = openvino_genai.LLMPipeline(sys.argv[1], "CPU", INFERENCE_NUM_THREADS=int(sys.argv[2]))
def seconds(prompt, new):
    ids = numpy.arange(prompt)[None] % 256
    inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(numpy.ones_like(ids)))
    began = time.perf_counter()
    pipeline.generate(inputs, max_new_tokens=new, min_new_tokens=new, ignore_eos=True, do_sample=False)
    return time.perf_counter() - began
times = [(seconds(1, {DECODED}), seconds({PREFILL}, 1)) for _ in range({REPEATS} + 1)][1:]
decoding, prefill = (statistics.median(values) for values in zip(*times))
print(json.dumps([{DECODED} / decoding, {PREFILL} / prefill, []]))
"""


def output_of(command: list[str]) -> tuple[Any, float]:
    """What a command writes, as JSON, and the peak of its memory in MB. SystemExit if it fails."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
        assert process.stdout is not None
        written = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if status:
            errors.seek(0)
            raise SystemExit(f"{' '.join(command)} failed:\n{errors.read().decode(errors='replace')}")
    return json.loads(written), used.ru_maxrss * 1024 / 1e6


def llama_cpp_speeds(folder: Path, path: Path, threads: int) -> Speeds:
    """Speeds of llama-bench, which warms up by itself."""
    command = [str(folder / "llama-bench"), "-m", str(path), "-t", str(threads), "-o", "json"]
    (prefill, decoding), peak = output_of([*command, "-p", str(PREFILL), "-n", str(DECODED), "-r", str(REPEATS)])
    rows = ",".join(map(str, WIDTHS))
    passes, _ = output_of([*command, "-p", rows, "-n", "0", "-d", str(CONTEXT), "-r", str(PASSES)])
    times = [1000 * rows / statistics.median(one["samples_ts"]) for rows, one in zip(WIDTHS, passes, strict=True)]
    decoded, prefilled = (statistics.median(one["samples_ts"]) for one in (decoding, prefill))
    return Speeds(decoded, prefilled, times, None, peak)


def own_command(model_name: str, row: str) -> list[str]:
    """A process that writes the speeds of a row of ours, or of "transformers"."""
    return [sys.executable, __file__, model_name, "--worker", row]


def speeds_of(command: list[str]) -> Speeds:
    """Speeds that a command writes as a list."""
    fields, peak = output_of(command)
    speeds = Speeds(*fields)
    return speeds if speeds.peak else speeds._replace(peak=peak)


def text_of(values: list[float], digits: int = 1) -> str:
    """The median and the range."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def report(rounds: dict[str, list[Speeds]]) -> None:
    """Print the tables. rounds: the speeds of a row, round by round."""
    first = next(iter(rounds.values()))
    print("| | decoding, tokens/s | ratio | bandwidth | prefill, tokens/s | ratio | peak MB |\n" + "| --- " * 7 + "|")
    for name, speeds in rounds.items():
        cells = []
        for field in ("decoding", "prefill"):
            values, others = ([getattr(one, field) for one in column] for column in (speeds, first))
            ratio = statistics.median(one / other for one, other in zip(values, others, strict=True))
            cells += [text_of(values), f"{ratio:.2f}"]
        shares = [one.share for one in speeds if one.share is not None]
        cells.insert(2, text_of(shares, 2) if shares else "")
        print(f"| {name} | {' | '.join(cells)} | {statistics.median(one.peak for one in speeds):.0f} |")
    print(f"\n| ms of a pass by its rows | {' | '.join(map(str, WIDTHS))} | 8 rows / 1 row |")
    print("| --- " * (len(WIDTHS) + 2) + "|")
    for name, speeds in rounds.items():
        if speeds[0].passes:
            columns = zip(*(one.passes for one in speeds), strict=True)
            widened = [one.passes[WIDTHS.index(8)] / one.passes[0] for one in speeds]
            cells = [f"{statistics.median(column):.2f}" for column in columns]
            print(f"| {name} | {' | '.join(cells)} | {text_of(widened, 2)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--ours", action="append", metavar="SETTINGS")
    parser.add_argument("--llama-cpp", type=Path, metavar="FOLDER")
    parser.add_argument("--gguf", nargs="*", default=[], type=Path, metavar="FILE")
    parser.add_argument("--openvino", metavar="PYTHON")
    parser.add_argument("--ir", nargs="*", default=[], type=Path, metavar="FOLDER")
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker == "transformers":
        print(json.dumps(transformers_speeds(asked.model)))
        return
    if asked.worker is not None:
        print(json.dumps(skipstone_speeds(asked.model, dict(word.split("=") for word in asked.worker.split()))))
        return
    rows: dict[str, Callable[[], Speeds]] = {}
    for settings in asked.ours or [""]:
        rows[f"skipstone {settings}"] = partial(speeds_of, own_command(asked.model, settings))
    if asked.transformers:
        rows["transformers"] = partial(speeds_of, own_command(asked.model, "transformers"))
    for path in asked.gguf:
        rows[f"llama.cpp {path.name}"] = partial(llama_cpp_speeds, asked.llama_cpp, path, asked.threads)
    for path in asked.ir:
        rows[f"OpenVINO {path.name}"] = partial(
            speeds_of, [asked.openvino, "-c", OPENVINO_PROGRAM, str(path), str(asked.threads)]
        )
    machine, began = machine_seconds() or 0.0, time.perf_counter()
    turns = [{name: measure() for name, measure in rows.items()} for _ in range(asked.rounds)]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    others = (machine_seconds() or 0.0) - machine - used.ru_utime - used.ru_stime
    busy_share = others / ((time.perf_counter() - began) * (os.cpu_count() or 1))
    report({name: [turn[name] for turn in turns] for name in rows})
    from skipstone.lab.timing.machine import cpu  # which imports torch

    print(f"\n{cpu()}, {asked.threads} threads, {asked.rounds} rounds; other programs used {busy_share:.0%} of the time")


if __name__ == "__main__":
    main()
