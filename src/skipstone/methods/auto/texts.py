"""The rows' texts, as `auto` knows them: matches that are looked up, and what became of them."""

from collections.abc import Sequence

from skipstone.control import learning
from skipstone.control.state import Judged
from skipstone.decoding.draft import Draft, RowVerdict
from skipstone.decoding.request import Request
from skipstone.methods.drafting.lookups import RowDraft
from skipstone.methods.prompt_lookup import IndexedDrafter, NgramIndex
from skipstone.methods.recycle import AdjacencyMatrix

MATCHES = (1, 2, 3, 4, 6, 10, 16)
"""Tokens of the matches that are told apart."""
MOST_LOOKED_UP = 24
"""Tokens of the continuation of a match."""


class Texts(IndexedDrafter):
    """The rows' texts, and their matches. uncopied: of every row, the latest tokens that were generated and not copied. judged:
    of the matches of the latest step."""

    def __init__(self, rows: int, *, looks_up: bool) -> None:
        super().__init__(rows, lambda: NgramIndex(MATCHES, "recent"), looks_up=looks_up)
        self.uncopied = [0] * rows
        self._found: list[tuple[int, list[int]]] = [(0, [])] * rows
        self.judged: list[Judged] = []

    def add_request(self, row: int, request: Request) -> None:
        super().add_request(row, request)
        self.uncopied[row] = 0

    def count(self, verdicts: list[RowVerdict], looked_up: bool) -> None:
        """How much of the latest text is no copy. looked_up: whether it was drafted so."""
        for row, verdict in enumerate(verdicts):
            tokens = len(verdict.tokens)
            self.uncopied[row] = 0 if looked_up and tokens >= learning.COPIED else self.uncopied[row] + tokens
            self.went_on(row, verdict, drafted=looked_up)

    def forget_matches(self) -> None:
        """Nothing was looked up for the step that begins."""
        self._found, self.judged = [(0, [])] * self.view.rows, []

    def look_up(self) -> list[int]:
        """Tokens of the match of every row that decodes; [] where nothing is looked up."""
        if not self.looks_up:
            return []
        for index, text in zip(self.index, self.text, strict=True):
            index.extend(text[len(index.text) :])  # what was committed since it was asked last
        self._found = [self.look_for(row, MOST_LOOKED_UP) if alive else (0, []) for row, alive in enumerate(self.view.alive)]
        return [match for (match, _), alive in zip(self._found, self.view.alive, strict=True) if alive]

    def looked_up(self, drafts: Sequence[int], limit: Sequence[int]) -> Draft:
        """As much of every row's match as is wanted. drafts: of the rows that decode."""
        told = iter(drafts)
        wanted = [min(next(told), allowed) if alive else 0 for alive, allowed in zip(self.view.alive, limit, strict=True)]
        return self.as_draft([RowDraft().chain(found[:count]) for (_, found), count in zip(self._found, wanted, strict=True)])

    def judge(self, verdicts: list[RowVerdict]) -> None:
        """Hold the matches against what was committed."""
        self.judged = []
        for (match, found), verdict in zip(self._found, verdicts, strict=True):
            if match and verdict.tokens:
                right = 0
                while right < min(len(found), len(verdict.tokens)) and found[right] == verdict.tokens[right]:
                    right += 1
                self.judged.append(Judged(match, right, min(len(found), len(verdict.tokens))))


def ranks(kept: AdjacencyMatrix, root: int, tokens: Sequence[int]) -> list[int]:
    """Of every committed token, its place among those that were kept for the one before it; beyond all for one that was not."""
    found = []
    for before, token in zip((root, *tokens), tokens, strict=False):
        known = kept.continuations.get(before, ())
        found.append(known.index(token) if token in known else len(known) + 100)
    return found


def progress(room: Sequence[int], tokens: Sequence[int], finished: Sequence[int]) -> int:
    """By how many tokens the rows have come nearer to the end of the batch, which is that of its slowest row. room: what each
    had to write before a step. tokens: that it has written. finished: rows that have ended, wherever that was."""
    left = [0 if row in finished else has - count for row, (has, count) in enumerate(zip(room, tokens, strict=True)) if count]
    before = max((has for has, count in zip(room, tokens, strict=True) if count), default=0)
    return min(before - max(left, default=0), max(tokens, default=0))
