"""Records the module calls of one forward of a model: arguments, order and outputs."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from skipstone.models.device_map import input_device
from skipstone.models.families import stateful_kinds, text_ids
from skipstone.models.torch_defaults import stable_defaults

PREFIX = 12  # common first tokens of both rows of a trace
TOKENS = 20  # tokens per row, many more than WINDOW
WINDOW = 8  # size of sliding windows and chunks while a model is traced
SEED = 7  # of the traced ids
WINDOWED = ("sliding_window", "attention_chunk_size")  # fields of a config that limit attention


@dataclass
class ModuleCall:
    """One call of a module. path: under the owner of the layers, or under a layer. given: arguments by name, the first one as
    "". output: its result."""

    path: str
    given: dict[str, Any]
    output: Any


@dataclass
class Trace:
    """The calls of a model's own forward over ids [2, T], two rows that differ after the first PREFIX tokens.

    parts: calls of the owner's modules without its layers, in order. before: number of those before the first layer. layers:
    calls of the layers with their indices, in order. inside: calls of the children of the first layer of every kind of mixer,
    by the layer's index. returned: for every layer, the number of values that each child returned, 0 for a tensor outside of a
    tuple. heads: calls of the LM head. cache: that the model was given. logits: [2, T, V].
    """

    ids: Tensor
    parts: list[ModuleCall] = field(default_factory=list)
    before: int | None = None
    layers: list[tuple[int, ModuleCall]] = field(default_factory=list)
    inside: dict[int, list[ModuleCall]] = field(default_factory=dict)
    returned: dict[int, dict[str, int]] = field(default_factory=dict)
    heads: list[ModuleCall] = field(default_factory=list)
    cache: Any = None
    logits: Any = None


@torch.no_grad()
def trace(model: Any, owner: Any, layers: nn.ModuleList, config: Any, positions: int) -> Trace:
    """Run a model's forward once, in eval mode, with small windows. The model, its config and its mode are then restored.

    owner: of the layers. config: of the text model. positions: maximum number. Errors of the forward pass through.
    """
    length = min(TOKENS, positions)
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(0, text_ids(model), (2, length), generator=generator, dtype=torch.int64, device="cpu")
    ids[1, :PREFIX] = ids[0, :PREFIX]
    of_kind = stateful_kinds(config)
    first: dict[int, list[ModuleCall]] = {of_kind.index(kind): [] for kind in dict.fromkeys(of_kind)}
    from transformers import DynamicCache

    cache = DynamicCache(config=config) if any(of_kind) else DynamicCache()
    record = Trace(ids.to(input_device(model)), inside=first, cache=cache)
    with shrunk_windows(config), _evaluating(model), _recorded(model, owner, layers, record), stable_defaults():
        record.logits = model(record.ids, past_key_values=record.cache, use_cache=True).logits
    return record


@contextmanager
def _recorded(model: Any, owner: Any, layers: nn.ModuleList, record: Trace) -> Iterator[None]:
    """Record all calls of this thread inside the context."""
    tracing = get_ident()

    def layer(number: int) -> Callable[[ModuleCall], None]:
        return lambda call: record.layers.append((number, call))

    def counted(number: int) -> Callable[[ModuleCall], None]:
        values = record.returned.setdefault(number, {})
        return lambda call: values.update({call.path: len(call.output) if isinstance(call.output, (tuple, list)) else 0})

    watched: list[tuple[str, Any, Callable[[ModuleCall], None]]] = [("", model.get_output_embeddings(), record.heads.append)]
    for name, module in owner.named_children():
        if module is not layers:
            several = module.named_children() if isinstance(module, nn.ModuleList) else [("", module)]
            watched += [(f"{name}.{more}" if more else name, one, record.parts.append) for more, one in several]
    watched += [(str(number), one, layer(number)) for number, one in enumerate(layers)]
    for number, one in enumerate(layers):
        watched += [(name, child, counted(number)) for name, child in one.named_children()]
    for number, calls in record.inside.items():
        watched += [(name, one, calls.append) for name, one in layers[number].named_children()]

    def begin_layers(*_: Any) -> None:
        if record.before is None and get_ident() == tracing:
            record.before = len(record.parts)

    hooks: list[Any] = []
    try:
        hooks.append(layers[0].register_forward_pre_hook(begin_layers))
        # one by one, so that Ctrl-C in between leaves no hook
        hooks.extend(
            one.register_forward_hook(partial(_record_call, path, add, tracing), with_kwargs=True) for path, one, add in watched
        )
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _record_call(
    path: str, add: Callable[[ModuleCall], None], tracing: int, module: Any, given: Any, named: Any, output: Any
) -> None:
    if get_ident() == tracing:  # the model's own forward may run in another thread
        add(ModuleCall(path, by_name(module, given, named), output))


def by_name(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a forward by name, the first one as ""."""
    bound = inspect.signature(type(module).forward).bind(module, *given, **named)
    named_ones: dict[str, Any] = {}
    for name, value in list(bound.arguments.items())[1:]:
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            named_ones |= value
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            named_ones |= {f"{name}[{number}]": one for number, one in enumerate(value)}
        else:
            named_ones[name] = value
    first = next(iter(named_ones), None)
    return {("" if name == first else name): value for name, value in named_ones.items()}


@contextmanager
def shrunk_windows(config: Any) -> Iterator[None]:
    """Limit windows and chunks to WINDOW tokens inside the context."""
    own = {name: getattr(config, name, None) for name in WINDOWED}
    wide = {name: size for name, size in own.items() if isinstance(size, int) and size > WINDOW}
    try:
        for name in wide:
            setattr(config, name, WINDOW)
        yield
    finally:
        for name, size in wide.items():
            setattr(config, name, size)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode."""
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        yield
    finally:
        for module in training:
            module.training = True
