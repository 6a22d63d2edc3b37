"""`skipstone tune`: what drafts best on a user's own prompts, found by decoding them, and kept for every later run."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from skipstone.cli import terminal
from skipstone.cli.option_groups import GenerationModelOptions, MethodOptions, PromptOptions, encode_texts, expect_model
from skipstone.cli.options import AS_JSON, option

if TYPE_CHECKING:
    from skipstone.lab.search.tune import TuningResult


def tune(
    prompt: PromptOptions,
    budget_seconds: float = option(60.0, "How long to decode; every prompt once in any case.", min=1),
    method: list[str] | None = option(None, "A further candidate, such as 'speculative draft_model=FOLDER'; several times."),
    max_new_tokens: int = option(128, "Tokens of each text.", min=8),
    temperature: float = option(0.0, "0 is greedy.", min=0.0),
    keep: bool = option(True, "Save the result, for `auto` in every later run."),
    *,
    model: GenerationModelOptions,
    as_json: bool = AS_JSON,
) -> None:
    """Make the model's copy in int4, decode your own prompts with `auto`, say how fast every candidate is, and save copy and
    measurements for later runs."""
    for text in method or ():
        MethodOptions(text).parse()
    texts = prompt.texts()
    expect_model(model.model)
    from skipstone.decoding.request import generation_options
    from skipstone.engines.model_runner import ModelRunner
    from skipstone.lab.search import tune as tuning
    from skipstone.methods import resolve
    from skipstone.methods.auto.auto import COPY, Auto
    from skipstone.methods.auto.saved_profile import SavedPolicy, key_of, save_profile

    candidates = [resolve(text) for text in method or ()]
    loaded, tokenizer = model.load()
    runner = ModelRunner(loaded)
    if (reason := Auto().make_copy(runner)) is not None:
        typer.echo(f"no copy in {COPY} was made for later runs: {reason}", err=True)
    fields = generation_options(max_new_tokens=max_new_tokens, temperature=temperature)
    result = None
    with terminal.watched_processor() as watch:
        for result in tuning.tune(loaded, encode_texts(texts, tokenizer), candidates, budget_seconds, fields):
            speed_ups = f"{result.speed_up:.2f} x plain decoding, steady {result.steady_speed_up:.2f} x"
            typer.echo(f"{result.texts} texts: {speed_ups}", err=True)
    if result is None:
        raise ValueError("nothing was decoded: every text ended with its first token")
    about = {"texts": result.texts, "speed_up": result.speed_up, "steady_speed_up": result.steady_speed_up}
    about |= {"recommendation": tuning.recommendation(result)}
    saved = SavedPolicy(result.policy, result.identities, about, key_of(runner))
    path = None
    if keep:
        save_profile(runner, saved, by_files=False)  # for the same model from `skipstone.load`
        path = save_profile(runner, saved)
    if as_json:
        document = {"kind": "skipstone-tune", "model": model.name, **about, "path": None if path is None else str(path)}
        document |= {"plain_seconds": result.plain_seconds, "waited_share": watch.waited_share}
        document |= {"candidates": [asdict(one) for one in result.candidates]}
        terminal.print_json({**document, "stats": result.stats.summary()})
    else:
        show_candidates(model.name, result, about["recommendation"], path)


def show_candidates(name: str, result: "TuningResult", recommendation: str, path: Path | None) -> None:
    """A line per candidate, and what to do."""
    print(f"{name}: {result.texts} texts, a plain step takes {1000 * result.plain_seconds:.2f} ms")
    rows = []
    for one in result.candidates:
        figures = ("-" if value is None else f"{value:.2f}" for value in (one.acceptance, one.draft_step))
        rows.append((one.name, f"{one.rate:.2f}", *figures, one.turns))
    terminal.print_table(("candidate", "steady x plain", "acceptance", "a draft step, plain steps", "turns"), rows)
    print(recommendation)
    if path is not None:
        print(f"saved in {path}")
