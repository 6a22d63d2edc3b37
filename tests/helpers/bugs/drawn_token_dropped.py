"""Drawn tokens with an odd id are not submitted, and what follows them is not either."""

from __future__ import annotations

from skipstone.decoding.draft import Draft
from skipstone.engines.engine import SurvivalThresholds
from skipstone.methods.layerskip import LayerSkipDrafter
from tests.helpers.bugs.base import broken


class Broken(LayerSkipDrafter):
    def propose_draft(self, limits: list[int], stop_rule: SurvivalThresholds | None = None) -> Draft:
        draft = super().propose_draft(limits, stop_rule)
        draft.valid = draft.valid & (draft.tokens % 2 == 0).long().cumprod(1).bool()
        return draft


METHOD = broken(Broken)
