"""Drafting a chain token by token: the one loop of all methods that draft autoregressively.

Shapes: B rows, k tokens drafted so far, V vocabulary.
"""

import functools
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from skipstone.decoding.draft import Draft, RowVerdict
from skipstone.decoding.drafter import Drafter
from skipstone.decoding.request import Request
from skipstone.decoding.sampling import Sampler
from skipstone.engines import host_transfer
from skipstone.engines.engine import SurvivalThresholds
from skipstone.engines.greedy_tokens import NO_TOKEN
from skipstone.engines.host_transfer import on_device
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.partial_forward import PartialForward
from skipstone.methods.drafting.confidence import ConfidenceRule, SurvivalRule, Threshold
from skipstone.models.passes import SkipSet

CHECK_EVERY = 4
"""Drafted tokens between two checks of whether every row has stopped. On an accelerator each check waits for the device."""


class DraftChain:
    """A chain under construction.

    max_drafts: most draft tokens per row. alive: rows taking part. A row leaves the chain at its limit or when `stop` says so;
    a token once drawn is always submitted.
    """

    def __init__(self, max_drafts: list[int], alive: list[bool], device: torch.device) -> None:
        self.max_drafts = [count if live else 0 for count, live in zip(max_drafts, alive, strict=True)]
        self.width = max(self.max_drafts)
        self._all_valid_below = min((count for count, live in zip(max_drafts, alive, strict=True) if live), default=0)
        self._limits = on_device(self.max_drafts, device)  # [B]
        self._going: Tensor | None = None  # [B] bool, rows that have not stopped; None while all go on
        self._tokens: list[Tensor] = []  # one [B] per place, and so are the next three
        self._valid: list[Tensor | None] = []
        self._q: list[Tensor | None] = []
        self._confidence: list[Tensor] = []

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def full(self) -> bool:
        """Whether no row has room for another token."""
        return len(self) == self.width

    @property
    def ragged(self) -> bool:
        """Whether some row may lack a token that others have."""
        return any(column is not None for column in self._valid)

    @property
    def newest(self) -> tuple[Tensor, Tensor | None]:
        """The newest token of every row, as a forward takes it: (tokens [B, 1], valid [B, 1] bool or None for all)."""
        valid = self._valid[-1]
        return self._tokens[-1][:, None], None if valid is None else valid[:, None]

    def add(self, token: Tensor, q: Tensor | None, confidence: Tensor | None = None) -> None:
        """Take a drawn token [B], the distribution q [B, V] that it was drawn from, and its confidence [B]."""
        place = len(self)
        valid = self._limits > place if place >= self._all_valid_below else None
        if self._going is not None:
            valid = self._going if valid is None else valid & self._going
        self._tokens.append(token)
        self._valid.append(valid)
        self._q.append(q)
        if confidence is not None:
            self._confidence.append(confidence)

    @property
    def going(self) -> Tensor:
        """Rows [B] bool that have not stopped and have room for another token."""
        room = self._limits > len(self)
        return room if self._going is None else room & self._going

    def open_rows(self) -> list[bool]:
        """Rows that will draft one more token, on the host."""
        going = [True] * len(self.max_drafts) if self._going is None else self._going.tolist()
        return [len(self) < max_drafts and goes for max_drafts, goes in zip(self.max_drafts, going, strict=True)]

    def stop(self, *may_go_on: Tensor | None, look: bool = False) -> bool:
        """Stop the rows that one of `may_go_on` ([B] bool, None for all rows) does not let draft on. Returns whether all have
        stopped, as far as that is known.

        To ask an accelerator is to wait for it. If `look` is set, it is asked after every CHECK_EVERY tokens, otherwise never.
        Until then rows that have stopped draft tokens that are not valid.
        """
        reasons = [rows for rows in may_go_on if rows is not None]
        if not reasons:
            return False
        going = functools.reduce(operator.and_, reasons)  # [B]
        readable = host_transfer.is_on_host(going)
        if readable and bool(going.all()):
            return False
        self._going = going if self._going is None else self._going & going
        if readable:
            return not bool((self._going & (self._limits > len(self))).any())
        return look and len(self) % CHECK_EVERY == 0 and not any(self.open_rows())

    def draft(self, forward: PartialForward, exit_layer: int | None = None) -> Draft:
        """The finished chain. exit_layer: what all its tokens were drafted at, for reports."""
        if not self._tokens:
            return Draft.empty(forward.rows, forward.device, forward)
        tokens = torch.stack(self._tokens, 1)  # [B, n]
        everyone = torch.ones_like(self._tokens[0], dtype=torch.bool)
        valid = torch.stack([everyone if column is None else column for column in self._valid], 1)  # [B, n]
        if forward.valid is not None:
            valid = valid & forward.valid[:, :1]
        drawn_from = [column for column in self._q if column is not None]
        q = torch.stack(drawn_from, 1) if drawn_from else None  # [B, n, V]
        confidence = torch.stack(self._confidence, 1) if self._confidence else None
        return Draft(tokens, valid, forward, q=q, confidence=confidence, exit_layer=exit_layer)


