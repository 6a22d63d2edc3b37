"""One forward pass: its tokens, positions, slots, attention masks and skipped sublayers."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


class AttentionReach(NamedTuple):
    """How far back the queries of a layer attend.

    window: size of a sliding window, including the query. chunk: size of a chunk; a query attends to its own chunk (position //
    chunk) only. None: no such limit.
    """

    window: int | None = None
    chunk: int | None = None


def visible(query: Tensor, position: Tensor, reach: AttentionReach) -> Tensor:
    """Whether a position is within a query's reach, bool. query, position: int64, of shapes that broadcast."""
    seen = position <= query
    if reach.window is not None:
        seen = seen & (position > query - reach.window)
    if reach.chunk is not None:
        seen = seen & (position // reach.chunk == query // reach.chunk)
    return seen


@dataclass(frozen=True, slots=True)
class MaskForm:
    """The form of masks for an attention implementation.

    dtype: torch.bool (True attends), or the float dtype of an additive mask. optional: no mask is needed for one query that
    attends to everything, or for a causal prompt from its first token on. hides: True in a boolean mask hides.
    """

    dtype: torch.dtype
    optional: bool
    hides: bool = False


@dataclass(slots=True)
class Tree:
    """Attention between the nodes of a tree.

    base: [b] int64, the slot of column 0; column c writes slot base + c. ancestors: [b, n, N] bool, which of the N columns each
    of the n query columns attends to, including itself. column_positions: [b, N] int64. seen: [b] int64, every query attends to
    all slots below; None means base.
    """

    base: Tensor
    ancestors: Tensor
    column_positions: Tensor
    seen: Tensor | None = None


@dataclass(slots=True)
class Pass:
    """The tokens of one forward, their positions and their slots.

    positions, slots: [b, n] int64. valid: [b, n] bool, None if every entry is valid. rows: the b rows of the store. extent: all
    visible slots are in [0, extent) (known on the host). first_slot: every row writes the slots [first_slot, first_slot + n),
    so that slices replace indices; None if rows write to different slots. tree: None for a chain.
    """

    positions: Tensor
    slots: Tensor
    valid: Tensor | None
    rows: slice
    extent: int
    first_slot: int | None = None
    tree: Tree | None = None
    _masks: dict[tuple[AttentionReach, torch.dtype, int], Tensor] = field(default_factory=dict, init=False)

    @property
    def shape(self) -> tuple[int, int]:
        return self.positions.shape[0], self.positions.shape[1]

    def row(self, number: int) -> "Pass":
        """The part of the pass for one of its rows."""
        part = slice(number, number + 1)
        tree = self.tree and Tree(
            self.tree.base[part],
            self.tree.ancestors[part],
            self.tree.column_positions[part],
            None if self.tree.seen is None else self.tree.seen[part],
        )
        place = slice(self.rows.start + number, self.rows.start + number + 1)
        valid = None if self.valid is None else self.valid[part]
        return Pass(self.positions[part], self.slots[part], valid, place, self.extent, self.first_slot, tree)

    def mask(self, reach: AttentionReach, form: MaskForm, groups: int = 1) -> Tensor | None:
        """The attention mask of a layer kind, built once per pass: [b, 1, groups * n, extent].

        reach: how far back the layer attends. groups: number of repetitions of each query row (query heads per key/value head,
        if the attention packs them).
        """
        if form.optional and self._plain(reach):
            return None
        key = (reach, form.dtype, groups)
        mask = self._masks.get(key)
        if mask is None:
            seen = self._visible(reach)[:, None]
            if form.dtype == torch.bool:  # [b, 1, n, extent]
                mask = ~seen if form.hides else seen
            else:
                lowest = torch.finfo(form.dtype).min
                mask = torch.zeros(seen.shape, dtype=form.dtype, device=seen.device).masked_fill_(~seen, lowest)
            mask = self._masks[key] = mask.repeat(1, 1, groups, 1) if groups > 1 else mask
        return mask

    def _plain(self, reach: AttentionReach) -> bool:
        """Whether the pass is one query that attends to everything, or a causal prompt from its first token on."""
        limit = reach.chunk if reach.window is None else reach.window
        if self.first_slot is None or self.tree is not None or (limit is not None and self.extent > limit):
            return False
        width = self.positions.shape[1]
        return self.extent == self.first_slot + width and (width == 1 or self.first_slot == 0)

    def _visible(self, reach: AttentionReach) -> Tensor:
        """The slots that each query attends to: [b or 1, n, extent] bool."""
        slot = torch.arange(self.extent, device=self.positions.device, dtype=torch.int64)  # [extent]
        query = self.positions[:, :, None]  # [b, n, 1]
        seen = visible(query, self.slot_positions()[:, None], reach)
        if self.tree is not None:
            relative, index, inside = self._columns(slot)
            below = self.tree.ancestors.gather(2, index[:, None].expand(-1, query.shape[1], -1))  # [b, n, extent]
            before = relative < 0 if self.tree.seen is None else slot[None] < self.tree.seen[:, None]
            seen = seen & (before[:, None] | (below & inside[:, None]))
        if self.valid is not None:  # an invalid query attends to slot 0: no row of a softmax may be empty
            seen = torch.where(self.valid[:, :, None], seen, (slot == 0)[None, None])
        return seen

    def slot_positions(self) -> Tensor:
        """The position of the token in every visible slot: [b or 1, extent] int64. A chain's slots are its positions."""
        slot = torch.arange(self.extent, device=self.positions.device, dtype=torch.int64)  # [extent]
        if self.tree is None:
            return slot[None]
        _, index, inside = self._columns(slot)
        return torch.where(inside, self.tree.column_positions.gather(1, index), slot[None])

    def _columns(self, slot: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(the tree's column of every slot, the same clamped to the tree, whether it is in the tree), [b, extent] each."""
        assert self.tree is not None
        relative = slot[None] - self.tree.base[:, None]
        columns = self.tree.ancestors.shape[2]
        return relative, relative.clamp(0, columns - 1), (relative >= 0) & (relative < columns)


def ancestors(parents: Tensor) -> Tensor:
    """Ancestors of every column, including itself and the root.

    parents: [B, n] int64 over nodes, -1 for the root. Returns [B, n+1, n+1] bool with the root as column 0.
    """
    rows, width = parents.shape
    reach = torch.eye(width + 1, dtype=torch.float32, device=parents.device).repeat(rows, 1, 1)
    nodes = torch.arange(1, width + 1, device=parents.device, dtype=torch.int64)
    reach[:, nodes] = reach[:, nodes].scatter(2, parents[:, :, None] + 1, 1.0)
    steps = 1
    while steps < width:  # i squarings reach the ancestors up to 2^i steps away
        reach = ((reach @ reach) > 0).float()
        steps *= 2
    return reach > 0


@dataclass(frozen=True)
class SkipSet:
    """Sublayers that a pass skips: indices of layers without attention, and without MLP, in this pass."""

    attention: frozenset[int] = frozenset()
    mlp: frozenset[int] = frozenset()
