"""The figures of skipstone-nano: quality of every exit, exact match and speed on commands, code that parses.

    python recipes/measure/nano_results.py exits MODEL...                      # the shape of the paper's Table 1
    python recipes/measure/nano_results.py curves RUN... --source NAME         # Figure 11
    python recipes/measure/nano_results.py commands MODEL... [--control MODEL]  # Tables 6 and 11
    python recipes/measure/nano_results.py parse MODEL                         # continuations that parse, and that loop
    python recipes/measure/nano_results.py prompts MODEL FOLDER                # prompts of plans in recipes/measure/results

Each prints a table in Markdown and, as its last line, one JSON document. MODEL: a folder; the table shows the parent's name for
a folder `model`. All but `commands` and `curves` read the held-out data and take the --data-dir of the training. They stop if
data.json of the model records other held-out data.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import skipstone
from skipstone.lab.timing.statistics import repeated_share
from skipstone.train.data.documents import Document, collect, deduplicate, split
from skipstone.train.data.rows import TokenRows, pack
from skipstone.train.layerskip.arguments import TrainingRecipe, read
from skipstone.train.layerskip.metrics import exit_quality

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
import commands  # type: ignore[import-not-found]
import nano_python

EXITS = (3, 4, 6, 12, 18)
PARSED_TOKENS = 128


def held_out(recipe: Path, data_dir: Path | None) -> tuple[TrainingRecipe, dict[str, list[Document]]]:
    """(recipe, held-out documents by source)."""
    training = read(recipe, data_dir)
    remaining, _ = deduplicate(collect(training.data.sources, recipe.parent))
    _, held_out_documents = split(remaining, training.data.held_out, training.seed)
    names = [source.name for source in training.data.sources]
    return training, {name: [document for document in held_out_documents if document.source == name] for name in names}


# ------------------------------------------------------------------------------------------------ exits


def called(folder: str) -> str:
    """A model's name in tables: that of its folder, or NAME for runs/NAME/model."""
    path = Path(folder).resolve()
    return path.parent.name if path.name == "model" else path.name


def folders_by_name(models: Sequence[str]) -> dict[str, str]:
    """Name -> folder. SystemExit if two models have one name."""
    results = {called(model): model for model in models}
    if len(results) < len(models):
        raise SystemExit(f"two of these models have one name: {', '.join(models)}")
    return results


def exits(
    models: Sequence[str], recipe: Path, data_dir: Path | None, rows: int, layers: Sequence[int] = EXITS
) -> dict[str, Any]:
    """Perplexity, bits per byte and agreement of every exit of every model on held-out text. layers: printed exits."""
    training, documents = held_out(recipe, data_dir)
    folders = folders_by_name(models)
    for folder in folders.values():
        check_unseen(Path(folder), documents)
    results: dict[str, Any] = {}
    for name, folder in folders.items():
        network, tokenizer = skipstone.load(folder, dtype=torch.float32)
        eos: Any = tokenizer.eos_token_id
        for source, source_documents in documents.items():
            packed = pack(source_documents, tokenizer, training.data.length, training.seed, eos)[:rows]
            quality = exit_quality(network, TokenRows(packed), 8)
            predicted = packed[:, 1:][packed[:, 1:] >= 0].tolist()
            tokens = tokenizer.convert_ids_to_tokens(predicted, skip_special_tokens=True)  # one letter per byte
            bits = math.log2(quality.perplexity()[max(quality.perplexity())]) * quality.tokens
            results.setdefault(source, {})[name] = {
                "tokens": quality.tokens,
                "bits_per_byte": bits / sum(map(len, tokens)),
                "perplexity": quality.perplexity(),
                "agreement": quality.agreement(),
            }
    depth = max(max(values["perplexity"]) for by_model in results.values() for values in by_model.values())
    printed_exits = sorted({*(layer for layer in layers if layer < depth), depth})
    print_header(["held-out", "model", *(f"E = {layer}" for layer in printed_exits)])
    for source, by_model in results.items():
        for name, values in by_model.items():
            pairs = [(values["perplexity"].get(layer), values["agreement"].get(layer)) for layer in printed_exits]
            row(source, name, *("-" if ppl is None else f"{ppl:.2f} ({same:.2f})" for ppl, same in pairs))
    return results


