"""A model's generation config: broken ones are refused, others replaced and overridden, unusable ones named at the start."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

import skipstone
from skipstone.assets import NANO
from skipstone.cli.model_options import GenerationModelOptions, read_overrides
from skipstone.engines.model_runner import ModelRunner
from skipstone.hf.generation_defaults import expect_usable_defaults, replace_defaults
from skipstone.models.generation_config import parse_generation_config
from skipstone.serving.batch_files.batch import ModelSettings
from tests.helpers import families
from tests.helpers.served import in_thread
from tests.helpers.support import tokenizer

BROKEN = {
    "no JSON": "{",
    "a list": "[1]",
    "a text for a number": '{"temperature": "hot"}',
    "a text for a whole number": '{"max_new_tokens": "12"}',
    "a fraction for a whole number": '{"top_k": 1.5}',
    "a number for a bool": '{"do_sample": 1}',
    "a bool for a number": '{"top_p": true}',
    "texts for ids": '{"eos_token_id": ["</s>"]}',
}
UNUSABLE: dict[str, dict[str, Any]] = {
    "num_beams": {"num_beams": 4},
    "temperature": {"do_sample": True, "temperature": 0.0},
    "top_p": {"top_p": 2.0},
    "penalty": {"repetition_penalty": -1.0},
    "bad_words_ids": {"bad_words_ids": [["a"]]},
    "stop_strings": {"stop_strings": [""]},
    "penalty_alpha": {"penalty_alpha": 0.6},
}


def nano(folder: Path, text: str) -> Path:
    """The bundled model with another generation_config.json."""
    shutil.copytree(NANO, folder / "nano", ignore=shutil.ignore_patterns("heads"))
    (folder / "nano" / "generation_config.json").write_text(text)
    return folder / "nano"


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_a_sentence_that_names_it(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"generation_config\.json.* (correct|remove) it"):
        skipstone.load(nano(tmp_path, BROKEN[name]))


def test_what_published_files_hold_beside_transformers_fields_is_left_alone(tmp_path: Path) -> None:
    text = {"eos_token_id": [0, 5], "chat_format": "chatml", "num_beam_groups": 1, "length_penalty": 1.0, "temperature": None}
    model, words = skipstone.load(nano(tmp_path, json.dumps(text)))
    expect_usable_defaults(ModelRunner(model), words)
    assert model.generation_config.eos_token_id == [0, 5]


def test_a_misspelt_field_is_a_warning_with_what_was_meant() -> None:
    with pytest.warns(UserWarning, match=r"temprature.* temperature"):
        assert parse_generation_config('{"temprature": 0.5, "sep_token_id": 3}', "a file") == {
            "temprature": 0.5,
            "sep_token_id": 3,
        }


@pytest.mark.parametrize("name", UNUSABLE)
def test_settings_that_cannot_work_are_named_before_any_request(name: str) -> None:
    model = families.build("llama")
    expect_usable_defaults(ModelRunner(model), tokenizer())
    replace_defaults(model, None, UNUSABLE[name])
    with pytest.raises(ValueError, match=rf"{name}.*--generation-config"):
        expect_usable_defaults(ModelRunner(model), tokenizer())
    replace_defaults(model, {}, {})
    expect_usable_defaults(ModelRunner(model), tokenizer())


@pytest.mark.parametrize("values", [{"max_new_tokens": -1}, {"max_length": -3}, {"prefill_chunk_size": 0}], ids=str)
def test_a_number_that_is_too_small_is_named_with_the_file_and_the_remedy(values: dict[str, int], tmp_path: Path) -> None:
    folder, ((name, value),) = nano(tmp_path, json.dumps(values)), values.items()
    remedy = "correct it.*--override-generation-config"
    with pytest.raises(ValueError, match=rf"generation_config\.json of .*{name}.*{value}.*{remedy}"):
        skipstone.load(folder)
    with pytest.raises(ValueError, match=rf"{name}.*{remedy}"):
        replace_defaults(families.build("llama"), None, values)
    model, _ = GenerationModelOptions(str(folder), override_generation_config={name: None}).load()
    assert getattr(model.generation_config, name) is None


HARMFUL = {
    "no JSON": "{",
    "a wrong type": '{"temperature": "hot"}',
    "refused by transformers": '{"eos_token_id": 5, "num_return_sequences": 3}',
}


@pytest.mark.parametrize("name", HARMFUL)
def test_a_file_that_nothing_can_load_is_ignored_by_a_flag(name: str, tmp_path: Path) -> None:
    folder = str(nano(tmp_path, HARMFUL[name]))
    with pytest.raises(ValueError, match=r"generation_config\.json.*(correct|remove) it"):
        GenerationModelOptions(folder).load()
    for model in (
        GenerationModelOptions(folder, generation_config={}).load()[0],
        ModelSettings(folder, generation_config={}).load().model,
    ):
        assert model.generation_config.eos_token_id == (5 if "eos" in HARMFUL[name] else 0)


def test_a_batch_without_the_model_s_defaults_is_another_run() -> None:
    assert ModelSettings(generation_config={}).journal_settings() != ModelSettings().journal_settings()


def test_a_field_that_transformers_refuses_can_be_overridden(tmp_path: Path) -> None:
    folder = str(nano(tmp_path, HARMFUL["refused by transformers"]))
    model, _ = GenerationModelOptions(folder, override_generation_config={"num_return_sequences": None}).load()
    assert (model.generation_config.eos_token_id, model.generation_config.num_return_sequences) == (5, None)


@pytest.mark.slow
def test_a_batch_does_not_begin_with_them(tmp_path: Path) -> None:
    folder = str(nano(tmp_path, '{"eos_token_id": 0, "num_beams": 4}'))
    with pytest.raises(ValueError, match="num_beams=4"):
        ModelSettings(folder).load()
    loaded = ModelSettings(folder, overrides={"num_beams": None}).load()
    assert loaded.model.generation_config.num_beams is None
    assert ModelSettings(folder, generation_config={"top_k": 3}).load().model.generation_config.top_k == 3


def test_a_replacement_keeps_the_ids_and_the_method_of_the_model() -> None:
    model = families.build("llama")
    fields = {
        "eos_token_id": [1, 5],
        "pad_token_id": 0,
        "temperature": 0.5,
        "do_sample": True,
        "skipstone": {"method": "jacobi"},
    }
    model.generation_config = GenerationConfig(**fields)
    replace_defaults(model, {}, {})
    own: Any = model.generation_config
    assert (own.eos_token_id, own.pad_token_id, own.temperature, own.do_sample) == ([1, 5], 0, None, None)
    assert own.skipstone == {"method": "jacobi"}
    replace_defaults(model, {"eos_token_id": 7, "top_k": 3}, {"top_k": 4, "top_p": 0.5})
    own = model.generation_config
    assert (own.eos_token_id, own.top_k, own.top_p) == (7, 4, 0.5)


def test_an_override_that_does_not_exist_is_refused_with_what_was_meant() -> None:
    with pytest.raises(ValueError, match=r"temprature.* temperature"):
        replace_defaults(families.build("llama"), None, {"temprature": 1.0})
    with pytest.raises(ValueError, match="top_k"):
        replace_defaults(families.build("llama"), None, {"top_k": "x"})


def test_a_misspelt_override_is_refused_before_a_model_is_loaded() -> None:
    with pytest.raises(ValueError, match=r"temprature.* temperature"):
        read_overrides('{"temprature": 1.0}')


def test_stop_strings_of_the_model_work_in_a_server() -> None:
    """The text is that of `skipstone.generate`, the string included."""
    model, words = skipstone.load(None)
    free = skipstone.generate(model, "def add(a, b):", "autoregressive", tokenizer=words, max_new_tokens=30)
    stop = free.text[10:13]
    model.generation_config.stop_strings = [stop]
    expected = skipstone.generate(model, "def add(a, b):", "autoregressive", tokenizer=words, max_new_tokens=30)
    assert len(expected.new_tokens[0]) < len(free.new_tokens[0])
    body = {"prompt": "def add(a, b):", "max_tokens": 30, "temperature": 0}
    with in_thread(lambda: (model, words), max_num_seqs=2, method="autoregressive") as served:
        for method in ("off", "layerskip", "prompt_lookup"):
            (choice,) = served.http.post("/v1/completions", json={**body, "speculative": method}).json()["choices"]
            assert (choice["text"], choice["finish_reason"]) == (expected.text, "stop")
        exact = {**body, "max_tokens": len(expected.new_tokens[0])}
        (choice,) = served.http.post("/v1/completions", json=exact).json()["choices"]
        assert choice["finish_reason"] == "stop", "it ends by the string, not by the number of tokens"
        (choice,) = served.http.post("/v1/completions", json={**body, "stop": ["never met"]}).json()["choices"]
        assert choice["text"] == free.text, "a request's own stop strings replace the model's"
