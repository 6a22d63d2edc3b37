"""The commands grammar: the same on every machine, splits that share no filler and no combination, answers that are right."""

import dataclasses
import hashlib
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from itertools import chain, islice, pairwise
from pathlib import Path

import pytest

from recipes.data import commands
from recipes.data.commands import NORMALISED, Example, Speaker, exact_match, examples, grammar, score

pytestmark = pytest.mark.slow

SCRIPT = Path(commands.__file__)
# Of the first 100 training examples of seed 0. It changes with the tables and with nothing else, least of all with the machine.
DIGEST = "07d69588f8c04b6d2beeb9e39f70ee8b3ffc87bed09210ba2c984e9a3782dfd9"


@pytest.fixture(scope="module")
def train() -> list[Example]:
    return list(examples("train", 12_000, seed=0))


@pytest.fixture(scope="module")
def test() -> list[Example]:
    return list(examples("test", 1_500, seed=0))


def fillers(several: list[Example]) -> set[str]:
    return {filler for example in several for filler in example.fillers}


def meaning(example: Example) -> dict[str, str | int | list[str]]:
    return json.loads(example.answer)


def values(example: Example) -> list[tuple[str, str]]:
    """(key, value) of every slot, those of a list one by one."""
    pairs = [(key, value if isinstance(value, list) else [value]) for key, value in meaning(example).items() if key != "intent"]
    return [(key, str(value)) for key, each in pairs for value in each]


def slots(template: str) -> dict[str, str]:
    """Key -> rule of a template's slots."""
    return {key: rule or key for key, rule in re.findall(r"\{(\w+)(?::(\w+))?\}", template)}


@cache
def said_and_meant(rule: str, draws: int = 20_000) -> dict[str, str]:
    speaker = Speaker("train", 0)
    return {phrase.said: phrase.values[0] for phrase in (speaker.phrase(rule) for _ in range(draws))}


def test_the_examples_are_the_same_on_every_machine_and_python() -> None:
    text = "".join(example.text for example in examples("train", 100, seed=0))
    assert hashlib.sha256(text.encode()).hexdigest() == DIGEST