def curves(runs: Sequence[Path], source: str, layers: Sequence[int]) -> dict[str, Any]:
    """Perplexity of exits on held-out text during training, from metrics.jsonl of runs."""
    results: dict[str, Any] = {}
    steps: set[int] = set()
    for run in runs:
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        last = {line["step"]: line for line in lines if f"eval_{source}_loss" in line}  # resumed runs repeat a step
        steps |= last.keys()
        for layer in layers:
            key = f"eval_{source}_perplexity_exit_{layer}"
            results[f"{run.name}, E = {layer}"] = {step: line[key] for step, line in last.items() if key in line}
    print_header(["run and exit", *(f"step {step}" for step in sorted(steps))])
    for name, values in results.items():
        row(name, *(f"{values[step]:.2f}" if step in values else "-" for step in sorted(steps)))
    return results


def print_header(columns: Sequence[str]) -> None:
    """Print the header of a Markdown table."""
    row(*columns)
    row(*("---" for _ in columns))


def row(*cells: str) -> None:
    """Print a row of a Markdown table."""
    print(f"| {' | '.join(cells)} |")


def check_unseen(model: Path, documents: dict[str, list[Document]]) -> None:
    """ValueError if a model's data.json records other held-out documents. With another Python or other files, the model may
    have been trained on some of these."""
    account = json.loads((model / "data.json").read_text())["sources"]
    for source, own in documents.items():
        here = {"documents": len(own), "bytes": sum(len(document.text.encode()) for document in own)}
        there = {key: account[source]["held_out"][key] for key in here}
        if here != there:
            raise ValueError(f"the held-out part of {source!r} is {here} here and was {there} in training")


# --------------------------------------------------------------------------------------------- commands


@dataclass
class Line:
    """One decoding method of one model over all requests. outputs: (answer, output) of each. base: the line to compare time and
    texts with, plain decoding of the same model."""

    name: str
    method: skipstone.Method
    network: Any
    base: Line | None = None
    outputs: list[tuple[str, str]] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    accepted: int = 0
    drafted: int = 0


def requests(
    models: Sequence[str],
    count: int,
    layers: Sequence[int],
    lengths: int,
    control: str | None = None,
    vocabulary: str | None = None,
    threshold: float | None = None,
) -> dict[str, Any]:
    """Exact match, acceptance and time per token on test requests: plain, early exit and LayerSkip at several exits of every
    model, alternating request by request.

    control: a model that only decodes plainly. lengths, vocabulary, threshold: LayerSkip's `num_speculative_tokens`,
    `draft_vocabulary` (a file) and `confidence_threshold`."""
    drafts: dict[str, Any] = {
        "num_speculative_tokens": lengths,
        "draft_vocabulary": vocabulary,
        "confidence_threshold": threshold,
    }
    folders = folders_by_name([*models, *([control] if control else [])])
    loaded = {name: skipstone.load(folder, dtype=torch.float32) for name, folder in folders.items()}
    tokenizer = loaded[called(models[0])][1]
    lines: list[Line] = []
    for name, (network, other_tokenizer) in loaded.items():
        if other_tokenizer.get_vocab() != tokenizer.get_vocab():
            raise SystemExit(f"{folders[name]} has another tokenizer than {models[0]}")
        prefix = f"{name}, " if len(loaded) > 1 else ""
        plain = Line(f"{prefix}autoregressive", skipstone.Autoregressive(), network)
        lines.append(plain)
        if folders[name] == control:
            continue
        exit_methods = [(f"early exit, E = {e}", skipstone.EarlyExit(exit_layer=e)) for e in layers]
        exit_methods += [(f"LayerSkip, E = {e}", skipstone.LayerSkip(exit_layer=e, **drafts)) for e in layers]
        lines += [Line(prefix + label, method, network, plain) for label, method in exit_methods]
    for line in lines:  # warm-up
        decode_example(replace(line, outputs=[]), tokenizer, torch.tensor([tokenizer.encode("> call home\n")]), "")
    for number, example in enumerate(commands.examples("test", count, 0)):
        ids = torch.tensor([tokenizer.encode(example.prompt)])
        turn = number % len(lines)
        for line in [*lines[turn:], *lines[:turn]]:
            decode_example(line, tokenizer, ids, example.answer)
    rows = {line.name: line_figures(line) for line in lines}
    print_header(["generation", "EM", "token acceptance", "time per token (ms)", "speed-up", "texts as autoregressive"])
    for name, one in rows.items():
        acceptance = "-" if one["acceptance"] is None else f"{100 * one['acceptance']:.1f} %"
        ms_per_token = f"{one['ms_per_token']:.2f}"
        exact, speed_up = f"{100 * one['exact_match']:.1f}", f"{one['speed_up']:.2f} x"
        row(name, exact, acceptance, ms_per_token, speed_up, f"{one['same_text']}/{count}")
    return {"requests": count, **drafts, "rows": rows}


