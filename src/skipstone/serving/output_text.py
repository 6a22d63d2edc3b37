"""Tokens to text, as a client reads it: whole characters, and nothing from a stop string on."""

from collections.abc import Sequence
from typing import Any

from skipstone.hf.detokenizer import Detokenizer, incomplete


class OutputText:
    """The text of one request. stops: strings that end it, which it does not have. ends: token ids that end it and are no text.
    prompt, special, echo: as of a `Detokenizer`; marks of a tool's call may be special tokens.

    count: tokens up to now, that which completed a stop string too. stopped: whether one was met."""

    def __init__(
        self,
        tokenizer: Any,
        stops: list[str],
        ends: frozenset[int] = frozenset(),
        *,
        prompt: Sequence[int] = (),
        special: bool = False,
        echo: bool = False,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt, special=special, echo=echo)
        self._stops, self.ends, self.special = stops, ends, special
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
            if token not in self.ends:
                self._take(self._detokenizer.add(token))
        return self.text[began:]

    @property
    def prompt_end(self) -> str:
        """The end of the prompt's text that is part of this one, with `echo`."""
        return self._detokenizer.prompt_end

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
        keep = max(incomplete(held, stop) for stop in self._stops)
        self.text, self._held = self.text + held[: len(held) - keep], held[len(held) - keep :]
