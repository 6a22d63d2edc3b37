"""The commands domain: requests in plain words and their meaning as JSON, made by a small seeded grammar.

The shape of the task is TOPv2's in the LayerSkip paper (arXiv 2404.16710, section 5.1); every word is our own. An example is

    > wake me up at 7 am tomorrow
    {"intent": "set_alarm", "time": "7:00", "day": "tomorrow"}

`commands.toml` holds the intents and their templates, `commands_words.toml` the rules that fill the slots. Keys come in the
order of the table, slots not mentioned are absent. Values are copies of the request, except for the keys in `NORMALISED`:
- time: 24 hours ("7:30 pm" is 19:30, "half past 7" 7:30, "7 o'clock" 7:00, noon and midnight);
- duration, percent, degrees: spelled numbers become digits, "half an hour" 30 minutes, "half" 50, "the maximum" 100;
- condition: "do i need an umbrella" asks for rain; by: "on foot" is walking; repeat: "daily" is every day, "on weekdays"
  every weekday.

Two things are split by a hash of their text, one in ten belongs to the test:
- fillers: every value of an open rule (names, places, songs, artists, items, tasks, titles, messages, ...), also inside
  another value. The test uses only fillers that training never uses: names and foods are new words; songs, tasks and messages
  are new combinations of known words. Closed rules (days, rooms, numbers, times) are the same in all splits.
- combinations of opening, template (its options chosen) and ending. Training has each part of a test example, but never their
  combination.
"validation" is made like "train" from another stream of random numbers. It may repeat some requests of training.

    python recipes/data/commands.py --split train --count 20000 --seed 0 --out commands.jsonl

The same arguments give the same lines on every platform and Python >= 3.11, because only `Random.random` is used.
"""

import argparse
import hashlib
import json
import random
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

SPLITS = ("train", "validation", "test")
NORMALISED = frozenset({"intent", "time", "duration", "percent", "degrees", "condition", "by", "repeat"})
TEST_ONE_IN = 10
MAX_DRAWS = 10_000
GROUP = re.compile(r"\[([^][()]*)\]|\(([^][()]*)\)")  # an innermost [optional] or (either|or)
TOKEN = re.compile(r"\{(\w+)\}|([<>])|([^{}<>]+)")
SLOT = re.compile(r"\{(\w+)(?::(\w+))?\}")
T = TypeVar("T")


class Phrase(NamedTuple):
    """said: the words. values: their meaning, several for a list. fillers: the values of open rules in them."""

    said: str
    values: tuple[str, ...]
    fillers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Example:
    """A request and its answer, each one line with its newline. parts: (opening, template, ending). fillers: open values."""

    prompt: str
    answer: str
    parts: tuple[str, str, str] = ("", "", "")
    fillers: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return self.prompt + self.answer


class Template(NamedTuple):
    """One way to say an intent, its options chosen. mood: names the openings and endings that fit."""

    mood: str
    words: str


@dataclass(frozen=True)
class Grammar:
    """The two tables, parsed. rules: symbol -> phrases -> variants of each."""

    rules: dict[str, tuple[tuple[str, ...], ...]]
    open: frozenset[str]
    free: frozenset[str]
    lists: frozenset[str]
    moods: dict[str, dict[str, list[str]]]
    keys: dict[str, list[str]]
    templates: dict[str, tuple[Template, ...]]


def variants(pattern: str) -> tuple[str, ...]:
    """All texts of a pattern: [a|b] is a, b or nothing, (a|b) is a or b; groups may nest."""
    group = GROUP.search(pattern)
    if group is None:
        return (" ".join(pattern.split()),)
    optional, required = group.groups()
    options = required.split("|") if optional is None else ["", *optional.split("|")]
    spelled = (variants(pattern[: group.start()] + option + pattern[group.end() :]) for option in options)
    return tuple(dict.fromkeys(variant for each in spelled for variant in each))


