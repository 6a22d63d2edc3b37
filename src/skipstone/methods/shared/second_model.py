"""Drafting with a second model, for every method that does so: its own keys and values at the same positions, and chains
of what it would say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor
from transformers import PreTrainedModel

from skipstone.decoding.draft import Draft, RowVerdict
from skipstone.decoding.method import Method
from skipstone.decoding.sampling import Scores
from skipstone.decoding.session import PREFILL_CHUNK, Request, Session
from skipstone.decoding.settings import RejectionRule, check_rule, setting
from skipstone.methods.shared import draft_model as draft_models
from skipstone.methods.shared.chain import Chain
from skipstone.methods.shared.draft_model import DraftModel, called
from skipstone.models.frontier import Frontier
from skipstone.models.host import across, on_device
from skipstone.models.layered import LayeredModel

Observe = Callable[[Tensor], tuple[Tensor | None, Tensor | None]]
"""Processed draft logits [B, V] that a token was drawn from -> (what is noted of it [B], rows that may draft on [B] bool)."""


@dataclass(frozen=True)
class Paired(Method):
    """What methods with a draft model share: which one, where it lies, and the ordinary acceptance rule."""

    by_model: ClassVar[tuple[str, ...]] = ("draft_model",)
    aliases: ClassVar[dict[str, str]] = {"model": "draft_model", "assistant_model": "draft_model"}
    if_few_accepted: ClassVar[str] = (
        "An acceptance rate that low says that the draft model does not suit the target or the text."
    )

    draft_model: str | PreTrainedModel | None = setting(
        None,
        "a folder, a hub id, a bundled name or a model object with the target's vocabulary; none: the bundled one that fits",
    )
    draft_device: str | None = setting(None, "where a named draft model is loaded; none: where the target is", kw_only=True)
    draft_dtype: str | None = setting(None, "the dtype a named draft model is loaded in; none: the target's", kw_only=True)
    rejection_sample_method: RejectionRule = setting(
        "standard", '"standard" is Leviathan\'s rule; "coupled" draws drafts from the target\'s own noise', kw_only=True
    )

    def check(self, model: LayeredModel) -> None:
        check_rule(self.rejection_sample_method)
        self.helper(model)

    def helper(self, model: LayeredModel) -> DraftModel:
        """The draft model for a target. OSError where there is none of that name, ValueError where the two do not fit."""
        return draft_models.of(self.draft_model, model, self.draft_device, self.draft_dtype)


class Follower:
    """A draft model on the heels of a session: keys and values of what was committed, row by row.

    After a step its store lacks the last committed token, or two of them: where a whole draft was accepted, the last of it
    never went through the draft model. Steps without drafts let it fall behind further; it catches up when it is asked next.
    """

    def __init__(self, model: DraftModel, rows: int, capacity: int) -> None:
        self.model = model
        self.side = Session(model, rows, capacity)
        self.text: list[list[int]] = [[] for _ in range(rows)]
        self.last_id = model.embeddings - 1  # the target may have more, which mean nothing to anybody
        self._fed: int | None = None

    def admit(self, row: int, request: Request) -> None:
        """Follow a new row from its prompt on."""
        self.side.admit(row, replace(request, prompt=request.prompt.clamp(max=self.last_id)))
        self.text[row] = request.prompt.tolist()

    def release(self, row: int) -> None:
        """Forget a row."""
        self.side.release(row)

    def frontier(self, most: list[int], alive: list[bool]) -> tuple[Frontier, int]:
        """(what every live row lacks up to its last committed token, with room for `most` drafts a row; how many columns that
        is, 1 or 2)."""
        store, live = self.side.store, [row for row, lives in enumerate(alive) if lives]
        for row in live:
            if len(self.text[row]) - store.length[row] > 2:
                self._catch_up(row)
        lag = max(len(self.text[row]) - store.length[row] for row in live)
        for row in live:  # a row that lacks one token only runs another once more
            store.length[row] = len(self.text[row]) - lag
        lacking = [text[-lag:] if lives else [0] * lag for text, lives in zip(self.text, alive, strict=True)]
        columns = on_device(lacking, self.model.device).clamp_(max=self.last_id)
        frontier = Frontier(self.model, store, columns[:, 0], alive, [count + lag - 1 for count in most])
        if lag > 1:
            frontier.append(columns[:, 1:])
        return frontier, lag

    def _catch_up(self, row: int) -> None:
        """Run all that a row lacks but its last token."""
        known = self.side.store.length[row]
        self.side.resume(row, on_device(self.text[row][known:-1], self.model.device).clamp_(max=self.last_id))
        while self.side.prefilling:
            self.side.prefill(PREFILL_CHUNK)

    def drafted(self, fed: int) -> None:
        """fed: draft tokens of this step that went through the draft model."""
        self._fed = fed

    def commit(self, verdicts: list[RowVerdict]) -> None:
        """Take over what was decided: lengths move, nothing is run."""
        for row, verdict in enumerate(verdicts):
            if verdict.tokens:
                if self._fed is not None:
                    self.side.store.length[row] = len(self.text[row]) + min(len(verdict.path), self._fed)
                self.text[row] += verdict.tokens
        self._fed = None


class DraftingSession(Session):
    """A session whose drafts come from another model. coupled: drafts draw from the target's own noise."""

    def __init__(self, model: LayeredModel, helper: DraftModel, rows: int, capacity: int, *, coupled: bool) -> None:
        super().__init__(model, rows, capacity, coupled=coupled)
        self.helper = helper
        self.follower = Follower(helper, rows, capacity)

    def _check(self, request: Request) -> None:
        super()._check(request)
        length, most = len(request.prompt), request.max_new_tokens
        if length + most > self.helper.max_positions:
            raise ValueError(
                f"prompt of {length} tokens + max_new_tokens={most} is more than the {self.helper.max_positions} positions of "
                f"the draft model {self.helper.name} ({self.helper.max_positions_source}); the target "
                f"{called(self.model.model)} has {self.model.max_positions}"
            )

    def admit(self, row: int, request: Request) -> None:
        super().admit(row, request)
        self.follower.admit(row, request)

    def release(self, row: int) -> None:
        super().release(row)
        self.follower.release(row)

    def prefill(self, chunk: int) -> tuple[Scores | None, list[int]]:
        self.follower.side.prefill(chunk)
        return super().prefill(chunk)

    def chain(self, most: list[int], observe: Observe) -> Draft:
        """A chain of at most so many drafts a row, drawn by the rows' own settings from what the draft model says."""
        chain = Chain(most, self.alive, self.model.device)
        frontier = self.frontier(most)
        if not chain.width:
            return chain.draft(frontier)
        ahead, lag = self.follower.frontier(chain.most, self.alive)
        position, path = frontier.positions[:, 0] + 1, frontier.tokens.new_empty((self.rows, chain.width))
        for place in range(chain.width):
            logits = across(ahead.exit_logits(self.helper.depth), self.model.device)
            wanted = chain.open_rows() if self.sampler.processed else None
            token, q, scores = self.sampler.propose(logits, position + place, path[:, :place], wanted)
            path[:, place] = token
            noted, keep = observe(scores)
            valid = chain.add(token, q, noted)
            if chain.full or chain.stop(keep, self.sampler.unfinished(token)) or (keep is not None and chain.all_stopped()):
                break
            there = self.helper.device
            ahead.append(
                across(token[:, None].clamp(max=self.follower.last_id), there), None if valid is None else across(valid, there)
            )
        self.follower.drafted(ahead.width - lag)
        draft = chain.draft(frontier)
        frontier.append(draft.tokens, draft.valid if chain.ragged else None)
        return draft

    def commit(self, draft: Draft | None, verdicts: list[RowVerdict]) -> None:
        super().commit(draft, verdicts)
        self.follower.commit(verdicts)
