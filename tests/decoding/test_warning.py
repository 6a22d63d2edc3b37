"""The warning where drafting cannot have paid, or hardly any draft was accepted."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from torch import Tensor
from transformers import PreTrainedModel

import skipstone
from skipstone import Autoregressive, LayerSkip
from skipstone.decoding import loop
from skipstone.decoding.draft import Step
from skipstone.decoding.stats import Stats
from skipstone.hf import api
from tests.helpers import families

SKIP = LayerSkip(exit_layer=2, num_speculative_tokens=4)


class Told(Stats):
    """What a run is said to have come to, whatever the machine does: 20 turns with 4 drafts each, so many of them right."""

    def __init__(self, accepted: int, turns: int = 20) -> None:
        super().__init__()
        for _ in range(turns):
            times = {"seconds_draft": 0.004, "seconds_score": 0.003, "seconds_other": 0.001}
            tokens, origin = [[1] * (accepted + 1)], [["draft"] * accepted + ["recovered"]]
            super().add(Step(tokens, origin, [4], [4], [accepted], [0], **times))

    def add(self, step: Step) -> None:
        """Nothing more."""


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return families.cached("llama")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_warned", False)


def messages(model: PreTrainedModel, stats: Stats, monkeypatch: pytest.MonkeyPatch, method: Any = SKIP) -> list[str]:
    """Of the warnings of a call whose steps cost what `stats` says."""
    monkeypatch.setattr(loop, "Stats", lambda: stats)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        skipstone.generate(model, families.prompts(1)[0], method, max_new_tokens=4)
    assert all(warning.filename == __file__ for warning in caught), "it should point at the caller"
    assert all(warning.category is RuntimeWarning for warning in caught)
    return [str(warning.message) for warning in caught]


def test_a_run_that_cannot_have_paid_says_so_with_its_figures_once(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain step costs at most one draft pass (1 ms) and one scoring pass (3 ms): 1.45 tokens for 8 ms are at most .725 x."""
    stats = Told(1)
    stats.accepted = 9
    [message] = messages(model, stats, monkeypatch)
    assert "layerskip ran at 0.72 x the speed of plain decoding here, or less: acceptance rate 0.11, 1.45 tokens" in message
    assert "draft 4.0 ms + scoring 3.0 ms a step" in message
    assert message.endswith("method='auto' drafts only where that pays.")
    assert "not trained" not in message
    assert messages(model, stats, monkeypatch) == []


def test_a_run_that_may_have_paid_does_not_warn(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert messages(model, Told(1), monkeypatch) == [], "2 tokens for 8 ms, at most 1 x"


def test_untrained_early_exits_are_named_even_where_no_time_is_lost(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    stats = Told(0)
    stats.seconds_score, stats.seconds_other = 0.16, 0.0
    [message] = messages(model, stats, monkeypatch)
    assert "0.75 x the speed of plain decoding here, or less: acceptance rate 0.00" in message
    assert "An acceptance rate that low says that the model's early exits are not trained." in message


def test_a_few_steps_tell_nothing(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert messages(model, Told(0, turns=15), monkeypatch) == []


def test_plain_decoding_and_what_is_decided_step_by_step_never_warn(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    stats = Told(0)
    stats.draft_steps = 0
    assert messages(model, stats, monkeypatch, Autoregressive()) == []
    stats = Told(0)
    stats.drafters["layerskip, exit 2"] = 20
    assert messages(model, stats, monkeypatch) == []


def test_a_model_whose_exits_know_nothing_is_told_so() -> None:
    model = families.build("llama", layers=6, seed=3)
    model.lm_head.weight.data.mul_(4)

    def scramble(_: Any, __: Any, hidden: Tensor) -> Tensor:
        return hidden.flip(-1)

    handle = model.model.layers[4].register_forward_hook(scramble)
    with pytest.warns(RuntimeWarning, match="early exits are not trained") as caught:
        skipstone.generate(model, families.prompts(1)[0], LayerSkip(1, 4), max_new_tokens=40)
    handle.remove()
    assert len(caught) == 1


def test_a_stream_warns_too(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "Stats", lambda: Told(0))
    with pytest.warns(RuntimeWarning, match=r"ran at 0\.50 x the speed"):
        list(skipstone.stream(model, families.prompts(1)[0], SKIP, max_new_tokens=4))
