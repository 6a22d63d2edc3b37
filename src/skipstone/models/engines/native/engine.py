"""`LayeredModel`'s engine over the C++ library: tensors in, pointers to C, tensors out."""

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from skipstone.models import fingerprint
from skipstone.models.engines.eager.patches import changed
from skipstone.models.engines.engine import ChainEnd, ChainStart, Warps
from skipstone.models.engines.native import library, threads
from skipstone.models.engines.native.structs import (
    BAD_LAYER,
    ERRORS,
    SKIP_ATTENTION,
    SKIP_MLP,
    Matrix,
    Pass,
    Shortlist,
    Store,
    declare,
)
from skipstone.models.engines.native.weights import TYPES, Weights, unsupported
from skipstone.models.engines.rotary import RotaryTables
from skipstone.models.facts import Facts
from skipstone.models.kvstore import KVStore
from skipstone.models.passes import Pass as PassOfTokens
from skipstone.models.passes import SkipSet
from skipstone.models.picks import largest
from skipstone.models.weight_version import Values, keep_version, model_version

MOST_LARGEST = 100  # logits that `largest` looks for by itself


def why_not(model: Any, facts: Facts) -> str | None:
    """Why the native engine cannot run a model here, in one sentence; None where it can."""
    if (reason := library.missing()) is not None:
        return reason
    if facts.spread is not None:
        return f"its weights are {facts.spread}, and the native engine wants all of them in this process's memory"
    if (reason := unsupported(model, facts)) is not None:
        return reason
    for name, module in model.named_modules():
        if changed(module):
            return f"{name or type(model).__name__} has hooks or a forward of its own, which only transformers' modules run"
    return None


