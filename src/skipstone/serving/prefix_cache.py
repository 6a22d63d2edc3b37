"""A prompt's prefix is reused: which row a new request takes, and which row holds how much of its prompt."""

from collections.abc import Sequence

MIN_REUSED_TOKENS = 16
"""Minimum length of a common prefix, in tokens. With a shorter one the least recently used row is taken, so that rows with long
texts are kept."""


class PrefixCache:
    """Tokens of the rows of a batch group. The KV cache has the keys and values of each of them.

    is_enabled: False for models with recurrent states, which cannot go back to an earlier position.
    """

    def __init__(self, num_rows: int, is_enabled: bool) -> None:
        self.is_enabled = is_enabled
        self._tokens: list[list[int]] = [[] for _ in range(num_rows)]
        self._last_used = [0] * num_rows
        self._num_uses = 0

    def choose_row(self, prompt: Sequence[int], free_rows: Sequence[int]) -> tuple[int, int, int]:
        """(free row to take, row with the prompt's prefix, length of that prefix; 0 if no row has one that is worth it).

        A free row is taken with its prefix if the prompt has at least half of its text. Else another text would be lost without
        need, and the prefix is copied to the least recently used row."""
        limited = prompt[:-1] if self.is_enabled else []  # the prompt's last token always runs
        common = [common_length(tokens, limited) for tokens in self._tokens]

        def rank(row: int) -> tuple[int, int]:
            return common[row], -self._last_used[row]

        free, source = max(free_rows, key=rank), max(range(len(common)), key=rank)
        oldest = min(free_rows, key=lambda row: self._last_used[row])
        if common[source] < MIN_REUSED_TOKENS:
            return oldest, oldest, 0
        if 2 * common[free] >= len(self._tokens[free]) and common[source] - common[free] < MIN_REUSED_TOKENS:
            return free, free, common[free]
        return oldest, source, common[source]

    def store(self, row: int, tokens: list[int]) -> None:
        """Remember the tokens of a row; [] if its keys and values are wrong."""
        self._num_uses += 1
        self._tokens[row], self._last_used[row] = tokens, self._num_uses


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    return next(place for place in range(length) if one[place] != other[place])
