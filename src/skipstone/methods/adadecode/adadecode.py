"""AdaDecode: Accelerating LLM Decoding with Adaptive Layer Parallelism
(Wei et al., ICML 2025, arXiv 2506.03700), section 2 and Algorithm 1.

A token goes up the layers stage by stage. Where the light head of a candidate layer is sure of the next token, that token
starts at once; the layers that are left of the earlier ones are run with the later ones, as they come by. When the newest token
reaches the top, everything has, and all early predictions are verified at once.

Deviations: the threshold is asked of the head's most probable token before anything is drawn (Eq. 1, read literally, asks it of
the drawn token, which biases sampling); a depth's list is emptied when it is run (Algorithm 1 as printed never does); with
`max_pending` early predictions the newest token goes to the top untested; where the heads do not pay, the threshold rises and
useless tests are left out (`guard`, ours); a deeper head may stop further predictions (`recheck`, ours, off).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from skipstone.decoding.draft import Draft, RowVerdict, Verdict
from skipstone.decoding.method import Method
from skipstone.decoding.noise import TARGET
from skipstone.decoding.sampling import Scores
from skipstone.decoding.session import Request, Session
from skipstone.decoding.settings import RejectionRule, check_rule, layer_numbers, setting, whole_number
from skipstone.methods.adadecode import heads as exit_heads
from skipstone.methods.adadecode.heads import ExitHeads
from skipstone.methods.adadecode.state import ExitState
from skipstone.methods.shared import states
from skipstone.methods.shared.chain import Chain
from skipstone.models.frontier import Frontier
from skipstone.models.host import on_device
from skipstone.models.layered import LayeredModel


@dataclass(frozen=True)
class AdaDecode(Method):
    """AdaDecode: light heads at middle layers predict early."""

    name: ClassVar[str] = "adadecode"
    aliases: ClassVar[dict[str, str]] = {
        "confidence_threshold": "threshold",
        "num_speculative_tokens": "max_pending",
        "num_assistant_tokens": "max_pending",
    }
    if_few_accepted: ClassVar[str] = "An acceptance rate that low says that the heads are not trained for this model or text."

    heads: str | ExitHeads | None = setting(
        None,
        "a folder, a hub id or a bundled name of heads, or 'original': the model's own head; none: bundled heads",
    )
    threshold: float = setting(0.75, "gamma, predict early where the most probable token has more than this.")
    max_pending: int = setting(5, "early predictions a step.")
    exit_layers: tuple[int, ...] = setting((), "candidates among the heads' layers; empty for all.")
    verification: bool = setting(True, "False keeps every early prediction (Table 3; lossy).")
    recheck: bool = setting(
        False, "deeper heads look again at pending predictions; one that is sure of another token ends predicting."
    )
    guard: bool = setting(True, "raise the threshold and leave out tests where they do not pay.")
    rejection_sample_method: RejectionRule = setting(
        "standard",
        '"standard" is Eq. 2, "coupled" draws drafts from the target\'s own noise: same seed, same text as plain sampling.',
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "exit_layers", layer_numbers("exit_layers", self.exit_layers))

    @property
    def lossless(self) -> bool:
        return self.verification

    def check(self, model: LayeredModel) -> None:
        if isinstance(self.threshold, bool) or not isinstance(self.threshold, (int, float)) or not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold must be a number in [0, 1], found {self.threshold!r}")
        whole_number("max_pending", self.max_pending, 1)
        for name in ("verification", "recheck", "guard"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, found {getattr(self, name)!r}")
        check_rule(self.rejection_sample_method)
        self._heads(model)

    def _heads(self, model: LayeredModel) -> ExitHeads:
        """The heads of a model. ValueError where they are another's, OSError where there are none."""
        if self.heads == exit_heads.ORIGINAL:
            return exit_heads.original(model, self.exit_layers)
        if isinstance(self.heads, ExitHeads):
            heads = exit_heads.fitting(self.heads, model)
        elif (source := exit_heads.for_model(model) if self.heads is None else self.heads) is None:
            raise ValueError(
                "no exit heads for this model: `skipstone train heads MODEL` makes some, to be given as heads=FOLDER "
                '(heads="original" predicts with the model\'s own head)'
            )
        else:
            heads = exit_heads.load(source, model)
        if wrong := [layer for layer in self.exit_layers if layer not in heads.card.layers]:
            raise ValueError(f"exit_layers must be among the heads' layers, {list(heads.card.layers)}, found {wrong}")
        return heads

    def report(self, model: PreTrainedModel) -> dict[str, Any]:
        return states.known(self, None, model)

    def start(self, model: LayeredModel, rows: int, capacity: int) -> Session:
        return AdaDecodeSession(self, model, rows, capacity, self._state(model, rows))

    def _state(self, model: LayeredModel, rows: int) -> ExitState:
        heads = self._heads(model)
        settings = self.exit_layers, self.threshold, self.guard
        return states.of(self, model, rows, heads, lambda: ExitState(model, heads, *settings, rows))


