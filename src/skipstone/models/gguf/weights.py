"""The weights of a GGUF file under transformers' names. Matrices in blocks stay in the mapped file until they are read."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from skipstone.models.gguf.reader import BLOCK_TYPES, GgufError, GgufFile, StoredTensor
from skipstone.models.mapped_config import UnmappableError
from skipstone.models.mapped_files import read_bytes
from skipstone.models.packed_weight import PackedWeight
from skipstone.models.weight_files import DTYPES, FilePlace, read_only_buffers
from skipstone.utils.cached_property import cached_property
from skipstone.utils.extras import installed


class StoredBlocks:
    """A matrix of a GGUF file: the source of a `PackedWeight`.

    kind: a type of BLOCK_TYPES, plain ones included. shape: [outputs, inputs]. heads: number of heads whose rotated halves
    alternate in the file's rows, as llama.cpp stores queries and keys; 0 if the rows are in transformers' order.
    """

    def __init__(self, tensor: StoredTensor, heads: int) -> None:
        self._tensor, self._heads = tensor, heads
        self.kind, self.shape, self.nbytes = tensor.kind, tensor.shape, tensor.nbytes

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.nbytes // self.shape[0]

    def rows(self, begin: int = 0, end: int | None = None) -> NDArray[np.uint8]:
        """[end - begin, row_bytes]: a copy of some rows in transformers' order."""
        end = self.shape[0] if end is None else end
        first, last = (0, self.shape[0]) if self._heads else (begin, end)
        stored = read_bytes(self._tensor.file, self._tensor.offset + first * self.row_bytes, (last - first) * self.row_bytes)
        rows = np.frombuffer(stored, np.uint8).reshape(-1, self.row_bytes)
        return rows[_order(len(rows), self._heads)[begin:end]] if self._heads else rows

    def floats(self, begin: int, end: int) -> Tensor:
        """[end - begin, inputs] float32: the weights of some rows."""
        if (dtype := DTYPES.get(self.kind)) is not None:
            return torch.from_numpy(self.rows(begin, end)).view(dtype).float()
        gguf = installed("gguf", f"matrices in {self.kind} need gguf", "quantised")
        kind = gguf.GGMLQuantizationType[self.kind]
        try:
            return torch.from_numpy(gguf.quants.dequantize(self.rows(begin, end), kind)).float()
        except NotImplementedError as error:
            raise GgufError(f"a matrix of a GGUF file in {self.kind} cannot be unpacked: fetch another quantisation") from error

    def unpacked(self) -> Tensor:
        """[outputs, inputs] float32."""
        return self.floats(0, self.shape[0])


class GgufWeights:
    """The tensors of a GGUF file, with the attributes and methods of `WeightFiles`.

    names: transformers' name of a tensor -> its name in the file, and `StoredBlocks.heads`. A name that the file lacks is none
    of this object's. The file's metadata are not kept.
    """

    def __init__(self, file: GgufFile, names: Mapping[str, tuple[str, int]]) -> None:
        self._files, self.identity = file.files, file.identity
        self.are_unwritten, self.is_current = self._files.are_unwritten, self._files.is_current
        self._stored = {name: (file.tensors[own], heads) for name, (own, heads) in names.items() if own in file.tensors}
        others = file.tensors.keys() - {own for own, _ in names.values()}
        self.names = [*self._stored, *others]

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    @read_only_buffers()
    def __getitem__(self, name: str) -> Tensor:
        """A tensor in the memory of the mapped file. A matrix in blocks or in another order of rows is a `PackedWeight` of
        float32. UnmappableError for other tensors in blocks."""
        tensor, heads = self._stored[name]
        if (dtype := DTYPES.get(tensor.kind)) is not None and not (heads and len(tensor.shape) > 1):
            plain = torch.frombuffer(tensor.data, dtype=dtype).view(tensor.shape)
            return plain[_order(len(plain), heads)] if heads else plain
        if len(tensor.shape) != 2:
            raise UnmappableError(f"has {name} in {tensor.kind}")
        source = StoredBlocks(tensor, heads)
        return PackedWeight(source, torch.empty((1, 1), dtype=torch.float32, device="cpu").expand(tensor.shape))

    def file_place(self, name: str) -> FilePlace | None:
        """Where the file has a tensor's rows; None if they are in another order there."""
        tensor, heads = self._stored[name]
        return None if heads else FilePlace(tensor.file, tensor.offset)

    @read_only_buffers()
    def mapped(self) -> dict[str, Tensor]:
        """The bytes of all tensors, [nbytes] uint8."""
        return {name: torch.frombuffer(tensor.data, dtype=torch.uint8) for name, (tensor, _) in self._stored.items()}

    def are_equal(self, name: str, other: str) -> bool:
        """Whether two tensors have the same type, shape and bytes."""
        one, two = self._stored[name][0], self._stored[other][0]
        return (one.kind, one.shape) == (two.kind, two.shape) and np.array_equal(one.data, two.data)


def _order(size: int, heads: int) -> NDArray[np.int64]:
    """[size]: where a file that alternates the halves of each head has transformers' rows."""
    return np.arange(size).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def blocks_of(weight: Any) -> StoredBlocks | None:
    """The blocks behind a weight; None for any other weight."""
    source = weight.source if isinstance(weight, PackedWeight) else None
    return source if isinstance(source, StoredBlocks) else None


def float_bytes(source: StoredBlocks) -> int:
    """Bytes of the weights as float32."""
    return source.nbytes // BLOCK_TYPES[source.kind].nbytes * BLOCK_TYPES[source.kind].inputs * 4
