"""A picture of one text's decisions: which drafter was used where, and the time that it saved."""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from skipstone.lab.inspect.policy_replay import ReplayedDecision
from skipstone.policy.choose_drafter import PLAIN, PROBE
from skipstone.utils.files import write_whole
from skipstone.utils.pictures import image_of, new_figure


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
