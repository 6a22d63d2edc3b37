"""The engine that compiles transformers' decoder layers with torch.compile: few shapes, one graph for all layers of a kind.

A pass is padded: rows, tokens per row and slots to powers of two. The padding is invalid: it writes to the trash slot and masks
hide it. So there are few graphs, known in advance, and no text compiles another one after its shapes were met (`warm_up`).

On CUDA a pass over layers is one CUDA graph, since the host's work for a layer takes longer than the device's. A CUDA graph
contains addresses. So stores borrow buffers with fixed addresses, and borrow others when they grow.

The eager engine computes embeddings, masks, the final norm and the LM head. It also runs whole passes: those of more than
COLUMNS tokens per row or over some rows only (prompts), the first one over a new store, which creates its buffers, layers with
a skipped sublayer, and all passes outside of inference mode.
"""

import copy
import os
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree

from skipstone.engines.eager import attention, linear
from skipstone.engines.eager.eager import EagerEngine
from skipstone.engines.eager.patches import changed, changed_module
from skipstone.engines.host_transfer import identity
from skipstone.engines.kv_cache import KVCache
from skipstone.models.decoder_model import DecoderModel
from skipstone.models.packed_weight import is_packed
from skipstone.models.passes import AttentionReach, Pass, SkipSet, Tree
from skipstone.models.torch_defaults import stable_defaults
from skipstone.models.weight_version import AttributeValues
from skipstone.utils.setup_times import add_setup_seconds, setup_work

BACKEND_VARIABLE = "SKIPSTONE_COMPILE_BACKEND"
"""Environment variable for torch.compile's backend, "inductor" by default. "eager" and "aot_eager" compile nothing; tests of
the graphs use them."""
COLUMNS = 64  # maximum tokens per row in a compiled pass
MIN_GRAPH_SLOTS = 128  # minimum slots per row of a graph
MAX_RECORDED_GRAPHS = (
    1024  # CUDA graphs of an engine: layers that are skipped now here, now there are met in ever new stretches
)

Shape = tuple[int, int, int]
"""Of a graph: rows, tokens per row, slots per row."""
Region = Callable[..., Tensor]
"""`_layer`, compiled for layers of one kind at one shape."""


def why_not(model: Any, description: DecoderModel) -> str | None:
    """The reason why a model's layers cannot be compiled, as one sentence; None if they can."""
    if is_packed(model):
        return "its weights were given up to the native engine"
    if description.spread is not None:
        return f"its weights are {description.spread}"
    if description.family.recurrent:
        return "some of its layers keep states without positions, which its graphs do not"
    if description.family.per_layer_inputs or description.family.shares or description.family.streams > 1:
        return "its layers share keys and values, have several streams or inputs of their own, which its graphs do not know"
    if description.family.mask_buffer_path or description.family.reads_cache_length or description.family.alibi:
        return "its layers mask or count by themselves, or add position biases, which its graphs do not do"
    return changed_module(model)


def round_up(count: int, minimum: int = 1) -> int:
    """The smallest power of two that is at least `count` and `minimum`."""
    return 1 << (max(count, minimum) - 1).bit_length()


@dataclass(eq=False)
class GraphBackend:
    """The backend of torch.compile, which counts graphs. torch keeps it forever, so it must not refer to a model.

    backend: name of torch's backend. cuda: passes are CUDA graphs. count: graphs so far. seconds: total time to compile them.
    """

    backend: str
    cuda: bool
    count: int = 0
    seconds: float = 0.0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        from torch._dynamo.backends.registry import lookup_backend  # importing it takes a second

        self.count += 1
        return lookup_backend(self.backend)(graph, inputs)


