"""Files that stay open and mapped while a model uses their weights."""

import errno
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from weakref import finalize


class MappedFiles:
    """Open files. Their tensors are read when they are used. OSError for a file that cannot be opened.

    handles: descriptors, open as long as this object lives.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self.paths = [path.resolve() for path in paths]
        self.handles: list[int] = []
        for path in self.paths:
            self.handles.append(os.open(path, os.O_RDONLY))
            finalize(self, os.close, self.handles[-1])
        self._states = [_state(os.fstat(handle)) for handle in self.handles]

    def identity_with(self, headers: Iterable[bytes | memoryview]) -> list[list[str | int]]:
        """Paths, sizes, times of the last change in nanoseconds, and hashes of the headers, as plain JSON values."""
        return [
            [str(path), size, changed, hashlib.sha256(header).hexdigest()]
            for path, (_, size, changed), header in zip(self.paths, self._states, headers, strict=True)
        ]

    def are_unwritten(self) -> bool:
        """Whether nobody has written into the mapped files. Other files may have taken their paths. Pages that are overwritten
        with the old time of the last change are not seen."""
        return [_state(os.fstat(handle)) for handle in self.handles] == self._states

    def is_current(self) -> bool:
        """Whether the paths still lead to the files that were opened, and nobody has written into them."""
        try:
            return [_state(path.stat()) for path in self.paths] == self._states
        except OSError:
            return False


def read_bytes(file: int, begin: int, size: int) -> bytearray:
    """Some bytes of an open file, in memory of their own. A mapping would bring their neighbours into memory, up to 2 MB.
    OSError if the file is too short."""
    found, done = bytearray(size), 0
    while done < size:
        count = os.preadv(file, [memoryview(found)[done:]], begin + done)  # at most 2 GB
        if not count:
            raise OSError(errno.EIO, f"a weight file has {begin + done} bytes, expected {begin + size}: it was cut off")
        done += count
    return found


def _state(found: os.stat_result) -> tuple[int, int, int]:
    """(inode, size in bytes, time of the last change in nanoseconds)"""
    return found.st_ino, found.st_size, found.st_mtime_ns
