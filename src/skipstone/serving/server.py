"""The server: passes bodies from the HTTP routes to the model's thread, and its events back, on the event loop."""

import asyncio
import gc
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

from skipstone.engines.choose_engine import copies_of
from skipstone.engines.model_runner import ModelRunner
from skipstone.hf.generate_call import resolve_for
from skipstone.hf.generation_defaults import expect_usable_defaults
from skipstone.models.mapped_model import OverwrittenCheckpointError
from skipstone.serving.admission import RETRY_AFTER_SECONDS, AdmissionLimits, with_room_for
from skipstone.serving.api_schemas import ChatBody, GenerationBody
from skipstone.serving.completions_api import Choice, Completion, Update, Updates
from skipstone.serving.errors import RequestError
from skipstone.serving.grammar import Grammar, GrammarMemoryError
from skipstone.serving.metrics import Metrics
from skipstone.serving.model_thread import THREAD_FAILED, MethodSteps, ModelThread, RequestEvents
from skipstone.serving.output_text import OutputText
from skipstone.serving.pending_request import CANCELLED, FAILED, STOP, PendingRequest, RequestEnd, StepOutput
from skipstone.serving.request_parser import RequestParser
from skipstone.serving.responses_api import Response, ResponseBody
from skipstone.serving.settings import Load, ServerSettings
from skipstone.serving.tool_call_parser import MARKS, ToolCallParser
from skipstone.serving.unread_events import UnreadEvents, largest_beyond_limit

logger = logging.getLogger(__name__)
Found = TypeVar("Found")


STATE_MESSAGES = {
    "loading": "the model is being loaded",
    "failed": "the model could not be loaded: see the server's log",
    "stopping": "the server is shutting down",
}
"""State -> message of the 503."""
RESTART_RETRY_SECONDS = 5
"""The Retry-After header while a server loads or restarts."""
FLUSH_SECONDS = 3
"""Time that clients have to read the end of their answers after the last token."""
DRAIN_POLL_SECONDS = 0.02
"""Seconds between two checks whether all streams are sent."""
DEFAULT_MAX_MODEL_LEN = 4096
"""The default limit of a text. The memory of keys and values grows with it."""


