"""A cache of quantised panels on the disk: one file for each checkpoint and quantisation, which processes map and share.

A file is the panels of all matrices at multiples of 64 bytes, then an index in JSON, then `END`. The index has a place and a
checksum for every matrix. Reading checks the index and the size of a file. Only `damaged` reads the panels.
"""

import json
import mmap
import os
import shutil
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from skipstone.utils.files import cache_place, digest, warn_of_cache

if TYPE_CHECKING:
    from torch import Tensor

VERSION = 1  # of the files and of the panels' layout
FOLDER = "packed"  # of the cache folder
SUFFIX = ".panels"
MARK = b"skippack"  # the end of a whole file
END = struct.Struct("<QI8s")  # number of the index's bytes, their checksum, MARK
LIMIT_VARIABLE = "SKIPSTONE_PACKED_BYTES"
"""Environment variable for the limit of all files together. The files that were not used for longest are removed first."""
LIMIT_BYTES = 32 << 30
"""The default of this limit: six models of 8B in int4."""
DISK_RESERVE_BYTES = 1 << 30
"""Bytes that stay free on the disk."""
STALE_SECONDS = 24 * 3600
"""An unfinished file of this age was left by a killed process."""
PIECE_BYTES = 4 << 20
"""Bytes that are written at a time."""
FLUSH_BYTES = 64 << 20
"""Bytes that are written between two flushes, so that none takes long."""


class LimitError(Exception):
    """The limit of all files together is too small, or no number."""


class Entry(NamedTuple):
    """A file of the cache. about: what it was made of, and the `VERSION` of that time; empty if the file is not whole.
    used: time of the last use, in seconds since the epoch."""

    path: Path
    size: int
    used: float
    about: dict[str, Any]


class CachedPanels:
    """The panels of a cached file, handed out in the order in which they were packed."""

    is_filled = True

    def __init__(self, pages: mmap.mmap, matrices: Sequence[Sequence[int]]) -> None:
        import torch  # which listing the files does not need

        from skipstone.models.weight_files import read_only_buffers

        with read_only_buffers():
            self._bytes = torch.frombuffer(pages, dtype=torch.uint8)
        self._matrices = iter(matrices)

    def take(self, size: int) -> "Tensor":
        """[size] uint8, of the next matrix. LookupError if its panels have another size."""
        offset, stored, _ = next(self._matrices, (0, -1, 0))
        if stored != size:
            raise LookupError("a cached file has panels of other sizes")
        return self._bytes[offset : offset + size]


def path_of(identity: Any, quantize: str) -> Path | None:
    """The path of the panels of some weight files (`WeightFiles.identity`); None if there is no cache folder."""
    return cache_place(FOLDER, digest([VERSION, identity, quantize], 32) + SUFFIX)


def has(identity: Any, quantize: str) -> bool:
    """Whether there is a file, which may be damaged."""
    place = path_of(identity, quantize)
    return place is not None and place.is_file()


def read(identity: Any, quantize: str) -> CachedPanels | None:
    """The cached panels, mapped; None if there are none, or a file that is not whole or of something else."""
    place = path_of(identity, quantize)
    try:
        if place is None or (index := _index(place))["version"] != VERSION or index["identity"] != identity:
            return None
        with place.open("rb") as file:
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        with suppress(OSError):  # a folder of another user
            os.utime(place)
        return CachedPanels(pages, index["matrices"])
    except (OSError, ValueError):
        return None


def write(
    identity: Any, quantize: str, model: str, panels: "Sequence[Tensor]", before_piece: Callable[[int], None] = lambda _: None
) -> bool:
    """Write panels in the order of packing. Returns whether that worked: a full disk, a read-only folder, a missing home or a
    small limit cause one warning. model: a folder or hub id, for listings. before_piece: called before a piece is written, with
    its number of bytes."""
    place, size = path_of(identity, quantize), sum(len(one) + 64 for one in panels)
    folder = Path() if place is None else place.parent
    about = {"version": VERSION, "model": model, "identity": identity, "quantize": quantize}
    try:
        if place is None:
            raise OSError(0, "there is no home folder")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_room(place, size)
        handle, hidden = tempfile.mkstemp(prefix=".", suffix=SUFFIX, dir=folder)
        try:
            with os.fdopen(handle, "wb") as file:
                _write_panels(file, about, panels, before_piece)
                _flush(file)
            os.replace(hidden, place)
        finally:
            Path(hidden).unlink(missing_ok=True)
        return True
    except LimitError as error:
        warn_of_cache(folder, str(error), f"set {LIMIT_VARIABLE} to a larger number of bytes")
    except OSError as error:
        warn_of_cache(folder, str(error.strerror or error))
    return False


