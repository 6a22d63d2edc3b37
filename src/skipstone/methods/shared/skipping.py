"""Drafting with the target itself while some of its sublayers are left out, for every method that does so."""

from __future__ import annotations

import torch
from torch import Tensor

from skipstone.decoding.draft import Draft, RowVerdict
from skipstone.decoding.session import Request, Session
from skipstone.methods.shared.chain import Chain
from skipstone.methods.shared.confidence import Confidence
from skipstone.models.layered import LayeredModel
from skipstone.models.skipping import SkipSet

Ranked = tuple[Tensor, Tensor]
"""(tokens [B, n, k] of every place, best first, the chain's being the first; which of them are possible [B, n, k] bool)."""


class SkippingSession(Session):
    """Chains from what a skip set leaves. Drafts are coupled to the target's noise, deterministic given the seed, so that
    match verifies them, as trees too.

    most: drafts a step. threshold: of confidence. ranks: tokens that are noted of every place.
    """

    def __init__(
        self,
        model: LayeredModel,
        rows: int,
        capacity: int,
        *,
        most: int,
        threshold: float | str | None,
        ranks: int,
        scratch: int,
    ) -> None:
        super().__init__(model, rows, capacity, coupled=True, scratch=scratch)
        self.most, self.ranks = most, ranks
        self.confidence = Confidence(threshold, rows, model.device, most)

    def admit(self, row: int, request: Request) -> None:
        super().admit(row, request)
        self.confidence.reset(row)

    def chain(self, limit: list[int], skip: SkipSet) -> tuple[Draft, Ranked | None]:
        """A chain with its frontier, which scoring runs from layer 0 on, over the keys and values that drafting left there."""
        most = [min(self.most, allowed) for allowed in limit]
        chain = Chain(most, self.alive, self.model.device)
        frontier = self.frontier(most)
        position = frontier.positions[:, 0] + 1
        ranked: list[Tensor] = []
        possible: list[Tensor] = []
        for place in range(chain.width):
            logits = frontier.sketched_logits(skip)
            wanted = chain.open_rows() if self.sampler.processed else None
            found, real, scores = self.sampler.candidates(logits, position + place, frontier.tokens[:, 1:], self.ranks, wanted)
            sure, token = scores.softmax(-1).amax(-1) if self.ranks > 1 else self.confidence.of(scores), found[:, 0]
            ranked.append(found)
            possible.append(real)
            frontier.append(token[:, None], chain.add(token, None, sure))
            keep = self.confidence.keep(sure) if self.confidence.active else None
            stopped = chain.full or chain.stop(keep, self.sampler.unfinished(token))
            if stopped or (self.confidence.active and chain.all_stopped()):
                break
        return chain.draft(frontier), (torch.stack(ranked, 1), torch.stack(possible, 1)) if ranked else None

    def commit(self, draft: Draft | None, verdicts: list[RowVerdict]) -> None:
        super().commit(draft, verdicts)
        self.confidence.update(verdicts)
