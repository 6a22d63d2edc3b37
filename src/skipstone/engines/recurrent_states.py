"""States without positions (linear attention, short convolutions), and how they drop rejected drafts.

Such a sublayer sums all earlier tokens in a state of fixed size. No token can be removed from it again. So a row keeps the
state at its base, which is never rolled back, and the sublayer's inputs for every token since. A pass that continues after the
last of these tokens starts from the state after it. After a rejection a pass starts earlier. It then starts from the base and
replays the tokens in between in the same call. Their outputs are discarded.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from skipstone.models.passes import Pass

MAX_REPLAYED_TOKENS = 64  # tokens that a pass replays; the base moves forward if there would be more
States = dict[tuple[str, int], Tensor]
"""States of one call: (kind of state, index) -> [rows, ...]; empty without earlier tokens."""
Call = Callable[[Tensor, "StateView"], Tensor]
"""A sublayer's own forward: ([g, m, d], its cache) -> [g, m, d]."""


class RowSpan(NamedTuple):
    """The tokens of one row in a pass.

    row: index in the store. number: index in the pass. column: of the first token. width: number of tokens. first: slot of the
    first token.
    """

    row: int
    number: int
    column: int
    width: int
    first: int


def spans(at: Pass) -> list[RowSpan]:
    """The tokens of every row that has any in a pass. ValueError if they are not consecutive."""
    rows, width = at.shape
    if at.valid is None and at.first_slot is not None:
        return [RowSpan(at.rows.start + row, row, 0, width, at.first_slot) for row in range(rows)]
    slots = at.slots.tolist()
    valid = [[True] * width] * rows if at.valid is None else at.valid.tolist()
    row_spans = []
    for row in range(rows):
        tokens = [(column, slots[row][column]) for column in range(width) if valid[row][column]]
        if not tokens:
            continue
        column, first = tokens[0]
        if tokens != [(column + i, first + i) for i in range(len(tokens))]:
            raise ValueError("a recurrent state takes tokens one after the other, and this pass leaves some out")
        row_spans.append(RowSpan(at.rows.start + row, row, column, len(tokens), first))
    return row_spans


class StateView:
    """Duck type of a transformers cache for one call of one recurrent sublayer. states: before the call, then after it."""

    def __init__(self, states: States) -> None:
        self.states = dict(states)

    def has_previous_state(self, *_: object, **__: object) -> bool:
        """Whether there are earlier tokens."""
        return bool(self.states)

    def is_recording_past(self, *_: object) -> bool:
        """True, always: no kernel may change a state in place."""
        return True

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The last inputs of a convolution, [g, channels, size]."""
        return self.states.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The state of linear attention."""
        return self.states.get(("recurrent", state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: object
    ) -> Tensor:
        """Store inputs of a convolution, [g, channels, m]. Returns them after the earlier inputs that the convolution reads."""
        before = self.states.get(("conv", state_idx))
        size = conv_kernel_size or (conv_states if before is None else before).shape[-1]
        full = conv_states if before is None else torch.cat([before, conv_states], -1)
        full = torch.nn.functional.pad(full, (max(0, size - full.shape[-1]), 0))
        self.states["conv", state_idx] = full[..., full.shape[-1] - size :].clone()  # a view would keep all inputs alive
        return full

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: object) -> Tensor:
        """Store the state of linear attention."""
        self.states["recurrent", state_idx] = recurrent_states
        return recurrent_states


@dataclass(slots=True)
class StateHistory:
    """The states of one sublayer for one row.

    base: number of tokens summed in `before`. before: the states after these. inputs: [n, d], the sublayer's inputs for the n
    tokens since the base, or None. after: the states after all of them.
    """

    base: int = 0
    before: States = field(default_factory=dict)
    inputs: Tensor | None = None
    after: States = field(default_factory=dict)

    @property
    def end(self) -> int:
        """Number of tokens so far, including those that may be rejected."""
        return self.base + (0 if self.inputs is None else len(self.inputs))

    def tensors(self, *, inputs: bool) -> list[Tensor]:
        """All states, and optionally the inputs."""
        return [*self.before.values(), *self.after.values(), *([self.inputs] if inputs and self.inputs is not None else [])]

    def begin(self, first: int, committed: int, call: Call) -> tuple[Tensor | None, States]:
        """Prepare a pass that starts at the token with index `first`; `committed` tokens are committed. Drops later tokens.

        Returns (inputs [n, d] of the tokens to replay, the states before them). ValueError if no state can start there.
        """
        if first == 0:
            self.base, self.before, self.inputs, self.after = 0, {}, None, {}
        if not self.base <= first <= self.end:
            raise ValueError(
                f"a pass begins behind {first} tokens, and there are recurrent states behind {self.base} to {self.end} only"
            )
        if first == self.end:
            if committed >= first:
                self._move_base(self.after)
            return None, self.after
        assert self.inputs is not None
        self.inputs = self.inputs[: first - self.base]
        if first - self.base > MAX_REPLAYED_TOKENS and committed >= first:
            view = StateView(self.before)
            call(self.inputs[None], view)
            self._move_base(view.states)
        return self.inputs if first > self.base else None, self.before

    def _move_base(self, states: States) -> None:
        """Move the base after all tokens. states: after them."""
        self.base, self.before, self.inputs = self.end, states, None

    def take(self, inputs: Tensor, after: States) -> None:
        """Append the inputs [m, d] of a pass and the states after it."""
        self.inputs = inputs if self.inputs is None else torch.cat([self.inputs, inputs])
        self.after = after


