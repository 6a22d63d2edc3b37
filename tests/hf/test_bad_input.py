"""What a user gets wrong is a ValueError (an OSError for a missing file) that says what was found and what was expected, raised
before any layer of the model runs."""

import functools
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
    "exit layer not set": Wrong(r"exit_layer is not set.*integer from 1 to 3.*skipstone inspect MODEL", method="layerskip"),
    "draft length zero": Wrong("num_speculative_tokens must be at least 1, found 0", method=LayerSkip(2, 0)),
    "draft vocabulary zero": Wrong("draft_vocabulary must be at least 1, found 0", method=LayerSkip(2, draft_vocabulary=0)),
    "threshold not a number": Wrong(r"in \[0, 1\].*found nan", method=LayerSkip(2, confidence_threshold=float("nan"))),
    "unknown method": Wrong(
        r"unknown method 'swiftly' .did you mean 'swift'.*there are auto, autoregressive.*layerskip", method="swiftly"
    ),
    "method without a name": Wrong(r"the key 'method' is missing in method=.*; there are", method={"exit_layer": 2}),
    "method of a strange type": Wrong(r"method must be a Method, a name or a mapping.*found 7", method=7),
    "unknown setting": Wrong(
        r"layerskip has no setting 'exit_layers'; it has exit_layer, num_speculative_tokens",
        method={"method": "layerskip", "exit_layers": 2},
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
    "position ids of another kind": Wrong(
        r"position_ids other than 0, 1, 2", options={"position_ids": torch.tensor([[3, 4, 5, 6]] * 2)}
    ),
    "an empty prompt": Wrong(r"at least one token, found shape \[1, 0\]", torch.empty((1, 0), dtype=torch.long)),
    "an empty batch": Wrong(r"at least one token, found shape \[0, 4\]", torch.empty((0, 4), dtype=torch.long)),
    "three dimensions": Wrong(r"must be \[batch, length\].*found shape \[1, 2, 4\]", IDS[None]),
    "ids that are no integers": Wrong(r"input_ids must be integers, found torch\.float32", IDS.float()),
    "ids that are bools": Wrong(r"input_ids must be integers, found torch\.bool", IDS > 6),
    "an id beyond the vocabulary": Wrong(
        "token id 97 is out of range: the model's vocabulary has 97 entries, 0 to 96", torch.tensor([[5, 97]])
    ),
    "ids that are no tensor": Wrong(r'inputs\["input_ids"\] must be a tensor.*found list', {"input_ids": [[1, 2]]}),
    "no ids at all": Wrong(r'inputs\["input_ids"\] must be a tensor.*found NoneType', {"attention_mask": MASK}),
    "a list of ids": Wrong("text needs a tokenizer.*a tensor of token ids", [1, 2, 3]),
    "neither ids nor text": Wrong("inputs must be token ids .* a text, a chat.*found 3", 3),
    "text without a tokenizer": Wrong("text needs a tokenizer: pass tokenizer=", "hello"),
    "an empty text among others": Wrong("prompt 1 is empty", ["abc", ""], options={"tokenizer": tokenizer()}),
    "numbers for texts": Wrong(r"a prompt is a text or a chat.*found int", [1, 2], options={"tokenizer": tokenizer()}),
    "a mask of another width": Wrong(
        r"attention_mask must have the shape of input_ids, \[2, 4\], found \[2, 3\]", IDS, options=masked([1] * 3, [1] * 3)
    ),
    "a row of padding only": Wrong("row 1 of the batch is all padding", IDS, options=masked([1] * 4, [0] * 4)),
    "more tokens than positions": Wrong(
        r"prompt of 4 tokens \+ max_new_tokens=2045 is more than the model's 2048 positions", options={"max_new_tokens": 2045}
    ),
    "no new tokens": Wrong("max_new_tokens.*greater than 0, but is 0", options={"max_new_tokens": 0}),
    "max_length within the prompt": Wrong(
        r"Input length of input_ids is 4, but `max_length` is set to 3", options={"max_new_tokens": None, "max_length": 3}
    ),
    "temperature zero": Wrong(r"temperature.*=0\.0.*strictly positive", options={**SAMPLE, "temperature": 0.0}),
    "top_p above one": Wrong(r"top_p.*has to be a float > 0 and < 1, but is -0\.5", options={**SAMPLE, "top_p": -0.5}),
    "too few seeds": Wrong(r"a list of 2 integers, one per row, found \[1\]", options={**SAMPLE, "seed": [1]}),
    "a float for a seed": Wrong(r"seed must be an integer.*found 1\.5", options={**SAMPLE, "seed": 1.5}),
    "several greedy rows of one prompt": Wrong(
        r"num_return_sequences.*got 3", options={"num_return_sequences": 3, "do_sample": False}
    ),
}


