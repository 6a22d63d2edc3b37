"""The rows of one method: which job has which row, and whose prompt a free row still knows."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from skipstone.decoding.draft import Draft, RowVerdict, Step
from skipstone.decoding.loop import DecodingLoop
from skipstone.decoding.method import Method
from skipstone.decoding.output_recorder import OutputRecorder
from skipstone.decoding.prefill import Prefill
from skipstone.decoding.sampling import Scores
from skipstone.decoding.session import Session
from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_runner import ModelRunner
from skipstone.models.per_model_cache import PerModelCache
from skipstone.serving.details import Details, details_of
from skipstone.serving.jobs import FAILED, Ended, Event, Job, Likely, Piece
from skipstone.serving.layers import layers_of

ROW_BYTES: PerModelCache[tuple[int, int]] = PerModelCache()
"""Of a model: bytes of the keys and values of one token in all its layers, and bytes of a row's recurrent states."""
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

    def __init__(self, model: ModelRunner, method: Method, rows: int, capacity: int, chunk: int, tell: Tell) -> None:
        method.check(model)
        self.method, self.tell, self.chunk = method, tell, chunk
        self.jobs: list[Job | None] = [None] * rows
        self._recorder = StepRecorder(self.jobs)
        session = method.start(model, rows, capacity)
        self.decoder = DecodingLoop(session, chunk=chunk, recorder=self._recorder, takes_turns=True)
        self.known: list[list[int]] = [[] for _ in range(rows)]  # tokens whose keys and values a free row still has
        self.used = [0] * rows  # turns of `turn`
        self._layers: list[dict[str, Any] | None] = [None] * rows  # that the job of a row was told of
        self.turn = 0
        self.reuses = not model.family.recurrent  # a state has no positions to go back to

    @property
    def free(self) -> list[int]:
        """Rows without a job."""
        return [row for row, job in enumerate(self.jobs) if job is None]

    def memory_bytes(self, tokens: int = 0) -> int:
        """Bytes of keys, values and recurrent states that its texts will have taken when all are written, and with them one of
        so many tokens."""
        session = self.decoder.session
        longest = max((length_of(job) for job in self.jobs if job is not None), default=0)
        slots = max(longest, tokens)
        found = 0
        for model, store in session.stores:
            capacity = store.capacity_for(slots + session.drafter.requirements.scratch_slots) if slots else store.capacity
            of_token, of_states = row_bytes(model, self.chunk)
            found += store.rows * ((capacity + 1) * of_token * store.layers // model.depth + of_states)
        return found

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
        step = self.decoder.step()
        likely, details = self._recorder.results(self.decoder.session)
        for row, job in enumerate(self.jobs):
            if job is None:
                continue
            if step.tokens[row]:
                self._tell_tokens(job, row, step, likely.get(row), details.get(row))
            if row in step.errors:
                self._leave(row, [])
                self.tell(job, Ended(FAILED, step.errors[row]))
            elif row in step.finished:
                state = states[row]
                assert state is not None
                self._leave(row, [*job.ids, *state.tokens][:-1])
                self.tell(job, Ended(job.reason(state.tokens, state.is_stopped)))
        return step

    def _tell_tokens(self, job: Job, row: int, step: Step, likely: Sequence[Likely] | None, details: Details | None) -> None:
        """Tell a job the tokens of a step."""
        job.figures.add(step, row)
        job.figures.predicted = self.decoder.session.drafter.accepted_predictions(row)
        milliseconds = 1000 * step.seconds_draft, 1000 * step.seconds_score
        drafted, told = (step.drafted[row], step.drafter, step.reason), self._told(row, step, details)
        self.tell(job, Piece(job.figures.steps, step.tokens[row], step.origin[row], likely, *drafted, milliseconds, told))

    def _told(self, row: int, step: Step, details: Details | None) -> Details | None:
        """The details of a row's step, where its job asks for them."""
        job = self.jobs[row]
        if job is None or details is None:
            return None
        session = self.decoder.session
        if (layers := layers_of(self.method, session)) != self._layers[row]:
            self._layers[row] = details.layers = layers
        if job.figures.steps % PLAIN_EVERY == 0 or row in step.finished:
            seconds = self.method.report(session.model.model).get("plain_seconds")
            details.plain_milliseconds = None if seconds is None else 1000 * seconds
        return details


class StepRecorder:
    """Keeps what the log-probabilities and details of a step are computed from. They are computed after the step, so that
    little of that counts as the step's time. jobs: of every row; the list is shared with the batch group.

    It holds the jobs and not the group: a decoder that refers back to its group would keep the group's keys and values alive
    until the garbage collector finds the cycle, which a server may never run."""

    def __init__(self, jobs: list[Job | None]) -> None:
        self._jobs, self._keeper = jobs, OutputRecorder(logits=True)
        self._kept: tuple[Draft, list[RowVerdict], list[torch.Tensor]] | None = None

    def __call__(self, step: Step, draft: Draft, scores: Scores, verdicts: list[RowVerdict]) -> None:
        """Keep a step where a row asks for more than tokens."""
        if any(verdicts[row].tokens for row in self._asking):
            self._keeper(step, draft, scores, verdicts)
            assert step.logits is not None
            self._kept, step.logits = (draft, verdicts, step.logits), None

    @property
    def _asking(self) -> dict[int, Job]:
        """Rows whose jobs are told more than tokens."""
        jobs = {row: job for row, job in enumerate(self._jobs) if job is not None}
        return {row: job for row, job in jobs.items() if job.details or job.logprobs is not None}

    @torch.inference_mode()
    def results(self, session: Session) -> tuple[dict[int, list[Likely]], dict[int, Details]]:
        """Log-probabilities and details of the latest step, by row, of the rows that ask for them."""
        likely: dict[int, list[Likely]] = {}
        details: dict[int, Details] = {}
        if self._kept is None:
            return likely, details
        (draft, verdicts, kept), self._kept = self._kept, None
        for row, job in self._asking.items():
            logits, verdict = kept[row], verdicts[row]
            if not verdict.tokens:
                continue
            if job.logprobs is not None:
                likely[row] = likely_of(logits, verdict.tokens, job.logprobs)
            if job.details:
                sampling = job.request.sampling
                greedy = sampling.temperature == 0 and not sampling.warpers
                shape = {"depth": session.model.depth, "runs": session.store.layers}
                details[row] = details_of(draft, row, verdict, logits, greedy=greedy, **shape)
        return likely, details


def row_bytes(model: ModelRunner, chunk: int) -> tuple[int, int]:
    """(bytes of one token's keys and values in all layers, most bytes of a row's recurrent states). chunk: most tokens of a row
    in a pass."""

    def measured() -> tuple[int, int]:
        store = KVCache(1, model.depth, 1, model.kv_dtype)
        prompts = Prefill(model, store)
        prompts.add(0, torch.zeros(1, dtype=torch.int64, device=model.device))
        with torch.inference_mode():
            prompts.run(1)
        return store.bytes() // (store.capacity + 1), store.trails.row_bytes(chunk)

    return ROW_BYTES.get(model.model, (str(model.kv_dtype), chunk), measured)


def length_of(job: Job) -> int:
    """Most tokens that a text may have, its prompt included."""
    return len(job.request.prompt) + job.request.max_new_tokens


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