@cache
def grammar() -> Grammar:
    """The grammar of the tables next to this file."""
    folder = Path(__file__).parent
    table = tomllib.loads((folder / "commands.toml").read_text(encoding="utf-8"))
    words = tomllib.loads((folder / "commands_words.toml").read_text(encoding="utf-8"))
    rules = {symbol: phrases.split() if isinstance(phrases, str) else phrases for symbol, phrases in words.items()}
    intents: dict[str, dict[str, list[str]]] = table["intents"]
    return Grammar(
        rules={symbol: tuple(variants(phrase) for phrase in phrases) for symbol, phrases in rules.items()},
        open=frozenset(table["open"]),
        free=frozenset(table["free"]),
        lists=frozenset(table["lists"]),
        moods=table["moods"],
        keys={intent: entry["keys"] for intent, entry in intents.items()},
        templates={
            intent: tuple(
                Template(mood, words) for mood in table["moods"] for pattern in entry[mood] for words in variants(pattern)
            )
            for intent, entry in intents.items()
        },
    )


def held_out(text: str) -> bool:
    """Whether a filler or a combination belongs to the test split."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % TEST_ONE_IN == 0


class Speaker:
    """Makes the examples of one split."""

    def __init__(self, split: str, seed: int) -> None:
        self.grammar = grammar()
        self.test = split == "test"
        self.random = random.Random(f"{split}/{seed}")

    def pick(self, choices: Sequence[T]) -> T:
        """Draw one of the choices. Not `Random.choice`: only `random()` stays the same in all versions of Python."""
        return choices[int(self.random.random() * len(choices))]

    def example(self) -> Example:
        intent = self.pick(tuple(self.grammar.templates))
        parts = self.parts(intent)
        values: dict[str, str | int | list[str]] = {}
        fillers: list[str] = []

        def fill(slot: re.Match[str]) -> str:
            key, symbol = slot[1], slot[2] or slot[1]
            phrase = self.phrase(symbol)
            values[key] = list(phrase.values) if symbol in self.grammar.lists else json_value(*phrase.values)
            fillers.extend(phrase.fillers)
            return phrase.said

        request = " ".join(filter(None, (parts[0], SLOT.sub(fill, parts[1]), parts[2])))
        meaning = {"intent": intent} | {key: values[key] for key in self.grammar.keys[intent] if key in values}
        return Example(f"> {request}\n", json.dumps(meaning) + "\n", parts, tuple(fillers))

    def parts(self, intent: str) -> tuple[str, str, str]:
        """(opening, template, ending), a combination of this split."""
        while True:
            template = self.pick(self.grammar.templates[intent])
            mood = self.grammar.moods[template.mood]
            free = template.words.endswith("}") and SLOT.findall(template.words)[-1][0] in self.grammar.free
            parts = (self.pick(mood["openings"]), template.words, "" if free else self.pick(mood["endings"]))
            if held_out("|".join(parts)) == self.test:
                return parts

    def phrase(self, symbol: str) -> Phrase:
        """A phrase of a rule. For an open rule phrases are drawn until one belongs to this split.

        ValueError if none does: a rule of few phrases may have none for the test split.
        """
        for _ in range(MAX_DRAWS):
            phrase = self.expand(self.pick(self.pick(self.grammar.rules[symbol])))
            if len(set(phrase.values)) < len(phrase.values):
                continue  # nobody asks for milk, bread and milk
            if symbol not in self.grammar.open:
                return phrase
            if held_out(phrase.said) == self.test:
                return phrase._replace(fillers=(*phrase.fillers, phrase.said))
        raise ValueError(f"{MAX_DRAWS} phrases of the rule {symbol!r} were all of the other split; give it more phrases")

    def expand(self, pattern: str) -> Phrase:
        """The phrase of a pattern. Its value is the part after `=>`, else the parts in < >, else all of it."""
        pattern, arrow, literal_value = pattern.partition("=>")
        said, meant, marked, fillers, inside = "", "", [], [], False
        for symbol, mark, literal in TOKEN.findall(pattern.strip()):
            if mark:
                inside = mark == "<"
                marked += [""] * inside
                continue
            phrase = self.phrase(symbol) if symbol else Phrase(literal, (literal,), ())
            said += phrase.said
            meant += phrase.values[0]
            fillers += phrase.fillers
            if inside:
                marked[-1] += phrase.values[0]
        return Phrase(said, (literal_value.strip(),) if arrow else tuple(marked) or (meant,), tuple(fillers))


def json_value(value: str) -> str | int:
    return int(value) if value.isdigit() else value


def examples(split: str, count: int, seed: int) -> Iterator[Example]:
    """`count` examples of a split. Repeated requests are rare (tests state the bound).

    ValueError for an unknown split or a negative count.
    """
    if split not in SPLITS:
        raise ValueError(f"the split is {split!r}; give one of {', '.join(SPLITS)}")
    if count < 0:
        raise ValueError(f"the count is {count}; give 0 or more")
    speaker = Speaker(split, seed)
    return (speaker.example() for _ in range(count))


@cache
def vocabulary() -> tuple[str, ...]:
    """The words of the rules with four letters or more, sorted."""
    patterns = (variant for phrases in grammar().rules.values() for each in phrases for variant in each)
    return tuple(sorted({word for pattern in patterns for word in re.findall(r"[a-z]{4,}", re.sub(r"\{\w+\}", " ", pattern))}))


def with_new_words(example: Example, dice: random.Random) -> Example:
    """An example with some words of its open values replaced, in request and answer, by invented words (the beginning of one
    word and the end of another). So a model cannot learn the copied words by heart.

    Values of the test split are not made. dice: only `random()` is used.
    """
    meaning: dict[str, Any] = json.loads(example.answer)
    fixed = " ".join(str(value) for key, value in meaning.items() if key in NORMALISED)
    request, fillers = example.prompt, example.fillers
    for word in sorted({word for filler in fillers for word in re.findall(r"[a-z]{4,}", filler)}):
        whole = re.compile(rf"\b{word}\b")
        one, other = (vocabulary()[int(dice.random() * len(vocabulary()))] for _ in range(2))
        new = one[: 2 + int(dice.random() * 3)] + other[-2 - int(dice.random() * 3) :]
        changed = tuple(whole.sub(new, filler) for filler in fillers)
        if dice.random() < 0.5 or len(whole.findall(request)) != 1 or whole.search(fixed) or any(map(held_out, changed)):
            continue
        request, fillers = whole.sub(new, request), changed
        for key in meaning.keys() - NORMALISED:
            value = meaning[key]
            meaning[key] = [whole.sub(new, one) for one in value] if isinstance(value, list) else value
            if isinstance(value, str):
                meaning[key] = whole.sub(new, value)
    return Example(request, json.dumps(meaning) + "\n", example.parts, fillers)


def documents(
    split: str, count: int, seed: int, answers_alone: bool = False, new_words: bool = False
) -> Iterator[str | tuple[str, str]]:
    """The texts of `examples`, for a training recipe's source of kind "script". answers_alone: requests are not predicted.
    new_words: every second example has invented words (`with_new_words`)."""
    dice = random.Random(f"new words/{split}/{seed}")
    for number, one in enumerate(examples(split, count, seed)):
        said = with_new_words(one, dice) if new_words and number % 2 else one
        yield (said.prompt, said.answer) if answers_alone else said.text


def canonical(line: str) -> str:
    """A JSON object with its keys sorted. ValueError if the line is no object or repeats a key."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise ValueError(f"a key stands twice in {line!r}")
        return dict(pairs)

    value = json.loads(line, object_pairs_hook=unique)
    if not isinstance(value, dict):
        raise ValueError(f"not a JSON object: {line!r}")
    return json.dumps(value, sort_keys=True)  # as text, or true would equal 1


