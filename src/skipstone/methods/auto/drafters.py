"""What a model's own layers, or a draft model, draft for `auto`: chains that stop by price, and what they would have said of
text that is known by now."""

from collections.abc import Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from skipstone.control.price import NEVER
from skipstone.decoding.batch import Batch, Request
from skipstone.decoding.draft import Draft, Picked, RowVerdict, Verdict
from skipstone.decoding.sampling import Scores
from skipstone.decoding.session import PREFILL_CHUNK, Session
from skipstone.methods.adadecode.heads import ExitHeads
from skipstone.methods.shared.chain import Chain, ChainSession
from skipstone.methods.shared.confidence import Confidence
from skipstone.methods.shared.draft_model import DraftModel, DraftModelMethod, DraftModelSession
from skipstone.methods.shared.hindsight import states_behind
from skipstone.methods.swift.optimisation import Optimisation
from skipstone.models.engines.engine import Survival
from skipstone.models.frontier import Frontier
from skipstone.models.host import on_device
from skipstone.models.layered import LayeredModel
from skipstone.models.passes import Pass, SkipSet

MOST_DRAFTS = 25
"""Of a step."""
FEWER_BITS = {"int8": 0.6, "int4": 0.35}
"""A draft step in fewer bits beside one as the weights are stored, before one was measured. A shadow gains nothing by them: so
many tokens at once are bound by arithmetic."""


class Drafter(Protocol):
    """What `auto` may choose. own_rule: it stops by itself; others are told before every draft until what survival to go on.
    guess: what a draft step of it costs, of one with its own rule a whole step, in plain steps, before one was measured.
    shadow_guess: the share of the target that runs for a shadow. searches: shadows are what its search evaluates, too."""

    own_rule: ClassVar[bool]
    searches: ClassVar[bool]
    guess: float
    shadow_guess: float

    @property
    def own_threads(self) -> bool: ...

    def refuse(self, request: Request) -> None: ...

    def until(self, survival: Survival) -> None:
        """How far to draft, told before every draft of what has no rule of its own."""
        ...

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

    def counts(self, right: Sequence[bool]) -> bool:
        """Whether what it last said is what it would draft; else something was tried on its behalf. right: of what it said."""
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
        self._place, self._rows = 0, rows

    def begin(self, survival: Survival, rows: int) -> None:
        """A step that drafts begins. rows: that decode."""
        self.survival = self._rule = survival
        self._survived, self._place, self._rows, self.joint = None, 0, rows, bool(survival.beside)

    def keep(self, confidence: Tensor | None) -> Tensor | None:
        """As in `Confidence`, by survival."""
        assert confidence is not None
        how, place = self._rule, self._place
        accepted = (how.slope * confidence.clamp(3e-4, 1 - 3e-4).logit() + how.offset).sigmoid()  # [B]
        self._survived, self._place = accepted if self._survived is None else self._survived * accepted, place + 1
        return self._survived >= _at(how.beside or how.least, place)

    def together(self, going: Tensor) -> Tensor:
        """As in `Confidence`: all of them, where they pay for a draft step, or none."""
        how, place = self._rule, self._place - 1
        assert self._survived is not None
        least, beside = _at(how.least, place), _at(how.beside, place)
        above = torch.where(going, self._survived - beside, 0.0).sum()
        return (above >= self._rows * (least - beside)).expand_as(going)


def _at(survivals: Sequence[float], place: int) -> float:
    return survivals[place] if place < len(survivals) else NEVER


class LayersDrafter(ChainSession):
    """The target's first layers, or what a skip set leaves of all of them, or these in fewer bits.

    layers: that draft, of an early exit E < L. skip: sublayers that are left out; None for an exit. drafter: as in `Frontier`.
    head: exit heads and the number of the one that predicts; None for the model's own."""

    own_rule: ClassVar[bool] = False
    searches: ClassVar[bool] = False

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
        self.shadow_guess = left / model.depth
        self.guess = self.shadow_guess * (FEWER_BITS.get(drafter.engine.quantize or "", 1.0) if drafter is not None else 1.0)

    def until(self, survival: Survival) -> None:
        self.stop.begin(survival, sum(self.alive))

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
        model = self.drafter or self.model
        states = states_behind(self.store, row, tokens[:-1], model, self.layers, self._looked_at())
        return self._head_logits(model, states)[0]

    def _looked_at(self) -> SkipSet | None:
        """The skip set that the next shadow is of."""
        return self.skip

    def counts(self, right: Sequence[bool]) -> bool:
        return True


