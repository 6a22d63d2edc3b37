"""The rows of one method: which job has which row, and whose prompt a free row still knows."""

from collections.abc import Callable
from typing import Any

import torch

from skipstone.decoding.draft import Draft, RowVerdict, Step
from skipstone.decoding.loop import Decoder
from skipstone.decoding.method import Method
from skipstone.decoding.record import Keeper
from skipstone.decoding.sampling import Scores
from skipstone.models.layered import LayeredModel
from skipstone.serving.details import Details, details_of
from skipstone.serving.jobs import LENGTH, STOP, Ended, Event, Job, Likely, Piece
from skipstone.serving.layers import layers_of

LEAST_REUSED = 16
"""Tokens that a free row and a prompt have in common at the beginning, from which on that row is taken before any other."""

LEAST = -9999.0
"""What is told for a log-probability of minus infinity, which JSON does not have."""

PLAIN_EVERY = 16
"""Steps of a job after which it is told again what a plain step takes, where the method knows."""

Tell = Callable[[Job, Event], None]


class Lane:
    """Rows that one method decodes. capacity: tokens a row. chunk: prompt tokens that a row runs in a step. tell: called with
    every event of a job, in this thread."""

    def __init__(self, model: LayeredModel, method: Method, rows: int, capacity: int, chunk: int, tell: Tell) -> None:
        method.check(model)
        self.method, self.tell = method, tell
        self.keeper = Keeper(logits=True)
        session = method.start(model, rows, capacity)
        self.decoder = Decoder(session, chunk=chunk, recorder=self._record, takes_turns=True)
        self.jobs: list[Job | None] = [None] * rows
        self.known: list[list[int]] = [[] for _ in range(rows)]  # tokens whose keys and values a free row still has
        self.used = [0] * rows  # turns of `turn`
        self._likely: list[list[Likely] | None] = [None] * rows  # of every row, of the step that is going on
        self._details: list[Details | None] = [None] * rows  # the same
        self._kept: tuple[Draft, list[RowVerdict], list[torch.Tensor]] | None = None  # the same, to be looked at after it
        self._layers: list[dict[str, Any] | None] = [None] * rows  # that the job of a row was told of
        self.turn = 0
        self.reuses = not model.family.recurrent  # a state has no positions to go back to

    @property
    def free(self) -> list[int]:
        """Rows without a job."""
        return [row for row, job in enumerate(self.jobs) if job is None]

    @property
    def busy(self) -> bool:
        return self.decoder.busy

    def admit(self, job: Job) -> None:
        """Give a free row to a job: the one that knows most of its prompt, or else the one that was used longest ago.
        ValueError, before anything changed, for a job that cannot be decoded."""
        prompt, free = job.ids, self.free
        common = {row: _common(self.known[row], prompt) if self.reuses else 0 for row in free}
        best = max(free, key=lambda row: common[row])
        row = best if common[best] >= LEAST_REUSED else min(free, key=lambda row: self.used[row])
        reused = common[row] if common[row] >= LEAST_REUSED else 0
        self.decoder.admit(row, job.request, reused)
        job.figures.reused = reused
        self.jobs[row], self.known[row], self._layers[row] = job, [], None
        self._touch(row)

    def _touch(self, row: int) -> None:
        self.turn += 1
        self.used[row] = self.turn

    def drop(self, job: Job) -> None:
        """Free the row of a job that is no longer wanted."""
        row = self.jobs.index(job)
        has = self.decoder.session.store.length[row]
        state = self.decoder.release(row)
        assert state is not None
        self._leave(row, [*job.ids, *state.tokens][:has])

    def _leave(self, row: int, known: list[int]) -> None:
        self.jobs[row], self.known[row] = None, known
        self._touch(row)

    def step(self) -> Step:
        """One step of all rows; tells every job what it came to."""
        states = list(self.decoder.rows)
        self._kept = None
        step = self.decoder.step()
        self._look()
        for row, job in enumerate(self.jobs):
            if job is None or not step.tokens[row]:
                continue
            job.figures.add(step, row)
            job.figures.predicted = self.decoder.session.predicted(row)
            milliseconds = 1000 * step.seconds_draft, 1000 * step.seconds_score
            tokens, origin, likely = step.tokens[row], step.origin[row], self._likely[row]
            drafted = step.drafted[row], step.drafter, step.reason
            self.tell(job, Piece(job.figures.steps, tokens, origin, likely, *drafted, milliseconds, self._told(row, step)))
            if row in step.finished:
                state = states[row]
                assert state is not None
                written, request = state.tokens, job.request
                over = len(written) >= request.max_new_tokens and written[-1] not in request.eos
                self._leave(row, [*job.ids, *written][:-1])
                self.tell(job, Ended(LENGTH if over else STOP))
        return step

    def _told(self, row: int, step: Step) -> Details | None:
        """The details of a row's step, where its job asks for them."""
        job, details = self.jobs[row], self._details[row]
        if job is None or details is None:
            return None
        session = self.decoder.session
        if (layers := layers_of(self.method, session)) != self._layers[row]:
            self._layers[row] = details.layers = layers
        if job.figures.steps % PLAIN_EVERY == 0 or row in step.finished:
            seconds = self.method.report(session.model.model).get("plain_seconds")
            details.plain_milliseconds = None if seconds is None else 1000 * seconds
        return details

    def _record(self, step: Step, draft: Draft, scores: Scores, verdicts: list[RowVerdict]) -> None:
        """Keep what log-probabilities and details are computed of, where a row asks for them. They are computed after the step,
        so that little of it counts as the step's time."""
        if any(verdicts[row].tokens for row in self._asking):
            self.keeper(step, draft, scores, verdicts)
            assert step.logits is not None
            self._kept, step.logits = (draft, verdicts, step.logits), None

    @property
    def _asking(self) -> dict[int, Job]:
        """Rows whose jobs are told more than tokens."""
        jobs = {row: job for row, job in enumerate(self.jobs) if job is not None}
        return {row: job for row, job in jobs.items() if job.details or job.logprobs is not None}

    @torch.inference_mode()
    def _look(self) -> None:
        """Log-probabilities and details, of the rows that ask for them."""
        self._likely, self._details = [None] * len(self.jobs), [None] * len(self.jobs)
        if self._kept is None:
            return
        (draft, verdicts, kept), self._kept = self._kept, None
        for row, job in self._asking.items():
            logits, verdict = kept[row], verdicts[row]
            if not verdict.tokens:
                continue
            if job.logprobs is not None:
                self._likely[row] = likely_of(logits, verdict.tokens, job.logprobs)
            if job.details:
                model, store, sampling = self.decoder.session.model, self.decoder.session.store, job.request.sampling
                greedy = sampling.temperature == 0 and not sampling.warpers
                shape = {"depth": model.depth, "runs": store.layers}
                self._details[row] = details_of(draft, row, verdict, logits, greedy=greedy, **shape)


def likely_of(logits: torch.Tensor, tokens: list[int], count: int) -> list[Likely]:
    """Log-probabilities of tokens, and the `count` likeliest ones in their places. logits: [k, V]."""
    chances = logits.float().log_softmax(-1)  # [k, V]
    own = chances.gather(-1, torch.tensor(tokens, dtype=torch.int64, device=chances.device)[:, None])[:, 0]  # [k]
    best, ids = chances.topk(min(count, chances.shape[-1]), -1)  # [k, count] each
    best = best.clamp(min=LEAST)
    top = [list(zip(*each, strict=True)) for each in zip(ids.tolist(), best.tolist(), strict=True)]
    return [Likely(max(one, LEAST), few) for one, few in zip(own.tolist(), top, strict=True)]


def _common(known: list[int], prompt: list[int]) -> int:
    """How many tokens both begin with, one less than the prompt has at most: its last one is run in any case."""
    most = min(len(known), len(prompt) - 1)
    return next((place for place in range(most) if known[place] != prompt[place]), most)
