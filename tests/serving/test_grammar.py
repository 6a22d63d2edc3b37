"""The grammar's processor follows any path, back from drafts that were not kept too."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import skipstone
from skipstone.serving import grammar as module
from skipstone.serving.grammar import COMPLETE, DEAD_END, Grammar, GrammarCompiler
from tests.helpers.hostile import SCHEMAS
from tests.helpers.pairwise import slow_except

SCHEMA = {"type": "object", "properties": {"a": {"enum": ["xy", "xz", 7]}, "b": {"type": "boolean"}}, "required": ["a", "b"]}


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    _, tokenizer = skipstone.load(None)
    return GrammarCompiler(tokenizer, 512, [0])


def mask(grammar: Grammar, text: list[int]) -> torch.Tensor:
    """Of the tokens that may follow a text, behind a prompt of two tokens."""
    return grammar(torch.tensor([[1, 2, *text]]), torch.zeros(1, 512))[0].isfinite()


def test_what_may_follow_does_not_depend_on_what_was_asked_before(grammars: GrammarCompiler) -> None:
    dice, followed, texts = random.Random(3), grammars.compile_schema(SCHEMA, 2), [list[int]()]
    for _ in range(200):
        text = dice.choice(texts)
        allowed = mask(followed, text)
        assert torch.equal(allowed, mask(grammars.compile_schema(SCHEMA, 2), text))
        choices = [token for token in allowed.nonzero().flatten().tolist() if token != 0]
        if choices:
            texts.append([*text, dice.choice(choices)])
    assert max(map(len, texts)) > 5


def test_a_text_that_only_takes_what_is_allowed_is_of_the_schema(grammars: GrammarCompiler) -> None:
    _, tokenizer = skipstone.load(None)
    dice = random.Random(5)
    for _ in range(20):
        grammar, text = grammars.compile_schema(SCHEMA, 2), list[int]()
        while not text or text[-1] != 0:
            text.append(dice.choice(mask(grammar, text).nonzero().flatten().tolist()))
        found = json.loads(str(tokenizer.decode(text[:-1])))
        assert found["a"] in ("xy", "xz", 7)
        assert isinstance(found["b"], bool)


def test_behind_a_draft_that_is_not_allowed_nothing_changes(grammars: GrammarCompiler) -> None:
    grammar, scores = grammars.compile_schema(SCHEMA, 2), torch.randn(1, 512)
    assert torch.equal(grammar(torch.tensor([[1, 2, 400, 401]]), scores), scores)
    assert mask(grammar, []).sum() < 20, "and it finds back"


def test_copies_follow_texts_of_their_own(grammars: GrammarCompiler) -> None:
    one = grammars.compile_schema(SCHEMA, 2)
    first = int(mask(one, []).nonzero()[0])
    mask(one, [first])
    other = one.for_new_text()
    assert torch.equal(mask(other, []), mask(grammars.compile_schema(SCHEMA, 2), []))
    assert torch.equal(mask(one, [first]), mask(grammars.compile_schema(SCHEMA, 2), [first]))


@pytest.mark.parametrize(
    "name", slow_except(["an intersection of patterns"], ["an intersection of patterns", "many patterns of names"])
)
def test_a_schema_that_takes_too_long_is_refused_in_a_sentence(grammars: GrammarCompiler, name: str) -> None:
    """They have no end of their own: the first would take days."""
    with pytest.raises(ValueError, match="the schema takes more than 2 s of a processor"):
        grammars.compile_schema(SCHEMAS[name]())


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
"""Schemas that no finite value can fulfil."""


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


@pytest.mark.parametrize("pattern", ["(", "[z-a]", "(?=a)b", "(a)\\1", "\\bword", "a{2,1}", "(?<!x)y"])
def test_a_pattern_that_is_not_understood_is_named(grammars: GrammarCompiler, pattern: str) -> None:
    for schema in (
        {"type": "string", "pattern": pattern},
        {"type": "object", "patternProperties": {pattern: {"type": "null"}}},
    ):
        schema = {"type": "object", "properties": {"good": {"type": "string", "pattern": "^error$"}, "bad": schema}}
        for refused in (lambda: grammars.compile_schema(schema), lambda: grammars.compile_calls([("add", schema)])):  # noqa: B023
            with pytest.raises(ValueError, match="pattern") as error:
                refused()
            assert pattern in str(error.value)
            assert "look-around" in str(error.value), "it says what is understood"
            assert "\n" not in str(error.value)


def follow(grammar: Grammar, text: str) -> tuple[int, str | None]:
    """How many of a text's tokens a grammar allows, and why the text ends behind them."""
    _, tokenizer = skipstone.load(None)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    for count, token in enumerate(ids):
        if not mask(grammar, ids[:count])[token]:
            return count, grammar.end_of(ids[:count])
    return len(ids), grammar.end_of(ids)


