"""Documents before they are tokens: collecting, duplicates against a brute-force reference, and the split."""

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipstone.train.data.documents import Document, collect, deduplicate, split
from skipstone.train.data.sources import JsonLines, TextFiles

VOCABULARY = [f"w{index}" for index in range(1000)]


def document(words: list[str], name: str = "") -> Document:
    return Document(" ".join(words), "s", name)


def words(seed: int, count: int = 400) -> list[str]:
    return random.Random(seed).choices(VOCABULARY, k=count)


def changed(original: list[str], positions: range) -> list[str]:
    return [f"new{index}" if index in positions else word for index, word in enumerate(original)]


def names(documents: list[Document]) -> list[str]:
    return [one.name for one in documents]


def shingles(text: str) -> set[tuple[str, ...]]:
    parts = text.split()
    return {tuple(parts[start : start + 8]) for start in range(len(parts) - 7)}


class TestCollect:
    def test_documents_know_where_they_come_from_and_blank_ones_are_left_out(self, tmp_path: Path) -> None:
        (tmp_path / "b.txt").write_bytes(b"one\r\ntwo\rthree\n")
        (tmp_path / "a.txt").write_text(" \n", encoding="utf-8")
        (tmp_path / "lines.jsonl").write_text('{"text": "four"}\n', encoding="utf-8")
        found = collect([JsonLines(path="lines.jsonl", template="{text}"), TextFiles(path=".", name="books")], tmp_path)
        assert [(one.text, one.source) for one in found] == [("four", "lines"), ("one\ntwo\nthree\n", "books")]
        assert found[1].name == "b.txt"

    def test_a_prompt_is_the_beginning_of_its_document(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text('{"q": "one\\r\\ntwo", "a": "x"}\n{"q": "x", "a": " "}\n', encoding="utf-8")
        found = collect([JsonLines(path="a.jsonl", prompt="{q}\r\n", template="{a}\r\n")], tmp_path)
        assert [(one.text, one.given) for one in found] == [("one\ntwo\nx\n", len("one\ntwo\n"))], "an empty answer is none"

    def test_what_is_wrong_is_said(self, tmp_path: Path) -> None:
        (tmp_path / "blank.txt").write_text("\n", encoding="utf-8")
        (tmp_path / "half.jsonl").write_text('{"text": "ab\\ud83d"}\n', encoding="utf-8")
        blank, half = TextFiles(path="blank.txt"), JsonLines(path="half.jsonl", template="{text}")
        with pytest.raises(ValueError, match="there are no sources: expected at least one"):
            collect([], tmp_path)
        with pytest.raises(ValueError, match="two sources are called 'blank': give each a name of its own"):
            collect([blank, TextFiles(path="other/blank.txt")], tmp_path)
        with pytest.raises(ValueError, match=r"source 'blank' \(blank.txt\) has no documents"):
            collect([blank], tmp_path)
        with pytest.raises(ValueError, match=r"source 'half', document \w+: letter 2 is half a surrogate pair"):
            collect([half], tmp_path)


class TestDeduplicate:
    def test_copies_and_near_copies_go_and_distinct_texts_stay(self) -> None:
        first, other = words(1), words(2)
        spaced = Document("\n\n  ".join(first), "s", "other whitespace")
        documents = [
            document(first, "first"),
            document(other, "other"),
            spaced,
            document(changed(first, range(200, 203)), "three words changed"),
            document(first[:200] + words(3, 200), "half the same"),
            Document(" ".join(first), "another", "copy"),
        ]
        kept, report = deduplicate(documents)
        assert names(kept) == ["first", "other", "half the same"]
        assert report == {
            "s": {"documents": 5, "exact": 1, "near": 1, "kept": 3},
            "another": {"documents": 1, "exact": 1, "near": 0, "kept": 0},
        }

    def test_the_limit_is_a_similarity_of_point_eight(self) -> None:
        original = words(4)  # 393 shingles; a changed word that stands alone takes 8 of them
        nearer = changed(original, range(10, 50, 10))  # (393 - 32) / (393 + 32) = .849
        farther = changed(original, range(10, 80, 10))  # (393 - 56) / (393 + 56) = .751
        assert names(deduplicate([document(original, "a"), document(nearer, "b")])[0]) == ["a"]
        assert names(deduplicate([document(original, "a"), document(farther, "b")])[0]) == ["a", "b"]

    def test_short_documents_are_compared_as_a_whole(self) -> None:
        short = words(5, 49)
        assert len(deduplicate([document(short), document([*short[:-1], "x"])])[0]) == 2
        longer = words(5, 50)
        assert len(deduplicate([document(longer), document([*longer[:-1], "x"])])[0]) == 1
        assert len(deduplicate([document(["one"]), document(["one"]), document(["two"])])[0]) == 2

    @pytest.mark.slow
    @given(st.integers(0, 10**6))
    def test_the_same_are_found_as_by_comparing_all_with_all(self, seed: int) -> None:
        rng = random.Random(seed)
        family = [words(seed + 1, rng.randrange(120, 300)) for _ in range(3)]
        documents = []
        for index in range(14):
            start = list(rng.choice(family))
            for _ in range(rng.choice((0, 1, 2, 12, 40))):
                start[rng.randrange(len(start))] = rng.choice(VOCABULARY)
            documents.append(document(start[: rng.choice((None, -5, -60))], str(index)))
        expected: list[Document] = []
        for one in documents:
            mine = shingles(one.text)
            alike = (len(mine & shingles(o.text)) / len(mine | shingles(o.text)) for o in expected)
            if max(alike, default=0) < 0.8:
                expected.append(one)
        assert names(deduplicate(documents)[0]) == names(expected)


class TestSplit:
    def test_a_document_keeps_its_side_whatever_comes_and_goes(self) -> None:
        documents = [document([f"text{index}"], str(index)) for index in range(400)]
        training, held_out = split(documents, 0.1, seed=0)
        assert sorted(names(training + held_out), key=int) == names(documents)
        assert all(names(part) == sorted(names(part), key=int) for part in (training, held_out))
        assert split(documents, 0) == (documents, [])
        assert 20 <= len(held_out) <= 60  # 40 +- 3.3 standard deviations
        more = [document([f"more{index}"], f"m{index}") for index in range(300)]
        assert set(names(held_out)) <= set(names(split([*more, *documents[::-1]], 0.1, seed=0)[1]))
        assert set(names(split(documents[::2], 0.1, seed=0)[1])) == set(names(held_out)) & set(names(documents[::2]))
        assert names(split(documents, 0.1, seed=1)[1]) != names(held_out)
        assert set(names(held_out)) < set(names(split(documents, 0.3, seed=0)[1]))

    def test_every_source_of_two_or_more_is_on_both_sides(self) -> None:
        documents = [Document(f"t{index}", source, f"{index}") for source in "ab" for index in range(3)]
        documents.append(Document("alone", "c", "0"))
        for share in (1e-9, 0.02, 0.999999):
            training, held_out = split(documents, share)
            assert {one.source for one in training} == set("abc")
            assert {one.source for one in held_out} == set("ab")
        assert len(split(documents, 1e-9)[1]) == 2
        assert len(split(documents, 0.999999)[0]) == 3
