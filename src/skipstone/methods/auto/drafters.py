"""What `auto` chooses from: drafters, and what is thought of their costs before they are measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from skipstone.decoding.draft import Draft
from skipstone.decoding.drafter import Drafter, layers_used
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.partial_forward import PartialForward
from skipstone.methods.adadecode.heads import ExitHeads
from skipstone.methods.drafting.chain import ChainDrafter, DraftChain
from skipstone.methods.drafting.replay import replay_hidden_states
from skipstone.methods.swift.layer_set_optimisation import LayerSetOptimisation
from skipstone.models.passes import SkipSet

MOST_DRAFTS = 25
"""Of a step."""
FEWER_BITS = {"int8": 0.6, "int4": 0.35}
"""A draft step in fewer bits beside one as the weights are stored, before one was measured. A shadow gains nothing by them: so
many tokens at once are bound by arithmetic."""
WHOLE_STEP = 2.0
"""A step of a method that stops by its own rule, in plain steps, before one was measured."""


@dataclass(frozen=True)
class Candidate:
    """A drafter that `auto` may choose.

    guess: what a draft step of it costs in plain steps, before one was measured; with `own_rule` a whole step. shadow_guess:
    the share of the target that runs for a shadow. own_rule: it stops by itself; others are told how far to draft. searches:
    shadows are what its search evaluates, too. spelled: the method with its settings.
    """

    drafter: Drafter
    guess: float
    shadow_guess: float
    spelled: str
    own_rule: bool = False
    searches: bool = False


def share_of(draft_model: ModelRunner, target: ModelRunner) -> float:
    """How large a draft model is beside its target, 1 at most: about what a draft step of it costs."""
    sizes = [sum(one.numel() for one in each.model.parameters()) for each in (draft_model, target)]
    return min(sizes[0] / sizes[1], 1.0)


class LayersDrafter(ChainDrafter):
    """The target's first layers, or what a skip set leaves of all of them, or these in fewer bits.

    layers: that draft, of an early exit E < L. skip: sublayers that are left out; None for an exit. drafting_model: as in
    `PartialForward`. head: exit heads and the number of the one that predicts; None for the model's own.
    """

    def __init__(
        self,
        model: ModelRunner,
        rows: int,
        layers: int,
        skip: SkipSet | None = None,
        drafting_model: ModelRunner | None = None,
        shortlist: Tensor | None = None,
        head: tuple[ExitHeads, int] | None = None,
    ) -> None:
        super().__init__(model, rows, max_drafts=MOST_DRAFTS, threshold=None, coupled=True)
        self.layers, self.skip, self.drafting_model, self.shortlist = layers, skip, drafting_model, shortlist
        self.head, self.at_once = head, head is None or head[0].linear
        if head is not None and self.at_once:
            self.transform = head[0].transform(head[1])

    def candidate(self, spelled: str, searches: bool = False) -> Candidate:
        """This drafter as a candidate of `auto`. spelled: the method."""
        skip, depth = self.skip, self.model.depth
        left = self.layers if skip is None else depth - (len(skip.attention) + len(skip.mlp)) / 2
        bits = None if self.drafting_model is None else self.drafting_model.engine.quantize
        return Candidate(self, left / depth * FEWER_BITS.get(bits or "", 1.0), left / depth, spelled, searches=searches)

    def describe(self, name: str) -> list[dict[str, Any]]:
        exits = [self.layers] if self.layers < self.model.depth else []
        return [layers_used(name, exits, self.skip, self.drafting_model)]

    def one_call(self) -> tuple[int, SkipSet | None] | None:
        return (self.layers, self.skip) if self.at_once else None

    def next_logits(self, chain: DraftChain, forward: PartialForward) -> Tensor:
        if self.skip is not None:
            return forward.sketched_logits(self.skip)
        forward.advance(self.layers)
        return self._head_logits(self.model, forward.hidden[:, -1:])[:, 0]

    def _head_logits(self, model: ModelRunner, states: Tensor) -> Tensor:
        """[B, n, d] -> [B, n, V] float32."""
        if self.head is None:
            return model.logits(states, self.shortlist)
        heads, number = self.head
        return heads.logits(model, number, states, self.shortlist)

    def finish(self, chain: DraftChain, forward: PartialForward) -> Draft:
        return chain.draft(forward, exit_layer=self.layers if self.skip is None else None)

    def replay_tokens(self, row: int, tokens: Sequence[int]) -> Tensor | None:
        """One pass over the tokens. It reads the target's keys and values before them and writes its own behind everything that
        is committed."""
        if self.model.family.recurrent:
            return None  # a state is not run twice over tokens that it knows
        model = self.drafting_model or self.model
        states = replay_hidden_states(self.view.store, row, tokens[:-1], model, self.layers, self._replayed())
        return self._head_logits(model, states)[0]

    def _replayed(self) -> SkipSet | None:
        """The skip set that the next replay is of."""
        return self.skip


class SearchingDrafter(LayersDrafter):
    """A layer set that SWIFT's optimisation finds. While that goes on, shadows are its evaluations: a candidate is judged by
    the latest tokens, and what is learnt of it counts as the drafter's where it becomes the set in use."""

    def __init__(self, optimisation: LayerSetOptimisation, model: ModelRunner, rows: int, shortlist: Tensor | None) -> None:
        self.optimisation, self._candidate = optimisation, optimisation.skipped
        super().__init__(model, rows, model.depth, optimisation.skip, shortlist=shortlist)

    def _replayed(self) -> SkipSet:
        self.skip, candidate = self.optimisation.skip, self.optimisation.candidate()
        self._candidate = self.optimisation.skipped if candidate is None else candidate
        return self.optimisation.space.to_skip_set(self._candidate)

    def observe_replay(self, right: Sequence[bool]) -> bool:
        if self.optimisation.searching:
            self.optimisation.evaluated(self._candidate, sum(right) / len(right), len(right))
            self.skip = self.optimisation.skip
        return bool((self._candidate == self.optimisation.skipped).all())
