"""Speed of llama.cpp's speculative decoding with an exported draft, compared with its plain decoding and with skipstone.

    python recipes/measure/llama_cpp_draft.py LLAMA-SERVER [--rounds 5] [--new 128] [--max-prompts 8]

LLAMA-SERVER: the program `llama-server`, with the flags of llama.cpp's releases of 2026. The bundled model is exported in
float32 (`skipstone export skipstone-nano ... --to gguf` and `--to draft`), and every prompt is decoded greedily by

- llama-server with target.gguf, alone and with draft.gguf in three settings,
- skipstone's native engine: plainly, with the exported checkpoint as a separate draft model, and with LayerSkip.

All decoders alternate prompt by prompt. Prompts are token ids. Prompts after which the model ends its text are left out,
because llama.cpp cannot write past an end. Prints tokens per second (all prompts together, including the prefill; median and
range over rounds), the share of accepted drafts, and whether the texts are those of skipstone's plain decoding. llama.cpp
reports its own times, which exclude HTTP. Its servers have one thread per core, as skipstone has, and do not compute while they
wait. Measure on an idle machine.
"""

import argparse
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from socket import socket
from typing import Any

import httpx
import torch

import skipstone
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.native.threads import cores
from skipstone.export.draft import select_draft_layers, write_draft
from skipstone.export.gguf.vocabulary import vocabulary_of
from skipstone.export.gguf.write_gguf import DRAFT, TARGET, write_pair
from skipstone.lab.tasks.data_sets import named
from skipstone.models.generation_config import OWN_FIELD

READY_SECONDS = 120.0  # limit for a server to load a file
ANSWER_SECONDS = 600.0  # limit for an answer, on a busy machine too
SETTLE_SECONDS = 0.05  # pause in which idle threads stop spinning, before the next decoder
HOST = "127.0.0.1"
EXACT = ["-fa", "off", "-ctk", "f32", "-ctv", "f32"]
EXACT_DRAFT = ["-ctkd", "f32", "-ctvd", "f32"]
"""Keys and values in float32, as in skipstone."""
DRAFTING: dict[str, list[str]] = {
    "its defaults": [],
    "8 drafts": ["--spec-draft-n-max", "8"],
    "8 drafts, p 0.5": ["--spec-draft-n-max", "8", "--spec-draft-p-min", "0.5"],
}
"""Flags of llama.cpp's drafts; the last are the model's own settings of LayerSkip."""


@dataclass
class Answer:
    """ids: new ids. seconds: from the request to the last id. drafted, accepted: numbers of tokens."""

    ids: list[int]
    seconds: float
    drafted: int = 0
    accepted: int = 0


@dataclass
class Row:
    """A decoder and its results. speeds: tokens per second of every round. texts: new ids of every prompt."""

    call: Callable[[list[int], int], Answer]
    speeds: list[float] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0


@contextmanager
def server(program: str, arguments: list[str]) -> Iterator[Callable[[list[int], int], Answer]]:
    """Run llama-server inside the context. RuntimeError if it ends or is not ready in time."""
    with socket() as free:
        free.bind((HOST, 0))
        port = str(free.getsockname()[1])
    fixed_flags = ["--host", HOST, "--port", port, "-t", str(cores()), "-c", "1024", "-np", "1"]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen([program, *arguments, *fixed_flags], stdout=quiet, stderr=quiet)
    try:
        with httpx.Client(base_url=f"http://{HOST}:{port}", timeout=ANSWER_SECONDS) as http:
            wait_until_ready(process, http)
            yield lambda ids, new: _request(http, ids, new)
    finally:
        process.terminate()
        process.wait()


def wait_until_ready(process: subprocess.Popen[bytes], http: httpx.Client) -> None:
    """RuntimeError if a server ends or is not ready in time."""
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"llama-server has ended with {process.returncode}")
        try:
            if http.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise RuntimeError("llama-server is not ready")


def _request(http: httpx.Client, ids: list[int], new: int) -> Answer:
    body = {"prompt": ids, "n_predict": new, "temperature": 0, "ignore_eos": True, "return_tokens": True, "cache_prompt": False}
    response = http.post("/completion", json=body).raise_for_status().json()
    times = response["timings"]
    seconds = (times["prompt_ms"] + times["predicted_ms"]) / 1000
    return Answer(response["tokens"], seconds, times.get("draft_n", 0), times.get("draft_n_accepted", 0))


