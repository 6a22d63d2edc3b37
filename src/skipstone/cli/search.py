"""`skipstone search MODEL`: a layer set to draft with, found by measurement within a time, written into a profile."""

from __future__ import annotations

import time
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skipstone.cli import options
from skipstone.cli.options import option

if TYPE_CHECKING:
    from skipstone.search.search import Found, Trial


def search(
    model: options.Model = None,
    budget_seconds: Annotated[float, typer.Option(help="How long to search, interrupted runs included.", min=1)] = 60.0,
    out: Annotated[Path, typer.Option(help="The profile. Its trials stand beside it, so that a search goes on.")] = Path(
        "profile.json"
    ),
    prompt: Annotated[
        list[str] | None, typer.Option(help="A text to search on; several times. Default: bundled prompts.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of each text.", min=4)] = 32,
    skip_ratio: Annotated[float | None, option("Share of sublayers to leave out. Default: several take turns.")] = None,
    num_speculative_tokens: Annotated[int, typer.Option(help="Most drafts a step.", min=1)] = 12,
    picture: Annotated[Path | None, option("Save the curve of the best so far, as PNG.")] = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    debug: options.Debug = False,
) -> None:
    """Find the layers that drafting can leave out, for the methods self_speculative and swift (their setting `profile`)."""
    options.check_dtype(dtype)
    options.check_folder_of(out, picture)
    for path in (out, picture):
        if path is not None and path.is_dir():
            raise ValueError(f"{path} is a folder; name a file")
    if skip_ratio is not None and not 0 < skip_ratio < 1:
        raise ValueError(f"--skip-ratio must lie between 0 and 1, found {skip_ratio}")
    if picture is not None and find_spec("matplotlib") is None:
        raise ImportError('pictures need matplotlib: pip install "skipstone[bench]"')
    from skipstone.search import search as searching

    loaded, tokenizer = options.load(model, dtype, device)
    _, texts = options.texts_or_bundled(prompt, tokenizer)
    ratios = searching.RATIOS if skip_ratio is None else (skip_ratio,)
    settings = searching.SearchSettings(texts, max_new_tokens, ratios, num_speculative_tokens, seed=seed)
    with _progress(budget_seconds) as done:
        found = searching.search(loaded, settings, budget_seconds, out.with_name(out.name + ".trials"), done)
    if found.best is None:
        raise ValueError(f"{budget_seconds:g} seconds are too few: no set was decoded with yet; go on with a larger budget")
    _save(found, found.best, loaded, model, out)
    if picture is not None:
        _draw(found, picture)
    _tell(found, found.best, out, num_speculative_tokens)


def _save(found: Found, best: Trial, model: Any, name: str | None, out: Path) -> None:
    """Write the best layer set as a profile."""
    from skipstone.loading import BUNDLED
    from skipstone.methods.shared.layer_sets import save_profile

    about = {"speed": best.speed, "acceptance": best.acceptance, "matchness": best.matchness, "trials": len(found.trials)}
    save_profile(out, model, about, best.attention, best.mlp, name or BUNDLED)


def _tell(found: Found, best: Trial, out: Path, drafts: int) -> None:
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


class _progress:
    """A bar of the budget on a terminal, with the best so far; a line at every better set elsewhere."""

    def __init__(self, budget: float) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        self.terminal, self.best, self.begun = console.is_terminal, 0.0, time.perf_counter()
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, console=console, transient=True, disable=not self.terminal)
        self.task = self.bar.add_task("searching", total=budget)

    def __enter__(self) -> Any:
        self.bar.__enter__()
        return self.done

    def __exit__(self, *error: Any) -> None:
        self.bar.__exit__(*error)

    def done(self, found: Found, spent: float) -> None:
        best = found.best
        speed = 0.0 if best is None or best.speed is None else best.speed
        told = f"searching: {len(found.trials)} sets, best {speed:.2f} x" if best else f"searching: {len(found.trials)} sets"
        self.bar.update(self.task, completed=spent, description=told)
        if speed > self.best and not self.terminal:
            typer.echo(f"{spent:.0f} s: {speed:.2f} x after {len(found.trials)} sets", err=True)
        self.best = max(self.best, speed)


def _draw(found: Found, path: Path) -> None:
    from matplotlib.figure import Figure

    from skipstone.files import write_whole

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    seconds, speeds = zip(*found.curve, strict=True)
    axes.step(seconds, speeds, where="post")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xlabel("seconds of search")
    axes.set_ylabel("x plain decoding, best so far")
    image = BytesIO()
    figure.savefig(image, format="png", dpi=120)
    write_whole(path, image.getvalue())
