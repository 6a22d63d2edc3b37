"""The only decoding loop of the project. `stopping.py` decides where a text ends.

prompt -> prefill -> [ draft -> score -> verify -> commit ]* -> tokens
"""

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import pairwise

import torch

from skipstone.decoding.draft import Draft, GreedyVerdict, RowVerdict, Step, UnverifiedDraft, Verdict
from skipstone.decoding.prefill import PREFILL_CHUNK
from skipstone.decoding.request import Request
from skipstone.decoding.sampling import Scores
from skipstone.decoding.session import Session
from skipstone.decoding.stats import Stats
from skipstone.decoding.stopping import RunningRequest
from skipstone.engines.greedy_tokens import NO_TOKEN, greedy_token
from skipstone.engines.host_transfer import CPU
from skipstone.engines.model_lock import SingleTorchThread
from skipstone.utils.setup_times import SetupSeconds, collect_setup_seconds

BROKEN = (
    "the model's logits are not finite (NaN or all minus infinity): its weights are damaged, or its dtype overflows; load it "
    "again, or in float32"
)
FORBIDDEN = (
    "no token is left to choose from: the logits processors forbid all tokens, or their scores are not finite; they must "
    "allow a token"
)
NOTHING = RowVerdict([], [], "", 0, 0)  # the verdict of a row that took no part in a step

Recorder = Callable[[Step, Draft, Scores, list[RowVerdict]], None]
"""Called before the commit of every step. It may add records to the Step."""


class StageTimer:
    """Measures the stages of one step without synchronising with the device, and leaves set-up work out.

    On CUDA it uses events. They have passed when the step's one transfer to the host returns. setup: grows with set-up work.
    """

    def __init__(self, device: torch.device, setup: SetupSeconds) -> None:
        self.stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self.events: list[torch.cuda.Event] = []
        self.setup, self.times, self.setup_sums = setup, list[float](), list[float]()
        self.mark()

    def mark(self) -> None:
        """End a stage and begin the next."""
        self.times.append(time.perf_counter())
        self.setup_sums.append(sum(self.setup.values()))
        if self.stream is not None:
            self.events.append(torch.cuda.Event(enable_timing=True))
            self.events[-1].record(self.stream)

    def stop(self) -> list[float]:
        """Seconds of every stage, and last of the rest of the step so far."""
        total = time.perf_counter() - self.times[0] - (sum(self.setup.values()) - self.setup_sums[0])
        if self.stream is None:
            stages = [b - a for a, b in pairwise(self.times)]
        else:
            stages = [a.elapsed_time(b) / 1000 for a, b in pairwise(self.events)]
        setups = [b - a for a, b in pairwise(self.setup_sums)]
        stages = [max(0.0, stage - setup) for stage, setup in zip(stages, setups, strict=True)]
        return [*stages, max(0.0, total - sum(stages))]


