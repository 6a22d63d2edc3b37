"""`LayeredModel`'s engine over the C++ library: tensors in, pointers to C, tensors out."""

import ctypes
import os
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from skipstone.models.engines.eager import patches
from skipstone.models.engines.engine import ChainEnd, ChainStart
from skipstone.models.engines.native import library
from skipstone.models.engines.native.structs import BAD_LAYER, ERRORS, SKIP_ATTENTION, SKIP_MLP, Pass, Store, declare
from skipstone.models.engines.native.weights import Weights, unsupported
from skipstone.models.engines.rotary import RotaryTables
from skipstone.models.facts import Facts
from skipstone.models.kvstore import KVStore
from skipstone.models.passes import Pass as PassOfTokens
from skipstone.models.passes import SkipSet

THREADS = "SKIPSTONE_THREADS"
"""The environment variable that says how many threads the native engine uses; as many as there are cores where it is unset."""


def why_not(model: Any, facts: Facts) -> str | None:
    """Why the native engine cannot run a model here, in one sentence; None where it can."""
    if (reason := library.missing()) is not None:
        return reason
    if (reason := unsupported(model, facts)) is not None:
        return reason
    for name, module in model.named_modules():
        if _changed(module):
            return f"{name or type(model).__name__} has hooks or a forward of its own, which only transformers' modules run"
    return None


def _changed(module: Any) -> bool:
    """Whether a module does more than its class says."""
    own = module.__dict__.get("forward")
    while isinstance(own, patches.Forward):
        own = own.before
    return own is not None or bool(module._forward_hooks) or bool(module._forward_pre_hooks)


