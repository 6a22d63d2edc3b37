"""Lookups for a caller that decides how much of a match is drafted, and learns what became of every match."""

from collections.abc import Sequence

from skipstone.decoding.draft import Draft, RowVerdict
from skipstone.decoding.request import Request
from skipstone.methods.drafting.lookups import RowDraft
from skipstone.methods.prompt_lookup import IndexedDrafter, NgramIndex
from skipstone.policy.acceptance import MATCH_BUCKETS
from skipstone.policy.choose_drafter import COPIED
from skipstone.policy.draft_length import MAX_DRAFTS

MATCH_LENGTHS = tuple(2**n for n in range(MATCH_BUCKETS + 1))
"""Tokens of the n-grams that are looked up: 1 to 16."""


class MatchDrafter(IndexedDrafter):
    """The rows' texts, and the matches of their ends. uncopied: of every row, the latest tokens that were generated and not
    copied. judged: matches of the latest step: (tokens, right tokens of the continuation, tokens that can be told)."""

    def __init__(self, rows: int, *, looks_up: bool) -> None:
        super().__init__(rows, lambda: NgramIndex(MATCH_LENGTHS, "recent"), looks_up=looks_up)
        self.uncopied = [0] * rows
        self._found: list[tuple[int, list[int]]] = [(0, [])] * rows
        self.judged: list[tuple[int, int, int]] = []

    def add_request(self, row: int, request: Request) -> None:
        super().add_request(row, request)
        self.uncopied[row] = 0

    def count(self, verdicts: list[RowVerdict], is_lookup: bool) -> None:
        """How much of the latest text is no copy. is_lookup: whether it was drafted so."""
        for row, verdict in enumerate(verdicts):
            tokens = len(verdict.tokens)
            self.uncopied[row] = 0 if is_lookup and tokens >= COPIED else self.uncopied[row] + tokens
            self.went_on(row, verdict, drafted=is_lookup)

    def forget_matches(self) -> None:
        """Nothing was looked up for the step that begins."""
        self._found, self.judged = [(0, [])] * self.view.rows, []

    def look_up(self) -> list[int]:
        """Tokens of the match of every row that decodes."""
        for index, text in zip(self.index, self.text, strict=True):
            index.extend(text[len(index.text) :])  # what was committed since the last time
        self._found = [self.look_for(row, MAX_DRAFTS) if alive else (0, []) for row, alive in enumerate(self.view.alive)]
        return [match for (match, _), alive in zip(self._found, self.view.alive, strict=True) if alive]

    def draft_matches(self, drafts: Sequence[int], limits: Sequence[int]) -> Draft:
        """As much of every row's match as is wanted. drafts: of the rows that decode."""
        told = iter(drafts)
        wanted = [min(next(told), limit) if alive else 0 for alive, limit in zip(self.view.alive, limits, strict=True)]
        return self.as_draft([RowDraft().chain(found[:count]) for (_, found), count in zip(self._found, wanted, strict=True)])

    def judge(self, verdicts: list[RowVerdict]) -> None:
        """Compare the matches with what was committed."""
        self.judged = []
        for (match, found), verdict in zip(self._found, verdicts, strict=True):
            if match and verdict.tokens:
                told, right = min(len(found), len(verdict.tokens)), 0
                while right < told and found[right] == verdict.tokens[right]:
                    right += 1
                self.judged.append((match, right, told))
