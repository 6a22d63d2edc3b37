"""What is asked of the model's thread, and what it tells."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from skipstone.decoding.draft import Step
from skipstone.decoding.method import Method
from skipstone.decoding.request import Request
from skipstone.serving.details import Details
from skipstone.serving.grammar import COMPLETE, Grammar

STOP, LENGTH, CANCELLED, TIMEOUT, FAILED = "stop", "length", "cancelled", "timeout", "error"
"""Why a job has ended: an end-of-text token or a grammar's document, all tokens that were asked for or a grammar that cannot go
on, nobody who reads, no time left, a defect."""


class Refused(Exception):
    """A job that is not taken, and the HTTP status that says so. retry_after: seconds after which it may be. code: OpenAI's
    word for the reason, for clients that look for it; None where the status says it all."""

    def __init__(self, status: int, message: str, retry_after: int | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.retry_after, self.code = status, retry_after, code


@dataclass(eq=False)
class Job:
    """One text to write. request: of the loop. method: that writes it. logprobs: likeliest tokens that are told for every
    token, None where no probabilities are. seconds: after which it is given up, None for never. asked: when it came in, in
    seconds of a clock that never goes back. waited: seconds until a row was free for it. details: whether every step's are
    told. writes: whether anything is written behind the prompt. echo: whether the answer begins with the prompt. read: what
    the model thinks of the prompt's tokens from the second on, as far as they were looked at; None where nobody asks. Choices
    of one prompt share it. grammar: the only texts that may be written, None for any."""

    request: Request
    method: Method
    logprobs: int | None = None
    seconds: float | None = None
    asked: float = 0.0
    waited: float = 0.0
    details: bool = False
    writes: bool = True
    echo: bool = False
    read: "list[Likely] | None" = None
    grammar: Grammar | None = None
    figures: "Figures" = field(default_factory=lambda: Figures())

    @property
    def ids(self) -> list[int]:
        """The prompt."""
        return self.request.prompt.tolist()

    def reason(self, written: list[int], is_stopped: bool) -> str:
        """Why its text has ended with these tokens. is_stopped: as in `RunningRequest`."""
        end = None if self.grammar is None or written[-1] in self.request.eos else self.grammar.end_of(written)
        if end is not None:
            return STOP if end == COMPLETE else LENGTH
        return STOP if is_stopped else LENGTH

    @property
    def unread(self) -> bool:
        """Whether tokens of its prompt have still to be looked at."""
        return self.read is not None and len(self.read) < len(self.request.prompt) - 1


@dataclass
class Figures:
    """What the steps of one text came to. steps: that decoded. drafting: of these, those that drafted. by_length: tokens that
    were drafted in a step -> how many of them were accepted -> steps. reused: prompt tokens that were in the store already.
    predicted: tokens of the request's prediction that were accepted."""

    tokens: int = 0
    steps: int = 0
    drafting: int = 0
    drafted: int = 0
    accepted: int = 0
    reused: int = 0
    predicted: int = 0
    seconds_draft: float = 0.0
    seconds_score: float = 0.0
    by_length: dict[int, Counter[int]] = field(default_factory=dict)
    drafters: Counter[str] = field(default_factory=Counter)

    def add(self, step: Step, row: int) -> None:
        """One more step of a row that committed tokens in it."""
        self.tokens += len(step.tokens[row])
        if step.prefill:
            return
        self.steps += 1
        self.seconds_draft += step.seconds_draft
        self.seconds_score += step.seconds_score
        if step.drafter:
            self.drafters[step.drafter] += 1
        if drafted := step.drafted[row]:
            self.drafting += 1
            self.drafted += drafted
            self.accepted += step.accepted[row]
            self.by_length.setdefault(drafted, Counter())[step.accepted[row]] += 1


@dataclass(frozen=True, slots=True)
class Likely:
    """Log-probabilities of one token, by the model before any setting: its own, and the likeliest ones as (token, logprob)."""

    own: float
    top: Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens that one step has committed for a job. step: its number among the job's, 0 of the one that read the prompt.
    origin: of each, as in `Step`. likely: of each, where the job asks. drafted: tokens of the step's draft. drafter, reason: as
    in `Step`. milliseconds: of drafting and of scoring. details: where the job asks."""

    step: int
    tokens: list[int]
    origin: list[str]
    likely: Sequence[Likely] | None
    drafted: int
    drafter: str
    reason: str
    milliseconds: tuple[float, float]
    details: Details | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """Nothing more comes. message: what went wrong, if something did. status: of HTTP, where that is the user's doing."""

    reason: str
    message: str = ""
    status: int = 500


Event = Piece | Ended


def joined(events: Iterable[tuple[Job, Event]]) -> list[tuple[Job, Event]]:
    """The same, with all that came of one job as one piece: the latest step's, with the tokens of all."""
    found: list[tuple[Job, Event]] = []
    place: dict[Job, int] = {}
    for job, event in events:
        before = found[place[job]][1] if job in place else None
        if isinstance(event, Piece) and isinstance(before, Piece):
            likely = None if event.likely is None else [*(before.likely or ()), *event.likely]
            tokens, origin = [*before.tokens, *event.tokens], [*before.origin, *event.origin]
            found[place[job]] = job, replace(event, tokens=tokens, origin=origin, likely=likely)
        else:
            place[job] = len(found)
            found.append((job, event))
    return found
