"""What a model's own layers, or a draft model, draft for `auto`: chains that stop by price, and what they would have said of
text that is known by now."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from skipstone.control.price import NEVER
from skipstone.decoding.batch import Batch, Request
from skipstone.decoding.draft import Draft, RowVerdict
from skipstone.decoding.session import PREFILL_CHUNK
from skipstone.methods.adadecode.heads import ExitHeads
from skipstone.methods.shared.chain import Chain, ChainSession
from skipstone.methods.shared.confidence import Confidence
from skipstone.methods.shared.draft_model import DraftModel, DraftModelMethod, DraftModelSession
from skipstone.models.engines.engine import Survival
from skipstone.models.frontier import Frontier
from skipstone.models.host import on_device
from skipstone.models.layered import LayeredModel
from skipstone.models.passes import Pass, SkipSet, Tree

MOST_DRAFTS = 25
"""Of a step."""


class Drafter(Protocol):
    """A session that `auto` may choose. stop: until what survival it drafts, told before every draft. guess: what a draft step
    of it costs, in plain steps, before one was measured."""

    stop: "PricedStop"
    guess: float

    @property
    def own_threads(self) -> bool: ...

    def refuse(self, request: Request) -> None: ...

    def draft(self, limit: list[int]) -> Draft: ...

    def join(self, batch: Batch) -> None: ...

    def begin(self, row: int, request: Request) -> None: ...

    def learn(self, draft: Draft | None, verdicts: list[RowVerdict]) -> None: ...

    def end(self, row: int) -> None: ...

    def shadow_tokens(self, row: int, wanted: int) -> int:
        """How many tokens it would have to read to say something of the latest `wanted`."""
        ...

    def said(self, row: int, tokens: Sequence[int]) -> Tensor | None:
        """Logits [n, V] of what it says behind each of a row's latest tokens but the newest; None where it cannot tell now.
        tokens: these, the newest too."""
        ...


def share_of(draft_model: LayeredModel, target: LayeredModel) -> float:
    """How large a draft model is beside its target, 1 at most: about what a draft step of it costs."""
    sizes = [sum(one.numel() for one in each.model.parameters()) for each in (draft_model, target)]
    return min(sizes[0] / sizes[1], 1.0)


class PricedStop(Confidence):
    """Drafting goes on while the survival of what is drafted is worth it (`control.price.thresholds`)."""

    def __init__(self, rows: int, device: torch.device) -> None:
        super().__init__(0.0, rows, device, MOST_DRAFTS)
        self.survival = self._rule = Survival(1.0, 0.0, ())
        self._survived: Tensor | None = None  # [B], of what is drafted so far
        self._place = 0

    def begin(self, survival: Survival) -> None:
        """A step that drafts begins."""
        self.survival = self._rule = survival
        self._survived, self._place = None, 0

    def keep(self, confidence: Tensor | None) -> Tensor | None:
        """As in `Confidence`, by survival."""
        assert confidence is not None
        how, place = self._rule, self._place
        accepted = (how.slope * confidence.clamp(3e-4, 1 - 3e-4).logit() + how.offset).sigmoid()  # [B]
        self._survived, self._place = accepted if self._survived is None else self._survived * accepted, place + 1
        return self._survived >= (how.least[place] if place < len(how.least) else NEVER)


class LayersDrafter(ChainSession):
    """The target's first layers, or what a skip set leaves of all of them, or these in fewer bits.

    layers: that draft, of an early exit E < L. skip: sublayers that are left out; None for an exit. drafter: as in `Frontier`.
    head: exit heads and the number of the one that predicts; None for the model's own."""

    def __init__(
        self,
        model: LayeredModel,
        rows: int,
        capacity: int,
        layers: int,
        skip: SkipSet | None = None,
        drafter: LayeredModel | None = None,
        shortlist: Tensor | None = None,
        head: tuple[ExitHeads, int] | None = None,
    ) -> None:
        super().__init__(model, rows, capacity, most=MOST_DRAFTS, threshold=0.0, coupled=True)
        self.stop = self.confidence = PricedStop(rows, model.device)
        self.layers, self.skip, self.drafter, self.shortlist = layers, skip, drafter, shortlist
        self.head, self.at_once = head, head is None or head[0].linear
        if head is not None and self.at_once:
            self.transform = head[0].transform(head[1])
        left = layers if skip is None else model.depth - (len(skip.attention) + len(skip.mlp)) / 2
        self.guess = left / model.depth * (0.6 if drafter is not None else 1.0)

    def shadow_tokens(self, row: int, wanted: int) -> int:
        return wanted

    def one_call(self) -> tuple[int, SkipSet | None] | None:
        return (self.layers, self.skip) if self.at_once else None

    def next_logits(self, chain: Chain, frontier: Frontier) -> Tensor:
        if self.skip is not None:
            return frontier.sketched_logits(self.skip)
        frontier.advance(self.layers)
        return self._head_logits(self.model, frontier.hidden[:, -1:])[:, 0]

    def _head_logits(self, model: LayeredModel, states: Tensor) -> Tensor:
        """[B, n, d] -> [B, n, V] float32."""
        if self.head is None:
            return model.logits(states, self.shortlist)
        heads, number = self.head
        return heads.logits(model, number, states, self.shortlist)

    def finish(self, chain: Chain, frontier: Frontier) -> Draft:
        return chain.draft(frontier, exit_layer=self.layers if self.skip is None else None)

    def said(self, row: int, tokens: Sequence[int]) -> Tensor | None:
        """One pass over the tokens. It reads the target's keys and values before them and writes its own behind everything that
        is committed."""
        if self.model.family.recurrent:
            return None  # a state is not run twice over tokens that it knows
        tokens = tokens[:-1]
        model, end, width = self.drafter or self.model, self.store.length[row], len(tokens)
        self.store.reserve(end + width)
        positions = torch.arange(end - width, end, device=self.model.device)[None]  # [1, n]
        below = torch.ones((1, width, width), dtype=torch.bool, device=self.model.device).tril()
        tree = Tree(on_device([end], self.model.device), below, positions, seen=on_device([end - width], self.model.device))
        at = Pass(positions, positions + width, None, slice(row, row + 1), end + width, end, tree)
        hidden = model.embed(on_device([list(tokens)], self.model.device), positions)
        states = model.run(hidden, at, self.store, range(self.layers), self.skip)
        return self._head_logits(model, states)[0]


