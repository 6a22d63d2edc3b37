"""The engine of the commands grammar by hand: notation, exact match, scores, bad input."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from recipes.data import commands
from recipes.data.commands import Speaker, exact_match, examples, grammar, score, variants

# The engine


@pytest.mark.parametrize(
    ("pattern", "spelled"),
    [
        ("plain words", ("plain words",)),
        ("wake me [up] at {time}", ("wake me at {time}", "wake me up at {time}")),
        ("(a|b) c", ("a c", "b c")),
        ("x [y|z]", ("x", "x y", "x z")),
        ("x [y (a|b)]", ("x", "x y a", "x y b")),
    ],
)
def test_variants_by_hand(pattern: str, spelled: tuple[str, ...]) -> None:
    assert sorted(variants(pattern)) == sorted(spelled)


@pytest.mark.parametrize(
    ("pattern", "said", "meant"),
    [
        ("tomorrow", "tomorrow", ("tomorrow",)),
        ("on <friday>", "on friday", ("friday",)),
        ("noon => 12:00", "noon", ("12:00",)),
        ("=> :00", "", (":00",)),
        ("half past <12{half}>", "half past 12", ("12:30",)),
        ("<milk> and <rye bread>", "milk and rye bread", ("milk", "rye bread")),
    ],
)
def test_expand_by_hand(pattern: str, said: str, meant: tuple[str, ...]) -> None:
    phrase = Speaker("train", 0).expand(pattern)
    assert (phrase.said, phrase.values) == (said, meant)


# Scores

ANSWER = '{"intent": "set_temperature", "degrees": 1, "room": "attic"}\n'


@pytest.mark.parametrize(
    "output",
    [
        ANSWER,
        ANSWER.strip(),
        '{"room":"attic","intent":"set_temperature","degrees":1}',
        ANSWER + "> and what the model said after it",
        "  " + ANSWER,
    ],
)
def test_exact_match_accepts_the_same_object(output: str) -> None:
    assert exact_match(ANSWER, output)


@pytest.mark.parametrize(
    "output",
    [
        *(
            ANSWER.replace('"attic"', '["attic"]'),
            "",
            "\n",
            "\n" + ANSWER,
            "attic",
            "null",
            "[]",
            "[" * 100_000,
            '["intent", "set_temperature"]',
            ANSWER[:-3],
        ),
        ANSWER.replace("attic", "kitchen"),
        ANSWER.replace("1", '"1"'),
        ANSWER.replace("1", "true"),
        ANSWER.replace(', "room": "attic"', ""),
        ANSWER.replace("}", ', "time": "7:00"}'),
        ANSWER.replace("}", ', "room": "attic"}'),
        ANSWER.strip() + " }",
        "x" + ANSWER,
    ],
)
def test_exact_match_refuses_everything_else(output: str) -> None:
    assert not exact_match(ANSWER, output)


def test_every_answer_matches_itself_and_no_other() -> None:
    test = list(examples("test", 100, seed=0))
    for one, other in pairwise(test):
        assert exact_match(one.answer, one.answer)
        assert exact_match(one.answer, other.answer) == (one.answer == other.answer)
    assert not exact_match('{"items": ["milk", "eggs"]}', '{"items": ["eggs", "milk"]}')


def test_score_counts_by_intent() -> None:
    call, timer = '{"intent": "start_call", "to": "ada"}', '{"intent": "start_timer", "duration": "5 minutes"}'
    assert score([(call, call), (call, timer), (call, "?"), (call, call), (timer, timer)]) == {
        "count": 5,
        "exact_match": 0.6,
        "intents": {"start_call": 0.5, "start_timer": 1.0},
    }


# Bad input


def test_a_rule_that_leaves_the_test_split_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = grammar().rules | {"song": (("the one and only",),)}
    speaker = Speaker("test", 0)
    monkeypatch.setattr(speaker, "grammar", dataclasses.replace(grammar(), rules=rules))
    with pytest.raises(ValueError, match=r"rule 'song' .* give it more phrases"):
        speaker.phrase("song")


def test_the_script_says_what_is_wrong_without_a_traceback(tmp_path: Path) -> None:
    for arguments, message in ((["--count", "-1"], "give 0 or more"), (["--count", "1"], "No such file")):
        out = ["--split", "train", "--out", str(tmp_path / "none" / "x.jsonl")]
        done = subprocess.run([sys.executable, commands.__file__, *out, *arguments], capture_output=True, text=True)
        assert done.returncode == 2
        assert message in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: examples("dev", 1, 0), "'dev'; give one of train, validation, test"),
        (lambda: examples("train", -1, 0), "-1; give 0 or more"),
        (lambda: score([]), "at least one"),
        (lambda: exact_match("[1]", "{}"), "not a JSON object"),
    ],
)
def test_bad_arguments_are_refused_at_once(call: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()