class NativeEngine:
    """A model on the native engine, as in `Engine`. It copies the weights into panels when it is made, matrix by matrix;
    without keep_weights the model gives each up at once, and a `PackedWeight` stands in its place."""

    name = "native"
    row_exact = True
    chains = True
    draws = True
    own_threads = True
    preparations = 0
    dtype = torch.float32

    def __init__(self, model: Any, facts: Facts, quantize: str | None = None, keep_weights: bool = True) -> None:
        """ValueError for weights that cannot be quantised, and for a wrong number of threads in the environment. A model that
        is to give its weights up has lost some of them by the first of these errors, and is to be loaded again."""
        said = threads.asked()
        self._library, self.quantize = declare(library.load()), quantize
        self.version = model_version(model).weights
        if not keep_weights:
            fingerprint.fingerprint(model, self.version)  # of the weights that are given up; it stays the model's
        self._weights = Weights(self._library, model, facts, quantize, keep_weights)
        if not keep_weights:
            keep_version(model)
        self._model = ctypes.addressof(self._weights.model)
        self._rotary = RotaryTables(facts.decoder, facts.max_positions)
        self._covered = list(model.modules())[1:]  # but for the model itself, which an engine must not keep alive
        self._hooks = [one for part in self._covered for one in (part._forward_hooks, part._forward_pre_hooks)]
        self._attributes = [vars(part) for part in self._covered]
        level = self._library.sk_level
        level.restype = ctypes.c_char_p
        kept = f"{facts.dtype} weights computed in float32"
        if quantize is not None:
            kept = f"{facts.dtype} weights quantised to {quantize} in groups of 32, inputs to int8"
        shape = self._weights.model
        self._hidden, self._depth, self._vocabulary = shape.hidden, shape.depth, shape.vocabulary
        self._padded = -(-shape.head_size // 16) * 16  # numbers of a head in the store: whole vectors
        self._pass = Pass()
        self._pass_address = ctypes.addressof(self._pass)
        self._known_positions = 0  # of every rotary table that the pass struct points at
        self._skips: dict[SkipSet, Any] = {}
        self._transforms: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # weight -> (its values, Matrix, its panels)
        self._shortlists: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # ids -> (Shortlist, what it points at)
        self._no_tensor = torch.empty(0)
        self.threads = said or threads.fastest(self._run_a_token, threads.cores())
        self.detail = f"C++, {level().decode()}, {kept}, {self.threads} threads"

    def _run_a_token(self, count: int) -> None:
        """One token through all layers, on so many threads."""
        self.threads = count
        store, place = KVStore(1, self._depth, 1), torch.zeros((1, 1), dtype=torch.int64)
        store.reserve(1)
        at = PassOfTokens(place, place, None, slice(0, 1), 1, 0)
        self.run(torch.zeros((1, 1, self._hidden)), at, store, range(self._depth))

    def holds(self, version: int | None) -> bool:
        """Whether the weights and plain attributes are those that were copied, and no module has got a hook or a forward of its
        own since."""
        if self.version != version or not self._weights.attributes_hold():
            return False
        if (any(self._hooks) or any("forward" in one for one in self._attributes)) and any(map(changed, self._covered)):
            return False
        if not self._rotary.hold():
            self._known_positions = 0
        return True

    def warm_up(self, rows: int, slots: int, *, kv_dtype: torch.dtype | None = None) -> str:
        """As in `Engine`: all was compiled when the package was built."""
        return self.detail

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """As in `Engine`."""
        _expect("tokens", tokens, tokens.shape, torch.int64)
        tokens = tokens.contiguous()
        hidden = torch.empty((*tokens.shape, self._hidden))
        _check(self._library.sk_embed(self._model, tokens.data_ptr(), tokens.numel(), hidden.data_ptr()))
        return hidden

    def run(self, hidden: Tensor, at: PassOfTokens, store: KVStore, layers: range, skip: SkipSet | None = None) -> Tensor:
        """As in `Engine`."""
        _expect("hidden", hidden, (*at.shape, self._hidden), torch.float32)
        if hidden.stride(-1) != 1 or (hidden.shape[1] > 1 and hidden.stride(1) != hidden.shape[2]):
            hidden = hidden.contiguous()
        if layers.start < 0 or layers.stop > self._depth:
            _check(BAD_LAYER)
        out = torch.empty(hidden.shape)
        kept = self._fill_pass(at)
        error = self._library.sk_run(
            self._model,
            self._pass_address,
            self._store_address(store),
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

    def chain(self, start: ChainStart, store: KVStore) -> ChainEnd:
        """As in `Engine`."""
        rows, width = len(start.most), max(start.most)
        _expect("roots", start.roots, (rows,), torch.int64)
        if len(start.bases) != rows or len(start.ends) != rows or start.columns <= width:
            raise ValueError(
                f"the native engine wants bases and ends of {rows} rows, and columns for {width} drafts and the root"
            )
        numbers = ctypes.c_int64 * rows
        roots, drafts, counts = start.roots.contiguous(), torch.zeros((rows, width), dtype=torch.int64), numbers()
        if start.sure and start.thresholds is None:
            raise ValueError("who wants sure drafts only says by thresholds how sure")
        states = torch.zeros((rows, start.columns, self._hidden))
        thresholds = probabilities = None
        if start.thresholds is not None:
            thresholds, probabilities = (ctypes.c_float * rows)(*start.thresholds), torch.zeros((rows, width))
        longest = max(map(len, start.ends))
        ends = (ctypes.c_int64 * (rows * longest))(*(id for row in start.ends for id in (*row, *[-1] * (longest - len(row)))))
        told = self._pass
        told.b, told.first_row, told.extent = rows, 0, start.extent
        self._fill_rotary(start.extent)
        error = self._library.sk_chain(
            self._model,
            self._pass_address,
            self._store_address(store),
            0,
            start.layers,
            self._skipped(start.skip),
            roots.data_ptr(),
            numbers(*start.bases),
            numbers(*start.most),
            width,
            thresholds,
            ends,
            longest,
            start.keep,
            None if start.transform is None else self._transform_address(start.transform),
            self._shortlist_address(start.shortlist),
            start.sure,
            _survival(start, width),
            drafts.data_ptr(),
            counts,
            None if probabilities is None else probabilities.data_ptr(),
            states.data_ptr(),
            states.stride(0),
            self.threads,
        )
        _check(error)
        end = max(counts)
        return ChainEnd(drafts[:, :end], list(counts), None if probabilities is None else probabilities[:, :end], states)

    def normed(self, hidden: Tensor) -> Tensor:
        """As in `Engine`."""
        _expect("hidden", hidden, (*hidden.shape[:-1], self._hidden), torch.float32)
        hidden = hidden.contiguous()
        normed = torch.empty(hidden.shape)
        self._library.sk_norm(self._model, hidden.data_ptr(), hidden.numel() // hidden.shape[-1], normed.data_ptr())
        return normed

    def project(self, normed: Tensor, head: nn.Module | None = None, shortlist: Tensor | None = None) -> Tensor:
        """As in `Engine`. A head of another kind than the model's own is torch's to compute."""
        if head is not None:
            weight: Any = next(head.parameters())
            logits = head(normed.to(weight.dtype)).float()
            return logits if shortlist is None else logits[..., shortlist]
        _expect("normed", normed, (*normed.shape[:-1], self._hidden), torch.float32)
        states = normed.contiguous()
        logits = torch.empty((*states.shape[:-1], self._vocabulary if shortlist is None else len(shortlist)))
        rows, few = states.numel() // self._hidden, self._shortlist_address(shortlist)
        _check(self._library.sk_head(self._model, few, states.data_ptr(), rows, False, logits.data_ptr(), None, self.threads))
        return logits

    def likeliest(self, hidden: Tensor) -> Tensor:
        """As in `Engine`."""
        _expect("hidden", hidden, (*hidden.shape[:-1], self._hidden), torch.float32)
        states, best = hidden.contiguous(), torch.empty(hidden.shape[:-1], dtype=torch.int64)
        data, rows = states.data_ptr(), best.numel()
        _check(self._library.sk_head(self._model, None, data, rows, True, None, best.data_ptr(), self.threads))
        return best

    def exit_picks(self, hidden: Tensor, transform: Tensor | None, shortlist: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As in `Engine`."""
        _expect("hidden", hidden, (*hidden.shape[:-1], self._hidden), torch.float32)
        states, best = hidden.contiguous(), torch.empty(hidden.shape[:-1], dtype=torch.int64)
        probability = torch.empty(best.shape)
        address = None if transform is None else self._transform_address(transform)
        data, rows, found, few = states.data_ptr(), best.numel(), best.data_ptr(), self._shortlist_address(shortlist)
        _check(self._library.sk_test(self._model, few, data, rows, address, found, probability.data_ptr(), self.threads))
        return best, probability

    def largest(self, logits: Tensor, count: int) -> Tensor:
        """As in `Engine`."""
        if count > MOST_LARGEST:
            return largest(logits, count)
        _expect("logits", logits, logits.shape, torch.float32)
        logits, tokens = logits.contiguous(), torch.empty((*logits.shape[:-1], count), dtype=torch.int64)
        rows, size = tokens.numel() // count, logits.shape[-1]
        _check(self._library.sk_largest(logits.data_ptr(), rows, size, size, count, tokens.data_ptr(), self.threads))
        return tokens

    def draw(self, logits: Tensor, warps: Warps, counters: Tensor) -> Tensor:
        """As in `Engine`."""
        rows, vocabulary = logits.shape
        for name, column, dtype in (
            ("temperature", warps.temperature, torch.float32),
            ("top_k", warps.top_k, torch.int64),
            ("tail", warps.tail, torch.float32),
            ("min_p", warps.min_p, torch.float32),
            ("counters", counters, torch.int64),
        ):
            _expect(name, column, (rows,), dtype)
        _expect("logits", logits, (rows, vocabulary), torch.float32)
        logits, tokens = _rows(logits), torch.empty(rows, dtype=torch.int64)
        told = self._library.sk_draw(
            logits.data_ptr(),
            rows,
            vocabulary,
            logits.stride(0),
            warps.temperature.data_ptr(),
            warps.top_k.data_ptr(),
            warps.tail.data_ptr(),
            warps.min_p.data_ptr(),
            counters.data_ptr(),
            warps.place,
            tokens.data_ptr(),
        )
        _check(told)
        return tokens

    def _fill_pass(self, at: PassOfTokens) -> list[Any]:
        """Point the pass struct at a pass. Returns what must live until it was used."""
        shape = b, n = at.shape
        _expect("positions", at.positions, shape, torch.int64)
        _expect("slots", at.slots, shape, torch.int64)
        told, positions, slots = self._pass, _rows(at.positions), _rows(at.slots)
        told.b, told.n = b, n
        told.positions, told.positions_stride = positions.data_ptr(), positions.stride(0)
        told.slots, told.slots_stride = slots.data_ptr(), slots.stride(0)
        told.first_row, told.extent = at.rows.start or 0, at.extent
        kept: list[Any] = [positions, slots]
        if at.valid is None:
            told.valid = None
        else:
            _expect("valid", at.valid, shape, torch.bool)
            valid = _rows(at.valid)
            told.valid, told.valid_stride = valid.data_ptr(), valid.stride(0)
            kept.append(valid)
        if at.tree is None:
            told.base = None
        else:
            tree, columns = at.tree, at.tree.column_positions.shape[-1]
            _expect("base", tree.base, (b,), torch.int64)
            _expect("ancestors", tree.ancestors, (b, n, columns), torch.bool)
            _expect("column_positions", tree.column_positions, (b, columns), torch.int64)
            if tree.seen is not None:
                _expect("seen", tree.seen, (b,), torch.int64)
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
        if extent <= self._known_positions:
            return
        sizes = []
        for number, source in enumerate(self._weights.rotary):
            cos, sin = self._rotary.table(source, extent, self._no_tensor)
            table = self._pass.rotary[number]
            table.cos, table.sin, table.positions, table.size = cos.data_ptr(), sin.data_ptr(), *cos.shape
            sizes.append(cos.shape[0])
        self._known_positions = min(sizes, default=extent)

    def _store_address(self, store: KVStore) -> int:
        """The struct that points at the buffers of a store, which are made where they are missing."""
        view = store.engine_view
        if view is None or view[3] is not self._weights:  # another model's store may be smaller
            shape, pointers = self._weights.model, (ctypes.c_void_p * (2 * self._depth))()
            dtype = store.dtype or torch.float32
            size = (store.rows, shape.kv_heads, store.capacity + 1, self._padded)
            for start, buffers in ((0, store.keys), (self._depth, store.values)):
                for index, buffer in enumerate(buffers):
                    if buffer is None:
                        buffer = buffers[index] = torch.zeros(size, dtype=dtype)
                    _expect("keys and values", buffer, size, dtype)
                    pointers[start + index] = buffer.data_ptr()
            first = ctypes.addressof(pointers)
            values, slots = first + 8 * self._depth, store.capacity + 1
            told = Store(keys=first, values=values, rows=store.rows, slots=slots, type=TYPES[dtype])
            view = store.engine_view = (ctypes.addressof(told), told, pointers, self._weights)
        return view[0]

    def _transform_address(self, weight: Tensor) -> int:
        """The struct of a matrix of somebody else's, packed once for as long as its weights do not change."""
        known = self._transforms.get(weight)
        if known is None or not known[0].are_in([weight]):
            size = self._weights.model.head.inputs
            _expect("transform", weight, (size, size), weight.dtype)
            values = weight.detach().float().contiguous()
            panels = torch.empty(self._library.sk_packed_bytes(TYPES[torch.float32], size, size), dtype=torch.uint8)
            self._library.sk_pack(TYPES[torch.float32], values.data_ptr(), size, size, size, panels.data_ptr())
            matrix = Matrix(panels.data_ptr(), None, size, size, TYPES[torch.float32])
            known = self._transforms[weight] = Values([weight]), matrix, panels
        return ctypes.addressof(known[1])

    def _shortlist_address(self, ids: Tensor | None) -> int | None:
        """The struct of some rows of the LM head, copied once for each list of ids; null for all rows."""
        if ids is None:
            return None
        known = self._shortlists.get(ids)
        if known is None:
            _expect("shortlist", ids, (len(ids),), torch.int64)
            own = ids.clone()  # what is kept under the list must not keep the list alive
            matrix, rows = self._weights.rows_of_head(own)
            known = self._shortlists[ids] = Shortlist(matrix, own.data_ptr()), own, rows
        return ctypes.addressof(known[0])

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


def _rows(tensor: Tensor) -> Tensor:
    """The tensor [b, n] with neighbouring columns beside each other in memory."""
    return tensor if tensor.stride(1) == 1 or tensor.shape[1] == 1 else tensor.contiguous()


def _survival(start: ChainStart, width: int) -> Any:
    """The array that tells sk_chain until what survival to draft; None for no such rule."""
    if start.survival is None:
        return None
    if start.thresholds is None:
        raise ValueError("survivals are products of probabilities, which thresholds ask for")
    rule = start.survival
    least = [*rule.least[:width], *[math.inf] * (width - len(rule.least))]
    beside = [*rule.beside[:width], *[math.inf] * (width - len(rule.beside))] if rule.beside else least
    return (ctypes.c_float * (2 + 2 * width))(rule.slope, rule.offset, *least, *beside)


def _expect(name: str, found: Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    """ValueError unless the library may read a tensor as what it is told to be."""
    if found.dtype is not dtype or not found.is_cpu or found.shape != shape:
        kind = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"the native engine wants {name} {list(shape)} in {kind} on the CPU, found {list(found.shape)} in "
            f"{str(found.dtype).removeprefix('torch.')} on {found.device}"
        )


def _check(error: int) -> None:
    if error:
        raise RuntimeError(f"the native engine was asked for {ERRORS[error]}")
