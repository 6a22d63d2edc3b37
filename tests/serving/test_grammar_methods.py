"""Under a grammar every method writes the text of plain decoding, and what ends with "stop" fulfils the schema."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skipstone.engines.model_runner import ModelRunner
from skipstone.hf.generate_call import resolve_for
from skipstone.serving import grammar as grammar_module
from skipstone.serving.batch_group import BatchGroup
from skipstone.serving.pending_request import LENGTH, STOP, PendingRequest, RequestEnd, RequestEvent, StepOutput
from skipstone.serving.request_parser import RequestParser
from skipstone.serving.schemas import CompletionBody
from tests.helpers.hostile import SCHEMAS

METHODS = [
    "prompt_lookup",
    "recycle",
    "layerskip exit_layer=6",
    "self_speculative skip_attention=4,5 skip_mlp=5",
    "swift",
    "auto",
]
COUPLED = ["prompt_lookup", "recycle", "auto", "layerskip exit_layer=6 rejection_sample_method=coupled"]
PROMPT = 'thing = {"a": 1, "tags": ["ab"]}\nthing = '
Write = Callable[..., tuple[str, str]]

ISSUE = {
    "type": "object",
    "properties": {
        "score": {"type": "integer", "multipleOf": 5},
        "tags": {"type": "array", "items": {"type": "string", "minLength": 2, "maxLength": 4}, "maxItems": 2},
    },
    "required": ["score", "tags"],
    "additionalProperties": False,
    "patternProperties": {"^score$": {"type": "integer"}},
}
"""llguidance allows a comma after its last property, and nothing after that."""


class OutputText:
    """Writes texts as the server does, one at a time. Every method keeps one batch group."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = ModelRunner(model), tokenizer
        self.parser = RequestParser(self.model, tokenizer, resolve_for(model, "autoregressive"), 512)
        self.groups: dict[str, BatchGroup] = {}
        self.events: list[RequestEvent] = []

    def __call__(self, schema: dict[str, Any], method: str = "off", **given: Any) -> tuple[str, str]:
        """Text and finish_reason."""
        format_ = {"type": "json_schema", "json_schema": {"schema": schema}}
        asked = {"prompt": "x = ", "max_tokens": 60, "response_format": format_, "speculative": method, **given}
        body = CompletionBody.model_validate(asked)
        (pending,) = self.parser.parse(body, self.parser.compile_grammar(body))
        return self.written(pending)

    def written(self, pending: PendingRequest) -> tuple[str, str]:
        name = pending.method.spelled
        if name not in self.groups:
            self.groups[name] = BatchGroup(self.model, pending.method, 1, 512, 256, lambda _, event: self.events.append(event))
        self.events.clear()
        self.groups[name].admit(pending)
        while self.groups[name].busy:
            self.groups[name].step()
        tokens = [token for event in self.events if isinstance(event, StepOutput) for token in event.tokens]
        (ended,) = [event for event in self.events if isinstance(event, RequestEnd)]
        return self.tokenizer.decode([token for token in tokens if token not in pending.request.eos]), ended.reason


@pytest.fixture(scope="module")
def write(loaded: Any) -> OutputText:
    return OutputText(*loaded)


@pytest.mark.parametrize("method", METHODS)
def test_a_draft_into_a_dead_end_changes_no_text(write: OutputText, method: str) -> None:
    (comma,) = write.tokenizer(",", add_special_tokens=False)["input_ids"]
    ask = partial(write, ISSUE, logit_bias={str(comma): 100})
    text, reason = ask(temperature=0)
    assert text.endswith("], ")
    assert reason == LENGTH, "it is no document"
    assert ask(method, temperature=0) == (text, reason)
    if method in COUPLED:
        assert ask(method, seed=3, temperature=1.0) == ask(seed=3, temperature=1.0)


