"""Drafts that are looked up on the host. No model runs for them, so they cost only their verification."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from skipstone.decoding.draft import Draft, RowVerdict
from skipstone.decoding.drafter import Drafter
from skipstone.decoding.request import Request
from skipstone.engines.host_transfer import on_device


@dataclass
class RowDraft:
    """The draft of one row, a tree of tokens.

    parents: for every token, the number of its parent, -1 for the last committed token. candidate: False for tokens that are
    scored and never accepted.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    candidate: list[bool] = field(default_factory=list)

    def add(self, token: int, parent: int, candidate: bool = True) -> int:
        """Add a token. Returns its number."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.candidate.append(candidate)
        return len(self.tokens) - 1

    def chain(self, tokens: Iterable[int]) -> "RowDraft":
        """Add a chain of tokens after the last committed one."""
        parent = -1
        for token in tokens:
            parent = self.add(token, parent)
        return self


def random_prompt_tokens(request: Request, count: int) -> list[int]:
    """`count` random tokens of a row's prompt as first guesses. The row's seed determines them."""
    tokens, rng = request.prompt.tolist(), random.Random(request.sampling.seed)
    return [rng.choice(tokens) for _ in range(count)]


class LookupDrafter(Drafter):
    """Base class of drafters that keep every row's text on the host. scratch_slots: as in `Drafter`."""

    def __init__(self, rows: int, scratch_slots: int = 0) -> None:
        self.scratch_slots = scratch_slots
        self.text: list[list[int]] = [[] for _ in range(rows)]

    def add_request(self, row: int, request: Request) -> None:
        self.text[row] = request.prompt.tolist()

    def observe_commits(self, draft: Draft | None, verdicts: list[RowVerdict]) -> None:
        for row, verdict in enumerate(verdicts):
            self.text[row] += verdict.tokens

    def as_draft(self, rows: list[RowDraft], tree: bool = False, levels: int | None = None) -> Draft:
        """The drafts of all rows as one `Draft`. tree: False if all are chains. levels: maximum number of nodes on a path."""
        view, width = self.view, max(len(row.tokens) for row in rows)
        device = view.root.device
        if not width:
            return Draft.empty(view.rows, device, view.start_forward([0] * view.rows))

        def padded(values: list[list[int]], fill: int) -> Tensor:  # [B, width]
            return on_device([row + [fill] * (width - len(row)) for row in values], device)

        tokens = padded([row.tokens for row in rows], 0)
        valid = padded([[1] * len(row.tokens) for row in rows], 0).bool()
        parents = padded([row.parents for row in rows], -1) if tree else None
        candidate = padded([list(map(int, row.candidate)) for row in rows], 0).bool() if tree else None
        forward = view.start_forward([width if tree else len(row.tokens) for row in rows])
        even = all(len(row.tokens) == width for row in rows)
        forward.append(tokens, None if even else valid, parents)
        return Draft(tokens, valid, forward, parents=parents, candidate=candidate, levels=levels)
