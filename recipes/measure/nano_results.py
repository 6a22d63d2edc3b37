"""The figures of skipstone-nano: quality of every exit, exact match and speed on commands, code that parses.

    python recipes/measure/nano_results.py exits MODEL...                      # the shape of the paper's Table 1
    python recipes/measure/nano_results.py curves RUN... --source NAME         # Figure 11
    python recipes/measure/nano_results.py commands MODEL... [--control MODEL]  # Tables 6 and 11
    python recipes/measure/nano_results.py parse MODEL                         # continuations that parse, and that loop
    python recipes/measure/nano_results.py prompts MODEL FOLDER                # prompts for recipes/measure/nano.yaml

Each prints a table in Markdown and, as its last line, one JSON document. MODEL: a folder; a folder `model` is called by the one
that it lies in. All but `commands` and `curves` read the held-out data, take the --data-dir of the training, and stop where the
model's own account says that these are others than what its training held out.
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
    """The documents of a recipe that its training never sees, by source."""
    made = read(recipe, data_dir)
    kept, _ = deduplicate(collect(made.data.sources, recipe.parent))
    _, out = split(kept, made.data.held_out, made.seed)
    return made, {source.name: [d for d in out if d.source == source.name] for source in made.data.sources}


# ------------------------------------------------------------------------------------------------ exits


def called(folder: str) -> str:
    """What a model is called in tables: its folder's own name, or of runs/NAME/model the run's."""
    path = Path(folder).resolve()
    return path.parent.name if path.name == "model" else path.name


def named(models: Sequence[str]) -> dict[str, str]:
    """Name -> folder. SystemExit for two models of one name."""
    found = {called(model): model for model in models}
    if len(found) < len(models):
        raise SystemExit(f"two of these models have one name: {', '.join(models)}")
    return found


def exits(
    models: Sequence[str], recipe: Path, data_dir: Path | None, rows: int, layers: Sequence[int] = EXITS
) -> dict[str, Any]:
    """Perplexity, bits per byte and agreement of every exit of every model on held-out text. layers: exits that are printed, as
    perplexity (agreement with the last layer)."""
    made, documents = held_out(recipe, data_dir)
    folders = named(models)
    for folder in folders.values():
        check_unseen(Path(folder), documents)
    found: dict[str, Any] = {}
    for name, folder in folders.items():
        network, tokenizer = skipstone.load(folder, dtype=torch.float32)
        eos: Any = tokenizer.eos_token_id
        for source, own in documents.items():
            packed = pack(own, tokenizer, made.data.length, made.seed, eos)[:rows]
            quality = exit_quality(network, TokenRows(packed), 8)
            predicted = packed[:, 1:][packed[:, 1:] >= 0].tolist()
            letters = tokenizer.convert_ids_to_tokens(predicted, skip_special_tokens=True)  # a letter stands for a byte
            found.setdefault(source, {})[name] = {
                "tokens": quality.tokens,
                "bits_per_byte": math.log2(quality.perplexity[max(quality.perplexity)])
                * quality.tokens
                / sum(map(len, letters)),
                "perplexity": quality.perplexity,
                "agreement": quality.agreement,
            }
    depth = max(max(values["perplexity"]) for by_model in found.values() for values in by_model.values())
    shown = sorted({*(layer for layer in layers if layer < depth), depth})
    table(["held-out", "model", *(f"E = {layer}" for layer in shown)])
    for source, by_model in found.items():
        for name, values in by_model.items():
            pairs = [(values["perplexity"].get(layer), values["agreement"].get(layer)) for layer in shown]
            row(source, name, *("-" if ppl is None else f"{ppl:.2f} ({same:.2f})" for ppl, same in pairs))
    return found


def curves(runs: Sequence[Path], source: str, layers: Sequence[int]) -> dict[str, Any]:
    """Perplexity of exits on held-out text while training went on, from the accounts of runs (metrics.jsonl)."""
    found: dict[str, Any] = {}
    steps: set[int] = set()
    for run in runs:
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        last = {line["step"]: line for line in lines if f"eval_{source}_loss" in line}  # a run that went on says a step twice
        steps |= last.keys()
        for layer in layers:
            key = f"eval_{source}_perplexity_exit_{layer}"
            found[f"{run.name}, E = {layer}"] = {step: line[key] for step, line in last.items() if key in line}
    table(["run and exit", *(f"step {step}" for step in sorted(steps))])
    for name, values in found.items():
        row(name, *(f"{values[step]:.2f}" if step in values else "-" for step in sorted(steps)))
    return found


def table(columns: Sequence[str]) -> None:
    """The head of a table in Markdown."""
    row(*columns)
    row(*("---" for _ in columns))


def row(*cells: str) -> None:
    """A line of it."""
    print(f"| {' | '.join(cells)} |")


def check_unseen(model: Path, documents: dict[str, list[Document]]) -> None:
    """ValueError where a model's own account of its data (data.json) knows other held-out documents: with another Python or
    other files, some of these may have been trained on."""
    account = json.loads((model / "data.json").read_text())["sources"]
    for source, own in documents.items():
        here = {"documents": len(own), "bytes": sum(len(document.text.encode()) for document in own)}
        there = {key: account[source]["held_out"][key] for key in here}
        if here != there:
            raise ValueError(f"the held-out part of {source!r} is {here} here and was {there} in training")


# --------------------------------------------------------------------------------------------- commands


@dataclass
class Line:
    """One decoding method of one model over all requests. outputs: (answer, output) of each. base: the line that its time and
    its texts are held against, plain decoding of the same model."""

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
    model, taking turns request by request.

    control: a model of which plain decoding alone is a row. lengths, vocabulary, threshold: LayerSkip's
    `num_speculative_tokens`, the file of its `draft_vocabulary`, and its `confidence_threshold`."""
    drafts: dict[str, Any] = {
        "num_speculative_tokens": lengths,
        "draft_vocabulary": vocabulary,
        "confidence_threshold": threshold,
    }
    folders = named([*models, *([control] if control else [])])
    loaded = {name: skipstone.load(folder, dtype=torch.float32) for name, folder in folders.items()}
    tokenizer = loaded[called(models[0])][1]
    lines: list[Line] = []
    for name, (network, its_tokenizer) in loaded.items():
        if its_tokenizer.get_vocab() != tokenizer.get_vocab():
            raise SystemExit(f"{folders[name]} has another tokenizer than {models[0]}")
        front = f"{name}, " if len(loaded) > 1 else ""
        plain = Line(f"{front}autoregressive", skipstone.Autoregressive(), network)
        lines.append(plain)
        if folders[name] == control:
            continue
        exit_methods = [(f"early exit, E = {e}", skipstone.EarlyExit(exit_layer=e)) for e in layers]
        exit_methods += [(f"LayerSkip, E = {e}", skipstone.LayerSkip(exit_layer=e, **drafts)) for e in layers]
        lines += [Line(front + told, method, network, plain) for told, method in exit_methods]
    for line in lines:  # what a first call costs is no part of the figures
        _continue(replace(line, outputs=[]), tokenizer, torch.tensor([tokenizer.encode("> call home\n")]), "")
    for number, example in enumerate(commands.examples("test", count, 0)):
        ids = torch.tensor([tokenizer.encode(example.prompt)])
        turn = number % len(lines)
        for line in [*lines[turn:], *lines[:turn]]:
            _continue(line, tokenizer, ids, example.answer)
    rows = {line.name: _figures(line) for line in lines}
    table(["generation", "EM", "token acceptance", "time per token (ms)", "speed-up", "texts as autoregressive"])
    for name, one in rows.items():
        acceptance = "-" if one["acceptance"] is None else f"{100 * one['acceptance']:.1f} %"
        pace = f"{one['ms_per_token']:.2f}"
        row(
            name, f"{100 * one['exact_match']:.1f}", acceptance, pace, f"{one['speed_up']:.2f} x", f"{one['same_text']}/{count}"
        )
    return {"requests": count, **drafts, "rows": rows}


