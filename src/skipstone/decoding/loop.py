"""The only decoding loop of the project. Where a text ends is decided in stopping.py.

prompt -> prefill -> [ draft -> score -> verify -> commit ]* -> tokens
"""

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import pairwise

import torch

from skipstone.decoding.draft import Draft, GreedyVerdict, RowVerdict, Step, Verdict
from skipstone.decoding.prefill import CPU_TOKENS_PER_PASS, PREFILL_CHUNK
from skipstone.decoding.request import Request
from skipstone.decoding.sampling import Scores
from skipstone.decoding.session import Session
from skipstone.decoding.stats import Stats
from skipstone.decoding.stopping import RunningRequest
from skipstone.engines.greedy_tokens import NO_TOKEN, greedy_token
from skipstone.engines.torch_threads import SingleTorchThread

BROKEN = (
    "the model's logits are not finite, NaN or all minus infinity: its weights may not be, or it overflows its dtype; load it "
    "anew, or in float32"
)
FORBIDDEN = (
    "no token is left to choose from: the logits processors forbid every one, or the scores are not finite after them; let "
    "them allow a token"
)
NOTHING = RowVerdict([], [], "", 0, 0)  # the verdict of a row that took no part in a step

Recorder = Callable[[Step, Draft, Scores, list[RowVerdict]], None]
"""Called before the commit of every step; adds to the Step what its caller wants kept."""


