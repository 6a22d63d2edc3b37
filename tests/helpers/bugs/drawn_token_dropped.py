"""Drawn tokens with an odd id are not submitted, and what follows them is not either."""

from __future__ import annotations

from skipstone.decoding.draft import Draft
from skipstone.methods.layerskip import LayerSkipSession
from tests.helpers.bugs.base import broken


class Broken(LayerSkipSession):
    def draft(self, limit: list[int]) -> Draft:
        draft = super().draft(limit)
        draft.valid = draft.valid & (draft.tokens % 2 == 0).long().cumprod(1).bool()
        return draft


METHOD = broken(Broken)
