"""The native engine: passes tensors to the C++ library as pointers and returns new tensors."""

import ctypes
import math
from collections.abc import Callable, Iterable, Mapping
from itertools import repeat
from operator import contains
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from skipstone.engines.eager.patches import changed, changed_module
from skipstone.engines.engine import ChainInputs, ChainOutputs, Engine, WarperInputs
from skipstone.engines.greedy_tokens import top_k_tokens
from skipstone.engines.host_transfer import CPU, dense, new_buffer, pointer
from skipstone.engines.kv_cache import KVCache
from skipstone.engines.native import library, packed_cache
from skipstone.engines.native.packed_cache import CachedPanels
from skipstone.engines.native.structs import (
    BAD_LAYER,
    SKIP_ATTENTION,
    SKIP_MLP,
    ModelStruct,
    PassStruct,
    ShortlistStruct,
    StoreStruct,
    check,
    declare,
)
from skipstone.engines.native.threads import MAX_THREADS, cores, requested_number
from skipstone.engines.native.weights import BLOCKS, TYPES, NativeWeights, Panels, tensor_paths, unsupported
from skipstone.engines.rotary import RotaryTables
from skipstone.models import fingerprint
from skipstone.models.decoder_model import DecoderModel
from skipstone.models.mapped_model import MappedModel
from skipstone.models.passes import Pass as PassOfTokens
from skipstone.models.passes import SkipSet
from skipstone.models.weight_version import TensorValues, keep_version, model_version

MAX_SKIP_SETS = 256  # cached as bits; requests may name any number
MAX_TOP_K = 100  # of the library; torch finds more


def why_not(model: Any, description: DecoderModel) -> str | None:
    """The reason why the native engine cannot run a model here, as one sentence; None if it can."""
    if (reason := library.missing()) is not None:
        return reason
    if description.spread is not None:
        return f"its weights are {description.spread}, and the native engine wants all of them in this process's memory"
    return unsupported(model, description) or changed_module(model)


