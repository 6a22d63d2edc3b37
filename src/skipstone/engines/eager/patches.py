"""Patches of the modules of a transformers model: set once per model, removed by `take_off` (`disable`).

A patch is an instance attribute: a `forward`, or the `config` of an attention module. It acts only while skipstone runs a pass,
as the `PatchContext` of its model says. Otherwise the model's own forward is unchanged, bit for bit. A patch is an object that
refers to its module, not a closure, so that copied and pickled models get patches of their own.
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
    """State that the patches of one model share; `EagerEngine` sets it.

    thread: identifier of the thread in which skipstone runs layers or the LM head, or None. skip: sublayers that this pass
    skips. on: linear layers and attentions are patched. skippable: sublayers are patched, which only skip sets need.
    """

    thread: int | None = None
    skip: SkipSet = field(default_factory=SkipSet)
    on: bool = False
    skippable: bool = False

    @property
    def passing(self) -> bool:
        """Whether skipstone runs a pass in this thread. The model's own forward may run in another one."""
        if self.thread is None:
            return False
        return is_compiling() or self.thread == get_ident()  # torch.compile cannot follow get_ident


class ForwardPatch:
    """Replaces a module's forward. before: the instance's own forward that it covers (accelerate sets some), or None. more:
    further attributes of the patch. The module is referenced weakly, so that a model is freed with its last reference."""

    def __init__(self, module: nn.Module, running: PatchContext, before: Any, more: dict[str, Any]) -> None:
        self._module, self.running, self.before, self._more = ref(module), running, before, more
        vars(self).update(more)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._module(), self.running, self.before, self._more)

    def own(self, *args: Any, **kwargs: Any) -> Any:
        """The result without the patch."""
        if self.before is not None:
            return self.before(*args, **kwargs)
        module: Any = self._module()
        return type(module).forward(module, *args, **kwargs)


def changed(module: Any) -> bool:
    """Whether a module has hooks or a forward of its own."""
    own = module.__dict__.get("forward")
    while isinstance(own, ForwardPatch):
        own = own.before
    return own is not None or any(map(_foreign, (*module._forward_hooks.values(), *module._forward_pre_hooks.values())))


def changed_module(model: nn.Module) -> str | None:
    """A sentence about the first module with hooks or a forward of its own, or None."""
    name = next((name or type(model).__name__ for name, module in model.named_modules() if changed(module)), None)
    return name and f"{name} has hooks or a forward of its own, which only transformers' modules run"


def is_plain(head: Any) -> bool:
    """Whether a linear layer only multiplies by a plain matrix: not sharded, quantised or given up."""
    if type(head) is not nn.Linear or type(head.weight) not in (Tensor, nn.Parameter) or head.weight.is_meta:
        return False
    return tuple(head.weight.shape) == (head.out_features, head.in_features) and not changed(head)


def _foreign(hook: Any) -> bool:
    """Whether a hook is the user's. transformers' own hooks, which remain after output_hidden_states, only record."""
    return not str(getattr(hook, "__module__", None)).startswith("transformers.")


class FewRowsPatch(ForwardPatch):
    """Runs a linear layer by `linear.few_rows` in a pass."""

    def __call__(self, input: Tensor) -> Tensor:
        module: Any = self._module()
        if self.running.passing:
            return linear.few_rows(module, input)
        return nn.Linear.forward(module, input) if self.before is None else self.before(input)


class SkippablePatch(ForwardPatch):
    """Skips a module of a sublayer in a pass.

    part: "attention" adds nothing to the residual stream and stores no keys and values; "read", an attention whose keys and
    values other layers read, adds nothing but still stores them; "mlp" adds nothing; "before", an earlier module of an MLP,
    returns its input. returns: number of returned values, 0 for a tensor outside of a tuple. Values after the first (attention
    weights, a router's scores, a bias to be added) become None. summed: name of the argument for the residual stream, if the
    module may return the sum itself.
    """

    part: Part
    layer: int
    returns: int
    summed: str | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        skip = self.running.skip
        skipped = skip.attention if self.part in ("attention", "read") else skip.mlp
        if not (self.running.passing and self.layer in skipped):
            return self.own(*args, **kwargs)
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        if self.part == "before":
            return hidden
        if self.part == "read":
            self.own(*args, **kwargs)
        module: Any = self._module()
        stream = by_name(module, args, kwargs).get(self.summed) if self.summed else None
        unchanged = torch.zeros_like(hidden) if stream is None else stream  # [..., d]
        return (unchanged, *[None] * (self.returns - 1)) if self.returns else unchanged


class RecurrentPatch(ForwardPatch):
    """Runs a recurrent sublayer with the store's states, row by row, in a pass. The sublayer gets its cache by name, and hidden
    states as the first argument or as `hidden_states`."""

    layer: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.running.passing:
            return self.own(*args, **kwargs)
        rest = {name: one for name, one in kwargs.items() if name != "hidden_states"}
        cache, view = next((name, one) for name, one in kwargs.items() if isinstance(one, PassCacheView))
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        return view.recur(self.layer, hidden, lambda part, states: self.own(part, *args[1:], **{**rest, cache: states}))


class MaskPatch(ForwardPatch):
    """Replaces the mask buffer `bias` of an attention. In a pass it hides nothing, since the masks of the pass are complete."""

    def __getitem__(self, index: Any) -> Tensor:
        module: Any = self._module()
        own: Tensor = module._buffers["bias"]
        return torch.ones((1, 1, 1, 1), dtype=torch.bool, device=own.device) if self.running.passing else own[index]


class AttentionConfig:
    """Replaces the config of an attention module: while a pass runs, sdpa is `attention.attend`."""

    def __init__(self, _module: nn.Module | None, running: PatchContext, before: Any, _more: Any = None) -> None:
        vars(self).update(before=before, running=running)  # `__setattr__` sets them on the config

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (None, self.running, self.before)

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
    """Patch the linear layers inside `modules` that become faster, and the configs of attention sublayers."""
    for part in (part for module in modules for part in module.modules()):
        forward = part.__dict__.get("forward")
        if linear.pays(part) and (forward is None or isinstance(forward, ForwardPatch)):
            cover(part, FewRowsPatch, running)
    for sublayer in attentions:
        cover(sublayer, AttentionConfig, running, "config")
    running.on = True


def cover(module: nn.Module, kind: type[Any], running: PatchContext, attribute: str = "forward", **more: Any) -> None:
    """Patch an attribute of a module once. more: further attributes of the patch."""
    if not any(type(patch) is kind and patch.running is running for _, patch in _patches(module)):
        module.__dict__[attribute] = kind(module, running, module.__dict__.get(attribute), more)


def take_off(model: nn.Module) -> None:
    """Remove all patches of a model. The next pass of skipstone puts them on again."""
    for module in model.modules():
        for name, patch in _patches(module):
            patch.running.on = patch.running.skippable = False
            if patch.before is None:
                del module.__dict__[name]
            else:
                module.__dict__[name] = patch.before


def _patches(module: nn.Module) -> Iterator[tuple[str, ForwardPatch | AttentionConfig]]:
    """(attribute name, patch) of a module, the outermost first."""
    for name in ("forward", "config", "bias"):
        patch = module.__dict__.get(name)
        while isinstance(patch, (ForwardPatch, AttentionConfig)):
            yield name, patch
            patch = patch.before
