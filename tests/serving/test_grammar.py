"""The grammar's processor follows any path, back from drafts that were not kept too."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

import skipstone
from skipstone.serving import grammar as module
from skipstone.serving.grammar import Grammar, Grammars
from tests.helpers.hostile import SCHEMAS
from tests.helpers.pairwise import all_but

SCHEMA = {"type": "object", "properties": {"a": {"enum": ["xy", "xz", 7]}, "b": {"type": "boolean"}}, "required": ["a", "b"]}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    _, tokenizer = skipstone.load(None)
    return Grammars(tokenizer, 512, [0])


def mask(grammar: Grammar, text: list[int]) -> torch.Tensor:
    """Of the tokens that may follow a text, behind a prompt of two tokens."""
    return grammar(torch.tensor([[1, 2, *text]]), torch.zeros(1, 512))[0].isfinite()


def test_what_may_follow_does_not_depend_on_what_was_asked_before(grammars: Grammars) -> None:
    dice, followed, texts = random.Random(3), grammars.of_schema(SCHEMA, 2), [list[int]()]
    for _ in range(200):
        text = dice.choice(texts)
        allowed = mask(followed, text)
        assert torch.equal(allowed, mask(grammars.of_schema(SCHEMA, 2), text))
        choices = [token for token in allowed.nonzero().flatten().tolist() if token != 0]
        if choices:
            texts.append([*text, dice.choice(choices)])
    assert max(map(len, texts)) > 5


def test_a_text_that_only_takes_what_is_allowed_is_of_the_schema(grammars: Grammars) -> None:
    _, tokenizer = skipstone.load(None)
    dice = random.Random(5)
    for _ in range(20):
        grammar, text = grammars.of_schema(SCHEMA, 2), list[int]()
        while not text or text[-1] != 0:
            text.append(dice.choice(mask(grammar, text).nonzero().flatten().tolist()))
        found = json.loads(tokenizer.decode(text[:-1]))
        assert found["a"] in ("xy", "xz", 7)
        assert isinstance(found["b"], bool)


def test_behind_a_draft_that_is_not_allowed_nothing_changes(grammars: Grammars) -> None:
    grammar, scores = grammars.of_schema(SCHEMA, 2), torch.randn(1, 512)
    assert torch.equal(grammar(torch.tensor([[1, 2, 400, 401]]), scores), scores)
    assert mask(grammar, []).sum() < 20, "and it finds back"


def test_copies_follow_texts_of_their_own(grammars: Grammars) -> None:
    one = grammars.of_schema(SCHEMA, 2)
    first = int(mask(one, []).nonzero()[0])
    mask(one, [first])
    other = one.fresh()
    assert torch.equal(mask(other, []), mask(grammars.of_schema(SCHEMA, 2), []))
    assert torch.equal(mask(one, [first]), mask(grammars.of_schema(SCHEMA, 2), [first]))


@pytest.mark.parametrize(
    "name", all_but(["an intersection of patterns"], ["an intersection of patterns", "many patterns of names"])
)
def test_a_schema_that_takes_too_long_is_refused_in_a_sentence(grammars: Grammars, name: str) -> None:
    """They have no end of their own: the first would take days."""
    with pytest.raises(ValueError, match="the schema takes more than 2 s of a processor"):
        grammars.of_schema(SCHEMAS[name]())


def test_a_schema_is_tried_out_once(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {"enum": ["tried", "out", "once"]}
    grammars.of_schema(schema)
    monkeypatch.setattr(module.subprocess, "run", None)  # whoever calls it fails
    assert mask(grammars.of_schema(schema, 2), []).any()


def test_a_trial_that_has_no_time_and_one_that_is_broken_are_not_the_schema_s_fault(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "LONGEST_TRIAL", 1e-3)
    with pytest.raises(TimeoutError, match="ask again later"):
        grammars.of_schema({"enum": ["no", "time"]})
    monkeypatch.undo()
    broken = tmp_path / "broken.py"
    broken.write_text("raise SystemExit('planted')")
    monkeypatch.setattr(module, "TRIAL", broken)
    with pytest.raises(RuntimeError, match="planted"):
        grammars.of_schema({"enum": ["a", "broken", "trial"]})
