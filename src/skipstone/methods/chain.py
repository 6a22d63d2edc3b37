"""Building a chain draft token by token, for every method that drafts autoregressively."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from skipstone.core import host
from skipstone.core.host import on_device
from skipstone.core.model import Frontier
from skipstone.core.types import Draft, RowVerdict

LOOK_EVERY = 4
"""Passes on an accelerator between two looks at whether anybody drafts on."""


class Chain:
    """A chain under construction.

    most: most draft tokens per row. alive: rows taking part. A row leaves the chain at its limit or when `stop` says so; a
    token once drawn is always submitted.
    """

    def __init__(self, most: list[int], alive: list[bool], device: torch.device) -> None:
        self.most = [count if live else 0 for count, live in zip(most, alive, strict=True)]
        self.width = max(self.most)
        self._everyone = min((count for count, live in zip(most, alive, strict=True) if live), default=0)
        self._most = on_device(self.most, device)
        self._going: Tensor | None = None
        self.tokens: list[Tensor] = []
        self.valid: list[Tensor | None] = []
        self.q: list[Tensor | None] = []
        self.confidence: list[Tensor] = []

    def add(self, token: Tensor, q: Tensor | None, confidence: Tensor | None = None) -> Tensor | None:
        """Take a drawn token [B]. Returns which rows it is valid for, [B, 1] bool, or None for all."""
        place = len(self.tokens)
        valid = None
        if place >= self._everyone:
            valid = self._most > place
        if self._going is not None:
            valid = self._going if valid is None else valid & self._going
        self.tokens.append(token)
        self.q.append(q)
        self.valid.append(valid)
        if confidence is not None:
            self.confidence.append(confidence)
        return None if valid is None else valid[:, None]

    @property
    def full(self) -> bool:
        """Whether no row has room for another token."""
        return len(self.tokens) == self.width

    @property
    def ragged(self) -> bool:
        """Whether some row may lack a token that others have."""
        return any(column is not None for column in self.valid)

    def open_rows(self) -> list[bool]:
        """Rows that will draft one more token, on the host."""
        going = [True] * len(self.most) if self._going is None else self._going.tolist()
        return [len(self.tokens) < most and goes for most, goes in zip(self.most, going, strict=True)]

    def stop(self, *reasons: Tensor | None) -> bool:
        """reasons: rows [B] bool that may draft on, None where all may. Returns whether no row may; where the answer
        cannot be read for nothing, the rows that stopped draft on unheard."""
        keep = None
        for reason in reasons:
            if reason is not None:
                keep = reason if keep is None else keep & reason
        if keep is None or (host.readable(keep) and bool(keep.all())):
            return False
        self._going = keep if self._going is None else self._going & keep
        if not host.readable(keep):
            return False
        open_rows = self._going & (self._most > len(self.tokens))
        return not bool(open_rows.any())

    def all_stopped(self) -> bool:
        """On an accelerator, whether no row drafts on, asked after every LOOK_EVERY tokens: that waits for the device, and to
        draft on unheard would cost more."""
        if host.readable(self._most) or len(self.tokens) % LOOK_EVERY:
            return False
        return not any(self.open_rows())

    def draft(self, frontier: Frontier, exit_layer: int | None = None) -> Draft:
        """The finished chain. exit_layer: what all its tokens were drafted at, for reports."""
        if not self.tokens:
            return Draft.empty(frontier.rows, frontier.device, frontier)
        tokens = torch.stack(self.tokens, 1)
        everyone = torch.ones_like(self.tokens[0], dtype=torch.bool)
        valid = torch.stack([everyone if column is None else column for column in self.valid], 1)
        if frontier.valid is not None:
            valid = valid & frontier.valid[:, :1]
        q = torch.stack([column for column in self.q if column is not None], 1) if self.q[0] is not None else None
        confidence = torch.stack(self.confidence, 1) if self.confidence else None
        exits = None if exit_layer is None else torch.full_like(tokens, exit_layer)
        return Draft(tokens, valid, frontier, q=q, confidence=confidence, exit_layer=exits)


class Confidence:
    """When to stop drafting: after a token whose distribution has its top probability below a threshold.

    threshold: a number in [0, 1]; "adaptive", one per row that follows the share of accepted drafts (Draft & Verify,
    arXiv 2309.08168, section 3.3; constants of its released code); None never stops.
    """

    START, TARGET, STEP, SMOOTH_RATE, SMOOTH_THRESHOLD = 0.6, 0.9, 0.01, 0.5, 0.9

    def __init__(self, threshold: float | str | None, rows: int, device: torch.device, most: int) -> None:
        self.active = threshold is not None
        self.adaptive = threshold == "adaptive"
        self.most = most
        start = self.START if isinstance(threshold, str) or threshold is None else threshold
        self._values = [start] * rows
        self._rates = [self.TARGET] * rows
        self._threshold = on_device(self._values, device)

    def reset(self, row: int) -> None:
        """A new request starts on the row: nothing is carried over, so its text does not depend on what ran before."""
        if self.adaptive:
            self._values[row], self._rates[row] = self.START, self.TARGET
            self._threshold = on_device(self._values, self._threshold.device)  # anew: it may be an inference tensor

    def of(self, scores: Tensor) -> Tensor | None:
        """Top probability [B] at temperature 1 of processed, unwarped logits [B, V]; None when nobody asks."""
        return scores.softmax(-1).amax(-1) if self.active else None

    def keep(self, confidence: Tensor | None) -> Tensor | None:
        """Rows [B] that are sure enough to draft on; None where all are."""
        return None if confidence is None else confidence >= self._threshold

    def update(self, verdicts: list[RowVerdict]) -> None:
        """Move every row's threshold by what became of its draft."""
        if not self.adaptive:
            return
        for row, verdict in enumerate(verdicts):
            if not verdict.draft_steps:
                continue
            rate = self.SMOOTH_RATE * self._rates[row]
            rate += (1 - self.SMOOTH_RATE) * len(verdict.path) / verdict.draft_steps
            old = self._values[row]
            step = self.STEP if rate < self.TARGET else 0.0 if verdict.draft_steps == self.most else -self.STEP
            self._rates[row] = rate
            moved = self.SMOOTH_THRESHOLD * old + (1 - self.SMOOTH_THRESHOLD) * (old + step)
            self._values[row] = min(max(moved, 0.0), 1.0)
        self._threshold = on_device(self._values, self._threshold.device)


def check_threshold(value: Any, name: str = "confidence_threshold") -> None:
    """ValueError unless value is None, "adaptive" or a number in [0, 1]."""
    if value is None or value == "adaptive":
        return
    if isinstance(value, (bool, str)) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(f'{name} must be a number in [0, 1], "adaptive" or None, found {value!r}')