class StateHistories:
    """The histories of all recurrent sublayers and rows of a store, created when they are first run."""

    def __init__(self) -> None:
        self._histories: dict[tuple[int, int], StateHistory] = {}

    def of(self, layer: int, row: int) -> StateHistory:
        """The history of one layer and row."""
        return self._histories.setdefault((layer, row), StateHistory())

    def bytes(self) -> int:
        """Memory held by all states and inputs."""
        return self._count_bytes(inputs=True)

    def row_bytes(self, tokens: int) -> int:
        """Maximum bytes for one row, if no pass has more than `tokens` of its tokens. Call it after a pass of one token of one
        row. Each sublayer keeps the states before and after its inputs, and the inputs that it may replay."""
        states = self._count_bytes(inputs=False)
        return 2 * states + (self._count_bytes(inputs=True) - states) * (MAX_REPLAYED_TOKENS + tokens)

    def _count_bytes(self, *, inputs: bool) -> int:
        tensors = [one for history in self._histories.values() for one in history.tensors(inputs=inputs)]
        return sum({id(one): one.untyped_storage().nbytes() for one in tensors}.values())

    def run(self, layer: int, hidden: Tensor, row_spans: Iterable[RowSpan], lengths: list[int], call: Call) -> Tensor:
        """A sublayer's output [b, n, d] for its input, 0 where a row has no token. lengths: committed tokens of every row.

        Rows with the same number of new and of replayed tokens run together. Nothing is padded, since padding would change a
        state.
        """
        output = torch.zeros_like(hidden)
        groups: dict[tuple[int, int, bool], list[tuple[RowSpan, Tensor | None, States]]] = {}
        for span in row_spans:
            replayed, states = self.of(layer, span.row).begin(span.first, lengths[span.row], call)
            group = 0 if replayed is None else len(replayed), span.width, bool(states)
            groups.setdefault(group, []).append((span, replayed, states))
        for (count, *_), members in groups.items():
            new = torch.stack([hidden[span.number, span.column : span.column + span.width] for span, _, _ in members])
            replays = [replayed for _, replayed, _ in members if replayed is not None]
            joined = torch.cat([torch.stack(replays), new], 1) if count else new
            view = StateView({key: torch.cat([states[key] for _, _, states in members]) for key in members[0][2]})
            result = call(joined, view)[:, count:]
            for place, (span, _, _) in enumerate(members):
                output[span.number, span.column : span.column + span.width] = result[place]
                after = {key: state[place : place + 1] for key, state in view.states.items()}
                inputs = new[place]
                if len(members) > 1:  # a view would keep the states of all rows alive
                    inputs, after = inputs.clone(), {key: state.clone() for key, state in after.items()}
                self.of(layer, span.row).take(inputs, after)
        return output

    def check(self, other: "StateHistories", row: int, other_row: int, length: int, tolerance: float) -> None:
        """AssertionError unless the inputs for a row's committed tokens since its bases equal those of a complete reference
        row."""
        for (layer, mine), history in self._histories.items():
            if mine != row or history.inputs is None or history.base >= length:
                continue
            reference = other.of(layer, other_row)
            assert reference.inputs is not None, f"layer {layer} has run on one side only"
            inputs = history.inputs[: length - history.base]
            expected = reference.inputs[history.base - reference.base : length - reference.base]
            error, scale = (inputs - expected).abs().max().item(), expected.abs().max().item()
            assert error <= tolerance * max(scale, 1e-6), f"inputs of layer {layer} of row {row} differ by {error:.3g}"
