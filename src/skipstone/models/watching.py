"""The states between a model's layers while it runs its own forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from skipstone.models.layered import LayeredModel


@contextmanager
def watched(model: LayeredModel, exits: Iterable[int]) -> Iterator[dict[int, Tensor]]:
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
