"""Keys and values addressed by position.

Every layer has one preallocated buffer for keys and one for values, [rows, kv_heads, capacity + 1, head_dim]. Slots [0, length)
of a row hold its committed tokens, each in the slot of its position. Slots from `length` on are scratch: the tokens of a chain
draft lie in the slots of their positions, the nodes of a tree in consecutive slots. The last slot is the trash: invalid entries
are written there and never read. A rollback lowers a length.

Buffers have the dtype that keys and values are computed in, or bfloat16. In bfloat16 every number is rounded to the nearest,
ties to even, when it is written. Attention reads the rounded numbers, including those of its own token.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from skipstone.engines.host_transfer import on_device, to_device
from skipstone.engines.recurrent_states import Call, RowSpan, StateHistories, spans
from skipstone.models.passes import Pass
from skipstone.utils.cached_property import cached_property


class KVCache:
    """Buffers of every layer and the length of every row.

    rows: maximum number of sequences. limit: maximum number of slots per row, without the trash. dtype: of the buffers, None
    for the dtype of the computation. length: number of committed tokens of every row. capacity: current slots per row, without
    the trash. Buffers start small and double (`reserve`), so that a request that ends early never pays for its limit.
    engine_view: data that an engine has derived from the buffers (their addresses); reset to None with new buffers.
    state_histories: of layers with states without positions.
    """

    def __init__(self, rows: int, layers: int, limit: int, dtype: torch.dtype | None = None) -> None:
        self.rows, self.layers, self.limit, self.dtype = rows, layers, limit, dtype
        self.length = [0] * rows
        self.capacity = 0
        self.keys: list[Tensor | None] = [None] * layers
        self.values: list[Tensor | None] = [None] * layers
        self.engine_view: Any = None

    @cached_property
    def state_histories(self) -> StateHistories:
        return StateHistories()

    @property
    def trash(self) -> int:
        """The slot that invalid entries write to."""
        return self.capacity

    def reserve(self, slots: int) -> None:
        """Make room for `slots` slots per row. ValueError beyond the limit."""
        if slots <= self.capacity:
            return
        if slots > self.limit:
            raise ValueError(f"the KV store was made for {self.limit} slots a row, {slots} are needed")
        self.resize(self.capacity_for(slots))

    def capacity_for(self, slots: int) -> int:
        """The capacity after `reserve(slots)`."""
        if slots <= self.capacity:
            return self.capacity
        return min(self.limit, max(64, 1 << (slots - 1).bit_length()))

    def resize(self, capacity: int) -> None:
        """Set a larger capacity, even beyond the limit."""
        self.capacity = capacity
        self.engine_view = None
        for buffers in (self.keys, self.values):
            for layer, old in enumerate(buffers):
                if old is not None:
                    new = old.new_zeros((*old.shape[:2], self.capacity + 1, old.shape[3]))
                    new[:, :, : old.shape[2] - 1] = old[:, :, :-1]
                    buffers[layer] = new

    def view(self, at: Pass, reads_cache_length: bool = False) -> "PassCacheView":
        """The replacement of a transformers cache for the layers of one pass. reads_cache_length: as in `Family`."""
        return ZeroLengthView(self, at) if reads_cache_length else PassCacheView(self, at)

    def move(self, row: int, source: Iterable[int], target: Iterable[int]) -> None:
        """Copy slots of a row, so that the accepted path of a tree becomes a chain.

        Keys hold their rotary phases already, so a slot may be any token's.
        """
        pairs = [(src, dst) for src, dst in zip(source, target, strict=True) if src != dst]
        buffers = [buffer for buffer in (*self.keys, *self.values) if buffer is not None]
        if not pairs or not buffers:
            return
        slots = list(zip(*pairs, strict=True))
        places = {device: on_device(slots, device) for device in {buffer.device for buffer in buffers}}
        for buffer in buffers:
            src, dst = places[buffer.device]
            buffer[row, :, dst] = buffer[row, :, src]

    @torch.inference_mode()
    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` slots of a row to another row."""
        for buffer in (*self.keys, *self.values):
            if buffer is not None:
                buffer[target, :, :length] = buffer[source, :, :length]

    def clear(self, row: int) -> None:
        """Zero the slots after a row's committed tokens. NaN there would spoil later attention: a masked weight of 0 times NaN
        is NaN."""
        for buffer in (*self.keys, *self.values):
            if buffer is not None:
                buffer[row, :, self.length[row] :].zero_()

    def bytes(self) -> int:
        """Memory held by all buffers."""
        return sum(buffer.numel() * buffer.element_size() for buffer in (*self.keys, *self.values) if buffer is not None)

    def check(self, reference: "KVCache", row: int, reference_row: int = 0, tolerance: float = 1e-4) -> None:
        """AssertionError unless the committed slots of a row equal those of a reference. tolerance: relative to the largest
        entry of the reference's layer."""
        length = self.length[row]
        assert reference.length[reference_row] >= length, "the reference is shorter than the row"
        for kind, pair in (("keys", (self.keys, reference.keys)), ("values", (self.values, reference.values))):
            for layer, (buffer, reference_buffer) in enumerate(zip(*pair, strict=True)):
                if buffer is None or reference_buffer is None:
                    assert buffer is reference_buffer, f"layer {layer} has {kind} on one side only"
                    continue
                row_slots, expected = buffer[row, :, :length], reference_buffer[reference_row, :, :length]
                error = (row_slots - expected).abs().max().item() if length else 0.0
                scale = expected.abs().max().item() if length else 1.0
                assert error <= tolerance * max(scale, 1e-6), f"layer {layer} {kind} of row {row} differ by {error:.3g}"
        self.state_histories.check(reference.state_histories, row, reference_row, length, tolerance)


