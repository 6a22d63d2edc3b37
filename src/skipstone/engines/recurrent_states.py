"""States that have no positions: those of linear attention and of short convolutions.

Such a sublayer sums all earlier tokens up in a state of a fixed size, from which no token can be taken away again. So a row
keeps the state at its base, a place that nothing is rolled back behind, and what the sublayer was given for every token since.
A pass that goes on from the last of those tokens begins with the state after it. One that begins earlier, because drafts were
rejected, begins at the base and runs the tokens in between once more, with its own in one call; their outputs are thrown away.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from skipstone.models.passes import Pass

MOST_REPLAYED = 64  # tokens that a pass runs once more; where there would be more, the base is moved behind them
States = dict[tuple[str, int], Tensor]
"""States of one call: what a sublayer calls it and its number -> [rows, ...]; empty where there are no earlier tokens."""
Call = Callable[[Tensor, "StateView"], Tensor]
"""A sublayer's own forward: ([g, m, d], the cache that it is given) -> [g, m, d]."""


class RowSpan(NamedTuple):
    """The tokens of one row in a pass. row: of the store. number: of the row in the pass. column: of its first token. width:
    its tokens. first: the slot of the first one."""

    row: int
    number: int
    column: int
    width: int
    first: int


def spans(at: Pass) -> list[RowSpan]:
    """The tokens of every row of a pass that has any. ValueError where they do not follow one another."""
    rows, width = at.shape
    if at.valid is None and at.first_slot is not None:
        return [RowSpan(at.rows.start + row, row, 0, width, at.first_slot) for row in range(rows)]
    slots = at.slots.tolist()
    valid = [[True] * width] * rows if at.valid is None else at.valid.tolist()
    found = []
    for row in range(rows):
        columns = [column for column in range(width) if valid[row][column]]
        if not columns:
            continue
        begin, taken = columns[0], len(columns)
        first = slots[row][begin]
        if [(column, slots[row][column]) for column in columns] != [(begin + i, first + i) for i in range(taken)]:
            raise ValueError("a recurrent state takes tokens one after the other, and this pass leaves some out")
        found.append(RowSpan(at.rows.start + row, row, begin, taken, first))
    return found


