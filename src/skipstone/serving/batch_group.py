"""The rows that one method decodes, and the events of their steps."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from skipstone.decoding.draft import Draft, RowVerdict, Step
from skipstone.decoding.loop import DecodingLoop
from skipstone.decoding.method import Method
from skipstone.decoding.output_recorder import OutputRecorder
from skipstone.decoding.prefill import CPU_PROMPT_TOKENS_PER_PASS, Prefill
from skipstone.decoding.sampling import Scores
from skipstone.decoding.session import Session
from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_runner import ModelRunner
from skipstone.models.per_model_cache import PerModelCache
from skipstone.serving.logprobs import token_logprobs
from skipstone.serving.pending_request import FAILED, PendingRequest, RequestEnd, RequestEvent, StepOutput, TokenLogprobs
from skipstone.serving.prefix_cache import PrefixCache
from skipstone.serving.step_details import StepDetails, describe_layers, describe_step
from skipstone.utils.setup_times import REQUEST, collect_setup_seconds, collected_seconds, setup_work

ROW_BYTES: PerModelCache[tuple[int, int]] = PerModelCache()
"""The results of `row_bytes` for each model."""
PLAIN_TIME_STEPS = 16
"""Steps of a request between two reports of the time of a plain step."""

Send = Callable[[PendingRequest, RequestEvent], None]
Logprobs = Sequence[TokenLogprobs]


class BatchGroup:
    """The rows that one method decodes, and the request of every row.

    max_model_len: tokens per row. prefill_chunk_size: prompt tokens that a row runs in one step. send: is called with every
    event of a request, in the calling thread."""

    def __init__(
        self, model: ModelRunner, method: Method, max_num_seqs: int, max_model_len: int, prefill_chunk_size: int, send: Send
    ) -> None:
        method.check(model)
        self.method, self.send, self.prefill_chunk_size = method, send, prefill_chunk_size
        self.requests: list[PendingRequest | None] = [None] * max_num_seqs
        self._recorder = StepRecorder(self.requests)
        session = method.start(model, max_num_seqs, max_model_len)
        self.loop = DecodingLoop(
            session,
            chunk=prefill_chunk_size,
            max_prompt_tokens_per_pass=CPU_PROMPT_TOKENS_PER_PASS if model.device.type == "cpu" else None,
            recorder=self._recorder,
            decodes_during_prefill=True,
            setup=collected_seconds(),
        )
        self._prefix_cache = PrefixCache(max_num_seqs, is_enabled=not model.family.recurrent)
        self._sent_layers: list[dict[str, Any] | None] = [None] * max_num_seqs

    @property
    def free_rows(self) -> list[int]:
        return [row for row, pending in enumerate(self.requests) if pending is None]

    def memory_bytes(self, tokens: int = 0) -> int:
        """Bytes of keys, values and recurrent states when all its texts have their full length. tokens: length of one more
        text."""
        session = self.loop.session
        longest = max((pending.max_tokens for pending in self.requests if pending is not None), default=0)
        slots = max(longest, tokens)
        nbytes = 0
        for model, store in session.stores:
            capacity = store.capacity_for(slots + session.drafter.scratch_slots) if slots else store.capacity
            token_bytes, state_bytes = row_bytes(model, self.prefill_chunk_size)
            nbytes += store.rows * ((capacity + 1) * token_bytes * store.layers // model.depth + state_bytes)
        return nbytes

    @property
    def busy(self) -> bool:
        return self.loop.busy

    def admit(self, pending: PendingRequest) -> None:
        """Give a free row to a request. ValueError, before anything changed, if it cannot be decoded."""
        for row, other in enumerate(self.requests):
            if other is not None:
                self._prefix_cache.store(row, self._committed_tokens(row, other))
        row, source, cached_tokens = self._prefix_cache.choose_row(pending.prompt_ids, self.free_rows)
        with collect_setup_seconds(self.loop.setup), setup_work(REQUEST):
            pending.stats.cached_tokens = self.loop.admit(row, pending.request, cached_tokens, source)
        self.requests[row], self._sent_layers[row] = pending, None

    def drop(self, pending: PendingRequest) -> None:
        """Free the row of a request before its text has ended."""
        row = self.requests.index(pending)
        self._free_row(row, self._committed_tokens(row, pending))

    def _committed_tokens(self, row: int, pending: PendingRequest) -> list[int]:
        """The tokens of a row that have keys and values."""
        running = self.loop.rows[row]
        assert running is not None
        return [*pending.prompt_ids, *running.tokens][: self.loop.session.store.length[row]]

    def _free_row(self, row: int, tokens: list[int]) -> None:
        """Keep nothing of a row's request but the tokens that have keys and values. Its grammar, for example, is freed."""
        self.loop.release(row)
        self.requests[row] = None
        self._prefix_cache.store(row, tokens)

    def step(self) -> Step:
        """Run one step of all rows and send its events."""
        before = list(self.loop.rows)
        step = self.loop.step()
        extras, setup_seconds = self._recorder.results(self.loop.session), sum(step.setup.values())
        for row, pending in enumerate(self.requests):
            if pending is None:
                continue
            pending.stats.setup_seconds += setup_seconds
            if step.tokens[row]:
                self._send_output(pending, row, step, *extras.get(row, (None, None)))
            if row in step.errors:
                self._free_row(row, [])
                self.send(pending, RequestEnd(FAILED, step.errors[row]))
            elif row in step.finished:
                running = before[row]
                assert running is not None
                self._free_row(row, [*pending.prompt_ids, *running.tokens][:-1])
                self.send(pending, RequestEnd(pending.finish_reason(running.tokens, running.is_stopped)))
        return step

    def _send_output(
        self, pending: PendingRequest, row: int, step: Step, logprobs: Logprobs | None, details: StepDetails | None
    ) -> None:
        stats = pending.stats
        stats.add(step, row)
        stats.accepted_prediction_tokens = self.loop.session.drafter.accepted_predictions(row)
        if details is not None:
            self._complete_details(details, row, step, stats.steps)
        decodes = row in step.decoding_rows
        drafter, reason = (step.drafter, step.reason) if decodes else ("", "")
        seconds_draft = 0.0 if step.prefill and decodes else step.seconds_draft  # the drafter read the prompts of other rows
        milliseconds = 1000 * seconds_draft, 1000 * step.seconds_score
        own = stats.steps, step.tokens[row], step.origin[row], logprobs, step.drafted[row]
        self.send(pending, StepOutput(*own, drafter, reason, milliseconds, details))

    def _complete_details(self, details: StepDetails, row: int, step: Step, num_steps: int) -> None:
        """Add the layers if they have changed, and every few steps the time of a plain step."""
        session = self.loop.session
        if (layers := describe_layers(self.method, session)) != self._sent_layers[row]:
            self._sent_layers[row] = details.layers = layers
        if num_steps % PLAIN_TIME_STEPS == 0 or row in step.finished:
            seconds = self.method.report(session.model.model).get("plain_seconds")
            details.plain_milliseconds = None if seconds is None else 1000 * seconds


