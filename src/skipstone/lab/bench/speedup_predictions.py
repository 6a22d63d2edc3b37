"""Predicts a method's speed-up from measured costs and the mean step of a run.

The prediction holds for lookups, and for greedy chains from early layers, a skip set or a draft model. AdaDecode's follows from
the counts of its passes and tests.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from skipstone.decoding.method import DraftingMethod, Method
from skipstone.decoding.stats import Stats
from skipstone.engines.model_runner import ModelRunner
from skipstone.lab.timing.cost_tables import BatchCosts
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
from skipstone.policy.cost_model import StepCosts
from skipstone.policy.cost_model import speedup as speedup_of

Facts = Mapping[str, Any]  # of a file of results


def described(method: Method, runner: ModelRunner) -> dict[str, Any] | None:
    """The drafter of a method as plain JSON values, for `step_costs`; None if the prediction does not hold for it."""
    if isinstance(method, DraftingMethod) and method.guard:
        return None  # the clock decides which of its steps draft
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
    """The draft model of a method, if its steps can be measured: it has one, and not in fewer bits."""
    if not isinstance(method, Speculative) or method.draft_quantize is not None:
        return None
    return method.draft_model_for(runner)


def _sublayers(attention: Any, mlp: Any) -> dict[str, Any]:
    return {"attention": len(attention), "mlp": len(mlp), "both": len({*attention} & {*mlp})}


def step_costs(said: Facts, table: BatchCosts, context: float, known: Facts | None) -> StepCosts | None:
    """The costs of a described drafter in a table; None if the table does not have them. known: what the method had learnt
    after its last prompt."""
    if "learnt" in said:
        if not known or "skipped" not in known:
            return None
        skipped = known["skipped"]
        said = {**_sublayers(skipped["attention"], skipped["mlp"]), "ranked": said["ranked"]}
    if "exit_layer" in said:
        return table.of_exit(said["exit_layer"], context)
    if "attention" in said:
        ranked = said.get("ranked", False)
        return table.of_skipping(said["attention"], said["mlp"], said["both"], ranked=ranked, context=context)
    if "draft_model" in said:
        return table.of_draft_model(said["draft_model"], context)
    return table.of_lookup(context)


def mean_step(total: Stats) -> tuple[float, float, float, float]:
    """The arguments of `StepCosts.speedup` for the steps of some calls at batch 1, probes left out."""
    steps, drafting = max(total.steps, 1), max(total.drafting, 1)
    scored = 1 + total.verified_nodes / drafting
    return (total.tokens - total.probes) / steps, total.draft_steps / drafting, scored, total.drafting / steps


def speedup(
    costs: Facts, said: Facts, total: Stats, context: float, known: Facts | None = None, grown: Facts | None = None
) -> float | None:
    """The speed-up of some calls by a table of costs, as JSON holds it; None if the table does not know the drafter, or nothing
    was drafted. context: tokens before a mean step. known: what the method had learnt after the last call. grown: what the
    calls added to the counts in that."""
    table = TypeAdapter(BatchCosts).validate_python(costs)
    if "passes" in said:
        return _by_passes(table, grown, context) if grown and grown["steps"] else None
    found = step_costs(said, table, context, known)
    return found.speedup(*mean_step(total)) if found is not None and total.drafting else None


def _by_passes(table: BatchCosts, done: Facts, context: float) -> float:
    """The speed-up of AdaDecode at batch 1, from its passes and the tests of its exits. A test takes as long as the LM head.
    done: the counts of its info, of at least one step."""
    accepted = sum(tally["accepted"] for tally in done["exits"].values())
    layers = rows = 0.0
    for one, count in done["passes"].items():
        start, stop, tokens = map(int, one.split(","))
        layers += count * (stop - start) / table.depth * table.layers(tokens)
        rows += count * tokens * (stop == table.depth)  # tokens that were scored
    mean, first = rows / done["steps"], table.exits.places[0]
    tests = done["tests"] * max(table.exits(first) - first / table.depth * table.layers(1), 0.0)
    rest = table.score(mean, context=context) - table.layers(mean) + table.fixed
    return speedup_of(done["steps"] + accepted, layers + tests + done["steps"] * rest, table.plain_step(context))
