"""Edge cases of decoding: where a row ends, odd prompts, neighbours, interruptions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList, RepetitionPenaltyLogitsProcessor
from transformers.generation.stopping_criteria import MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList

import skipstone
from skipstone import Autoregressive, Decoder, LayeredModel, LayerSkip, Output, Request, Sampling, Step
from skipstone.core.decode import run
from tests import families
from tests.support import alone, left_padded, tokenizer

SKIP = LayerSkip(exit_layer=2, num_speculative_tokens=5)
COUPLED = LayerSkip(exit_layer=2, num_speculative_tokens=5, rejection_sample_method="coupled")
SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 1.2, "top_k": 0}
# how fast a tiny model runs is no matter here
pytestmark = pytest.mark.filterwarnings("ignore:.*x the speed of plain decoding:RuntimeWarning")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return families.cached("llama")


@pytest.fixture(scope="module")
def batch() -> list[Tensor]:
    return families.prompts(3)


def decode(model: PreTrainedModel, prompts: list[Tensor], method: Any = SKIP, **options: Any) -> Output:
    inputs = left_padded(prompts)
    options = {"max_new_tokens": 24, **options}
    return skipstone.generate(model, inputs["input_ids"], method, attention_mask=inputs["attention_mask"], **options)


def inside_a_draft(model: PreTrainedModel, method: Any, **options: Any) -> tuple[Tensor, list[int], int]:
    """(prompt, text, place): the token at `place` is new to the text and was accepted in the middle of a draft."""
    for seed in range(20):
        prompt = families.prompts(1, seed=seed)[0]
        output = decode(model, [prompt], method, record=True, max_new_tokens=40, **options)
        assert output.steps is not None
        assert output.new_tokens is not None
        text, end = output.new_tokens[0], 0
        for step in output.steps:
            start, end = end, end + len(step.tokens[0])
            for place in range(start + 1, start + step.accepted[0] - 1):
                if text[place] not in text[:place]:
                    return prompt, text, place
    raise AssertionError("no prompt has a fresh token in the middle of an accepted draft")


def one_row_steps(output: Output) -> Iterator[Step]:
    assert output.steps is not None
    yield from (step for step in output.steps if not step.prefill)


class TestEndOfSequence:
    def test_eos_inside_a_draft_ends_the_row_there(self, model: PreTrainedModel) -> None:
        prompt, text, place = inside_a_draft(model, SKIP)
        eos = text[place]
        output = decode(model, [prompt], eos_token_id=eos, record=True, max_new_tokens=40)
        assert output.new_tokens == [text[: place + 1]]
        assert output.new_tokens == [alone(model, prompt, eos_token_id=eos, max_new_tokens=40)]
        last = list(one_row_steps(output))[-1]
        assert last.origin[0] == ["draft"] * len(last.tokens[0]), "the row should have ended inside the draft"
        assert last.drafted[0] > len(last.tokens[0])

    def test_tokens_after_eos_are_neither_counted_nor_emitted(self, model: PreTrainedModel) -> None:
        prompt, text, place = inside_a_draft(model, SKIP)
        output = decode(model, [prompt], eos_token_id=text[place], record=True, max_new_tokens=40)
        stats = output.stats
        assert stats is not None
        assert stats.tokens + stats.prefill_tokens == place + 1
        assert stats.accepted == sum(step.accepted[0] for step in one_row_steps(output))
        assert stats.accepted == sum(step.origin[0].count("draft") for step in one_row_steps(output))
        assert output.sequences.shape == (1, len(prompt) + place + 1)

    def test_eos_inside_a_sampled_draft_ends_the_row_there(self, model: PreTrainedModel) -> None:
        prompt, text, place = inside_a_draft(model, COUPLED, seed=3, **SAMPLING)
        options = {"seed": 3, "eos_token_id": text[place], "max_new_tokens": 40, **SAMPLING}
        assert decode(model, [prompt], COUPLED, **options).new_tokens == [text[: place + 1]]
        assert decode(model, [prompt], Autoregressive(), **options).new_tokens == [text[: place + 1]]

    def test_the_first_of_several_eos_ids_ends_the_row(self, model: PreTrainedModel) -> None:
        prompt, text, place = inside_a_draft(model, SKIP)
        never = next(token for token in range(1, 97) if token not in text)
        later = next(token for token in text[place + 1 :] if token not in text[: place + 1])
        output = decode(model, [prompt], eos_token_id=[never, later, text[place]], max_new_tokens=40)
        assert output.new_tokens == [text[: place + 1]]

    def test_eos_as_the_very_first_token_needs_no_decoding_step(self, model: PreTrainedModel, batch: list[Tensor]) -> None:
        first = alone(model, batch[0], max_new_tokens=1)
        output = decode(model, batch[:1], eos_token_id=first)
        assert output.new_tokens == [first]
        assert output.stats is not None
        assert output.stats.steps == 0

    def test_rows_end_at_different_times_and_are_padded(self, model: PreTrainedModel, batch: list[Tensor]) -> None:
        free = [alone(model, prompt, max_new_tokens=30) for prompt in batch]
        eos = sorted({free[0][12], free[1][4]})
        expected = [alone(model, prompt, max_new_tokens=30, eos_token_id=eos) for prompt in batch]
        assert len(set(map(len, expected))) > 1
        output = decode(model, batch, eos_token_id=eos, pad_token_id=96, max_new_tokens=30)
        assert output.new_tokens == expected
        width = max(map(len, expected))
        tail = output.sequences[:, len(batch[0]) :].tolist()
        assert tail == [row + [96] * (width - len(row)) for row in expected]

    def test_sequences_equal_those_of_generate_on_the_padded_batch(self, model: PreTrainedModel, batch: list[Tensor]) -> None:
        free = [alone(model, prompt, max_new_tokens=30) for prompt in batch]
        options: dict[str, Any] = {"max_new_tokens": 30, "eos_token_id": [free[0][12], free[1][4]], "pad_token_id": 3}
        assert torch.equal(decode(model, batch, **options).sequences, model.generate(**left_padded(batch), **options))


class TestStopStrings:
    @staticmethod
    def across_tokens(text: list[int], place: int) -> str:
        """The end of the text up to and including `place`, as short as it can be to be new there."""
        words = tokenizer()
        before, upto = words.decode(text[:place]), words.decode(text[: place + 1])
        for length in range(2, len(upto)):
            if upto[-length:] not in before and upto.count(upto[-length:]) == 1:
                return upto[-length:]
        raise AssertionError("no stop string is new there")

    def test_a_stop_string_inside_a_draft_ends_the_row_there(self, model: PreTrainedModel) -> None:
        prompt, text, place = inside_a_draft(model, SKIP)
        stop = self.across_tokens(text, place)
        options: dict[str, Any] = {"stop_strings": stop, "tokenizer": tokenizer(), "max_new_tokens": 40}
        output = decode(model, [prompt], **options)
        assert output.new_tokens == [text[: place + 1]]
        assert output.new_tokens == [alone(model, prompt, **options)]

    def test_a_stop_string_over_several_tokens(self, model: PreTrainedModel, batch: list[Tensor]) -> None:
        text = alone(model, batch[0], max_new_tokens=30)
        stop = tokenizer().decode(text[10:13])
        options: dict[str, Any] = {"stop_strings": [stop, "never"], "tokenizer": tokenizer(), "max_new_tokens": 30}
        expected = [alone(model, prompt, **options) for prompt in batch]
        assert len(expected[0]) < 30
        assert decode(model, batch, **options).new_tokens == expected

    def test_a_stop_string_within_one_token(self, model: PreTrainedModel, batch: list[Tensor]) -> None:
        bias = {"sequence_bias": {(tokenizer().convert_tokens_to_ids("xst"),): 25.0}}
        options: dict[str, Any] = {"stop_strings": "st", "tokenizer": tokenizer(), "max_new_tokens": 12, **bias}
        expected = alone(model, batch[0], **options)
        assert len(expected) == 1
        assert decode(model, batch[:1], **options).new_tokens == [expected]

    def test_stop_strings_of_the_models_own_config(self, batch: list[Tensor]) -> None:
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
    @pytest.mark.parametrize("method", [Autoregressive(), SKIP], ids=["autoregressive", "layerskip"])
    def test_one_new_token_is_the_prefills(self, method: Any, model: PreTrainedModel, batch: list[Tensor]) -> None:
        output = decode(model, batch, method, max_new_tokens=1)
        assert output.new_tokens == [alone(model, prompt, max_new_tokens=1) for prompt in batch]
        assert output.stats is not None
        assert (output.stats.steps, output.stats.drafted, output.stats.prefill_tokens) == (0, 0, 3)

    def test_a_draft_longer_than_what_is_left_is_cut(self, model: PreTrainedModel, batch: list[Tensor]) -> None:
        output = decode(model, batch, LayerSkip(2, 50), max_new_tokens=6)
        assert output.new_tokens == [alone(model, prompt, max_new_tokens=6) for prompt in batch]
        assert output.stats is not None
        assert output.stats.drafted > 0

    def test_max_length_counts_the_padded_prompt_as_in_transformers(self, model: PreTrainedModel, batch: list[Tensor]) -> None:
        inputs = left_padded(batch)
        expected = model.generate(**inputs, max_length=30)
        output = skipstone.generate(model, inputs, SKIP, max_length=30)
        assert output.sequences.shape[1] == 30
        assert torch.equal(output.sequences, expected)

    @pytest.mark.parametrize("length", [1, 2, 1500])
    def test_prompts_of_extreme_lengths(self, length: int, model: PreTrainedModel) -> None:
        prompt = torch.randint(1, 97, (length,), generator=torch.Generator().manual_seed(length))
        output = decode(model, [prompt])
        assert output.new_tokens == [alone(model, prompt, max_new_tokens=24)]
        assert output.stats is not None
        assert 0 < output.stats.accepted < output.stats.drafted

    def test_prompts_of_one_and_of_1500_tokens_side_by_side(self, model: PreTrainedModel) -> None:
        generator = torch.Generator().manual_seed(5)
        prompts = [torch.randint(1, 97, (length,), generator=generator) for length in (1, 1500, 600)]
        expected = [alone(model, prompt, max_new_tokens=12) for prompt in prompts]
        assert decode(model, prompts, max_new_tokens=12).new_tokens == expected

    @pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "mistral"])
    def test_a_request_may_fill_the_models_positions_to_the_last(self, family: str) -> None:
        size = {"n_positions": 32} if family == "gpt2" else {"max_position_embeddings": 32}
        model = families.build(family, **size)
        prompts = families.prompts(2, longest=20)
        expected = [alone(model, prompt, max_new_tokens=12) for prompt in prompts]
        assert decode(model, prompts, LayerSkip(2, 7), max_new_tokens=12).new_tokens == expected


class TestPadding:
    def test_the_pad_id_may_be_a_frequent_real_token(self, model: PreTrainedModel, batch: list[Tensor]) -> None:
        texts = [alone(model, prompt, max_new_tokens=24) for prompt in batch]
        everything = [token for text in texts for token in text]
        pad = max(set(everything), key=everything.count)
        prompts = [prompt.clone() for prompt in batch]
        for prompt in prompts:
            prompt[len(prompt) // 2] = pad
        expected = [
            alone(model, prompt, max_new_tokens=24, pad_token_id=pad, attention_mask=torch.ones_like(prompt)[None])
            for prompt in prompts
        ]
        assert any(pad in text for text in expected)
        inputs = left_padded(prompts, pad)
        output = skipstone.generate(model, inputs, SKIP, pad_token_id=pad, max_new_tokens=24)
        assert output.new_tokens == expected

    def test_pad_ids_of_a_prompt_without_a_mask_are_masked_as_in_transformers(
        self, model: PreTrainedModel, batch: list[Tensor]
    ) -> None:
        prompt = batch[0].clone()
        prompt[3:6] = 9
        expected = model.generate(prompt[None], pad_token_id=9, max_new_tokens=16)
        unmasked = model.generate(prompt[None], attention_mask=torch.ones_like(prompt)[None], pad_token_id=9, max_new_tokens=16)
        assert not torch.equal(expected, unmasked)
        assert torch.equal(skipstone.generate(model, prompt, SKIP, pad_token_id=9, max_new_tokens=16).sequences, expected)

    def test_token_0_is_a_token_like_any_other(self, model: PreTrainedModel, batch: list[Tensor]) -> None:
        prompts = [torch.cat([prompt.new_zeros(2), prompt[2:], prompt.new_zeros(1)]) for prompt in batch]
        options: dict[str, Any] = {"max_new_tokens": 24, "sequence_bias": {(0,): 4.0}, "eos_token_id": 1}
        expected = [alone(model, p, attention_mask=torch.ones_like(p)[None], **options) for p in prompts]
        assert any(0 in text for text in expected)
        assert decode(model, prompts, **options).new_tokens == expected

    def test_heavy_left_padding_changes_nothing(self, model: PreTrainedModel, batch: list[Tensor]) -> None:
        ids = torch.cat([torch.zeros(40, dtype=torch.long), batch[0]])[None]
        mask = torch.cat([torch.zeros(40, dtype=torch.long), torch.ones_like(batch[0])])[None]
        output = skipstone.generate(model, ids, SKIP, attention_mask=mask, max_new_tokens=24)
        assert output.new_tokens == [alone(model, batch[0], max_new_tokens=24)]
        assert torch.equal(output.sequences[:, : ids.shape[1]], ids)


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
    def test_a_custom_processor(self, model: PreTrainedModel, batch: list[Tensor]) -> None:
        processors = LogitsProcessorList([Ban()])
        expected = [alone(model, prompt, logits_processor=processors, max_new_tokens=24) for prompt in batch]
        assert expected != [alone(model, prompt, max_new_tokens=24) for prompt in batch]
        output = decode(model, batch, logits_processor=processors)
        assert output.new_tokens == expected
        assert output.stats is not None
        assert 0 < output.stats.accepted < output.stats.drafted

    def test_a_custom_processor_between_those_of_the_options(self, model: PreTrainedModel, batch: list[Tensor]) -> None:
        options: dict[str, Any] = {"repetition_penalty": 1.4, "suppress_tokens": [3, 5], "max_new_tokens": 24}
        options["logits_processor"] = LogitsProcessorList([Ban()])
        assert decode(model, batch, **options).new_tokens == [alone(model, prompt, **options) for prompt in batch]

    def test_a_custom_processor_replaces_the_options_processor_of_its_type(
        self, model: PreTrainedModel, batch: list[Tensor]
    ) -> None:
        options: dict[str, Any] = {"repetition_penalty": 2.0, "max_new_tokens": 24}
        options["logits_processor"] = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.1)])
        expected = [alone(model, prompt, **options) for prompt in batch]
        assert expected == [alone(model, prompt, repetition_penalty=1.1, max_new_tokens=24) for prompt in batch]
        assert expected != [alone(model, prompt, repetition_penalty=2.2, max_new_tokens=24) for prompt in batch]
        assert decode(model, batch, **options).new_tokens == expected

    def test_prefix_allowed_tokens_fn_on_one_row(self, model: PreTrainedModel, batch: list[Tensor]) -> None:
        def allowed(_: int, ids: Tensor) -> list[int]:
            return [token for token in range(97) if token % 3 == len(ids) % 3]

        options: dict[str, Any] = {"prefix_allowed_tokens_fn": allowed, "max_new_tokens": 24}
        expected = alone(model, batch[0], **options)
        assert expected != alone(model, batch[0], max_new_tokens=24)
        assert decode(model, batch[:1], **options).new_tokens == [expected]

    def test_prefix_allowed_tokens_fn_is_told_the_row_of_the_batch(self, model: PreTrainedModel, batch: list[Tensor]) -> None:
        def allowed(row: int, _: Tensor) -> list[int]:
            return list(range(row * 30, row * 30 + 30))

        inputs = left_padded(batch)
        expected = model.generate(**inputs, prefix_allowed_tokens_fn=allowed, max_new_tokens=16)
        output = skipstone.generate(model, inputs, SKIP, prefix_allowed_tokens_fn=allowed, max_new_tokens=16)
        assert torch.equal(output.sequences, expected)
        assert output.new_tokens is not None
        assert all(row * 30 <= token < row * 30 + 30 for row, text in enumerate(output.new_tokens) for token in text)

    @pytest.mark.parametrize(
        "answer", [lambda done: done, lambda done: bool(done.all())], ids=["a tensor per row", "one plain bool"]
    )
    def test_custom_stopping_criteria(
        self, answer: Callable[[Tensor], Any], model: PreTrainedModel, batch: list[Tensor]
    ) -> None:
        criteria = StoppingCriteriaList([StopAfter(15, answer)])
        expected = [alone(model, prompt, stopping_criteria=criteria, max_new_tokens=30) for prompt in batch]
        assert any(len(text) < 30 for text in expected)
        assert decode(model, batch, stopping_criteria=criteria, max_new_tokens=30).new_tokens == expected

    def test_a_users_own_length_criterion(self, model: PreTrainedModel, batch: list[Tensor]) -> None:
        criteria = StoppingCriteriaList([MaxLengthCriteria(len(batch[0]) + 9)])
        expected = alone(model, batch[0], stopping_criteria=criteria, max_new_tokens=30)
        assert len(expected) == 9
        assert decode(model, batch[:1], stopping_criteria=criteria, max_new_tokens=30).new_tokens == [expected]


class TestMaxTime:
    def test_the_time_is_asked_after_every_token(
        self, model: PreTrainedModel, batch: list[Tensor], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        free = alone(model, batch[0], max_new_tokens=30)
        now = iter(range(10_000))
        monkeypatch.setattr("transformers.generation.stopping_criteria.time.time", lambda: next(now))
        output = decode(model, batch[:1], max_new_tokens=30, max_time=6.5)
        assert output.new_tokens == [free[:7]]

    def test_enough_time_changes_nothing(self, model: PreTrainedModel, batch: list[Tensor]) -> None:
        assert decode(model, batch, max_time=3600.0).new_tokens == decode(model, batch).new_tokens


class TestNeighbours:
    @pytest.mark.parametrize("method", [Autoregressive(), SKIP, COUPLED], ids=["plain", "standard", "coupled"])
    def test_a_sampled_row_depends_on_its_own_prompt_and_seed_only(
        self, method: Any, model: PreTrainedModel, batch: list[Tensor]
    ) -> None:
        seeds = [7, 3, 7]
        together = decode(model, batch, method, seed=seeds, **SAMPLING).new_tokens
        single = [
            decode(model, [prompt], method, seed=[seed], **SAMPLING).new_tokens
            for prompt, seed in zip(batch, seeds, strict=True)
        ]
        assert together == [text for texts in single for text in texts or []]
        turned = decode(model, batch[::-1], method, seed=seeds[::-1], **SAMPLING).new_tokens
        assert turned == together[::-1]

    def test_a_greedy_row_does_not_depend_on_its_neighbours(self, model: PreTrainedModel, batch: list[Tensor]) -> None:
        others = families.prompts(3, seed=9)
        mixed = decode(model, [others[0], batch[1], others[2]], eos_token_id=[4, 9]).new_tokens
        assert mixed is not None
        assert mixed[1] == alone(model, batch[1], max_new_tokens=24, eos_token_id=[4, 9])

    def test_an_adaptive_threshold_does_not_carry_over_from_row_to_row(
        self, model: PreTrainedModel, batch: list[Tensor]
    ) -> None:
        method = LayerSkip(2, 6, confidence_threshold="adaptive")
        together = decode(model, batch, method, seed=[1, 2, 3], **SAMPLING).new_tokens
        single = [decode(model, [p], method, seed=[s], **SAMPLING).new_tokens for p, s in zip(batch, (1, 2, 3), strict=True)]
        assert together == [text for texts in single for text in texts or []]

    def test_an_adaptive_threshold_does_not_carry_over_to_the_next_request(
        self, model: PreTrainedModel, batch: list[Tensor]
    ) -> None:
        method = LayerSkip(2, 6, confidence_threshold="adaptive")
        requests = [Request(prompt, 40, sampling=Sampling(1.2, seed=7)) for prompt in batch]

        def texts(decoder: Decoder, *admitted: Request) -> list[list[int]]:
            """One request after the other on row 0."""
            found = []
            for request in admitted:
                decoder.admit(0, request)
                found.append([token for step in run(decoder) for token in step.tokens[0]])
            return found

        def fresh() -> Decoder:
            return Decoder(method.start(LayeredModel(model), 1, 80))

        assert texts(fresh(), *requests) == [texts(fresh(), request)[0] for request in requests]

    def test_a_seed_counts_up_over_the_rows(self, model: PreTrainedModel, batch: list[Tensor]) -> None:
        counted = decode(model, batch, seed=5, **SAMPLING).new_tokens
        assert counted == decode(model, batch, seed=[5, 6, 7], **SAMPLING).new_tokens
        assert counted != decode(model, batch, seed=[5, 5, 5], **SAMPLING).new_tokens

    def test_num_return_sequences_are_rows_with_seeds_of_their_own(self, model: PreTrainedModel, batch: list[Tensor]) -> None:
        output = decode(model, batch[:2], num_return_sequences=3, seed=20, **SAMPLING)
        assert output.new_tokens is not None
        assert output.sequences.shape[0] == 6
        for row, text in enumerate(output.new_tokens):
            assert [text] == decode(model, [batch[row // 3]], seed=20 + row, **SAMPLING).new_tokens
        assert len(set(map(tuple, output.new_tokens))) > 2


@pytest.mark.parametrize(
    "options", [{"typical_p": 0.6}, {"epsilon_cutoff": 0.02}, {"eta_cutoff": 0.05}, {"top_h": 0.4}], ids=str
)
def test_warpers_without_a_vectorised_form_are_exact_too(
    options: dict[str, Any], model: PreTrainedModel, batch: list[Tensor]
) -> None:
    settings = {**SAMPLING, **options, "seed": 4}
    plain = decode(model, batch, Autoregressive(), **settings)
    output = decode(model, batch, COUPLED, **settings)
    assert output.new_tokens == plain.new_tokens
    assert plain.new_tokens != decode(model, batch, Autoregressive(), **{**SAMPLING, "seed": 4}).new_tokens
    assert output.stats is not None
    assert 0 < output.stats.accepted < output.stats.drafted


def state(model: PreTrainedModel) -> Any:
    """All that a decoding call might leave behind: attributes and hooks of every module, both configs, the mode."""
    modules = {
        name: (sorted(module.__dict__), len(module._forward_hooks), len(module._forward_pre_hooks), module.training)
        for name, module in model.named_modules()
    }
    configs = model.config.to_dict(), model.config._attn_implementation, model.generation_config.to_dict()
    return modules, configs, id(model.config), id(model.generation_config)


class Interrupted(Exception):
    """What a user's object raises in these tests."""


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

    def end(self) -> None:
        raise AssertionError("the stream was interrupted, not ended")


