"""The text that a client reads: whole characters, cut before the first stop string."""

from collections.abc import Sequence
from typing import Any

from skipstone.hf.detokenizer import Detokenizer, incomplete


class OutputText:
    """The text of one request.

    stops: stop strings; the text ends before the first one. ends: ids of end-of-text tokens, which are not text. prompt,
    special, echo: as in `Detokenizer`; marks of tool calls may be special tokens. count: number of tokens, those of a stop
    string included."""

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
        """Add tokens. Returns the new text that is certain, maybe ""; text after a stop string is dropped."""
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
        """With `echo`: the end of the prompt's text that belongs to this text."""
        return self._detokenizer.prompt_end

    def rest(self) -> str:
        """The text that is still held back at the end."""
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
