"""Writing to a disk: files and folders that are whole or not there, files of JSON lines that only grow, hashes of contents.

A killed process or a full disk leaves either what was there before or all of what was to be there: everything is written under
a hidden name beside its place, flushed to the disk, and renamed.
"""

import hashlib
import json
import math
import os
import shutil
import uuid
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

DISCARDED = ".discarded"  # the name of a folder that is being removed


CACHE = "SKIPSTONE_CACHE"  # the environment variable that names the folder for what can be made again


def cache_place(*names: str) -> Path | None:
    """Where a file lies that can be made again: below what SKIPSTONE_CACHE says, else below `skipstone` in the user's cache
    folder (that of XDG_CACHE_HOME, else ~/.cache). It need not be there. None where the user has no home."""
    if own := os.environ.get(CACHE):
        return Path(own, *names)
    users = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return Path(users if os.path.isabs(users) else Path.home() / ".cache", "skipstone", *names)
    except RuntimeError:  # of Path.home
        return None


def plain(value: Any) -> Any:
    """The same in what JSON has: tuples as lists, keys as texts, and None for a number that is not finite."""
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def json_line(value: Any) -> str:
    """One line of JSON, the end of the line included."""
    return json.dumps(plain(value), ensure_ascii=False) + "\n"


def digest(value: Any, length: int = 16) -> str:
    """A hash of what JSON can hold, in `length` hexadecimal digits. The order of a mapping's keys does not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:length]


def file_digest(path: Path) -> str:
    """The SHA-256 of a file's content, 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(*paths: Path) -> None:
    """Return when the contents of files, and the lists of what is in folders, are on the disk."""
    for path in paths:
        if path.is_dir() and os.name == "nt":
            continue  # Windows opens no folder
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def publish(written: Path, place: Path) -> None:
    """Give a file or folder that was written under another name its own, all at once, in the place of what bears it."""
    _flush(*written.rglob("*"), written)
    if place.is_dir():
        discard(place)
    os.replace(written, place)
    _flush(place.parent)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file, whole or not at all: until all of it is on the disk, what was there before stays. A text is UTF-8.

    Missing folders on the way are made. One process at a time. What is no plain file (/dev/stdout, a pipe) is written to as it
    is. OSError where the disk is full or the place is not to be written to.
    """
    data = content.encode() if isinstance(content, str) else content
    path = Path(os.path.realpath(path))  # a link stays one
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden = path.with_name(f".{path.name}")  # one name, so that what a killed process left is written over
    try:
        hidden.write_bytes(data)
        publish(hidden, path)
    finally:
        hidden.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write what JSON can hold as a file that people can read, whole or not at all."""
    write_whole(path, json.dumps(value, indent=1) + "\n")


_failed: set[Path] = set()  # cache folders that this process has warned of


def write_cache(path: Path | None, value: Any) -> bool:
    """Write what can be made again, as `write_json` does, and return whether that worked. None is a place that there is not.

    Work goes on without it. A warning, once a process and folder, says that it is done again every time, and why.
    """
    if path is None:
        reason, folder = "there is no home folder", Path()
    else:
        try:
            write_json(path, value)
            return True
        except OSError as error:
            reason, folder = str(error), path.parent
    if folder not in _failed:
        _failed.add(folder)
        warnings.warn(
            f"skipstone cannot keep what it has found out, and finds it out again in every process ({reason}): set {CACHE} to "
            "a folder that can be written to",
            RuntimeWarning,
            stacklevel=2,
        )
    return False


@contextmanager
def hidden_folder(folder: Path, name: str | None = None) -> Iterator[Path]:
    """An empty folder beside `folder` for the block to write into, removed with what is left in it when the block ends. What a
    killed process left under its name goes. name: the hidden folder's own, .NAME of `folder` by default."""
    hidden = folder.with_name(name or f".{folder.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir(parents=True)
    try:
        yield hidden
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A hidden folder that takes the place of `folder`, and of all that was in it, when the block ends without an error."""
    with hidden_folder(folder) as hidden:
        yield hidden
        publish(hidden, folder)


@contextmanager
def first_folder(folder: Path) -> Iterator[Path]:
    """A hidden folder that becomes `folder` when the block ends without an error. Several processes may do so at once: the
    folder is that of the first one to end, the others' are removed."""
    with hidden_folder(folder, f".{folder.name}-{uuid.uuid4().hex}") as hidden:
        yield hidden
        _flush(*hidden.rglob("*"), hidden)
        try:
            os.rename(hidden, folder)
        except OSError:
            if not folder.is_dir():
                raise
        _flush(folder.parent)


def install(hidden: Path, folder: Path, names: Sequence[str]) -> None:
    """Move finished files from a hidden folder to `folder`, which keeps whatever else it holds. The last of them is what tells
    readers that all are there: it is the first to be removed and the last to come."""
    _flush(*hidden.rglob("*"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[-1]).unlink(missing_ok=True)
    for name in names:
        os.replace(hidden / name, folder / name)
    _flush(folder)


def discard(folder: Path) -> None:
    """Remove a folder if it is there: its name first, so that nothing half removed bears it."""
    hidden = folder.with_name(DISCARDED)
    shutil.rmtree(hidden, ignore_errors=True)
    with suppress(FileNotFoundError):
        os.rename(folder, hidden)
        shutil.rmtree(hidden)


def read_lines(path: Path) -> list[Any]:
    """What stands on every whole line of a file of JSON lines. A last line without its end is left out: whoever wrote it was
    killed. ValueError with the number of a line that is damaged."""
    found = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            found.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is damaged: {error}") from error
    return found


class LineFile:
    """A file of JSON lines that only grows, each on the disk before the next begins, so that a killed run loses nothing but the
    line that it was writing. Its first line says what it is about. One process writes at a time. `with` closes it.

    Whoever opens it reads its lines (`read_lines`) and then either begins it or goes on with it.
    """

    def __init__(self, path: Path) -> None:
        """Open a file, made if it is not there. ValueError where another process writes it."""
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
        """Write the first line in the place of all that was there. refusal: the ValueError's text where that does not look like
        the beginning of such a line, None to begin anew in any case."""
        name, value = next(iter(head.items()))
        beginning = json_line({name: value}).rstrip("}\n").encode()
        there = self.path.read_bytes()[: len(beginning)]
        if refusal is not None and not beginning.startswith(there):
            raise ValueError(refusal)
        self._file.truncate(0)
        self.add(head)

    def go_on(self) -> None:
        """Cut off the line that a killed run was writing."""
        data = self.path.read_bytes()
        self._file.truncate(data.rfind(b"\n") + 1)

    def add(self, *lines: Any) -> None:
        """Write lines; when this returns, they are on the disk. OSError where the disk is full: what was there stays whole."""
        self._file.write("".join(map(json_line, lines)).encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Let others write."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
