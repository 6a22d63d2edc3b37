"""How long a user waits: seconds from the start of a process to its first token, its last token and its end, and its memory.

    python recipes/measure/start.py --models nano FOLDER FOLDER:int4 [--methods auto autoregressive] [--runs 5] [--shapes 1b 8b]
        [--tokenizer FOLDER] [--folder runs/start] [--peer "PROGRAM -m FILE.gguf -n 64 ..."] [--out RECORDS.jsonl]

Every model is decoded by `skipstone generate` in fresh processes, 64 greedy tokens each. The first start has an empty cache,
the second one what the first has left. The files are in the page cache in both. FOLDER:int8 and FOLDER:int4 quantise. --shapes
makes Llama models with random weights in bfloat16 and the tokenizer of another folder. They are measured in bfloat16, int8 and
int4 (8b: int4 only). A peer is any command that writes its text to the standard output, such as llama.cpp's. It must not repeat
the prompt (llama.cpp: --no-display-prompt), because the first byte counts as the first token. Commands take turns, and methods
change their order, because a virtual machine may hand out memory more slowly to the first. Medians of all runs are printed as a
Markdown table, with the processor's name. A busy machine is reported. --out stores the seconds of every process, a row on each
line, for the pages of docs/lab.
"""

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from skipstone.utils.processor_watch import machine_seconds, was_busy

PROMPT, NEW_TOKENS = "The capital of France is", 64
SHAPES = {
    "1b": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_key_value_heads": 4},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_key_value_heads": 8},
}
"""Llama shapes with 32 heads and a vocabulary of 49,152 tokens."""
QUANTISED = {"1b": ("", ":int8", ":int4"), "8b": (":int4",)}
IMPORTS = ("torch", "tokenizers", "safetensors", "jinja2")
NAMES = ("model", "method", "start")  # of a row
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")


class Start(NamedTuple):
    """Seconds from the start of a process to its first output, its last output and its end.

    peak: largest resident memory in MB. It includes pages of mapped files, also those that other processes share. busy_share:
    of the processors' time, what other programs used meanwhile; 0 if the system does not tell.
    """

    first: float
    last: float
    end: float
    peak: float
    busy_share: float


def started(command: list[str], cache: Path) -> Start:
    """Run a command to its end. SystemExit with what it wrote if it fails.

    The system counts the memory of this process in the command's peak, so this process imports nothing large.
    """
    environment = os.environ | {"SKIPSTONE_CACHE": str(cache)}
    with tempfile.TemporaryFile() as errors:
        machine, began = machine_seconds(), time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment)
        assert process.stdout is not None
        written = []
        while os.read(process.stdout.fileno(), 1 << 16):
            written.append(time.perf_counter() - began)
        _, status, used = os.wait4(process.pid, 0)
        end = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if status or not written:
            errors.seek(0)
            raise SystemExit(f"{shlex.join(command)} failed:\n{errors.read().decode(errors='replace')}")
    worked = (machine_seconds() or 0.0) - (machine or 0.0)
    busy_share = max(worked - used.ru_utime - used.ru_stime, 0.0) / (end * (os.cpu_count() or 1))
    return Start(written[0], written[-1], end, used.ru_maxrss * 1024 / 1e6, busy_share)


