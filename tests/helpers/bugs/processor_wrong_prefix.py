"""Processors do not see the tokens that were accepted from drafts."""

from __future__ import annotations

from skipstone.decoding.draft import Draft, RowVerdict
from skipstone.decoding.session import Session
from tests.helpers.bugs.base import broken


class Broken(Session):
    def commit(self, draft: Draft | None, verdicts: list[RowVerdict]) -> None:
        own = self.sampler.extend
        self.sampler.extend = lambda row, tokens: own(row, tokens[-1:])  # type: ignore[method-assign]
        super().commit(draft, verdicts)
        self.sampler.extend = own  # type: ignore[method-assign]


METHOD = broken(session=Broken)
