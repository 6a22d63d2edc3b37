"""Atomic writes of files and folders, append-only files of JSON lines, cache folders, hashes of contents.

After a crash or on a full disk, a file has either all of the old or all of the new content. Everything is written under a
hidden name in the same folder, flushed to the disk, and renamed.
"""

import hashlib
import json
import math
import os
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Self

DISCARDED = ".discarded"  # temporary name of a folder during its removal
CACHE = "SKIPSTONE_CACHE"  # environment variable with the cache folder


def cache_place(*names: str) -> Path | None:
    """The path of a cache file, which may not exist. None if the user has no home.

    It is in the folder SKIPSTONE_CACHE, else in `skipstone` in the user's cache folder (XDG_CACHE_HOME, else ~/.cache)."""
    if folder := os.environ.get(CACHE):
        return Path(folder, *names)
    users = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return Path(users if os.path.isabs(users) else Path.home() / ".cache", "skipstone", *names)
    except RuntimeError:  # of Path.home
        return None


def plain(value: Any) -> Any:
    """The value in JSON's types: tuples as lists, keys as texts, and None for a number that is not finite."""
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def json_line(value: Any, dense: bool = False) -> str:
    """One line of JSON, the end of the line included. dense: without blanks."""
    return json.dumps(plain(value), ensure_ascii=False, separators=(",", ":") if dense else None) + "\n"


def digest(value: Any, length: int = 16) -> str:
    """A hash of a JSON value, in `length` hexadecimal digits. The order of a mapping's keys does not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:length]


def file_digest(path: Path) -> str:
    """The SHA-256 of a file's content, 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(*paths: Path) -> None:
    """Return when the contents of files and the entries of folders are on the disk."""
    for path in paths:
        if path.is_dir() and os.name == "nt":
            continue  # Windows opens no folder
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def publish(written: Path, place: Path) -> None:
    """Rename a finished file or folder to its place, atomically. It replaces an old one."""
    _flush(*written.rglob("*"), written)
    if place.is_dir():
        discard(place)
    os.replace(written, place)
    _flush(place.parent)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file atomically. Texts are UTF-8. Missing folders are created. OSError if the file cannot be written.

    One process at a time may write a file. Devices and pipes such as /dev/stdout are written to directly.
    """
    data = content.encode() if isinstance(content, str) else content
    path = Path(os.path.realpath(path))  # symbolic links are kept
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden = path.with_name(f".{path.name}")  # always one name, so that leftovers of killed processes are overwritten
    try:
        hidden.write_bytes(data)
        publish(hidden, path)
    finally:
        hidden.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write an indented JSON value atomically."""
    write_whole(path, json.dumps(value, indent=1) + "\n")


@cache
def warn_of_cache(folder: Path, reason: str, remedy: str = f"set {CACHE} to a writable folder") -> None:
    """Warn, once per process, folder and reason, that a cache cannot be written."""
    warnings.warn(
        f"skipstone cannot write its cache in {folder} ({reason}), and computes the content again in every process: {remedy}",
        RuntimeWarning,
        stacklevel=3,
    )


def write_cache(path: Path | None, value: Any) -> bool:
    """Write a cache file like `write_json`. Returns whether that worked. path: None if the user has no cache folder.

    A failure causes a warning, once per process, folder and reason.
    """
    try:
        if path is None:
            raise OSError(0, "there is no home folder")
        write_json(path, value)
        return True
    except OSError as error:
        warn_of_cache(Path() if path is None else path.parent, str(error.strerror))
        return False


@contextmanager
def hidden_folder(folder: Path) -> Iterator[Path]:
    """An empty folder next to `folder` for the block to write into. It is removed when the block ends.

    What a killed process left under its name is removed first."""
    hidden = folder.with_name(f".{folder.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir(parents=True)
    try:
        yield hidden
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A hidden folder that replaces `folder` and its content when the block ends without an error."""
    with hidden_folder(folder) as hidden:
        yield hidden
        publish(hidden, folder)


def install(hidden: Path, folder: Path, names: Sequence[str]) -> None:
    """Move finished files from a hidden folder to `folder`, which keeps its other files. The last file tells readers that all
    are there: it is removed first and moved last."""
    _flush(*hidden.rglob("*"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[-1]).unlink(missing_ok=True)
    for name in names:
        os.replace(hidden / name, folder / name)
    _flush(folder)


def discard(folder: Path) -> None:
    """Remove a folder if it exists. It is renamed first, so that no folder of this name is ever half removed."""
    hidden = folder.with_name(DISCARDED)
    shutil.rmtree(hidden, ignore_errors=True)
    with suppress(FileNotFoundError):
        os.rename(folder, hidden)
        shutil.rmtree(hidden)


def read_lines(path: Path) -> list[Any]:
    """The values of all whole lines of a file of JSON lines. A last line without its end is left out, because its writer was
    killed. ValueError with the number of a line that is damaged."""
    values = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            values.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is damaged: {error}") from error
    return values


class LineFile:
    """A file of JSON lines that only grows. Each line is on the disk before the next begins, so a killed run loses only the
    line that it was writing. The first line describes the file. One process writes at a time. `with` closes it.

    After opening it, read its lines (`read_lines`), and then either begin it or go on with it.
    """

    def __init__(self, path: Path) -> None:
        """Open a file; a missing one is made. ValueError if another process writes it."""
        import fcntl  # not on Windows, where methods that write no such file run as well

        self.path = path
        self._file = path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise ValueError(f"{path} is being written by another run") from error
        except OSError:  # such as a file system without locks
            self.close()
            raise

    def begin(self, head: dict[str, Any], refusal: str | None) -> None:
        """Replace the old content with the first line. refusal: text of the ValueError if the old content is not the beginning
        of such a line; None to replace any content."""
        name, value = next(iter(head.items()))
        beginning = json_line({name: value}).rstrip("}\n").encode()
        old = self.path.read_bytes()[: len(beginning)]
        if refusal is not None and not beginning.startswith(old):
            raise ValueError(refusal)
        self._file.truncate(0)
        self.add(head)

    def go_on(self) -> None:
        """Cut off the line that a killed run was writing."""
        data = self.path.read_bytes()
        self._file.truncate(data.rfind(b"\n") + 1)

    def add(self, *lines: Any) -> None:
        """Write lines; when this returns, they are on the disk. OSError if the disk is full; the old lines stay whole."""
        self._file.write("".join(map(json_line, lines)).encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file, so that other processes may write it."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
