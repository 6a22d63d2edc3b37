"""Drafts with the target while some of its sublayers are skipped."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from skipstone.decoding.draft import Draft
from skipstone.decoding.drafter import layers_used
from skipstone.engines.engine import ChainInputs, ChainOutputs, SurvivalThresholds
from skipstone.engines.greedy_tokens import NO_TOKEN
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.partial_forward import PartialForward
from skipstone.methods.drafting.chain import ChainDrafter, DraftChain
from skipstone.methods.drafting.chain_stop_rule import Threshold
from skipstone.models.passes import SkipSet

Ranked = tuple[Tensor, Tensor]
"""(the k best tokens of every place [B, n, k], the chain's own first; which of them are possible [B, n, k] bool)."""


class SkippingDrafter(ChainDrafter):
    """Drafts chains with the target without the sublayers of a skip set.

    Scoring runs drafts from layer 0 again and overwrites the keys and values of drafting. skip: sublayers to leave out. ranks:
    number of tokens to draw per place, 1 for the chain's alone. coupled: draw with the target's noise, so that `match` verifies
    chains and trees.
    """

    skip: SkipSet
    reuse_cache = False

    def __init__(
        self, model: ModelRunner, rows: int, *, max_drafts: int, threshold: Threshold, ranks: int = 1, coupled: bool = True
    ) -> None:
        super().__init__(model, rows, max_drafts=max_drafts, threshold=threshold, coupled=coupled)
        self.ranks = ranks
        self._of_places: list[Ranked] = []  # one ([B, ranks], [B, ranks]) per place
        self._ranked: Ranked | None = None

    def propose_draft(self, limits: list[int], stop_rule: SurvivalThresholds | None = None) -> Draft:
        """A chain drafted without the sublayers in `self.skip`."""
        self._of_places, self._ranked = [], None
        if not any(limits):
            return Draft.empty(self.view.rows, self.view.root.device, self.view.start_forward(limits))
        return super().propose_draft(limits, stop_rule)

    def describe(self, name: str) -> list[dict[str, Any]]:
        return [layers_used(name, skip=self.skip, drafting_model=self.drafting_model)]

    def chain(self, limits: list[int], skip: SkipSet) -> tuple[Draft, Ranked | None]:
        """A chain drafted with a skip set, and the best tokens of each place (None for an empty chain, or one rank)."""
        self.skip = skip
        draft = SkippingDrafter.propose_draft(self, limits)
        return draft, self._ranked

    def one_call(self) -> tuple[int, SkipSet]:
        return self.layers, self.skip

    def chain_inputs(self, max_drafts: list[int], layers: int, skip: SkipSet | None) -> ChainInputs:
        """As in `ChainDrafter`. A tree needs confidences without a threshold, too."""
        inputs = super().chain_inputs(max_drafts, layers, skip)
        if self.ranks > 1:
            inputs.num_ranked, inputs.thresholds = self.ranks, inputs.thresholds or [0.0] * len(max_drafts)
        return inputs

    def observe_chain(self, chain: ChainOutputs) -> None:
        if chain.ranked is not None and chain.ranked.shape[1]:
            self._ranked = chain.ranked.clamp_min(0), chain.ranked >= 0

    def next_logits(self, chain: DraftChain, forward: PartialForward) -> Tensor:
        return forward.sketched_logits(self.skip)

    def propose(
        self, logits: Tensor, position: Tensor, path: Tensor, active: Sequence[bool] | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        ranked, possible, q, scores = self.sampler.candidates(logits, position, path, self.ranks, active, self.coupled)
        self._of_places.append((ranked, possible))
        return torch.where(possible[:, 0], ranked[:, 0], NO_TOKEN), q, scores

    def observe(self, scores: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """As in `ChainDrafter`. For a tree, which needs confidences, they are computed without a threshold, too."""
        confidence = scores.softmax(-1).amax(-1) if self.ranks > 1 else self.rule.of(scores)
        return confidence, self.rule.keep(confidence)

    def finish(self, chain: DraftChain, forward: PartialForward) -> Draft:
        if self._of_places and self.ranks > 1:
            ranked, possible = zip(*self._of_places, strict=True)
            self._ranked = torch.stack(ranked, 1), torch.stack(possible, 1)
        return super().finish(chain, forward)

    def choose_replay_skip(self) -> SkipSet:
        return self.skip
