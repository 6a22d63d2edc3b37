"""Tokens to text, as a client reads it: whole characters, and nothing from a stop string on."""

from dataclasses import dataclass, field
from typing import Any

from skipstone.api import Detokenizer


@dataclass
class Written:
    """Text that became certain. text: of it. tokens: that completed it, as numbers of the job's tokens."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)


class Writer:
    """The text of one job. stops: strings that end it, which it does not have. ends: token ids that end it and are no text.
    special: whether special tokens are, as the marks of a tool's call may be.

    count: tokens up to now, that which completed a stop string too. stopped: whether one was met."""

    def __init__(self, tokenizer: Any, stops: list[str], ends: frozenset[int] = frozenset(), *, special: bool = False) -> None:
        self._detokenizer, self._stops, self._ends = Detokenizer(tokenizer, special=special), stops, ends
        self._held = ""  # may be the beginning of a stop string
        self.text = ""  # all that is certain
        self.count = 0
        self.stopped = False

    def add(self, tokens: list[int]) -> str:
        """The text that becomes certain by more tokens; may be empty. What follows a stop string is dropped."""
        began = len(self.text)
        for token in tokens:
            if self.stopped:
                break
            self.count += 1
            if token not in self._ends:
                self._take(self._detokenizer.add(token))
        return self.text[began:]

    def rest(self) -> str:
        """What is still held back at the end."""
        began = len(self.text)
        if not self.stopped:
            self._take(self._detokenizer.rest())
        if not self.stopped:
            self.text, self._held = self.text + self._held, ""
        return self.text[began:]

    def _take(self, piece: str) -> None:
        if not self._stops:
            self.text += piece
            return
        held = self._held + piece
        found = [place for stop in self._stops if (place := held.find(stop)) >= 0]
        if found:
            self.stopped = True
            self.text, self._held = self.text + held[: min(found)], ""
            return
        keep = max(_begun(held, stop) for stop in self._stops)
        self.text, self._held = self.text + held[: len(held) - keep], held[len(held) - keep :]


def _begun(text: str, stop: str) -> int:
    """How many characters at the end of a text are the beginning of a stop string."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
