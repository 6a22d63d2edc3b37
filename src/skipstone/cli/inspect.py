"""`skipstone inspect`: what every layer already knows of a text, and where an early exit would pay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skipstone.cli import terminal
from skipstone.cli.options import DTYPES

if TYPE_CHECKING:
    from skipstone.bench.lens import Lens


def inspect(
    ctx: typer.Context,
    model: Annotated[
        str | None, typer.Argument(help="A folder or a hub id. Default: the bundled model.", metavar="MODEL")
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="What to continue; may be given several times. Default: bundled prompts.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to look at, of each prompt.", min=1)] = 32,
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
    with terminal.quiet(debug):
        _run(model, prompt, max_new_tokens, out, dtype, device, json_)


def _run(
    name: str | None, texts: list[str] | None, count: int, out: Path | None, dtype: str, device: str, as_json: bool
) -> None:
    import torch

    from skipstone.api import token_ids
    from skipstone.bench.lens import look
    from skipstone.bench.tasks import named
    from skipstone.loading import BUNDLED, load, usable

    if dtype not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, found {dtype!r}")
    if out is not None and out.suffix not in (".png", ".html"):
        raise ValueError(f"--out is a .png file or a .html page, found {out}")
    if out is not None and not out.parent.is_dir():
        raise FileNotFoundError(2, "no such folder", str(out.parent))
    wanted = dtype if dtype == "auto" else getattr(torch, dtype)
    model, tokenizer = load(name, dtype=wanted, device=usable(device))
    task = named("self")
    asked = texts or [task.ask(row)[0] for row in task.rows(None)[::5]]
    prompts = [torch.tensor(token_ids(text, tokenizer)) for text in asked]
    lens = look(model, prompts, count)
    words = [[str(tokenizer.decode([token])) for token in row] for row in lens.top]
    final = [str(tokenizer.decode([token])) for token in lens.tokens]
    if out is not None:
        from skipstone.bench.lens_pictures import save

        for path in save(lens, words, final, out):
            print(f"skipstone: {path}", file=terminal.sys.stderr)
    if as_json:
        about = {
            "model": name or BUNDLED,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(model.device),
        }
        texts_of = {"texts": final, "top_texts": words}
        print(json.dumps({"kind": "skipstone-inspect", **about, "prompts": asked, **texts_of, **lens.report()}))
    else:
        show(lens)


def show(lens: Lens) -> None:
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