class StageTimer:
    """Splits one step into its stages and the rest, without a synchronisation of its own.

    On CUDA the stages are timed by events, which have passed once the step's one transfer to the host has returned.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self.events: list[torch.cuda.Event] = []
        self.times: list[float] = []
        self.mark()

    def mark(self) -> None:
        """End a stage (the first mark, made at construction, begins one)."""
        self.times.append(time.perf_counter())
        if self.stream is not None:
            self.events.append(torch.cuda.Event(enable_timing=True))
            self.events[-1].record(self.stream)

    def stop(self) -> list[float]:
        """Seconds of every stage, then of the rest of the step up to now."""
        total = time.perf_counter() - self.times[0]
        if self.stream is None:
            stages = [b - a for a, b in pairwise(self.times)]
        else:
            stages = [a.elapsed_time(b) / 1000 for a, b in pairwise(self.events)]
        return [*stages, max(0.0, total - sum(stages))]


class DecodingLoop:
    """Rows of a session under the loop. `admit` and `release` may be called between two steps.

    chunk: prompt tokens a row runs in one step. recorder: called with every step's verdict. takes_turns: while some rows run
    their prompts, the others decode in every second step, and on a CPU prompts are run one by one; else they wait.
    """

    def __init__(
        self, session: Session, *, chunk: int = PREFILL_CHUNK, recorder: Recorder | None = None, takes_turns: bool = False
    ) -> None:
        self.session, self.chunk, self.recorder, self.takes_turns = session, chunk, recorder, takes_turns
        if takes_turns and session.model.device.type == "cpu":
            session.prompts.max_tokens_per_pass = CPU_TOKENS_PER_PASS
        self._prefilled = False  # in the latest step
        self._recording = 0.0  # seconds that the recorder took in it
        self.rows: list[RunningRequest | None] = [None] * session.rows
        self.stats = Stats()  # of all steps so far

    def admit(self, row: int, request: Request, known: int = 0) -> None:
        """Start a request on a free row. known: as in `Session.admit`."""
        with self.session.model.lock:
            self.session.admit(row, request, known)
        self.rows[row] = RunningRequest(request)

    def release(self, row: int) -> RunningRequest | None:
        """Take a row out, finished or not. Returns what it has generated."""
        with self.session.model.lock:
            state, self.rows[row] = self.rows[row], None
            self.session.release(row)
            return state

    @property
    def busy(self) -> bool:
        """Whether any row has work left."""
        return self.session.prefilling or any(self.session.alive)

    @torch.inference_mode()
    def step(self) -> Step:
        """One turn of the loop over all rows; finished rows are released and named in `Step.finished`.

        Several decoders of one model, in several threads, take turns step by step."""
        session = self.session
        others_turn = self.takes_turns and self._prefilled and any(session.alive)
        self._prefilled = session.prefilling and not others_turn
        has_own_threads = session.model.engine.own_threads and session.drafter.own_threads
        with session.model.lock, SingleTorchThread() if has_own_threads else nullcontext():
            return self._prefill() if self._prefilled else self._decode()

    def _prefill(self) -> Step:
        """One chunk of the waiting prompts, and the first token of those that it completes."""
        session, started = self.session, time.perf_counter()
        scores, ready = session.prefill(self.chunk)
        draft = Draft.empty(session.rows, session.model.device)
        if scores is None:
            verdicts = [NOTHING] * session.rows
            step = self._step(verdicts, draft)
        else:
            verdicts = self._settle(draft, session.verify(draft, scores), ready)
            for row in ready:
                verdicts[row].final = "prefill"
            step = self._step(verdicts, draft, scores)
            session.commit(None, verdicts)
        step.prefill = True
        step.seconds_score = time.perf_counter() - started  # a chunk that completes no prompt is not waited for
        session.drafter.observe_step(step)
        return self._retire(step, verdicts)

    def _decode(self) -> Step:
        session = self.session
        clock = StageTimer(session.model.device)
        session.drafter.run_background_work()
        clock.mark()
        room = [row.room if row and alive else 0 for row, alive in zip(self.rows, session.alive, strict=True)]
        draft = session.drafter.propose_draft(room)
        clock.mark()
        scores = session.score(draft)
        clock.mark()
        live = [row for row, alive in enumerate(session.alive) if alive]
        verdicts = self._settle(draft, session.verify(draft, scores), live)
        step = self._step(verdicts, draft, scores)
        session.commit(draft, verdicts)
        step.seconds_search, step.seconds_draft, step.seconds_score, other = clock.stop()
        step.seconds_other = max(0.0, other - self._recording)  # what is kept of a step is no cost of decoding
        session.drafter.observe_step(step)
        return self._retire(step, verdicts)

    def _settle(self, draft: Draft, verdict: Verdict | GreedyVerdict, live: list[int]) -> list[RowVerdict]:
        """The verdict on the host, cut by the stopping rules; nothing for rows that took no part."""
        verdicts, taking_part = verdict.tolist(draft), set(live)
        for row, mine in enumerate(verdicts):
            state = self.rows[row]
            if state is None or row not in taking_part:
                verdicts[row] = NOTHING
            else:
                state.take(mine)
        return verdicts

    def _step(self, verdicts: list[RowVerdict], draft: Draft, scores: Scores | None = None) -> Step:
        per_row = [(v.tokens, v.origin, v.drafted, v.draft_steps, len(v.path), v.overruled) for v in verdicts]
        tokens, origin, drafted, draft_steps, accepted, overruled = map(list, zip(*per_row, strict=True))
        step = Step(tokens, origin, drafted, draft_steps, accepted, overruled, verified_nodes=sum([v.nodes for v in verdicts]))
        for row, verdict in enumerate(verdicts):
            if verdict.finished:
                step.finished.append(row)
                if verdict.is_broken:
                    step.errors[row] = self._why(row, verdict, scores)
        if self.recorder is not None and scores is not None:
            began = time.perf_counter()
            self.recorder(step, draft, scores, verdicts)
            self._recording = time.perf_counter() - began
        return step

    def _why(self, row: int, verdict: RowVerdict, scores: Scores | None) -> str:
        """Why there was no token to choose for a row."""
        assert scores is not None, "a row fails by its scores"
        node = verdict.path[-1] if verdict.path else -1
        raw = scores.at(torch.full_like(self.session.view.root, node))[row]
        state = self.rows[row]
        assert state is not None
        place = f"after {len(state.request.prompt)} tokens of prompt and {len(state.tokens)} new ones"
        return f"{BROKEN if int(greedy_token(raw)) == NO_TOKEN else FORBIDDEN} ({place})"

    def _retire(self, step: Step, verdicts: list[RowVerdict]) -> Step:
        self.stats.add(step)
        for row in step.finished:
            self.session.release(row)
        for row, verdict in enumerate(verdicts):
            if verdict.is_broken:
                self.session.store.clear(row)
        return step


Decoder = DecodingLoop
"""The public name."""


def run(decoder: DecodingLoop) -> Iterator[Step]:
    """Turn the loop until no row is alive. Closing the generator early leaves model and session as they are."""
    while decoder.busy:
        yield decoder.step()