class Server:
    """A model that answers bodies.

    load: returns model and tokenizer; is called in a thread. state: "loading", "ready", "failed" or "stopping". became_ready:
    is called on the event loop when requests are taken. failed: is called there if the model could not be loaded, its thread
    has ended, or its checkpoint was overwritten."""

    def __init__(self, load: Load, settings: ServerSettings) -> None:
        self.settings, self._load = settings, load
        self.became_ready: Callable[[], None] = lambda: None
        self.failed: Callable[[], None] = lambda: None
        self.state = "loading"
        self.failure: Exception | None = None  # why the model could not be loaded
        self._state_messages = dict(STATE_MESSAGES)
        self.metrics = Metrics(settings.name)
        self._text_thread = ThreadPoolExecutor(1, thread_name_prefix="skipstone-texts")
        self._schema_thread = ThreadPoolExecutor(1, thread_name_prefix="skipstone-schemas")
        self._num_compiling = 0  # schemas that are compiled or wait for it
        self._queues: dict[PendingRequest, UnreadEvents] = {}
        self._unread: WeakSet[UnreadEvents] = WeakSet()  # of all answers that somebody may still read
        self.open_streams = 0  # streams that clients have not read to the end
        self._draining: asyncio.Task[None] | None = None
        self._model_thread: ModelThread | None = None
        self._parser: RequestParser | None = None
        self._prepare: Callable[[], None] = lambda: None
        self.tokenizer: Any = None
        self.started = int(time.time())

    async def start(self) -> None:
        """As `load`. An error is only logged, and `health` reports it."""
        try:
            await self.load()
        except Exception as error:
            if self.state == "stopping":
                return
            self.state, self.failure = "failed", error
            logger.error("the model could not be loaded: %s", error, exc_info=not isinstance(error, ValueError | OSError))
            self.failed()

    async def load(self) -> None:
        """Load the model, and begin to take requests. ValueError if method, limits or generation config do not fit the model,
        and what the constructor's `load` raises."""
        self._loop = asyncio.get_running_loop()
        await self._loop.run_in_executor(self._text_thread, self._begin)
        gc.collect()
        gc.freeze()  # a full collection would walk over all that was loaded, in the middle of a text
        if self.state == "loading":
            self.state = "ready"
            self.became_ready()

    def _begin(self) -> None:
        model, self.tokenizer = self._load()
        runner, settings = ModelRunner(model), self.settings
        method = resolve_for(model, settings.method)
        method.check(runner)
        expect_usable_defaults(runner, self.tokenizer)
        max_model_len = min(runner.max_positions, settings.max_model_len or DEFAULT_MAX_MODEL_LEN)
        self._prepare = partial(method.prepare_in_background, runner)
        self._parser = RequestParser(runner, self.tokenizer, method, max_model_len, settings.timeout_seconds)
        limit = settings.kv_cache_memory_bytes
        limits = AdmissionLimits(settings.max_num_seqs, max_model_len, settings.max_waiting, kv_cache_bytes=limit)
        self._model_thread = ModelThread(runner, with_room_for(runner, method, limits), self._post)

    def prepare_in_background(self) -> None:
        """Begin work that makes requests faster. It is done while there are none."""
        self._prepare()

    async def drain(self) -> None:
        """Take no more requests, let texts end, and wait until streams are sent. Texts that need longer than `drain_seconds`
        end with an error."""
        if self._draining is None:
            self.state = "stopping"
            self._draining = asyncio.ensure_future(self._drain())
        await self._draining

    async def _drain(self) -> None:
        end = time.monotonic() + self.settings.drain_seconds
        if self._model_thread is not None:
            await self._loop.run_in_executor(None, self._model_thread.stop, self.settings.drain_seconds)
        end = max(end, time.monotonic() + FLUSH_SECONDS)
        while self.open_streams and time.monotonic() < end:
            await asyncio.sleep(DRAIN_POLL_SECONDS)

    async def stop(self) -> None:
        """Drain, then leave."""
        await self.drain()
        for threads in (self._text_thread, self._schema_thread):
            threads.shutdown(wait=False, cancel_futures=True)

    @property
    def health(self) -> tuple[str, str]:
        """(state, message). The state is "failed" once the model's thread has ended or its checkpoint was overwritten; the
        message is "" if texts are written."""
        if self.state != "stopping" and self._model_thread is not None and not self._model_thread.is_alive:
            return "failed", THREAD_FAILED
        return self.state, self._state_messages.get(self.state, "")

    @property
    def model_thread(self) -> ModelThread:
        """RequestError while there is none."""
        state, why = self.health
        if self._model_thread is None or state != "ready":
            raise RequestError(503, why, retry_after=None if state == "failed" else RESTART_RETRY_SECONDS)
        return self._model_thread

    @property
    def parser(self) -> RequestParser:
        """RequestError while there is none."""
        _ = self.model_thread
        assert self._parser is not None
        return self._parser

    def check_model(self, name: str | None) -> None:
        """RequestError if a body names another model."""
        if name is not None and name != self.settings.name:
            raise RequestError(404, f"there is no model {name[:100]!r} here, but {self.settings.name!r}")

    async def parse(self, function: Callable[..., Found], *args: Any, thread: ThreadPoolExecutor | None = None) -> Found:
        """Call a function with what a client sent, by default in the thread for texts. A ValueError is the client's mistake.
        After an OverwrittenCheckpointError the server answers nothing any more."""
        try:
            return await self._loop.run_in_executor(thread or self._text_thread, function, *args)
        except ValueError as error:
            raise RequestError(400, str(error)) from None
        except OverwrittenCheckpointError as error:
            self._state_messages["failed"] = str(error)
            self._end_service()
            raise RequestError(503, str(error)) from None

    def _end_service(self) -> None:
        """Only a new process helps."""
        if self.state == "ready":
            self.state = "failed"
            self.failed()

    async def _grammar(self, body: GenerationBody) -> Grammar | None:
        """The grammar of a body, compiled in a thread of its own, so that only requests with a schema wait for it."""
        if body.wanted_format is None and not body.demands_a_call:
            return None
        if self._num_compiling >= max(self.settings.max_waiting, 1):
            message = f"{self._num_compiling} schemas wait to be compiled already; ask again later"
            raise RequestError(429, message, retry_after=RETRY_AFTER_SECONDS)
        self._num_compiling += 1
        try:
            return await self.parse(self.parser.compile_grammar, body, thread=self._schema_thread)
        except GrammarMemoryError as error:
            raise RequestError(429, str(error), retry_after=RETRY_AFTER_SECONDS) from None
        except TimeoutError as error:
            raise RequestError(503, str(error), retry_after=RESTART_RETRY_SECONDS) from None
        finally:
            self._num_compiling -= 1

    # -------------------------------------------------------------------------------------------------- from the model

    def _post(self, events: RequestEvents, steps: MethodSteps) -> None:
        try:
            self._loop.call_soon_threadsafe(self._deliver, events, steps)
        except RuntimeError:  # the loop is closed
            logger.debug("an event came after the end")

    def _deliver(self, events: RequestEvents, steps: MethodSteps) -> None:
        for method, step in steps:
            self.metrics.step(method, step)
        if (model_thread := self._model_thread) is not None:
            self.metrics.running.set(model_thread.scheduler.num_running)
            self.metrics.waiting.set(model_thread.scheduler.num_waiting)
        for pending, event in events:
            unread = self._queues.pop(pending, None) if isinstance(event, RequestEnd) else self._queues.get(pending)
            if unread is not None:
                unread.put(pending, event)
        while (slow := largest_beyond_limit(self._unread)) is not None:
            self._drop(slow)
        if model_thread is not None and not model_thread.is_alive:
            self._end_service()

    def metrics_text(self) -> bytes:
        """All counters in Prometheus' format."""
        if self._model_thread is not None:
            self.metrics.copies.set(sum(copies_of(self._model_thread.scheduler.model.model).values()))
        return self.metrics.text()

    def _drop(self, unread: UnreadEvents) -> None:
        """Cancel an answer that its client does not read."""
        unread.drop()
        for pending in unread.requests:
            self._cancel(pending)

    def _cancel(self, pending: PendingRequest) -> None:
        """Deliver no further events of a text, and end it if it is still written."""
        self._queues.pop(pending, None)
        if self._model_thread is not None:
            self._model_thread.cancel(pending)

    # ------------------------------------------------------------------------------------------------------ to clients

    async def answer(self, body: GenerationBody | ResponseBody, seed: int | None = None) -> tuple[Completion, Updates]:
        """An answer that has begun, and its updates. seed: used if the body has none; None for a random one. RequestError
        before anything is written."""
        model_thread = self.model_thread
        self.check_model(body.model)
        generation_body = body
        if isinstance(body, ResponseBody):
            generation_body = await self.parse(body.generation_body, self.parser.has_chat_template)
        assert isinstance(generation_body, GenerationBody)
        if generation_body.seed is None and seed is not None:
            generation_body = generation_body.model_copy(update={"seed": seed})
        requests = await self.parse(self.parser.parse, generation_body, await self._grammar(generation_body))
        choices = [self._choice(index, pending, generation_body) for index, pending in enumerate(requests)]
        kind: type[Completion] = Response if isinstance(body, ResponseBody) else Completion
        completion = kind(self.settings.name, choices, body, self.tokenizer)
        model_thread.submit(requests)
        unread = UnreadEvents(requests)
        self._queues.update(dict.fromkeys(requests, unread))
        self._unread.add(unread)
        return completion, self._updates(completion, unread, bool(generation_body.stream_speculative))

    def _choice(self, index: int, pending: PendingRequest, body: GenerationBody) -> Choice:
        prompt, eos = pending.prompt_ids, pending.request.eos
        if not (isinstance(body, ChatBody) and body.offered):
            output_text = OutputText(self.tokenizer, body.stops, eos, prompt=prompt, echo=pending.echo)
            return Choice(index, pending, output_text, is_streamed=body.stream)
        names, max_calls = [one.function.name for one in body.offered], 1 if body.parallel_tool_calls is False else None
        special = zip(self.tokenizer.all_special_ids, self.tokenizer.all_special_tokens, strict=True)
        hidden = {token for token, text in special if text not in MARKS}
        output_text = OutputText(self.tokenizer, body.stops, eos | hidden, prompt=prompt, special=True)
        return Choice(index, pending, output_text, ToolCallParser(names, max_calls=max_calls), is_streamed=body.stream)

    def abandon(self, completion: Completion) -> None:
        """Cancel what is not written of an answer that nobody reads."""
        for choice in completion.choices:
            if choice.finish_reason is None:
                choice.finish_reason = CANCELLED
                self._forget(choice)

    def _forget(self, choice: Choice) -> None:
        """Count a text that nobody reads further."""
        self.metrics.ended(choice)
        self._cancel(choice.pending)

    async def _updates(self, completion: Completion, unread: UnreadEvents, whole_steps: bool) -> Updates:
        """Updates until all choices have ended. RequestError if one of them fails. whole_steps: whether every step is an update
        of its own."""
        running = {choice.pending: choice for choice in completion.choices}
        try:
            while running:
                pending, event = await unread.take(whole_steps=whole_steps)
                if (choice := running.get(pending)) is None:
                    continue
                choice.seconds = time.monotonic() - pending.arrival_time
                update = self._add_output(choice, event) if isinstance(event, StepOutput) else self._finish(choice, event)
                if choice.finish_reason is not None:
                    del running[pending]
                    self._forget(choice)
                yield update
        finally:
            self.abandon(completion)

    def _add_output(self, choice: Choice, output: StepOutput) -> Update:
        if choice.first_token_seconds is None:
            choice.first_token_seconds = choice.seconds
        start = choice.output_text.count
        text = choice.add_text(choice.output_text.add(output.tokens))
        taken = choice.output_text.count - start
        if not choice.is_streamed:
            choice.tokens += output.tokens[:taken]
            choice.logprobs += (output.logprobs or [])[:taken]
        if choice.output_text.stopped:
            text += choice.end(STOP)
        return choice, text, output, start

    def _finish(self, choice: Choice, ended: RequestEnd) -> Update:
        if ended.message:
            choice.finish_reason = ended.reason
            self.metrics.ended(choice)
            raise RequestError(ended.status if ended.reason != FAILED or ended.status < 500 else 500, ended.message)
        start = choice.output_text.count
        text = choice.add_text(choice.output_text.rest())
        text += choice.end(STOP if choice.output_text.stopped else ended.reason)
        return choice, text, None, start


async def read_all(updates: Updates) -> None:
    """Wait until an answer is written."""
    async with aclosing(updates):
        async for _ in updates:
            pass
