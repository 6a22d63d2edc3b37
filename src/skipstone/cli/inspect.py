"""`skipstone inspect`: what every layer already knows of a text, and where an early exit would pay."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skipstone.cli import terminal
from skipstone.cli.options import DTYPES

if TYPE_CHECKING:
    from skipstone.lens.lens import HeadLens, Lens


def inspect(
    ctx: typer.Context,
    model: Annotated[
        str | None, typer.Argument(help="A folder or a hub id. Default: the bundled model.", metavar="MODEL")
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="What to continue; may be given several times. Default: bundled prompts.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to look at, of each prompt.", min=1)] = 32,
    heads: Annotated[
        str | None,
        typer.Option(help="Look through AdaDecode's exit heads too: a folder, a hub id, or a name.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Save the pictures: a .png file, or a .html page.", show_default=False)
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}; auto is the checkpoint's.")] = "auto",
    device: Annotated[str, typer.Option(help="auto is cuda where there is one, else cpu.")] = "auto",
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.", hidden=True)] = False,
) -> None:
    """The logit lens: each layer's best token, agreement, similarity and time, and what drafting with its first layers would
    bring on this machine."""
    ctx.obj["debug"] = debug
    if dtype not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, found {dtype!r}")
    if out is not None and out.suffix not in (".png", ".html"):
        raise ValueError(f"--out is a .png file or a .html page, found {out}")
    if out is not None and not out.parent.is_dir():
        raise FileNotFoundError(2, "no such folder", str(out.parent))
    with terminal.quiet(debug):
        import torch

        from skipstone.loading import BUNDLED, load, usable

        wanted = dtype if dtype == "auto" else getattr(torch, dtype)
        loaded, tokenizer = load(model, dtype=wanted, device=usable(device))
        seen = _look(loaded, tokenizer, prompt, max_new_tokens, heads)
        if out is not None:
            from skipstone.lens.pictures import save

            for path in save(seen.lens, seen.words, seen.final, out, seen.heads):
                print(f"skipstone: {path}", file=terminal.sys.stderr)
        if json_:
            dtype, device = str(loaded.dtype).removeprefix("torch."), str(loaded.device)
            about = {"kind": "skipstone-inspect", "model": model or BUNDLED, "dtype": dtype, "device": device}
            print(json.dumps({**about, **seen.report()}))
        else:
            show(seen)


@dataclass(frozen=True)
class Seen:
    """prompts: what was asked. words: [L][n], the best tokens as texts; final: [n], those that were generated."""

    prompts: list[str]
    lens: Lens
    words: list[list[str]]
    final: list[str]
    heads: HeadLens | None

    def report(self) -> dict[str, Any]:
        """Plain JSON values."""
        texts = {"prompts": self.prompts, "texts": self.final, "top_texts": self.words}
        return {**texts, **self.lens.report(), **({"heads": self.heads.report()} if self.heads else {})}


def _look(model: Any, tokenizer: Any, texts: list[str] | None, count: int, heads: str | None) -> Seen:
    import torch

    from skipstone.api import token_ids
    from skipstone.lens.lens import look, through
    from skipstone.methods.adadecode import heads as exit_heads
    from skipstone.models.layered import LayeredModel
    from skipstone.tasks.sets import named

    read_by = None if heads is None else exit_heads.load(heads, LayeredModel(model))
    task = named("self")
    asked = texts or [task.ask(row)[0] for row in task.records(None)[::5]]
    prompts = [torch.tensor(token_ids(text, tokenizer)) for text in asked]
    lens = look(model, prompts, count)
    words = [[str(tokenizer.decode([token])) for token in row] for row in lens.top]
    final = [str(tokenizer.decode([token])) for token in lens.tokens]
    pairs = zip(prompts, torch.tensor(lens.tokens).tensor_split(lens.breaks[1:]), strict=True)
    return Seen(asked, lens, words, final, None if read_by is None else through(model, read_by, list(pairs)))


def show(seen: Seen) -> None:
    """What there is to print."""
    show_layers(seen.lens)
    if seen.heads is not None:
        show_heads(seen.heads)


def show_layers(lens: Lens) -> None:
    """A line a layer, and the answer."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for title in ("layer", "agreement", "final from here on", "cosine", "ms", "draft length", "expected x plain"):
        table.add_column(title, justify="right")
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
            f"LayerSkip would pay most with --exit-layer {best.exit_layer} --num-speculative-tokens "
            f"{best.num_speculative_tokens}: {best.speed_up:.2f} x plain decoding, were agreement {best.agreement:.2f} at "
            "every token."
        )
    else:
        console.print("No early exit of this model pays: its layers agree too late. Train one, or use a method without exits.")


def show_heads(seen: HeadLens) -> None:
    """A line an exit: as the model's own head reads it, and as the exit head does."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for title in ("exit", "KL, LM head", "KL, exit head", "agreement, LM head", "agreement, exit head"):
        table.add_column(title, justify="right")
    columns = (seen.own.divergence, seen.trained.divergence, seen.own.agreement, seen.trained.agreement)
    for layer, *figures in zip(seen.layers[:-1], *(column[:-1] for column in columns), strict=True):
        table.add_row(str(layer), *(f"{one:.3f}" for one in figures[:2]), *(f"{one:.2f}" for one in figures[2:]))
    terminal.console().print(table)
