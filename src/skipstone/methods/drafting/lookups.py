"""Drafts that are looked up on the host: no model drafts them, so they cost nothing but their verification."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from skipstone.decoding.draft import Draft, RowVerdict
from skipstone.decoding.drafter import Drafter, Requirements
from skipstone.decoding.request import Request
from skipstone.engines.host_transfer import on_device


@dataclass
class RowDraft:
    """The draft of one row, a tree of tokens.

    parents: of every token, the number of an earlier one, -1 for the last committed token. candidate: False for tokens that
    are scored and never accepted.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    candidate: list[bool] = field(default_factory=list)

    def add(self, token: int, parent: int, candidate: bool = True) -> int:
        """A further token. Returns its number."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.candidate.append(candidate)
        return len(self.tokens) - 1

    def chain(self, tokens: Iterable[int]) -> "RowDraft":
        """Add tokens one after the other, behind the last committed one."""
        parent = -1
        for token in tokens:
            parent = self.add(token, parent)
        return self


def tokens_of_prompt(request: Request, count: int) -> list[int]:
    """The first guesses of a row that has nothing better: so many tokens of its prompt, drawn by its own seed."""
    words, dice = request.prompt.tolist(), random.Random(request.sampling.seed)
    return [dice.choice(words) for _ in range(count)]


class LookupDrafter(Drafter):
    """Knows every row's text on the host. scratch_slots: as in `Requirements`."""

    def __init__(self, rows: int, scratch_slots: int = 0) -> None:
        self.requirements = Requirements(scratch_slots)
        self.text: list[list[int]] = [[] for _ in range(rows)]

    def add_request(self, row: int, request: Request) -> None:
        self.text[row] = request.prompt.tolist()

    def observe_commits(self, draft: Draft | None, verdicts: list[RowVerdict]) -> None:
        for row, verdict in enumerate(verdicts):
            self.text[row] += verdict.tokens

    def as_draft(self, rows: list[RowDraft], tree: bool = False, levels: int | None = None) -> Draft:
        """The drafts of all rows as one. tree: False where every row's draft is a chain. levels: most nodes on one path."""
        view, width = self.view, max(len(row.tokens) for row in rows)
        device = view.root.device
        if not width:
            return Draft.empty(view.rows, device, view.start_forward([0] * view.rows))

        def padded(values: list[list[int]], fill: int) -> Tensor:  # [B, width]
            return on_device([one + [fill] * (width - len(one)) for one in values], device)

        tokens = padded([row.tokens for row in rows], 0)
        valid = padded([[1] * len(row.tokens) for row in rows], 0).bool()
        parents = padded([row.parents for row in rows], -1) if tree else None
        candidate = padded([list(map(int, row.candidate)) for row in rows], 0).bool() if tree else None
        forward = view.start_forward([width if tree else len(row.tokens) for row in rows])
        even = all(len(row.tokens) == width for row in rows)
        forward.append(tokens, None if even else valid, parents)
        return Draft(tokens, valid, forward, parents=parents, candidate=candidate, levels=levels)
