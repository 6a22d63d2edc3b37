"""`skipstone costs`: what a plain step, a pass over n tokens and a draft step cost here, for a model on its engine."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from skipstone.cli import options, terminal
from skipstone.cli.options import option

if TYPE_CHECKING:
    from skipstone.lab.timing.measure_costs import StoredCosts


def costs(
    model: options.Model = None,
    batch: Annotated[list[int] | None, option("A batch size; may be given several times. Default: 1 and 8.", min=1)] = None,
    draft_model: Annotated[
        list[str] | None, option("A draft model whose steps are measured, too; may be given several times.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure anew, whatever is kept from earlier.")] = False,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    engine: options.Engine = "auto",
    quantize: options.Quantize = "none",
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """What steps, passes and drafts cost on this machine: measured once for a model, engine, dtype and number of threads, and
    kept."""
    for name in (model, *(draft_model or ())):
        options.check_model(name)
    from skipstone.engines.loading import BUNDLED
    from skipstone.engines.model_runner import ModelRunner
    from skipstone.lab.timing.measure_costs import BATCHES, costs_of
    from skipstone.methods.drafting.draft_model import draft_model_for

    loaded, _ = options.load(model, dtype, device, engine=engine, quantize=quantize, keep_weights=False)
    runner = ModelRunner(loaded)
    drafts = [draft_model_for(name, runner) for name in draft_model or ()]
    found = costs_of(runner, tuple(sorted(set(batch or BATCHES))), drafts, again)
    if as_json:
        about = {"kind": "skipstone-costs", "model": model or BUNDLED, "key": found.key, "measured": found.measured}
        about |= {"seconds": found.seconds, "fresh": found.fresh, "path": None if found.path is None else str(found.path)}
        print(json.dumps({**about, **asdict(found.costs)}))
        return
    show(model or BUNDLED, found)


def show(name: str, found: "StoredCosts") -> None:
    """Two tables for every batch size, and the figures beside them."""
    from rich import box
    from rich.table import Column, Table

    console = terminal.console()
    key = found.key
    console.print(f"{name}, {key['dtype'].removeprefix('torch.')}, engine {key['engine']}: {key['detail']}", soft_wrap=True)
    for one in found.costs.batches:
        plain = 1000 * one.plain
        console.print(f"\nbatch {one.batch}: a plain step {plain:.2f} ms, {one.batch / one.plain:.0f} tokens/s", soft_wrap=True)
        rows = [("score", "tokens", place, one.scoring(place)) for place in one.scoring.places]
        rows += [("draft step", "layers", place, one.exits(place)) for place in one.exits.places]
        table = Table(
            *(Column(title, justify="right") for title in ("", "n", "ms", "plain steps")),
            box=box.SIMPLE_HEAD,
            padding=(0, 1),
            pad_edge=False,
        )
        for what, unit, place, seconds in rows:
            table.add_row(what, f"{place} {unit}", f"{1000 * seconds:.3f}", f"{seconds / one.plain:.2f}")
        console.print(table)
        rest = {"rest of a step": one.fixed, "beginning a chain": one.chain, "an attention left out saves": one.attention}
        rest |= {"an MLP": one.mlp, "100 tokens of context": 100 * one.context_slope(1)}
        rest |= {f"a draft step of draft model {name[:8]}": seconds for name, seconds in one.draft_models.items()}
        told = "; ".join(f"{what} {1000 * seconds:.3f} ms" for what, seconds in rest.items())
        console.print(f"{told}; behind {one.context} tokens, spread {100 * one.spread:.0f} %", soft_wrap=True)
    if any(one.busy for one in found.costs.batches):
        console.print("\nThe machine had other work to do, all times are too long: --again measures anew.", soft_wrap=True)
    where = "kept nowhere: the cache folder cannot be written" if found.path is None else f"kept in {found.path}"
    console.print(f"\nmeasured {found.measured} in {found.seconds:.1f} s, {where}", soft_wrap=True)
