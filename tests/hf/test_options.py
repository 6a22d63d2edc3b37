"""Every field of the installed transformers' GenerationConfig is refused by name or means what it means there."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
from torch import Tensor
from transformers import CompileConfig, GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import WatermarkingConfig

import skipstone
from skipstone import LayerSkip
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


def fields_of_transformers() -> set[str]:
    config = GenerationConfig()
    return {name for name in {**config.to_dict(), **config._get_default_generation_params()} if not name.startswith("_")}


def test_the_table_has_exactly_the_fields_of_the_installed_transformers() -> None:
    assert set(FIELDS) == fields_of_transformers()


def test_every_refused_field_has_a_case_here() -> None:
    assert set(REFUSED) == {name for name, reason in FIELDS.items() if reason is not None}


def test_every_supported_field_has_a_case_here() -> None:
    named = [*TEXT, *LAW, *ELSEWHERE]
    assert len(named) == len(set(named))
    assert set(named) == {name for name, reason in FIELDS.items() if reason is None}


def call_with(route: str, model: PreTrainedModel, name: str) -> None:
    """Decode with a refused field set in one of the places where it can be set."""
    prompt, own = families.prompts(1)[0][None], model.generation_config
    config = copy.deepcopy(own)
    setattr(config, name, REFUSED[name])
    if route == "keyword":
        skipstone.generate(model, prompt, SKIP, max_new_tokens=4, **{name: REFUSED[name]})
    elif route == "generation_config":
        skipstone.generate(model, prompt, SKIP, generation_config=config, max_new_tokens=4)
    elif route == "the model's own":
        model.generation_config = config
        try:
            skipstone.generate(model, prompt, SKIP, max_new_tokens=4)
        finally:
            model.generation_config = own
    else:
        model.generate(prompt, generation_config=config, custom_generate=skipstone.custom_generate(SKIP), max_new_tokens=4)


ROUTES = ("keyword", "generation_config", "the model's own", "custom_generate")
# at these two transformers raises an error of its own before it calls a custom decoding function
NOT_REACHED = [("cache_implementation", "custom_generate"), ("token_healing", "custom_generate")]


@pytest.mark.parametrize(("name", "route"), [pair for pair in itertools.product(REFUSED, ROUTES) if pair not in NOT_REACHED])
@pytest.mark.filterwarnings("ignore:Passing ContinuousBatchingConfig:FutureWarning")
def test_a_refused_field_is_a_value_error_that_names_it(name: str, route: str, model: PreTrainedModel) -> None:
    with forwards(model) as count, pytest.raises(ValueError, match=rf"^{name}=.* is not supported: \w+"):
        call_with(route, model, name)
    assert count == [0]


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_field_at_its_default_passes(name: str, model: PreTrainedModel) -> None:
    default = GenerationConfig._get_default_generation_params().get(name)
    output = generate(model, families.prompts(1), max_new_tokens=3, **{name: default})
    assert output.new_tokens == [alone(model, families.prompts(1)[0], max_new_tokens=3)]


def test_paged_attention_is_refused_before_transformers_starts_its_engine(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="cache_implementation='paged' is not supported"):
        generate(model, families.prompts(1), cache_implementation="paged", max_new_tokens=3)


def test_a_field_that_transformers_grows_is_refused_until_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(FIELDS, "top_h")
    with pytest.raises(ValueError, match=r"top_h=0\.5 is not supported: skipstone does not know this option"):
        refuse_fields({"top_h": 0.5})


def test_a_models_own_field_is_nobodys_business(model: PreTrainedModel) -> None:
    config = GenerationConfig(max_new_tokens=5, some_note="written by a trainer")
    output = generate(model, families.prompts(1), generation_config=config)
    assert output.new_tokens == [alone(model, families.prompts(1)[0], max_new_tokens=5)]
