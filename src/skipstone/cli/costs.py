"""`skipstone costs`: what a plain step, a pass over n tokens and a draft step cost here, for a model on its engine."""

from dataclasses import asdict
from typing import TYPE_CHECKING

from skipstone.cli import terminal
from skipstone.cli.option_groups import ModelOptions, expect_model
from skipstone.cli.options import AS_JSON, option

if TYPE_CHECKING:
    from skipstone.lab.timing.measure_costs import StoredCosts


def costs(
    model: ModelOptions,
    batch: list[int] | None = option(None, "A batch size; may be given several times. Default: 1 and 8.", min=1),
    draft_model: list[str] | None = option(None, "A draft model whose steps are measured, too; may be given several times."),
    again: bool = option(False, "Measure anew, even if costs are stored.", "--again"),
    as_json: bool = AS_JSON,
) -> None:
    """What steps, passes and drafts cost on this machine. They are measured once for a model, engine, dtype and number of
    threads, and stored."""
    for name in (model.model, *(draft_model or ())):
        expect_model(name)
    from skipstone.engines.model_runner import ModelRunner
    from skipstone.lab.timing.measure_costs import BATCHES, costs_of
    from skipstone.methods.speculative import Speculative

    runner = ModelRunner(model.load()[0])
    drafts = [Speculative(name).draft_model_for(runner) for name in draft_model or ()]
    stored = costs_of(runner, tuple(sorted(set(batch or BATCHES))), drafts, again)
    if as_json:
        about = {"kind": "skipstone-costs", "model": model.name, "key": stored.key, "measured": stored.measured}
        about |= {"seconds": stored.seconds, "fresh": stored.fresh, "path": None if stored.path is None else str(stored.path)}
        terminal.print_json({**about, **asdict(stored.costs)})
    else:
        show_costs(model.name, stored)


def show_costs(name: str, stored: "StoredCosts") -> None:
    """Per batch size a table of passes and draft steps, and a line of further costs."""
    key = stored.key
    print(f"{name}, {key['dtype'].removeprefix('torch.')}, engine {key['engine']}: {key['detail']}")
    for costs in stored.costs.batches:
        rate = costs.batch / costs.plain
        print(f"\nbatch {costs.batch}: a plain step {1000 * costs.plain:.2f} ms, steady {rate:.0f} tokens/s")
        rows = [
            (what, f"{n} {unit}", f"{1000 * curve(n):.3f}", f"{curve(n) / costs.plain:.2f}")
            for what, unit, curve in (("score", "tokens", costs.scoring), ("draft step", "layers", costs.exits))
            for n in curve.places
        ]
        terminal.print_table(("", "n", "ms", "plain steps"), rows)
        rest = {"rest of a step": costs.fixed, "beginning a chain": costs.chain, "an attention left out saves": costs.attention}
        rest |= {"an MLP": costs.mlp, "100 tokens of context": 100 * costs.context_slope(1)}
        rest |= {f"a draft step of draft model {name[:8]}": seconds for name, seconds in costs.draft_models.items()}
        line = "; ".join(f"{what} {1000 * seconds:.3f} ms" for what, seconds in rest.items())
        print(f"{line}; behind {costs.context} tokens, spread {100 * costs.spread:.0f} %")
    if any(costs.busy for costs in stored.costs.batches):
        print("\nThe machine was busy, so all times are too long: --again measures anew.")
    where = "stored nowhere: the cache folder cannot be written" if stored.path is None else f"stored in {stored.path}"
    print(f"\nmeasured {stored.measured} in {stored.seconds:.1f} s, {where}")
