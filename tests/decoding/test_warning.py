"""The warning where drafting did not pay, or hardly any draft was accepted."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from torch import Tensor
from transformers import PreTrainedModel

import skipstone
from skipstone import Autoregressive, LayerSkip
from skipstone.decoding.draft import Step
from skipstone.decoding.probes import Pace
from tests.helpers import families

SKIP = LayerSkip(exit_layer=2, num_speculative_tokens=4)
# how fast a tiny model runs is no matter here, but where the warning itself is tested
pytestmark = pytest.mark.filterwarnings("ignore:.*x the speed of plain decoding:RuntimeWarning")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return families.cached("llama")


def paced(accepted: int, probes: int = 1) -> Pace:
    """What 20 turns with 4 drafts each and some probes leave: draft 4 ms, scoring 3 ms, other 1 ms; a plain step 5 ms."""

    def step(count: int, **fields: Any) -> Step:
        tokens, origin = [[1] * (count + 1)], [["draft"] * count + ["recovered"]]
        return Step(tokens, origin, fields.pop("drafted"), fields.pop("draft_steps"), [count], [0], **fields)

    pace = Pace()
    for _ in range(20):
        times = {"seconds_draft": 0.004, "seconds_score": 0.003, "seconds_other": 0.001}
        pace.add(step(accepted, drafted=[4], draft_steps=[4], **times))
    for _ in range(probes):
        pace.add(step(0, drafted=[0], draft_steps=[0], probe=True, seconds_score=0.005))
    return pace


class TestWarning:
    """The figures are those of `paced`, whatever the machine does."""

    @staticmethod
    def run(model: PreTrainedModel, pace: Pace, monkeypatch: pytest.MonkeyPatch, method: Any = SKIP) -> list[str]:
        """Messages of the warnings of a call whose steps cost what `pace` says."""
        monkeypatch.setattr("skipstone.decoding.loop.Pace", lambda: pace)
        monkeypatch.setattr(pace, "add", lambda step: None)
        monkeypatch.setattr(pace, "wants_probe", lambda: False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            skipstone.generate(model, families.prompts(1)[0], method, max_new_tokens=4)
        assert all(warning.filename == __file__ for warning in caught), "it should point at the caller"
        assert all(warning.category is RuntimeWarning for warning in caught)
        return [str(warning.message) for warning in caught]

    def test_a_slower_run_warns_with_its_figures(self, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        pace = paced(1)
        pace.stats.accepted = 9  # 1.45 tokens for 8 ms against 5 ms each: 0.906 x
        [message] = self.run(model, pace, monkeypatch)
        assert "layerskip ran at 0.91 x the speed of plain decoding here: acceptance rate 0.11, 1.45 tokens a step" in message
        assert "draft 4.0 ms + scoring 3.0 ms a step" in message
        assert message.endswith("Other settings (or method='autoregressive') would be faster.")
        assert "not trained" not in message

    def test_a_faster_run_does_not_warn(self, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        # 2 tokens for 8 ms against 5 ms each: 1.25 x
        assert self.run(model, paced(1), monkeypatch) == []

    def test_without_probes_the_bound_is_named_as_such(self, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        # a plain step costs at most one draft pass (1 ms) and one scoring pass (3 ms): 1 token for 8 ms is at most 0.5 x
        [message] = self.run(model, paced(0, probes=0), monkeypatch)
        assert "ran at at most 0.50 x" in message

    def test_untrained_early_exits_are_named_even_where_no_time_is_lost(
        self, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pace = paced(0)
        pace.stats.seconds_probe = 0.009
        [message] = self.run(model, pace, monkeypatch)
        assert "1.12 x the speed of plain decoding here: acceptance rate 0.00" in message
        assert message.endswith("An acceptance rate that low says that the model's early exits are not trained.")

    def test_a_few_steps_tell_nothing(self, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        pace = paced(0)
        pace.stats.turns = 15
        assert self.run(model, pace, monkeypatch) == []

    def test_plain_decoding_never_warns(self, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        pace = paced(0)
        pace.stats.draft_steps = 0
        assert self.run(model, pace, monkeypatch, Autoregressive()) == []

    def test_a_model_whose_exits_know_nothing_is_told_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = families.build("llama", layers=6, seed=3)
        model.lm_head.weight.data.mul_(4)

        def scramble(_: Any, __: Any, hidden: Tensor) -> Tensor:
            return hidden.flip(-1)

        handle = model.model.layers[4].register_forward_hook(scramble)
        with pytest.warns(RuntimeWarning, match="early exits are not trained") as caught:
            skipstone.generate(model, families.prompts(1)[0], LayerSkip(1, 4), max_new_tokens=40)
        handle.remove()
        assert len(caught) == 1


def test_the_decoder_warns_through_a_stream_too(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    pace = paced(0)
    monkeypatch.setattr("skipstone.decoding.loop.Pace", lambda: pace)
    monkeypatch.setattr(pace, "add", lambda step: None)
    monkeypatch.setattr(pace, "wants_probe", lambda: False)
    with pytest.warns(RuntimeWarning, match=r"ran at 0\.6. x the speed"):
        list(skipstone.stream(model, families.prompts(1)[0], SKIP, max_new_tokens=4))
