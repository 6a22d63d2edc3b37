"""A model's generation config: broken ones are refused, others replaced and overridden, unusable ones named at the start."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

import skipstone
from skipstone.assets import NANO
from skipstone.cli.option_groups import GenerationModelOptions, read_overrides
from skipstone.engines.model_runner import ModelRunner
from skipstone.hf.generation_defaults import expect_usable_defaults, replace_defaults
from skipstone.models.generation_config import parse_generation_config
from tests.helpers import families
from tests.helpers.batches import greedy, request, write
from tests.helpers.commandline import assert_refused, run, succeed
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
    shutil.copytree(NANO, folder / "nano", ignore=shutil.ignore_patterns("heads"))
    (folder / "nano" / "generation_config.json").write_text(text)
    return folder / "nano"


def test_a_broken_file_is_a_sentence_that_names_it(tmp_path: Path) -> None:
    for text in BROKEN.values():
        with pytest.raises(ValueError, match=r"generation_config\.json.* (correct|remove) it"):
            parse_generation_config(text, "generation_config.json of x")
    with pytest.raises(ValueError, match=r"generation_config\.json.* (correct|remove) it"):
        skipstone.load(nano(tmp_path, BROKEN["a fraction for a whole number"]))


def test_further_fields_of_a_file_are_left_alone_and_a_misspelt_one_is_a_warning(tmp_path: Path) -> None:
    text = {"eos_token_id": [0, 5], "chat_format": "chatml", "num_beam_groups": 1, "length_penalty": 1.0, "temperature": None}
    model, words = skipstone.load(nano(tmp_path, json.dumps(text)))
    expect_usable_defaults(ModelRunner(model), words)
    assert model.generation_config.eos_token_id == [0, 5]
    with pytest.warns(UserWarning, match=r"temprature.* temperature"):
        assert parse_generation_config('{"temprature": 0.5, "sep_token_id": 3}', "a file")["temprature"] == 0.5


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


def test_a_file_that_transformers_refuses_is_ignored_or_corrected_by_a_flag(tmp_path: Path) -> None:
    folder = str(nano(tmp_path, '{"eos_token_id": 5, "num_return_sequences": 3}'))
    with pytest.raises(ValueError, match=r"generation_config\.json.*(correct|remove) it"):
        GenerationModelOptions(folder, engine="eager").load()
    corrected = {"override_generation_config": {"num_return_sequences": None}}
    for model in (
        *(GenerationModelOptions(folder, generation_config={}, engine=engine).load()[0] for engine in ("auto", "eager")),
        GenerationModelOptions(folder, **corrected).load()[0],
    ):
        assert (model.generation_config.eos_token_id, model.generation_config.num_return_sequences) == (5, None)
    (tmp_path / "nano" / "generation_config.json").write_text("{")
    assert GenerationModelOptions(folder, generation_config={}).load()[0].generation_config.eos_token_id == 0


@pytest.mark.slow
def test_a_batch_does_not_begin_with_them(tmp_path: Path) -> None:
    folder = str(nano(tmp_path, '{"eos_token_id": 0, "num_beams": 4}'))
    requests, output = write(tmp_path / "in.jsonl", [request("a", greedy("x", 2))]), tmp_path / "out.jsonl"
    assert_refused(run("batch", requests, output, "--model", folder), "num_beams=4")
    succeed("batch", requests, output, "--model", folder, "--override-generation-config", '{"num_beams": null}')


def test_a_replacement_keeps_the_ids_and_the_method_of_the_model() -> None:
    model = families.build("llama")
    ids: dict[str, Any] = {"eos_token_id": [1, 5], "pad_token_id": 0}
    model.generation_config = GenerationConfig(temperature=0.5, do_sample=True, skipstone={"method": "jacobi"}, **ids)
    replace_defaults(model, {}, {})
    own: Any = model.generation_config
    assert (own.eos_token_id, own.pad_token_id, own.temperature, own.do_sample) == ([1, 5], 0, None, None)
    assert own.skipstone == {"method": "jacobi"}
    replace_defaults(model, {"eos_token_id": 7, "top_k": 3}, {"top_k": 4, "top_p": 0.5})
    own = model.generation_config
    assert (own.eos_token_id, own.top_k, own.top_p) == (7, 4, 0.5)


def test_an_override_that_does_not_exist_is_refused_with_what_was_meant() -> None:
    for call in (
        lambda: replace_defaults(families.build("llama"), None, {"temprature": 1.0}),
        lambda: read_overrides('{"temprature": 1.0}'),
    ):
        with pytest.raises(ValueError, match=r"temprature.* temperature"):
            call()
    with pytest.raises(ValueError, match="top_k"):
        replace_defaults(families.build("llama"), None, {"top_k": "x"})


def test_stop_strings_of_the_model_work_in_a_server() -> None:
    model, words = skipstone.load(None)
    options: dict[str, Any] = {"tokenizer": words, "max_new_tokens": 20}
    free: Any = skipstone.generate(model, "def add(a, b):", "autoregressive", **options)
    model.generation_config.stop_strings = [free.text[10:13]]
    stopped: Any = skipstone.generate(model, "def add(a, b):", "autoregressive", **options)
    count = len(stopped.new_tokens[0])
    assert count < len(free.new_tokens[0])
    with in_thread(lambda: (model, words), max_num_seqs=2, method="autoregressive") as served:
        for more, expected in (
            ({}, (stopped.text, "stop")),
            ({"speculative": "prompt_lookup"}, (stopped.text, "stop")),
            ({"max_tokens": count}, (stopped.text, "stop")),  # by the string, not by the number of tokens
            ({"stop": ["never met"]}, (free.text, "length")),  # a request's own stop strings replace the model's
        ):
            body = {"prompt": "def add(a, b):", "max_tokens": 20, "temperature": 0, **more}
            (choice,) = served.http.post("/v1/completions", json=body).json()["choices"]
            assert (choice["text"], choice["finish_reason"]) == expected
