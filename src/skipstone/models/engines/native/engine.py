"""`LayeredModel`'s engine over the C++ library: tensors in, pointers to C, tensors out."""

import ctypes
import os
from typing import Any

import torch
from torch import Tensor, nn

from skipstone.models.engines.eager import patches
from skipstone.models.engines.native import library
from skipstone.models.engines.native.structs import ERRORS, SKIP_ATTENTION, SKIP_MLP, Pass, Store, declare
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
        own = module.__dict__.get("forward")
        if own is not None and not isinstance(own, patches.Forward):
            return f"{name or type(model).__name__} has a forward of its own"
    return None


class NativeEngine:
    """A model on the native engine, as in `Engine`. It copies the weights into panels when it is made."""

    name = "native"
    dtype = torch.float32

    def __init__(self, model: Any, facts: Facts) -> None:
        self._library = declare(library.load())
        self._weights = Weights(self._library, model, facts)
        self._model = ctypes.addressof(self._weights.model)
        self._rotary = RotaryTables(facts.decoder, facts.family, facts.max_positions)
        self._parameters = list(model.parameters())
        self._modules = list(model.modules())
        self._versions = self._counted()
        self.threads = threads()
        level = self._library.sk_level
        level.restype = ctypes.c_char_p
        self.detail = f"C++, {level().decode()}, {facts.dtype} weights computed in float32, {self.threads} threads"
        shape = self._weights.model
        self._padded = -(-shape.head_size // 16) * 16  # numbers of a head in the store: whole vectors
        self._pass, self._store = Pass(), Store()
        self._pointers = (ctypes.c_void_p * (2 * shape.depth))()
        self._skips: dict[SkipSet, Any] = {}
        self._no_tensor = torch.empty(0)

    def holds(self) -> bool:
        """Whether the weights are those that were copied, and no module has got a hook since."""
        hooked = any(module._forward_hooks or module._forward_pre_hooks for module in self._modules)
        return not hooked and self._versions == self._counted()

    def _counted(self) -> int:
        """torch's count of the changes made to the weights in place; what is written through `.data` is not in it."""
        return sum(one._version for one in self._parameters if not one.is_inference())

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
        return self._project(normed, False)

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and LM head in one call. [..., d] -> [..., V] float32."""
        return self._project(hidden, True)

    def _project(self, states: Tensor, norm: bool) -> Tensor:
        states = states.contiguous()
        logits = torch.empty((*states.shape[:-1], self._weights.model.vocabulary))
        rows = states.numel() // states.shape[-1]
        self._library.sk_head(self._model, states.data_ptr(), rows, norm, logits.data_ptr(), None, None, self.threads)
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
        for number, kind in enumerate(self._weights.rotary_kinds):
            cos, sin = self._rotary.table(kind, at.extent, self._no_tensor)
            table = told.rotary[number]
            table.cos, table.sin, table.positions, table.size = cos.data_ptr(), sin.data_ptr(), *cos.shape
        return kept

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