class StateView:
    """Duck type of a transformers cache for one call of one recurrent sublayer. states: what it
    begins with, and has after it."""

    def __init__(self, states: States) -> None:
        self.states = dict(states)

    def has_previous_state(self, *_: object, **__: object) -> bool:
        """Whether there were earlier tokens."""
        return bool(self.states)

    def is_recording_past(self, *_: object) -> bool:
        """True, always: no kernel may change a state in place."""
        return True

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The last inputs of a convolution, [g, channels, size]."""
        return self.states.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """What linear attention has summed up."""
        return self.states.get(("recurrent", state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: object
    ) -> Tensor:
        """Take inputs of a convolution over, [g, channels, m]. Returns them behind the earlier ones that it reads."""
        before = self.states.get(("conv", state_idx))
        size = conv_kernel_size or (conv_states if before is None else before).shape[-1]
        full = conv_states if before is None else torch.cat([before, conv_states], -1)
        full = torch.nn.functional.pad(full, (max(0, size - full.shape[-1]), 0))
        self.states["conv", state_idx] = full[..., full.shape[-1] - size :].clone()  # a view would keep all inputs alive
        return full

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: object) -> Tensor:
        """Take what linear attention has summed up over."""
        self.states["recurrent", state_idx] = recurrent_states
        return recurrent_states


@dataclass(slots=True)
class StateHistory:
    """What one sublayer keeps of one row.

    base: tokens that `before` sums up. before: the states after them. inputs: [n, d], what it was given for the n tokens since;
    None for no tokens. after: the states after all of those.
    """

    base: int = 0
    before: States = field(default_factory=dict)
    inputs: Tensor | None = None
    after: States = field(default_factory=dict)

    @property
    def end(self) -> int:
        """Tokens so far, those that may be rejected with them."""
        return self.base + (0 if self.inputs is None else len(self.inputs))

    def tensors(self, *, inputs: bool) -> list[Tensor]:
        """The states that it keeps, and the inputs if they are wanted."""
        return [*self.before.values(), *self.after.values(), *([self.inputs] if inputs and self.inputs is not None else [])]

    def begin(self, first: int, committed: int, call: Call) -> tuple[Tensor | None, States]:
        """(inputs [n, d] of tokens to be run once more, the states before those) of a pass that begins with token `first`, when
        so many are committed. Later tokens are forgotten. ValueError where it cannot begin there."""
        if first == 0:
            self.base, self.before, self.inputs, self.after = 0, {}, None, {}
        if not self.base <= first <= self.end:
            raise ValueError(
                f"a pass begins behind {first} tokens, and there are recurrent states behind {self.base} to {self.end} only"
            )
        if first == self.end:
            if committed >= first:
                self._settle(self.after)
            return None, self.after
        assert self.inputs is not None
        self.inputs = self.inputs[: first - self.base]
        if first - self.base > MOST_REPLAYED and committed >= first:
            view = StateView(self.before)
            call(self.inputs[None], view)
            self._settle(view.states)
        return self.inputs if first > self.base else None, self.before

    def _settle(self, states: States) -> None:
        """Move the base behind all tokens. states: after them."""
        self.base, self.before, self.inputs = self.end, states, None

    def take(self, inputs: Tensor, after: States) -> None:
        """What a pass has run, [m, d], and the states after it."""
        self.inputs = inputs if self.inputs is None else torch.cat([self.inputs, inputs])
        self.after = after


class StateHistories:
    """What the recurrent sublayers of a model keep of the rows of a store. They are made when they are first run."""

    def __init__(self) -> None:
        self._trails: dict[tuple[int, int], StateHistory] = {}

    def of(self, layer: int, row: int) -> StateHistory:
        """That of one layer and row."""
        return self._trails.setdefault((layer, row), StateHistory())

    def bytes(self) -> int:
        """Memory held by all states and inputs."""
        return self._held(inputs=True)

    def row_bytes(self, tokens: int) -> int:
        """What they hold of one row at most, if a pass has at most so many tokens of it. Asked after a pass of one token of one
        row. Each sublayer keeps states before and after its inputs, and inputs that it may have to run once more."""
        states = self._held(inputs=False)
        return 2 * states + (self._held(inputs=True) - states) * (MOST_REPLAYED + tokens)

    def _held(self, *, inputs: bool) -> int:
        held = [one for trail in self._trails.values() for one in trail.tensors(inputs=inputs)]
        return sum({id(one): one.untyped_storage().nbytes() for one in held}.values())

    def run(self, layer: int, hidden: Tensor, found: Iterable[RowSpan], lengths: list[int], call: Call) -> Tensor:
        """A sublayer's output [b, n, d] for its input, 0 where a row has no token. lengths: committed tokens of every row.

        Rows with as many tokens, new ones and such that are run once more, are run together. None is ever padded: padding would
        change a state.
        """
        output = torch.zeros_like(hidden)
        groups: dict[tuple[int, int, bool], list[tuple[RowSpan, Tensor | None, States]]] = {}
        for span in found:
            again, states = self.of(layer, span.row).begin(span.first, lengths[span.row], call)
            group = 0 if again is None else len(again), span.width, bool(states)
            groups.setdefault(group, []).append((span, again, states))
        for (count, *_), members in groups.items():
            new = torch.stack([hidden[span.number, span.column : span.column + span.width] for span, _, _ in members])
            given = torch.cat([torch.stack([again for _, again, _ in members if again is not None]), new], 1) if count else new
            view = StateView({key: torch.cat([states[key] for _, _, states in members]) for key in members[0][2]})
            result = call(given, view)[:, count:]
            for place, (span, _, _) in enumerate(members):
                output[span.number, span.column : span.column + span.width] = result[place]
                after = {key: state[place : place + 1] for key, state in view.states.items()}
                inputs = new[place]
                if len(members) > 1:  # a view would keep those of all rows alive
                    inputs, after = inputs.clone(), {key: state.clone() for key, state in after.items()}
                self.of(layer, span.row).take(inputs, after)
        return output

    def check(self, other: "StateHistories", row: int, other_row: int, length: int, tolerance: float) -> None:
        """AssertionError unless what the sublayers were given for the committed tokens of a row, since its bases, is what
        another's row was given, which knows all of them."""
        for (layer, mine), trail in self._trails.items():
            if mine != row or trail.inputs is None or trail.base >= length:
                continue
            reference = other.of(layer, other_row)
            assert reference.inputs is not None, f"layer {layer} has run on one side only"
            found = trail.inputs[: length - trail.base]
            expected = reference.inputs[trail.base - reference.base : length - reference.base]
            error, scale = (found - expected).abs().max().item(), expected.abs().max().item()
            assert error <= tolerance * max(scale, 1e-6), f"layer {layer} of row {row} was given what differs by {error:.3g}"