def _write_panels(file: Any, about: dict[str, Any], panels: "Sequence[Tensor]", before_piece: Callable[[int], None]) -> None:
    matrices, flushed = [], 0
    for one in panels:
        data: Any = one.numpy()
        begin, checksum = file.tell(), 0
        for first in range(0, len(data), PIECE_BYTES):
            piece = data[first : first + PIECE_BYTES]
            before_piece(len(piece))
            checksum = zlib.crc32(piece, checksum)
            file.write(piece)
            if file.tell() - flushed >= FLUSH_BYTES:
                _flush(file)
                flushed = file.tell()
        matrices.append((begin, len(one), checksum))
        file.write(b"\0" * (-len(one) % 64))
    index = json.dumps(about | {"size": file.tell(), "matrices": matrices}).encode()
    file.write(index + END.pack(len(index), zlib.crc32(index), MARK))


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _index(path: Path) -> dict[str, Any]:
    """The index of a whole file, of any version. OSError or ValueError for any other."""
    with path.open("rb") as file:
        end = file.seek(-END.size, os.SEEK_END)
        length, checksum, mark = END.unpack(file.read())
        if mark != MARK or length > end:
            raise ValueError("not the end of a cached file")
        file.seek(end - length)
        data = file.read(length)
    if zlib.crc32(data) != checksum:
        raise ValueError("a damaged index")
    index = json.loads(data)
    if index["size"] != end - length:
        raise ValueError("another size")
    return index


def _make_room(place: Path, size: int) -> None:
    """Remove the entries that were not used for longest, down to the limit. place: of the entry that will be replaced.

    OSError if the disk is too small; LimitError if the limit is."""
    value = os.environ.get(LIMIT_VARIABLE) or str(LIMIT_BYTES)
    if not value.isdecimal():
        raise LimitError(f"{LIMIT_VARIABLE} is {value!r}, no number of bytes")
    if size > int(value):
        raise LimitError(f"{LIMIT_VARIABLE} allows {value} bytes, and the panels have {size}")
    for left in unfinished():
        with suppress(FileNotFoundError):  # another process has removed or renamed it
            if time.time() - left.stat().st_mtime > STALE_SECONDS:
                left.unlink()
    kept = sorted((one for one in entries() if one.path != place), key=lambda one: one.used)
    while kept and sum(one.size for one in kept) + size > int(value):
        kept.pop(0).path.unlink(missing_ok=True)
    if shutil.disk_usage(place.parent).free < size + DISK_RESERVE_BYTES:
        raise OSError(0, f"the disk has no {size + DISK_RESERVE_BYTES} bytes left")


def entries() -> Iterator[Entry]:
    """All finished files of the cache."""
    folder = cache_place(FOLDER)
    for path in sorted(folder.glob(f"[!.]*{SUFFIX}")) if folder is not None else ():
        try:
            state, about = path.stat(), {}
        except FileNotFoundError:  # another process has removed it
            continue
        with suppress(OSError, ValueError):
            about = _index(path)
        yield Entry(path, state.st_size, state.st_mtime, about)


def unfinished() -> list[Path]:
    """The files that processes are writing, or that killed processes left."""
    folder = cache_place(FOLDER)
    return [] if folder is None else sorted(folder.glob(f".*{SUFFIX}"))


def damaged(entry: Entry) -> list[int]:
    """The numbers of the matrices whose checksum is wrong; [-1] if the file is not whole. It reads the whole file."""
    if not entry.about:
        return [-1]
    with entry.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        matrices = enumerate(entry.about["matrices"])
        return [number for number, (begin, size, checksum) in matrices if zlib.crc32(pages[begin : begin + size]) != checksum]
