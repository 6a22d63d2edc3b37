"""Which rows run in the next step: those of every batch group with texts, one group after the other.

Before the steps, requests that took too long end, one chunk of one prompt is scored, and waiting requests get free rows.
"""

import logging
import time
from collections.abc import Iterator

from skipstone.decoding.draft import Step
from skipstone.serving.admission import Admission
from skipstone.serving.batch_group import BatchGroup, row_bytes
from skipstone.serving.logprobs import PromptScorer
from skipstone.serving.pending_request import FAILED, LENGTH, TIMEOUT, PendingRequest, RequestEnd

logger = logging.getLogger(__name__)


class Scheduler(Admission):
    """Runs the steps of the admitted requests, in the model's thread."""

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or any(group.busy for group in self.groups.values()))

    def run_steps(self) -> Iterator[tuple[str, Step]]:
        """Run one step of every batch group that has texts. Yields each with the name of its method."""
        self.expire_requests()
        self._score_prompt()
        self._end_scored_prompts()
        self._admit_waiting()
        for group in list(self.groups.values()):
            if group.busy and (step := self._run_step(group)) is not None:
                yield group.method.name, step

    def expire_requests(self) -> None:
        """End requests that took too long."""
        now = time.monotonic()
        for pending in self.requests:
            seconds = pending.timeout_seconds
            if seconds is not None and now - pending.arrival_time > seconds:
                self.end_request(pending, RequestEnd(TIMEOUT, f"the request took longer than {seconds:g} s", 504))

    def end_request(self, pending: PendingRequest, end: RequestEnd) -> None:
        """End a request that waits or has a row. A request that has ended stays as it is."""
        if pending in self.waiting:
            self._fail(pending, end)
            return
        for group in self.groups.values():
            if pending in group.requests:
                group.drop(pending)
                self._send(pending, end)

    def _run_step(self, group: BatchGroup) -> Step | None:
        """One step of a group; None if it failed and its requests have ended."""
        try:
            step = group.step()
        except Exception as error:
            logger.exception("a step failed: its texts are given up")
            del self.groups[group.method.spelled]
            for pending in group.requests:
                if pending is not None:
                    self._send(pending, RequestEnd(FAILED, "decoding failed: see the server's log"))
            self._count_device_error(error)
            return None
        self._num_device_errors = 0
        return step

    # ------------------------------------------------------------------------------------------------ scored prompts

    def _score_prompt(self) -> None:
        """Score one chunk of the first prompt that needs it. Log-probabilities take memory until their text has ended, so at
        most one waiting text has them."""
        waiting, self._scorer_needs_memory = self.waiting, False
        has_scored_text = any(one.generates and one.prompt_logprobs and not one.needs_prompt_logprobs for one in waiting)
        candidates = (one for one in waiting if one.needs_prompt_logprobs and not (has_scored_text and one.generates))
        pending = next(candidates, None)
        self._scorer = None if pending is None else self._scorer_for(pending)
        if pending is None or self._scorer is None:
            return
        try:
            self._scorer.score_chunk(self.model, self.limits.prefill_chunk_size)
        except Exception as error:
            logger.exception("a prompt could not be read")
            self._fail(pending, RequestEnd(FAILED, "the prompt could not be read: see the server's log"))
            self._count_device_error(error)
        if not pending.needs_prompt_logprobs:
            self._scorer = None

    def _scorer_for(self, pending: PendingRequest) -> PromptScorer | None:
        """The scorer of a request's prompt; None while there is no memory for it, and if the request has ended for lack of
        it."""
        assert pending.prompt_logprobs is not None
        if self._scorer is not None and self._scorer.logprobs is pending.prompt_logprobs:
            return self._scorer
        self._scorer, prompt = None, pending.request.prompt
        token_bytes, state_bytes = row_bytes(self.model, self.limits.prefill_chunk_size)
        nbytes = len(prompt) * token_bytes + state_bytes
        try:
            has_memory = self._has_memory(nbytes, f"the log-probabilities of a prompt of {len(prompt)} tokens need")
        except ValueError as error:
            self._fail(pending, RequestEnd(FAILED, str(error), 400))
            return None
        self._scorer_needs_memory = not has_memory
        return PromptScorer(prompt, pending.num_logprobs or 0, pending.prompt_logprobs, nbytes) if has_memory else None

    def _end_scored_prompts(self) -> None:
        """End requests that want only the log-probabilities of their prompt, once these are there."""
        for pending in [one for one in self.waiting if not (one.generates or one.needs_prompt_logprobs)]:
            self._fail(pending, RequestEnd(LENGTH))