def _figures(line: Line) -> dict[str, Any]:
    base = line.base or line
    pace = line.seconds / line.tokens
    return {
        "exact_match": commands.score(line.outputs)["exact_match"],
        "acceptance": line.accepted / line.drafted if line.drafted else None,
        "ms_per_token": 1000 * pace,
        "speed_up": base.seconds / base.tokens / pace,
        "same_text": sum(own[1] == other[1] for own, other in zip(line.outputs, base.outputs, strict=True)),
    }


def _continue(line: Line, tokenizer: Any, ids: torch.Tensor, answer: str) -> None:
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
    """The share of continuations that parse and the median share of repeated 8-grams: of the files' own next tokens, and of
    the model's at every temperature."""
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
    """Prompt files for the benchmark (recipes/measure/nano.yaml): test requests with their answers, and beginnings of held-out
    functions."""
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

    def about_data(verb: argparse.ArgumentParser) -> None:
        verb.add_argument("--recipe", type=Path, default=Path(__file__).parents[1] / "train" / "nano.yaml")
        verb.add_argument("--data-dir", type=Path, help="JSON lines for the data sets of the hub, as in training")

    one = verb("exits")
    one.add_argument("models", nargs="+")
    about_data(one)
    one.add_argument("--rows", type=int, default=64, help="rows of held-out text a source")
    one.add_argument("--exit-layers", default=",".join(map(str, EXITS)), help="exits that are printed")
    five = verb("curves")
    five.add_argument("runs", nargs="+", type=Path)
    five.add_argument("--source", required=True, help="a name of the recipe's data.sources")
    five.add_argument("--exit-layers", required=True)
    two = verb("commands")
    two.add_argument("models", nargs="+")
    two.add_argument("--control", help="a model of which plain decoding alone is a row")
    two.add_argument("--count", type=int, default=100)
    two.add_argument("--exit-layers", default=",".join(map(str, EXITS)))
    two.add_argument("--num-speculative-tokens", type=int, default=7)
    two.add_argument("--confidence-threshold", type=float)
    two.add_argument("--draft-vocabulary", help="a file of token ids, as in recipes/smollm2/shortlist.py")
    three = verb("parse")
    three.add_argument("model")
    about_data(three)
    three.add_argument("--count", type=int, default=100)
    three.add_argument("--temperatures", default="0.2,0.8,1")
    four = verb("prompts")
    four.add_argument("model")
    four.add_argument("folder", type=Path)
    about_data(four)
    four.add_argument("--count", type=int, default=100)
    given = parser.parse_args()
    layers = [int(layer) for layer in given.exit_layers.split(",")] if "exit_layers" in given else []
    if given.verb == "exits":
        document = exits(given.models, given.recipe, given.data_dir, given.rows, layers)
    elif given.verb == "curves":
        document = curves(given.runs, given.source, layers)
    elif given.verb == "commands":
        document = requests(
            given.models,
            given.count,
            layers,
            given.num_speculative_tokens,
            given.control,
            given.draft_vocabulary,
            given.confidence_threshold,
        )
    elif given.verb == "parse":
        temperatures = [float(temperature) for temperature in given.temperatures.split(",")]
        document = parse(given.model, given.recipe, given.data_dir, given.count, temperatures)
    else:
        document = prompts(given.model, given.folder, given.recipe, given.data_dir, given.count)
    print(json.dumps({"kind": f"nano-{given.verb}", **document}))


if __name__ == "__main__":
    main()
