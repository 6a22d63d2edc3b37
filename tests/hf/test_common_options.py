"""Options of a call on a model without transformers: the requests, warnings and errors are those of transformers' own way."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel, RepetitionPenaltyLogitsProcessor

import skipstone
from skipstone.engines.mapped_loading import read_model
from skipstone.hf import generate_call
from skipstone.hf.build_request import build_requests
from skipstone.hf.common_options import COMMON, NEUTRAL
from skipstone.hf.generate_call import prepare_call
from skipstone.hf.generation_config_fields import FIELDS
from skipstone.models.generation_config import GenerationFields
from skipstone.models.layer_variants import LAYER_VARIANTS
from skipstone.models.mapped_model import MappedModel
from tests.helpers import families
from tests.helpers.described import described
from tests.helpers.options import LAW, TEXT
from tests.helpers.support import tokenizer

PROMPT = torch.tensor([[5, 6, 7, 8, 5, 6]])
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1}
OWN: dict[str, dict[str, Any]] = {
    "nothing": {},
    "several ends": {"eos_token_id": [60, 72], "pad_token_id": 60},
    "Qwen's": {**SAMPLED, "eos_token_id": [60, 72], "pad_token_id": 0},
    "Gemma's": {"cache_implementation": "hybrid", "top_k": 64, "top_p": 0.95, "do_sample": True, "eos_token_id": 1},
    "defaults": {**NEUTRAL, "transformers_version": "4.40.0", "use_cache": False, "repetition_penalty": 1.0},
    "fields of its own": {"chat_format": "chatml", "sep_token_id": 4, "skipstone": {"method": "jacobi"}},
    "lengths": {"max_length": 50, "max_new_tokens": 3, "prefill_chunk_size": 5},
    "too short": {"max_length": 6},
    "stop strings": {"stop_strings": ["<23>"]},
    "others": {"min_new_tokens": 3, "eos_token_id": 1, "no_repeat_ngram_size": 2},
    "beams": {"num_beams": 4},
    "no end": {"eos_token_id": []},
    "a negative end": {"eos_token_id": -1},
    "a negative padding": {"pad_token_id": -1, "eos_token_id": 1},
}
"""Generation defaults of models."""
OWN_COMMON = [*OWN][:9]
COMMONLY_CALLED: list[dict[str, Any]] = [
    *({}, {"do_sample": False, "temperature": 0.5}, SAMPLED, {"do_sample": None}, {"do_sample": True, "temperature": 1}),
    *({"do_sample": True, "temperature": None, "top_k": None, "top_p": None}, {"do_sample": True, "top_k": 0, "min_p": 0.1}),
    *({"repetition_penalty": 1}, {"eos_token_id": None}, {"eos_token_id": 0}, {"eos_token_id": [3, 4], "pad_token_id": 9}),
    *({"max_length": 20}, {"max_length": None}, {"use_cache": False, "prefill_chunk_size": 3, "num_beams": 1}),
    *({"stop_strings": ["ab", "<23>"]}, {"stop_strings": "ab"}, {"stop_strings": None}, {"output_scores": False}),
    *({"logits_processor": [lambda _, scores: scores * 2]}, {"return_dict_in_generate": True}, {"max_time": None}),
]
"""Options that need no transformers."""
CALLED: list[dict[str, Any]] = [
    *COMMONLY_CALLED,
    *({**case.base, **case.options} for case in TEXT.values()),
    *({"do_sample": True, **options} for options in LAW.values()),
    *({name: 0} for name in ("forced_eos_token_id", "max_time", "num_beams", "length_penalty", "early_stopping")),
    *({"do_sample": True, "temperature": temperature} for temperature in (0.0, 2, -1.0, float("nan"))),
    *({"do_sample": True, name: value} for name, value in (("top_k", -1), ("top_p", 2.0), ("top_p", 0.0), ("min_p", 2.0))),
    *({"repetition_penalty": 0.0}, {"repetition_penalty": 2}, {"max_new_tokens": 0}, {"max_new_tokens": -1}, {"top_k": True}),
    *({"max_new_tokens": None, "max_length": length} for length in (9, 6, None)),
    {"max_new_tokens": None},
    *({"eos_token_id": "x"}, {"max_new_tokens": "3"}, {"stop_strings": [""]}, {"num_beams": None}, {"penalty_alpha": 0.5}),
    *({"num_return_sequences": count, "do_sample": do_sample} for count in (None, 2) for do_sample in (True, False)),
    *({"output_logits": True}, {"renormalize_logits": True}, {"min_new_tokens": 0}, {"decoder_start_token_id": 3}),
    *({"unknown": None}, {"temprature": 1.0}, {"synced_gpus": False}, {"assistant_model": 3}, {"skipstone": "jacobi"}),
    *({"token_type_ids": PROMPT * 0}, {"position_ids": None}, {"position_ids": PROMPT}, {"attention_mask": None}),
    *({"attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1]])}, {"attention_mask": torch.zeros_like(PROMPT)}),
    *({"generation_config": GenerationConfig(top_k=3, do_sample=True)}, {"logits_processor": []}),
    {"logits_processor": [RepetitionPenaltyLogitsProcessor(1.5)], "repetition_penalty": 1.2},
]


@pytest.fixture(scope="module")
def models() -> tuple[PreTrainedModel, MappedModel]:
    own = families.build("llama")
    return own, families.mapped(own)


def outcome(model: Any, options: dict[str, Any]) -> tuple[Any, list[str]]:
    """The requests of a call in comparable form, or its error; and the warnings."""
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        try:
            options = {"attention_mask": torch.ones_like(PROMPT), "max_new_tokens": 4, **options}
            call = prepare_call(model, PROMPT, tokenizer(), 7, options)
            result: Any = [described(request) for request in build_requests(call)]
            pad: Any = call.config._pad_token_tensor
            result += [
                None if pad is None else int(pad),
                call.config.prefill_chunk_size,
                getattr(call.config, "skipstone", None),
            ]
        except Exception as error:  # whatever transformers raises
            result = type(error), str(error)
    return result, [str(one.message) for one in shown]


@pytest.mark.parametrize("own", OWN)
def test_a_call_gives_the_request_of_transformers_own_way(own: str, models: tuple[PreTrainedModel, MappedModel]) -> None:
    models[0].generation_config = GenerationConfig.from_dict(OWN[own])
    models[1].generation_config = GenerationFields(OWN[own])
    for options in CALLED:
        expected, found = (outcome(model, options) for model in models)
        assert found == expected, options


@pytest.mark.parametrize("own", OWN_COMMON)
def test_common_calls_need_no_transformers(
    own: str, models: tuple[PreTrainedModel, MappedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    models[1].generation_config = GenerationFields(OWN[own])
    monkeypatch.setattr(generate_call, "generation_host", None)
    for options in COMMONLY_CALLED:
        result, _ = outcome(models[1], options)
        assert isinstance(result, list), (options, result)


@pytest.mark.parametrize("kind", LAYER_VARIANTS)
def test_any_other_call_takes_transformers_way_on_a_model_without_weights(kind: str) -> None:
    own: Any = families.build(kind)
    rows = families.padded(families.prompts(2))
    options: dict[str, Any] = {
        "max_new_tokens": 6,
        "repetition_penalty": 1.5,
        "begin_suppress_tokens": [60, 55],
        "typical_p": 0.9,
    }
    outputs = [
        skipstone.generate(model, rows, "autoregressive", seed=3, do_sample=True, engine="native", **options)
        for model in [own, families.mapped(own)]
    ]
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert torch.get_default_dtype() == torch.float32


def test_without_a_file_the_defaults_are_those_in_the_config(tmp_path: Path) -> None:
    own = families.build("llama")
    own.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    del config["bos_token_id"]  # the default of the type does not count
    legacy = {
        "eos_token_id": [3, 4],
        "max_length": 30,
        "temperature": 0.5,
        "do_sample": True,
        "use_cache": False,
        "top_k": None,
    }
    (tmp_path / "config.json").write_text(json.dumps({**config, **legacy}))
    expected: Any = type(own).from_pretrained(tmp_path).generation_config
    found = read_model(tmp_path)[0].generation_config
    assert {name: getattr(found, name) for name in FIELDS if name != "transformers_version"} == {
        name: getattr(expected, name) for name in FIELDS if name != "transformers_version"
    }


def test_the_table_has_transformers_defaults() -> None:
    defaults = GenerationConfig._get_default_generation_params()
    own = {name: value for name, value in {**COMMON, **NEUTRAL}.items() if name in defaults and name != "max_length"}
    assert own == {name: defaults[name] for name in own}
    assert own.keys() >= NEUTRAL.keys()
