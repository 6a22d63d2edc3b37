"""Tables of the rotary phases (cos and sin) of positions, from transformers' own rotary module."""

from typing import Any

import torch
from torch import Tensor

from skipstone.models.families import RotarySource, submodule
from skipstone.models.weight_version import AttributeValues

Phases = Tensor | tuple[Tensor, ...]
"""The result of a rotary module: cos and sin, or one complex tensor."""


class RotaryTables:
    """The rotary phases of one model, in tables that grow with the requested positions.

    decoder: holds the rotary modules. max_positions: maximum number of rows of a table.
    """

    def __init__(self, decoder: Any, max_positions: int) -> None:
        self._decoder, self._max_positions = decoder, max_positions
        self._tables: dict[RotarySource, tuple[Tensor, ...]] = {}
        self._made_of: dict[RotarySource, AttributeValues] = {}  # lacks outdated tables

    def is_current(self) -> bool:
        """Whether the tables still match their modules. Outdated tables are rebuilt when they are next requested."""
        for source, values in [*self._made_of.items()]:
            if not values.are_current():
                self._made_of.pop(source, None)
        return len(self._made_of) == len(self._tables)

    def table(self, source: RotarySource, extent: int, like: Tensor) -> tuple[Tensor, ...]:
        """cos and sin [positions, rotary_dim] for at least `extent` positions, or for all that the model has.

        Some models have one complex tensor [positions, rotary_dim / 2]. like: a tensor with the requested dtype and device,
        which must be the same at every call.
        """
        table = self._tables.get(source)
        needed = min(max(extent, 1), self._max_positions)
        if table is None or table[0].shape[0] < needed or source not in self._made_of:
            size = min(self._max_positions, max(256, 1 << (needed - 1).bit_length()))
            position = torch.arange(size, device=like.device, dtype=torch.int64)[None]
            if source.axes:
                position = position.expand(source.axes, 1, -1)
            module, extra = submodule(self._decoder, source.path), (source.kind,) if source.kind else ()
            module(like, position[..., :1], *extra)  # resets dynamic RoPE, which may have seen longer sequences
            phases = module(like, position, *extra)
            parts = phases if isinstance(phases, tuple) else (phases,)
            table = self._tables[source] = tuple(part.reshape(-1, *part.shape[-2:])[0].to(like.device) for part in parts)
            numbers = [(vars(module), name) for name, value in vars(module).items() if type(value) in (int, float)]
            self._made_of[source] = AttributeValues(numbers, module.modules())  # after the call: dynamic RoPE writes both
        return table
