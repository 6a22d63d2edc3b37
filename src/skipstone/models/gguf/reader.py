"""Reads GGUF files: parameters, and where each tensor lies. The files are mapped, and nothing in them is trusted.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import errno
import mmap
import re
import struct
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from skipstone.models.mapped_files import MappedFiles

SUFFIX = ".gguf"
MAGIC = b"GGUF"
"""The first bytes of every GGUF file."""
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32
"""Bytes; every tensor begins at a multiple."""
PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")
"""The end of a split file's name."""


class BlockType(NamedTuple):
    """How a tensor's values are stored. number: in files. inputs, nbytes: of a block, which is a part of a row."""

    number: int
    inputs: int
    nbytes: int


BLOCK_TYPES = {
    "F32": BlockType(0, 1, 4),
    "F16": BlockType(1, 1, 2),
    "BF16": BlockType(30, 1, 2),
    "F64": BlockType(28, 1, 8),
    "I8": BlockType(24, 1, 1),
    "I16": BlockType(25, 1, 2),
    "I32": BlockType(26, 1, 4),
    "I64": BlockType(27, 1, 8),
    "Q4_0": BlockType(2, 32, 18),
    "Q4_1": BlockType(3, 32, 20),
    "Q5_0": BlockType(6, 32, 22),
    "Q5_1": BlockType(7, 32, 24),
    "Q8_0": BlockType(8, 32, 34),
    "Q8_1": BlockType(9, 32, 40),
    "Q2_K": BlockType(10, 256, 84),
    "Q3_K": BlockType(11, 256, 110),
    "Q4_K": BlockType(12, 256, 144),
    "Q5_K": BlockType(13, 256, 176),
    "Q6_K": BlockType(14, 256, 210),
    "Q8_K": BlockType(15, 256, 292),
    "IQ2_XXS": BlockType(16, 256, 66),
    "IQ2_XS": BlockType(17, 256, 74),
    "IQ3_XXS": BlockType(18, 256, 98),
    "IQ1_S": BlockType(19, 256, 50),
    "IQ4_NL": BlockType(20, 32, 18),
    "IQ3_S": BlockType(21, 256, 110),
    "IQ2_S": BlockType(22, 256, 82),
    "IQ4_XS": BlockType(23, 256, 136),
    "IQ1_M": BlockType(29, 256, 56),
    "TQ1_0": BlockType(34, 256, 54),
    "TQ2_0": BlockType(35, 256, 66),
    "MXFP4": BlockType(39, 32, 17),
    "NVFP4": BlockType(40, 64, 36),
    "Q1_0": BlockType(41, 128, 18),
    "Q2_0": BlockType(42, 64, 18),
}
"""All types that files may have today, by ggml's names."""
_NAMES = {kind.number: name for name, kind in BLOCK_TYPES.items()}
_NUMBERS = dict(enumerate(("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?"))) | {10: "<u8", 11: "<i8", 12: "<f8"}
"""NumPy's names of the types of numbers in the metadata."""
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")


class GgufError(ValueError):
    """What is wrong with a GGUF file, and the remedy."""


class StoredTensor(NamedTuple):
    """A tensor of a file.

    kind: a name in BLOCK_TYPES. shape: (..., outputs, inputs). file: descriptor, open as long as `GgufFile.files` lives.
    offset: of the first byte in the file. data: [nbytes] uint8 in the mapped file.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    file: int
    offset: int
    nbytes: int
    data: NDArray[np.uint8]


class GgufFile:
    """A model in a GGUF file, or in several that are named MODEL-00001-of-00003.gguf. GgufError for a damaged one, OSError for
    one that cannot be opened.

    path: as it was given. metadata: int, float, bool or str by key; arrays of numbers as NumPy arrays, arrays of strings as
    list[bytes]. tensors: by name. files: the open files; tensors need them. identity: as in `WeightFiles`.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.files = path, MappedFiles(_siblings(path))
        headers = [_Header(path, handle) for path, handle in zip(self.files.paths, self.files.handles, strict=True)]
        self.identity = self.files.identity_with(memoryview(header.pages)[: header.position] for header in headers)
        self.metadata = headers[0].metadata
        self.tensors: dict[str, StoredTensor] = {}
        for index, header in enumerate(headers):
            header.expect_part(index, len(headers))
            for name, tensor in header.tensors.items():
                if name in self.tensors:
                    raise header.damaged(f"it has {name!r} twice")
                self.tensors[name] = tensor
        if headers[0].integer("split.tensors.count", len(self.tensors)) != len(self.tensors):
            raise headers[0].damaged("its parts have another number of tensors than it says")

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the model's type; empty if the file has none."""
        return str(self.metadata.get("general.architecture", ""))


