"""A picture of a text's decisions: what it shows is what the log says."""

from __future__ import annotations

from pathlib import Path

import pytest

from skipstone.lab.inspect import decisions
from skipstone.lab.inspect.policy_replay import ReplayedDecision
from skipstone.policy.choose_drafter import Decision, StepResult

pytest.importorskip("matplotlib")


def decided(position: int, kind: str, tokens: float, seconds: float, replay: float = 0.0, steps: int = 1) -> ReplayedDecision:
    decision = Decision(kind)
    return ReplayedDecision(position, decision, decision, [StepResult(tokens, seconds, steps)], replay, 1e-5, 1e-5, 0.0)


STEPS = [
    decided(0, "plain", 1, 0.010),
    decided(1, "lookup", 5, 0.020),
    decided(6, "plain", 1, 0.012, replay=0.005),
    decided(7, "probe", 1, 0.010),
    decided(8, "plain", 4, 0.040, steps=4),
]


def test_what_was_won_is_tokens_less_time_in_plain_steps() -> None:
    """A plain step takes 10 ms: 0, then 5 - 2 more, then 1 - 1.7 more, then nothing, four steps at once among it."""
    assert decisions.cumulative_gain(STEPS) == pytest.approx([0.0, 3.0, 2.3, 2.3, 2.3])


def test_every_drafter_has_a_line_with_its_steps() -> None:
    lines, gain = decisions.figure(STEPS).axes
    assert [label.get_text() for label in lines.get_yticklabels()] == ["plain", "lookup", "probe"]
    assert [len(one.get_paths()) for one in lines.collections] == [3, 1, 1]
    ((low, high),) = [one.get_paths()[0].get_extents().intervalx for one in lines.collections[1:2]]
    assert (low, high) == (1, 6)
    assert gain.lines[0].get_ydata().tolist() == pytest.approx([0.0, 3.0, 2.3, 2.3, 2.3])


def test_it_is_written(tmp_path: Path) -> None:
    decisions.save(STEPS, tmp_path / "decisions.png")
    assert (tmp_path / "decisions.png").read_bytes().startswith(b"\x89PNG")
