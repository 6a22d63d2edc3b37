"""From tokens to a training order: packed rows, shares, epochs, the whole way through and the cache."""

import hashlib
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from skipstone.train.data import rows as data
from skipstone.train.data.documents import Document
from skipstone.train.data.rows import RowPlan, TokenRows, TrainingData, mix, pack
from skipstone.train.data.sources import TextFiles
from skipstone.train.data.tokenizer import train_bpe
from tests.helpers.training import prepared_rows

BYTES = train_bpe(["x"], 257)
"""One token a byte: <|end|> is 0, the printable ASCII letters follow from ! as 1."""
END = 0


def ids(text: str) -> list[int]:
    return [ord(letter) - ord("!") + 1 for letter in text]


def named(*texts: str) -> list[Document]:
    return [Document(text, "s", f"{index}") for index, text in enumerate(texts)]


class TestPack:
    def test_one_document_by_hand(self) -> None:
        rows = pack(named("abcd"), BYTES, 2, seed=0, eos_id=END)
        assert rows.dtype == torch.long
        assert rows.tolist() == [ids("ab"), ids("cd")]  # the end token is the rest that fills no row
        assert pack(named("abcd"), BYTES, 5, seed=0, eos_id=END).tolist() == [[*ids("abcd"), END]]

    def test_what_is_given_is_marked(self) -> None:
        """~id, negative; the prompt's tokens are those of the prompt alone."""
        rows = pack([Document("abcd", "s", "0", given=3)], BYTES, 5, seed=0, eos_id=END)
        assert rows.tolist() == [[*(-1 - one for one in ids("abc")), *ids("d"), END]]
        merged = train_bpe(["ab" * 9], 258)  # knows ab
        assert pack([Document("xab", "s", "0", given=2)], merged, 4, 0, END)[0, 2:].tolist() == [merged.encode("b")[-1], END]

    def test_what_is_predicted_is_never_parted_from_its_prompt(self) -> None:
        """A document that does not fit begins the next row, one longer than a row ends with it; a row without anything to
        predict is left out."""
        given = [~one for one in ids("pq")]
        two = [Document("pqa", "s", "0", given=2), Document("pqa", "s", "1", given=2)]
        assert pack(two, BYTES, 6, 0, END).tolist() == [[*given, *ids("a"), END, ~END, ~END]]
        assert pack([*two, Document("pqa", "s", "2", given=2)], BYTES, 6, 0, END).shape == (2, 6)
        assert pack(two, BYTES, 4, 0, END).tolist() == [[*given, *ids("a"), END]] * 2
        assert pack([Document("pqabcdef", "s", "0", given=2)], BYTES, 4, 0, END).tolist() == [[*given, *ids("ab")]]
        with pytest.raises(ValueError, match="not one row of 2 with something to predict"):
            pack([Document("pqabcdef", "s", "0", given=2)], BYTES, 2, 0, END)

    def test_a_tokenizer_that_begins_texts_with_bos_begins_every_document_with_one(self) -> None:
        own = train_bpe(["x"], 257)
        own.add_special_tokens({"bos_token": "<|begin|>"})
        begin = own.bos_token_id
        own.backend_tokenizer.post_processor = TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", begin)])
        seen = {tuple(pack(named("ab", "c"), own, 7, seed, END)[0].tolist()) for seed in range(12)}
        assert seen == {(~begin, *ids("ab"), END, ~begin, *ids("c"), END), (~begin, *ids("c"), END, ~begin, *ids("ab"), END)}

    def test_the_order_depends_on_the_seed_and_not_on_the_order_given(self) -> None:
        documents = named(*"abcdefgh")
        rows = pack(documents, BYTES, 16, 1, END)
        assert torch.equal(rows, pack(documents[::-1], BYTES, 16, 1, END))
        assert not torch.equal(rows, pack(documents, BYTES, 16, 2, END))
        assert sorted(rows[0, ::2].tolist()) == ids("abcdefgh")
        assert rows[0, 1::2].tolist() == [END] * 8

    def test_more_documents_than_one_batch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        documents = named(*(chr(ord("!") + i % 90) * (1 + i % 3) for i in range(50)))
        whole = pack(documents, BYTES, 7, 0, END)
        monkeypatch.setattr(data, "BATCH", 3)
        assert torch.equal(whole, pack(documents, BYTES, 7, 0, END))
        assert len(whole) == sum(2 + i % 3 for i in range(50)) // 7

    @given(st.lists(st.text("abc", min_size=1, max_size=9), min_size=1, max_size=12), st.integers(2, 9), st.integers(0, 5))
    def test_nothing_is_lost_but_less_than_a_row(self, texts: list[str], length: int, seed: int) -> None:
        tokens = sum(len(text) + 1 for text in texts)
        if tokens < length:
            with pytest.raises(ValueError, match=f"{len(texts)} documents make {tokens} tokens, not one row of {length}"):
                pack(named(*texts), BYTES, length, seed, END)
            return
        rows = pack(named(*texts), BYTES, length, seed, END)
        assert rows.shape == (tokens // length, length)
        pieces = Counter("".join("." if i == END else chr(i + 32) for i in rows.flatten().tolist()).split(".")[:-1])
        assert not pieces - Counter(texts)
        assert sum(pieces.values()) >= len(texts) - length


def numbered(first: int, count: int) -> torch.Tensor:
    """Rows [count, 2] that tell which one they are."""
    return torch.arange(first, first + count)[:, None].repeat(1, 2)


class TestMix:
    @given(st.dictionaries(st.sampled_from("abcdef"), st.floats(0.1, 10), min_size=1), st.integers(1000, 2000))
    def test_every_share_is_within_a_row_of_its_weight(self, weights: dict[str, float], rows: int) -> None:
        counts = data._shares({name: numbered(0, 1) for name in weights}, weights, rows)
        assert sum(counts.values()) == rows
        assert all(abs(counts[name] - rows * weight / sum(weights.values())) < 1 for name, weight in weights.items())

    def test_a_small_source_is_repeated_in_whole_epochs_each_in_its_own_order(self) -> None:
        packed = {"small": numbered(0, 6), "large": numbered(100, 500)}
        order, epochs = mix(packed, {"small": 1, "large": 4}, 200, seed=3)
        small = [row for row in order[:, 0].tolist() if row < 100]
        large = [row for row in order[:, 0].tolist() if row >= 100]
        assert (len(small), len(large), len(set(large))) == (40, 160, 160)
        assert epochs == {"small": 40 / 6, "large": 160 / 500}
        chunks = [small[start : start + 6] for start in range(0, 36, 6)]
        assert all(sorted(chunk) == list(range(6)) for chunk in chunks)
        assert len({tuple(chunk) for chunk in chunks}) > 3
        assert len(set(small[36:])) == 4
        assert all(10 <= int((half < 100).sum()) <= 30 for half in order[:, 0].split(100)), "the sources are interleaved"
        assert torch.equal(order, mix(packed, {"small": 1, "large": 4}, 200, seed=3)[0])
        assert not torch.equal(order, mix(packed, {"small": 1, "large": 4}, 200, seed=4)[0])

    def test_a_share_without_a_row_is_refused(self) -> None:
        error = "source 'b' would get none of the 4 rows: raise its weight or train on more rows"
        with pytest.raises(ValueError, match=error):
            mix({"a": numbered(0, 4), "b": numbered(0, 4)}, {"a": 1, "b": 0.01}, 4, 0)


def test_rows_are_items_of_a_model() -> None:
    rows = TokenRows(numbered(0, 3))
    assert len(rows) == 3
    assert {name: value.tolist() for name, value in rows[2].items()} == {"input_ids": [2, 2], "labels": [2, 2]}
    given = TokenRows(torch.tensor([[~5, ~0, 0, 7]]))[0]
    assert {name: value.tolist() for name, value in given.items()} == {"input_ids": [5, 0, 0, 7], "labels": [-100, -100, 0, 7]}


WORDS = [f"word{index}" for index in range(300)]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe's folder with two sources: `big` of 40 files (one a copy of another) and `small` of 4."""
    rng = np.random.default_rng(0)
    for name, count in (("big", 39), ("small", 4)):
        (tmp_path / name).mkdir()
        for index in range(count):
            (tmp_path / name / f"{index:02}.txt").write_text(" ".join(rng.choice(WORDS, 60)), encoding="utf-8")
    (tmp_path / "big" / "copy.txt").write_text((tmp_path / "big" / "07.txt").read_text() + "\n", encoding="utf-8")
    return tmp_path


SOURCES = (TextFiles(path="big", weight=3), TextFiles(path="small", weight=1))
PLAN = RowPlan(length=32, rows=80, held_out=0.1, seed=1)


def test_prepared_rows_and_their_report(recipe: Path) -> None:
    prepared = prepared_rows(SOURCES, BYTES, PLAN, recipe)
    assert prepared.train.shape == (80, 32)
    assert set(prepared.held_out) == {"big", "small"}
    big, small = (prepared.report["sources"][name] for name in ("big", "small"))
    assert (big["documents"], big["exact"], big["near"], big["kept"]) == (40, 1, 0, 39)
    assert (big["rows"], small["rows"], prepared.report["tokens"]) == (60, 20, 80 * 32)
    for counts in (big, small):
        assert counts["train"]["documents"] + counts["held_out"]["documents"] == counts["kept"]
        assert counts["held_out"]["documents"] >= 1
        for part in ("train", "held_out"):  # a byte a token, and an end for each document
            assert counts[part]["tokens"] == counts[part]["bytes"] + counts[part]["documents"]
    assert small["epochs"] == 20 / (small["train"]["tokens"] // 32)
    assert prepared.report["held_rows"]["small"] == len(prepared.held_out["small"]) == small["held_out"]["tokens"] // 32
    words = b"".join(token.to_bytes(8, "little") for token in prepared.train.flatten().tolist())
    assert prepared.report["sha256"] == hashlib.sha256(words).hexdigest()
    assert json.loads(json.dumps(prepared.report)) == prepared.report


@pytest.fixture
def letters(tmp_path: Path) -> list[TextFiles]:
    """Sixty documents, each with a letter of its own."""
    for index in range(60):
        (tmp_path / f"{index}.txt").write_text(chr(ord("!") + index) * (40 + index), encoding="utf-8")
    return [TextFiles(path=str(tmp_path), name="letters")]


def test_no_held_out_text_is_trained_on(letters: list[TextFiles]) -> None:
    prepared, other = (prepared_rows(letters, BYTES, PLAN.model_copy(update={"seed": seed}), Path()) for seed in (1, 2))
    assert not torch.equal(prepared.held_out["letters"], other.held_out["letters"]), "the seed decides what is held out"
    trained, held_out = (set(rows.flatten().tolist()) - {END} for rows in (prepared.train, prepared.held_out["letters"]))
    assert not trained & held_out
    assert len(held_out) >= 2
    assert len(trained) + len(held_out) >= 58  # but for the rests that fill no row


def test_a_source_too_small_for_a_row_is_refused_or_not_evaluated(recipe: Path) -> None:
    plan = PLAN.model_copy(update={"length": 500})
    told = r"source 'small': the 1 held_out documents \(held_out=0.1\) make \d+ tokens, not one row of 500 .*; not evaluated"
    with pytest.warns(UserWarning, match=told):
        found = prepared_rows(SOURCES[1:], BYTES, plan, recipe)
    assert found.held_out == {}
    assert found.report["sources"]["small"]["held_out"]["documents"] == 1
    assert len(found.train) == plan.rows
    error = r"source 'small': the \d+ train documents \(held_out=0.1\) make \d+ tokens, not one row of 100000"
    with pytest.raises(ValueError, match=error):
        prepared_rows(SOURCES[1:], BYTES, PLAN.model_copy(update={"length": 100_000}), recipe)


def test_tokenizers_without_an_end_or_that_cannot_be_compared_are_refused(recipe: Path) -> None:
    endless = PreTrainedTokenizerFast(tokenizer_object=BYTES.backend_tokenizer)
    slow = SimpleNamespace(eos_token_id=0)
    for tokenizer, error in ((endless, "the tokenizer has no eos_token"), (slow, "a tokenizer of the tokenizers package")):
        with pytest.raises(ValueError, match=error):
            prepared_rows(SOURCES, tokenizer, PLAN, recipe, recipe / "cache")


# the cache: a hit equals what is made anew, damage is noticed, what is half written is never seen


def same(one: TrainingData, other: TrainingData) -> bool:
    held = one.held_out.keys() == other.held_out.keys() and all(
        torch.equal(rows, other.held_out[name]) for name, rows in one.held_out.items()
    )
    return torch.equal(one.train, other.train) and held and one.report == other.report


def test_a_hit_equals_what_is_made_anew_and_tokenises_nothing(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = recipe / "cache"
    fresh = prepared_rows(SOURCES, BYTES, PLAN, recipe)
    assert same(prepared_rows(SOURCES, BYTES, PLAN, recipe, cache), fresh)
    monkeypatch.setattr(data, "_build", None)  # cannot be called
    assert same(prepared_rows(SOURCES, BYTES, PLAN, recipe, cache), fresh)
    assert [path.is_file() for path in cache.iterdir()] == [True]


def test_whatever_the_rows_depend_on_changes_the_key(recipe: Path) -> None:
    cache, other = recipe / "cache", train_bpe(["x y"], 257)
    other.backend_tokenizer.add_special_tokens(["<|more|>"])
    heavier = (SOURCES[0], TextFiles(path="small", weight=2))
    for sources, tokenizer, seed in ((SOURCES, BYTES, 1), (SOURCES, BYTES, 2), (heavier, BYTES, 1), (SOURCES, other, 1)):
        before = [*cache.glob("*")]
        prepared_rows(sources, tokenizer, PLAN.model_copy(update={"seed": seed}), recipe, cache)
        assert len([*cache.glob("*")]) == len(before) + 1
    (recipe / "small" / "00.txt").write_text("changed " * 60)
    prepared_rows(SOURCES, BYTES, PLAN, recipe, cache)
    assert len([*cache.glob("*")]) == 5


@pytest.mark.parametrize("damage", ["a byte", "cut"])
def test_what_is_damaged_is_made_anew_with_a_warning(recipe: Path, damage: str) -> None:
    cache = recipe / "cache"
    fresh = prepared_rows(SOURCES, BYTES, PLAN, recipe, cache)
    (path,) = cache.iterdir()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content if damage == "a byte" else content[:-9])
    with pytest.warns(UserWarning, match=rf"the cached data in .*{path.name} is damaged \(.+\) and is made anew"):
        assert same(prepared_rows(SOURCES, BYTES, PLAN, recipe, cache), fresh)
    assert same(prepared_rows(SOURCES, BYTES, PLAN, recipe, cache), fresh)


def test_rows_are_mapped_and_may_be_written_to_without_changing_the_file(tmp_path: Path) -> None:
    data.save(tmp_path / "key", TrainingData(numbered(0, 3), {}, {"held_rows": {}}))
    for _ in range(2):
        found = data.load(tmp_path / "key")
        assert found is not None
        assert found.train.tolist() == numbered(0, 3).tolist()
        found.train.zero_()
