"""The engine that compiles transformers' decoder layers: with torch.compile, at few shapes, one graph for all layers of a kind.

A pass is padded to the next shape of few: rows and tokens of a row to powers of two, keys and values to a power of two of
slots. What fills it up is invalid: it writes to the trash slot, and masks hide it. So the graphs are few and known beforehand,
and no text compiles another one once its shapes have been met (`warm_up`). On CUDA every graph runs as a CUDA graph.

Embeddings, masks, the final norm and the LM head are the eager engine's, and so are whole passes: those of more than COLUMNS
tokens a row or over some rows only (prompts), the first ones over a new store, which lay its buffers out, layers of which a
sublayer is skipped, and all passes outside of inference mode.
"""

import copy
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipstone.models.engines.eager import attention
from skipstone.models.engines.eager.eager import EagerEngine
from skipstone.models.engines.eager.patches import changed
from skipstone.models.facts import Facts
from skipstone.models.kvstore import KVStore
from skipstone.models.packed import is_packed
from skipstone.models.passes import Pass, Reach, SkipSet, Tree

BACKEND_VARIABLE = "SKIPSTONE_COMPILE_BACKEND"
"""The environment variable that names torch.compile's backend, "inductor" unless it is set. "eager" and "aot_eager" compile
nothing: they are for tests of the graphs."""
COLUMNS = 64  # most tokens of a row in a compiled pass
LEAST_SLOTS = 128  # slots of a row that a graph reads at least

Shape = tuple[int, int, int]
"""Of a graph: rows, tokens of a row, slots of a row."""
Region = Callable[..., Tensor]
"""`_layer`, compiled for layers of one kind at one shape."""


def why_not(model: Any, facts: Facts) -> str | None:
    """Why the layers of a model cannot be compiled as they are, in one sentence; None where nothing speaks against it."""
    if is_packed(model):
        return "its weights were given up to the native engine"
    if facts.spread is not None:
        return f"its weights are {facts.spread}"
    if facts.family.recurrent:
        return "some of its layers keep states without positions, which its graphs do not"
    if facts.family.per_layer_inputs or facts.family.shares or facts.family.streams > 1:
        return "its layers share keys and values, have several streams or inputs of their own, which its graphs do not know"
    if facts.family.own_masks or facts.family.asks_length or facts.family.alibi:
        return "its layers mask or count by themselves, or add position biases, which its graphs do not do"
    for name, module in model.named_modules():
        if changed(module):
            return f"{name or type(model).__name__} has hooks or a forward of its own, which only transformers' modules run"
    return None


def tier(count: int, least: int = 1) -> int:
    """The smallest power of two that is not less than `count` and `least`."""
    return 1 << (max(count, least) - 1).bit_length()


@dataclass(eq=False)
class Graphs:
    """What torch.compile calls with every graph. It knows nothing of a model, since torch keeps it for good.

    backend: the name of what lowers a graph. cuda: as a CUDA graph, too. count: graphs so far. seconds: that they took.
    """

    backend: str
    cuda: bool
    count: int = 0
    seconds: float = 0.0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        from torch._dynamo.backends.registry import lookup_backend  # importing it takes a second

        self.count += 1
        more = {"config_patches": {"triton.cudagraphs": True}} if self.cuda and self.backend == "inductor" else {}
        return lookup_backend(self.backend)(graph, inputs, **more)


