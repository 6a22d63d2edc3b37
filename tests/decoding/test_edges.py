"""Edge cases of decoding: where a row ends, odd prompts, neighbours, interruptions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import skipstone
from skipstone import Autoregressive, LayerSkip
from skipstone.decoding.noise import row_seed
from tests.helpers import families
from tests.helpers.settings import COUPLED, QUIET, SAMPLING, SKIP
from tests.helpers.support import alone, decode, tokenizer

pytestmark = QUIET


class TestEndOfSequence:
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


class TestStopStrings:
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
        output = decode(model, batch[:2], SKIP, num_return_sequences=3, seed=20, **SAMPLING)
        assert output.new_tokens is not None
        assert output.sequences.shape[0] == 6
        for row, text in enumerate(output.new_tokens):
            assert [text] == decode(model, [batch[row // 3]], SKIP, seed=row_seed(20, row), **SAMPLING).new_tokens
        assert len(set(map(tuple, output.new_tokens))) > 2


@pytest.mark.parametrize("options", [{"typical_p": 0.6}, pytest.param({"eta_cutoff": 0.05}, marks=pytest.mark.slow)], ids=str)
def test_warpers_without_a_vectorised_form_are_exact_too(options: dict[str, Any], model: Any, batch: Any) -> None:
    settings = {**SAMPLING, **options, "seed": 4}
    plain = decode(model, batch, Autoregressive(), **settings)
    output = decode(model, batch, COUPLED, **settings)
    assert output.new_tokens == plain.new_tokens
    assert plain.new_tokens != decode(model, batch, Autoregressive(), **{**SAMPLING, "seed": 4}).new_tokens
    assert output.stats is not None
    assert 0 < output.stats.accepted < output.stats.drafted
