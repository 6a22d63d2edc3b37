"""Drafts from a predicted text: finds the place in it that matches the latest tokens, and proposes what follows."""

from collections.abc import Sequence

SIZES = (4, 3, 2)
"""Tokens by whose places in the prediction a text that has left it is found again."""
AT_FIRST = 10
"""Tokens that count as in agreement before the first one was written: who sends a prediction thinks that it is right."""


class PredictedText:
    """A predicted text and the current place in it. tokens: of the prediction. run: tokens in a row in which it agrees with
    what was written last, 0 where it does not. accepted: tokens of it that were drafted and accepted."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens = list(tokens)
        self.run = AT_FIRST if self.tokens else 0
        self.accepted = 0
        self._place = 0  # of the token that is thought to come next
        self._latest: list[int] = []  # tokens of the text
        self._behind: dict[tuple[int, ...], list[int]] = {}  # n-gram -> places behind it, ascending
        for size in SIZES:
            for place in range(size, len(self.tokens)):
                self._behind.setdefault(tuple(self.tokens[place - size : place]), []).append(place)

    def extend(self, tokens: Sequence[int]) -> None:
        """More of the text was written."""
        if not self.tokens:
            return
        for token in tokens:
            self._latest = [*self._latest[1 - SIZES[0] :], token]
            if self.run and self._place < len(self.tokens) and self.tokens[self._place] == token:
                self._place, self.run = self._place + 1, self.run + 1
            else:
                self._find()

    def _find(self) -> None:
        """The text has left the prediction: the next place further on that has these tokens before it, or else the last one."""
        for size in SIZES:
            if places := self._behind.get(tuple(self._latest[-size:])):
                self._place, self.run = next((place for place in places if place > self._place), places[-1]), size
                return
        self.run = 0

    def next(self, max_tokens: int) -> list[int]:
        """Up to `max_tokens` tokens that are thought to come; none where the text has left the prediction."""
        return self.tokens[self._place : self._place + max_tokens] if self.run else []