class NativeEngine(Engine):
    """Runs a model in C++. It copies the weights into panels, matrix by matrix. Without keep_weights the model gives each
    matrix up at once, and a `PackedWeight` replaces it."""

    name = "native"
    row_exact = True
    skips_padding = True
    supports_chains = True
    supports_draws = True
    own_threads = True
    dtype = torch.float32

    def __init__(
        self,
        model: Any,
        description: DecoderModel,
        quantize: str | None = None,
        keep_weights: bool = True,
        *,
        rounds_inputs: bool = True,
        shared_panels: Mapping[int, Panels] | None = None,
        cached: CachedPanels | None = None,
        pause: Callable[[], None] | None = None,
    ) -> None:
        """rounds_inputs: of products with bfloat16 weights, to bfloat16. shared_panels: of current weights, by another engine;
        those of the right type are not packed again. cached: the quantised panels. pause: as in `NativeWeights`.

        ValueError for weights that cannot be quantised, or a wrong number of threads in the environment. After the first error
        without keep_weights, the model has lost some weights and must be loaded again. LookupError for cached panels of other
        sizes."""
        num_threads = requested_number()
        self._library, self.quantize = declare(library.load()), quantize
        self.version = model_version(model).weights
        keep_weights = keep_weights or isinstance(model, MappedModel)
        if not keep_weights:
            fingerprint.fingerprint(model, self.version)  # cached before the weights are given up
        self._weights = NativeWeights(
            self._library, model, description, quantize, keep_weights, cached, pause, rounds_inputs, shared_panels
        )
        self.rounds_inputs = self._weights.rounds_inputs
        self._is_cached = cached is not None
        if not keep_weights:
            keep_version(model)
        self._model = ctypes.addressof(self._weights.model)
        self._rotary = RotaryTables(description.decoder, description.max_positions)
        self._covered = list(model.modules())[1:]  # without the model itself, which an engine must not keep alive
        self._hooks = [hooks for part in self._covered for hooks in (part._forward_hooks, part._forward_pre_hooks)]
        self._attributes = [vars(part) for part in self._covered]
        inputs = ", inputs of products rounded to bfloat16" if self.rounds_inputs else ""
        how = f"computed in float32{inputs}" if quantize is None else f"quantised to {quantize} in groups of 32, inputs to int8"
        stored = [one.kind for one in tensor_paths(model) if one.kind in BLOCKS]
        if stored and quantize is None:
            how = f"({', '.join(stored)} as stored, inputs to int8) {how}"
        shape = self._weights.model
        self._hidden, self._depth, self._vocabulary = shape.hidden, shape.depth, shape.vocabulary
        self._entering = self._hidden * (2 if self._weights.reads_pairs else 1)  # size of what enters layer 0
        self._padded_head_size = -(-shape.head_size // 16) * 16  # in the store: whole vectors
        self._pass = PassStruct()
        self._pass_address = ctypes.addressof(self._pass)
        self._known_positions = 0  # positions of the rotary tables that the pass struct points at
        self._skips: dict[SkipSet, Any] = {}
        self._multipliers: dict[nn.Module, ModelStruct] = {}
        self._transforms: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # weight -> (its values, its panels)
        self._shortlists: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # ids -> (Shortlist, tensors that it points at)
        self._warps: tuple[WarperInputs | None, tuple[int], tuple[int, ...]] = None, (0,), ()  # the latest and its addresses
        self._no_tensor = torch.empty(0, dtype=torch.float32, device=CPU)
        num_panels = -(-self._hidden // 16)  # of the narrowest products: further threads would have no work there
        self.threads = num_threads or min(cores(), num_panels, MAX_THREADS)
        self.detail = f"C++, {self.level}, {description.weight_dtype} weights {how}, {self.threads} threads"

    @property
    def level(self) -> str:
        """Instruction set of the library. Any of `library.levels()` can be set; every one computes the same bits."""
        return self._library.sk_level().decode()

    @level.setter
    def level(self, name: str) -> None:
        self._library = declare(library.load(name))

    @property
    def panels(self) -> Mapping[int, Panels]:
        """By the ids of the model's weights, which live as long as they do."""
        return self._weights.panels

    def panels_of(self, weights: Iterable[Tensor]) -> dict[int, Panels]:
        """The panels of those weights that the model still has. Ids of weights that it gave up mean other tensors now."""
        own = {id(one) for part in self._covered for one in part._parameters.values()}
        return {id(one): self.panels[id(one)] for one in weights if id(one) in own and id(one) in self.panels}

    @property
    def nbytes(self) -> int:
        """Size of its panels; 0 if another engine has packed them."""
        return self._weights.bytes

    def cache_panels(self, model: Any, before_piece: Callable[[int], None] = lambda _: None) -> bool:
        """Write quantised panels to the disk's cache, if they do not come from it. Returns whether they are there: only a
        mapped model has a place. before_piece: called before each piece is written, with its number of bytes.

        ValueError if the checkpoint has changed since it was opened."""
        if self.quantize is None or not isinstance(model, MappedModel) or not model.caches_panels:
            return False
        if not model.files.is_current():
            raise ValueError(f"the checkpoint {model.config.name_or_path} changed while it was read: load it again")
        name = model.config.name_or_path
        shown = str(Path(name).resolve()) if Path(name).exists() else name
        return self._is_cached or packed_cache.write(
            model.files.identity, self.quantize, shown, self._weights.memory, before_piece
        )

    def is_current(self, version: int | None) -> bool:
        """Whether weights and plain attributes are still those that were copied, and no module has a new hook or forward."""
        if self.version != version or not self._weights.attributes.are_current():
            return False
        has_forward = map(contains, self._attributes, repeat("forward"))
        if (any(self._hooks) or any(has_forward)) and any(map(changed, self._covered)):
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
        """As in `Engine`. An EAGLE-3 head's layer reads [b, n, 2 d], the embedding first."""
        hidden = dense(hidden, free=1)
        size = self._hidden if layers.start else self._entering
        data = pointer("hidden", hidden, (*at.positions.shape, size), torch.float32, free=1)
        if layers.start < 0 or layers.stop > self._depth:
            check(BAD_LAYER)
        out, target = new_buffer((*at.positions.shape, self._hidden))
        referenced = self._fill_pass(at)
        place = self._model, self._pass_address, self._store_address(store)
        span = layers.start, layers.stop, skip and self._skip_bits(skip)
        self._library.sk_run(*place, *span, data, hidden.stride(0), target, out.stride(0), self.threads)
        del referenced
        return out

    def chain(self, inputs: ChainInputs, store: KVCache) -> ChainOutputs:
        """As in `Engine`."""
        rows, width = len(inputs.max_drafts), max(inputs.max_drafts)
        roots = dense(inputs.roots)
        root_ids = pointer("roots", roots, (rows,), torch.int64)
        _check_chain(inputs, rows, width)
        given = None if inputs.states is None else dense(inputs.states)
        given_address = None if given is None else pointer("states", given, (rows, self._hidden), torch.float32)
        numbers = ctypes.c_int64 * rows
        counts = numbers()
        drafts, draft_ids = new_buffer((rows, width), torch.int64, torch.zeros)
        states, states_address = new_buffer((rows, inputs.columns, self._hidden), make=torch.zeros)
        thresholds, probabilities, probabilities_address = _limits(inputs.thresholds, ctypes.c_float, width)
        max_entropy, entropy, entropy_address = _limits(inputs.max_entropy, ctypes.c_double, width)
        num_ranked = min(inputs.num_ranked, self._vocabulary if inputs.shortlist is None else len(inputs.shortlist))
        ranked, ranked_address = _optional_buffer((rows, width, num_ranked), torch.int64, torch.zeros)
        distributions, distributions_address = _optional_buffer((rows, width, inputs.distribution_size))
        self._pass.b, self._pass.first_row, self._pass.extent = rows, 0, inputs.extent
        self._fill_rotary(inputs.extent)
        place = self._model, self._pass_address, self._store_address(store)
        span = 0, inputs.layers, inputs.skip and self._skip_bits(inputs.skip)
        tokens = root_ids, given_address, numbers(*inputs.bases), numbers(*inputs.max_drafts), width
        stops = thresholds, *_ends(inputs)
        head = self._transform_address(inputs.transform), self._shortlist_address(inputs.shortlist)
        rules = inputs.excludes_uncertain, _survival(inputs, width), max_entropy
        wanted = num_ranked, inputs.distribution_size
        of_places = probabilities_address, entropy_address, ranked_address, distributions_address
        results = *wanted, draft_ids, counts, *of_places, states_address, states.stride(0)
        self._library.sk_chain(*place, *span, *tokens, *stops, inputs.keep_states, *head, *rules, *results, self.threads)
        end = max(counts)
        parts = [part if part is None else part[:, :end] for part in (probabilities, ranked, entropy, distributions)]
        return ChainOutputs(drafts[:, :end], list(counts), parts[0], states, *parts[1:])

    def normed(self, hidden: Tensor) -> Tensor:
        """As in `Engine`."""
        hidden, data = self._states("hidden", hidden)
        normed, target = new_buffer(hidden.shape)
        self._library.sk_norm(self._model, data, hidden.numel() // self._hidden, target)
        return normed

    def project(self, normed: Tensor, head: nn.Module | None = None, shortlist: Tensor | None = None) -> Tensor:
        """As in `Engine`. torch computes other heads than the model's own."""
        if head is not None:
            weight: Any = next(head.parameters())
            logits = head(normed.to(weight.dtype)).float()
            return logits if shortlist is None else logits[..., shortlist]
        states, data = self._states("normed", normed)
        size, ids = (self._vocabulary, None) if shortlist is None else (len(shortlist), self._shortlist_address(shortlist))
        logits, target = new_buffer((*states.shape[:-1], size))
        rows = states.numel() // self._hidden
        self._library.sk_head(self._model, ids, data, rows, False, target, None, self.threads)
        return logits

    def multiply(self, linear: nn.Linear, states: Tensor) -> Tensor:
        """As in `Engine`. The weight is packed once."""
        if (model := self._multipliers.get(linear)) is None:
            model = self._multipliers[linear] = self._weights.multiplier(linear)
        states, size = dense(states), model.hidden
        data = pointer("states", states, (*states.shape[:-1], size), torch.float32)
        products, target = new_buffer((*states.shape[:-1], model.vocabulary))
        rows = states.numel() // size
        self._library.sk_head(ctypes.addressof(model), None, data, rows, False, target, None, self.threads)
        return products

    def greedy_tokens(self, hidden: Tensor) -> Tensor:
        """As in `Engine`."""
        states, data = self._states("hidden", hidden)
        best, target = new_buffer(states.shape[:-1], torch.int64)
        self._library.sk_head(self._model, self._shortlist_address(None), data, best.numel(), True, None, target, self.threads)
        return best

    def score_exit(self, hidden: Tensor, transform: Tensor | None, shortlist: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As in `Engine`."""
        states, data = self._states("hidden", hidden)
        tokens, tokens_address = new_buffer(states.shape[:-1], torch.int64)
        probability, probability_address = new_buffer(tokens.shape)
        matrix, ids = self._transform_address(transform), self._shortlist_address(shortlist)
        self._library.sk_test(self._model, ids, data, tokens.numel(), matrix, tokens_address, probability_address, self.threads)
        return tokens, probability

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
        logits, shape = dense(logits, free=1), (rows,)
        tokens, target = new_buffer(shape, torch.int64)
        self._library.sk_draw(
            pointer("logits", logits, (rows, vocabulary), torch.float32, free=1),
            rows,
            vocabulary,
            logits.stride(0),
            *self._warps_pointers(warps, shape),
            pointer("counters", counters, shape, torch.int64),
            warps.place,
            target,
        )
        return tokens

    def _warps_pointers(self, warps: WarperInputs, shape: tuple[int]) -> tuple[int, ...]:
        """The addresses of all rows' settings, checked once for each set of rows."""
        if self._warps[0] is not warps or self._warps[1] != shape:
            dtypes = {"temperature": torch.float32, "top_k": torch.int64, "tail": torch.float32, "min_p": torch.float32}
            addresses = tuple(pointer(name, getattr(warps, name), shape, dtype) for name, dtype in dtypes.items())
            self._warps = warps, shape, addresses
        return self._warps[2]

    def _fill_pass(self, at: PassOfTokens) -> list[Tensor]:
        """Point the pass struct at a pass. Returns the tensors that must outlive its use."""
        struct, (b, n) = self._pass, at.positions.shape
        struct.b, struct.n, struct.first_row, struct.extent = b, n, at.rows.start or 0, at.extent
        struct.valid = struct.base = None
        tensors: list[tuple[str, Tensor, tuple[int, ...], torch.dtype]] = [
            ("positions", at.positions, (b, n), torch.int64),
            ("slots", at.slots, (b, n), torch.int64),
        ]
        if at.valid is not None:
            tensors.append(("valid", at.valid, (b, n), torch.bool))
        if (tree := at.tree) is not None:
            struct.columns = columns = tree.column_positions.shape[-1]
            struct.seen = None
            tensors.append(("base", tree.base, (b,), torch.int64))
            tensors.append(("ancestors", tree.ancestors, (b, n, columns), torch.bool))
            tensors.append(("column_positions", tree.column_positions, (b, columns), torch.int64))
            if tree.seen is not None:
                tensors.append(("seen", tree.seen, (b,), torch.int64))
        referenced = []
        for name, tensor, shape, dtype in tensors:
            free = len(shape) - 1
            tensor = dense(tensor, free)
            setattr(struct, name, pointer(name, tensor, shape, dtype, free))
            for dimension in range(free):
                setattr(struct, f"{name}_stride_{dimension}", tensor.stride(dimension))
            referenced.append(tensor)
        self._fill_rotary(at.extent)
        return referenced

    def _states(self, name: str, states: Tensor) -> tuple[Tensor, int]:
        """Dense states [..., hidden size] float32, and their address."""
        states = dense(states)
        return states, pointer(name, states, (*states.shape[:-1], self._hidden), torch.float32)

    def _fill_rotary(self, extent: int) -> None:
        """Point the pass struct at rotary tables of at least `extent` positions."""
        if extent <= self._known_positions:
            return
        sizes = []
        for number, source in enumerate(self._weights.rotary):
            cos, sin = self._rotary.table(source, extent, self._no_tensor)
            table = self._pass.rotary[number]
            table.cos, table.sin = (pointer("rotary phases", part, cos.shape, torch.float32) for part in (cos, sin))
            table.positions, table.size = cos.shape
            sizes.append(cos.shape[0])
        self._known_positions = min(sizes, default=extent)

    def _store_address(self, store: KVCache) -> int:
        """The struct that points at the buffers of a store. Missing buffers are created."""
        view = store.engine_view
        if view is None or view[3] is not self._weights:  # the store may be another model's, with smaller buffers
            shape, pointers = self._weights.model, (ctypes.c_void_p * (2 * self._depth))()
            dtype = store.dtype or torch.float32
            size = (store.rows, shape.kv_heads, store.capacity + 1, self._padded_head_size)
            for start, buffers in ((0, store.keys), (self._depth, store.values)):
                for index, buffer in enumerate(buffers):
                    if buffer is None:
                        buffer = buffers[index] = torch.zeros(size, dtype=dtype, device=CPU)
                    pointers[start + index] = pointer("keys and values", buffer, size, dtype)
            first = ctypes.addressof(pointers)
            values, slots = first + 8 * self._depth, store.capacity + 1
            struct = StoreStruct(keys=first, values=values, rows=store.rows, slots=slots, type=TYPES[dtype])
            view = store.engine_view = (ctypes.addressof(struct), struct, pointers, self._weights)
        return view[0]

    def _transform_address(self, weight: Tensor | None) -> int | None:
        """The struct of an exit head's matrix, packed again after its weights change; None for no matrix."""
        if weight is None:
            return None
        cached = self._transforms.get(weight)
        if cached is None or not cached[0].are_in([weight]):
            panels = self._weights.packed_square(weight, self._weights.model.head.inputs)
            cached = self._transforms[weight] = TensorValues([weight]), panels
        return ctypes.addressof(cached[1].matrices[0])

    def _shortlist_address(self, ids: Tensor | None) -> int | None:
        """The struct of some rows of the LM head, copied once per list of ids; None for all rows. All rows of a
        head that has ids."""
        ids = self._weights.ids if ids is None else ids
        if ids is None:
            return None
        cached = self._shortlists.get(ids)
        if cached is None:
            copied_ids = ids.clone(memory_format=torch.contiguous_format)  # the cache entry must not keep its key alive
            address = pointer("shortlist", copied_ids, (len(ids),), torch.int64)
            matrix, rows = self._weights.rows_of_head(copied_ids)
            cached = self._shortlists[ids] = ShortlistStruct(matrix, address), copied_ids, rows
        return ctypes.addressof(cached[0])

    def _skip_bits(self, skip: SkipSet) -> int:
        """The address of a skip set as bits per layer."""
        bits = self._skips.get(skip)
        if bits is None:
            if len(self._skips) >= MAX_SKIP_SETS:
                self._skips.clear()
            flags = [SKIP_ATTENTION * (i in skip.attention) + SKIP_MLP * (i in skip.mlp) for i in range(self._depth)]
            bits = self._skips[skip] = (ctypes.c_int64 * self._depth)(*flags)
        return ctypes.addressof(bits)


def _check_chain(inputs: ChainInputs, rows: int, width: int) -> None:
    """ValueError for inputs that do not fit one another."""
    if len(inputs.bases) != rows or len(inputs.ends) != rows or inputs.columns <= width:
        raise ValueError(f"the native engine wants bases and ends of {rows} rows, and {width + 1} columns or more")
    if inputs.thresholds is None and (inputs.excludes_uncertain or inputs.survival is not None):
        raise ValueError("excludes_uncertain and survival rules need the probabilities of drafts: set thresholds, too")


def _limits(limits: list[float] | None, kind: Any, width: int) -> tuple[Any, Tensor | None, int | None]:
    """(A limit for every row as an array of `kind`, the tensor [B, width] float32 for the values that it limits, its address);
    None for no limits."""
    if limits is None:
        return None, None, None
    return (kind * len(limits))(*limits), *new_buffer((len(limits), width), make=torch.zeros)


def _optional_buffer(shape: tuple[int, ...], *how: Any) -> tuple[Tensor | None, int | None]:
    """As `new_buffer`; None for an empty last dimension."""
    return new_buffer(shape, *how) if shape[-1] else (None, None)


def _ends(inputs: ChainInputs) -> tuple[Any, int]:
    """(end-of-sequence ids of all rows, padded with -1; number of ids per row)."""
    longest = max(map(len, inputs.ends))
    ids = [id for row in inputs.ends for id in (*row, *[-1] * (longest - len(row)))]
    return (ctypes.c_int64 * len(ids))(*ids), longest


def _survival(inputs: ChainInputs, width: int) -> Any:
    """The array of `SurvivalThresholds` for sk_chain, padded to the width of a draft; None without them."""
    if (rule := inputs.survival) is None:
        return None
    lists = (rule.min_survival[:width], (rule.min_survival_shared or rule.min_survival)[:width])
    padded = [survival for some in lists for survival in (*some, *[math.inf] * (width - len(some)))]
    return (ctypes.c_float * (2 + 2 * width))(rule.slope, rule.offset, *padded)
