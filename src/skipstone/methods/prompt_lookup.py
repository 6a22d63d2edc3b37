"""Prompt lookup decoding (Saxena, 2023, github.com/apoorvumang/prompt-lookup-decoding).

If the last tokens of the text have occurred before, the tokens that followed them there are the draft. A draft costs only its
verification. This pays if answers repeat their prompts (editing, summaries, questions about a document).

Deviations: of several places the latest counts, because its context is likelier to be similar (`prefer="first"` takes the
earliest, as transformers does). A draft that reaches the end of the text repeats itself, so that a loop fills a draft.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from skipstone.decoding.draft import Draft, RowVerdict
from skipstone.decoding.drafter import Candidate, Drafter
from skipstone.decoding.method import DraftingMethod, Preset
from skipstone.decoding.request import Request
from skipstone.decoding.settings import setting
from skipstone.engines.engine import SurvivalThresholds
from skipstone.engines.model_runner import ModelRunner
from skipstone.methods.drafting.lookups import LookupDrafter, RowDraft

Place = Literal["recent", "first"]
PREDICTION_NGRAMS = (4, 3, 2)
"""Sizes of the n-grams that find a text's place in its prediction again."""
AT_FIRST = 10
"""Assumed number of matching tokens of a new prediction, because users expect a prediction to be right."""


@dataclass(frozen=True)
class PromptLookup(DraftingMethod):
    """Prompt lookup: drafts the tokens that followed the last n-gram earlier in the text."""

    name: ClassVar[str] = "prompt_lookup"
    aliases: ClassVar[dict[str, str]] = {
        "prompt_lookup_num_tokens": "num_speculative_tokens",
        "max_matching_ngram_size": "prompt_lookup_max",
    }
    presets: ClassVar[dict[str, Preset]] = {
        "release": Preset(
            "README of prompt-lookup-decoding. It skips a place that fewer than 10 tokens follow; here the draft is shorter",
            {"prompt_lookup_max": 3, "prompt_lookup_min": 1, "num_speculative_tokens": 10, "prefer": "first"},
        )
    }
    if_few_accepted: ClassVar[str] = "An acceptance rate that low says that this text does not repeat itself or its prompt."

    prompt_lookup_max: int = setting(3, "longest n-gram to look up, before shorter ones.")
    prompt_lookup_min: int = setting(1, "shortest n-gram to look up.")
    num_speculative_tokens: int = setting(10, "maximum drafts a step.")
    prefer: Place = setting("recent", 'of several places the most "recent" or the "first" (as in transformers).')

    def takes_predictions(self, model: ModelRunner) -> bool:
        return True

    def check(self, model: ModelRunner) -> None:
        super().check(model)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min={self.prompt_lookup_min} is more than prompt_lookup_max={self.prompt_lookup_max}"
            )

    def auto_candidates(self, model: ModelRunner, rows: int, capacity: int) -> dict[str, Candidate]:
        """None, because `auto` drafts like this by itself."""
        return {}

    def create_drafter(self, model: ModelRunner, rows: int, capacity: int) -> Drafter:
        return PromptLookupDrafter(self, rows)


class NgramIndex:
    """Index of the latest (or first) place of every n-gram in a growing text. A new token takes constant time.

    sizes: numbers of tokens of the n-grams, ascending.
    """

    def __init__(self, sizes: Sequence[int], prefer: Place) -> None:
        self.sizes = sizes
        self.prefer_first = prefer == "first"
        self.text: list[int] = []
        self._place_after: dict[tuple[int, ...], int] = {}  # n-gram -> place of the token that followed it

    def extend(self, tokens: list[int]) -> None:
        """Append tokens to the text."""
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
        """(size, up to `max_tokens` tokens that followed it) of the longest n-gram that ends the text and occurred before, or
        (0, [])."""
        text = self.text
        for size in reversed(self.sizes):
            if size <= len(text) and (place := self._place_after.get(tuple(text[-size:]))) is not None:
                continuation = text[place : place + max_tokens]
                while not self.prefer_first and len(continuation) < max_tokens:
                    continuation += continuation[: max_tokens - len(continuation)]
                return size, continuation
        return 0, []


