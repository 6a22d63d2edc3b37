"""Decodes a user's prompts with `auto`, reports the speed-up of every candidate, and recommends what to do."""

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from skipstone.decoding.method import Method
from skipstone.decoding.stats import Stats
from skipstone.engines.model_runner import ModelRunner
from skipstone.hf import api
from skipstone.hf.generate_call import prepare_call
from skipstone.methods.auto.auto import Auto, AutoDrafter
from skipstone.methods.auto.learned import Learned
from skipstone.methods.layerskip import LayerSkip
from skipstone.policy.choose_drafter import LOOKUP, RECYCLE, Policy

EXITS = (1 / 8, 1 / 4, 1 / 2)
"""Shares of the depth of the early exits that are added to the candidates."""
WORTH_TRAINING = 0.3
"""Agreement of an untrained exit with the text above which training exits is recommended."""
PAYS = 1.05
"""Speed-up above which a candidate pays."""


@dataclass(frozen=True)
class CandidateReport:
    """One candidate. rate: its speed-up over plain decoding. acceptance: mean of its drafts, None if unknown. draft_step: in
    plain steps. turns: number of steps that it drafted in."""

    name: str
    rate: float
    acceptance: float | None
    draft_step: float | None
    turns: int


@dataclass(frozen=True)
class TuningResult:
    """The result so far. speed_up: of all texts over plain decoding, set-up included. steady_speed_up: of decoding steps alone.
    texts: number of decoded ones."""

    candidates: tuple[CandidateReport, ...]
    speed_up: float
    steady_speed_up: float
    plain_seconds: float
    texts: int
    stats: Stats
    policy: Policy
    identities: dict[str, str]


def candidates(model: ModelRunner, more: Sequence[Method]) -> tuple[Method, ...]:
    """The usual ones, those that a user names, and early exits, whose replays are cheap."""
    depth = model.depth
    exits = [LayerSkip(layer) for layer in sorted({max(1, round(share * depth)) for share in EXITS} - {depth})]
    return (*Auto().methods(model), *more, *exits)


def tune(
    model: PreTrainedModel, prompts: Sequence[Tensor], more: Sequence[Method], seconds: float, options: dict[str, Any]
) -> Iterator[TuningResult]:
    """Decodes prompts [T] in turn, each at least once, until the time is over. Yields the result so far after every text.

    more: further candidates. options: `GenerationConfig` fields. ValueError for a candidate that cannot be one.
    """
    runner = ModelRunner(model)
    method, began = Auto(candidates(runner, more), use_profile=False), time.perf_counter()
    method.check(runner)
    total = Stats()
    known = AutoDrafter(method, runner, 1, 1)
    identities = {name: one.identify() for name, one in known.candidates.items()}
    for count in itertools.count(1):
        ids = prompts[(count - 1) % len(prompts)][None].to(model.device)
        output = api.complete(method, prepare_call(model, ids, None, None, dict(options)))
        assert output.stats is not None
        total.merge(output.stats)
        if known.learned.policy.costs.plain.measurements:
            yield summarise(known.learned, total, count, identities)
        if count >= len(prompts) and time.perf_counter() - began > seconds:
            return


def summarise(learned: Learned, stats: Stats, texts: int, identities: dict[str, str]) -> TuningResult:
    """The result so far. identities: of the drafters, as in a saved profile."""
    policy, kinds = learned.policies[1], learned.kinds
    rates, costs = policy.rates(), policy.costs
    found = [CandidateReport("prompt_lookup", policy.lookups.value, None, None, kinds.get(LOOKUP, 0))]
    for name, one in policy.drafters.items():
        draft_step = costs.schedules[name].value if name in costs.schedules else costs.of(name).draft_step
        own = (None, None) if name == RECYCLE else (one.acceptance.mean, draft_step)
        found.append(CandidateReport(name, rates.get(name, 1.0), *own, kinds.get(name, 0)))
    found.sort(key=lambda one: -one.rate)
    plain = costs.plain.value
    speed_ups = stats.speed_up(plain), stats.steady_speed_up(plain)
    return TuningResult(tuple(found), *speed_ups, plain, texts, stats, policy, identities)


def recommendation(found: TuningResult) -> str:
    """A recommendation, in a sentence."""
    best = max(found.candidates, key=lambda one: one.rate * (one.turns > 0), default=None)
    exits = [one for one in found.candidates if one.name.startswith("layerskip") and one.acceptance is not None]
    near = max(exits, key=lambda one: one.acceptance or 0.0, default=None)
    if best is not None and found.steady_speed_up >= PAYS:
        others = [one for one in found.candidates if one is not best and one.rate >= PAYS and one.turns]
        said = f"{best.name} brings {best.rate:.2f} x on these prompts"
        rest = ", ".join(f"{one.name} {one.rate:.2f}" for one in others[:2])
        return f"{said}, {rest} x; together {found.steady_speed_up:.2f} x." if others else f"{said}; nothing else does."
    if near is not None and (near.acceptance or 0.0) >= WORTH_TRAINING:
        agreement = f"{near.name} agrees at {near.acceptance:.2f} untrained"
        return f"Nothing pays as it is; train exits (`skipstone train layerskip`): {agreement}."
    return "Nothing pays on these prompts: plain decoding is the fastest, and auto stays with it."
