"""A drawn token that its own drafter thought unlikely is taken back."""

from __future__ import annotations

from skipstone.decoding.draft import Draft
from skipstone.engines.engine import SurvivalThresholds
from skipstone.methods.layerskip import LayerSkipDrafter
from tests.helpers.bugs.base import broken


class Broken(LayerSkipDrafter):
    def propose_draft(self, limits: list[int], stop_rule: SurvivalThresholds | None = None) -> Draft:
        draft = super().propose_draft(limits, stop_rule)
        if draft.q is not None:
            likely = draft.q.gather(2, draft.tokens[:, :, None]).squeeze(2) > 0.3
            draft.valid = draft.valid & likely.long().cumprod(1).bool()
        return draft


METHOD = broken(Broken)
