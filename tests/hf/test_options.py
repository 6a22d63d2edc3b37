"""Every field of transformers' GenerationConfig is refused by name, or changes text and law as it does there."""

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CompileConfig, GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import WatermarkingConfig

import skipstone
from skipstone import Autoregressive, LayerSkip
from skipstone.hf.generation_config_fields import FIELDS, refuse_fields
from tests.helpers import families
from tests.helpers.options import ELSEWHERE, LAW, TEXT
from tests.helpers.support import alone, forwards, tokenizer

SKIP = LayerSkip(exit_layer=2, num_speculative_tokens=4)
SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 2.0, "top_k": 0}
# how fast a tiny model runs is no matter here
pytestmark = pytest.mark.filterwarnings("ignore:.*x the speed of plain decoding:RuntimeWarning")

REFUSED: dict[str, Any] = {
    "num_beams": 2,
    "num_beam_groups": 2,
    "early_stopping": True,
    "length_penalty": 0.5,
    "diversity_penalty": 0.5,
    "constraints": ["something"],
    "force_words_ids": [[5]],
    "cache_implementation": "quantized",
    "cache_config": {"backend": "quanto"},
    "max_cache_len": 100,
    "low_memory": True,
    "penalty_alpha": 0.6,
    "dola_layers": "high",
    "guidance_scale": 1.5,
    "watermarking_config": WatermarkingConfig(),
    "token_healing": True,
    "output_attentions": True,
    "output_hidden_states": True,
    "compile_config": CompileConfig(),
    "continuous_batching_config": {"num_blocks": 4},
    "assistant_early_exit": 2,
    "assistant_confidence_threshold": 0.7,
    "assistant_ensemble_weight": 0.5,
    "assistant_lookbehind": 5,
    "target_lookbehind": 5,
    "num_assistant_tokens": 7,
    "num_assistant_tokens_schedule": "heuristic",
    "is_assistant": True,
    "prompt_lookup_num_tokens": 4,
    "max_matching_ngram_size": 3,
    "speculation_type": "dflash",
    "use_mtp": True,
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return families.cached("llama")


def generate(model: PreTrainedModel, prompts: list[Tensor], method: Any = SKIP, **options: Any) -> Any:
    return skipstone.generate(model, families.padded(prompts), method, tokenizer=tokenizer(), **options)


def test_every_field_of_the_installed_transformers_is_in_the_table_and_has_a_case() -> None:
    config = GenerationConfig()
    fields = {**config.to_dict(), **config._get_default_generation_params()}
    assert set(FIELDS) == {name for name in fields if not name.startswith("_")}
    assert set(REFUSED) == {name for name, reason in FIELDS.items() if reason is not None}
    supported = [*TEXT, *LAW, *ELSEWHERE]
    assert len(supported) == len(set(supported))
    assert set(supported) == {name for name, reason in FIELDS.items() if reason is None}


@contextmanager
def own_config(model: PreTrainedModel, config: GenerationConfig) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "generation_config", config)
        yield


def call_with(route: str, model: PreTrainedModel, name: str) -> None:
    """Decode with a refused field set in one of the places where it can be set."""
    prompt, config = families.prompts(1)[0][None], copy.deepcopy(model.generation_config)
    setattr(config, name, REFUSED[name])
    if route == "keyword":
        skipstone.generate(model, prompt, SKIP, max_new_tokens=4, **{name: REFUSED[name]})
    elif route == "generation_config":
        skipstone.generate(model, prompt, SKIP, generation_config=config, max_new_tokens=4)
    elif route == "the model's own":
        with own_config(model, config):
            skipstone.generate(model, prompt, SKIP, max_new_tokens=4)
    else:
        model.generate(prompt, generation_config=config, custom_generate=skipstone.custom_generate(SKIP), max_new_tokens=4)


ROUTES = ("keyword", "generation_config", "the model's own", "custom_generate")
# at these two transformers raises an error of its own before it calls a custom decoding function
NOT_REACHED = [("cache_implementation", "custom_generate"), ("token_healing", "custom_generate")]


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:Passing ContinuousBatchingConfig:FutureWarning")
def test_a_refused_field_is_a_value_error_that_names_it_and_its_default_passes(name: str, model: PreTrainedModel) -> None:
    for route in ROUTES:
        if (name, route) in NOT_REACHED:
            continue
        with forwards(model) as count, pytest.raises(ValueError, match=rf"^{name}=.* is not supported: \w+"):
            call_with(route, model, name)
        assert count == [0]
    default = GenerationConfig._get_default_generation_params().get(name)
    output = generate(model, families.prompts(1), max_new_tokens=3, **{name: default})
    assert output.new_tokens == [alone(model, families.prompts(1)[0], max_new_tokens=3)]


def test_an_unknown_field_of_transformers_is_refused_and_a_note_of_the_model_is_not(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = GenerationConfig(max_new_tokens=5, some_note="written by a trainer")
    output = generate(model, families.prompts(1), generation_config=config)
    assert output.new_tokens == [alone(model, families.prompts(1)[0], max_new_tokens=5)]
    with pytest.raises(ValueError, match="cache_implementation='paged' is not supported"):  # not started by transformers
        generate(model, families.prompts(1), cache_implementation="paged", max_new_tokens=3)
    monkeypatch.delitem(FIELDS, "top_h")
    with pytest.raises(ValueError, match=r"top_h=0\.5 is not supported: skipstone does not know this option"):
        refuse_fields({"top_h": 0.5})


@functools.cache
def said_without(base: tuple[tuple[str, Any], ...], lengths: tuple[int, ...]) -> list[list[int]]:
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
    own = copy.deepcopy(model.generation_config)
    own.update(**{**base, **case.options})
    with own_config(model, own):
        assert generate(model, prompts).new_tokens == expected


@pytest.mark.parametrize("name", LAW)
def test_a_field_changes_the_law_as_in_transformers(name: str, model: PreTrainedModel) -> None:
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


def test_renormalised_scores_are_log_probabilities_as_in_transformers(model: PreTrainedModel) -> None:
    prompt, more = families.prompts(1)[0], {"renormalize_logits": True, "repetition_penalty": 1.3}
    options = {"max_new_tokens": 8, "output_scores": True, "return_dict_in_generate": True, **more}
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
    prompt, config = families.prompts(1)[0], GenerationConfig(max_new_tokens=6, num_beams=1)
    with own_config(model, GenerationConfig(max_new_tokens=9, repetition_penalty=1.5, num_beams=3)):
        for more in ({}, {"max_new_tokens": 4, "repetition_penalty": 1.0}):
            expected = alone(model, prompt, generation_config=config, **more)
            assert len(expected) == more.get("max_new_tokens", 6)
            assert generate(model, [prompt], generation_config=config, **more).new_tokens == [expected]
        with pytest.raises(ValueError, match="num_beams=3 is not supported"):
            generate(model, [prompt], max_new_tokens=4)


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