def refused(model: PreTrainedModel, wrong: Wrong, call: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    inputs = IDS if wrong.inputs is None else wrong.inputs
    with forwards(model) as count, pytest.raises(ValueError, match=rf"(?s){wrong.expected}"):
        call(inputs, *arguments, **{"max_new_tokens": 5, **wrong.options, **options})
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
    "an empty prompt",
    "an empty batch",
    "three dimensions",
    "ids that are no integers",
    "ids that are bools",
    "a mask of another width",
}


@pytest.fixture(scope="module", autouse=True)
def _recognised() -> None:
    """What is found out once in a process, by forwards, is known: a refusal needs none."""
    ModelRunner(families.build("llama"))


@pytest.mark.parametrize("name", TABLE)
def test_a_mistake_is_a_value_error_before_any_work(name: str) -> None:
    """By every way to decode that takes such arguments."""
    wrong, model = TABLE[name], families.cached("llama")
    for call in (skipstone.generate, skipstone.stream):
        refused(model, wrong, functools.partial(call, model), wrong.method)
    if name not in THROUGH_GENERATE:
        return
    if name not in TRANSFORMERS_FIRST:
        refused(model, wrong, model.generate, custom_generate=skipstone.custom_generate(wrong.method))
    try:
        refused(model, wrong, lambda *given, **more: skipstone.enable(model, wrong.method).generate(*given, **more))
    finally:
        skipstone.disable(model)


def test_what_skipstone_would_not_hand_to_the_model_is_refused_behind_custom_generate() -> None:
    model, ours = families.cached("gpt2"), skipstone.custom_generate(SKIP)
    ModelRunner(model)  # its family is derived from a forward
    types = Wrong(r"token_type_ids is not supported.*nothing but token ids")
    refused(model, types, model.generate, custom_generate=ours, token_type_ids=torch.zeros_like(IDS))
    model = families.build("llama")
    cache = model(IDS, use_cache=True).past_key_values
    filled = Wrong("past_key_values of 4 tokens are not supported", torch.cat([IDS, IDS], 1))
    refused(model, filled, model.generate, custom_generate=ours, past_key_values=cache)


def test_a_model_in_training_mode_and_an_encoder_decoder_are_refused() -> None:
    training = Wrong(r"training mode.*call model\.eval\(\)")
    for model in (families.build("llama").train(), skipstone.enable(families.build("llama"), SKIP).train()):
        refused(model, training, functools.partial(skipstone.generate, model), SKIP)
    refused(model, training, model.generate)  # which was enabled before
    config = T5Config(vocab_size=97, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config).eval()
    refused(
        model, Wrong(r"t5 is an encoder-decoder.*decoder-only"), functools.partial(skipstone.generate, model), Autoregressive()
    )


@pytest.mark.parametrize(
    ("what", "found"),
    [(lambda _: "some/model", "str"), (lambda _: None, "NoneType"), (lambda whole: whole.model, "LlamaModel")],
    ids=["a path", "none", "a model without a head"],
)
def test_what_is_no_language_model_is_refused(what: Callable[[Any], Any], found: str) -> None:
    model: Any = what(families.cached("llama"))
    for call in (skipstone.generate, skipstone.stream):
        with pytest.raises(ValueError, match=f"transformers model with a language-modelling head .* found {found}"):
            call(model, IDS, SKIP, max_new_tokens=3)
    with pytest.raises(ValueError, match=f"found {found}"):
        skipstone.enable(model, SKIP)


def test_a_default_that_is_no_method_is_refused() -> None:
    model: PreTrainedModel = families.build("llama")
    model.generation_config.skipstone = 3
    with pytest.raises(ValueError, match=r"generation_config\.skipstone must be a Method, a name or a mapping.*found 3"):
        skipstone.generate(model, IDS, max_new_tokens=3)
