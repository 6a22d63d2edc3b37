"""What skipstone puts on the modules of a transformers model: set once per model, taken off by `take_off` (`disable`).

A patch is an object among an instance's own attributes: a `forward`, or the `config` of an attention module. It asks the
`PatchContext` of its model whether skipstone is running a pass, and answers as transformers does where not: the model's own
forward stays what it was, bit for bit. A patch knows its module (no closure would), so that copied and pickled models have
their own.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, Literal
from weakref import ref

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from skipstone.engines.eager import attention, linear
from skipstone.engines.kv_cache import PassCacheView
from skipstone.models.passes import SkipSet
from skipstone.models.trace import by_name

Part = Literal["attention", "read", "mlp", "before"]


@dataclass(slots=True, eq=False)
class PatchContext:
    """What the patches of one model look at; `EagerEngine` sets it.

    thread: the identifier of the thread in which skipstone is running layers or the LM head right now, None for none. skip: the
    sublayers that this pass leaves out. on: the linear layers and the attention are patched. skippable: so are the sublayers,
    which only skip sets need.
    """

    thread: int | None = None
    skip: SkipSet = field(default_factory=SkipSet)
    on: bool = False
    skippable: bool = False

    @property
    def passing(self) -> bool:
        """Whether skipstone is running a pass in this thread. The model's own forward may run in another one meanwhile."""
        if self.thread is None:
            return False
        return is_compiling() or self.thread == get_ident()  # torch.compile cannot follow get_ident


class ForwardPatch:
    """A forward in the place of a module's own. before: the instance's own forward that it covers (accelerate sets such), None
    where it had its class's. The module is held weakly, so that a model is freed with its last reference."""

    __slots__ = ("_module", "_more", "before", "running")

    def __init__(self, module: nn.Module, running: PatchContext, before: Any, *more: Any) -> None:
        self._module, self.running, self.before, self._more = ref(module), running, before, more

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._module(), self.running, self.before, *self._more)

    def own(self, *given: Any, **more: Any) -> Any:
        """What the module computes without the patch."""
        if self.before is not None:
            return self.before(*given, **more)
        module: Any = self._module()
        return type(module).forward(module, *given, **more)


def changed(module: Any) -> bool:
    """Whether a module does more than its class says."""
    own = module.__dict__.get("forward")
    while isinstance(own, ForwardPatch):
        own = own.before
    return own is not None or any(map(_foreign, (*module._forward_hooks.values(), *module._forward_pre_hooks.values())))


def is_plain(head: Any) -> bool:
    """Whether a linear layer does nothing but multiply by a matrix whose numbers are all here: not sharded, quantised or given
    up. Some rows of it can then stand for it."""
    if type(head) is not nn.Linear or type(head.weight) not in (Tensor, nn.Parameter) or head.weight.is_meta:
        return False
    return tuple(head.weight.shape) == (head.out_features, head.in_features) and not changed(head)


def _foreign(hook: Any) -> bool:
    """Whether a hook is the user's. transformers' own, which stay after a forward with output_hidden_states, only listen."""
    return not str(getattr(hook, "__module__", None)).startswith("transformers.")


class FewRowsPatch(ForwardPatch):
    """A linear layer that `linear.few_rows` runs in a pass."""

    __slots__ = ()

    def __call__(self, input: Tensor) -> Tensor:
        module: Any = self._module()
        if self.running.passing:
            return linear.few_rows(module, input)
        return nn.Linear.forward(module, input) if self.before is None else self.before(input)


class SkippablePatch(ForwardPatch):
    """A module of a sublayer that a pass can leave out.

    part: "attention", which then adds nothing to the residual stream and stores no keys and values; "read", an attention whose
    keys and values other layers read, which then adds nothing but still stores them; "mlp", which then adds nothing; "before",
    on the way to such a module, which then hands on its input. returns: how many values the module returns,
    0 for a tensor that is in no tuple; those behind the first (attention weights, a router's scores, a bias that is yet to be
    added) are then None. summed: the name of the argument for the residual stream, where the module may return the sum itself.
    """

    __slots__ = ("layer", "part", "returns", "summed")

    def __init__(
        self, module: nn.Module, running: PatchContext, before: Any, part: Part, layer: int, returns: int, summed: str | None
    ) -> None:
        super().__init__(module, running, before, part, layer, returns, summed)
        self.part, self.layer, self.returns, self.summed = part, layer, returns, summed

    def __call__(self, *given: Any, **more: Any) -> Any:
        running = self.running
        if not (running.passing and self.layer in self._skipped(running.skip)):
            return self.own(*given, **more)
        hidden: Tensor = given[0] if given else more["hidden_states"]
        if self.part == "before":
            return hidden
        if self.part == "read":
            self.own(*given, **more)
        module: Any = self._module()
        stream = by_name(module, given, more).get(self.summed) if self.summed else None
        unchanged = torch.zeros_like(hidden) if stream is None else stream  # [..., d]
        return (unchanged, *[None] * (self.returns - 1)) if self.returns else unchanged

    def _skipped(self, skip: SkipSet) -> frozenset[int]:
        """Layers whose sublayer of this kind is left out."""
        return skip.attention if self.part in ("attention", "read") else skip.mlp


