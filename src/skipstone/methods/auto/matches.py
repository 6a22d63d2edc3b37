"""Lookups whose draft length `auto` decides, with the outcome of every match, drafted or not."""

from collections.abc import Sequence

from skipstone.decoding.draft import Draft, RowVerdict
from skipstone.decoding.request import Request
from skipstone.methods.drafting.lookups import RowDraft
from skipstone.methods.prompt_lookup import IndexedDrafter, NgramIndex
from skipstone.policy.acceptance_estimates import MATCH_BUCKETS
from skipstone.policy.choose_drafter import COPIED
from skipstone.policy.draft_length import MAX_DRAFTS

MATCH_LENGTHS = tuple(2**n for n in range(MATCH_BUCKETS + 1))
"""Tokens of the n-grams that are looked up: 1 to 16."""


class MatchDrafter(IndexedDrafter):
    """The rows' texts, and the matches of their ends. uncopied: by row, number of generated tokens since the last copy."""

    def __init__(self, rows: int, *, looks_up: bool) -> None:
        super().__init__(rows, lambda: NgramIndex(MATCH_LENGTHS, "recent"), looks_up=looks_up)
        self.uncopied = [0] * rows
        self._matches: list[tuple[int, list[int]]] = [(0, [])] * rows

    def add_request(self, row: int, request: Request) -> None:
        super().add_request(row, request)
        self.uncopied[row] = 0

    def count(self, verdicts: list[RowVerdict], is_lookup: bool) -> None:
        """Counts committed tokens. is_lookup: whether a lookup drafted them."""
        for row, verdict in enumerate(verdicts):
            tokens = len(verdict.tokens)
            self.uncopied[row] = 0 if is_lookup and tokens >= COPIED else self.uncopied[row] + tokens
            self.went_on(row, verdict, drafted=is_lookup)

    def look_up(self) -> list[int]:
        """The length of the match of every row that decodes."""
        for index, text in zip(self.index, self.text, strict=True):
            index.extend(text[len(index.text) :])
        self._matches = [self.look_for(row, MAX_DRAFTS) if alive else (0, []) for row, alive in enumerate(self.view.alive)]
        return [match for (match, _), alive in zip(self._matches, self.view.alive, strict=True) if alive]

    def draft_matches(self, drafts: Sequence[int], limits: Sequence[int]) -> Draft:
        """Drafts the beginnings of the matches. drafts: number of tokens, of the rows that decode."""
        numbers = iter(drafts)
        counts = [min(next(numbers), limit) if alive else 0 for alive, limit in zip(self.view.alive, limits, strict=True)]
        return self.as_draft(
            [RowDraft().chain(tokens[:count]) for (_, tokens), count in zip(self._matches, counts, strict=True)]
        )

    def judge(self, verdicts: list[RowVerdict]) -> list[tuple[int, int, int]]:
        """Compares matches with committed tokens: (length, right tokens of the continuation, compared tokens) of each."""
        judged = []
        for (match, tokens), verdict in zip(self._matches, verdicts, strict=True):
            if match and verdict.tokens:
                pairs = list(zip(tokens, verdict.tokens, strict=False))
                right = next((place for place, (a, b) in enumerate(pairs) if a != b), len(pairs))
                judged.append((match, right, len(pairs)))
        return judged
