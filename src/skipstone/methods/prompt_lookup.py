"""Prompt lookup decoding (Saxena, 2023, github.com/apoorvumang/prompt-lookup-decoding).

The last tokens of the text stood somewhere in it before: what followed them there is the draft. No model drafts, so a draft
costs its verification alone; it pays where answers repeat their prompts (editing, summaries, questions about a document).

Deviations: of several places the latest, whose surroundings are likelier to be alike (`prefer="first"` takes the earliest, as
transformers does); where what followed reaches the end of the text, it goes on with itself, so that a loop fills a draft.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from skipstone.decoding.batch import Request
from skipstone.decoding.draft import Draft, RowVerdict
from skipstone.decoding.method import DraftingMethod
from skipstone.decoding.session import Session
from skipstone.decoding.settings import setting
from skipstone.methods.shared.lookups import LookupSession, RowDraft
from skipstone.models.layered import LayeredModel

Place = Literal["recent", "first"]


@dataclass(frozen=True)
class PromptLookup(DraftingMethod):
    """Prompt lookup: what followed the last n-gram earlier in the text is the draft."""

    name: ClassVar[str] = "prompt_lookup"
    aliases: ClassVar[dict[str, str]] = {
        "prompt_lookup_num_tokens": "num_speculative_tokens",
        "max_matching_ngram_size": "prompt_lookup_max",
    }
    if_few_accepted: ClassVar[str] = "An acceptance rate that low says that this text does not repeat itself or its prompt."

    prompt_lookup_max: int = setting(3, "longest n-gram that is looked for, before shorter ones.")
    prompt_lookup_min: int = setting(1, "shortest.")
    num_speculative_tokens: int = setting(10, "most drafts a step.")
    prefer: Place = setting("recent", 'of several places the most "recent" one or the "first" (transformers\' way).')

    def check(self, model: LayeredModel) -> None:
        super().check(model)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min={self.prompt_lookup_min} is more than prompt_lookup_max={self.prompt_lookup_max}"
            )

    def start(self, model: LayeredModel, rows: int, capacity: int) -> Session:
        return PromptLookupSession(self, model, rows, capacity)


class Index:
    """Where every n-gram of a growing text was last (or first) followed by something. Each new token is constant work.

    sizes: tokens of the n-grams, ascending.
    """

    def __init__(self, sizes: Sequence[int], prefer: Place) -> None:
        self.sizes = sizes
        self.prefer_first = prefer == "first"
        self.text: list[int] = []
        self._place_after: dict[tuple[int, ...], int] = {}  # n-gram -> place of the token that followed it

    def extend(self, tokens: list[int]) -> None:
        """More of the text."""
        for token in tokens:
            place = len(self.text)
            for size in self.sizes:
                if size > place:
                    break
                gram = tuple(self.text[place - size :])
                if not self.prefer_first or gram not in self._place_after:
                    self._place_after[gram] = place
            self.text.append(token)

    def find(self, most: int) -> tuple[int, list[int]]:
        """The longest n-gram that ends the text and was there before: (its tokens' number, up to `most` tokens that followed
        it); (0, []) for none."""
        text = self.text
        for size in reversed(self.sizes):
            if size <= len(text) and (place := self._place_after.get(tuple(text[-size:]))) is not None:
                followed = text[place : place + most]
                while not self.prefer_first and len(followed) < most:
                    followed += followed[: most - len(followed)]
                return size, followed
        return 0, []


class PromptLookupSession(LookupSession):
    """Chains out of the row's own text, which end before an end of sequence: what follows one belongs to another text."""

    def __init__(self, method: PromptLookup, model: LayeredModel, rows: int, capacity: int) -> None:
        super().__init__(model, rows, capacity)
        self.method = method
        self.index = [self._new_index() for _ in range(rows)]

    def _new_index(self) -> Index:
        method = self.method
        return Index(range(method.prompt_lookup_min, method.prompt_lookup_max + 1), method.prefer)

    def begin(self, row: int, request: Request) -> None:
        super().begin(row, request)
        self.index[row] = self._new_index()
        self.index[row].extend(self.text[row])

    def draft(self, limit: list[int]) -> Draft:
        """The best match of every row."""
        return self.propose([self._row_draft(row, allowed) for row, allowed in enumerate(limit)])

    def _row_draft(self, row: int, allowed: int) -> RowDraft:
        most = min(self.method.num_speculative_tokens, allowed)
        _, tokens = self.index[row].find(most) if self.alive[row] and most else (0, [])
        end = next((place for place, token in enumerate(tokens) if token in self.sampler.eos[row]), len(tokens))
        return RowDraft().chain(tokens[:end])

    def learn(self, draft: Draft | None, verdicts: list[RowVerdict]) -> None:
        super().learn(draft, verdicts)
        for row, verdict in enumerate(verdicts):
            self.index[row].extend(verdict.tokens)
