"""One of AdaDecode's heads as a candidate of `auto`: it drafts a chain from its layer."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from skipstone.decoding.draft import Draft
from skipstone.decoding.drafter import layers_used
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.partial_forward import PartialForward
from skipstone.methods.adadecode.heads import ExitHeads
from skipstone.methods.drafting.chain import ChainDrafter, DraftChain
from skipstone.methods.drafting.replay import replay_hidden_states


class HeadChainDrafter(ChainDrafter):
    """Drafts with the first layers of the target and exit head number `number`."""

    def __init__(
        self, heads: ExitHeads, number: int, model: ModelRunner, rows: int, max_drafts: int, shortlist: Tensor | None
    ) -> None:
        super().__init__(model, rows, max_drafts=max_drafts, threshold=None, coupled=True)
        self.heads, self.number, self.shortlist = heads, number, shortlist
        self.exit_layer = heads.card.layers[number]
        if heads.linear:
            self.transform = heads.transform(number)

    def describe(self, name: str) -> list[dict[str, Any]]:
        return [layers_used(name, exits=[self.exit_layer])]

    def one_call(self) -> tuple[int, None] | None:
        return (self.exit_layer, None) if self.heads.linear else None

    def next_logits(self, chain: DraftChain, forward: PartialForward) -> Tensor:
        forward.advance(self.exit_layer)
        return self.heads.logits(self.model, self.number, forward.hidden[:, -1:], self.shortlist)[:, 0]

    def finish(self, chain: DraftChain, forward: PartialForward) -> Draft:
        return chain.draft(forward, exit_layer=self.exit_layer)

    def replay_tokens(self, row: int, tokens: Sequence[int]) -> Tensor | None:
        """Run the tokens through the first layers and the head in one pass."""
        states = replay_hidden_states(self.view.store, row, tokens[:-1], self.model, self.exit_layer, None)
        return self.heads.logits(self.model, self.number, states, self.shortlist)[0]