@pytest.mark.parametrize("name", ["counted twice", "many states", "nested quantifiers", "a large alternation", "a long text"])
@pytest.mark.parametrize("method", ["prompt_lookup", "layerskip exit_layer=6"])
def test_limits_of_llguidance_end_a_text_at_the_same_place_whatever_drafts(write: OutputText, name: str, method: str) -> None:
    schema = SCHEMAS[name]()
    assert write(schema, method, temperature=0) == write(schema, temperature=0)


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a process that compiles every schema first: the schemas of these tests are harmless."""
    monkeypatch.setattr(grammar_module, "measure_grammar", lambda _: 0)


STRINGS = st.fixed_dictionaries(
    {"type": st.just("string")}, optional={"minLength": st.integers(0, 3), "maxLength": st.integers(2, 6)}
) | st.sampled_from(
    [
        {"type": "string", "pattern": "^(a|bc)*d?$"},
        {"type": "string", "pattern": "[0-9]{2}"},
        {"type": "string", "pattern": "^x", "maxLength": 4},
        {"type": "string", "format": "date"},
        {"type": "string", "format": "uuid"},
    ]
)
NUMBERS = st.fixed_dictionaries(
    {"type": st.sampled_from(["integer", "number"])}, optional={"minimum": st.integers(-5, 5), "maximum": st.integers(3, 120)}
) | st.fixed_dictionaries(
    {"type": st.just("integer"), "multipleOf": st.integers(2, 7)}, optional={"exclusiveMinimum": st.integers(-9, 9)}
)
VALUES = st.sampled_from([1, "a", "tags", None, True, -2.5, [], {"a": 1}])
LEAVES = (
    STRINGS
    | NUMBERS
    | st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["integer", "null"]}, {"type": ["string", "boolean"]}])
    | st.lists(VALUES, min_size=1, max_size=3).map(lambda values: {"enum": values})
    | VALUES.map(lambda value: {"const": value})
)
NAMES = st.sampled_from(["a", "b", "tags", "score"])


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    properties = draw(st.dictionaries(NAMES, inner, max_size=3))
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    schema["required"] = draw(st.lists(NAMES, unique=True, max_size=3))
    if draw(st.booleans()):
        schema["additionalProperties"] = draw(st.booleans() | inner)
    if draw(st.integers(0, 3)) == 0:
        schema["patternProperties"] = {draw(st.sampled_from(["^score$", "^[st]", "a$"])): draw(inner)}
    return schema


def grown(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    arrays = st.fixed_dictionaries(
        {"type": st.just("array"), "items": inner, "maxItems": st.integers(1, 3)}, optional={"minItems": st.integers(0, 2)}
    )
    return objects(inner) | arrays | st.lists(inner, min_size=1, max_size=3).map(lambda several: {"anyOf": several})


SCHEMA = st.recursive(LEAVES, grown, max_leaves=6)


def check_all(write: Write, schema: dict[str, Any], seed: int, methods: list[str], coupled: list[str]) -> None:
    """All methods write one text, and one that is whole is valid."""
    for chosen, asked in ((methods, {"temperature": 0}), (coupled, {"temperature": 1.0, "seed": seed})):
        ask = partial(write, schema, prompt=PROMPT, max_tokens=40, **asked)
        try:
            text, reason = ask("off")
        except ValueError:  # it cannot be fulfilled
            return
        if reason == STOP:
            jsonschema_rs.validate(schema, json.loads(text), validate_formats=True)
        for method in chosen:
            assert ask(method) == (text, reason), method


@pytest.mark.usefixtures("untried")
def test_random_schemas_give_one_text_whatever_drafts(write: OutputText) -> None:
    @settings(max_examples=6, deadline=None, derandomize=True, database=None)
    @given(SCHEMA, st.integers(0, 99))
    def check(schema: dict[str, Any], seed: int) -> None:
        check_all(write, schema, seed, METHODS[:3], COUPLED[:1])

    check()


@pytest.mark.product
@pytest.mark.usefixtures("untried")
def test_many_random_schemas_give_one_text_whatever_drafts(write: OutputText) -> None:
    @settings(max_examples=50, deadline=None, derandomize=True, database=None)
    @given(SCHEMA, st.integers(0, 99))
    def check(schema: dict[str, Any], seed: int) -> None:
        check_all(write, schema, seed, METHODS, COUPLED)

    check()


def test_a_model_without_an_end_in_its_configs_ends_with_its_document(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = loaded
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    monkeypatch.setattr(model.config, "eos_token_id", None)
    write = OutputText(model, tokenizer)
    for schema in ({"enum": ["ab", "cd"]}, {"type": "integer", "minimum": 100, "maximum": 999}, {"type": "integer"}):
        for method in ("off", "prompt_lookup"):
            text, reason = write(schema, method, prompt=PROMPT, temperature=0)
            assert jsonschema_rs.is_valid(schema, json.loads(text))
            assert reason == STOP or schema == {"type": "integer"}, "a number may go on"


def test_a_document_that_takes_all_tokens_is_whole(write: OutputText) -> None:
    count = len(write.tokenizer('"ab"', add_special_tokens=False)["input_ids"])
    assert write({"const": "ab"}, temperature=0, max_tokens=count) == ('"ab"', STOP)
    assert write({"const": "ab"}, temperature=0, max_tokens=count - 1)[1] == LENGTH