def expect_gguf(path: Path) -> None:
    """OSError for a file that is no GGUF file."""
    if path.suffix != SUFFIX:
        raise NotADirectoryError(errno.ENOTDIR, f"a model is a folder, this is a file that does not end in {SUFFIX}", str(path))
    with path.open("rb") as file:
        start = file.read(len(MAGIC))
    if start != MAGIC:
        raise OSError(errno.EINVAL, f"not a GGUF file, it begins with {start!r}, expected {MAGIC!r}", str(path))


def _siblings(path: Path) -> list[Path]:
    """All files of a model. path: of any of them. GgufError if one is missing."""
    match = PART.search(path.name)
    count = int(match[1]) if match else 1
    if match is None or count < 2:
        return [path]
    found = []
    for number in range(1, count + 1):
        found.append(path.with_name(f"{path.name[: match.start()]}-{number:05}-of-{count:05}.gguf"))
        if not found[-1].exists():
            raise GgufError(f"the GGUF file {path} needs {found[-1].name}: put it into the same folder")
    return found


class _Header:
    """Reads the metadata and the list of tensors. pages: the mapped file. position: in bytes, where the next value begins."""

    def __init__(self, path: Path, handle: int) -> None:
        self._path, self.position = path, 0
        try:
            self.pages = mmap.mmap(handle, 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise self.damaged("it is empty") from None
        if (start := self._take(len(MAGIC))) != MAGIC:
            raise GgufError(f"the file {path} begins with {start!r}, a GGUF file with {MAGIC!r}: give another file")
        self._expect_version()
        num_tensors, num_values = self._length(), self._length()
        self.metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._name(self.metadata)
            self.metadata[key] = self._value(self._integer())
        self.tensors = self._tensors(handle, num_tensors)
        self.pages.madvise(mmap.MADV_RANDOM)

    def damaged(self, fact: str) -> GgufError:
        """The error about this file. fact: a sentence about it."""
        return GgufError(f"the GGUF file {self._path} is cut off or damaged, {fact}: fetch it again")

    def integer(self, key: str, default: int) -> int:
        """An integer of the metadata, the default if the key is missing."""
        value = self.metadata.get(key, default)
        if type(value) is not int:
            raise self.damaged(f"its {key} is no integer")
        return value

    def expect_part(self, index: int, count: int) -> None:
        """GgufError unless the file is one of count files, index counted from 0."""
        said = self.integer("split.no", 0), self.integer("split.count", 0) or 1
        if said != (index, count):
            named = f"its name says part {index + 1} of {count}, its contents part {said[0]} (from 0) of {said[1]}"
            raise GgufError(
                f"the GGUF file {self._path} is misnamed, {named}: give it its former name, next to the other parts"
            )

    def _expect_version(self) -> None:
        version = self._integer()
        if version & 0xFFFF == 0:
            raise GgufError(f"the GGUF file {self._path} is for big-endian machines: fetch a little-endian one")
        if version not in VERSIONS:
            raise GgufError(
                f"the GGUF file {self._path} has version {version}, supported are {VERSIONS}: convert the model again"
            )

    def _skip(self, size: int) -> int:
        """Go past some bytes, after a check that the file has them. Returns where they begin."""
        begin = self.position
        if size > len(self.pages) - begin:
            raise self.damaged(f"{size} bytes are expected at {begin}, it has {len(self.pages)}")
        self.position += size
        return begin

    def _take(self, size: int) -> bytes:
        begin = self._skip(size)
        return self.pages[begin : self.position]

    def _integer(self) -> int:
        return int.from_bytes(self._take(4), "little")

    def _length(self) -> int:
        return int.from_bytes(self._take(8), "little")

    def _name(self, others: dict[str, Any]) -> str:
        """A key or a tensor's name, which none of the others may have."""
        try:
            name = self._take(self._length()).decode()
        except UnicodeDecodeError:
            raise self.damaged(f"it has a name of no UTF-8 before {self.position}") from None
        if name in others:
            raise self.damaged(f"it has {name!r} twice")
        return name

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._take(self._length()).decode(errors="replace")
        if kind != _ARRAY:
            value = self._numbers(kind, 1)[0]
            return float(str(value)) if value.dtype == np.float32 else value.item()  # 1e-6 as it was before it was rounded
        kind, count = self._integer(), self._length()
        return self._strings(count) if kind == _STRING else self._numbers(kind, count)

    def _numbers(self, kind: int, count: int) -> NDArray[Any]:
        if kind not in _NUMBERS:
            raise self.damaged(f"it has a value of the unknown type {kind} before {self.position}")
        dtype = np.dtype(_NUMBERS[kind])
        return np.frombuffer(self.pages, dtype, count, self._skip(count * dtype.itemsize))

    def _strings(self, count: int) -> list[bytes]:
        pages, position, found = self.pages, self.position, []
        begins_of_last = len(pages) - _LENGTH.size
        for _ in range(count):  # a vocabulary has hundreds of thousands: no calls
            if position > begins_of_last:
                break
            begin = position + _LENGTH.size
            position = begin + _LENGTH.unpack_from(pages, position)[0]
            if position > len(pages):
                break
            found.append(pages[begin:position])
        if len(found) < count:
            raise self.damaged(f"it has {count} texts at {self.position}, and ends before")
        self.position = position
        return found

    def _tensors(self, handle: int, count: int) -> dict[str, StoredTensor]:
        """The tensors. Their values follow one another without gaps, apart from the alignment."""
        described: dict[str, tuple[str, tuple[int, ...], int]] = {}
        for _ in range(count):
            name = self._name(described)
            described[name] = self._shape_and_kind(name)
        alignment = self.integer("general.alignment", DEFAULT_ALIGNMENT)
        if alignment < 1 or alignment & (alignment - 1):
            raise self.damaged(f"its alignment {alignment!r} is no power of 2")
        end_of_header = self.position
        found, first = {}, _aligned(end_of_header, alignment)
        self.position = first if described else end_of_header
        for name, (kind, shape, offset) in described.items():
            if first + offset != self.position:
                raise self.damaged(f"{name!r} begins at {offset}, expected {self.position - first}")
            nbytes = prod(shape) // BLOCK_TYPES[kind].inputs * BLOCK_TYPES[kind].nbytes
            begin = self._skip(nbytes)
            found[name] = StoredTensor(
                name, kind, shape, handle, begin, nbytes, np.frombuffer(self.pages, np.uint8, nbytes, begin)
            )
            self.position = _aligned(self.position, alignment)
        self.position = end_of_header
        return found

    def _shape_and_kind(self, name: str) -> tuple[str, tuple[int, ...], int]:
        """A tensor's type, shape and offset from the first tensor in bytes."""
        if (dimensions := self._integer()) > MAX_DIMENSIONS:
            raise self.damaged(f"{name!r} has {dimensions} dimensions, at most {MAX_DIMENSIONS} are known")
        shape = tuple(self._length() for _ in range(dimensions))
        number, offset = self._integer(), self._length()
        if number not in _NAMES:
            raise GgufError(f"the GGUF file {self._path} has {name!r} in the unknown type {number}: fetch another quantisation")
        kind = _NAMES[number]
        if not shape or 0 in shape or shape[0] % BLOCK_TYPES[kind].inputs:
            raise self.damaged(
                f"{name!r} in {kind} has the sizes {list(shape)}, rows need a multiple of {BLOCK_TYPES[kind].inputs}"
            )
        return kind, shape[::-1], offset


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment
