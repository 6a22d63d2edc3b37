"""`ModelRunner`'s engine over the C++ library: tensors in, pointers to C, tensors out."""

import ctypes
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from skipstone.engines.buffers import dense, new_buffer, pointer
from skipstone.engines.eager.patches import changed
from skipstone.engines.engine import ChainInputs, ChainOutputs, Engine, WarperInputs
from skipstone.engines.greedy_tokens import top_k_tokens
from skipstone.engines.host_transfer import CPU
from skipstone.engines.kv_cache import KVCache
from skipstone.engines.native import library, threads
from skipstone.engines.native.structs import (
    BAD_LAYER,
    SKIP_ATTENTION,
    SKIP_MLP,
    NativeError,
    PassStruct,
    ShortlistStruct,
    StoreStruct,
    declare,
)
from skipstone.engines.native.weights import TYPES, NativeWeights, unsupported
from skipstone.engines.rotary import RotaryTables
from skipstone.models import fingerprint
from skipstone.models.facts import Facts
from skipstone.models.passes import Pass as PassOfTokens
from skipstone.models.passes import SkipSet, Tree
from skipstone.models.weight_version import TensorValues, keep_version, model_version

MAX_SKIP_SETS = 256  # whose bits are kept: a request may name any
MAX_TOP_K = 100  # logits that `top_k_tokens` looks for by itself


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