class PassCacheView:
    """Duck type of a transformers cache for the layer calls of one pass."""

    def __init__(self, store: KVCache, at: Pass) -> None:
        self.store, self.at = store, at
        self.slots = at.slots
        if at.valid is not None:
            self.slots = torch.where(at.valid, at.slots, store.trash)
        self._index: dict[torch.device, tuple[Tensor, Tensor]] = {}  # (rows [b, 1], slots [b, n]) by device

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write [b, heads, n, dim] to the pass's slots. Returns all visible slots, [b, heads, extent, dim]."""
        store = self.store
        return self._write(store.keys, key, layer_idx), self._write(store.values, value, layer_idx)

    def seen(self, layer: int) -> tuple[Tensor, Tensor]:
        """The visible keys and values of a layer that has already run in this pass, [b, heads, extent, dim] each."""
        keys, values = self.store.keys[layer], self.store.values[layer]
        assert keys is not None, "a layer runs before the layers that read its keys"
        assert values is not None
        return keys[self.at.rows, :, : self.at.extent], values[self.at.rows, :, : self.at.extent]

    def _write(self, buffers: list[Tensor | None], new: Tensor, layer: int) -> Tensor:
        buffer = buffers[layer]
        if buffer is None:
            shape = (self.store.rows, new.shape[1], self.store.capacity + 1, new.shape[3])
            buffer = buffers[layer] = new.new_zeros(shape, dtype=self.store.dtype)  # masked entries must be finite
        rows, first = self.at.rows, self.at.first_slot
        if first is not None:
            buffer[rows, :, first : first + new.shape[2]] = new
        else:
            row_index, slots = self._indices(new.device)
            buffer[row_index, :, slots] = new.transpose(1, 2).to(buffer.dtype)
        return buffer[rows, :, : self.at.extent].to(new.dtype)

    def _indices(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Row and slot indices on the device of a layer, copied once per pass."""
        if device not in self._index:
            rows = torch.arange(self.at.rows.start, self.at.rows.stop, device=device, dtype=torch.int64)[:, None]
            self._index[device] = rows, to_device(self.slots, device)
        return self._index[device]

    @cached_property
    def _spans(self) -> list[RowSpan]:
        return spans(self.at)

    def recur(self, layer: int, hidden: Tensor, call: Call) -> Tensor:
        """The output of a recurrent sublayer for its input [b, n, d]. call: its own forward."""
        return self.store.state_histories.run(layer, hidden, self._spans, self.store.length, call)


class SharedKVView:
    """Replaces transformers' dictionary of shared keys and values: they are read from the store."""

    def __init__(self, view: PassCacheView, sources: dict[str, int], dtype: torch.dtype) -> None:
        self._view, self._sources, self._dtype = view, sources, dtype

    def __getitem__(self, kind: str) -> tuple[Tensor, Tensor]:
        """Keys and values of the layer that others of its type read, [b, heads, extent, dim] each."""
        keys, values = self._view.seen(self._sources[kind])
        return keys.to(self._dtype), values.to(self._dtype)

    def __setitem__(self, kind: str, states: tuple[Tensor, Tensor]) -> None:
        """Do nothing: they are in the store already."""


class ZeroLengthView(PassCacheView):
    """A `PassCacheView` of length 0, for layers that read the length but do not need it."""

    def get_seq_length(self, *_: object) -> int:
        """0, always: rows may have different lengths."""
        return 0
