"""`skipstone inspect`: what every layer already knows of a text, and where an early exit would pay."""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skipstone.cli import options, terminal
from skipstone.cli.options import option

if TYPE_CHECKING:
    from skipstone.lab.inspect.lens import HeadLens, Lens
    from skipstone.methods.auto.policy_log import Replayed


def inspect(
    model: options.Model = None,
    prompt: Annotated[
        list[str] | None, option("What to continue; may be given several times. Default: bundled prompts.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to look at, of each prompt.", min=1)] = 32,
    heads: Annotated[str | None, option("Look through AdaDecode's exit heads too: a folder, a hub id, or a name.")] = None,
    replay: Annotated[Path | None, option("Decide again what a log of auto's decisions holds (`auto log=FILE`).")] = None,
    out: Annotated[Path | None, option("Save the pictures: a .png file, or a .html page; with --replay .png or .svg.")] = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    engine: options.Engine = "auto",
    quantize: options.Quantize = "none",
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """The logit lens: each layer's best token, agreement, similarity and time, and what drafting with its first layers would
    bring on this machine."""
    _check_files(replay, out)
    if replay is not None:
        return show_decisions(replay, as_json, out)
    asked = options.texts_or_bundled(prompt)
    options.check_model(model)
    import torch

    from skipstone.engines.loading import BUNDLED
    from skipstone.engines.model_runner import ModelRunner
    from skipstone.lab.inspect.lens import look, save, through
    from skipstone.methods.adadecode.heads import load_heads

    loaded, tokenizer = options.load(model, dtype, device, engine=engine, quantize=quantize, keep_weights=False)
    exit_heads = None if heads is None else load_heads(heads, ModelRunner(loaded))
    prompts = options.ids_of(asked, tokenizer)
    lens = look(loaded, prompts, max_new_tokens)
    words = [[str(tokenizer.decode([token])) for token in row] for row in lens.top]  # [L][n], every layer's best tokens
    final = [str(tokenizer.decode([token])) for token in lens.tokens]  # [n], those that were generated
    seen = None
    if exit_heads is not None:
        answers = torch.tensor(lens.tokens, dtype=torch.int64, device="cpu").tensor_split(lens.breaks[1:])
        seen = through(loaded, exit_heads, list(zip(prompts, answers, strict=True)))
    for path in () if out is None else save(lens, words, final, out, seen):
        print(f"skipstone: {path}", file=sys.stderr)
    if as_json:
        texts = {"prompts": asked, "texts": final, "top_texts": words}
        found = {"kind": "skipstone-inspect", "model": model or BUNDLED, **computed_by(loaded), **texts, **asdict(lens)}
        print(json.dumps(found if seen is None else {**found, "heads": asdict(seen)}))
        return None
    show_layers(lens)
    return None if seen is None else show_heads(seen)


def _check_files(replay: Path | None, out: Path | None) -> None:
    """OSError or ValueError for files that cannot be read or written."""
    suffixes = (".png", ".html") if replay is None else (".png", ".svg")
    if out is not None and out.suffix not in suffixes:
        raise ValueError(f"--out is a .png file or a {suffixes[1]} {'page' if replay is None else 'one'}, found {out}")
    options.check_writable(out)
    options.check_readable(replay)


def show_decisions(path: Path, as_json: bool, out: Path | None) -> None:
    """Every decision of a file with what it rested on, made again, and how many are the recorded ones."""
    from itertools import groupby

    from skipstone.lab.inspect.decisions import save
    from skipstone.methods.auto.policy_log import replayed

    found = list(replayed(path, time.perf_counter))
    if out is not None:
        save(found, out)
        print(f"skipstone: {out}", file=sys.stderr)
    same = sum(one.is_same for one in found)
    if as_json:
        decisions = [
            {
                "position": one.position,
                "tokens": one.tokens,
                "same": one.is_same,
                "kind": one.again.kind,
                "reason": one.again.reason,
                "plain_steps_lost": one.lost,
            }
            for one in found
        ]
        print(json.dumps({"kind": "skipstone-replay", "decisions": decisions, "same": same}))
        return
    table = _table("at token", "steps", "drafter", "tokens", "because")
    for (kind, reason), group in groupby(found, lambda one: (one.again.kind, one.again.reason)):
        plans = list(group)
        steps, tokens = sum(one.steps for one in plans), sum(one.tokens for one in plans)
        table.add_row(str(plans[0].position), str(steps), kind, f"{tokens:g}", reason)
    terminal.console().print(table)
    terminal.console().print(_losses(found))
    print(f"{same} of {len(found)} decisions are as recorded{_durations(found) if found else ''}")


def _losses(found: "list[Replayed]") -> Any:
    """What kinds of decisions come to beside plain decoding, those that lose most first."""
    table = _table("drafter", "plans", "steps", "tokens", "plain steps lost")
    kinds = {kind: [one for one in found if one.again.kind == kind] for kind in {one.again.kind for one in found}}
    for kind, plans in sorted(kinds.items(), key=lambda each: -sum(one.lost for one in each[1])):
        steps, tokens = sum(one.steps for one in plans), sum(one.tokens for one in plans)
        table.add_row(kind, str(len(plans)), str(steps), f"{tokens:g}", f"{sum(one.lost for one in plans):.1f}")
    return table


def _durations(found: "list[Replayed]") -> str:
    """What deciding and learning take now."""
    from statistics import median

    deciding, learning = 1e6 * median(one.deciding for one in found), 1e6 * median(one.learning for one in found)
    steps = sum(one.steps for one in found) / len(found)
    return f", {deciding:.0f} us to decide and {learning:.0f} us to learn from it, in the middle, for {steps:.1f} steps"


def computed_by(loaded: Any) -> dict[str, str | None]:
    """What a model is computed in, where and by what."""
    from skipstone.engines.model_runner import ModelRunner

    engine, dtype = ModelRunner(loaded).engine, str(loaded.dtype).removeprefix("torch.")
    return {"dtype": dtype, "device": str(loaded.device), "engine": engine.name, "quantize": engine.quantize}


def show_layers(lens: "Lens") -> None:
    """A line a layer, and the answer."""
    table = _table("layer", "agreement", "final from here on", "cosine", "ms", "draft length", "expected x plain")
    best = max(lens.expected, key=lambda one: one.speed_up, default=None)
    for index, agreement in enumerate(lens.agreement):
        one = lens.expected[index] if index < len(lens.expected) else None
        pays = "" if one is None else f"{one.speed_up:.2f}{' *' if one is best else ''}"
        table.add_row(
            str(index + 1),
            f"{agreement:.2f}",
            f"{sum(first <= index + 1 for first in lens.first) / len(lens.first):.2f}",
            f"{lens.similarity[index]:.3f}",
            f"{1000 * lens.costs.layers[index]:.2f}",
            "" if one is None else str(one.num_speculative_tokens),
            pays,
        )
    console = terminal.console()
    console.print(table)
    if best is not None and best.speed_up > 1:
        console.print(
            f'LayerSkip would pay most with --method "layerskip exit_layer={best.exit_layer} '
            f'num_speculative_tokens={best.num_speculative_tokens}": {best.speed_up:.2f} x plain decoding, were agreement '
            f"{best.agreement:.2f} at every token."
        )
    else:
        console.print("No early exit of this model pays: its layers agree too late. Train one, or use a method without exits.")


def show_heads(seen: "HeadLens") -> None:
    """A line an exit: as the model's own head reads it, and as the exit head does."""
    table = _table("exit", "KL, LM head", "KL, exit head", "agreement, LM head", "agreement, exit head")
    columns = (seen.own.divergence, seen.trained.divergence, seen.own.agreement, seen.trained.agreement)
    for layer, *figures in zip(seen.layers[:-1], *(column[:-1] for column in columns), strict=True):
        table.add_row(str(layer), *(f"{one:.3f}" for one in figures[:2]), *(f"{one:.2f}" for one in figures[2:]))
    terminal.console().print(table)


def _table(*titles: str) -> Any:
    """A table of figures without rules between its rows."""
    from rich import box
    from rich.table import Column, Table

    return Table(*(Column(title, justify="right") for title in titles), box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
