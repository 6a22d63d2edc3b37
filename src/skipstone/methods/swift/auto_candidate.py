"""SWIFT as a candidate of `auto`: chains of the best layer set so far. `auto`'s replays evaluate its search."""

from collections.abc import Sequence

from torch import Tensor

from skipstone.engines.model_runner import ModelRunner
from skipstone.methods.drafting.sublayer_skipping import SkippingDrafter
from skipstone.methods.swift.layer_set_optimisation import LayerSetOptimisation
from skipstone.models.passes import SkipSet


class SwiftChainDrafter(SkippingDrafter):
    """Drafts with the best layer set of SWIFT's optimisation. While that searches, each replay evaluates a candidate set.

    Such a replay counts as one of this drafter only if the candidate becomes the set in use."""

    def __init__(
        self, optimisation: LayerSetOptimisation, model: ModelRunner, rows: int, max_drafts: int, shortlist: Tensor | None
    ) -> None:
        super().__init__(model, rows, max_drafts=max_drafts, threshold=None)
        self.optimisation, self._candidate, self.shortlist = optimisation, optimisation.skipped, shortlist
        self.skip = optimisation.skip

    def choose_replay_skip(self) -> SkipSet:
        self.skip, candidate = self.optimisation.skip, self.optimisation.candidate()
        self._candidate = self.optimisation.skipped if candidate is None else candidate
        return self.optimisation.space.to_skip_set(self._candidate)

    def observe_replay(self, right: Sequence[bool]) -> bool:
        if self.optimisation.searching:
            self.optimisation.evaluated(self._candidate, sum(right) / len(right), len(right))
            self.skip = self.optimisation.skip
        return bool((self._candidate == self.optimisation.skipped).all())
