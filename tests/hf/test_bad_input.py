"""What a user gets wrong is a ValueError (an OSError for a missing file) that says what was found and what was expected, raised
before any layer of the model runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, T5Config, T5ForConditionalGeneration

import skipstone
from skipstone import Autoregressive, LayerSkip
from skipstone.engines.model_runner import ModelRunner
from tests.helpers import families
from tests.helpers.pairwise import slow_except
from tests.helpers.support import forwards, tokenizer

IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
MASK = torch.ones_like(IDS)
SKIP = LayerSkip(exit_layer=2)


@dataclass(frozen=True)
class Wrong:
    """expected: a regular expression over the message. inputs, method, options: of the call."""

    expected: str
    inputs: Any = None
    method: Any = SKIP
    options: dict[str, Any] = field(default_factory=dict)


def masked(*rows: list[int]) -> dict[str, Tensor]:
    return {"attention_mask": torch.tensor(rows)}


def layer(value: Any) -> LayerSkip:
    return LayerSkip(exit_layer=value)


SAMPLE: dict[str, Any] = {"do_sample": True}
BETWEEN = "exit_layer must lie between 1 and 3 for a model of 4 layers"
TABLE: dict[str, Wrong] = {
    "exit layer too deep": Wrong(rf"{BETWEEN}, found 4", method=layer(4)),
    "exit layer zero": Wrong("exit_layer must be at least 1, found 0", method=layer(0)),
    "exit layer a float": Wrong(r"exit_layer must be an integer, found 2\.0", method=layer(2.0)),
    "exit layer a text": Wrong("exit_layer must be an integer, found '2'", method=layer("2")),
    "exit layer a bool": Wrong("exit_layer must be an integer, found True", method=layer(True)),
    "exit layer not set": Wrong(r"exit_layer is not set.*integer from 1 to 3.*skipstone inspect MODEL", method="layerskip"),
    "draft length zero": Wrong("num_speculative_tokens must be at least 1, found 0", method=LayerSkip(2, 0)),
    "draft vocabulary zero": Wrong("draft_vocabulary must be at least 1, found 0", method=LayerSkip(2, draft_vocabulary=0)),
    "draft vocabulary too large": Wrong(
        "draft_vocabulary must be at most 97, the ids that can be drafted, found 98", method=LayerSkip(2, draft_vocabulary=98)
    ),
    "threshold above one": Wrong(
        r"confidence_threshold must be a number in \[0, 1\].*found 1\.5", method=LayerSkip(2, confidence_threshold=1.5)
    ),
    "threshold not a number": Wrong(r"in \[0, 1\].*found nan", method=LayerSkip(2, confidence_threshold=float("nan"))),
    "threshold an unknown word": Wrong(
        r'"adaptive" or None, found \'clever\'',
        method=LayerSkip(2, confidence_threshold="clever"),  # type: ignore[arg-type]
    ),
    "unknown rule": Wrong(
        r'rejection_sample_method must be "standard" or "coupled", found \'magic\'',
        method=LayerSkip(2, rejection_sample_method="magic"),  # type: ignore[arg-type]
    ),
    "unknown method": Wrong(
        r"unknown method 'swiftly' .did you mean 'swift'.*there are auto, autoregressive.*layerskip", method="swiftly"
    ),
    "method without a name": Wrong(r"the key 'method' is missing in method=.*; there are", method={"exit_layer": 2}),
    "method of a strange type": Wrong(r"method must be a Method, a name or a mapping.*found 7", method=7),
    "unknown setting": Wrong(
        r"layerskip has no setting 'exit_layers'; it has exit_layer, num_speculative_tokens",
        method={"method": "layerskip", "exit_layers": 2},
    ),
    "a setting of another method": Wrong(
        "early_exit has no setting 'num_speculative_tokens'; it has exit_layer",
        method={"method": "early_exit", "num_speculative_tokens": 2},
    ),
    "unknown option": Wrong("unknown option max_new_token=5; did you mean max_new_tokens", options={"max_new_token": 5}),
    "a method's setting as an option": Wrong(
        r"unknown option exit_layer=2; a method's own settings go into method=", options={"exit_layer": 2}
    ),
    "an unknown tensor": Wrong(r"^labels is not supported", options={"labels": torch.zeros(1, 500)}),
    "token types": Wrong("token_type_ids is not supported.*return_token_type_ids=False", options={"token_type_ids": IDS}),
    "an assistant model": Wrong("assistant_model is not supported", options={"assistant_model": "another"}),
    "a cache of the user's": Wrong("past_key_values is not supported.*own KV store", options={"past_key_values": object()}),
    "embeddings": Wrong("inputs_embeds is not supported.*token ids", options={"inputs_embeds": torch.zeros(1, 2, 32)}),
    "negative prompt": Wrong("negative_prompt_ids is not supported", options={"negative_prompt_ids": IDS}),
    "position ids of another kind": Wrong(
        r"position_ids other than 0, 1, 2", options={"position_ids": torch.tensor([[3, 4, 5, 6]] * 2)}
    ),
    "an empty prompt": Wrong(r"at least one token, found shape \[1, 0\]", torch.empty((1, 0), dtype=torch.long)),
    "an empty batch": Wrong(r"at least one token, found shape \[0, 4\]", torch.empty((0, 4), dtype=torch.long)),
    "three dimensions": Wrong(r"must be \[batch, length\].*found shape \[1, 2, 4\]", IDS[None]),
    "ids that are no integers": Wrong(r"input_ids must be integers, found torch\.float32", IDS.float()),
    "an id beyond the vocabulary": Wrong(
        "token id 97 is out of range: the model's vocabulary has 97 entries, 0 to 96", torch.tensor([[5, 97]])
    ),
    "ids that are no tensor": Wrong(r'inputs\["input_ids"\] must be a tensor.*found list', {"input_ids": [[1, 2]]}),
    "no ids at all": Wrong(r'inputs\["input_ids"\] must be a tensor.*found NoneType', {"attention_mask": MASK}),
    "a list of ids": Wrong("text needs a tokenizer.*a tensor of token ids", [1, 2, 3]),
    "neither ids nor text": Wrong("inputs must be token ids .* a text, a chat.*found 3", 3),
    "text without a tokenizer": Wrong("text needs a tokenizer: pass tokenizer=", "hello"),
    "an empty text among others": Wrong("prompt 1 is empty", ["abc", ""], options={"tokenizer": tokenizer()}),
    "an empty list of texts": Wrong("the list of prompts is empty", [], options={"tokenizer": tokenizer()}),
    "numbers for texts": Wrong(r"a prompt is a text or a chat.*found int", [1, 2], options={"tokenizer": tokenizer()}),
    "a mask of another width": Wrong(
        r"attention_mask must have the shape of input_ids, \[2, 4\], found \[2, 3\]", IDS, options=masked([1] * 3, [1] * 3)
    ),
    "a mask of four dimensions": Wrong(r"found \[2, 1, 4, 4\]", IDS, options={"attention_mask": torch.ones(2, 1, 4, 4)}),
    "a mask that is no tensor": Wrong(r"\[2, 4\], found list", IDS, options={"attention_mask": [[1] * 4] * 2}),
    "a row of padding only": Wrong("row 1 of the batch is all padding", IDS, options=masked([1] * 4, [0] * 4)),
    "more tokens than positions": Wrong(
        r"prompt of 4 tokens \+ max_new_tokens=2045 is more than the model's 2048 positions", options={"max_new_tokens": 2045}
    ),
    "a prompt longer than the positions": Wrong(
        r"prompt of 2048 tokens \+ max_new_tokens=5 is more than the model's 2048", torch.ones((1, 2048), dtype=torch.long)
    ),
    "no new tokens": Wrong("max_new_tokens.*greater than 0, but is 0", options={"max_new_tokens": 0}),
    "max_length within the prompt": Wrong(
        r"Input length of input_ids is 4, but `max_length` is set to 3", options={"max_new_tokens": None, "max_length": 3}
    ),
    "temperature zero": Wrong(r"temperature.*=0\.0.*strictly positive", options={**SAMPLE, "temperature": 0.0}),
    "top_p above one": Wrong(r"top_p.*has to be a float > 0 and < 1, but is -0\.5", options={**SAMPLE, "top_p": -0.5}),
    "top_k negative": Wrong(r"top_k.*strictly positive integer, but is -3", options={**SAMPLE, "top_k": -3}),
    "min_p above one": Wrong(r"min_p.*in the \[0, 1\] interval, but is 2", options={**SAMPLE, "min_p": 2.0}),
    "too few seeds": Wrong(r"a list of 2 integers, one per row, found \[1\]", options={**SAMPLE, "seed": [1]}),
    "a float for a seed": Wrong(r"seed must be an integer.*found 1\.5", options={**SAMPLE, "seed": 1.5}),
    "a bool for a seed": Wrong(r"seed must be an integer.*found True", options={**SAMPLE, "seed": True}),
    "several greedy rows of one prompt": Wrong(
        r"num_return_sequences.*got 3", options={"num_return_sequences": 3, "do_sample": False}
    ),
}


@pytest.mark.parametrize("call", [skipstone.generate, skipstone.stream], ids=["generate", "stream"])
@pytest.mark.parametrize("name", TABLE)
def test_a_mistake_is_a_value_error_before_any_work(name: str, call: Callable[..., Any]) -> None:
    wrong, model = TABLE[name], families.cached("llama")
    inputs = IDS if wrong.inputs is None else wrong.inputs
    with forwards(model) as count, pytest.raises(ValueError, match=rf"(?s){wrong.expected}"):
        call(model, inputs, wrong.method, **{"max_new_tokens": 5, **wrong.options})
    assert count == [0]


THROUGH_GENERATE = [
    name
    for name, wrong in TABLE.items()
    if isinstance(wrong.method, skipstone.Method)
    and (wrong.inputs is None or (isinstance(wrong.inputs, Tensor) and wrong.inputs.ndim > 1))
    and name != "an assistant model"  # which an enabled model passes on to transformers
]
# behind custom_generate transformers looks at these first: it refuses them in its own words, or drops them
TRANSFORMERS_FIRST = {
    "unknown option",
    "an unknown tensor",
    "token types",
    "a method's setting as an option",
    "a cache of the user's",
    "embeddings",
    "negative prompt",
    "an empty prompt",
    "an empty batch",
    "three dimensions",
    "ids that are no integers",
    "a mask of another width",
    "a mask of four dimensions",
    "a mask that is no tensor",
}


@pytest.fixture(scope="module", autouse=True)
def _recognised() -> None:
    """What is found out once in a process, by forwards, is known: a refusal needs none."""
    ModelRunner(families.build("llama"))


@pytest.mark.parametrize("name", slow_except(THROUGH_GENERATE[::4], THROUGH_GENERATE))
def test_an_enabled_model_refuses_the_same(name: str) -> None:
    wrong, model = TABLE[name], families.build("llama")
    inputs = IDS if wrong.inputs is None else wrong.inputs
    with forwards(model) as count, pytest.raises(ValueError, match=rf"(?s){wrong.expected}"):
        skipstone.enable(model, wrong.method).generate(inputs, **{"max_new_tokens": 5, **wrong.options})
    assert count == [0]


@pytest.mark.parametrize("name", [name for name in THROUGH_GENERATE if name not in TRANSFORMERS_FIRST])
def test_custom_generate_refuses_the_same(name: str) -> None:
    wrong, model = TABLE[name], families.cached("llama")
    inputs = IDS if wrong.inputs is None else wrong.inputs
    with forwards(model) as count, pytest.raises(ValueError, match=rf"(?s){wrong.expected}"):
        model.generate(
            inputs, custom_generate=skipstone.custom_generate(wrong.method), **{"max_new_tokens": 5, **wrong.options}
        )
    assert count == [0]


def test_what_skipstone_would_not_hand_to_the_model_is_refused_behind_custom_generate() -> None:
    model = families.cached("gpt2")
    ModelRunner(model)  # its family is derived from a forward
    with forwards(model) as count, pytest.raises(ValueError, match=r"token_type_ids is not supported.*nothing but token ids"):
        model.generate(
            IDS, custom_generate=skipstone.custom_generate(SKIP), token_type_ids=torch.zeros_like(IDS), max_new_tokens=3
        )
    assert count == [0]


def test_a_filled_cache_is_refused_behind_custom_generate() -> None:
    model = families.build("llama")
    cache = model(IDS, use_cache=True).past_key_values
    with forwards(model) as count, pytest.raises(ValueError, match="past_key_values of 4 tokens are not supported"):
        model.generate(
            torch.cat([IDS, IDS], 1), past_key_values=cache, custom_generate=skipstone.custom_generate(SKIP), max_new_tokens=3
        )
    assert count == [0]


def test_a_model_in_training_mode_is_refused() -> None:
    model = families.build("llama").train()
    with forwards(model) as count, pytest.raises(ValueError, match=r"training mode.*call model\.eval\(\)"):
        skipstone.generate(model, IDS, SKIP, max_new_tokens=3)
    assert count == [0]


def test_an_encoder_decoder_is_refused_before_its_encoder_runs() -> None:
    config = T5Config(vocab_size=97, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config).eval()
    with forwards(model) as count, pytest.raises(ValueError, match=r"t5 is an encoder-decoder.*decoder-only"):
        skipstone.generate(model, IDS, Autoregressive(), max_new_tokens=3)
    assert count == [0]


@pytest.mark.parametrize("call", [skipstone.generate, skipstone.stream])
@pytest.mark.parametrize("what", ["a path", "none", "a model without a head", "its layers"])
def test_what_is_no_language_model_is_refused(what: str, call: Callable[..., Any]) -> None:
    whole: Any = families.cached("llama")
    model: Any = {"a path": "some/model", "none": None, "a model without a head": whole.model, "its layers": whole.model.layers}
    found = {"a path": "str", "none": "NoneType", "a model without a head": "LlamaModel", "its layers": "ModuleList"}
    with pytest.raises(ValueError, match=f"transformers model with a language-modelling head .* found {found[what]}"):
        call(model[what], IDS, SKIP, max_new_tokens=3)
    with pytest.raises(ValueError, match=f"found {found[what]}"):
        skipstone.enable(model[what], SKIP)


def test_a_default_that_is_no_method_is_refused() -> None:
    model: PreTrainedModel = families.build("llama")
    model.generation_config.skipstone = 3
    with pytest.raises(ValueError, match=r"generation_config\.skipstone must be a Method, a name or a mapping.*found 3"):
        skipstone.generate(model, IDS, max_new_tokens=3)
