"""The draft is a tree in which two children of the root carry the same token."""

from __future__ import annotations

import torch

from skipstone.decoding.draft import Draft
from skipstone.methods.layerskip import LayerSkipSession
from tests.helpers.bugs.base import broken


class Broken(LayerSkipSession):
    def draft(self, limit: list[int]) -> Draft:
        if min(limit) < 2:
            return Draft.empty(self.rows, self.root.device, self.frontier([0] * self.rows))
        guess = self.root[:, None]
        frontier = self.frontier([2] * self.rows)
        tokens, valid = guess.repeat(1, 2), torch.tensor(self.alive)[:, None].repeat(1, 2)
        parents = torch.full_like(tokens, -1)
        frontier.append(tokens, valid, parents)
        return Draft(tokens, valid, frontier, parents=parents)


METHOD = broken(Broken)
