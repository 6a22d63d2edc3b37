"""Methods that are wrong, each in one way, through the public protocol alone: what `skipstone check` must find."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from skipstone.decoding.draft import Draft, RowVerdict, Verdict
from skipstone.decoding.request import Request
from skipstone.decoding.sampling import Scores
from skipstone.decoding.session import Session
from skipstone.engines.engine import SurvivalThresholds
from skipstone.engines.model_runner import ModelRunner
from skipstone.methods.layerskip import LayerSkip, LayerSkipDrafter


def broken(drafter: type[LayerSkipDrafter] = LayerSkipDrafter, session: type[Session] = Session) -> LayerSkip:
    """LayerSkip with drafters and sessions of these classes; right where they are its own."""

    @dataclass(frozen=True)
    class Method(LayerSkip):
        def create_drafter(self, model: ModelRunner, rows: int, capacity: int) -> LayerSkipDrafter:
            return drafter(self, model, rows)

        def start(self, model: ModelRunner, rows: int, capacity: int) -> Session:
            return session(model, rows, capacity, self.create_drafter(model, rows, capacity))

    return Method(exit_layer=2, num_speculative_tokens=3)


def final_drawn_from(verdict: Verdict, p: Tensor, rows: Tensor, position: Tensor) -> Verdict:
    """The verdict with the final tokens of some rows drawn from p [B, V]."""
    drawn = torch.multinomial(p.float(), 1, generator=torch.Generator().manual_seed(int(position.sum())))
    own = verdict.tokens.gather(1, verdict.accepted[:, None])
    verdict.tokens.scatter_(1, verdict.accepted[:, None], torch.where(rows[:, None], drawn, own))
    return verdict


class BonusFromRawLogits(Session):
    """Without temperature and top-p."""

    def verify(self, draft: Draft, scores: Scores) -> Verdict:
        verdict = super().verify(draft, scores)
        full = verdict.accepted == draft.valid.sum(1)
        if draft.q is None or not bool(full.any()):
            return verdict
        return final_drawn_from(verdict, scores.at(verdict.accepted - 1).softmax(-1), full, scores.position)


class DrawnTokenDropped(LayerSkipDrafter):
    """Drawn tokens with an odd id are not submitted, and the tokens behind them are not either."""

    def propose_draft(self, limits: list[int], stop_rule: SurvivalThresholds | None = None) -> Draft:
        draft = super().propose_draft(limits, stop_rule)
        draft.valid = draft.valid & (draft.tokens % 2 == 0).long().cumprod(1).bool()
        return draft


class DuplicateSiblings(LayerSkipDrafter):
    """The draft is a tree in which two children of the root carry the same token."""

    def propose_draft(self, limits: list[int], stop_rule: SurvivalThresholds | None = None) -> Draft:
        view = self.view
        if min(limits) < 2:
            return Draft.empty(view.rows, view.root.device, view.start_forward([0] * view.rows))
        forward = view.start_forward([2] * view.rows)
        tokens, valid = view.root[:, None].repeat(1, 2), torch.tensor(view.alive)[:, None].repeat(1, 2)
        parents = torch.full_like(tokens, -1)
        forward.append(tokens, valid, parents)
        return Draft(tokens, valid, forward, parents=parents)


class EosOverrun(Session):
    def admit(self, row: int, request: Request, *cached: Any) -> None:
        object.__setattr__(request, "eos", frozenset())
        super().admit(row, request, *cached)


class NoiseCoupledBetweenRows(Session):
    def admit(self, row: int, request: Request, *cached: Any) -> None:
        super().admit(row, replace(request, sampling=replace(request.sampling, seed=7)), *cached)


class ProcessorWrongPrefix(Session):
    """Processors do not see the tokens that were accepted from drafts."""

    def commit(self, draft: Draft | None, verdicts: list[RowVerdict]) -> None:
        own = self.sampler.extend
        self.sampler.extend = lambda row, tokens: own(row, tokens[-1:])  # type: ignore[method-assign]
        super().commit(draft, verdicts)
        self.sampler.extend = own  # type: ignore[method-assign]


class SkippedPosition(Session):
    """After a full acceptance the bonus token is put one position too far."""

    def commit(self, draft: Draft | None, verdicts: list[RowVerdict]) -> None:
        super().commit(draft, verdicts)
        for row, verdict in enumerate(verdicts):
            if draft is not None and verdict.tokens and verdict.final == "bonus" and verdict.drafted and self.alive[row]:
                self.store.length[row] = min(self.store.length[row] + 1, self.capacity - 2)


class StaleKv(Session):
    """After a rollback, the newest committed slot keeps what the rejected draft behind it wrote."""

    def commit(self, draft: Draft | None, verdicts: list[RowVerdict]) -> None:
        super().commit(draft, verdicts)
        for row, verdict in enumerate(verdicts):
            if draft is not None and verdict.tokens and len(verdict.path) < verdict.drafted:
                end = self.store.length[row]
                self.store.move(row, [end], [end - 1])


class ThresholdOnTheDrawnToken(LayerSkipDrafter):
    """A drawn token that its own drafter thought unlikely is taken back."""

    def propose_draft(self, limits: list[int], stop_rule: SurvivalThresholds | None = None) -> Draft:
        draft = super().propose_draft(limits, stop_rule)
        if draft.q is not None:
            likely = draft.q.gather(2, draft.tokens[:, :, None]).squeeze(2) > 0.3
            draft.valid = draft.valid & likely.long().cumprod(1).bool()
        return draft


class WrongResidual(Session):
    """After a rejection the token is drawn from p, not from the residual of p and q."""

    def verify(self, draft: Draft, scores: Scores) -> Verdict:
        verdict = super().verify(draft, scores)
        rejected = verdict.accepted < draft.valid.sum(1)
        if draft.q is None or not bool(rejected.any()):
            return verdict
        p = scores.p(verdict.accepted - 1, draft.tokens[:, :0], rejected)
        return final_drawn_from(verdict, p, rejected, scores.position)


METHODS = {
    "bonus_from_raw_logits": broken(session=BonusFromRawLogits),
    "drawn_token_dropped": broken(DrawnTokenDropped),
    "duplicate_siblings": broken(DuplicateSiblings),
    "eos_overrun": broken(session=EosOverrun),
    "noise_coupled_between_rows": broken(session=NoiseCoupledBetweenRows),
    "processor_wrong_prefix": broken(session=ProcessorWrongPrefix),
    "skipped_position": broken(session=SkippedPosition),
    "stale_kv": broken(session=StaleKv),
    "threshold_on_the_drawn_token": broken(ThresholdOnTheDrawnToken),
    "wrong_residual": broken(session=WrongResidual),
}
