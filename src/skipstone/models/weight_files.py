"""The safetensors files of a checkpoint. They are mapped, so a tensor is read from the disk when its values are used."""

import json
import mmap
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from skipstone.models.mapped_files import MappedFiles

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""Names of a checkpoint's only file, and of the list of its files."""
LENGTH_BYTES = 8  # of the number of the header's bytes, at the beginning of a file
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Dtypes of weights by their names in a header."""
BLOCK_BYTES = 4 << 20
"""Bytes of a tensor that are read at a time."""


@contextmanager
def read_only_buffers() -> Iterator[None]:
    """Inside the block, torch does not warn of buffers that nobody may write into."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        yield


class FilePlace(NamedTuple):
    """Where the values of a tensor begin. file: a descriptor. offset: in bytes."""

    file: int
    offset: int


class WeightFiles(MappedFiles):
    """The tensors of some safetensors files by name. OSError for a file that cannot be read; safetensors' own error for another
    kind of file.

    identity: paths, sizes, times of the last change in nanoseconds, and hashes of the headers, as plain JSON values.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        super().__init__(paths)
        self._headers = [*map(_header, self.handles)]
        self.identity = self.identity_with(self._headers)
        for path in self.paths:
            safe_open(path, "pt")  # checks the header; its tensors would be read ahead from the disk
        self._places = {
            name: FilePlace(handle, LENGTH_BYTES + len(header) + about["data_offsets"][0])
            for handle, header in zip(self.handles, self._headers, strict=True)
            for name, about in json.loads(header).items()
            if name != "__metadata__"
        }
        self._tensors = self.mapped()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> Tensor:
        """A tensor in the memory of the mapped file. KeyError for an unknown name, and for a dtype that is not in DTYPES."""
        return self._tensors[name]

    def file_place(self, name: str) -> FilePlace:
        """Where a tensor is. The descriptor is open as long as this object lives. KeyError for an unknown name."""
        return self._places[name]

    @read_only_buffers()
    def mapped(self) -> dict[str, Tensor]:
        """The tensors of DTYPES in new mappings, which bring only those pages into memory that are read."""
        found = {}
        for handle, header in zip(self.handles, self._headers, strict=True):
            pages = mmap.mmap(handle, 0, access=mmap.ACCESS_READ)
            pages.madvise(mmap.MADV_RANDOM)
            for name, about in json.loads(header).items():
                if (dtype := DTYPES.get(about.get("dtype", ""))) is not None and (begin := about["data_offsets"])[0] < begin[1]:
                    place = LENGTH_BYTES + len(header) + begin[0]
                    count = (begin[1] - begin[0]) // dtype.itemsize
                    found[name] = torch.frombuffer(pages, dtype=dtype, count=count, offset=place).view(about["shape"])
        return found

    def are_equal(self, name: str, other: str) -> bool:
        """Whether two tensors have the same dtype, shape and bytes. Their mapped pages are not read. KeyError for an unknown
        name."""
        one, two = self[name], self[other]
        if (one.dtype, one.shape) != (two.dtype, two.shape):
            return False
        (file, begin), (other_file, other_begin) = self._places[name], self._places[other]
        for first in range(0, one.nbytes, BLOCK_BYTES):
            size = min(BLOCK_BYTES, one.nbytes - first)
            if os.pread(file, size, begin + first) != os.pread(other_file, size, other_begin + first):
                return False
        return True

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self._places)


def weight_files(folder: Path) -> WeightFiles:
    """The weights of a checkpoint in a folder. OSError without safetensors files."""
    index = folder / INDEX
    if not (folder / SINGLE).exists() and index.exists():
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return WeightFiles(folder / name for name in dict.fromkeys(names))
    return WeightFiles([folder / SINGLE])


def _header(handle: int) -> bytes:
    """The JSON that describes a file's tensors."""
    size = int.from_bytes(os.pread(handle, LENGTH_BYTES, 0), "little")
    return os.pread(handle, min(size, os.fstat(handle).st_size), LENGTH_BYTES)