class ModelDrafter(DraftModelSession):
    """A draft model."""

    def __init__(
        self, method: DraftModelMethod, model: LayeredModel, draft_model: DraftModel, rows: int, capacity: int
    ) -> None:
        super().__init__(method, model, draft_model, rows, capacity, MOST_DRAFTS, 0.0)
        self.coupled = True
        self.stop = self.confidence = PricedStop(rows, model.device)
        self.guess = share_of(draft_model, model)

    def one_call(self) -> tuple[int, None]:
        return self.draft_model.depth, None

    def shadow_tokens(self, row: int, wanted: int) -> int:
        return max(len(self.text[row]) - 1 - self.side.store.length[row], wanted)

    def said(self, row: int, tokens: Sequence[int]) -> Tensor | None:
        """It reads what it lacks of the row, the last part of which tells."""
        side, wanted, text = self.side, len(tokens) - 1, self.text[row]
        if len(text) - 1 - side.store.length[row] < wanted:
            return None
        if before := text[side.store.length[row] : -1 - wanted]:
            side.resume(row, on_device(before, self.draft_model.device).clamp_(max=self.last_id))
            while side.prefilling:
                side.prefill(PREFILL_CHUNK)
        side.batch.waiting[row], side.alive[row] = None, True
        known, end = side.store.length[row], len(text) - 1
        read = on_device([text[known:end]], self.draft_model.device).clamp_(max=self.last_id)  # [1, wanted]
        side.store.reserve(end)
        positions = torch.arange(known, end, device=read.device)[None]
        hidden = self.draft_model.embed(read, positions)
        at = Pass(positions, positions, None, slice(row, row + 1), end, known)
        states = self.draft_model.run(hidden, at, side.store, range(self.draft_model.depth))
        side.store.length[row] = end
        return self.draft_model.logits(states, side.shortlist)[0].to(self.model.device)
