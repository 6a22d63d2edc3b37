"""Every supported option means what it means in transformers: the same text, the same law."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

import skipstone
from skipstone import Autoregressive, LayerSkip
from tests.helpers import families
from tests.helpers.options import LAW, TEXT
from tests.helpers.support import alone, tokenizer

SKIP = LayerSkip(exit_layer=2, num_speculative_tokens=4)
SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 2.0, "top_k": 0}
# how fast a tiny model runs is no matter here
pytestmark = pytest.mark.filterwarnings("ignore:.*x the speed of plain decoding:RuntimeWarning")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return families.cached("llama")


def generate(model: PreTrainedModel, prompts: list[Tensor], method: Any = SKIP, **options: Any) -> Any:
    return skipstone.generate(model, families.padded(prompts), method, tokenizer=tokenizer(), **options)


@functools.cache
def said_without(base: tuple[tuple[str, Any], ...], lengths: tuple[int, ...]) -> list[list[int]]:
    """What transformers says when the option is not set."""
    return [alone(families.cached("llama"), prompt, **dict(base)) for prompt in prompts_of(lengths)]


def prompts_of(lengths: tuple[int, ...]) -> list[Tensor]:
    return [prompt[:length] for prompt, length in zip(families.prompts(2), lengths, strict=True)]


@pytest.mark.parametrize("name", TEXT)
def test_a_field_changes_the_text_as_in_transformers_on_every_route(name: str, model: PreTrainedModel) -> None:
    case = TEXT[name]
    prompts = prompts_of(case.lengths)
    base = {"max_new_tokens": 12, **case.base}
    words = {"tokenizer": tokenizer()} if name == "stop_strings" else {}
    expected = [alone(model, prompt, **{**base, **case.options}, **words) for prompt in prompts]
    plain = {name: tuple(value) if isinstance(value, list) else value for name, value in base.items()}
    assert expected != said_without(tuple(plain.items()), case.lengths), "the option changes nothing here"
    assert generate(model, prompts, **{**base, **case.options}).new_tokens == expected
    config = GenerationConfig(**{**base, **case.options})
    assert generate(model, prompts, generation_config=config).new_tokens == expected
    own = model.generation_config
    try:
        model.generation_config = copy.deepcopy(own)
        model.generation_config.update(**{**base, **case.options})
        assert generate(model, prompts).new_tokens == expected
    finally:
        model.generation_config = own


@pytest.mark.parametrize("name", LAW)
def test_a_field_changes_the_law_as_in_transformers(name: str, model: PreTrainedModel) -> None:
    """The distribution the first tokens are drawn from is transformers' own."""
    prompt = families.prompts(1)[0]
    options = {**SAMPLING, **LAW[name], "max_new_tokens": 1, "output_scores": True, "return_dict_in_generate": True}
    theirs = model.generate(prompt[None], **options).scores[0].softmax(-1)
    mine = generate(model, [prompt], Autoregressive(), **options).scores[0].exp()
    torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-4)
    plain = {**options, **SAMPLING} if LAW[name] else {**options, "do_sample": False}
    if LAW[name]:
        for other in set(LAW[name]) - set(SAMPLING):
            plain.pop(other)
        before = model.generate(prompt[None], **plain).scores[0].softmax(-1)
        assert (before - theirs).abs().max() > 1e-3, "the option changes nothing here"
    else:
        assert ((mine > 1e-3).sum() > 1).all(), "sampling should leave more than one token"


def test_invalid_scores_are_removed_as_in_transformers() -> None:
    model = families.build("llama")
    model.lm_head.weight.data[5] = float("inf")
    prompts = families.prompts(2)
    options: dict[str, Any] = {"remove_invalid_values": True, "max_new_tokens": 12}
    expected = [alone(model, prompt, **options) for prompt in prompts]
    assert expected != [alone(model, prompt, max_new_tokens=12) for prompt in prompts]
    assert generate(model, prompts, **options).new_tokens == expected


@pytest.mark.parametrize("more", [{}, {"repetition_penalty": 1.3}], ids=["alone", "after a processor"])
def test_renormalised_scores_are_log_probabilities_as_in_transformers(more: dict[str, Any], model: PreTrainedModel) -> None:
    prompt = families.prompts(1)[0]
    options = {"max_new_tokens": 8, "output_scores": True, "return_dict_in_generate": True, "renormalize_logits": True, **more}
    theirs, mine = model.generate(prompt[None], **options), generate(model, [prompt], **options)
    torch.testing.assert_close(torch.stack(mine.scores), torch.stack(theirs.scores), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(mine.scores[0].exp().sum(-1), torch.ones(1))


def test_a_prompt_left_out_is_the_bos_token() -> None:
    model = families.build("llama")
    expected = model.generate(bos_token_id=44, max_new_tokens=8)
    assert expected[0, 0] == 44
    skipstone.enable(model, SKIP)
    assert torch.equal(model.generate(bos_token_id=44, max_new_tokens=8), expected)


def test_the_prompt_runs_in_chunks_of_prefill_chunk_size(model: PreTrainedModel) -> None:
    prompt = families.prompts(1, longest=30)[0]
    expected = alone(model, prompt, max_new_tokens=8)
    for size, count in ((7, 5), (30, 1), (None, 1)):
        output = generate(model, [prompt], max_new_tokens=8, prefill_chunk_size=size, record=True)
        assert sum(step.prefill for step in output.steps) == count
        assert output.new_tokens == [expected]


def test_the_config_given_wins_over_the_models_and_keywords_over_both(model: PreTrainedModel) -> None:
    prompt = families.prompts(1)[0]
    own = model.generation_config
    try:
        model.generation_config = GenerationConfig(max_new_tokens=9, repetition_penalty=1.5, num_beams=3)
        config = GenerationConfig(max_new_tokens=6, num_beams=1)
        expected = alone(model, prompt, generation_config=config)
        assert len(expected) == 6
        assert generate(model, [prompt], generation_config=config).new_tokens == [expected]
        again = generate(model, [prompt], generation_config=config, max_new_tokens=4, repetition_penalty=1.0)
        assert again.new_tokens == [alone(model, prompt, generation_config=config, max_new_tokens=4, repetition_penalty=1.0)]
        with pytest.raises(ValueError, match="num_beams=3 is not supported"):
            generate(model, [prompt], max_new_tokens=4)
    finally:
        model.generation_config = own


NO_WISHES = [{"use_cache": False}, {"guidance_scale": 1.0}, {"cache_implementation": "static"}, {"decoder_start_token_id": 2}]


@pytest.mark.parametrize("settings", NO_WISHES)
def test_what_changes_no_text_is_no_wish(settings: dict[str, Any]) -> None:
    """Also in a model's own config, where training leaves `use_cache: false`."""
    model, prompt = families.cached("llama"), families.prompts(1)[0][None]
    plain = skipstone.generate(model, prompt, SKIP, max_new_tokens=12)
    assert torch.equal(skipstone.generate(model, prompt, SKIP, max_new_tokens=12, **settings).sequences, plain.sequences)
    own = families.build("llama")
    for name, value in settings.items():
        setattr(own.generation_config, name, value)
    assert torch.equal(skipstone.generate(own, prompt, SKIP, max_new_tokens=12).sequences, plain.sequences)