def make_shape(name: str, folder: Path, tokenizer: Path) -> Path:
    """A folder with a random model. One that is there is kept."""
    place = folder / name
    if (place / "config.json").exists():
        return place
    import torch
    from safetensors.torch import save_file

    place.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 49152, "num_attention_heads": 32}
    config |= {"max_position_embeddings": 8192, "dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, **SHAPES[name]}
    width, inner = config["hidden_size"], config["intermediate_size"]
    keys = width // 32 * config["num_key_value_heads"]
    sizes = {
        f"self_attn.{part}_proj": (outputs, width) for part, outputs in zip("qkvo", (width, keys, keys, width), strict=True)
    }
    sizes |= {"mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner)}
    sizes |= {"input_layernorm": (width,), "post_attention_layernorm": (width,)}
    shards = [{"model.embed_tokens": (49152, width), "lm_head": (49152, width), "model.norm": (width,)}]
    shards += [
        {f"model.layers.{layer}.{part}": size for part, size in sizes.items()} for layer in range(config["num_hidden_layers"])
    ]
    torch.manual_seed(0)
    files = {}
    for number, shard in enumerate(shards):
        drawn = {}
        for part, size in shard.items():
            values = torch.empty(size, dtype=torch.bfloat16)
            drawn[f"{part}.weight"] = values.normal_(0, 0.02) if len(size) == 2 else values.fill_(1)
        save_file(drawn, place / f"model-{number}.safetensors")
        files |= dict.fromkeys(drawn, f"model-{number}.safetensors")
    (place / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    for file in TOKENIZER_FILES:
        if (tokenizer / file).exists():
            shutil.copy(tokenizer / file, place / file)
    (place / "config.json").write_text(json.dumps(config))
    return place


def command_of(model: str, method: str, new_tokens: int) -> list[str]:
    """`skipstone generate` of a model, such as FOLDER:int4."""
    name, _, quantize = model.partition(":")
    command = [sys.executable, "-m", "skipstone", "generate", *([] if name == "nano" else [name])]
    command += ["--prompt", PROMPT, "--max-new-tokens", str(new_tokens), "--ignore-eos", "--method", method]
    return [*command, *(["--quantize", quantize] if quantize else [])]


def read_files(folder: Path) -> None:
    """Bring files into the page cache."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            block = bytearray(1 << 20)
            while file.readinto(block):
                pass


def peer_name(command: str) -> str:
    """The program and its file of weights."""
    words = shlex.split(command)
    return " ".join([Path(words[0]).name, *[Path(word).name for word in words if word.endswith(".gguf")]])


def measure(models: list[str], methods: list[str], peers: list[str], runs: int, new_tokens: int) -> list[dict[str, Any]]:
    """Run all commands in turns. Returns their rows; every field of `Start` is a list with a value for each run."""
    found: dict[tuple[str, str, str], list[Start]] = {}
    imports = f"import {', '.join(IMPORTS)}; print(flush=True)"
    with tempfile.TemporaryDirectory() as folder:
        for run in range(runs):
            alone = started([sys.executable, "-c", imports], Path(folder))
            found.setdefault(("imports of " + ", ".join(IMPORTS), "", ""), []).append(alone)
            for model in models:
                read_files(Path(model.partition(":")[0]))
                for method in methods[:: -1 if run % 2 else 1]:
                    with tempfile.TemporaryDirectory() as cache:
                        for start in ("first", "second"):
                            one = started(command_of(model, method, new_tokens), Path(cache))
                            found.setdefault((Path(model).name, method, start), []).append(one)
            for peer in peers:
                found.setdefault((peer_name(peer), "", ""), []).append(started(shlex.split(peer), Path(folder)))
    from skipstone.lab.timing.machine import provenance  # which imports torch

    about = provenance(sys.argv, 0)
    about = {key: about[key] for key in ("cpu", "cpus", "git", "time", "packages")} | {"new_tokens": new_tokens}
    rows = []
    for names, starts in found.items():
        times = {
            name: [float(f"{value:.4g}") for value in values]
            for name, values in zip(Start._fields, zip(*starts, strict=True), strict=True)
        }
        rows.append({**dict(zip(NAMES, names, strict=True)), **times, **about})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Medians as a Markdown table."""
    lines = ["| model | method | start | first token, s | last token, s | end, s | peak MB |", "| --- " * 7 + "|"]
    for row in rows:
        first, last, end, peak, _ = (statistics.median(row[name]) for name in Start._fields)
        lines.append(f"| {' | '.join(row[name] for name in NAMES)} | {first:.2f} | {last:.2f} | {end:.2f} | {peak:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["nano"])
    parser.add_argument("--methods", nargs="*", default=["auto", "autoregressive"])
    parser.add_argument("--shapes", nargs="*", default=[], choices=SHAPES)
    parser.add_argument("--tokenizer", type=Path, help="a folder with a tokenizer, for --shapes")
    parser.add_argument("--folder", type=Path, default=Path("runs/start"), help="where --shapes are kept")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--peer", action="append", default=[], help="a command to compare with; several times")
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS)
    parser.add_argument("--out", type=Path, help="a file of JSON lines")
    asked = parser.parse_args()
    models = list(asked.models)
    for shape in asked.shapes:
        with ProcessPoolExecutor(1, get_context("spawn")) as apart:  # it imports torch, whose memory would count in the peaks
            place = apart.submit(make_shape, shape, asked.folder, asked.tokenizer).result()
        models += [f"{place}{kind}" for kind in QUANTISED[shape]]
    rows = measure(models, asked.methods, asked.peer, asked.runs, asked.new_tokens)
    print(f"{rows[0]['cpu']}, {os.cpu_count()} processors, {asked.runs} runs, {asked.new_tokens} tokens\n\n{table(rows)}")
    busy_share = statistics.median(share for row in rows for share in row["busy_share"])
    if was_busy(busy_share):
        print(f"\nthe machine was busy: other programs used {busy_share:.0%} of the processors' time")
    if asked.out is not None:
        asked.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
