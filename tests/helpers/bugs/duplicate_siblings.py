"""The draft is a tree in which two children of the root carry the same token."""

from __future__ import annotations

import torch

from skipstone.decoding.draft import Draft
from skipstone.engines.engine import SurvivalThresholds
from skipstone.methods.layerskip import LayerSkipDrafter
from tests.helpers.bugs.base import broken


class Broken(LayerSkipDrafter):
    def propose_draft(self, limits: list[int], stop_rule: SurvivalThresholds | None = None) -> Draft:
        view = self.view
        if min(limits) < 2:
            return Draft.empty(view.rows, view.root.device, view.start_forward([0] * view.rows))
        guess = view.root[:, None]
        forward = view.start_forward([2] * view.rows)
        tokens, valid = guess.repeat(1, 2), torch.tensor(view.alive)[:, None].repeat(1, 2)
        parents = torch.full_like(tokens, -1)
        forward.append(tokens, valid, parents)
        return Draft(tokens, valid, forward, parents=parents)


METHOD = broken(Broken)
