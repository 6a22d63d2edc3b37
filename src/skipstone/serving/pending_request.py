"""A text that is to be written, and the events that report it."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from skipstone.decoding.draft import Step
from skipstone.decoding.method import Method
from skipstone.decoding.request import Request
from skipstone.serving.grammar import COMPLETE, Grammar
from skipstone.serving.step_details import StepDetails

STOP, LENGTH, CANCELLED, TIMEOUT, FAILED = "stop", "length", "cancelled", "timeout", "error"
"""Why a text has ended. STOP: an end-of-text token, or a whole document of its grammar. LENGTH: `max_new_tokens`, or a dead end
of its grammar. CANCELLED: the client has gone. TIMEOUT: the request took too long. FAILED: a defect."""


@dataclass(eq=False)
class PendingRequest:
    """One text to write, from its arrival to its end. The choices of one HTTP request are several of these.

    num_logprobs: number of likeliest tokens to report in the place of every token; None for no log-probabilities.
    timeout_seconds: from arrival to the end; None for no limit. arrival_time: in seconds of `time.monotonic`. queue_seconds:
    until it got a row. wants_details: whether the details of every step are reported. generates: whether tokens are written
    behind the prompt. echo: whether the answer begins with the prompt. prompt_logprobs: those of the prompt's tokens from the
    second on, as far as they are computed; None if they are not wanted; shared by the choices of one prompt. grammar: restricts
    the text; None for any text."""

    request: Request
    method: Method
    num_logprobs: int | None = None
    timeout_seconds: float | None = None
    arrival_time: float = 0.0
    queue_seconds: float = 0.0
    wants_details: bool = False
    generates: bool = True
    echo: bool = False
    prompt_logprobs: "list[TokenLogprobs] | None" = None
    grammar: Grammar | None = None
    stats: "RequestStats" = field(default_factory=lambda: RequestStats())

    @property
    def prompt_ids(self) -> list[int]:
        return self.request.prompt.tolist()

    @property
    def max_tokens(self) -> int:
        """Maximum length of the text, its prompt included."""
        return len(self.request.prompt) + self.request.max_new_tokens

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of its prompt have still to be computed."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.request.prompt) - 1

    def finish_reason(self, written: list[int], is_stopped: bool) -> str:
        """Why its text has ended with these tokens. is_stopped: as in `RunningRequest`."""
        end = None if self.grammar is None or written[-1] in self.request.eos else self.grammar.end_of(written)
        if end is not None:
            return STOP if end == COMPLETE else LENGTH
        return STOP if is_stopped else LENGTH


@dataclass
class RequestStats:
    """Sums over the steps of a text.

    steps: decoding steps. setup_seconds: of set-up work that it waited for. drafts: (number of drafted tokens, number of
    accepted tokens) -> steps that drafted. drafters: name -> steps. cached_tokens: prompt tokens with reused keys and values.
    accepted_prediction_tokens: tokens of the request's prediction that were accepted."""

    tokens: int = 0
    steps: int = 0
    setup_seconds: float = 0.0
    drafts: Counter[tuple[int, int]] = field(default_factory=Counter)
    drafters: Counter[str] = field(default_factory=Counter)
    cached_tokens: int = 0
    accepted_prediction_tokens: int = 0

    @property
    def drafted(self) -> int:
        return sum(drafted * steps for (drafted, _), steps in self.drafts.items())

    @property
    def accepted(self) -> int:
        return sum(accepted * steps for (_, accepted), steps in self.drafts.items())

    @classmethod
    def total(cls, texts: Iterable["RequestStats"]) -> "RequestStats":
        """The sums over several texts."""
        total = cls()
        for one in texts:
            for name, value in vars(one).items():
                setattr(total, name, getattr(total, name) + value)
        return total

    def add(self, step: Step, row: int) -> None:
        """Count a step in which the row committed tokens."""
        self.tokens += len(step.tokens[row])
        if row not in step.decoding_rows:
            return
        self.steps += 1
        if step.drafter:
            self.drafters[step.drafter] += 1
        if drafted := step.drafted[row]:
            self.drafts[drafted, step.accepted[row]] += 1


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of one token by the model, before any sampling setting, and (token, log-probability) of the likeliest
    tokens."""

    logprob: float
    top: Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Tokens that one step has committed for a request.

    step: its number in the request; 0 is the prefill. origin, drafter, reason: as in `Step`. logprobs: one per token, None if
    not wanted. drafted: number of drafted tokens. milliseconds: of drafting and of scoring. details: None if not wanted."""

    step: int
    tokens: list[int]
    origin: list[str]
    logprobs: Sequence[TokenLogprobs] | None
    drafted: int
    drafter: str
    reason: str
    milliseconds: tuple[float, float]
    details: StepDetails | None = None


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """The last event of a request. message: what went wrong, "" for nothing. status: of HTTP, for an error."""

    reason: str
    message: str = ""
    status: int = 500


RequestEvent = StepOutput | RequestEnd


def merge_outputs(events: Iterable[tuple[PendingRequest, RequestEvent]]) -> list[tuple[PendingRequest, RequestEvent]]:
    """The same events with one `StepOutput` per request: the latest step's, with the tokens of all steps."""
    merged: dict[tuple[PendingRequest, bool], RequestEvent] = {}
    for pending, event in events:
        key = pending, isinstance(event, StepOutput)
        before = merged.get(key)
        if isinstance(event, StepOutput) and isinstance(before, StepOutput):
            logprobs = None if event.logprobs is None else [*(before.logprobs or ()), *event.logprobs]
            tokens, origin = [*before.tokens, *event.tokens], [*before.origin, *event.origin]
            event = replace(event, tokens=tokens, origin=origin, logprobs=logprobs)
        merged[key] = event
    return [(pending, event) for (pending, _), event in merged.items()]