def test_references_are_resolved_within_the_parameters(grammars: GrammarCompiler) -> None:
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

    def call(arguments: str, name: str = "tree") -> tuple[bool, str | None]:
        grammar = grammars.compile_calls([("other", other), ("tree", tree)]).for_new_text(2)
        text = f'{{"name": "{name}", "arguments": {arguments}}}'
        count, end = follow(grammar, text)
        _, tokenizer = skipstone.load(None)
        return count == len(tokenizer(text, add_special_tokens=False)["input_ids"]), end

    fits = (True, COMPLETE)
    assert call('{"left": {"left": {"kind": "x"}}}') == fits
    assert call('{"kind": {"$ref": "#/$defs/kind"}, "same": "x", "far": {"$ref": "#"}, "id": null}') == fits
    assert call('{"kind": 5}', "other") == fits
    assert call('{"kind": 5}')[0] is call('{"kind": "x"}', "other")[0] is False
    assert call('{"left": {"name": "tree", "arguments": {}}}')[0] is False, "# is not the whole call"


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


def test_a_schema_is_tried_out_once(grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {"enum": ["tried", "out", "once"]}
    grammars.compile_schema(schema)
    monkeypatch.setattr(module.subprocess, "run", None)  # whoever calls it fails
    assert mask(grammars.compile_schema(schema, 2), []).any()


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


def test_errors_quote_no_grammar_and_blame_patterns_only_for_patterns(grammars: GrammarCompiler) -> None:
    impossible = {"type": "object", "properties": {"a": {"minimum": 3, "maximum": 1, "type": "integer"}}, "required": ["a"]}
    with pytest.raises(ValueError, match="'a' is unsatisfiable") as told:
        grammars.compile_calls([("add", impossible)])
    assert "call_0" not in str(told.value)
    with pytest.raises(ValueError, match="integer range") as told:
        grammars.compile_schema({"type": "integer", "minimum": 10**30})
    assert "pattern" not in str(told.value)
    with pytest.raises(ValueError, match="pattern"):
        grammars.compile_schema({"type": "string", "pattern": "(("})


MANY_PROPERTIES = {f"p{n}": {"type": "integer", "minimum": n, "maximum": 7 * n + 3} for n in range(300)}


def test_grammars_of_many_requests_take_no_more_bytes_than_allowed(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Distinct schemas, kept as running requests keep them, until there is no memory; what is freed can be used again."""
    monkeypatch.setattr(module, "GRAMMAR_BYTES", 48 << 20)
    process, kept = psutil.Process(), list[list[Grammar]]()

    def ask(numbers: Sequence[int]) -> None:
        for number in numbers:
            schema = {"type": "object", "properties": {**MANY_PROPERTIES, f"q{number}": {"type": "boolean"}}}
            template = grammars.compile_schema(schema, choices=2)
            kept.append([template.for_new_text(3) for _ in range(2)])

    grammars.compile_schema({"type": "object", "properties": MANY_PROPERTIES})
    before = process.memory_info().rss
    with pytest.raises(module.GrammarMemoryError, match="ask again later"):
        ask(range(30))
    assert kept
    assert process.memory_info().rss - before < 2 * (48 << 20)
    kept.pop()
    ask([100])


def test_a_request_whose_grammars_never_have_memory_is_refused(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GRAMMAR_BYTES", 16 << 20)
    schema = {"type": "object", "properties": MANY_PROPERTIES}
    with pytest.raises(ValueError, match=r"response_format.*bytes.*fewer texts"):
        grammars.compile_schema(schema, choices=16)
    grammars.compile_schema(SCHEMA, choices=2)


def test_a_text_may_add_only_so_many_states_to_its_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LEXER_STATES", 2000)
    _, tokenizer = skipstone.load(None)
    grammar = GrammarCompiler(tokenizer, 512, [0]).compile_schema({"type": "string", "maxLength": 100_000}, 2)
    letters = [token for token in range(512) if str(tokenizer.decode([token])).isalpha()]
    dice, text = random.Random(1), tokenizer('"', add_special_tokens=False)["input_ids"]
    while grammar.end_of(text) is None:
        text = [*text, dice.choice(letters)]
        assert len(text) < 1500
    assert grammar.end_of(text) == DEAD_END