class Slots:
    """Stands for a transformers cache in a graph. keys, values: [R, kv_heads, slots + 1, head_dim], buffers of a layer, the
    trash last. rows: [R, 1], slots: [R, n], where the pass writes."""

    def __init__(self, keys: Tensor, values: Tensor, rows: Tensor, slots: Tensor) -> None:
        self.keys, self.values, self.rows, self.slots = keys, values, rows, slots

    def update(self, key: Tensor, value: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write [R, heads, n, dim] and return all slots but the trash, [R, heads, slots, dim]."""
        return self._write(self.keys, key), self._write(self.values, value)

    def _write(self, buffer: Tensor, new: Tensor) -> Tensor:
        buffer[self.rows, :, self.slots] = new.transpose(1, 2).to(buffer.dtype)
        return buffer[:, :, :-1].to(new.dtype)


def _layer(layer: nn.Module, hidden: Tensor, given: Any, places: tuple[Tensor, Tensor], buffers: Any, call: Any) -> Tensor:
    """What is compiled: one layer over [R, n, d]. given: what it is given of the pass, by name. places: rows [R, 1] and slots
    [R, n] that it writes. buffers: keys and values. call: (name of the argument for the cache, fixed arguments)."""
    cache = {call[0]: Slots(buffers[0], buffers[1], *places)}
    output = layer(hidden, **given, **cache, **dict(call[1]))
    return output[0] if isinstance(output, (tuple, list)) else output


class CompiledEngine(EagerEngine):
    """A model on compiled layers. graphs: what was compiled so far. kinds of layers differ in their modules or in plain
    attributes of these; layers of one kind share every graph."""

    name = "compiled"

    def __init__(self, model: Any, facts: Facts) -> None:
        """ValueError for a model with hooks, or without weights of its own."""
        if (reason := why_not(model, facts)) is not None:
            raise ValueError(f"engine='compiled' cannot run this model: {reason}; take engine='auto' or 'eager'")
        super().__init__(model, facts)
        self.graphs = Graphs(os.environ.get(BACKEND_VARIABLE) or "inductor", facts.device.type == "cuda")
        self._device, self._depth, self._positions = facts.device, len(facts.layers), facts.max_positions
        self._parts = [part for layer in facts.layers for part in layer.modules()]
        config = self.config
        if self._attentions:  # all layers share one config whose attention is ours
            config = copy.copy(config)
            config._attn_implementation = attention.NAME
        self._twins = [_twin(layer, config) for layer in facts.layers]
        names = [_kind(twin) for twin in self._twins]
        self._kinds = [names.index(name) for name in names]
        self._regions: dict[tuple[int, Shape], Region] = {}
        self._call = self.family.cache_argument, tuple(self._fixed.items())
        self._plainly = self.detail
        self._tell()

    def holds(self) -> bool:
        """Whether no hooks were added since."""
        return not any(map(changed, self._parts))

    def run(self, hidden: Tensor, at: Pass, store: KVStore, layers: range, skip: SkipSet | None = None) -> Tensor:
        """As in `Engine`."""
        known = all(store.keys[index] is not None for index in layers)
        whole = at.rows == slice(0, store.rows) and at.shape[1] <= COLUMNS
        if not (known and whole and torch.is_inference_mode_enabled()):
            return super().run(hidden, at, store, layers, skip)
        self._lay_out(store, layers)
        padded = _padded(at, store)
        for part, full in _stretches(layers, skip):
            hidden = self._run(hidden, padded, store, part) if full else super().run(hidden, at, store, part, skip)
        return hidden

    def warm_up(self, rows: int, slots: int, columns: int = COLUMNS, kv_dtype: torch.dtype | None = None) -> str:
        """Compile every graph that batches of so many rows need, up to so many slots (positions, and the nodes of a tree) and
        so many tokens of a row in one pass. kv_dtype: of the store. Returns `detail`."""
        with torch.inference_mode():
            size = LEAST_SLOTS
            while size <= tier(slots, LEAST_SLOTS):
                store = KVStore(rows, self._depth, size, kv_dtype)
                store.reserve(size)
                for width in (1, *(1 << power for power in range((min(columns, COLUMNS) - 1).bit_length() + 1))):
                    count = min(width, self._positions)
                    places = torch.arange(count, device=self._device).expand(rows, -1)
                    at = Pass(places, places, None, slice(0, rows), count, 0)
                    self.run(self.embed(torch.zeros_like(places), places), at, store, range(self._depth))
                size *= 2
        return self.detail

    def _lay_out(self, store: KVStore, layers: range) -> None:
        """Give the buffers of some layers the shape that graphs take."""
        slots, rows = tier(store.capacity, LEAST_SLOTS), tier(store.rows)
        if store.capacity != slots:
            store.resize(slots)
        for buffers in (store.keys, store.values):
            for index in layers:
                buffer = buffers[index]
                if buffer is not None and buffer.shape[0] != rows:
                    buffers[index] = F.pad(buffer, (0, 0, 0, 0, 0, 0, 0, rows - buffer.shape[0]))
                if self.graphs.cuda:
                    _stays(buffers[index])

    def _run(self, hidden: Tensor, at: Pass, store: KVStore, layers: range) -> Tensor:
        """Layers of which nothing is skipped. hidden: [b, n, d]. at: the pass, padded. Returns [b, n, d]."""
        (rows, width), (full_rows, full_width) = hidden.shape[:2], at.shape
        hidden = _plain(F.pad(hidden, (0, 0, 0, full_width - width, 0, full_rows - rows)))
        rotary = self.family.rotary
        phases = {source: self._phases(source, hidden, at) for source in {rotary[index] for index in layers}}
        places = torch.arange(full_rows, device=hidden.device)[:, None], at.slots
        if self.graphs.cuda:
            torch.compiler.cudagraph_mark_step_begin()
        masks: dict[tuple[Reach, int], Tensor] = {}
        for index in layers:
            region = self._region(self._kinds[index], (full_rows, full_width, at.extent))
            given, key = self._given(index, at, phases[rotary[index]]), (self.reaches[index], self._groups[index])
            if key not in masks:
                masks[key] = _plain(given["attention_mask"])
            given["attention_mask"] = masks[key]
            buffers = store.keys[index], store.values[index]
            hidden = self._timed(region, self._twins[index], hidden, given, places, buffers, self._call)
        hidden = hidden[:rows, :width]
        return hidden.clone() if self.graphs.cuda else hidden  # the next replay of a CUDA graph writes over its output

    def _region(self, kind: int, shape: Shape) -> Region:
        region = self._regions.get((kind, shape))
        if region is None:
            # torch keeps graphs by their code: with code of its own every region has one, which goes when the engine goes
            own = FunctionType(_layer.__code__.replace(), _layer.__globals__)
            region = torch.compile(own, fullgraph=True, dynamic=False, backend=self.graphs)
            self._regions[kind, shape] = region
        return region

    def _timed(self, region: Region, *given: Any) -> Tensor:
        """A region's result. ValueError for a layer that torch.compile does not take in one graph."""
        before, began = self.graphs.count, time.perf_counter()
        try:
            result = region(*given)
        except RuntimeError as error:
            if not type(error).__module__.startswith("torch._"):
                raise
            reason = str(error).strip().split("\n", 1)[0]
            raise ValueError(
                f"engine='compiled' cannot run this model: torch.compile says {reason!r}; take engine='auto' or 'eager'"
            ) from error
        if self.graphs.count != before:
            self.graphs.seconds += time.perf_counter() - began
            self._tell()
        return result

    def _tell(self) -> None:
        """Bring `detail` up to date."""
        graphs = self.graphs
        told = f"{graphs.count} graphs of {len(set(self._kinds))} kinds of layers in {graphs.seconds:.1f} s"
        self.detail = f"{self._plainly}, layers compiled by {graphs.backend}: {told}"


def _twin(module: nn.Module, config: Any) -> Any:
    """A module with the same parameters, but without what was put on it, and with a config of ours where it has one."""
    twin = copy.copy(module)
    twin.__dict__.pop("forward", None)
    twin._forward_hooks = OrderedDict()  # transformers' own, which only listen: others are refused
    if "config" in twin.__dict__:
        twin.__dict__["config"] = config
    twin._modules = {name: child and _twin(child, config) for name, child in module._modules.items()}
    return twin


def _kind(layer: nn.Module) -> str:
    """What layers have to have in common to be the same graph: their modules, shapes and plain attributes."""
    plain = [
        (path, name, value)
        for path, module in layer.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, (bool, int, float, str)) and name != "layer_idx"
    ]
    shapes = [(name, one.shape, one.dtype, one.requires_grad) for name, one in layer.named_parameters()]
    return repr((layer, plain, shapes))