class PredictedText:
    """Drafts from a predicted text: finds the place that matches the latest tokens and proposes the tokens after it.

    tokens: of the prediction. run: number of latest tokens that match it, 0 if it has no matching place. accepted: number of
    its tokens that were drafted and accepted.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens = list(tokens)
        self.run = AT_FIRST if self.tokens else 0
        self.accepted = 0
        self._place = 0  # of the expected next token
        self._latest: list[int] = []  # the last tokens of the text
        self._places_after: dict[tuple[int, ...], list[int]] = {}  # n-gram -> places after it, ascending
        for size in PREDICTION_NGRAMS:
            for place in range(size, len(self.tokens)):
                self._places_after.setdefault(tuple(self.tokens[place - size : place]), []).append(place)

    def extend(self, tokens: Sequence[int]) -> None:
        """Follow new tokens of the text."""
        if not self.tokens:
            return
        for token in tokens:
            self._latest = [*self._latest[1 - PREDICTION_NGRAMS[0] :], token]
            if self.run and self._place < len(self.tokens) and self.tokens[self._place] == token:
                self._place, self.run = self._place + 1, self.run + 1
            else:
                self._find()

    def _find(self) -> None:
        """Find the place again after a mismatch: the next later one after the same n-gram, else the last one."""
        for size in PREDICTION_NGRAMS:
            if places := self._places_after.get(tuple(self._latest[-size:])):
                self._place, self.run = next((place for place in places if place > self._place), places[-1]), size
                return
        self.run = 0

    def next(self, max_tokens: int) -> list[int]:
        """Up to `max_tokens` expected tokens; none if the text does not match the prediction."""
        return self.tokens[self._place : self._place + max_tokens] if self.run else []


class IndexedDrafter(LookupDrafter):
    """Looks up continuations of every row's text in its prediction, while that matches, and in the text itself.

    new_index: creates the index of a row. looks_up: False to look up nothing."""

    def __init__(self, rows: int, new_index: Callable[[], NgramIndex], *, looks_up: bool = True) -> None:
        super().__init__(rows)
        self._new_index, self.looks_up = new_index, looks_up
        self.index = [new_index() for _ in range(rows)]
        self.predictions = [PredictedText() for _ in range(rows)]
        self.from_prediction = [False] * rows  # whether the latest continuation is from the prediction

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
        """Up to `max_tokens` tokens of a continuation, cut before an end-of-sequence token. Returns as `NgramIndex.find`."""
        prediction, ends = self.predictions[row], self.view.sampler.eos[row]
        size, tokens = prediction.run, prediction.next(max_tokens)
        self.from_prediction[row] = bool(tokens)
        if not tokens:
            size, tokens = self.index[row].find(max_tokens)
        if ends:
            tokens = tokens[: next((place for place, token in enumerate(tokens) if token in ends), len(tokens))]
        return (size, tokens) if tokens else (0, [])

    def went_on(self, row: int, verdict: RowVerdict, *, drafted: bool) -> None:
        """Follow a row's committed tokens. drafted: whether the latest continuation was the draft."""
        prediction = self.predictions[row]
        if drafted and self.from_prediction[row]:
            prediction.accepted += len(verdict.path)
        prediction.extend(verdict.tokens)


class PromptLookupDrafter(IndexedDrafter):
    """Drafts chains from the row's own text or from its prediction."""

    def __init__(self, method: PromptLookup, rows: int) -> None:
        sizes = range(method.prompt_lookup_min, method.prompt_lookup_max + 1)
        super().__init__(rows, lambda: NgramIndex(sizes, method.prefer))
        self.method = method

    def propose_draft(self, limits: list[int], stop_rule: SurvivalThresholds | None = None) -> Draft:
        """The continuation of the best match in every row."""
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
