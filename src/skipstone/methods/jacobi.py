"""Accelerating Transformer Inference for Translation via Parallel Decoding
(Santilli et al., ACL 2023, arXiv 2305.10427), section 3.1: Jacobi decoding, in blocks.

A block of guesses follows the text. Every pass computes the target's token at all places. The first guesses that agree with the
target are committed. The target's tokens at later places are the next guesses.

The guesses are a chain, and `match` verifies it, so sampled texts are exact, too. Our reading: new guesses are the target's
likeliest tokens at every temperature. The first guesses, and missing ones, are random tokens of the prompt.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from skipstone.decoding.draft import Draft, GreedyVerdict, RowVerdict, Verdict
from skipstone.decoding.drafter import Drafter
from skipstone.decoding.method import DraftingMethod
from skipstone.decoding.request import Request
from skipstone.decoding.sampling import Scores
from skipstone.decoding.settings import setting
from skipstone.engines.engine import SurvivalThresholds
from skipstone.engines.host_transfer import on_device
from skipstone.engines.model_runner import ModelRunner
from skipstone.methods.drafting.lookups import random_prompt_tokens


@dataclass(frozen=True)
class Jacobi(DraftingMethod):
    """Jacobi decoding in blocks of guesses."""

    name: ClassVar[str] = "jacobi"
    aliases: ClassVar[dict[str, str]] = {"block": "num_speculative_tokens"}
    if_few_accepted: ClassVar[str] = "Guesses of Jacobi decoding are rarely right before their turn; lookahead keeps them."

    num_speculative_tokens: int = setting(16, "guesses that every pass refines, a block.")

    def create_drafter(self, model: ModelRunner, rows: int, capacity: int) -> Drafter:
        return JacobiDrafter(self, model, rows)


class JacobiDrafter(Drafter):
    """Refines a block of guesses. guesses: [B, block] int64, after the last committed token. They stay on the device."""

    def __init__(self, method: Jacobi, model: ModelRunner, rows: int) -> None:
        self.block, self.device = method.num_speculative_tokens, model.device
        self.first_guesses = [[0] * self.block for _ in range(rows)]
        self.guesses = on_device(self.first_guesses, model.device)
        self._target_tokens: Tensor | None = None  # [B, n + 1], the target's likeliest tokens after the root and every guess

    def add_request(self, row: int, request: Request) -> None:
        self.first_guesses[row] = random_prompt_tokens(request, self.block)
        is_new = on_device([number == row for number in range(self.view.rows)], self.device, torch.bool)[:, None]  # [B, 1]
        self.guesses = torch.where(is_new, on_device(self.first_guesses, self.device), self.guesses)

    def propose_draft(self, limits: list[int], stop_rule: SurvivalThresholds | None = None) -> Draft:
        """The block of guesses, cut at the limits."""
        view = self.view
        max_drafts = [min(self.block, allowed) if alive else 0 for allowed, alive in zip(limits, view.alive, strict=True)]
        width, forward = max(max_drafts), view.start_forward(max_drafts)
        if not width:
            return Draft.empty(view.rows, self.device, forward)
        tokens = self.guesses[:, :width]
        valid = torch.arange(width, device=tokens.device, dtype=torch.int64) < on_device(max_drafts, tokens.device)[:, None]
        forward.append(tokens, None if min(max_drafts) == width else valid)
        return Draft(tokens, valid, forward)

    def observe_scores(self, draft: Draft, scores: Scores, verdict: Verdict | GreedyVerdict) -> None:
        self._target_tokens = scores.best.clamp_min(0)  # NO_TOKEN becomes an arbitrary token

    def observe_commits(self, draft: Draft | None, verdicts: list[RowVerdict]) -> None:
        counts = [0 if verdict.final == "prefill" else len(verdict.tokens) for verdict in verdicts]
        place = on_device(counts, self.device)[:, None] + torch.arange(self.block, device=self.device, dtype=torch.int64)
        if draft is None or not draft.width:  # the block moves with the text
            self.guesses = self.guesses.gather(1, place % self.block)
            return
        # the target's tokens after the committed ones, then tokens of the prompt
        targets, device = self._target_tokens, self.device
        assert targets is not None, "a draft is scored before it is committed"
        end = on_device([verdict.drafted + 1 for verdict in verdicts], device)[:, None]
        known = targets.gather(1, place.clamp(max=targets.shape[1] - 1))
        self.guesses = torch.where(place < end, known, on_device(self.first_guesses, device))
