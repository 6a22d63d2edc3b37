"""A grammar follows any path, back from drafts too, and under it every method writes the text of plain decoding."""

import gc
import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skipstone.assets import NANO
from skipstone.engines.model_runner import ModelRunner
from skipstone.hf.generate_call import resolve_for
from skipstone.models.gguf.sentence_piece import SentencePieceBackend, TokenType
from skipstone.models.tokenizer import CheckpointTokenizer, read_tokenizer
from skipstone.serving import grammar as module
from skipstone.serving.api_schemas import CompletionBody
from skipstone.serving.batch_group import BatchGroup
from skipstone.serving.grammar import COMPLETE, DEAD_END, Grammar, GrammarCompiler
from skipstone.serving.pending_request import LENGTH, STOP, PendingRequest, RequestEnd, RequestEvent, StepOutput
from skipstone.serving.request_parser import RequestParser
from tests.helpers import text_tokenizers
from tests.helpers.hostile import SCHEMAS
from tests.helpers.pairwise import round_robin, slow_except

SCHEMA = {"type": "object", "properties": {"a": {"enum": ["xy", "xz", 7]}, "b": {"type": "boolean"}}, "required": ["a", "b"]}


@pytest.fixture(scope="module")
def tokenizer(loaded: Any) -> Any:
    return loaded[1]