class StepRecorder:
    """Keeps what log-probabilities and details of a step are computed from. They are computed after the step, so that most of
    that time does not count as the step's. requests: of every row; the list is the batch group's own.

    It refers to the requests, not to the group. A reference cycle from the decoding loop to its group would keep keys and
    values alive until the garbage collector runs, and a server may never run it."""

    def __init__(self, requests: list[PendingRequest | None]) -> None:
        self._requests, self._keeper = requests, OutputRecorder(logits=True)
        self._recorded: tuple[Draft, list[RowVerdict], list[torch.Tensor]] | None = None

    def __call__(self, step: Step, draft: Draft, scores: Scores, verdicts: list[RowVerdict]) -> None:
        """Record a step if a row wants more than tokens."""
        if any(verdicts[row].tokens for row in self._requests_with_extras):
            self._keeper(step, draft, scores, verdicts)
            assert step.logits is not None
            self._recorded, step.logits = (draft, verdicts, step.logits), None

    @property
    def _requests_with_extras(self) -> dict[int, PendingRequest]:
        """Row -> request that wants log-probabilities or details."""
        requests = {row: pending for row, pending in enumerate(self._requests) if pending is not None}
        return {row: pending for row, pending in requests.items() if pending.wants_details or pending.num_logprobs is not None}

    @torch.inference_mode()
    def results(self, session: Session) -> dict[int, tuple[Logprobs | None, StepDetails | None]]:
        """Row -> log-probabilities and details of the latest step, for the rows that want them."""
        results: dict[int, tuple[Logprobs | None, StepDetails | None]] = {}
        if self._recorded is None:
            return results
        (draft, verdicts, row_logits), self._recorded = self._recorded, None
        for row, pending in self._requests_with_extras.items():
            logits, verdict, logprobs, details = row_logits[row], verdicts[row], None, None
            if verdict.tokens and pending.num_logprobs is not None:
                logprobs = token_logprobs(logits, verdict.tokens, pending.num_logprobs)
            if verdict.tokens and pending.wants_details:
                sampling = pending.request.sampling
                greedy = sampling.temperature == 0 and not sampling.warpers
                shape = {"depth": session.model.depth, "runs": session.store.layers}
                details = describe_step(draft, row, verdict, logits, greedy=greedy, **shape)
            results[row] = logprobs, details
        return results


def row_bytes(model: ModelRunner, prefill_chunk_size: int) -> tuple[int, int]:
    """(bytes of one token's keys and values in all layers, maximum bytes of a row's recurrent states)."""

    def measured() -> tuple[int, int]:
        store = KVCache(1, model.depth, 1, model.kv_dtype)
        prompts = Prefill(model, store)
        prompts.add(0, torch.zeros(1, dtype=torch.int64, device=model.device))
        with torch.inference_mode():
            prompts.run(1)
        return store.bytes() // (store.capacity + 1), store.state_histories.row_bytes(prefill_chunk_size)

    return ROW_BYTES.get(model.model, (str(model.kv_dtype), prefill_chunk_size), measured)
