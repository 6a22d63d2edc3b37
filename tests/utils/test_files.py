"""Writing to a disk: whole or not at all, line by line with nothing lost but a torn line, and by one process at a time."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from skipstone.utils import files
from skipstone.utils.files import LineFile, read_lines


class Planted(Exception):
    """A failure of a test's own."""


@contextmanager
def failing(name: str) -> Iterator[None]:
    """A disk that is full when one function of `os` is called."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, name, refuse)
        yield


def tree(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


class TestFile:
    @pytest.mark.parametrize("place", ["fsync", "replace"])
    def test_a_failure_leaves_what_was_there_and_nothing_else(self, tmp_path: Path, place: str) -> None:
        path = tmp_path / "file"
        for before in ({}, {"file": "old"}):
            if before:
                files.write_whole(path, "old")
            with failing(place), pytest.raises(OSError, match="No space left"):
                files.write_whole(path, "new")
            assert tree(tmp_path) == before
        (tmp_path / ".file").write_text("what a killed process left")
        files.write_whole(path, "näu")
        assert {name: (tmp_path / name).read_bytes() for name in tree(tmp_path)} == {"file": "näu".encode()}
        files.write_whole(path, b"\x00")
        assert path.read_bytes() == b"\x00"

    def test_a_link_stays_one_and_what_is_no_file_is_written_to(self, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(tmp_path / "file")
        files.write_whole(tmp_path / "link", "new")
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "file").read_text() == "new"
        files.write_whole(Path("/dev/null"), "new")
        assert not Path("/dev/null").is_file()

    def test_folders_on_the_way_are_made(self, tmp_path: Path) -> None:
        files.write_whole(tmp_path / "no" / "where" / "file", "new")
        assert files.write_cache(tmp_path / "no" / "cache.json", {"a": 1})
        assert tree(tmp_path) == {"no/where/file": "new", "no/cache.json": '{\n "a": 1\n}\n'}


class TestCache:
    def test_a_place_is_below_the_folder_that_is_named_or_the_users_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SKIPSTONE_CACHE", "/own")
        assert files.cache_place("kind", "name") == Path("/own/kind/name")
        monkeypatch.delenv("SKIPSTONE_CACHE")
        monkeypatch.setenv("XDG_CACHE_HOME", "/users")
        assert files.cache_place("kind") == Path("/users/skipstone/kind")
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", "/home/me")
        assert files.cache_place("kind") == Path("/home/me/.cache/skipstone/kind")

    def test_a_place_that_cannot_be_written_to_is_said_once_with_the_remedy(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        for place in (tmp_path / "file" / "folder" / "one.json", None):
            with pytest.warns(RuntimeWarning, match="SKIPSTONE_CACHE"):
                assert not files.write_cache(place, {})
            assert not files.write_cache(place, {}), "the second time without a warning, which would be an error"


class TestFolder:
    @pytest.mark.parametrize("place", ["inside", "fsync", "rename", "replace"])
    def test_a_failure_leaves_what_was_there_and_nothing_else(self, tmp_path: Path, place: str) -> None:
        folder = tmp_path / "deep" / "folder"
        full = failing(place) if place != "inside" else failing("nice")
        with full, pytest.raises((OSError, Planted)), files.whole_folder(folder) as made:  # noqa: PT012
            (made / "file").write_text("new")
            if place in ("inside", "rename"):  # nothing is there that would be renamed away
                raise Planted
        assert tree(tmp_path) == {}
        assert list(folder.parent.iterdir()) == []

    def test_the_new_one_takes_the_place_of_all_that_was_there(self, tmp_path: Path) -> None:
        for content in ("old", "new"):
            with files.whole_folder(tmp_path / "folder") as made:
                (made / content).write_text(content)
                assert "folder/new" not in tree(tmp_path)
        assert tree(tmp_path) == {"folder/new": "new"}

    def test_installed_files_leave_others_alone_and_the_last_one_vouches_for_all(self, tmp_path: Path) -> None:
        folder = tmp_path / "folder"
        folder.mkdir()
        for name in ("weights", "card", "readme"):
            (folder / name).write_text("old")
        with files.hidden_folder(folder) as made:
            for name in ("weights", "card"):
                (made / name).write_text("new")
            with failing("replace"), pytest.raises(OSError, match="No space left"):
                files.install(made, folder, ("weights", "card"))
            assert not (folder / "card").exists()
            files.install(made, folder, ("weights", "card"))
        assert tree(tmp_path) == {"folder/card": "new", "folder/readme": "old", "folder/weights": "new"}

    def test_what_is_half_removed_has_no_name(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "folder").mkdir()
        monkeypatch.setattr(files.shutil, "rmtree", lambda *_, **__: None)
        files.discard(tmp_path / "folder")
        assert os.listdir(tmp_path) == [files.DISCARDED]
        monkeypatch.undo()
        (tmp_path / "folder").mkdir()
        files.discard(tmp_path / "folder")
        files.discard(tmp_path / "folder")
        assert os.listdir(tmp_path) == []


HEAD = {"kind": "run", "version": 1}


class TestLines:
    def test_a_torn_line_is_left_out_and_cut_off(self, tmp_path: Path) -> None:
        path = tmp_path / "lines"
        with LineFile(path) as file:
            file.begin(HEAD, "refused")
            file.add({"a": "é\u2028"}, {"b": (1, float("inf"))})
        whole = path.read_bytes()
        assert read_lines(path) == [HEAD, {"a": "é\u2028"}, {"b": [1, None]}]
        for cut in range(1, len(whole) + 1):
            path.write_bytes(whole[:-cut])
            kept = read_lines(path)
            with LineFile(path) as file:
                file.go_on()
                file.add({"c": 0})
            assert read_lines(path) == [*kept, {"c": 0}]

    def test_only_a_torn_beginning_of_its_own_is_begun_anew(self, tmp_path: Path) -> None:
        path = tmp_path / "lines"
        for there in ("", '{"ki', '{"kind": "run", "version": 2}\n'):
            path.write_text(there)
            with LineFile(path) as file:
                file.begin(HEAD, "refused")
            assert read_lines(path) == [HEAD]
        for there in ("notes of mine", '{"kind": "other"}\n', "\n"):
            path.write_text(there)
            with LineFile(path) as file, pytest.raises(ValueError, match="refused"):
                file.begin(HEAD, "refused")
            assert path.read_text() == there
        with LineFile(path) as file:
            file.begin(HEAD, None)
        assert read_lines(path) == [HEAD]

    def test_one_process_writes_at_a_time(self, tmp_path: Path) -> None:
        with LineFile(tmp_path / "lines"), pytest.raises(ValueError, match="lines is being written by another run"):
            LineFile(tmp_path / "lines")
        LineFile(tmp_path / "lines").close()

    def test_a_damaged_line_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "lines"
        path.write_text('{"kind": "run"}\n{"kind": "ru\n{}\n')
        with pytest.raises(ValueError, match="lines, line 2 is damaged"):
            read_lines(path)


def test_digests_tell_values_apart_and_not_orders_of_keys(tmp_path: Path) -> None:
    assert files.digest({"a": 1, "b": [2]}) == files.digest({"b": [2], "a": 1}) != files.digest({"a": 1, "b": [3]})
    assert len(files.digest([], 32)) == 32
    (tmp_path / "file").write_bytes(b"abc")
    assert files.file_digest(tmp_path / "file") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
