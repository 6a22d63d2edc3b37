"""Drafts with the target while some of its sublayers are skipped."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from skipstone.decoding.draft import Draft
from skipstone.decoding.drafter import layers_used
from skipstone.engines.engine import SurvivalThresholds
from skipstone.engines.greedy_tokens import NO_TOKEN
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.partial_forward import PartialForward
from skipstone.methods.drafting.chain import ChainDrafter, DraftChain
from skipstone.methods.drafting.confidence import Threshold
from skipstone.methods.drafting.replay import replay_hidden_states
from skipstone.models.passes import SkipSet

Ranked = tuple[Tensor, Tensor]
"""(tokens [B, n, k] of every place, best first, the chain's being the first; which of them are possible [B, n, k] bool)."""


class SkippingDrafter(ChainDrafter):
    """Drafts chains with the sublayers that a skip set keeps. Drafts are coupled to the target's noise, deterministic given the
    seed, so that match verifies them, as trees too. Scoring runs them from layer 0 on, over the keys and values that drafting
    left there.

    skip: what drafting leaves out. max_drafts: drafts a step. threshold: of confidence. ranks: tokens that are noted of every
    place.
    """

    skip: SkipSet

    def __init__(self, model: ModelRunner, rows: int, *, max_drafts: int, threshold: Threshold, ranks: int = 1) -> None:
        super().__init__(model, rows, max_drafts=max_drafts, threshold=threshold, coupled=True)
        self.ranks = ranks
        self._ranked: list[Tensor] = []  # one [B, ranks] per place
        self._possible: list[Tensor] = []

    def propose_draft(self, limits: list[int], stop_rule: SurvivalThresholds | None = None) -> Draft:
        """A chain of what `self.skip` leaves."""
        self._ranked, self._possible = [], []
        if not any(limits):
            return Draft.empty(self.view.rows, self.view.root.device, self.view.start_forward(limits))
        return super().propose_draft(limits, stop_rule)

    def describe(self, name: str) -> list[dict[str, Any]]:
        return [layers_used(name, skip=self.skip, drafting_model=self.drafting_model)]

    def chain(self, limits: list[int], skip: SkipSet) -> tuple[Draft, Ranked | None]:
        """A chain of a skip set, and the tokens that were considered at each of its places; None for an empty chain."""
        self.skip = skip
        draft = SkippingDrafter.propose_draft(self, limits)
        return draft, (torch.stack(self._ranked, 1), torch.stack(self._possible, 1)) if self._ranked else None

    def one_call(self) -> tuple[int, SkipSet] | None:
        return (self.model.depth, self.skip) if self.ranks == 1 else None

    def next_logits(self, chain: DraftChain, forward: PartialForward) -> Tensor:
        return forward.sketched_logits(self.skip)

    def propose(
        self, logits: Tensor, position: Tensor, path: Tensor, active: Sequence[bool] | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        ranked, possible, scores = self.sampler.candidates(logits, position, path, self.ranks, active)
        self._ranked.append(ranked)
        self._possible.append(possible)
        return torch.where(possible[:, 0], ranked[:, 0], NO_TOKEN), None, scores

    def observe(self, scores: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """As always; but a tree of runners-up is built by confidences, so they are noted without a threshold as well."""
        confidence = scores.softmax(-1).amax(-1) if self.ranks > 1 else self.rule.of(scores)
        return confidence, self.rule.keep(confidence)

    def replay_tokens(self, row: int, tokens: Sequence[int]) -> Tensor | None:
        """One pass over the tokens, without the skip set."""
        model = self.drafting_model or self.model
        states = replay_hidden_states(self.view.store, row, tokens[:-1], model, self.model.depth, self.replayed_skip())
        return model.logits(states, self.shortlist)[0]

    def replayed_skip(self) -> SkipSet:
        """The skip set that the next replay is of."""
        return self.skip
