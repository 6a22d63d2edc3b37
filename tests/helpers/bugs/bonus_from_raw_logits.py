"""The bonus token is drawn from the raw logits, without temperature and top-p."""

from __future__ import annotations

import torch

from skipstone.decoding.draft import Draft, Verdict
from skipstone.decoding.sampling import Scores
from skipstone.decoding.session import Session
from tests.helpers.bugs.base import broken


class Broken(Session):
    def verify(self, draft: Draft, scores: Scores) -> Verdict:
        verdict = super().verify(draft, scores)
        full = verdict.accepted == draft.valid.sum(1)
        if draft.q is not None and bool(full.any()):
            raw = scores.at(verdict.accepted - 1).softmax(-1)
            again = torch.multinomial(raw, 1, generator=torch.Generator().manual_seed(int(scores.position.sum())))
            own = verdict.tokens.gather(1, verdict.accepted[:, None])
            verdict.tokens.scatter_(1, verdict.accepted[:, None], torch.where(full[:, None], again, own))
        return verdict


METHOD = broken(session=Broken)
