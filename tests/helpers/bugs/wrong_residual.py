"""After a rejection the token is drawn from p, not from the residual of p and q."""

from __future__ import annotations

import torch

from skipstone.decoding.draft import Draft, Verdict
from skipstone.decoding.sampling import Scores
from skipstone.decoding.session import Session
from tests.helpers.bugs.base import broken


class Broken(Session):
    def verify(self, draft: Draft, scores: Scores) -> Verdict:
        verdict = super().verify(draft, scores)
        rejected = verdict.accepted < draft.valid.sum(1)
        if draft.q is not None and bool(rejected.any()):
            p = scores.p(verdict.accepted - 1, draft.tokens[:, :0], rejected)
            again = torch.multinomial(p.float(), 1, generator=torch.Generator().manual_seed(int(scores.position.sum())))
            own = verdict.tokens.gather(1, verdict.accepted[:, None])
            verdict.tokens.scatter_(1, verdict.accepted[:, None], torch.where(rejected[:, None], again, own))
        return verdict


METHOD = broken(session=Broken)
