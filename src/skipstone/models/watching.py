"""The states between a model's layers while it runs its own forward."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from skipstone.models.modules import DecoderModules


@contextmanager
def watched(model: DecoderModules, exits: Iterable[int]) -> Iterator[dict[int, Tensor]]:
    """The states of the last forward that the model itself runs inside: E -> [B, T, d], those that leave the first E layers,
    and for E = 0 those that enter the first one."""
    found: dict[int, Tensor] = {}

    def enters(_: Any, given: tuple[Any, ...]) -> None:
        found[0] = given[0]

    def leaves(exit: int) -> Callable[..., None]:
        def hook(_: Any, given: Any, output: Any) -> None:
            found[exit] = output[0] if isinstance(output, tuple) else output

        return hook

    with ExitStack() as stack:
        for exit in exits:
            layer = model.layers[max(exit - 1, 0)]
            hook = layer.register_forward_hook(leaves(exit)) if exit else layer.register_forward_pre_hook(enters)
            stack.callback(hook.remove)
        yield found


@torch.inference_mode()
def layer_states(model: DecoderModules, ids: Tensor) -> list[Tensor]:
    """[T] int64 -> what enters layer 0 and what leaves every layer, L + 1 tensors [1, T, d], by the model's own forward."""
    exits = range(model.depth + 1)
    with watched(model, exits) as found:
        model.model(ids[None].to(model.model.device), use_cache=False)
    return [found[exit] for exit in exits]