class SearchingDrafter(LayersDrafter):
    """A layer set that SWIFT's optimisation finds. While that goes on, shadows are its evaluations: a candidate is judged by
    the latest tokens, and what is learnt of it counts as the drafter's where it becomes the set in use."""

    searches: ClassVar[bool] = True

    def __init__(
        self, optimisation: Optimisation, model: LayeredModel, rows: int, capacity: int, shortlist: Tensor | None
    ) -> None:
        self.optimisation, self._candidate = optimisation, optimisation.skipped
        super().__init__(model, rows, capacity, model.depth, optimisation.skip, shortlist=shortlist)

    def _looked_at(self) -> SkipSet:
        self.skip, candidate = self.optimisation.skip, self.optimisation.candidate()
        self._candidate = self.optimisation.skipped if candidate is None else candidate
        return self.optimisation.space.to_skip_set(self._candidate)

    def counts(self, right: Sequence[bool]) -> bool:
        if self.optimisation.searching:
            self.optimisation.evaluated(self._candidate, sum(right) / len(right), len(right))
            self.skip = self.optimisation.skip
        return bool((self._candidate == self.optimisation.skipped).all())


class OwnRule:
    """A whole method as a drafter: it drafts and verifies by its own rules, and is judged by what its steps come to."""

    own_rule: ClassVar[bool] = True
    searches: ClassVar[bool] = False
    guess = 2.0
    shadow_guess = 0.0

    def __init__(self, session: Session, spelled: str) -> None:
        self.session, self.spelled = session, spelled

    def until(self, survival: Survival) -> None:
        """It knows by itself."""

    @property
    def own_threads(self) -> bool:
        return self.session.own_threads

    def refuse(self, request: Request) -> None:
        self.session.refuse(request)

    def draft(self, limit: list[int]) -> Draft:
        return self.session.draft(limit)

    def verify(self, draft: Draft, scores: Scores) -> Verdict | Picked:
        """By the method's rule."""
        return self.session.verify(draft, scores)

    def join(self, batch: Batch) -> None:
        self.session.join(batch)

    def begin(self, row: int, request: Request) -> None:
        self.session.begin(row, request)

    def learn(self, draft: Draft | None, verdicts: list[RowVerdict]) -> None:
        self.session.learn(draft, verdicts)

    def end(self, row: int) -> None:
        self.session.end(row)

    def shadow_tokens(self, row: int, wanted: int) -> int:
        return wanted

    def said(self, row: int, tokens: Sequence[int]) -> None:
        return None

    def counts(self, right: Sequence[bool]) -> bool:
        return True


class ModelDrafter(DraftModelSession):
    """A draft model."""

    own_rule: ClassVar[bool] = False
    searches: ClassVar[bool] = False

    def __init__(
        self, method: DraftModelMethod, model: LayeredModel, draft_model: DraftModel, rows: int, capacity: int
    ) -> None:
        super().__init__(method, model, draft_model, rows, capacity, MOST_DRAFTS, 0.0)
        self.coupled = True
        self.stop = self.confidence = PricedStop(rows, model.device)
        self.guess = self.shadow_guess = share_of(draft_model, model)

    def until(self, survival: Survival) -> None:
        self.stop.begin(survival, sum(self.alive))

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
        positions = torch.arange(known, end, device=read.device, dtype=torch.int64)[None]
        hidden = self.draft_model.embed(read, positions)
        at = Pass(positions, positions, None, slice(row, row + 1), end, known)
        states = self.draft_model.run(hidden, at, side.store, range(self.draft_model.depth))
        side.store.length[row] = end
        return self.draft_model.logits(states, side.shortlist)[0].to(self.model.device)

    def counts(self, right: Sequence[bool]) -> bool:
        return True