class NativeEngine:
    """A model on the native engine, as in `Engine`. It copies the weights into panels when it is made."""

    name = "native"
    dtype = torch.float32

    def __init__(self, model: Any, facts: Facts, quantize: str | None = None) -> None:
        """ValueError for weights that cannot be quantised."""
        self._library, self.quantize = declare(library.load()), quantize
        self._weights = Weights(self._library, model, facts, quantize)
        self._model = ctypes.addressof(self._weights.model)
        self._rotary = RotaryTables(facts.decoder, facts.family, facts.max_positions)
        self._copied = list(model.parameters())
        self._covered = list(model.modules())[1:]  # but for the model itself, which an engine must not keep alive
        self._versions = self._counted()
        self.threads = threads()
        level = self._library.sk_level
        level.restype = ctypes.c_char_p
        kept = f"{facts.dtype} weights computed in float32"
        if quantize is not None:
            kept = f"{facts.dtype} weights quantised to {quantize} in groups of 32, inputs to int8"
        self.detail = f"C++, {level().decode()}, {kept}, {self.threads} threads"
        shape = self._weights.model
        self._padded = -(-shape.head_size // 16) * 16  # numbers of a head in the store: whole vectors
        self._pass, self._store = Pass(), Store()
        self._pointers = (ctypes.c_void_p * (2 * shape.depth))()
        self._skips: dict[SkipSet, Any] = {}
        self._no_tensor = torch.empty(0)

    def holds(self) -> bool:
        """Whether the weights are those that were copied, and no module has got a hook or a forward of its own since."""
        return self._versions == self._counted() and not any(_changed(module) for module in self._covered)

    def _counted(self) -> int:
        """torch's count of the changes made to the weights in place; what is written through `.data` is not in it."""
        return sum(one._version for one in self._copied if not one.is_inference())

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """As in `Engine`."""
        tokens = tokens.contiguous()
        hidden = torch.empty((*tokens.shape, self._weights.model.hidden))
        _check(self._library.sk_embed(self._model, tokens.data_ptr(), tokens.numel(), hidden.data_ptr()))
        return hidden

    def run(self, hidden: Tensor, at: PassOfTokens, store: KVStore, layers: range, skip: SkipSet | None = None) -> Tensor:
        """As in `Engine`."""
        if hidden.stride(-1) != 1 or (hidden.shape[1] > 1 and hidden.stride(1) != hidden.shape[2]):
            hidden = hidden.contiguous()
        if layers.start < 0 or layers.stop > self._weights.model.depth:
            _check(BAD_LAYER)
        assert hidden.shape == (*at.shape, self._weights.model.hidden), "a state for every token of the pass"
        out = torch.empty(hidden.shape)
        kept = self._fill_pass(at)
        self._fill_store(store, layers)
        error = self._library.sk_run(
            self._model,
            ctypes.addressof(self._pass),
            ctypes.addressof(self._store),
            layers.start,
            layers.stop,
            self._skipped(skip),
            hidden.data_ptr(),
            hidden.stride(0),
            out.data_ptr(),
            out.stride(0),
            self.threads,
        )
        del kept
        _check(error)
        return out

    def chain(self, start: ChainStart, store: KVStore, hidden: Tensor) -> ChainEnd:
        """As in `Engine`."""
        rows, width, shape = len(start.roots), max(start.most), self._weights.model
        roots = start.roots.contiguous()
        bases, most = np.array(start.bases, dtype=np.int64), np.array(start.most, dtype=np.int64)
        drafts, counts = np.zeros((rows, width), dtype=np.int64), np.zeros(rows, dtype=np.int64)
        asked = start.thresholds is not None
        thresholds = np.array(start.thresholds if asked else [], dtype=np.float32)
        probabilities = np.zeros((rows, width) if asked else 0, dtype=np.float32)
        longest = max(map(len, start.ends))
        ends = np.array([[*row, *[-1] * (longest - len(row))] for row in start.ends], dtype=np.int64)
        assert hidden.shape == (rows, width + 1, shape.hidden), "a state for every draft and for the root"
        assert hidden.stride()[1:] == (shape.hidden, 1), "a row's states lie one after the other"
        told, layers = self._pass, range(start.layers)
        told.b, told.first_row, told.extent = rows, 0, start.extent
        self._fill_rotary(start.extent)
        self._fill_store(store, layers)
        error = self._library.sk_chain(
            self._model,
            ctypes.addressof(told),
            ctypes.addressof(self._store),
            0,
            start.layers,
            self._skipped(start.skip),
            roots.data_ptr(),
            bases.ctypes.data,
            most.ctypes.data,
            width,
            thresholds.ctypes.data if asked else None,
            ends.ctypes.data,
            longest,
            start.keep,
            drafts.ctypes.data,
            counts.ctypes.data,
            probabilities.ctypes.data,
            hidden.data_ptr(),
            hidden.stride(0),
            self.threads,
        )
        _check(error)
        end = int(counts.max())
        confidence = torch.from_numpy(probabilities[:, :end]) if asked else None
        return ChainEnd(torch.from_numpy(drafts[:, :end]), counts.tolist(), confidence)

    def normed(self, hidden: Tensor) -> Tensor:
        """As in `Engine`."""
        hidden = hidden.contiguous()
        normed = torch.empty(hidden.shape)
        self._library.sk_norm(self._model, hidden.data_ptr(), hidden.numel() // hidden.shape[-1], normed.data_ptr())
        return normed

    def project(self, normed: Tensor, head: nn.Module | None = None) -> Tensor:
        """As in `Engine`. A head of another kind than the model's own is torch's to compute."""
        if head is not None:
            weight: Any = next(head.parameters())
            return head(normed.to(weight.dtype)).float()
        states = normed.contiguous()
        logits = torch.empty((*states.shape[:-1], self._weights.model.vocabulary))
        rows = states.numel() // states.shape[-1]
        self._library.sk_head(self._model, states.data_ptr(), rows, False, logits.data_ptr(), None, None, self.threads)
        return logits

    def _fill_pass(self, at: PassOfTokens) -> list[Any]:
        """Point the pass struct at a pass. Returns what must live until it was used."""
        told, positions, slots = self._pass, _rows(at.positions), _rows(at.slots)
        told.b, told.n = at.shape
        told.positions, told.positions_stride = positions.data_ptr(), positions.stride(0)
        told.slots, told.slots_stride = slots.data_ptr(), slots.stride(0)
        told.first_row, told.extent = at.rows.start or 0, at.extent
        kept: list[Any] = [positions, slots]
        if at.valid is None:
            told.valid = None
        else:
            valid = _rows(at.valid)
            told.valid, told.valid_stride = valid.data_ptr(), valid.stride(0)
            kept.append(valid)
        if at.tree is None:
            told.base = None
        else:
            tree = at.tree
            base, ancestors, column_positions = tree.base.contiguous(), tree.ancestors, _rows(tree.column_positions)
            if ancestors.stride(2) != 1:
                ancestors = ancestors.contiguous()
            told.base, told.ancestors, told.columns = base.data_ptr(), ancestors.data_ptr(), ancestors.shape[2]
            told.ancestors_row, told.ancestors_column = ancestors.stride(0), ancestors.stride(1)
            told.column_positions, told.column_positions_stride = column_positions.data_ptr(), column_positions.stride(0)
            seen = None if tree.seen is None else tree.seen.contiguous()
            told.seen = None if seen is None else seen.data_ptr()
            kept += [base, ancestors, column_positions, seen]
        self._fill_rotary(at.extent)
        return kept

    def _fill_rotary(self, extent: int) -> None:
        """Point the pass struct at tables of at least `extent` positions."""
        for number, kind in enumerate(self._weights.rotary_kinds):
            cos, sin = self._rotary.table(kind, extent, self._no_tensor)
            table = self._pass.rotary[number]
            table.cos, table.sin, table.positions, table.size = cos.data_ptr(), sin.data_ptr(), *cos.shape

    def _fill_store(self, store: KVStore, layers: range) -> None:
        """Point the store struct at the buffers of a store, made where they are missing."""
        shape, pointers, depth = self._weights.model, self._pointers, self._weights.model.depth
        for index in layers:
            for start, buffers in ((0, store.keys), (depth, store.values)):
                buffer = buffers[index]
                if buffer is None:
                    buffer = buffers[index] = torch.zeros((store.rows, shape.kv_heads, store.capacity + 1, self._padded))
                pointers[start + index] = buffer.data_ptr()
        told, start = self._store, ctypes.addressof(pointers)
        told.keys, told.values, told.rows, told.slots = start, start + 8 * depth, store.rows, store.capacity + 1

    def _skipped(self, skip: SkipSet | None) -> Any:
        """The skip set as bits per layer; null where nothing is left out."""
        if skip is None or not (skip.attention or skip.mlp):
            return None
        bits = self._skips.get(skip)
        if bits is None:
            depth = self._weights.model.depth
            left_out = [SKIP_ATTENTION * (i in skip.attention) + SKIP_MLP * (i in skip.mlp) for i in range(depth)]
            bits = self._skips[skip] = (ctypes.c_int64 * depth)(*left_out)
        return ctypes.addressof(bits)


def threads() -> int:
    """Threads of the native engine: what SKIPSTONE_THREADS says, or the cores that this process may use."""
    said = os.environ.get(THREADS)
    if said is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return min(cores, 64)
    if not said.isdigit() or not 1 <= int(said) <= 64:
        raise ValueError(f"{THREADS} must be a whole number from 1 to 64, found {said!r}")
    return int(said)


def _rows(tensor: Tensor) -> Tensor:
    """The tensor [b, n] with neighbouring columns beside each other in memory."""
    return tensor if tensor.stride(1) == 1 or tensor.shape[1] == 1 else tensor.contiguous()


def _check(error: int) -> None:
    if error:
        raise RuntimeError(f"the native engine was asked for {ERRORS[error]}")
