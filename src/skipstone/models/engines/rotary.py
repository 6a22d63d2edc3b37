"""cos and sin of positions, from transformers' own rotary module, kept in tables."""

from typing import Any

import torch
from torch import Tensor

from skipstone.models.families import Family


class RotaryTables:
    """The rotary phases of one model, in tables that grow with the positions that are asked for.

    decoder: holds the rotary module, under the name that the family says. max_positions: rows that no table goes beyond.
    """

    def __init__(self, decoder: Any, family: Family, max_positions: int) -> None:
        self._rotary = None if family.rotary is None else getattr(decoder, family.rotary)
        self._max_positions = max_positions
        self._tables: dict[str, tuple[Tensor, Tensor]] = {}

    def table(self, kind: str, extent: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [positions, rotary_dim] of at least `extent` positions, or of all that the model has.

        kind: the layer type, where the family's rotary module wants to know it, else "". like: a tensor of the dtype and on the
        device that they are wanted in; it must be the same at every call.
        """
        assert self._rotary is not None, "a model without rotary positions"
        table = self._tables.get(kind)
        needed = min(max(extent, 1), self._max_positions)
        if table is None or table[0].shape[0] < needed:
            size = min(self._max_positions, max(256, 1 << (needed - 1).bit_length()))
            position = torch.arange(size, device=like.device)[None]
            extra = (kind,) if kind else ()
            self._rotary(like, position[:, :1], *extra)  # dynamic RoPE forgets the longer sequences it may have seen
            cos, sin = self._rotary(like, position, *extra)
            table = self._tables[kind] = (cos[0].to(like.device), sin[0].to(like.device))
        return table
