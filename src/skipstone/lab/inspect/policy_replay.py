"""Makes all decisions of a log of `auto` again, without a model, and draws which drafter was used where."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from skipstone.policy.choose_drafter import PLAIN, PROBE, Decision, Policy, StepResult
from skipstone.utils.dataclass_values import from_values
from skipstone.utils.files import write_whole
from skipstone.utils.pictures import image_of, new_figure

STEPS = tuple[tuple[list[int], bool], Decision | None, Decision, list[StepResult]]


@dataclass(frozen=True)
class ReplayedDecision:
    """A decision of a log, made again. position: committed tokens before it. recorded, again: the decision then and now.
    replay_seconds: of replays before it. deciding, learning: seconds that these take now. lost: plain steps that the budget was
    charged."""

    position: int
    recorded: Decision
    again: Decision
    results: list[StepResult]
    replay_seconds: float
    deciding: float
    learning: float
    lost: float

    @property
    def is_same(self) -> bool:
        return self.recorded == self.again

    @property
    def tokens(self) -> float:
        return sum(one.tokens for one in self.results)

    @property
    def seconds(self) -> float:
        """Of its steps, and of the replays before them."""
        return self.replay_seconds + sum(one.seconds for one in self.results)

    @property
    def steps(self) -> int:
        return sum(one.steps for one in self.results)


def replay_decisions(path: Path, clock: Callable[[], float]) -> Iterator[ReplayedDecision]:
    """All decisions of a file, made again. clock: seconds, for the time of deciding and learning.

    ValueError with the line for a file that is no log of this version; OSError for one that cannot be read.
    """
    policies: dict[tuple[int, ...], Policy] = {}
    replay_seconds = 0.0
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                event = json.loads(line)
                writer = tuple(event.pop("writer"))
                ((kind, values),) = event.items()
                if kind == "state":
                    policies[writer] = from_values(Policy, values)
                elif kind == "request":
                    for policy in [policy for key, policy in policies.items() if key[0] == writer[0]]:
                        policy.begin_request()
                elif kind == "replay":
                    policies[writer].observe_replay(*values)
                    replay_seconds += values[3]
                elif kind != "steps":
                    raise ValueError(f"an unknown event {kind!r}")
                elif (decision := _decide_again(clock, policies[writer], values)) is not None:
                    yield replace(decision, replay_seconds=replay_seconds)
                    replay_seconds = 0.0
            except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
                said = f"no record of auto's decisions, or of another version ({error!r:.120})"
                raise ValueError(f"{path}, line {number}: {said}") from error


def _decide_again(clock: Callable[[], float], policy: Policy, values: Any) -> ReplayedDecision | None:
    """Decide again and learn. None if nothing was decided."""
    (arguments, recorded, taken, results), position = from_values(STEPS, values), policy.position
    began = clock()
    again = policy.decide(*arguments)
    decided_at, balance = clock(), policy.budget.request
    policy.observe(taken, results)
    learning, tokens = clock() - decided_at, sum(one.tokens for one in results)
    if recorded is None:
        return None
    lost = balance + policy.budget.slack * tokens - policy.budget.request
    return ReplayedDecision(position, recorded, again, results, 0.0, decided_at - began, learning, lost)


def cumulative_gain(found: Sequence[ReplayedDecision]) -> list[float]:
    """Cumulative gain in plain steps after every decision: its tokens minus its time.

    The unit is the median time of a plain step. ValueError without one.
    """
    steps = [step for one in found if one.recorded.kind in (PLAIN, PROBE) for step in one.results]
    plain = [step.warm_seconds or step.seconds / step.steps for step in steps]
    if not plain:
        raise ValueError("the log holds no plain step, which times are measured by")
    unit = median(plain)
    return list(accumulate(one.tokens - one.seconds / unit for one in found))


def figure(found: Sequence[ReplayedDecision]) -> Any:
    """A matplotlib figure: one line per drafter with a bar per step, as long as its tokens; below, the cumulative gain."""
    drawn, (lines, gain) = new_figure((11, 4), 2, 1, sharex=True)
    kinds = list(dict.fromkeys(one.recorded.kind for one in found))
    for number, kind in enumerate(kinds):
        bars = [(one.position, one.tokens) for one in found if one.recorded.kind == kind]
        lines.broken_barh(bars, (number - 0.4, 0.8), color=f"C{number}", edgecolor="white", linewidth=0.4)
    lines.set_yticks(range(len(kinds)), kinds, fontsize=8)
    lines.invert_yaxis()
    gain.plot([one.position + one.tokens for one in found], cumulative_gain(found), color="black", linewidth=1)
    gain.axhline(0, color="grey", linewidth=0.6)
    gain.set_ylabel("plain steps won")
    gain.set_xlabel("token")
    return drawn


def save(found: Sequence[ReplayedDecision], path: Path) -> None:
    """The picture as a .png or .svg file."""
    write_whole(path, image_of(figure(found), path.suffix.removeprefix(".")))