def _stretches(layers: range, skip: SkipSet | None) -> Iterator[tuple[range, bool]]:
    """Neighbouring layers, and whether they run in full."""
    skipped = skip.attention | skip.mlp if skip else frozenset()
    start = layers.start
    for index in layers:
        if index + 1 == layers.stop or (index in skipped) != (index + 1 in skipped):
            yield range(start, index + 1), index not in skipped
            start = index + 1


def _padded(at: Pass, store: KVStore) -> Pass:
    """A pass at the shape of a graph: its further entries are invalid, and it reads all slots that the store has."""
    rows, width = at.shape
    more = (0, tier(width) - width, 0, tier(rows) - rows)
    valid = at.valid
    if any(more):
        valid = F.pad(torch.ones_like(at.positions, dtype=torch.bool) if valid is None else valid, more)
    slots = F.pad(at.slots, more)
    if valid is not None:
        slots = torch.where(valid, slots, store.trash)
    tree = at.tree and _padded_tree(at.tree, more[1], more[3])
    whole = slice(0, tier(rows))
    return Pass(_plain(F.pad(at.positions, more)), _plain(slots), valid, whole, store.capacity, None, tree)


def _stays(buffer: Tensor | None) -> None:
    """Tell CUDA graphs that a buffer stays where it is, so that they write to it in place."""
    from torch._dynamo import mark_static_address

    if buffer is not None:
        mark_static_address(buffer, guard=False)


def _plain(tensor: Tensor | None) -> Any:
    """A copy that is laid out as its shape says: a graph is for one layout, and a view of one row may have any."""
    return None if tensor is None else tensor.clone(memory_format=torch.contiguous_format)


def _padded_tree(tree: Tree, columns: int, rows: int) -> Tree:
    return replace(
        tree,
        base=F.pad(tree.base, (0, rows)),
        ancestors=F.pad(tree.ancestors, (0, 0, 0, columns, 0, rows)),
        column_positions=F.pad(tree.column_positions, (0, 0, 0, rows)),
        seen=None if tree.seen is None else F.pad(tree.seen, (0, rows)),
    )
