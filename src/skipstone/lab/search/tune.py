"""`auto` over a user's own prompts: what every candidate brings on them, and what is worth doing about it."""

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from skipstone.control.state import LOOKUP, RECYCLE, State
from skipstone.decoding.method import Method
from skipstone.decoding.stats import Stats
from skipstone.engines.model_runner import ModelRunner
from skipstone.hf import generation
from skipstone.hf.generate_call import prepare_call
from skipstone.methods.auto.auto import Auto, Mind, mind_of
from skipstone.methods.auto.candidates import drafters_of, identities
from skipstone.methods.layerskip import LayerSkip

EXITS = (1 / 8, 1 / 4, 1 / 2)
"""Shares of the depth at which early exits are looked at, beside the candidates that are there."""
WORTH_TRAINING = 0.3
"""Agreement of an untrained exit with the text from which on training exits is recommended."""
PAYS = 1.05
"""Speed-up from which on a candidate is said to pay."""


@dataclass(frozen=True)
class CandidateReport:
    """What is known of one way to draft. rate: its speed-up over plain decoding. acceptance: of its drafts, on average; None
    for what has none of its own. draft_step: in plain steps. turns: that it drafted in."""

    name: str
    rate: float
    acceptance: float | None
    draft_step: float | None
    turns: int


@dataclass(frozen=True)
class TuningResult:
    """What a run came to. speed_up: of all of it over plain decoding, as the ledger has it. texts: decoded. stats: of all."""

    candidates: tuple[CandidateReport, ...]
    speed_up: float
    plain_seconds: float
    texts: int
    stats: Stats
    state: State
    identities: dict[str, str]


def candidates(model: ModelRunner, more: Sequence[Method]) -> tuple[Method, ...]:
    """The usual ones, those that a user names, and early exits, which cost nothing to be looked at."""
    depth = model.depth
    exits = [LayerSkip(layer) for layer in sorted({max(1, round(share * depth)) for share in EXITS} - {depth})]
    return (*Auto().methods(model), *more, *exits)


def tune(
    model: PreTrainedModel, prompts: Sequence[Tensor], more: Sequence[Method], seconds: float, options: dict[str, Any]
) -> Iterator[TuningResult]:
    """Decode prompts [T] again and again until the time is over, once at least; yields what is known after every text.

    more: candidates beside the usual ones. options: `GenerationConfig` fields. ValueError for a candidate that cannot be one.
    """
    runner = ModelRunner(model)
    method, began = Auto(candidates(runner, more), use_profile=False), time.perf_counter()
    method.check(runner)
    total = Stats()
    same = identities(method.methods(runner), drafters_of(method.methods(runner), runner, 1, 1))
    for count in itertools.count(1):
        ids = prompts[(count - 1) % len(prompts)][None].to(model.device)
        output = generation.complete(method, prepare_call(model, ids, None, None, dict(options)))
        assert output.stats is not None
        total.merge(output.stats)
        mind = mind_of(method, runner, 1)
        if mind.state is not None:
            yield told(mind, total, count, same)
        if count >= len(prompts) and time.perf_counter() - began > seconds:
            return


def told(mind: Mind, stats: Stats, texts: int, identities: dict[str, str]) -> TuningResult:
    """What is known by now. identities: of the drafters, as in `memory`."""
    state = mind.state
    assert state is not None
    rates, account = state.rates(), state.ledger.overall
    lookups = state.lookups.tokens / state.lookups.time
    found = [CandidateReport("prompt_lookup", lookups, None, None, mind.kinds.get(LOOKUP, 0))]
    if state.ranks is not None:
        found.append(CandidateReport("recycle", rates.get(RECYCLE, 1.0), None, None, mind.kinds.get(RECYCLE, 0)))
    for name, drafter in state.drafters.items():
        own = state.costs.wholes[name].value if drafter.own_rule else state.costs.drafts[name].step
        found.append(CandidateReport(name, rates[name], drafter.calibration.mean, own, mind.kinds.get(name, 0)))
    found.sort(key=lambda one: -one.rate)
    time_taken = account.plain + account.debt
    speed_up = account.plain / time_taken if time_taken > 0 else 1.0
    return TuningResult(tuple(found), speed_up, state.costs.plain.value, texts, stats, state, identities)


def recommendation(found: TuningResult) -> str:
    """What to do, in a sentence."""
    best = max(found.candidates, key=lambda one: one.rate * (one.turns > 0), default=None)
    exits = [one for one in found.candidates if one.name.startswith("layerskip") and one.acceptance is not None]
    near = max(exits, key=lambda one: one.acceptance or 0.0, default=None)
    if best is not None and found.speed_up >= PAYS:
        others = [one for one in found.candidates if one is not best and one.rate >= PAYS and one.turns]
        said = f"{best.name} brings {best.rate:.2f} x on these prompts"
        rest = ", ".join(f"{one.name} {one.rate:.2f}" for one in others[:2])
        return f"{said}, {rest} x; together {found.speed_up:.2f} x." if others else f"{said}; nothing else does."
    if near is not None and (near.acceptance or 0.0) >= WORTH_TRAINING:
        return (
            f"Nothing pays as it is; train exits (`skipstone train layerskip`): {near.name} agrees at {near.acceptance:.2f} "
            "untrained."
        )
    return "Nothing pays on these prompts: plain decoding is the fastest, and auto stays with it."
