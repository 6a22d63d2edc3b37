"""What measured costs predict of a method's speed-up: its drafter in a table of costs, and the mean step of what it did.

That the formula holds is known of greedy chains from layers, from a skip set or from a draft model, and of lookups. What
AdaDecode costs follows from the passes and tests that it made.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from skipstone.decoding.method import DraftingMethod, Method
from skipstone.decoding.stats import Stats
from skipstone.decoding.step_costs import LOOKED_UP, BatchCosts, DraftCost, MeanStep
from skipstone.engines.model_runner import ModelRunner
from skipstone.methods.adadecode.adadecode import AdaDecode
from skipstone.methods.drafting.draft_model import DraftModel
from skipstone.methods.drafting.shortlist import ShortlistMethod
from skipstone.methods.jacobi import Jacobi
from skipstone.methods.layerskip import LayerSkip
from skipstone.methods.lookahead import Lookahead
from skipstone.methods.prompt_lookup import PromptLookup
from skipstone.methods.recycle import Recycle
from skipstone.methods.self_speculative import SelfSpeculative
from skipstone.methods.speculative import Speculative
from skipstone.methods.swift.swift import Swift


def described(method: Method, runner: ModelRunner) -> dict[str, Any] | None:
    """The drafter of a method as plain JSON values, which `drafter` finds in a table of costs; None where the formula does not
    hold."""
    if isinstance(method, DraftingMethod) and method.guard:
        return None  # which of its steps draft is decided by the clock
    if isinstance(method, ShortlistMethod) and method.draft_vocabulary is not None:
        return None  # costs are measured with the whole LM head
    if isinstance(method, LayerSkip):
        return {"exit_layer": method.exit_layer} if method.reuse_cache else None
    if getattr(method, "draft_quantize", None) is not None:
        return None  # costs are measured of models as they are
    if isinstance(method, SelfSpeculative):
        skip = method.skip_set(runner)
        return _sublayers(skip.attention, skip.mlp)
    if isinstance(method, Swift):
        return {"learnt": True, "ranked": method.dynamic_verification}
    if isinstance(method, AdaDecode):
        return {"passes": True}
    if isinstance(method, Speculative):
        return {"draft_model": method.draft_model_for(runner).fingerprint}
    return {"looked_up": True} if isinstance(method, (PromptLookup, Lookahead, Jacobi, Recycle)) else None


def draft_model(method: Method, runner: ModelRunner) -> DraftModel | None:
    """The draft model whose steps are to be measured for a method; None for one without, and for one in fewer bits."""
    if not isinstance(method, Speculative) or method.draft_quantize is not None:
        return None
    return method.draft_model_for(runner)


def _sublayers(attention: Any, mlp: Any) -> dict[str, Any]:
    return {"attention": len(attention), "mlp": len(mlp), "both": len({*attention} & {*mlp})}


def drafter(said: Mapping[str, Any], table: BatchCosts, known: Mapping[str, Any] | None) -> DraftCost | None:
    """What a description means in a table of costs; None where the table does not know it. known: what the method had learnt
    after its last prompt."""
    if "learnt" in said:
        if not known or "skipped" not in known:
            return None
        skipped = known["skipped"]
        said = {**_sublayers(skipped["attention"], skipped["mlp"]), "ranked": said["ranked"]}
    if "exit_layer" in said:
        return table.exit(said["exit_layer"])
    if "attention" in said:
        return table.skipping(said["attention"], said["mlp"], said["both"], said.get("ranked", False))
    if "draft_model" in said:
        return table.draft_model(said["draft_model"])
    return LOOKED_UP


def mean_step(total: Stats) -> MeanStep:
    """The steps of some calls at batch 1, probes left out."""
    steps, drafting = max(total.steps, 1), max(total.drafting, 1)
    rows = 1 + total.verified_nodes / drafting
    return MeanStep((total.tokens - total.probes) / steps, total.draft_steps / drafting, rows, total.drafting / steps)


def speedup(
    costs: Mapping[str, Any],
    said: Mapping[str, Any],
    total: Stats,
    context: float,
    known: Mapping[str, Any] | None = None,
    grown: Mapping[str, Any] | None = None,
) -> float | None:
    """What a table of costs, as JSON holds it, predicts of some calls; None where it does not know the drafter, or nothing was
    drafted. context: tokens before a mean step. known: what the method had learnt after the last one. grown: what the calls
    added to the counts in that."""
    table = TypeAdapter(BatchCosts).validate_python(costs)
    if "passes" in said:
        return _by_passes(table, grown, context) if grown and grown["steps"] else None
    found = drafter(said, table, known)
    if found is None or not total.drafting:
        return None
    return table.speedup(found, mean_step(total), context)


def _by_passes(table: BatchCosts, done: Mapping[str, Any], context: float) -> float:
    """The speed-up of AdaDecode at batch 1, from its passes and the tests of its exits, each of which takes as long as the LM
    head. done: the counts of its info, of one step at least."""
    accepted = sum(tally["accepted"] for tally in done["exits"].values())
    layers = rows = 0.0
    for one, count in done["passes"].items():
        start, stop, tokens = map(int, one.split(","))
        layers += count * (stop - start) / table.depth * table.layers(tokens)
        rows += count * tokens * (stop == table.depth)  # tokens that were scored
    mean, first = rows / done["steps"], table.exits.places[0]
    tests = done["tests"] * max(table.exits(first) - first / table.depth * table.layers(1), 0.0)
    beside = table.score(mean, context=context) - table.layers(mean) + table.fixed
    seconds = layers + tests + done["steps"] * beside
    return (done["steps"] + accepted) * table.plain_step(context) / seconds
