"""Edge cases of decoding: ends of rows, odd prompts, neighbours, users' own objects, interruptions."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList, RepetitionPenaltyLogitsProcessor
from transformers.generation.stopping_criteria import MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList

import skipstone
from skipstone import Autoregressive, LayerSkip
from skipstone.decoding.noise import row_seed
from skipstone.engines.eager.patches import take_off
from tests.helpers import families
from tests.helpers.settings import COUPLED, QUIET, SAMPLING, SKIP
from tests.helpers.support import alone, decode, tokenizer

pytestmark = QUIET


@pytest.fixture(scope="module")
def model() -> Any:
    return families.cached("llama")


@pytest.fixture(scope="module")
def batch() -> list[Tensor]:
    return families.prompts(3)


class TestEnds:
    def test_rows_end_at_different_times_and_are_padded(self, model: Any, batch: Any) -> None:
        free = [alone(model, prompt, max_new_tokens=30) for prompt in batch]
        eos = sorted({free[0][12], free[1][4]})
        expected = [alone(model, prompt, max_new_tokens=30, eos_token_id=eos) for prompt in batch]
        assert len(set(map(len, expected))) > 1
        output = decode(model, batch, SKIP, eos_token_id=eos, pad_token_id=96, max_new_tokens=30)
        assert output.new_tokens == expected
        width = max(map(len, expected))
        tail = output.sequences[:, len(batch[0]) :].tolist()
        assert tail == [row + [96] * (width - len(row)) for row in expected]

    def test_stop_strings_of_the_models_own_config(self, batch: Any) -> None:
        model = families.build("llama")
        text = alone(model, batch[0], max_new_tokens=20)
        stop = tokenizer().decode(text[6:8])
        expected = alone(model, batch[0], max_new_tokens=20, stop_strings=stop, tokenizer=tokenizer())
        model.generation_config.stop_strings = stop
        own = model.generation_config
        given = skipstone.generate(model, batch[0], SKIP, tokenizer=tokenizer(), max_new_tokens=20)
        fresh = type(own)(max_new_tokens=20)
        merged = skipstone.generate(model, batch[0], SKIP, tokenizer=tokenizer(), generation_config=fresh)
        assert len(expected) < 20
        assert given.new_tokens == merged.new_tokens == [expected]
        assert model.generation_config is own
        assert own.stop_strings == stop


class TestLengths:
    @pytest.mark.parametrize("ends", ["length", "eos"])
    @pytest.mark.parametrize("method", [Autoregressive(), SKIP], ids=["autoregressive", "layerskip"])
    def test_one_new_token_is_the_prefills(self, method: Any, ends: str, model: Any, batch: Any) -> None:
        expected = [alone(model, prompt, max_new_tokens=1) for prompt in batch]
        eos = {"eos_token_id": [first for (first,) in expected]}
        output: Any = decode(model, batch, method, **({"max_new_tokens": 1} if ends == "length" else eos))
        assert output.new_tokens == expected
        assert (output.stats.steps, output.stats.drafted, output.stats.prefill_tokens) == (0, 0, 3)

    def test_max_length_counts_the_padded_prompt_as_in_transformers(self, model: Any, batch: Any) -> None:
        inputs = families.padded(batch)
        expected = model.generate(**inputs, max_length=30)
        output = skipstone.generate(model, inputs, SKIP, max_length=30)
        assert output.sequences.shape[1] == 30
        assert torch.equal(output.sequences, expected)

    def test_prompts_of_one_and_of_1500_tokens_side_by_side(self, model: Any) -> None:
        generator = torch.Generator().manual_seed(5)
        prompts = [torch.randint(1, 97, (length,), generator=generator) for length in (1, 1500, 2)]
        expected = [alone(model, prompt, max_new_tokens=12) for prompt in prompts]
        assert decode(model, prompts, SKIP, max_new_tokens=12).new_tokens == expected

    @pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "mistral"])
    def test_a_request_may_fill_the_models_positions_to_the_last(self, family: str) -> None:
        size = {"n_positions": 32} if family == "gpt2" else {"max_position_embeddings": 32}
        model = families.build(family, **size)
        prompts = families.prompts(2, longest=20)
        expected = [alone(model, prompt, max_new_tokens=12) for prompt in prompts]
        assert decode(model, prompts, LayerSkip(2, 7), max_new_tokens=12).new_tokens == expected


class TestPadding:
    def test_the_pad_id_may_be_a_frequent_real_token(self, model: Any, batch: Any) -> None:
        texts = [alone(model, prompt, max_new_tokens=24) for prompt in batch]
        everything = [token for text in texts for token in text]
        pad = max(set(everything), key=everything.count)
        prompts = [prompt.clone() for prompt in batch]
        for prompt in prompts:
            prompt[len(prompt) // 2], prompt[0] = pad, 0
        options: dict[str, Any] = {"max_new_tokens": 24, "pad_token_id": pad, "sequence_bias": {(0,): 4.0}, "eos_token_id": 1}
        expected = [alone(model, prompt, attention_mask=torch.ones_like(prompt)[None], **options) for prompt in prompts]
        assert any(pad in text for text in expected)
        assert any(0 in text for text in expected), "0 is a token like any other"
        assert skipstone.generate(model, families.padded(prompts, pad), SKIP, **options).new_tokens == expected

    def test_pad_ids_of_a_prompt_without_a_mask_are_masked_as_in_transformers(self, model: Any, batch: Any) -> None:
        prompt = batch[0].clone()
        prompt[3:6] = 9
        expected = model.generate(prompt[None], pad_token_id=9, max_new_tokens=16)
        unmasked = model.generate(prompt[None], attention_mask=torch.ones_like(prompt)[None], pad_token_id=9, max_new_tokens=16)
        assert not torch.equal(expected, unmasked)
        assert torch.equal(skipstone.generate(model, prompt, SKIP, pad_token_id=9, max_new_tokens=16).sequences, expected)


class TestNeighbours:
    def test_a_seed_gives_every_row_its_own(self, model: Any, batch: Any) -> None:
        derived = decode(model, batch, SKIP, seed=5, **SAMPLING).new_tokens
        assert derived == decode(model, batch, SKIP, seed=[5, row_seed(5, 1), row_seed(5, 2)], **SAMPLING).new_tokens
        assert derived != decode(model, batch, SKIP, seed=[5, 5, 5], **SAMPLING).new_tokens

    def test_num_return_sequences_are_rows_with_seeds_of_their_own(self, model: Any, batch: Any) -> None:
        output: Any = decode(model, batch[:2], SKIP, num_return_sequences=3, seed=20, **SAMPLING)
        assert output.sequences.shape[0] == 6
        for row, text in enumerate(output.new_tokens):
            assert [text] == decode(model, [batch[row // 3]], SKIP, seed=row_seed(20, row), **SAMPLING).new_tokens
        assert len(set(map(tuple, output.new_tokens))) > 2


@pytest.mark.parametrize("options", [{"typical_p": 0.6}, pytest.param({"eta_cutoff": 0.05}, marks=pytest.mark.slow)], ids=str)
def test_warpers_without_a_vectorised_form_are_exact_too(options: dict[str, Any], model: Any, batch: Any) -> None:
    settings = {**SAMPLING, **options, "seed": 4}
    plain = decode(model, batch, Autoregressive(), **settings)
    output: Any = decode(model, batch, COUPLED, **settings)
    assert output.new_tokens == plain.new_tokens
    assert plain.new_tokens != decode(model, batch, Autoregressive(), **{**SAMPLING, "seed": 4}).new_tokens
    assert 0 < output.stats.accepted < output.stats.drafted


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
        output: Any = skipstone.generate(model, inputs, SKIP, prefix_allowed_tokens_fn=allowed, max_new_tokens=16)
        assert torch.equal(output.sequences, expected)
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