def exact_match(answer: str, output: str) -> bool:
    """Whether the first line of `output` is the answer's object, in any order of keys. ValueError if the answer is no
    object."""
    expected = canonical(answer)
    try:
        return canonical(output.split("\n", 1)[0]) == expected
    except (ValueError, RecursionError):
        return False


def score(pairs: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Scores of (answer, output) pairs: {"count", "exact_match": share, "intents": {intent: share}}. ValueError without
    pairs."""
    matches: dict[str, list[bool]] = defaultdict(list)
    for answer, output in pairs:
        matches[json.loads(answer)["intent"]].append(exact_match(answer, output))
    if not matches:
        raise ValueError("there are no pairs to score; give at least one (answer, output)")
    everything = [match for each in matches.values() for match in each]
    return {
        "count": len(everything),
        "exact_match": sum(everything) / len(everything),
        "intents": {intent: sum(each) / len(each) for intent, each in sorted(matches.items())},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Write examples of the commands domain as JSON lines.")
    parser.add_argument("--split", choices=SPLITS, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    args = parser.parse_args()
    try:
        made = examples(args.split, args.count, args.seed)
        with args.out.open("w", encoding="utf-8", newline="\n") as file:
            for example in made:
                file.write(json.dumps({"text": example.text, "prompt": example.prompt, "answer": example.answer}) + "\n")
    except (ValueError, OSError) as problem:
        parser.error(str(problem))


if __name__ == "__main__":
    main()
