"""`skipstone tune`: what drafts best on a user's own prompts, found by decoding them, and kept for every later run."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skipstone.cli import options, terminal
from skipstone.cli.options import option

if TYPE_CHECKING:
    from skipstone.lab.search.tune import TuningResult


def tune(
    model: options.Model = None,
    prompt: Annotated[list[str] | None, option("A text to decode; several times. Default: bundled prompts.")] = None,
    prompts: Annotated[
        list[Path] | None, option('JSON lines with a "prompt", in the place of --prompt; several times.')
    ] = None,
    budget_seconds: Annotated[float, typer.Option(help="How long to decode; every prompt once in any case.", min=1)] = 60.0,
    method: Annotated[
        list[str] | None, option("A candidate beside the usual ones, such as 'speculative draft_model=FOLDER'; several times.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of each text.", min=8)] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0.0)] = 0.0,
    keep: Annotated[bool, typer.Option(help="Keep what was found, for `auto` in every later run.")] = True,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    engine: options.Engine = "auto",
    quantize: options.Quantize = "none",
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Decode your own prompts with `auto`, say what every candidate brings, and keep what was measured for later runs."""
    for one in method or ():
        options.asked_method(one)
    asked = options.texts_or_bundled(prompt, prompts)
    options.check_model(model)
    from skipstone.engines.loading import BUNDLED
    from skipstone.engines.model_runner import ModelRunner
    from skipstone.lab.search import tune as tuning
    from skipstone.methods import resolve
    from skipstone.methods.auto.saved_profile import save_profile

    more = [resolve(one) for one in method or ()]
    loaded, tokenizer = options.load(model, dtype, device, engine=engine, quantize=quantize, keep_weights=False)
    texts = options.ids_of(asked, tokenizer)
    fields: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    fields |= {"temperature": temperature} if temperature > 0 else {}
    found = None
    for found in tuning.tune(loaded, texts, more, budget_seconds, fields):
        typer.echo(f"{found.texts} texts: {found.speed_up:.2f} x plain decoding", err=True)
    if found is None:
        raise ValueError("nothing was decoded: every text ended with its first token")
    said = tuning.recommendation(found)
    about = {"texts": found.texts, "speed_up": found.speed_up, "recommendation": said}
    path = save_profile(ModelRunner(loaded), found.policy, found.identities, about) if keep else None
    if as_json:
        document = {"kind": "skipstone-tune", "model": model or BUNDLED, **about, "path": None if path is None else str(path)}
        document |= {"plain_seconds": found.plain_seconds, "candidates": [asdict(one) for one in found.candidates]}
        print(json.dumps({**document, "stats": found.stats.summary()}))
        return
    show(model or BUNDLED, found, said, path)


def show(name: str, found: "TuningResult", said: str, path: Path | None) -> None:
    """A line a candidate, and what to do."""
    from rich import box
    from rich.table import Column, Table

    console = terminal.console()
    console.print(f"{name}: {found.texts} texts, a plain step takes {1000 * found.plain_seconds:.2f} ms", soft_wrap=True)
    titles = ("candidate", "x plain", "acceptance", "a draft step, plain steps", "turns")
    table = Table(*(Column(title, justify="right") for title in titles), box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for one in found.candidates:
        figures = ("-" if value is None else f"{value:.2f}" for value in (one.acceptance, one.draft_step))
        table.add_row(one.name, f"{one.rate:.2f}", *figures, str(one.turns))
    console.print(table)
    console.print(said, soft_wrap=True)
    if path is not None:
        console.print(f"kept in {path}", soft_wrap=True)
