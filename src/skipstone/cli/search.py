"""`skipstone search MODEL`: a layer set to draft with, found by measurement within a time, written into a profile."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from skipstone.cli import terminal
from skipstone.cli.option_groups import ModelOptions, PromptOptions, encode_texts, expect_model, expect_writable
from skipstone.cli.options import option
from skipstone.utils.extras import installed
from skipstone.utils.files import write_whole
from skipstone.utils.pictures import image_of, new_figure

if TYPE_CHECKING:
    from skipstone.lab.search.search import LayerSetResult, SearchResult


def search(
    *,
    budget_seconds: float = option(60.0, "How long to search, interrupted runs included.", min=1),
    out: Path = option(Path("profile.json"), "The profile. Its trials lie next to it, so that a search goes on."),
    prompt: PromptOptions,
    max_new_tokens: int = option(32, "Tokens of each text.", min=4),
    skip_ratio: float | None = option(None, "Share of sublayers to leave out. Default: several take turns."),
    num_speculative_tokens: int = option(12, "Most drafts a step.", min=1),
    picture: Path | None = option(None, "Save the curve of the best so far, as PNG."),
    model: ModelOptions,
    seed: int = option(0, "", min=0),
) -> None:
    """Find the layers that drafting can leave out, for the methods self_speculative and swift (their setting `profile`)."""
    expect_writable(out, picture)
    if skip_ratio is not None and not 0 < skip_ratio < 1:
        raise ValueError(f"--skip-ratio must lie between 0 and 1, found {skip_ratio}")
    if picture is not None:
        installed("matplotlib.figure", "pictures need matplotlib")
    texts = prompt.texts()
    expect_model(model.model)
    from skipstone.lab.search import search as searching
    from skipstone.methods.drafting.layer_sets import save_profile
    from skipstone.utils.progress import progress_bar

    loaded, tokenizer = model.load()
    ratios = searching.RATIOS if skip_ratio is None else (skip_ratio,)
    prompts = encode_texts(texts, tokenizer)
    settings = searching.SearchSettings(prompts, max_new_tokens, ratios, num_speculative_tokens, seed=seed)
    fastest, on_terminal = 0.0, sys.stderr.isatty()
    with terminal.watched_processor(), progress_bar("searching", budget_seconds) as update:

        def report(result: "SearchResult", seconds: float) -> None:
            """Show the best so far; without a terminal, only if it is a better one."""
            nonlocal fastest
            speed = (result.best and result.best.speed) or 0.0
            update(seconds, f"searching: {len(result.trials)} sets" + (f", best {speed:.2f} x" if speed else ""))
            if speed > fastest and not on_terminal:
                typer.echo(f"{seconds:.0f} s: {speed:.2f} x after {len(result.trials)} sets", err=True)
            fastest = max(fastest, speed)

        result = searching.search(loaded, settings, budget_seconds, out.with_name(out.name + ".trials"), report)
    best = result.best
    if best is None:
        raise ValueError(f"{budget_seconds:g} seconds are too few: no set was decoded with yet; go on with a larger budget")
    about = {"speed": best.speed, "acceptance": best.acceptance, "matchness": best.matchness, "trials": len(result.trials)}
    save_profile(out, loaded, about, best.attention, best.mlp, model.name)
    if picture is not None:
        figure, axes = new_figure((6.4, 3.6))
        axes.step(*zip(*result.curve, strict=True), where="post")
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set(xlabel="seconds of search", ylabel="x plain decoding, best so far")
        write_whole(picture, image_of(figure))
    _show_best(result, best, out, num_speculative_tokens)


def _show_best(result: "SearchResult", best: "LayerSetResult", out: Path, num_speculative_tokens: int) -> None:
    from skipstone.decoding.settings import spell_value
    from skipstone.methods.self_speculative import SelfSpeculative

    skipped = len(best.attention) + len(best.mlp)
    decoded = sum(trial.speed is not None for trial in result.trials)
    rates = f"matchness {best.matchness:.2f}, acceptance rate {best.acceptance:.2f}"
    tried = f"best of {decoded} sets decoded with ({len(result.trials)} tried)"
    typer.echo(f"{tried}: steady {best.speed:.2f} x plain decoding, {skipped} sublayers left out, {rates}")
    if (best.speed or 0) < 1:
        typer.echo("No set pays on this model and machine.")
    is_default = num_speculative_tokens == SelfSpeculative.num_speculative_tokens
    more = "" if is_default else f" num_speculative_tokens={num_speculative_tokens}"
    typer.echo(f'skipstone generate ... --method "self_speculative profile={spell_value(str(out))}{more}"')