@dataclass
class Sweep:
    """What one token's way up came to. layer: where each row's next token was predicted, 0 where it was not. token [B],
    q [B, V] or None, confidence [B]: of the predictions, anything for other rows. warned: rows that are to stop (`recheck`)."""

    layer: list[int]
    token: Tensor
    q: Tensor | None = None
    confidence: Tensor | None = None
    warned: list[bool] = field(default_factory=list)


class AdaDecodeSession(Session):
    """Drafts at mixed depths; the scoring pass brings everything to the top. A row predicts on its own and waits for the end of
    a sweep over the stages; it is closed when its newest token fails the last test."""

    def __init__(self, method: AdaDecode, model: LayeredModel, rows: int, capacity: int, state: ExitState) -> None:
        self.coupled = method.rejection_sample_method == "coupled"
        super().__init__(model, rows, capacity, coupled=self.coupled)
        self.method, self.state = method, state
        self._exits: list[list[int]] = [[] for _ in range(rows)]
        self._passes: list[tuple[int, int, int]] = []
        self._began = 0.0

    def admit(self, row: int, request: Request) -> None:
        super().admit(row, request)
        self.state.payoff.begin_text()

    @property
    def _follows(self) -> bool:
        """Whether what was learnt may decide: where no text can depend on it."""
        return self.method.verification and (self.sampler.greedy or self.coupled)

    def draft(self, limit: list[int]) -> Draft:
        """Algorithm 1 up to the verification."""
        self._began = time.perf_counter()
        state, follows = self.state, self._follows
        room = state.most_drafts(self.method.max_pending) if follows else self.method.max_pending
        most = [min(room, allowed) for allowed in limit]
        chain = Chain(most, self.alive, self.model.device)
        frontier = self.frontier(most)
        self._exits, self._passes = [[] for _ in range(self.rows)], frontier.passes
        exits = state.worth_testing() if follows else state.exits
        threshold = state.threshold if follows else self.method.threshold
        position = frontier.positions[:, 0] + 1
        open_rows = [count > 0 for count in chain.most]
        places: list[list[int]] = []
        for place in range(chain.width):
            sweep = self._sweep(frontier, position + place, open_rows, exits, threshold)
            if not any(sweep.layer):
                break
            places.append(sweep.layer)
            chain.stop(on_device([layer > 0 for layer in sweep.layer], self.model.device))
            frontier.append(sweep.token[:, None], chain.add(sweep.token, sweep.q, sweep.confidence))
            for row, layer in enumerate(sweep.layer):
                if layer:
                    self._exits[row].append(layer)
                else:
                    frontier.depth[row, -1] = frontier.top  # there is no token: nothing is to be run
            goes_on = self.sampler.unfinished(sweep.token)
            ended = [False] * self.rows if goes_on is None else (~goes_on).tolist()
            open_rows = [
                layer > 0 and not over and not warned and place + 1 < count
                for layer, over, warned, count in zip(sweep.layer, ended, sweep.warned, chain.most, strict=True)
            ]
            if not any(open_rows):
                break
        draft = chain.draft(frontier)
        if places:
            draft.exit_layer = on_device(places, self.model.device).t()
        return draft

    def _sweep(
        self, frontier: Frontier, position: Tensor, open_rows: list[bool], exits: list[tuple[int, int]], threshold: float
    ) -> Sweep:
        """The newest token of every open row on its way up, with all that waits at the same depths, until a head is sure."""
        found = Sweep([0] * self.rows, frontier.tokens[:, -1], warned=[False] * self.rows)
        waiting = list(open_rows)
        for index, layer in exits:
            frontier.advance(layer, None if waiting == self.alive else waiting)
            logits = self.state.heads.logits(self.model, index, frontier.hidden[:, -1:])[:, 0]
            path, asked = frontier.tokens[:, 1:], waiting if self.sampler.processed else None
            scores = self.sampler.process(logits, path, asked)
            sure = scores.softmax(-1).amax(-1)
            predicts = (sure > threshold) & on_device(waiting, sure.device)
            here = predicts.tolist()  # on an accelerator the one thing waited for: what runs next depends on it
            self.state.tested(layer, [one for one, waits in zip(here, waiting, strict=True) if waits])
            if self.method.recheck:
                found.warned = self._warned(frontier, index, layer, waiting, threshold, found.warned)
            if any(here):
                _take(found, predicts, *self.sampler.drawn(scores, position, path, asked), sure)
                found.layer = [layer if one else before for one, before in zip(here, found.layer, strict=True)]
                waiting = [waits and not one for waits, one in zip(waiting, here, strict=True)]
                if not any(waiting):
                    break
        return found

    def _warned(
        self, frontier: Frontier, index: int, layer: int, rows: list[bool], threshold: float, before: list[bool]
    ) -> list[bool]:
        """Rows for one of whose pending tokens, predicted below and now come by here, this head is sure of another token."""
        doubts = []
        for place in range(frontier.width - 1):
            passed = [
                waits and frontier.depth[row, place] == layer and self._exits[row][place] < layer
                for row, waits in enumerate(rows)
            ]
            if any(passed):
                logits = self.state.heads.logits(self.model, index, frontier.hidden[:, place : place + 1])[:, 0]
                scores = self.sampler.process(logits, frontier.tokens[:, 1 : place + 1], passed)
                sure, other = scores.softmax(-1).max(-1)
                doubts.append((sure > threshold) & (other != frontier.tokens[:, place + 1]) & on_device(passed, sure.device))
        found = torch.stack(doubts).any(0).tolist() if doubts else before
        return [old or new for old, new in zip(before, found, strict=True)]

    def verify(self, draft: Draft, scores: Scores) -> Verdict:
        """Eq. 2; without verification every early prediction is kept, and the target adds its own token."""
        if self.method.verification:
            return super().verify(draft, scores)
        accepted = draft.valid.sum(1)
        last = torch.zeros_like(accepted)
        for depth in range(draft.width + 1):  # rows end at different places, and processors see a row's own prefix
            ends = accepted == depth
            p = scores.p(torch.full_like(accepted, depth - 1), draft.tokens[:, :depth], ends)
            last = torch.where(ends, self.sampler.noise.draw(p, scores.position + depth, TARGET), last)
        tokens = torch.cat([draft.tokens, last[:, None]], 1).scatter(1, accepted[:, None], last[:, None])
        against = (scores.logits[:, :-1].argmax(-1) != draft.tokens) & draft.valid
        path = torch.arange(draft.width, device=accepted.device).expand(self.rows, -1)
        return Verdict(path, tokens, accepted, overruled=against)

    def commit(self, draft: Draft | None, verdicts: list[RowVerdict]) -> None:
        super().commit(draft, verdicts)
        if draft is not None:
            seconds = time.perf_counter() - self._began if self._follows and self.method.guard else None
            self.state.record(self._exits, verdicts, self._passes, seconds)

    def remark(self) -> str | None:
        return self.state.remark()


def _take(found: Sweep, predicts: Tensor, token: Tensor, q: Tensor | None, sure: Tensor) -> None:
    """Put the predictions of some rows [B] bool where those of other rows may be already."""
    found.token = torch.where(predicts, token, found.token)
    found.confidence = sure if found.confidence is None else torch.where(predicts, sure, found.confidence)
    if q is not None:
        found.q = q if found.q is None else torch.where(predicts[:, None], q, found.q)
