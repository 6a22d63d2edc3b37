"""Settings by measurement, on other prompts than those reported: a grid under successive halving.

The first two prompts see every candidate, the next two the fastest third of them, and so on (Jamieson and Talwalkar, AISTATS
2016, with prompts as the resource); the last three share all prompts that are left. So the budget in calls is known beforehand.
Candidates take turns prompt by prompt in shuffled order.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from skipstone.timing.measure import Engine, measure
from skipstone.timing.statistics import pooled

Done = Callable[[int, int, int, float], None]  # called with the candidate's number, the prompt's, tokens and seconds
KEPT = 3  # one in so many candidates survives a rung
RUNG = 2  # prompts a rung
DEPTHS = (1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2)  # exit layers, as shares of the layers
LENGTHS = (2, 3, 4, 6, 8)  # draft tokens a step
THRESHOLDS = (None, 0.2, 0.3, 0.4, 0.5, 0.6)  # confidence below which our drafting stops
PEER_THRESHOLDS = (0.0, 0.2, 0.4, 0.6)  # the same for transformers, 0 never stops
LOOKUPS = (3, 5, 10)  # draft tokens a step of prompt lookup


def usual(method: str, depth: int) -> dict[str, Sequence[Any]]:
    """The values worth trying for a method on a model of `depth` layers: the same exit layers and draft lengths for our method
    and for the peer, each with its own thresholds."""
    shared = {"exit_layer": sorted({min(depth - 1, max(1, round(depth * share))) for share in DEPTHS})}
    return {
        "layerskip": {**shared, "num_speculative_tokens": LENGTHS, "confidence_threshold": THRESHOLDS},
        "hf-early-exit": {**shared, "num_assistant_tokens": LENGTHS, "confidence_threshold": PEER_THRESHOLDS},
        "hf-prompt-lookup": {"prompt_lookup_num_tokens": LOOKUPS},
    }.get(method, {})


@dataclass
class Trial:
    """One candidate and what it has done so far."""

    number: int
    engine: Engine
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def speed(self) -> float:
        """Tokens a second over all prompts it has seen."""
        return pooled(self.tokens, self.seconds)

    def report(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"settings": self.engine.settings, "prompts": len(self.tokens), "tokens_per_second": self.speed}


def rungs(candidates: int, prompts: int) -> list[tuple[int, range]]:
    """The plan: (candidates still in, prompts they run on) per rung. Nothing is run for a single candidate."""
    plan, left, start = [], candidates, 0
    while left > 1 and start < prompts:
        stop = prompts if left <= KEPT else min(start + RUNG, prompts)
        plan.append((left, range(start, stop)))
        left, start = math.ceil(left / KEPT), stop
    return plan


def budget(candidates: int, prompts: int) -> int:
    """Calls that `tune` will make."""
    return sum(count * len(span) for count, span in rungs(candidates, prompts))


def tune(
    model: PreTrainedModel,
    candidates: Sequence[Engine],
    prompts: Sequence[Tensor],
    options: Mapping[str, Any],
    seed: int,
    done: Done,
    known: Mapping[tuple[int, int], tuple[int, float]],
) -> tuple[Engine, list[Trial]]:
    """The fastest candidate of those that saw the most prompts, and all trials, best first.

    prompts: [T] int64 each. options: of `model.generate`. A single candidate is returned untried. known: (candidate, prompt) ->
    (tokens, seconds) of calls that need not be repeated.
    """
    rng = random.Random(seed)
    trials = [Trial(number, engine) for number, engine in enumerate(candidates)]
    for count, span in rungs(len(trials), len(prompts)):
        running = trials[:count]
        for index in span:
            for trial in rng.sample(running, len(running)):
                if (trial.number, index) in known:
                    tokens, seconds = known[trial.number, index]
                else:
                    found = measure(model, trial.engine, prompts[index], options, seed + index)
                    tokens, seconds = len(found.tokens), found.seconds
                    done(trial.number, index, tokens, seconds)
                trial.tokens.append(tokens)
                trial.seconds.append(seconds)
        trials.sort(key=lambda trial: (-len(trial.tokens), -trial.speed if trial.tokens else 0.0))
    return trials[0].engine, trials
