"""`skipstone search MODEL`: finds a layer set to draft with by measurement and writes it into a profile."""

import math
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

SEARCHES = ("linear_ts", "bayesian")

if TYPE_CHECKING:
    from skipstone.lab.search.search import LayerSetResult, SearchResult


def search(
    *,
    search: str = option("linear_ts", "our search, or Draft & Verify's, which decodes with every set.", choices=SEARCHES),
    budget_seconds: float | None = option(
        None, "How long to search, interrupted runs included. Default: 60 for linear_ts without --iterations.", min=1
    ),
    iterations: int | None = option(
        None, "How many sets to try, interrupted runs included. Default: 200 for bayesian without --budget-seconds.", min=1
    ),
    out: Path = option(Path("profile.json"), "The profile. Its trials lie next to it, so that a search goes on."),
    prompt: PromptOptions,
    max_new_tokens: int = option(32, "Tokens of each text.", min=4),
    skip_ratio: float | None = option(None, "Share of sublayers that linear_ts leaves out. Default: several take turns."),
    num_speculative_tokens: int = option(12, "Most drafts a step.", min=1),
    picture: Path | None = option(None, "Save the curve of the best so far, as PNG."),
    model: ModelOptions,
    seed: int = option(0, "", min=0),
) -> None:
    """Find the layers that drafting can leave out, for the methods self_speculative and swift (their setting `profile`)."""
    expect_writable(out, picture)
    if skip_ratio is not None and not 0 < skip_ratio < 1:
        raise ValueError(f"--skip-ratio must lie between 0 and 1, found {skip_ratio}")
    if search == "bayesian":
        installed("bayes_opt", "--search bayesian needs bayesian-optimization", "search")
        if skip_ratio is not None:
            raise ValueError("--skip-ratio has no effect: --search bayesian decides about every sublayer by itself")
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
    settings = searching.SearchSettings(prompts, max_new_tokens, ratios, num_speculative_tokens, seed=seed, search=search)
    seconds, trials = _limits(search, budget_seconds, iterations)
    fastest, on_terminal = 0.0, sys.stderr.isatty()
    with terminal.watched_processor(), progress_bar("searching", seconds if trials == math.inf else trials) as update:

        def report(result: "SearchResult", spent: float) -> None:
            """Show the best so far; without a terminal, only if it is a better one."""
            nonlocal fastest
            speed = (result.best and result.best.speed) or 0.0
            completed = spent if trials == math.inf else len(result.trials)
            update(completed, f"searching: {len(result.trials)} sets" + (f", best {speed:.2f} x" if speed else ""))
            if speed > fastest and not on_terminal:
                typer.echo(f"{spent:.0f} s: {speed:.2f} x after {len(result.trials)} sets", err=True)
            fastest = max(fastest, speed)

        result = searching.search(loaded, settings, seconds, out.with_name(out.name + ".trials"), report, trials)
        best = result.best
        if best is None:
            raise ValueError(f"{len(result.trials)} trials are too few: no set was decoded yet; go on with a larger budget")
    about = {"speed": best.speed, "acceptance": best.acceptance, "matchness": best.matchness, "trials": len(result.trials)}
    save_profile(out, loaded, about, best.attention, best.mlp, model.name)
    if picture is not None:
        figure, axes = new_figure((6.4, 3.6))
        axes.step(*zip(*result.curve, strict=True), where="post")
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set(xlabel="seconds of search", ylabel="x plain decoding, best so far")
        write_whole(picture, image_of(figure))
    _show_best(result, best, out, num_speculative_tokens)


def _limits(search: str, budget_seconds: float | None, iterations: int | None) -> tuple[float, float]:
    """The most seconds and trials. Without limits our search has a minute, and Draft & Verify's 200 trials as in AdaDecode's
    comparison (arXiv 2506.03700, appendix C)."""
    if budget_seconds is None and iterations is None:
        return (math.inf, 200) if search == "bayesian" else (60.0, math.inf)
    return budget_seconds or math.inf, iterations or math.inf


def _show_best(result: "SearchResult", best: "LayerSetResult", out: Path, num_speculative_tokens: int) -> None:
    from skipstone.decoding.settings import spell_value
    from skipstone.methods.self_speculative import SelfSpeculative

    skipped = len(best.attention) + len(best.mlp)
    decoded = sum(trial.speed is not None for trial in result.trials)
    rates = "" if best.matchness is None else f"matchness {best.matchness:.2f}, "
    rates += f"acceptance rate {best.acceptance:.2f}"
    tried = f"best of {decoded} sets decoded with ({len(result.trials)} tried)"
    typer.echo(f"{tried}: steady {best.speed:.2f} x plain decoding, {skipped} sublayers left out, {rates}")
    if (best.speed or 0) < 1:
        typer.echo("No set pays on this model and machine.")
    is_default = num_speculative_tokens == SelfSpeculative.num_speculative_tokens
    more = "" if is_default else f" num_speculative_tokens={num_speculative_tokens}"
    typer.echo(f'skipstone generate ... --method "self_speculative profile={spell_value(str(out))}{more}"')