class TestInterruptions:
    @pytest.mark.parametrize("error", [KeyboardInterrupt, Interrupted])
    @pytest.mark.parametrize("place", ["streamer", "logits_processor", "stopping_criteria"])
    def test_an_interrupted_call_leaves_the_model_as_it_was(
        self, place: str, error: type[BaseException], model: PreTrainedModel, batch: list[Tensor]
    ) -> None:
        before, text = state(model), alone(model, batch[0], max_new_tokens=16)
        bomb = Bomb(error)
        with pytest.raises(error):
            skipstone.generate(model, batch[0], SKIP, max_new_tokens=16, **{place: bomb if place == "streamer" else [bomb]})
        assert bomb.calls == 4
        assert state(model) == before
        assert alone(model, batch[0], max_new_tokens=16) == text
        assert decode(model, batch[:1], max_new_tokens=16).new_tokens == [text]

    def test_an_interrupted_enabled_model_stays_enabled(self, batch: list[Tensor]) -> None:
        model = families.build("llama")
        text = alone(model, batch[0], max_new_tokens=16)
        skipstone.enable(model, SKIP)
        before = state(model)
        with pytest.raises(KeyboardInterrupt):
            model.generate(batch[0][None], streamer=Bomb(KeyboardInterrupt), max_new_tokens=16)
        assert state(model) == before
        assert alone(model, batch[0], max_new_tokens=16) == text

    def test_a_stream_closed_early_leaves_the_model_as_it_was(self, model: PreTrainedModel, batch: list[Tensor]) -> None:
        before, text = state(model), alone(model, batch[0], max_new_tokens=16)
        steps = skipstone.stream(model, batch[0], SKIP, max_new_tokens=16)
        taken = next(steps).tokens[0] + next(steps).tokens[0]
        steps.close()  # type: ignore[attr-defined]
        assert list(steps) == []
        assert taken == text[: len(taken)]
        assert state(model) == before
        assert alone(model, batch[0], max_new_tokens=16) == text

    def test_two_streams_over_one_model_do_not_disturb_each_other(self, model: PreTrainedModel, batch: list[Tensor]) -> None:
        texts: list[list[int]] = [[], []]
        streams = [skipstone.stream(model, prompt, SKIP, max_new_tokens=16) for prompt in batch[:2]]
        for steps in itertools.zip_longest(*streams):
            for text, step in zip(texts, steps, strict=True):
                text += [] if step is None else step.tokens[0]
        assert texts == [alone(model, prompt, max_new_tokens=16) for prompt in batch[:2]]