class RecurrentPatch(ForwardPatch):
    """A sublayer that keeps a state without positions. In a pass it begins with those of the store, row by row. It is given its
    cache by name, and its hidden states first or as `hidden_states`."""

    __slots__ = ("layer",)

    def __init__(self, module: nn.Module, running: PatchContext, before: Any, layer: int) -> None:
        super().__init__(module, running, before, layer)
        self.layer = layer

    def __call__(self, *given: Any, **more: Any) -> Any:
        if not self.running.passing:
            return self.own(*given, **more)
        rest = {name: one for name, one in more.items() if name != "hidden_states"}
        cache, view = next((name, one) for name, one in more.items() if isinstance(one, PassCacheView))
        hidden: Tensor = given[0] if given else more["hidden_states"]
        return view.recur(self.layer, hidden, lambda part, states: self.own(part, *given[1:], **{**rest, cache: states}))


class MaskPatch(ForwardPatch):
    """A buffer by which an attention masks, in the place of `bias`: in a pass it hides nothing, as the masks of the pass say
    all."""

    __slots__ = ()

    def __getitem__(self, index: Any) -> Tensor:
        module: Any = self._module()
        own: Tensor = module._buffers["bias"]
        return torch.ones((1, 1, 1, 1), dtype=torch.bool, device=own.device) if self.running.passing else own[index]


class AttentionConfig:
    """The config that an attention module sees: the model's own, but while a pass runs sdpa is `attention.attend`."""

    __slots__ = ("before", "running")

    def __init__(self, before: Any, running: PatchContext) -> None:
        object.__setattr__(self, "before", before)
        object.__setattr__(self, "running", running)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.before, self.running)

    @property
    def _attn_implementation(self) -> str:
        name = self.before._attn_implementation
        return attention.NAME if self.running.passing and name == "sdpa" else name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying and pickling ask for methods that the config's class may have
            raise AttributeError(name)
        return getattr(self.before, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.before, name, value)


def put_on(modules: Iterable[nn.Module], attentions: Iterable[nn.Module], running: PatchContext) -> None:
    """Patch the linear layers inside `modules` where that pays, and the configs of attention sublayers."""
    for part in (part for module in modules for part in module.modules()):
        forward = part.__dict__.get("forward")
        if linear.pays(part) and (forward is None or isinstance(forward, ForwardPatch)):
            cover(part, FewRowsPatch, running)
    for sublayer in attentions:
        if not _has(sublayer, AttentionConfig, running):
            sublayer.__dict__["config"] = AttentionConfig(sublayer.__dict__["config"], running)
    running.on = True


def cover(module: nn.Module, kind: type[ForwardPatch], running: PatchContext, *more: Any) -> None:
    """Put a forward of a kind on a module, unless it is there. more: what else the kind wants to know."""
    if not _has(module, kind, running):
        module.__dict__["forward"] = kind(module, running, module.__dict__.get("forward"), *more)


def open_masks(modules: Iterable[nn.Module], running: PatchContext) -> None:
    """Make modules that mask by a buffer of their own hide nothing in a pass."""
    for module in modules:
        if not _has(module, MaskPatch, running):
            module.__dict__["bias"] = MaskPatch(module, running, module.__dict__.get("bias"))


def take_off(model: nn.Module) -> None:
    """Give every module of a model what it had before. The next pass of skipstone puts the patches on again."""
    for module in model.modules():
        for name, patch in _patches(module):
            patch.running.on = patch.running.skippable = False
            if patch.before is None:
                del module.__dict__[name]
            else:
                module.__dict__[name] = patch.before


def _patches(module: nn.Module) -> Iterator[tuple[str, ForwardPatch | AttentionConfig]]:
    """(name of the attribute, patch) of a module, the outermost first."""
    for name in ("forward", "config", "bias"):
        patch = module.__dict__.get(name)
        while isinstance(patch, (ForwardPatch, AttentionConfig)):
            yield name, patch
            patch = patch.before


def _has(module: nn.Module, kind: type[Any], running: PatchContext) -> bool:
    return any(type(patch) is kind and patch.running is running for _, patch in _patches(module))
