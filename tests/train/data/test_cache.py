"""Prepared data kept on disk: a hit equals what is made anew, damage is noticed, what is half written is never seen."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from skipstone.train.data import rows as data
from skipstone.train.data.rows import RowPlan, TrainingData
from skipstone.train.data.sources import TextFiles
from skipstone.train.data.tokenizer import train_bpe
from tests.helpers.training import prepared_rows

BYTES = train_bpe(["x"], 257)
SOURCES = (TextFiles(path="big", weight=3), TextFiles(path="small", weight=1))
PLAN = RowPlan(length=32, rows=80, held_out=0.1, seed=1)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe's folder with two sources, `big` of 40 files and `small` of 4."""
    for name, count in (("big", 40), ("small", 4)):
        (tmp_path / name).mkdir()
        for index in range(count):
            (tmp_path / name / f"{index:02}.txt").write_text(f"{name} {index} " * 20, encoding="utf-8")
    return tmp_path


def same(one: TrainingData, other: TrainingData) -> bool:
    held = one.held_out.keys() == other.held_out.keys() and all(
        torch.equal(rows, other.held_out[name]) for name, rows in one.held_out.items()
    )
    return torch.equal(one.train, other.train) and held and one.report == other.report


def numbered(first: int, count: int) -> torch.Tensor:
    return torch.arange(first, first + count)[:, None].repeat(1, 2)


def test_a_hit_equals_what_is_made_anew_and_tokenises_nothing(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = recipe / "cache"
    fresh = prepared_rows(SOURCES, BYTES, PLAN, recipe)
    assert same(prepared_rows(SOURCES, BYTES, PLAN, recipe, cache), fresh)
    monkeypatch.setattr(data, "_build", None)  # cannot be called
    assert same(prepared_rows(SOURCES, BYTES, PLAN, recipe, cache), fresh)
    assert [path.is_dir() for path in cache.iterdir()] == [True]


def test_whatever_the_rows_depend_on_changes_the_key(recipe: Path) -> None:
    cache, other = recipe / "cache", train_bpe(["x y"], 257)
    other.backend_tokenizer.add_special_tokens(["<|more|>"])
    changed = recipe / "changed"
    shutil.copytree(recipe / "big", changed / "big")
    shutil.copytree(recipe / "small", changed / "small")
    (changed / "small" / "00.txt").write_text("changed " * 60, encoding="utf-8")
    for count, change in enumerate(
        (
            lambda: prepared_rows(SOURCES, BYTES, PLAN, recipe, cache),
            lambda: prepared_rows(SOURCES, BYTES, PLAN.model_copy(update={"seed": 2}), recipe, cache),
            lambda: prepared_rows((SOURCES[0], TextFiles(path="small", weight=2)), BYTES, PLAN, recipe, cache),
            lambda: prepared_rows(SOURCES, other, PLAN, recipe, cache),
            lambda: (
                (recipe / "small" / "00.txt").write_text("changed " * 60) and prepared_rows(SOURCES, BYTES, PLAN, recipe, cache)
            ),
        ),
        1,
    ):
        change()
        assert len(list(cache.iterdir())) == count


@pytest.mark.parametrize("damage", ["a byte", "cut", "contents", "missing"])
def test_what_is_damaged_is_made_anew_with_a_warning(recipe: Path, damage: str) -> None:
    cache = recipe / "cache"
    fresh = prepared_rows(SOURCES, BYTES, PLAN, recipe, cache)
    (folder,) = cache.iterdir()
    path = folder / (data.CONTENTS if damage == "contents" else "0.npy")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content if damage == "a byte" else content[:-9])
    if damage == "missing":
        path.unlink()
    with pytest.warns(UserWarning, match=rf"the cached data in .*{folder.name} is damaged \(.+\) and is made anew"):
        assert same(prepared_rows(SOURCES, BYTES, PLAN, recipe, cache), fresh)
    assert same(prepared_rows(SOURCES, BYTES, PLAN, recipe, cache), fresh)


def test_a_full_disk_leaves_nothing_behind(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, real, calls = recipe / "cache", np.save, []

    def full(*args: Any, **options: Any) -> None:
        calls.append(args)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*args, **options)

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(OSError, match="No space left on device"):
        prepared_rows(SOURCES, BYTES, PLAN, recipe, cache)
    assert len(calls) == 2
    assert list(cache.iterdir()) == []


def test_rows_are_mapped_and_may_be_written_to_without_changing_the_file(tmp_path: Path) -> None:
    data.save(tmp_path / "key", TrainingData(numbered(0, 3), {}, {"held_rows": {}}))
    for _ in range(2):
        found = data.load(tmp_path / "key")
        assert found is not None
        assert found.train.tolist() == numbered(0, 3).tolist()
        found.train.zero_()


def test_a_tokenizer_that_cannot_be_compared_is_refused(recipe: Path) -> None:
    class Slow:
        eos_token_id = 0

    with pytest.raises(ValueError, match=r"prepared data are kept for tokenizers of the tokenizers package .* found Slow"):
        prepared_rows(SOURCES, Slow(), PLAN, recipe, recipe / "cache")  # type: ignore[arg-type]