def test_the_script_writes_what_the_function_yields_whatever_the_hash_seed(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--split", "test", "--count", "40", "--seed", "3", "--out"]
    out = tmp_path / "commands.jsonl"
    subprocess.run([*command, str(out)], check=True, env={"PYTHONHASHSEED": "12345"}, cwd=tmp_path)
    written = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert written == [{"text": e.prompt + e.answer, "prompt": e.prompt, "answer": e.answer} for e in examples("test", 40, 3)]
    done = subprocess.run([*command, str(tmp_path / "none" / "x.jsonl")], capture_output=True, text=True)
    assert done.returncode == 2
    assert "No such file" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_longer_stream_starts_with_the_shorter_one_and_seeds_and_splits_differ() -> None:
    assert list(islice(examples("train", 50, 7), 20)) == list(examples("train", 20, 7))
    assert list(examples("train", 0, 7)) == []
    streams = [tuple(examples(split, 5, seed)) for split in ("train", "validation", "test") for seed in (0, 1)]
    assert len(set(streams)) == len(streams)


# Splits


@pytest.mark.slow
def test_no_filler_of_the_test_split_occurs_in_training(train: list[Example], test: list[Example]) -> None:
    others = train + list(examples("validation", 2_000, seed=1))
    assert not fillers(others) & fillers(test)
    assert len(fillers(test)) > 1_000
    assert fillers(train) & fillers(list(examples("validation", 500, seed=1)))  # the measure sees what is shared


def test_a_test_example_is_a_new_combination_of_known_parts(train: list[Example], test: list[Example]) -> None:
    assert not {example.parts for example in train} & {example.parts for example in test}
    for place in range(3):
        assert {example.parts[place] for example in test} <= {example.parts[place] for example in train}
    assert len({example.parts for example in test}) > 800


def test_fillers_and_parts_are_those_of_the_request(train: list[Example], test: list[Example]) -> None:
    checked = 0
    for example in chain(train[:2_000], test):
        rules = slots(example.parts[1])
        answer = {value for key, value in values(example) if rules[key] in grammar().open | {"items"}}
        assert answer <= set(example.fillers)
        assert all(filler in example.prompt for filler in example.fillers)
        checked += len(answer)
        opening, template, ending = example.parts
        pattern = ".+".join(re.escape(words) for words in re.split(r"\{[^}]*\}", template))
        whole = " ".join(filter(None, (re.escape(opening), pattern, re.escape(ending))))
        assert re.fullmatch(f"> {whole}\n", example.prompt), example
    assert checked > 2_000


# Answers


def test_an_answer_is_one_line_of_json_with_the_keys_in_the_order_of_the_table(train: list[Example]) -> None:
    for example in train[:5_000]:
        assert example.answer.endswith("}\n")
        assert example.answer.count("\n") == example.prompt.count("\n") == 1
        answer = meaning(example)
        intent, expected = answer["intent"], slots(example.parts[1])
        assert list(answer) == ["intent", *(key for key in grammar().keys[str(intent)] if key in expected)]
        assert len(answer) == 1 + len(expected)
        for key, value in answer.items():
            assert isinstance(value, {"percent": int, "degrees": int, "items": list}.get(key, str)), example


def test_values_are_copied_from_the_request_unless_documented(train: list[Example], test: list[Example]) -> None:
    answers = {example.prompt: example.answer for example in train}
    assert all(answers[example.prompt] == example.answer for example in train), "no request has two answers"
    for example in chain(train, test):
        for key, value in values(example):
            if key not in NORMALISED:
                assert re.search(rf"(?<!\w){re.escape(value)}(?!\w)", example.prompt), (key, example)


@pytest.mark.parametrize(
    ("rule", "said", "meant"),
    [
        ("time", "12 am", "0:00"),
        ("time", "12:05 am", "0:05"),
        ("time", "midnight", "0:00"),
        ("time", "half past 12", "12:30"),
        ("duration", "half an hour", "30 minutes"),
        ("percent", "half", "50"),
        ("degrees", "20 degrees", "20"),
        ("day", "on friday", "friday"),
        ("by", "on foot", "walking"),
    ],
)
def test_normalised_values_by_hand(rule: str, said: str, meant: str) -> None:
    assert said_and_meant(rule)[said] == meant


def test_all_times_agree_with_a_clock() -> None:
    """Against arithmetic on hours instead of the table's lists."""
    for said, meant in said_and_meant("time").items():
        if match := re.fullmatch(r"(\d+)(?::(\d\d))? (am|pm)", said):
            hour = int(match[1]) % 12 + 12 * (match[3] == "pm")
            assert meant == f"{hour}:{match[2] or '00'}", said
        elif match := re.fullmatch(r"(\d+) in the evening", said):
            assert meant == f"{int(match[1]) + 12}:00"


class TestNewWords:
    def test_request_and_answer_change_together_and_take_no_value_of_the_test(
        self, train: list[Example], test: list[Example]
    ) -> None:
        dice = random.Random(0)
        pairs = [(one, commands.with_new_words(one, dice)) for one in train[:4000]]
        changed = [(old, new) for old, new in pairs if old.prompt != new.prompt]
        assert len(changed) > 0.3 * len(pairs)
        for old, new in pairs:
            before, after = old.prompt.split(), new.prompt.split()
            swapped = {a.strip("'s,"): b.strip("'s,") for a, b in zip(before, after, strict=True) if a != b}
            assert (old.prompt == new.prompt) == (old.answer == new.answer) == (not swapped)
            assert meaning(old).keys() == meaning(new).keys()
            for key in NORMALISED & meaning(old).keys():
                assert meaning(old)[key] == meaning(new)[key]
            for (key, said), (_, now) in zip(values(old), values(new), strict=True):
                if key not in NORMALISED and said in old.prompt:
                    assert now in new.prompt
        made = fillers([one for _, one in pairs])
        assert not any(commands.held_out(filler) for filler in made)
        assert not made & fillers(test)

    def test_documents_have_them_in_every_second_example_where_asked(self) -> None:
        plain = list(commands.documents("train", 200, 0))
        mixed = list(commands.documents("train", 200, 0, new_words=True))
        apart = list(commands.documents("train", 200, 0, answers_alone=True, new_words=True))
        assert mixed[::2] == plain[::2]
        assert sum(a != b for a, b in zip(mixed[1::2], plain[1::2], strict=True)) > 30
        assert ["".join(pair) for pair in apart] == mixed
        assert mixed == list(commands.documents("train", 200, 0, new_words=True))


ANSWER = '{"intent": "set_temperature", "degrees": 1, "room": "attic"}\n'
SAME = ('{"room":"attic","intent":"set_temperature","degrees":1}', ANSWER + "> and what the model said after it", "  " + ANSWER)
OTHER = (
    *("", "\n" + ANSWER, "attic", "null", "[" * 100_000, '["intent", "set_temperature"]', ANSWER[:-3], "x" + ANSWER),
    *(ANSWER.replace("attic", "kitchen"), ANSWER.replace("1", '"1"'), ANSWER.replace("1", "true")),
    *(ANSWER.replace(', "room": "attic"', ""), ANSWER.replace("}", ', "time": "7:00"}'), ANSWER.strip() + " }"),
    *(ANSWER.replace("}", ', "room": "attic"}'), ANSWER.replace('"attic"', '["attic"]')),
)


def test_exact_match_takes_the_same_object_and_nothing_else() -> None:
    assert all(exact_match(ANSWER, output) for output in (ANSWER, *SAME))
    assert [output for output in OTHER if exact_match(ANSWER, output)] == []
    assert not exact_match('{"items": ["milk", "eggs"]}', '{"items": ["eggs", "milk"]}')
    for one, other in pairwise(examples("test", 100, seed=0)):
        assert exact_match(one.answer, one.answer)
        assert exact_match(one.answer, other.answer) == (one.answer == other.answer)


def test_score_counts_by_intent() -> None:
    call, timer = '{"intent": "start_call", "to": "ada"}', '{"intent": "start_timer", "duration": "5 minutes"}'
    assert score([(call, call), (call, timer), (call, "?"), (call, call), (timer, timer)]) == {
        "count": 5,
        "exact_match": 0.6,
        "intents": {"start_call": 0.5, "start_timer": 1.0},
    }


def test_a_rule_that_leaves_the_test_split_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = grammar().rules | {"song": (("the one and only",),)}
    speaker = Speaker("test", 0)
    monkeypatch.setattr(speaker, "grammar", dataclasses.replace(grammar(), rules=rules))
    with pytest.raises(ValueError, match=r"rule 'song' .* give it more phrases"):
        speaker.phrase("song")


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