class GraphCache:
    """Replaces a transformers cache in a graph. keys, values: [R, kv_heads, slots + 1, head_dim], the buffers of a layer with
    the trash last. rows: [R, 1], slots: [R, n], where the pass writes."""

    def __init__(self, keys: Tensor, values: Tensor, rows: Tensor, slots: Tensor) -> None:
        self.keys, self.values, self.rows, self.slots = keys, values, rows, slots

    def update(self, key: Tensor, value: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write [R, heads, n, dim]. Returns all slots but the trash, [R, heads, slots, dim]."""
        return self._write(self.keys, key), self._write(self.values, value)

    def _write(self, buffer: Tensor, new: Tensor) -> Tensor:
        buffer[self.rows, :, self.slots] = new.transpose(1, 2).to(buffer.dtype)
        return buffer[:, :, :-1].to(new.dtype)


LayerInputs = tuple[Tensor, Pass, dict[Any, Any]]
"""The inputs of a range of layers in one pass: hidden states, the pass, and rotary phases by their source."""


def _copied(inputs: LayerInputs) -> LayerInputs:
    """Plain copies of some inputs. The pass makes its masks anew."""
    hidden, at, phases = inputs
    tree = at.tree
    if tree is not None:
        parts = {name: _plain(getattr(tree, name)) for name in ("base", "ancestors", "column_positions", "seen")}
        tree = replace(tree, **parts)
    own = replace(at, positions=_plain(at.positions), slots=_plain(at.slots), valid=_plain(at.valid), tree=tree)
    return _plain(hidden), own, _pytree.tree_map_only(Tensor, _plain, phases)


def _tensors(inputs: LayerInputs) -> list[Tensor]:
    """All tensors of some inputs, in a fixed order."""
    (hidden, at, phases), tensors = inputs, list[Tensor]()
    tree = () if at.tree is None else (at.tree.base, at.tree.ancestors, at.tree.column_positions, at.tree.seen)
    for part in (hidden, at.positions, at.slots, at.valid, *tree, *phases.values()):
        tensors += part if isinstance(part, tuple) else [] if part is None else [part]
    return tensors


class CapturedGraph(NamedTuple):
    """A CUDA graph. inputs: tensors that it reads. result: that it writes. weights: addresses of its layers' weights."""

    graph: Any
    inputs: list[Tensor]
    result: Tensor
    weights: list[int]


def _layer(layer: nn.Module, hidden: Tensor, given: Any, places: tuple[Tensor, Tensor], buffers: Any, call: Any) -> Tensor:
    """The compiled function: one layer over [R, n, d]. given: arguments of the pass, by name. places: rows [R, 1] and slots
    [R, n] that it writes. buffers: keys and values. call: (name of the cache argument, fixed arguments)."""
    cache = {call[0]: GraphCache(buffers[0], buffers[1], *places)}
    output = layer(hidden, **given, **cache, **dict(call[1]))
    return output[0] if isinstance(output, (tuple, list)) else output


class CompiledEngine(EagerEngine):
    """Runs a model by compiled layers. graphs: compiled so far. Layers of the same kind, which have equal modules and plain
    attributes, share every graph."""

    name = "compiled"

    def __init__(self, model: Any, description: DecoderModel) -> None:
        """ValueError for a model with hooks, or without weights of its own."""
        if (reason := why_not(model, description)) is not None:
            raise ValueError(f"engine='compiled' cannot run this model: {reason}; take engine='auto' or 'eager'")
        super().__init__(model, description)
        self.graphs = GraphBackend(os.environ.get(BACKEND_VARIABLE) or "inductor", description.device.type == "cuda")
        self._device, self._depth, self._positions = description.device, len(description.layers), description.max_positions
        self._parts = [part for layer in description.layers for part in layer.modules()]
        names = [(vars(part), name) for part in self._parts for name, _ in _plain_attributes(part) if name != "training"]
        self._attributes = AttributeValues(names)
        config = self.config
        if self._attentions:  # all layers share one config with our attention
            config = copy.copy(config)
            config._attn_implementation = attention.NAME
        self._copies = [_copy_module(layer, config) for layer in description.layers]
        kinds = [_kind(copied) for copied in self._copies]
        self._kinds = [kinds.index(kind) for kind in kinds]
        self._regions: dict[tuple[int, Shape], Region] = {}
        self._call = self.family.cache_argument, tuple(self._fixed.items())
        self._weights = [weight for layer in description.layers for weight in layer.parameters()]
        self._borrowed: weakref.WeakKeyDictionary[KVCache, tuple[Any, KVCache, Any]] = weakref.WeakKeyDictionary()
        self._spare: dict[Any, list[KVCache]] = {}  # unused buffers, by their shape
        self._recorded: dict[Any, CapturedGraph | None] = {}  # None after the first run; the next one is recorded
        self._memory: Any = None  # shared by all CUDA graphs, which run one after the other
        self._capture_error: str | None = None  # CUDA's reason why no graph can be recorded
        self.preparations = 0
        self._eager_detail = self.detail
        self._update_detail()

    def is_current(self, version: int | None) -> bool:
        """Whether there are no new hooks, and plain attributes have the values that were compiled."""
        super().is_current(version)
        return self._attributes.are_current() and not any(map(changed, self._parts))

    @stable_defaults()
    def run(self, hidden: Tensor, at: Pass, store: KVCache, layers: range, skip: SkipSet | None = None) -> Tensor:
        """As in `Engine`."""
        known = all(store.keys[index] is not None for index in layers)
        whole = at.rows == slice(0, store.rows) and at.shape[1] <= COLUMNS
        if not (known and whole and torch.is_inference_mode_enabled()):
            return super().run(hidden, at, store, layers, skip)
        self._shape_buffers(store, layers)
        padded = _padded(at, store)
        for part, full in _split_layers(layers, skip):
            hidden = self._run(hidden, padded, store, part) if full else super().run(hidden, at, store, part, skip)
        return hidden

    @stable_defaults()
    def warm_up(self, rows: int, slots: int, columns: int = COLUMNS, *, kv_dtype: torch.dtype | None = None) -> str:
        """As in `Engine`, for passes of up to `columns` tokens per row. CUDA graphs are recorded when they are first needed."""
        with torch.inference_mode():
            size = MIN_GRAPH_SLOTS
            while size <= round_up(slots, MIN_GRAPH_SLOTS):
                store = KVCache(rows, self._depth, size, kv_dtype)
                store.reserve(size)
                for width in (1, *(1 << power for power in range((min(columns, COLUMNS) - 1).bit_length() + 1))):
                    count = min(width, self._positions)
                    places = torch.arange(count, device=self._device, dtype=torch.int64).expand(rows, -1)
                    at = Pass(places, places, None, slice(0, rows), count, 0)
                    self.run(self.embed(torch.zeros_like(places), places), at, store, range(self._depth))
                size *= 2
        return self.detail

    def _shape_buffers(self, store: KVCache, layers: range) -> None:
        """Give the buffers of some layers the shape that graphs need."""
        slots, rows = round_up(store.capacity, MIN_GRAPH_SLOTS), round_up(store.rows)
        if store.capacity != slots:
            store.resize(slots)
        if self.graphs.cuda:
            self._borrow_buffers(store, layers, rows)
            return
        for buffers in (store.keys, store.values):
            for index in layers:
                buffer = buffers[index]
                if buffer is not None and buffer.shape[0] != rows:
                    buffers[index] = F.pad(buffer, (0, 0, 0, 0, 0, 0, 0, rows - buffer.shape[0]))

    def _borrow_buffers(self, store: KVCache, layers: range, rows: int) -> None:
        """Move some layers of a store to borrowed buffers, which keep their addresses from one store to the next."""
        shape = rows, store.capacity, store.dtype
        borrowed = self._borrowed.get(store)
        if borrowed is None or borrowed[0] != shape:
            if borrowed is not None:
                borrowed[2]()  # the store has outgrown them
            spare_buffers = self._spare.setdefault(shape, [])
            buffers = spare_buffers.pop() if spare_buffers else KVCache(rows, self._depth, store.capacity)
            finalizer = weakref.finalize(store, spare_buffers.append, buffers)
            finalizer.atexit = False
            borrowed = self._borrowed[store] = shape, buffers, finalizer
        for borrowed_list, store_list in ((borrowed[1].keys, store.keys), (borrowed[1].values, store.values)):
            for index in layers:
                borrowed_buffer, new = borrowed_list[index], store_list[index]
                if new is None or new is borrowed_buffer:
                    continue
                if borrowed_buffer is None:
                    borrowed_buffer = borrowed_list[index] = new.new_zeros((rows, *new.shape[1:]))
                borrowed_buffer[: len(new)] = new
                store_list[index] = borrowed_buffer

    def _run(self, hidden: Tensor, at: Pass, store: KVCache, layers: range) -> Tensor:
        """Run layers without skipped sublayers. hidden: [b, n, d]. at: the padded pass. Returns [b, n, d]."""
        (rows, width), (full_rows, full_width) = hidden.shape[:2], at.shape
        hidden = F.pad(hidden, (0, 0, 0, full_width - width, 0, full_rows - rows))
        rotary = self.family.rotary
        inputs = hidden, at, {source: self._phases(source, hidden, at) for source in {rotary[index] for index in layers}}
        hidden = self._replay(inputs, store, layers) if hidden.is_cuda else self._run_layers(inputs, store, layers)
        return hidden[:rows, :width]

    def _replay(self, inputs: LayerInputs, store: KVCache, layers: range) -> Tensor:
        """`_run_layers` as a CUDA graph: the first such pass over the same buffers compiles, the second one is recorded, and
        later ones replay it."""
        tensors, at = _tensors(inputs), inputs[1]
        key = layers, tuple(one.shape for one in tensors), at.extent, at.valid is None, self._borrowed[store][1]
        if key not in self._recorded or self._capture_error:
            if len(self._recorded) < MAX_RECORDED_GRAPHS and not self._capture_error:
                self._recorded.setdefault(key)
                self.preparations += 1
            return self._run_layers(inputs, store, layers)
        recorded, weights = self._recorded[key], [identity(weight) for weight in self._weights]
        if recorded is None or recorded.weights != weights:
            self.preparations += 1
            try:
                recorded = self._recorded[key] = self._record(inputs, store, layers, weights)
            except RuntimeError as error:
                self._capture_error = str(error).strip().split("\n", 1)[0]
                self._update_detail()
                return self._run_layers(inputs, store, layers)
        else:
            for mine, theirs in zip(recorded.inputs, tensors, strict=True):
                mine.copy_(theirs)
        recorded.graph.replay()
        return recorded.result.clone()  # the next replay writes over it

    @setup_work("CUDA graphs")
    def _record(self, inputs: LayerInputs, store: KVCache, layers: range, weights: list[int]) -> CapturedGraph:
        """Record a CUDA graph of `_run_layers` without running it, with a copy of the inputs. RuntimeError if it would wait for
        the device."""
        own = _copied(inputs)
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            result = self._run_layers(own, store, layers)
        return CapturedGraph(graph, _tensors(own), result, weights)

    def _run_layers(self, inputs: LayerInputs, store: KVCache, layers: range) -> Tensor:
        """Run layers one by one. Returns [R, n, d]."""
        (hidden, at, phases), rotary = inputs, self.family.rotary
        hidden = _plain(hidden)
        places = torch.arange(at.shape[0], device=hidden.device, dtype=torch.int64)[:, None], at.slots
        masks: dict[tuple[AttentionReach, int], Tensor] = {}
        for index in layers:
            region = self._region(self._kinds[index], (*at.shape, at.extent))
            arguments = self._layer_arguments(index, at, phases[rotary[index]])
            key = self.reaches[index], self._groups[index]
            if key not in masks:
                masks[key] = _plain(arguments["attention_mask"])
            arguments["attention_mask"] = masks[key]
            buffers = store.keys[index], store.values[index]
            hidden = self._call_region(region, self._copies[index], hidden, arguments, places, buffers, self._call)
        return hidden

    def _region(self, kind: int, shape: Shape) -> Region:
        region = self._regions.get((kind, shape))
        if region is None:
            # torch caches graphs by code object; with its own code each region has one graph, freed with the engine
            function = FunctionType(_layer.__code__.replace(), _layer.__globals__)
            region = torch.compile(function, fullgraph=True, dynamic=False, backend=self.graphs)
            self._regions[kind, shape] = region
        return region

    def _call_region(self, region: Region, *arguments: Any) -> Tensor:
        """A region's result. ValueError if torch.compile does not compile the layer as one graph."""
        before, began = self.graphs.count, time.perf_counter()
        try:
            result = region(*arguments)
        except RuntimeError as error:
            if not type(error).__module__.startswith("torch._"):
                raise
            reason = str(error).strip().split("\n", 1)[0]
            raise ValueError(
                f"engine='compiled' cannot run this model: torch.compile says {reason!r}; take engine='auto' or 'eager'"
            ) from error
        if self.graphs.count != before:
            self.preparations += 1
            spent = time.perf_counter() - began
            self.graphs.seconds += spent
            add_setup_seconds("compiled layers", spent)
            self._update_detail()
        return result

    def _update_detail(self) -> None:
        """Update `detail` and its counts."""
        graphs = self.graphs
        counts = f"{graphs.count} graphs of {len(set(self._kinds))} kinds of layers in {graphs.seconds:.1f} s"
        refused = f", without CUDA graphs ({self._capture_error})" if self._capture_error else ""
        self.detail = f"{self._eager_detail}, layers compiled by {graphs.backend}: {counts}{refused}"


def _copy_module(module: nn.Module, config: Any) -> Any:
    """A copy of a module that shares its parameters and has no patches. It gets our config if it has one, and our linear layers
    where they are faster."""
    copied = copy.copy(module)
    copied.__dict__.pop("forward", None)
    copied._forward_hooks = OrderedDict()  # transformers' own only record; others are refused
    if "config" in copied.__dict__:
        copied.__dict__["config"] = config
    copied._modules = {name: child and _copy_module(child, config) for name, child in module._modules.items()}
    if linear.is_faster_transposed(copied):
        copied.__class__ = linear.TransposedLinear
    return copied


def _kind(layer: nn.Module) -> str:
    """A key of the layers that share graphs: their modules, shapes and plain attributes."""
    plain = [
        (path, *one) for path, module in layer.named_modules() for one in _plain_attributes(module) if one[0] != "layer_idx"
    ]
    shapes = [(name, one.shape, one.dtype, one.requires_grad) for name, one in layer.named_parameters()]
    return repr((layer, plain, shapes))


def _plain_attributes(module: nn.Module) -> list[tuple[str, Any]]:
    return [one for one in vars(module).items() if isinstance(one[1], (bool, int, float, str))]


def _split_layers(layers: range, skip: SkipSet | None) -> Iterator[tuple[range, bool]]:
    """(consecutive layers, whether they run without skipped sublayers)."""
    skipped = skip.attention | skip.mlp if skip else frozenset()
    for is_full, part in groupby(layers, lambda index: index not in skipped):
        indices = [*part]
        yield range(indices[0], indices[-1] + 1), is_full


def _padded(at: Pass, store: KVCache) -> Pass:
    """A pass padded to the shape of a graph: further entries are invalid, and it reads all slots of the store."""
    rows, width = at.shape
    more = (0, round_up(width) - width, 0, round_up(rows) - rows)
    valid = at.valid
    if any(more):
        valid = F.pad(torch.ones_like(at.positions, dtype=torch.bool) if valid is None else valid, more)
    slots = F.pad(at.slots, more)
    if valid is not None:
        slots = torch.where(valid, slots, store.trash)
    tree = at.tree and _padded_tree(at.tree, more[1], more[3])
    whole = slice(0, round_up(rows))
    return Pass(_plain(F.pad(at.positions, more)), _plain(slots), valid, whole, store.capacity, None, tree)


def _plain(tensor: Tensor | None) -> Any:
    """A contiguous copy: a graph is for one memory layout, and views may have any."""
    return None if tensor is None else tensor.clone(memory_format=torch.contiguous_format)


def _padded_tree(tree: Tree, columns: int, rows: int) -> Tree:
    nodes = round_up(tree.ancestors.shape[2]) - tree.ancestors.shape[2]  # that no token descends from
    return replace(
        tree,
        base=F.pad(tree.base, (0, rows)),
        ancestors=F.pad(tree.ancestors, (0, nodes, 0, columns, 0, rows)),
        column_positions=F.pad(tree.column_positions, (0, nodes, 0, rows)),
        seen=None if tree.seen is None else F.pad(tree.seen, (0, rows)),
    )
