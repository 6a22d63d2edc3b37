"""The warning where drafting cannot have paid, or hardly any draft was accepted."""

import warnings
from typing import Any

import pytest

import skipstone
from skipstone import Autoregressive, LayerSkip
from skipstone.decoding import loop
from skipstone.decoding.draft import Step
from skipstone.decoding.stats import Stats
from skipstone.hf import api
from tests.helpers import families

SKIP = LayerSkip(exit_layer=2, num_speculative_tokens=4)


class Fixed(Stats):
    """Fixed figures of a run: turns with 4 drafts each, `accepted` of them right."""

    def __init__(self, accepted: int, turns: int = 20) -> None:
        super().__init__()
        for _ in range(turns):
            times = {"seconds_draft": 0.004, "seconds_score": 0.003, "seconds_other": 0.001}
            tokens, origin = [[1] * (accepted + 1)], [["draft"] * accepted + ["recovered"]]
            super().add(Step(tokens, origin, [4], [4], [accepted], [0], **times))

    def add(self, step: Step) -> None:
        """Nothing more."""


def messages(stats: Stats, monkeypatch: pytest.MonkeyPatch, method: Any = SKIP, warned: bool = False) -> list[str]:
    monkeypatch.setattr(loop, "Stats", lambda: stats)
    monkeypatch.setattr(api, "_warned", warned)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        skipstone.generate(families.cached("llama"), families.prompts(1)[0], method, max_new_tokens=4)
    assert all(warning.filename == __file__ for warning in caught), "it should point at the caller"
    assert all(warning.category is RuntimeWarning for warning in caught)
    return [str(warning.message) for warning in caught]


def figures(right: int, turns: int = 20, **changed: Any) -> Fixed:
    stats = Fixed(right, turns)
    for name, value in changed.items():
        setattr(stats, name, value)
    return stats


def test_a_run_that_cannot_have_paid_warns_once_with_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain step costs at most one draft pass (1 ms) and one scoring pass (3 ms): 1.45 tokens for 8 ms are at most .725 x."""
    stats = figures(1, accepted=9)
    [message] = messages(stats, monkeypatch)
    assert "layerskip ran at 0.72 x the speed of plain decoding here, or less, and at 0.72 x without" in message
    assert "acceptance rate 0.11, 1.45 tokens" in message
    assert "draft 4.0 ms + scoring 3.0 ms a step" in message
    assert message.endswith("method='auto' drafts only where that pays.")
    assert "not trained" not in message
    assert messages(stats, monkeypatch, warned=api._warned) == []


def test_untrained_early_exits_are_named_even_if_no_time_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    [message] = messages(figures(0, seconds_score=0.16, seconds_other=0.0), monkeypatch)
    assert "0.75 x the speed of plain decoding here, or less" in message
    assert "acceptance rate 0.00" in message
    assert "An acceptance rate that low says that the model's early exits are not trained." in message


@pytest.mark.parametrize(
    ("stats", "method"),
    [
        (figures(1), SKIP),  # 2 tokens for 8 ms, at most 1 x
        (figures(0, turns=15), SKIP),  # few steps
        (figures(0, draft_steps=0), Autoregressive()),
        (figures(0, drafters={"layerskip, exit 2": 20}), SKIP),  # decided step by step
    ],
)
def test_other_runs_do_not_warn(stats: Stats, method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert messages(stats, monkeypatch, method) == []


def test_a_stream_warns_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "Stats", lambda: Fixed(0))
    monkeypatch.setattr(api, "_warned", False)
    with pytest.warns(RuntimeWarning, match=r"ran at 0\.50 x the speed"):
        list(skipstone.stream(families.cached("llama"), families.prompts(1)[0], SKIP, max_new_tokens=4))