@pytest.fixture(scope="module")
def grammars(tokenizer: Any) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, 512, [0])


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a process that compiles every schema first: the schemas of these tests are harmless."""
    monkeypatch.setattr(module, "measure_grammar", lambda _: 0)


def mask(grammar: Grammar, text: list[int]) -> torch.Tensor:
    return grammar(torch.tensor([[1, 2, *text]]), torch.zeros(1, 512))[0].isfinite()


def test_what_may_follow_does_not_depend_on_what_was_asked_before(grammars: GrammarCompiler) -> None:
    dice, followed, texts = random.Random(3), grammars.compile_schema(SCHEMA, 2), [list[int]()]
    for _ in range(100):
        text = dice.choice(texts)
        allowed = mask(followed, text)
        assert torch.equal(allowed, mask(grammars.compile_schema(SCHEMA, 2), text))
        choices = [token for token in allowed.nonzero().flatten().tolist() if token != 0]
        if choices:
            texts.append([*text, dice.choice(choices)])
    assert max(map(len, texts)) > 5


def test_a_tokenizer_without_transformers_gives_the_same_grammar(grammars: GrammarCompiler) -> None:
    others = GrammarCompiler(read_tokenizer(Path(NANO)), 512, [0])
    for text in ([], [400], [401, 5]):
        assert torch.equal(*(mask(one.compile_schema(SCHEMA, 2), text) for one in (grammars, others)))
    with pytest.raises(ValueError, match="in Python"):
        GrammarCompiler(object(), 512, [0])


def test_a_sentencepiece_vocabulary_gives_the_grammar_of_its_tokenizer_json() -> None:
    theirs = text_tokenizers.gemma()
    core, size = theirs.backend_tokenizer, len(theirs)
    tokens = [core.id_to_token(number) for number in range(size)]
    special = [bool(token.special) for token in core.get_added_tokens_decoder().values()]
    types = np.full(size, TokenType.NORMAL, np.int32)
    types[[core.token_to_id(token) for token in text_tokenizers.BYTES]] = TokenType.BYTE
    types[[*core.get_added_tokens_decoder()]] = np.where(special, TokenType.CONTROL, TokenType.USER_DEFINED)
    ours = SentencePieceBackend(tokens, np.arange(size, dtype=np.float32), types, 0, "never")
    both = GrammarCompiler(theirs, size + 3, [2]), GrammarCompiler(CheckpointTokenizer(ours, {}), size + 3, [2])
    ids = ours.encode('{"a": "xy", "b": true}', add_special_tokens=False).ids
    for place in range(len(ids) + 1):
        text = torch.tensor([ids[:place]], dtype=torch.long)
        allowed = [one.compile_schema(SCHEMA)(text, torch.zeros(1, size + 3)).isfinite() for one in both]
        assert torch.equal(*allowed)
        assert allowed[0][0, [*ids, 2][place]]


def test_behind_a_draft_that_is_not_allowed_nothing_changes_and_copies_follow_texts_of_their_own(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar, scores = grammars.compile_schema(SCHEMA, 2), torch.randn(1, 512)
    monkeypatch.setattr(module.subprocess, "run", None)  # a schema is tried out once: whoever calls it fails
    fresh = grammars.compile_schema(SCHEMA, 2)
    assert torch.equal(grammar(torch.tensor([[1, 2, 400, 401]]), scores), scores)
    assert mask(grammar, []).sum() < 20, "and it finds back"
    first = int(mask(grammar, []).nonzero()[0])
    allowed = mask(grammar, [first])
    assert torch.equal(mask(grammar.for_new_text(), []), mask(fresh, []))
    assert torch.equal(mask(grammar, [first]), allowed)


NEXT = {"$ref": "#"}
ENDLESS = [
    NEXT,
    {"anyOf": [NEXT]},
    {"type": "object", "properties": {"next": NEXT}, "required": ["next"]},
    {"type": "object", "required": ["any"], "additionalProperties": NEXT},
    {"type": "object", "minProperties": 1, "additionalProperties": NEXT},
    {"type": "array", "items": NEXT, "minItems": 1},
    {"type": "array", "prefixItems": [NEXT], "minItems": 1},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    {"$ref": "#/$defs/a~1b%20", "$defs": {"a/b ": {"type": "array", "items": {"$ref": "#/$defs/a~1b%20"}, "minItems": 2}}},
    {"$ref": "#n", "$defs": {"n": {"$anchor": "n", "type": "object", "properties": {"a": {"$ref": "#n"}}, "required": ["a"]}}},
    {"allOf": [{"type": "object"}, {"properties": {"a": NEXT}, "required": ["a"]}]},
    {
        "type": "object",
        "properties": {"tree": {"$id": "urn:tree", "type": "object", "properties": {"left": NEXT}, "required": ["left"]}},
        "required": ["tree"],
    },
]


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("schema", ENDLESS, ids=range(len(ENDLESS)))
def test_a_schema_without_a_finite_value_is_refused(grammars: GrammarCompiler, schema: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"response_format.*without end.*optional"):
        grammars.compile_schema(schema)
    inner = {"type": "object", "properties": {"it": {"$id": "urn:it", **schema}}}
    grammars.compile_schema(inner)  # as a part that may be left out it does no harm
    tool = {"type": "object", **schema}
    if "anyOf" not in schema:
        with pytest.raises(ValueError, match=r"tools.*without end"):
            grammars.compile_calls([("add", {"type": "object"}), ("endless", tool)])


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"next": NEXT}},
        {"type": "object", "properties": {"next": {"anyOf": [NEXT, {"type": "null"}]}}, "required": ["next"]},
        {"type": ["object", "null"], "properties": {"next": NEXT}, "required": ["next"]},
        {"type": "object", "properties": {"children": {"type": "array", "items": NEXT}}, "required": ["children"]},
        {"properties": {"next": NEXT}, "required": ["next"]},
    ],
)
def test_a_recursive_schema_with_an_end_is_taken(grammars: GrammarCompiler, schema: dict[str, Any]) -> None:
    assert grammars.compile_schema(schema).end_of([]) is None


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": 5, "maximum": 3},
        {"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"type": "string", "pattern": "^ab$", "minLength": 3},
    ],
)
def test_a_schema_that_cannot_be_fulfilled_is_refused(grammars: GrammarCompiler, schema: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="response_format"):
        grammars.compile_schema(schema)
    with pytest.raises(ValueError, match="tools"):
        grammars.compile_calls([("add", schema)])


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("pattern", ["(", "[z-a]", "(?=a)b", "(a)\\1", "\\bword", "a{2,1}"])
def test_a_pattern_that_is_not_understood_is_named(grammars: GrammarCompiler, pattern: str) -> None:
    as_name = {"type": "object", "patternProperties": {pattern: {"type": "null"}}}
    bad = as_name if pattern == "(" else {"type": "string", "pattern": pattern}
    schema = {"type": "object", "properties": {"good": {"type": "string", "pattern": "^error$"}, "bad": bad}}
    as_call = pattern == "[z-a]"
    with pytest.raises(ValueError, match="pattern") as error:
        _ = grammars.compile_calls([("add", schema)]) if as_call else grammars.compile_schema(schema)
    assert pattern in str(error.value)
    assert "look-around" in str(error.value), "it says what is understood"
    assert "\n" not in str(error.value)


def test_references_are_resolved_within_the_parameters(grammars: GrammarCompiler, tokenizer: Any) -> None:
    tree = {
        "type": "object",
        "properties": {
            "left": {"$ref": "#"},
            "kind": {"$ref": "#/$defs/kind"},
            "same": {"$ref": "#/properties/kind"},
            "far": {"$ref": "#far"},
            "id": {"$ref": "urn:id"},
        },
        "additionalProperties": False,
        "$defs": {
            "kind": {"enum": ["x", {"$ref": "#/$defs/kind"}]},
            "any": {"$anchor": "far", "const": {"$ref": "#"}},
            "id": {"$id": "urn:id", "type": "null"},
        },
    }
    other = {"type": "object", "properties": {"kind": {"$ref": "#/$defs/kind"}}, "$defs": {"kind": {"type": "integer"}}}

    template = grammars.compile_calls([("other", other), ("tree", tree)])

    def call(arguments: str, name: str = "tree") -> str | bool:
        """Why a text ends, or that it is not allowed."""
        text = f'{{"name": "{name}", "arguments": {arguments}}}'
        grammar, ids = template.for_new_text(2), tokenizer(text, add_special_tokens=False)["input_ids"]
        allowed = all(mask(grammar, ids[:count])[token] for count, token in enumerate(ids))
        return allowed and str(grammar.end_of(ids))

    assert call('{"left": {"left": {"kind": "x"}}}') == COMPLETE
    assert call('{"kind": {"$ref": "#/$defs/kind"}, "same": "x", "far": {"$ref": "#"}, "id": null}') == COMPLETE
    assert call('{"kind": 5}', "other") == COMPLETE
    assert call('{"kind": 5}') is call('{"kind": "x"}', "other") is False
    assert call('{"left": {"name": "tree", "arguments": {}}}') is False, "# is not the whole call"


@pytest.mark.slow
def test_drafts_that_use_up_a_limit_change_nothing(grammars: GrammarCompiler) -> None:
    """llguidance counts the states of all texts that a matcher has looked at. A long draft needs more than there are."""
    dice, schema = random.Random(0), SCHEMAS["counted twice"]()
    alone, drafted = grammars.compile_schema(schema).for_new_text(2), grammars.compile_schema(schema).for_new_text(2)
    draft = list[int]()
    while not (allowed := mask(drafted, draft))[0]:
        draft.append(dice.choice(allowed.nonzero().flatten().tolist()))
    assert len(draft) > 100
    text = list[int]()
    for _ in range(30):
        assert torch.equal(mask(drafted, text), mask(alone, text))
        text.append(dice.choice(mask(alone, text).nonzero().flatten().tolist()))
        assert torch.equal(mask(drafted, [*text, 33]), mask(alone, [*text, 33]))
        assert drafted.end_of(text) == alone.end_of(text) is None
    assert {drafted.end_of(draft[:length]) for length in range(len(draft))} == {None}
    assert drafted.end_of(draft) == DEAD_END, "where it ends is decided by the text alone"


def test_a_trial_that_has_no_time_and_one_that_is_broken_are_not_the_schema_s_fault(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "COMPILE_TIMEOUT_SECONDS", 1e-3)
    with pytest.raises(TimeoutError, match="ask again later"):
        grammars.compile_schema({"enum": ["no", "time"]})
    monkeypatch.undo()
    broken = tmp_path / "broken.py"
    broken.write_text("raise SystemExit('planted')")
    monkeypatch.setattr(module, "MEASURE_SCRIPT", broken)
    with pytest.raises(RuntimeError, match="planted"):
        grammars.compile_schema({"enum": ["a", "broken", "trial"]})


MANY_PROPERTIES = {f"p{n}": {"type": "integer", "minimum": n, "maximum": 7 * n + 3} for n in range(300)}


def test_grammars_of_many_requests_take_no_more_bytes_than_allowed(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Distinct schemas, kept as running requests keep them, until there is no memory; what is freed can be used again."""
    limit, process, kept = 48 << 20, psutil.Process(), list[list[Grammar]]()
    gc.collect()  # errors of earlier tests may still hold grammars
    monkeypatch.setattr(module, "GRAMMAR_BYTES", limit // 3)

    def ask(*numbers: int) -> None:
        for number in numbers:
            schema = {"type": "object", "properties": {**MANY_PROPERTIES, f"q{number}": {"type": "boolean"}}}
            template = grammars.compile_schema(schema, choices=2)
            kept.append([template.for_new_text(3) for _ in range(2)])

    with pytest.raises(ValueError, match=r"response_format.*bytes.*fewer texts"):  # there is never so much
        grammars.compile_schema({"type": "object", "properties": MANY_PROPERTIES}, choices=16)
    monkeypatch.setattr(module, "GRAMMAR_BYTES", limit)
    before = process.memory_info().rss
    with pytest.raises(module.GrammarMemoryError, match="ask again later"):
        ask(*range(30))
    assert kept
    assert process.memory_info().rss - before < 2 * limit
    kept.pop()
    ask(100)


def test_a_text_may_add_only_so_many_states_to_its_grammar(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LEXER_STATES", 2000)
    grammar = GrammarCompiler(tokenizer, 512, [0]).compile_schema({"type": "string", "maxLength": 100_000}, 2)
    letters = [token for token in range(512) if str(tokenizer.decode([token])).isalpha()]
    dice, text = random.Random(1), tokenizer('"', add_special_tokens=False)["input_ids"]
    while grammar.end_of(text) is None:
        text = [*text, dice.choice(letters)]
        assert len(text) < 1500
    assert grammar.end_of(text) == DEAD_END


METHODS = ["prompt_lookup", "recycle", "layerskip exit_layer=6", "self_speculative skip_attention=4,5 skip_mlp=5"]
METHODS += ["swift", "auto"]
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
    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = ModelRunner(model), tokenizer
        self.parser = RequestParser(self.model, tokenizer, resolve_for(model, "autoregressive"), 512)
        self.groups: dict[str, BatchGroup] = {}
        self.events: list[RequestEvent] = []

    def __call__(self, schema: dict[str, Any], method: str = "off", **given: Any) -> tuple[str, str]:
        format_ = {"type": "json_schema", "json_schema": {"schema": schema}}
        request = {"prompt": "x = ", "max_tokens": 60, "response_format": format_, "speculative": method, **given}
        body = CompletionBody.model_validate(request)
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


@pytest.mark.parametrize("method", slow_except(["prompt_lookup"], METHODS))
def test_a_draft_into_a_dead_end_changes_no_text(write: OutputText, method: str) -> None:
    (comma,) = write.tokenizer(",", add_special_tokens=False)["input_ids"]
    ask = partial(write, ISSUE, logit_bias={str(comma): 100})
    text, reason = ask(temperature=0)
    assert text.endswith("], ")
    assert reason == LENGTH, "it is no document"
    assert ask(method, temperature=0) == (text, reason)
    if method in COUPLED:
        assert ask(method, seed=3, temperature=1.0) == ask(seed=3, temperature=1.0)


@round_robin(
    name=slow_except(["counted twice", "a long text"], ["counted twice", "many states", "a large alternation", "a long text"]),
    method=["prompt_lookup", "layerskip exit_layer=6"],
)
def test_limits_of_llguidance_end_a_text_at_the_same_place_whatever_drafts(write: OutputText, name: str, method: str) -> None:
    schema = SCHEMAS[name]()
    assert write(schema, method, temperature=0) == write(schema, temperature=0)


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


RANDOM_SCHEMAS = st.recursive(LEAVES, grown, max_leaves=6)


def check_all(write: Write, schema: dict[str, Any], seed: int, methods: list[str], coupled: list[str]) -> None:
    for chosen, request in ((methods, {"temperature": 0}), (coupled, {"temperature": 1.0, "seed": seed})):
        ask = partial(write, schema, prompt=PROMPT, max_tokens=40, **request)
        try:
            text, reason = ask("off")
        except ValueError:  # it cannot be fulfilled
            return
        if reason == STOP:
            jsonschema_rs.validate(schema, json.loads(text), validate_formats=True)
        for method in chosen:
            assert ask(method) == (text, reason), method


def check_random(write: OutputText, count: int, methods: list[str], coupled: list[str]) -> None:
    @settings(max_examples=count, deadline=None, derandomize=True, database=None)
    @given(RANDOM_SCHEMAS, st.integers(0, 99))
    def check(schema: dict[str, Any], seed: int) -> None:
        check_all(write, schema, seed, methods, coupled)

    check()


@pytest.mark.usefixtures("untried")
@pytest.mark.slow
def test_random_schemas_give_one_text_whatever_drafts(write: OutputText) -> None:
    check_random(write, 5, ["recycle", "layerskip exit_layer=6"], COUPLED[:1])


@pytest.mark.product
@pytest.mark.usefixtures("untried")
def test_many_random_schemas_give_one_text_whatever_drafts(write: OutputText) -> None:
    check_random(write, 50, METHODS, COUPLED)


def test_a_model_without_an_end_in_its_configs_ends_with_its_document(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = loaded
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    monkeypatch.setattr(model.config, "eos_token_id", None)
    write = OutputText(model, tokenizer)
    number = {"type": "integer", "minimum": 100, "maximum": 999}
    for schema, method in (({"enum": ["ab", "cd"]}, "off"), (number, "prompt_lookup")):
        text, reason = write(schema, method, prompt=PROMPT, temperature=0)
        assert jsonschema_rs.is_valid(schema, json.loads(text))
        assert reason == STOP


def test_a_document_that_takes_all_tokens_is_whole(write: OutputText) -> None:
    count = len(write.tokenizer('"ab"', add_special_tokens=False)["input_ids"])
    assert write({"const": "ab"}, temperature=0, max_tokens=count) == ('"ab"', STOP)
    assert write({"const": "ab"}, temperature=0, max_tokens=count - 1)[1] == LENGTH