def line_figures(line: Line) -> dict[str, Any]:
    base = line.base or line
    ms_per_token = line.seconds / line.tokens
    return {
        "exact_match": commands.score(line.outputs)["exact_match"],
        "acceptance": line.accepted / line.drafted if line.drafted else None,
        "ms_per_token": 1000 * ms_per_token,
        "speed_up": base.seconds / base.tokens / ms_per_token,
        "same_text": sum(own[1] == other[1] for own, other in zip(line.outputs, base.outputs, strict=True)),
    }


def decode_example(line: Line, tokenizer: Any, ids: torch.Tensor, answer: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        started = time.perf_counter()
        out = skipstone.generate(line.network, ids, line.method, max_new_tokens=120, do_sample=False)
        line.seconds += time.perf_counter() - started
    assert out.new_tokens is not None
    assert out.stats is not None
    line.tokens += len(out.new_tokens[0])
    line.accepted += out.stats.accepted
    line.drafted += out.stats.draft_steps
    line.outputs.append((answer, tokenizer.decode(out.new_tokens[0], skip_special_tokens=True)))


# ------------------------------------------------------------------------------------------------ parse


def parse(model: str, recipe: Path, data_dir: Path | None, count: int, temperatures: Sequence[float]) -> dict[str, Any]:
    """Number of continuations that parse and the median share of repeated 8-grams, for the files' own next tokens and for the
    model's at every temperature."""
    _, documents = held_out(recipe, data_dir)
    check_unseen(Path(model), documents)
    network, tokenizer = skipstone.load(model, dtype=torch.float32)
    beginnings = nano_python.beginnings(documents["code"], count, 0)
    rows: dict[str, dict[str, float]] = {}
    for temperature in (None, *temperatures):
        good, shares = 0, []
        for number, (prefix, rest) in enumerate(beginnings):
            ids = tokenizer.encode(prefix)
            if temperature is None:
                tokens = tokenizer.encode(rest, add_special_tokens=False)[:PARSED_TOKENS]
            else:
                options = {"do_sample": True, "temperature": temperature, "top_k": 0, "seed": number}
                out = skipstone.generate(network, torch.tensor([ids]), None, max_new_tokens=PARSED_TOKENS, **options)
                assert out.new_tokens is not None
                tokens = out.new_tokens[0]
            good += nano_python.parses(prefix, str(tokenizer.decode(tokens, skip_special_tokens=True)))
            shares.append(repeated_share(ids, tokens))
        name = "the files themselves" if temperature is None else f"T = {temperature:g}"
        rows[name] = {"parse": good, "median_repeated_8_grams": statistics.median(shares)}
    print(f"| {count} continuations | parse | median share of repeated 8-grams |\n| --- | --- | --- |")
    for name, row in rows.items():
        print(f"| {name} | {row['parse']} | {row['median_repeated_8_grams']:.2f} |")
    return {"count": count, "rows": rows}


# ---------------------------------------------------------------------------------------------- prompts


def prompts(model: str, folder: Path, recipe: Path, data_dir: Path | None, count: int) -> dict[str, Any]:
    """Write prompt files for the benchmark (recipes/measure/results): test requests with their answers, and beginnings of
    held-out functions."""
    _, documents = held_out(recipe, data_dir)
    check_unseen(Path(model), documents)
    folder.mkdir(parents=True, exist_ok=True)
    examples = commands.examples("test", count, 1)
    sets: dict[str, list[dict[str, str]]] = {
        "commands": [{"prompt": example.prompt, "reference": example.answer} for example in examples],
        "code": [{"prompt": prefix} for prefix, _ in nano_python.beginnings(documents["code"], count, 1)],
    }
    for name, records in sets.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        print(f"{folder / name}.jsonl: {len(records)} prompts")
    return {name: len(records) for name, records in sets.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb: Callable[..., argparse.ArgumentParser] = verbs.add_parser

    def add_data_options(verb: argparse.ArgumentParser) -> None:
        verb.add_argument("--recipe", type=Path, default=Path(__file__).parents[1] / "train" / "nano.yaml")
        verb.add_argument("--data-dir", type=Path, help="JSON lines for the data sets of the hub, as in training")

    exits_parser = verb("exits")
    exits_parser.add_argument("models", nargs="+")
    add_data_options(exits_parser)
    exits_parser.add_argument("--rows", type=int, default=64, help="rows of held-out text per source")
    exits_parser.add_argument("--exit-layers", default=",".join(map(str, EXITS)), help="printed exits")
    curves_parser = verb("curves")
    curves_parser.add_argument("runs", nargs="+", type=Path)
    curves_parser.add_argument("--source", required=True, help="a name of the recipe's data.sources")
    curves_parser.add_argument("--exit-layers", required=True)
    commands_parser = verb("commands")
    commands_parser.add_argument("models", nargs="+")
    commands_parser.add_argument("--control", help="a model that only decodes plainly")
    commands_parser.add_argument("--count", type=int, default=100)
    commands_parser.add_argument("--exit-layers", default=",".join(map(str, EXITS)))
    commands_parser.add_argument("--num-speculative-tokens", type=int, default=7)
    commands_parser.add_argument("--confidence-threshold", type=float)
    commands_parser.add_argument("--draft-vocabulary", help="a file of token ids, as in recipes/smollm2/shortlist.py")
    parse_parser = verb("parse")
    parse_parser.add_argument("model")
    add_data_options(parse_parser)
    parse_parser.add_argument("--count", type=int, default=100)
    parse_parser.add_argument("--temperatures", default="0.2,0.8,1")
    prompts_parser = verb("prompts")
    prompts_parser.add_argument("model")
    prompts_parser.add_argument("folder", type=Path)
    add_data_options(prompts_parser)
    prompts_parser.add_argument("--count", type=int, default=100)
    args = parser.parse_args()
    layers = [int(layer) for layer in args.exit_layers.split(",")] if "exit_layers" in args else []
    if args.verb == "exits":
        document = exits(args.models, args.recipe, args.data_dir, args.rows, layers)
    elif args.verb == "curves":
        document = curves(args.runs, args.source, layers)
    elif args.verb == "commands":
        document = requests(
            args.models,
            args.count,
            layers,
            args.num_speculative_tokens,
            args.control,
            args.draft_vocabulary,
            args.confidence_threshold,
        )
    elif args.verb == "parse":
        temperatures = [float(temperature) for temperature in args.temperatures.split(",")]
        document = parse(args.model, args.recipe, args.data_dir, args.count, temperatures)
    else:
        document = prompts(args.model, args.folder, args.recipe, args.data_dir, args.count)
    print(json.dumps({"kind": f"nano-{args.verb}", **document}))


if __name__ == "__main__":
    main()
