"""Users' own processors, criteria and time limits, and what they leave behind when they raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList, RepetitionPenaltyLogitsProcessor
from transformers.generation.stopping_criteria import MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList

import skipstone
from skipstone.engines.eager.patches import take_off
from tests.helpers import families
from tests.helpers.settings import QUIET, SKIP
from tests.helpers.support import alone, decode

pytestmark = QUIET


class Ban(LogitsProcessor):
    """Bans the token that the last two name: depends on the path."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[torch.arange(len(scores)), (input_ids[:, -1] + input_ids[:, -2] + 1) % scores.shape[1]] = -float("inf")
        scores[:, 60:70] -= 10
        return scores


class StopAfter(StoppingCriteria):
    """Stops a row once it holds `count` tokens above 48; answers in the way a user may."""

    def __init__(self, count: int, answer: Callable[[Tensor], Any]) -> None:
        self.count, self.answer = count, answer

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        return self.answer((input_ids > 48).sum(1) >= self.count)


class TestUsersObjects:
    def test_a_custom_processor_between_those_of_the_options(self, model: Any, batch: Any) -> None:
        options: dict[str, Any] = {"repetition_penalty": 1.4, "suppress_tokens": [3, 5], "max_new_tokens": 24}
        options["logits_processor"] = LogitsProcessorList([Ban()])
        assert decode(model, batch, SKIP, **options).new_tokens == [alone(model, prompt, **options) for prompt in batch]

    def test_a_custom_processor_replaces_the_options_processor_of_its_type(self, model: Any, batch: Any) -> None:
        options: dict[str, Any] = {"repetition_penalty": 2.0, "max_new_tokens": 24}
        options["logits_processor"] = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.1)])
        expected, other = (alone(model, batch[0], repetition_penalty=one, max_new_tokens=24) for one in (1.1, 2.0))
        assert alone(model, batch[0], **options) == expected != other
        assert decode(model, batch[:1], SKIP, **options).new_tokens == [expected]

    def test_prefix_allowed_tokens_fn_is_told_the_row_of_the_batch(self, model: Any, batch: Any) -> None:
        def allowed(row: int, _: Tensor) -> list[int]:
            return list(range(row * 30, row * 30 + 30))

        inputs = families.padded(batch)
        expected = model.generate(**inputs, prefix_allowed_tokens_fn=allowed, max_new_tokens=16)
        output = skipstone.generate(model, inputs, SKIP, prefix_allowed_tokens_fn=allowed, max_new_tokens=16)
        assert torch.equal(output.sequences, expected)
        assert output.new_tokens is not None
        assert all(row * 30 <= token < row * 30 + 30 for row, text in enumerate(output.new_tokens) for token in text)

    @pytest.mark.parametrize(
        "criterion",
        [StopAfter(15, lambda done: done), StopAfter(15, lambda done: bool(done.all())), MaxLengthCriteria(30)],
        ids=["a tensor per row", "one plain bool", "length"],
    )
    def test_custom_stopping_criteria(self, criterion: StoppingCriteria, model: Any, batch: Any) -> None:
        criteria = StoppingCriteriaList([criterion])
        for prompt in batch[:1] if isinstance(criterion, MaxLengthCriteria) else batch[:2]:
            expected = alone(model, prompt, stopping_criteria=criteria, max_new_tokens=30)
            assert len(expected) < 30
            assert decode(model, [prompt], SKIP, stopping_criteria=criteria, max_new_tokens=30).new_tokens == [expected]


def test_max_time_is_checked_after_every_token(model: Any, batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    free, now = alone(model, batch[0], max_new_tokens=30), iter(range(10_000))
    monkeypatch.setattr("transformers.generation.stopping_criteria.time.time", lambda: next(now))
    assert decode(model, batch[:1], SKIP, max_new_tokens=30, max_time=6.5).new_tokens == [free[:7]]


def state(model: Any) -> Any:
    """Attributes and hooks of every module, both configs and the mode, without skipstone's patches."""
    take_off(model)
    modules = {
        name: (sorted(module.__dict__), len(module._forward_hooks), len(module._forward_pre_hooks), module.training)
        for name, module in model.named_modules()
    }
    configs = model.config.to_dict(), model.config._attn_implementation, model.generation_config.to_dict()
    return modules, configs, id(model.config), id(model.generation_config)


class Bomb:
    """A streamer, processor or criterion that raises at its fourth call."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error, self.calls = error, 0

    def __call__(self, _: Tensor, scores: Any, **__: Any) -> Any:
        self.put(None)
        return torch.tensor([False]) if scores is None else scores

    def put(self, _: Any) -> None:
        self.calls += 1
        if self.calls == 4:
            raise self.error


class TestInterruptions:
    @pytest.mark.parametrize(
        ("place", "error"),
        [("streamer", KeyboardInterrupt), ("logits_processor", ArithmeticError), ("stopping_criteria", KeyboardInterrupt)],
    )
    def test_an_interrupted_call_leaves_the_model_as_it_was(
        self, place: str, error: type[BaseException], model: Any, batch: Any
    ) -> None:
        before, text = state(model), alone(model, batch[0], max_new_tokens=16)
        bomb = Bomb(error)
        with pytest.raises(error):
            skipstone.generate(model, batch[0], SKIP, max_new_tokens=16, **{place: bomb if place == "streamer" else [bomb]})
        assert bomb.calls == 4
        assert state(model) == before
        assert alone(model, batch[0], max_new_tokens=16) == text
        assert decode(model, batch[:1], SKIP, max_new_tokens=16).new_tokens == [text]

    def test_an_interrupted_enabled_model_stays_enabled(self, batch: Any) -> None:
        model = families.build("llama")
        text = alone(model, batch[0], max_new_tokens=16)
        skipstone.enable(model, SKIP)
        before = state(model)
        with pytest.raises(KeyboardInterrupt):
            model.generate(batch[0][None], streamer=Bomb(KeyboardInterrupt), max_new_tokens=16)
        assert state(model) == before
        assert alone(model, batch[0], max_new_tokens=16) == text

    def test_a_stream_closed_early_leaves_the_model_as_it_was(self, model: Any, batch: Any) -> None:
        before, text = state(model), alone(model, batch[0], max_new_tokens=16)
        steps = skipstone.stream(model, batch[0], SKIP, max_new_tokens=16)
        taken = next(steps).tokens[0] + next(steps).tokens[0]
        steps.close()  # type: ignore[attr-defined]
        assert list(steps) == []
        assert taken == text[: len(taken)]
        assert state(model) == before
        assert alone(model, batch[0], max_new_tokens=16) == text
