"""Building a chain draft token by token, for every method that drafts autoregressively."""

from __future__ import annotations

import torch
from torch import Tensor

from skipstone.decoding.draft import Draft
from skipstone.models import host
from skipstone.models.frontier import Frontier
from skipstone.models.host import on_device

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
