"""Prompt lookup decoding (Saxena, 2023, github.com/apoorvumang/prompt-lookup-decoding).

The last tokens of the text stood somewhere in it before: what followed them there is the draft. No model drafts, so a draft
costs its verification alone; it pays where answers repeat their prompts (editing, summaries, questions about a document).

Deviations: of several places the latest, whose surroundings are likelier to be alike (`prefer="first"` takes the earliest, as
transformers does); where what followed reaches the end of the text, it goes on with itself, so that a loop fills a draft.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from skipstone.decoding.draft import Draft, RowVerdict
from skipstone.decoding.drafter import Candidate, Drafter
from skipstone.decoding.method import DraftingMethod
from skipstone.decoding.request import Request
from skipstone.decoding.settings import setting
from skipstone.engines.engine import SurvivalThresholds
from skipstone.engines.model_runner import ModelRunner
from skipstone.methods.drafting.lookups import LookupDrafter, RowDraft

Place = Literal["recent", "first"]
PREDICTION_NGRAMS = (4, 3, 2)
"""Tokens by whose places in the prediction a text that has left it is found again."""
AT_FIRST = 10
"""Tokens that count as in agreement before the first one was written: who sends a prediction thinks that it is right."""


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

    def takes_predictions(self, model: ModelRunner) -> bool:
        return True

    def check(self, model: ModelRunner) -> None:
        super().check(model)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min={self.prompt_lookup_min} is more than prompt_lookup_max={self.prompt_lookup_max}"
            )

    def auto_candidates(self, model: ModelRunner, rows: int, capacity: int) -> dict[str, Candidate]:
        """None: `auto` drafts like this by itself, without a model."""
        return {}

    def create_drafter(self, model: ModelRunner, rows: int, capacity: int) -> Drafter:
        return PromptLookupDrafter(self, rows)


class NgramIndex:
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

    def find(self, max_tokens: int) -> tuple[int, list[int]]:
        """The longest n-gram that ends the text and was there before: (its tokens' number, up to `max_tokens` tokens that
        followed it); (0, []) for none."""
        text = self.text
        for size in reversed(self.sizes):
            if size <= len(text) and (place := self._place_after.get(tuple(text[-size:]))) is not None:
                followed = text[place : place + max_tokens]
                while not self.prefer_first and len(followed) < max_tokens:
                    followed += followed[: max_tokens - len(followed)]
                return size, followed
        return 0, []


class PredictedText:
    """Drafts from a predicted text: finds the place in it that matches the latest tokens, and proposes what follows.

    tokens: of the prediction. run: tokens in a row in which it agrees with what was written last, 0 where it does not.
    accepted: tokens of it that were drafted and accepted.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens = list(tokens)
        self.run = AT_FIRST if self.tokens else 0
        self.accepted = 0
        self._place = 0  # of the token that is thought to come next
        self._latest: list[int] = []  # tokens of the text
        self._behind: dict[tuple[int, ...], list[int]] = {}  # n-gram -> places behind it, ascending
        for size in PREDICTION_NGRAMS:
            for place in range(size, len(self.tokens)):
                self._behind.setdefault(tuple(self.tokens[place - size : place]), []).append(place)

    def extend(self, tokens: Sequence[int]) -> None:
        """More of the text was written."""
        if not self.tokens:
            return
        for token in tokens:
            self._latest = [*self._latest[1 - PREDICTION_NGRAMS[0] :], token]
            if self.run and self._place < len(self.tokens) and self.tokens[self._place] == token:
                self._place, self.run = self._place + 1, self.run + 1
            else:
                self._find()

    def _find(self) -> None:
        """The text has left the prediction: the next place further on that has these tokens before it, or else the last one."""
        for size in PREDICTION_NGRAMS:
            if places := self._behind.get(tuple(self._latest[-size:])):
                self._place, self.run = next((place for place in places if place > self._place), places[-1]), size
                return
        self.run = 0

    def next(self, max_tokens: int) -> list[int]:
        """Up to `max_tokens` tokens that are thought to come; none where the text has left the prediction."""
        return self.tokens[self._place : self._place + max_tokens] if self.run else []


class IndexedDrafter(LookupDrafter):
    """Looks for how every row's text may go on: in the text that it was predicted to be, as long as it agrees
    with that, and in itself. new_index: makes the index of a row. looks_up: False where nothing is looked for."""

    def __init__(self, rows: int, new_index: Callable[[], NgramIndex], *, looks_up: bool = True) -> None:
        super().__init__(rows)
        self._new_index, self.looks_up = new_index, looks_up
        self.index = [new_index() for _ in range(rows)]
        self.predictions = [PredictedText() for _ in range(rows)]
        self.from_prediction = [False] * rows  # whether what was found last is out of the prediction

    @property
    def takes_predictions(self) -> bool:
        return self.looks_up

    def accepted_predictions(self, row: int) -> int:
        return self.predictions[row].accepted

    def add_request(self, row: int, request: Request) -> None:
        super().add_request(row, request)
        self.predictions[row], self.from_prediction[row] = PredictedText(request.prediction), False
        if self.looks_up:
            self.index[row] = self._new_index()
            self.index[row].extend(self.text[row])

    def look_for(self, row: int, max_tokens: int) -> tuple[int, list[int]]:
        """Up to `max_tokens` tokens that may come, before an end of sequence: what follows one belongs to another text. Returns
        as `NgramIndex.find`."""
        prediction, ends = self.predictions[row], self.view.sampler.eos[row]
        size, tokens = prediction.run, prediction.next(max_tokens)
        self.from_prediction[row] = bool(tokens)
        if not tokens:
            size, tokens = self.index[row].find(max_tokens)
        if ends:
            tokens = tokens[: next((place for place, token in enumerate(tokens) if token in ends), len(tokens))]
        return (size, tokens) if tokens else (0, [])

    def went_on(self, row: int, verdict: RowVerdict, *, drafted: bool) -> None:
        """A row's text has gone on. drafted: whether by what was found last."""
        prediction = self.predictions[row]
        if drafted and self.from_prediction[row]:
            prediction.accepted += len(verdict.path)
        prediction.extend(verdict.tokens)


class PromptLookupDrafter(IndexedDrafter):
    """Chains out of the row's own text, or of its prediction."""

    def __init__(self, method: PromptLookup, rows: int) -> None:
        sizes = range(method.prompt_lookup_min, method.prompt_lookup_max + 1)
        super().__init__(rows, lambda: NgramIndex(sizes, method.prefer))
        self.method = method

    def propose_draft(self, limits: list[int], stop_rule: SurvivalThresholds | None = None) -> Draft:
        """The best match of every row."""
        return self.as_draft([self._row_draft(row, allowed) for row, allowed in enumerate(limits)])

    def _row_draft(self, row: int, allowed: int) -> RowDraft:
        max_tokens = min(self.method.num_speculative_tokens, allowed)
        _, tokens = self.look_for(row, max_tokens) if self.view.alive[row] and max_tokens else (0, [])
        return RowDraft().chain(tokens)

    def observe_commits(self, draft: Draft | None, verdicts: list[RowVerdict]) -> None:
        super().observe_commits(draft, verdicts)
        for row, verdict in enumerate(verdicts):
            self.went_on(row, verdict, drafted=draft is not None)
            self.index[row].extend(verdict.tokens)