class NativeEngine(Engine):
    """A model on the native engine, as in `Engine`. It copies the weights into panels when it is made, matrix by matrix;
    without keep_weights the model gives each up at once, and a `PackedWeight` stands in its place."""

    name = "native"
    row_exact = True
    supports_chains = True
    supports_draws = True
    own_threads = True
    dtype = torch.float32

    def __init__(self, model: Any, facts: Facts, quantize: str | None = None, keep_weights: bool = True) -> None:
        """ValueError for weights that cannot be quantised, and for a wrong number of threads in the environment. A model that
        is to give its weights up has lost some of them by the first of these errors, and is to be loaded again."""
        said = threads.asked()
        self._library, self.quantize = declare(library.load()), quantize
        self.version = model_version(model).weights
        if not keep_weights:
            fingerprint.fingerprint(model, self.version)  # of the weights that are given up; it stays the model's
        self._weights = NativeWeights(self._library, model, facts, quantize, keep_weights)
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
        self._pass = PassStruct()
        self._pass_address = ctypes.addressof(self._pass)
        self._known_positions = 0  # of every rotary table that the pass struct points at
        self._skips: dict[SkipSet, Any] = {}
        self._transforms: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # weight -> (its values, Matrix, its panels)
        self._shortlists: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # ids -> (Shortlist, what it points at)
        self._warps: tuple[WarperInputs | None, tuple[int], tuple[int, ...]] = None, (0,), ()  # the latest, and their addresses
        self._no_tensor = torch.empty(0, dtype=torch.float32, device=CPU)
        self.threads = said or threads.fastest(self._run_a_token, threads.cores())
        self.detail = f"C++, {level().decode()}, {kept}, {self.threads} threads"

    def _run_a_token(self, count: int) -> None:
        """One token through all layers, on so many threads."""
        self.threads = count
        store, place = KVCache(1, self._depth, 1), torch.zeros((1, 1), dtype=torch.int64, device=CPU)
        store.reserve(1)
        at = PassOfTokens(place, place, None, slice(0, 1), 1, 0)
        self.run(torch.zeros((1, 1, self._hidden), dtype=torch.float32, device=CPU), at, store, range(self._depth))

    def is_current(self, version: int | None) -> bool:
        """Whether the weights and plain attributes are those that were copied, and no module has got a hook or a forward of its
        own since."""
        if self.version != version or not self._weights.attributes_are_current():
            return False
        if (any(self._hooks) or any("forward" in one for one in self._attributes)) and any(map(changed, self._covered)):
            return False
        if not self._rotary.is_current():
            self._known_positions = 0
        return True

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """As in `Engine`."""
        tokens = dense(tokens)
        ids = pointer("tokens", tokens, tokens.shape, torch.int64)
        hidden, target = new_buffer((*tokens.shape, self._hidden))
        self._library.sk_embed(self._model, ids, tokens.numel(), target)
        return hidden

    def run(self, hidden: Tensor, at: PassOfTokens, store: KVCache, layers: range, skip: SkipSet | None = None) -> Tensor:
        """As in `Engine`."""
        hidden = dense(hidden, free=1)
        data = pointer("hidden", hidden, (*at.shape, self._hidden), torch.float32, free=1)
        if layers.start < 0 or layers.stop > self._depth:
            raise NativeError(BAD_LAYER)
        out, target = new_buffer(hidden.shape)
        kept = self._fill_pass(at)  # what the pass struct points at
        self._library.sk_run(
            self._model,
            self._pass_address,
            self._store_address(store),
            layers.start,
            layers.stop,
            self._skipped(skip),
            data,
            hidden.stride(0),
            target,
            out.stride(0),
            self.threads,
        )
        del kept
        return out

    def chain(self, inputs: ChainInputs, store: KVCache) -> ChainOutputs:
        """As in `Engine`."""
        rows, width = len(inputs.max_drafts), max(inputs.max_drafts)
        roots = dense(inputs.roots)
        root_ids = pointer("roots", roots, (rows,), torch.int64)
        if len(inputs.bases) != rows or len(inputs.ends) != rows or inputs.columns <= width:
            raise ValueError(f"the native engine wants bases and ends of {rows} rows, and {width + 1} columns or more")
        numbers = ctypes.c_int64 * rows
        counts = numbers()
        drafts, draft_ids = new_buffer((rows, width), torch.int64, torch.zeros)
        if inputs.excludes_uncertain and inputs.thresholds is None:
            raise ValueError("excludes_uncertain needs thresholds")
        states, states_told = new_buffer((rows, inputs.columns, self._hidden), make=torch.zeros)
        thresholds = probabilities = probabilities_told = None
        if inputs.thresholds is not None:
            thresholds = (ctypes.c_float * rows)(*inputs.thresholds)
            probabilities, probabilities_told = new_buffer((rows, width), make=torch.zeros)
        ends, longest = _ends(inputs)
        told = self._pass
        told.b, told.first_row, told.extent = rows, 0, inputs.extent
        self._fill_rotary(inputs.extent)
        self._library.sk_chain(
            self._model,
            self._pass_address,
            self._store_address(store),
            0,
            inputs.layers,
            self._skipped(inputs.skip),
            root_ids,
            numbers(*inputs.bases),
            numbers(*inputs.max_drafts),
            width,
            thresholds,
            ends,
            longest,
            inputs.keep_states,
            None if inputs.transform is None else self._transform_address(inputs.transform),
            self._shortlist_address(inputs.shortlist),
            inputs.excludes_uncertain,
            _survival(inputs, width),
            draft_ids,
            counts,
            probabilities_told,
            states_told,
            states.stride(0),
            self.threads,
        )
        end = max(counts)
        return ChainOutputs(drafts[:, :end], list(counts), None if probabilities is None else probabilities[:, :end], states)

    def normed(self, hidden: Tensor) -> Tensor:
        """As in `Engine`."""
        hidden, data = self._states("hidden", hidden)
        normed, target = new_buffer(hidden.shape)
        self._library.sk_norm(self._model, data, hidden.numel() // self._hidden, target)
        return normed

    def project(self, normed: Tensor, head: nn.Module | None = None, shortlist: Tensor | None = None) -> Tensor:
        """As in `Engine`. A head of another kind than the model's own is torch's to compute."""
        if head is not None:
            weight: Any = next(head.parameters())
            logits = head(normed.to(weight.dtype)).float()
            return logits if shortlist is None else logits[..., shortlist]
        states, data = self._states("normed", normed)
        logits, target = new_buffer((*states.shape[:-1], self._vocabulary if shortlist is None else len(shortlist)))
        rows, few = states.numel() // self._hidden, self._shortlist_address(shortlist)
        self._library.sk_head(self._model, few, data, rows, False, target, None, self.threads)
        return logits

    def greedy_tokens(self, hidden: Tensor) -> Tensor:
        """As in `Engine`."""
        states, data = self._states("hidden", hidden)
        best, target = new_buffer(states.shape[:-1], torch.int64)
        self._library.sk_head(self._model, None, data, best.numel(), True, None, target, self.threads)
        return best

    def score_exit(self, hidden: Tensor, transform: Tensor | None, shortlist: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As in `Engine`."""
        states, data = self._states("hidden", hidden)
        best, found = new_buffer(states.shape[:-1], torch.int64)
        probability, sure = new_buffer(best.shape)
        address = None if transform is None else self._transform_address(transform)
        few = self._shortlist_address(shortlist)
        self._library.sk_test(self._model, few, data, best.numel(), address, found, sure, self.threads)
        return best, probability

    def top_k_tokens(self, logits: Tensor, count: int) -> Tensor:
        """As in `Engine`."""
        if count > MAX_TOP_K:
            return top_k_tokens(logits, count)
        logits = dense(logits)
        data = pointer("logits", logits, logits.shape, torch.float32)
        tokens, target = new_buffer((*logits.shape[:-1], count), torch.int64)
        rows, size = tokens.numel() // count, logits.shape[-1]
        self._library.sk_largest(data, rows, size, size, count, target, self.threads)
        return tokens

    def draw(self, logits: Tensor, warps: WarperInputs, counters: Tensor) -> Tensor:
        """As in `Engine`."""
        rows, vocabulary = logits.shape
        logits, one = dense(logits, free=1), (rows,)
        tokens, target = new_buffer(one, torch.int64)
        self._library.sk_draw(
            pointer("logits", logits, (rows, vocabulary), torch.float32, free=1),
            rows,
            vocabulary,
            logits.stride(0),
            *self._warps_pointers(warps, one),
            pointer("counters", counters, one, torch.int64),
            warps.place,
            target,
        )
        return tokens

    def _warps_pointers(self, warps: WarperInputs, shape: tuple[int]) -> tuple[int, ...]:
        """The addresses of the settings of all rows, which are checked once for each set of rows."""
        if self._warps[0] is not warps or self._warps[1] != shape:
            temperature = pointer("temperature", warps.temperature, shape, torch.float32)
            top_k = pointer("top_k", warps.top_k, shape, torch.int64)
            tail = pointer("tail", warps.tail, shape, torch.float32)
            min_p = pointer("min_p", warps.min_p, shape, torch.float32)
            self._warps = warps, shape, (temperature, top_k, tail, min_p)
        return self._warps[2]

    def _fill_pass(self, at: PassOfTokens) -> list[Any]:
        """Point the pass struct at a pass. Returns what must live until it was used."""
        shape = b, n = at.shape
        told, positions, slots = self._pass, dense(at.positions, free=1), dense(at.slots, free=1)
        told.b, told.n = b, n
        told.positions = pointer("positions", positions, shape, torch.int64, free=1)
        told.slots = pointer("slots", slots, shape, torch.int64, free=1)
        told.positions_stride, told.slots_stride = positions.stride(0), slots.stride(0)
        told.first_row, told.extent = at.rows.start or 0, at.extent
        kept: list[Any] = [positions, slots]
        if at.valid is None:
            told.valid = None
        else:
            valid = dense(at.valid, free=1)
            told.valid, told.valid_stride = pointer("valid", valid, shape, torch.bool, free=1), valid.stride(0)
            kept.append(valid)
        if at.tree is None:
            told.base = None
        else:
            kept += self._fill_tree(at.tree, b, n)
        self._fill_rotary(at.extent)
        return kept

    def _fill_tree(self, tree: Tree, b: int, n: int) -> list[Any]:
        """`_fill_pass` for the tree of a pass [b, n]."""
        told, columns = self._pass, tree.column_positions.shape[-1]
        base, ancestors, positions = dense(tree.base), dense(tree.ancestors, free=2), dense(tree.column_positions, free=1)
        seen = None if tree.seen is None else dense(tree.seen)
        told.base = pointer("base", base, (b,), torch.int64)
        told.ancestors = pointer("ancestors", ancestors, (b, n, columns), torch.bool, free=2)
        told.column_positions = pointer("column_positions", positions, (b, columns), torch.int64, free=1)
        told.seen = None if seen is None else pointer("seen", seen, (b,), torch.int64)
        told.ancestors_row, told.ancestors_column, told.columns = ancestors.stride(0), ancestors.stride(1), columns
        told.column_positions_stride = positions.stride(0)
        return [base, ancestors, positions, seen]

    def _states(self, name: str, states: Tensor) -> tuple[Tensor, int]:
        """States [..., hidden size] float32 as C reads them, and their address."""
        states = dense(states)
        return states, pointer(name, states, (*states.shape[:-1], self._hidden), torch.float32)

    def _fill_rotary(self, extent: int) -> None:
        """Point the pass struct at tables of at least `extent` positions."""
        if extent <= self._known_positions:
            return
        sizes = []
        for number, source in enumerate(self._weights.rotary):
            cos, sin = self._rotary.table(source, extent, self._no_tensor)
            table = self._pass.rotary[number]
            cos_told, sin_told = (pointer("rotary phases", one, cos.shape, torch.float32) for one in (cos, sin))
            table.cos, table.sin, table.positions, table.size = cos_told, sin_told, *cos.shape
            sizes.append(cos.shape[0])
        self._known_positions = min(sizes, default=extent)

    def _store_address(self, store: KVCache) -> int:
        """The struct that points at the buffers of a store, which are made where they are missing."""
        view = store.engine_view
        if view is None or view[3] is not self._weights:  # another model's store may be smaller
            shape, pointers = self._weights.model, (ctypes.c_void_p * (2 * self._depth))()
            dtype = store.dtype or torch.float32
            size = (store.rows, shape.kv_heads, store.capacity + 1, self._padded)
            for start, buffers in ((0, store.keys), (self._depth, store.values)):
                for index, buffer in enumerate(buffers):
                    if buffer is None:
                        buffer = buffers[index] = torch.zeros(size, dtype=dtype, device=CPU)
                    pointers[start + index] = pointer("keys and values", buffer, size, dtype)
            first = ctypes.addressof(pointers)
            values, slots = first + 8 * self._depth, store.capacity + 1
            told = StoreStruct(keys=first, values=values, rows=store.rows, slots=slots, type=TYPES[dtype])
            view = store.engine_view = (ctypes.addressof(told), told, pointers, self._weights)
        return view[0]

    def _transform_address(self, weight: Tensor) -> int:
        """The struct of a matrix of somebody else's, packed once for as long as its weights do not change."""
        known = self._transforms.get(weight)
        if known is None or not known[0].are_in([weight]):
            size = self._weights.model.head.inputs
            known = self._transforms[weight] = TensorValues([weight]), *self._weights.packed_square(weight, size)
        return ctypes.addressof(known[1])

    def _shortlist_address(self, ids: Tensor | None) -> int | None:
        """The struct of some rows of the LM head, copied once for each list of ids; null for all rows."""
        if ids is None:
            return None
        known = self._shortlists.get(ids)
        if known is None:
            own = ids.clone(memory_format=torch.contiguous_format)  # what is kept under the list must not keep the list alive
            told = pointer("shortlist", own, (len(ids),), torch.int64)
            matrix, rows = self._weights.rows_of_head(own)
            known = self._shortlists[ids] = ShortlistStruct(matrix, told), own, rows
        return ctypes.addressof(known[0])

    def _skipped(self, skip: SkipSet | None) -> Any:
        """The skip set as bits per layer; null where nothing is left out."""
        if skip is None or not (skip.attention or skip.mlp):
            return None
        bits = self._skips.get(skip)
        if bits is None:
            if len(self._skips) >= MAX_SKIP_SETS:
                self._skips.clear()
            depth = self._weights.model.depth
            left_out = [SKIP_ATTENTION * (i in skip.attention) + SKIP_MLP * (i in skip.mlp) for i in range(depth)]
            bits = self._skips[skip] = (ctypes.c_int64 * depth)(*left_out)
        return ctypes.addressof(bits)


def _ends(inputs: ChainInputs) -> tuple[Any, int]:
    """(the array of all rows' end-of-sequence ids, -1 where a row has fewer; ids of a row)."""
    longest = max(map(len, inputs.ends))
    ids = [id for row in inputs.ends for id in (*row, *[-1] * (longest - len(row)))]
    return (ctypes.c_int64 * len(ids))(*ids), longest


def _survival(inputs: ChainInputs, width: int) -> Any:
    """The array that tells sk_chain until what survival to draft; None for no such rule."""
    if inputs.survival is None:
        return None
    if inputs.thresholds is None:
        raise ValueError("survivals are products of probabilities, which thresholds ask for")
    rule = inputs.survival
    min_survival = [*rule.min_survival[:width], *[math.inf] * (width - len(rule.min_survival))]
    min_survival_shared = (
        [*rule.min_survival_shared[:width], *[math.inf] * (width - len(rule.min_survival_shared))]
        if rule.min_survival_shared
        else min_survival
    )
    return (ctypes.c_float * (2 + 2 * width))(rule.slope, rule.offset, *min_survival, *min_survival_shared)