class ChainDrafter(Drafter):
    """Drafts token by token.

    A subclass says where the logits of the newest token come from (`next_logits`), and where it differs: how a token is
    proposed from them (`propose`), what is observed of them (`observe`), and what reads a drafted token (`append`, `finish`).

    max_drafts: most draft tokens of a row in a step; `self.max_drafts` has one for every row. threshold: confidence below which
    a row stops drafting.
    """

    looks = True  # whether an accelerator is asked now and then if every row has stopped
    transform: Tensor | None = None  # [d', d'], what states go through before the LM head; None for nothing
    shortlist: Tensor | None = None  # [S], the ids that drafts are picked from; None for all
    drafting_model: ModelRunner | None = None  # the target's layers in fewer bits, where these draft

    def __init__(self, model: ModelRunner, rows: int, *, max_drafts: int, threshold: Threshold, coupled: bool) -> None:
        self.model, self.coupled = model, coupled
        self.max_drafts = [max_drafts] * rows
        self.confidence = self.rule = ConfidenceRule(
            threshold, rows, model.device, max_drafts
        )  # the method's, and that of this step

    @property
    def sampler(self) -> Sampler:
        return self.view.sampler

    def add_request(self, row: int, request: Request) -> None:
        self.confidence.reset(row)

    def propose_draft(self, limits: list[int], stop_rule: SurvivalThresholds | None = None) -> Draft:
        """Logits, a token, what was observed; again, until no row drafts on."""
        view, max_drafts = self.view, [min(own, allowed) for own, allowed in zip(self.max_drafts, limits, strict=True)]
        self.rule, looks = self.confidence, self.looks or stop_rule is not None
        if stop_rule is not None:
            self.rule = SurvivalRule(stop_rule, view.rows, sum(view.alive), self.model.device)
        forward = view.start_forward(max_drafts, self.shortlist, self.drafting_model)
        if (draft := self.draft_at_once(max_drafts, forward)) is not None:
            return draft
        chain = DraftChain(max_drafts, view.alive, self.model.device)
        position = forward.positions[:, 0] + 1  # [B]
        path = forward.tokens[:, 1:]  # [B, k], empty here
        for place in range(chain.width):
            logits = self.next_logits(chain, forward)
            active = chain.open_rows() if self.sampler.processed else None
            token, q, scores = self.propose(logits, position + place, path, active)
            confidence, sure = self.observe(scores)
            nobody = False
            if not host_transfer.is_on_host(token) or NO_TOKEN in token.tolist():  # nothing to choose from ends a draft
                nobody, token = chain.stop(token != NO_TOKEN), token.clamp_min(0)
                confidence = None if confidence is None else confidence.nan_to_num(0.0)
            chain.add(token, q, confidence)
            path = self.append(chain, forward)
            if nobody or chain.full or chain.stop(sure, self.sampler.unfinished(token), look=looks):
                break
            if self.rule.joint and chain.stop(self.rule.together(chain.going), look=looks):
                break
        return self.finish(chain, forward)

    def one_call(self) -> tuple[int, SkipSet | None] | None:
        """What drafts a greedy chain that an engine may compute in one call: (first so many layers, but for these sublayers).
        None where this drafter does more with a draft than to take its likeliest token."""
        return None

    def draft_at_once(self, max_drafts: list[int], forward: PartialForward) -> Draft | None:
        """The greedy chain in one call of the engine; None where this drafter or the engine wants it token by token."""
        drafter = self.one_call()
        if drafter is None or not self.sampler.greedy or self.sampler.processed:
            return None
        rule = self.rule
        thresholds = rule.thresholds if rule.active else None
        chain = forward.draft_greedily(
            *drafter, max_drafts, thresholds, self.sampler.eos, self.transform, survival=rule.survival
        )
        if chain is None:
            return None
        valid = torch.ones_like(chain.tokens, dtype=torch.bool) if forward.valid is None else forward.valid[:, 1:]
        exit_layer = drafter[0] if drafter[1] is None else None
        return Draft(chain.tokens, valid, forward, confidence=chain.confidence, exit_layer=exit_layer)

    def next_logits(self, chain: DraftChain, forward: PartialForward) -> Tensor:
        """Raw logits [B, V] float32 of what follows the newest token."""
        raise NotImplementedError

    def propose(
        self, logits: Tensor, position: Tensor, path: Tensor, active: Sequence[bool] | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """(tokens [B]; q [B, V] that they were drawn from, None where they are deterministic; processed logits [B, V]).

        Arguments as in `Sampler.propose`.
        """
        return self.sampler.propose(logits, position, path, active, self.coupled)

    def observe(self, scores: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Processed logits [B, V] -> (confidence [B] or None, rows [B] bool sure enough to draft on, None for all)."""
        confidence = self.rule.of(scores)
        return confidence, self.rule.keep(confidence)

    def append(self, chain: DraftChain, forward: PartialForward) -> Tensor:
        """Hand the newest token to what drafts, the target's own forward. Returns all tokens drafted so far, [B, k]."""
        forward.append(*chain.newest)
        return forward.tokens[:, 1:]

    def finish(self, chain: DraftChain, forward: PartialForward) -> Draft:
        """The draft, its tokens in the forward that the target scores."""
        return chain.draft(forward)

    def observe_commits(self, draft: Draft | None, verdicts: list[RowVerdict]) -> None:
        self.confidence.update(verdicts)