def skipstone_decoder(model: Any, method: Any) -> Callable[[list[int], int], Answer]:
    """A decoder by skipstone's native engine with a method."""

    def call(ids: list[int], new: int) -> Answer:
        prompt, began = torch.tensor([ids]), time.perf_counter()
        options: dict[str, Any] = {"engine": "native", "max_new_tokens": new, "do_sample": False}
        out = skipstone.generate(model, prompt, method, attention_mask=torch.ones_like(prompt), **options)
        seconds = time.perf_counter() - began
        assert out.new_tokens is not None
        assert out.stats is not None
        return Answer(out.new_tokens[0], seconds, out.stats.drafted, out.stats.accepted)

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--max-prompts", type=int, default=8)
    args = parser.parse_args()
    model, tokenizer = skipstone.load(dtype=torch.float32)
    runner, defaults = ModelRunner(model), model.generation_config
    assert defaults is not None
    fixed_flags = getattr(defaults, OWN_FIELD)
    end: Any = tokenizer.eos_token_id
    defaults.eos_token_id = None  # all texts are equally long
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder, draft_layers = Path(name), select_draft_layers(runner)
        write_pair(runner, vocabulary_of(tokenizer, model, "gpt-2"), draft_layers, folder / "pair", "F32", "nano")
        write_draft(runner, tokenizer, draft_layers, folder / "draft")
        plain = ["-m", str(folder / "pair" / TARGET), *EXACT]
        drafting = [*plain, "-md", str(folder / "pair" / DRAFT), "--spec-type", "draft-simple", *EXACT_DRAFT]
        separate = skipstone.Speculative(
            draft_model=str(folder / "draft"),
            num_speculative_tokens=draft_layers.drafts,
            schedule="confidence",
            confidence_threshold=draft_layers.threshold,
        )
        rows = {"llama.cpp, plain": Row(stack.enter_context(server(args.server, plain)))}
        for label, flags in DRAFTING.items():
            rows[f"llama.cpp, draft: {label}"] = Row(stack.enter_context(server(args.server, [*drafting, *flags])))
        rows["skipstone, plain"] = Row(skipstone_decoder(model, "autoregressive"))
        rows["skipstone, the draft as a model"] = Row(skipstone_decoder(model, separate))
        rows["skipstone, LayerSkip"] = Row(skipstone_decoder(model, fixed_flags))
        prompts = prompts_without_end(rows["skipstone, plain"].call, tokenizer, end, args.new, args.max_prompts)
        measure(rows, prompts, args.rounds, args.new)
    report(rows, len(prompts), args)


def prompts_without_end(
    plain: Callable[[list[int], int], Answer], tokenizer: Any, end: int, new: int, max_prompts: int
) -> list[list[int]]:
    """At most `max_prompts` bundled prompts after which the model does not end its text."""
    task = named("self")
    prompts = [list(tokenizer.encode(task.ask(row)[0])) for row in task.records(None)[::3]]
    return [ids for ids in prompts if end not in plain(ids, new).ids][:max_prompts]


def measure(rows: dict[str, Row], prompts: list[list[int]], rounds: int, new: int) -> None:
    """Time all rows alternately, prompt by prompt. The first round is not counted."""
    for number in range(-1, rounds):
        seconds = dict.fromkeys(rows, 0.0)
        for ids in prompts:
            for name, row in rows.items():
                answer = row.call(ids, new)
                seconds[name] += answer.seconds
                time.sleep(SETTLE_SECONDS)
                if number < 0:
                    row.texts.append(answer.ids)
                    row.drafted, row.accepted = row.drafted + answer.drafted, row.accepted + answer.accepted
        if number >= 0:
            for name, row in rows.items():
                row.speeds.append(len(prompts) * new / seconds[name])


def report(rows: dict[str, Row], prompts: int, args: argparse.Namespace) -> None:
    """Print a Markdown table."""
    print(f"{prompts} prompts, {args.new} new tokens, {args.rounds} rounds, {cores()} cores, float32\n")
    print("| | tokens/s | x llama.cpp, plain | x skipstone, plain | drafts accepted | same texts |")
    print("| --- | --- | --- | --- | --- | --- |")
    medians = {name: statistics.median(row.speeds) for name, row in rows.items()}
    for name, row in rows.items():
        speed = f"{medians[name]:.0f} ({min(row.speeds):.0f}-{max(row.speeds):.0f})"
        ratios = [f"{medians[name] / medians[base]:.2f}" for base in ("llama.cpp, plain", "skipstone, plain")]
        share = f"{row.accepted / row.drafted:.2f}" if row.drafted else ""
        same = sum(one == other for one, other in zip(row.texts, rows["skipstone, plain"].texts, strict=True))
        print(f"| {name} | {speed} | {' | '.join(ratios)} | {share} | {same} of {prompts} |")


if __name__ == "__main__":
    main()
