"""`skipstone search MODEL`: a layer set to draft with, found by measurement within a time, written into a profile."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skipstone.cli import options
from skipstone.cli.options import option
from skipstone.utils.extras import installed
from skipstone.utils.files import write_whole

if TYPE_CHECKING:
    from skipstone.lab.search.search import LayerSetResult, SearchResult


def search(
    model: options.Model = None,
    budget_seconds: Annotated[float, typer.Option(help="How long to search, interrupted runs included.", min=1)] = 60.0,
    out: Annotated[Path, typer.Option(help="The profile. Its trials stand beside it, so that a search goes on.")] = Path(
        "profile.json"
    ),
    prompt: Annotated[list[str] | None, option("A text to search on; several times. Default: bundled prompts.")] = None,
    prompts: Annotated[
        list[Path] | None, option('JSON lines with a "prompt", in the place of --prompt; several times.')
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of each text.", min=4)] = 32,
    skip_ratio: Annotated[float | None, option("Share of sublayers to leave out. Default: several take turns.")] = None,
    num_speculative_tokens: Annotated[int, typer.Option(help="Most drafts a step.", min=1)] = 12,
    picture: Annotated[Path | None, option("Save the curve of the best so far, as PNG.")] = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    engine: options.Engine = "auto",
    quantize: options.Quantize = "none",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    debug: options.Debug = False,
) -> None:
    """Find the layers that drafting can leave out, for the methods self_speculative and swift (their setting `profile`)."""
    options.check_writable(out, picture)
    if skip_ratio is not None and not 0 < skip_ratio < 1:
        raise ValueError(f"--skip-ratio must lie between 0 and 1, found {skip_ratio}")
    if picture is not None:
        installed("matplotlib.figure", "pictures need matplotlib")
    asked = options.texts_or_bundled(prompt, prompts)
    options.check_model(model)
    from skipstone.engines.loading import BUNDLED
    from skipstone.lab.search import search as searching
    from skipstone.methods.drafting.layer_sets import save_profile

    loaded, tokenizer = options.load(model, dtype, device, engine=engine, quantize=quantize, keep_weights=False)
    texts = options.ids_of(asked, tokenizer)
    ratios = searching.RATIOS if skip_ratio is None else (skip_ratio,)
    settings = searching.SearchSettings(texts, max_new_tokens, ratios, num_speculative_tokens, seed=seed)
    with _progress(budget_seconds) as done:
        found = searching.search(loaded, settings, budget_seconds, out.with_name(out.name + ".trials"), done)
    if found.best is None:
        raise ValueError(f"{budget_seconds:g} seconds are too few: no set was decoded with yet; go on with a larger budget")
    best = found.best
    about = {"speed": best.speed, "acceptance": best.acceptance, "matchness": best.matchness, "trials": len(found.trials)}
    save_profile(out, loaded, about, best.attention, best.mlp, model or BUNDLED)
    if picture is not None:
        _draw(found, picture)
    _tell(found, best, out, num_speculative_tokens)


def _tell(found: "SearchResult", best: "LayerSetResult", out: Path, drafts: int) -> None:
    from skipstone.decoding.settings import spell_value
    from skipstone.methods.self_speculative import SelfSpeculative

    skipped = len(best.attention) + len(best.mlp)
    decoded = sum(one.speed is not None for one in found.trials)
    typer.echo(
        f"best of {decoded} sets decoded with ({len(found.trials)} tried): {best.speed:.2f} x plain decoding, {skipped} "
        f"sublayers left out, matchness {best.matchness:.2f}, acceptance rate {best.acceptance:.2f}"
    )
    if (best.speed or 0) < 1:
        typer.echo("No set pays on this model and machine.")
    more = "" if drafts == SelfSpeculative.num_speculative_tokens else f" num_speculative_tokens={drafts}"
    typer.echo(f'skipstone generate ... --method "self_speculative profile={spell_value(str(out))}{more}"')


@contextmanager
def _progress(budget: float) -> Iterator[Callable[["SearchResult", float], None]]:
    """A bar of the budget on a terminal, with the best so far; a line at every better set elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console, fastest = Console(stderr=True), 0.0
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("searching", total=budget)

        def done(found: "SearchResult", spent: float) -> None:
            nonlocal fastest
            speed = (found.best and found.best.speed) or 0.0
            told = f"searching: {len(found.trials)} sets"
            bar.update(task, completed=spent, description=f"{told}, best {speed:.2f} x" if speed else told)
            if speed > fastest and not console.is_terminal:
                typer.echo(f"{spent:.0f} s: {speed:.2f} x after {len(found.trials)} sets", err=True)
            fastest = max(fastest, speed)

        yield done


def _draw(found: "SearchResult", path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    seconds, speeds = zip(*found.curve, strict=True)
    axes.step(seconds, speeds, where="post")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(xlabel="seconds of search", ylabel="x plain decoding, best so far")
    image = BytesIO()
    figure.savefig(image, format="png", dpi=120)
    write_whole(path, image.getvalue())