class DecodingLoop:
    """Decodes the rows of a session step by step. `admit` and `release` may be called between two steps.

    chunk: maximum number of prompt tokens that a row runs in one step. max_prompt_tokens_per_pass: as in `Prefill.run`.
    decodes_during_prefill: while prompts run, other rows decode without drafts in the same passes, or in every second step if
    the engine pays for padding or texts depend on drafts. If False, they wait. setup: seconds of set-up work before the first
    step, which reports them.
    """

    def __init__(
        self,
        session: Session,
        *,
        chunk: int = PREFILL_CHUNK,
        recorder: Recorder | None = None,
        max_prompt_tokens_per_pass: int | None = None,
        decodes_during_prefill: bool = False,
        setup: SetupSeconds | None = None,
    ) -> None:
        self.session, self.chunk, self.recorder = session, chunk, recorder
        self.max_prompt_tokens_per_pass, self.decodes_during_prefill = max_prompt_tokens_per_pass, decodes_during_prefill
        self._has_prefilled = False  # whether the latest step ran prompts
        self._recorder_seconds = 0.0  # time of the recorder in the latest step
        self.setup: SetupSeconds = {} if setup is None else setup  # not reported yet
        self.rows: list[RunningRequest | None] = [None] * session.rows
        self.stats = Stats()  # of all steps so far
        session.model.lock.loops.add(self)

    def admit(self, row: int, request: Request, num_cached_tokens: int = 0, source_row: int | None = None) -> int:
        """Start a request in a free row. Arguments and result as in `Session.admit`."""
        with self.session.model.lock:
            num_reused = self.session.admit(row, request, num_cached_tokens, source_row)
        self.rows[row] = RunningRequest(request)
        return num_reused

    def release(self, row: int) -> RunningRequest | None:
        """Free a row, finished or not. Returns its request with the tokens so far."""
        with self.session.model.lock:
            state, self.rows[row] = self.rows[row], None
            self.session.release(row)
            return state

    @property
    def busy(self) -> bool:
        """Whether any row has work left."""
        return self.session.prefilling or any(self.session.alive)

    @property
    def _mixes_steps(self) -> bool:
        """Whether rows decode in the passes that run prompts."""
        session = self.session
        return self.decodes_during_prefill and session.model.engine.skips_padding and not session.drafter.text_depends_on_drafts

    @torch.inference_mode()
    def step(self) -> Step:
        """One step over all rows. It releases finished rows and lists them in `Step.finished`.

        Decoders of one model in several threads alternate step by step."""
        session, began, setup_before = self.session, time.perf_counter(), sum(self.setup.values())
        decodes_next = self.decodes_during_prefill and self._has_prefilled and any(session.alive)
        takes_turn = decodes_next and not self._mixes_steps
        self._has_prefilled = session.prefilling and not takes_turn
        has_own_threads = session.model.engine.own_threads and session.drafter.own_threads
        one_thread = SingleTorchThread() if has_own_threads else nullcontext()
        with session.model.lock, one_thread, collect_setup_seconds(self.setup):
            step = self._prefill() if self._has_prefilled else self._decode()
        step.setup, self.setup = self.setup, {}
        setup_seconds = sum(step.setup.values()) - setup_before
        step.seconds_outside = max(0.0, time.perf_counter() - began - step.seconds - setup_seconds)
        self.stats.add(step)
        return step

    def _prefill(self) -> Step:
        """Run one chunk of the waiting prompts, and choose the next token of complete ones and of rows that decode."""
        session, clock = self.session, StageTimer(CPU, self.setup)  # an accelerator does not wait for an incomplete prompt
        limits = self.chunk, self.max_prompt_tokens_per_pass
        session.drafter.prefill_tokens(*limits)
        clock.mark()
        decoding = [row for row, alive in enumerate(session.alive) if alive] if self._mixes_steps else []
        scores, ready = session.prefill(*limits, decoding)
        draft = Draft.empty(session.rows, session.model.device)
        if scores is None:
            verdicts = [NOTHING] * session.rows
            step = self._step(verdicts, draft)
        else:
            verdicts = self._settle(draft, session.verify(draft, scores), ready)
            for row in set(ready) - set(decoding):
                verdicts[row].final = "prefill"
            step = self._step(verdicts, draft, scores)
            session.commit(None, verdicts)
        step.prefill = True
        step.seconds_draft, step.seconds_score = clock.stop()
        session.drafter.observe_step(step)
        return self._retire(step, verdicts)

    def _decode(self) -> Step:
        session = self.session
        clock = StageTimer(session.model.device, self.setup)
        session.drafter.run_background_work()
        clock.mark()
        limits = [row.room if row and alive else 0 for row, alive in zip(self.rows, session.alive, strict=True)]
        draft = session.drafter.propose_draft(limits)
        clock.mark()
        scores = session.score(draft)
        clock.mark()
        live = [row for row, alive in enumerate(session.alive) if alive]
        verdicts = self._settle(draft, session.verify(draft, scores), live)
        step = self._step(verdicts, draft, scores)
        session.commit(draft, verdicts)
        step.seconds_search, step.seconds_draft, step.seconds_score, other = clock.stop()
        step.seconds_other = max(0.0, other - self._recorder_seconds)  # recording is no cost of decoding
        session.drafter.observe_step(step)
        return self._retire(step, verdicts)

    def _settle(self, draft: Draft, verdict: Verdict | GreedyVerdict | UnverifiedDraft, live: list[int]) -> list[RowVerdict]:
        """The verdicts on the host, cut by the stopping rules. live: active rows."""
        verdicts, active = verdict.tolist(draft), set(live)
        for row, running in enumerate(self.rows):
            if running is None or row not in active:
                verdicts[row] = NOTHING
            else:
                running.take(verdicts[row])
        return verdicts

    def _step(self, verdicts: list[RowVerdict], draft: Draft, scores: Scores | None = None) -> Step:
        per_row = [(v.tokens, v.origin, v.drafted, v.draft_steps, len(v.path), v.overruled) for v in verdicts]
        tokens, origin, drafted, draft_steps, accepted, overruled = map(list, zip(*per_row, strict=True))
        step = Step(tokens, origin, drafted, draft_steps, accepted, overruled, verified_nodes=sum([v.nodes for v in verdicts]))
        for row, verdict in enumerate(verdicts):
            if verdict.finished:
                step.finished.append(row)
                if verdict.is_broken:
                    step.errors[row] = self._failure(row, verdict, scores)
        if self.recorder is not None and scores is not None:
            began = time.perf_counter()
            self.recorder(step, draft, scores, verdicts)
            self._recorder_seconds = time.perf_counter() - began
        return step

    def _failure(self, row: int, verdict: RowVerdict, scores: Scores | None) -> str:
        """The message for a row without a token to choose."""
        running = self.rows[row]
        assert scores is not None, "only scores make a row fail"
        assert running is not None
        node = verdict.path[-1] if verdict.path else -1
        raw = scores.at(torch.full_like(self.session.view.root, node))[row]
        place = f"after {len(running.request.prompt)} tokens of prompt and {len(running.tokens)} new ones"
        return f"{BROKEN if int(greedy_token(raw)) == NO_TOKEN else FORBIDDEN} ({place})"

    def _retire(self, step: Step, verdicts: list[RowVerdict]) -> Step:
        for row in step.finished:
            self.session.release(row)
        for row, verdict in enumerate(verdicts):
            if verdict.is_broken:
                for _, store in self.session.stores:
                    store.length[row] = 0 if row in step.finished else store.length[row]
                    store.clear(row)
        return step


Decoder = DecodingLoop
"""The public name."""


def run(decoder: DecodingLoop) -> Iterator[Step]:
    """The steps of a decoder until no row has work left. Closing the generator early is safe."""
    while decoder.busy:
        yield decoder.step()
