"""The server: passes bodies from the HTTP routes to the model's thread, and its events back, on the event loop."""

import asyncio
import gc
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakSet

from skipstone.decoding.method import Method
from skipstone.engines.model_runner import ModelRunner
from skipstone.hf.generate_call import resolve_for
from skipstone.hf.generation_defaults import expect_usable_defaults
from skipstone.serving.admission import RETRY_AFTER_SECONDS, default_kv_cache_bytes
from skipstone.serving.answers import Answer, Choice
from skipstone.serving.batch_group import BatchGroup
from skipstone.serving.grammar import Grammar, NoGrammarMemory
from skipstone.serving.metrics import Metrics
from skipstone.serving.model_thread import PREFILL_CHUNK_SIZE, THREAD_FAILED, MethodSteps, ModelThread, RequestEvents
from skipstone.serving.output_text import OutputText
from skipstone.serving.pending_request import CANCELLED, FAILED, STOP, PendingRequest, RequestEnd, RequestError, StepOutput
from skipstone.serving.request_parser import RequestParser
from skipstone.serving.request_record import attach_answer
from skipstone.serving.schemas import ChatBody
from skipstone.serving.settings import ServerSettings
from skipstone.serving.tools import MARKS, ToolCallParser
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

Update = tuple[Choice, str, StepOutput | None, int]
"""(choice, its new text, the output that brought it, number of tokens before that)."""
Updates = AsyncGenerator[Update, None]


class Server:
    """A model that answers bodies.

    load: returns model and tokenizer; is called in a thread. state: "loading", "ready", "failed" or "stopping". became_ready:
    is called on the event loop when requests are taken. failed: is called there if the model could not be loaded or its thread
    has ended."""

    def __init__(self, load: Callable[[], tuple[Any, Any]], settings: ServerSettings) -> None:
        self.settings, self._load = settings, load
        self.became_ready: Callable[[], None] = lambda: None
        self.failed: Callable[[], None] = lambda: None
        self.state = "loading"
        self.failure: Exception | None = None  # why the model could not be loaded
        self.metrics = Metrics(settings.name)
        self._text_thread = ThreadPoolExecutor(1, thread_name_prefix="skipstone-texts")
        self._schema_thread = ThreadPoolExecutor(1, thread_name_prefix="skipstone-schemas")
        self._compiling = 0  # schemas that it has or will have
        self._queues: dict[PendingRequest, UnreadEvents] = {}
        self._unread: WeakSet[UnreadEvents] = WeakSet()  # of all answers that somebody may still read
        self.open_streams = 0  # streams that clients have not read to the end
        self._draining: asyncio.Task[None] | None = None
        self._model_thread: ModelThread | None = None
        self._parser: RequestParser | None = None
        self.tokenizer: Any = None
        self.started = int(time.time())

    async def start(self) -> None:
        """Load the model, and begin to take requests."""
        self._loop = asyncio.get_running_loop()
        try:
            await self._loop.run_in_executor(self._text_thread, self._begin)
        except Exception as error:  # /health and the log report it
            if self.state == "stopping":
                return
            self.state, self.failure = "failed", error
            logger.error("the model could not be loaded: %s", error, exc_info=not isinstance(error, ValueError | OSError))
            self.failed()
            return
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
        self._parser = RequestParser(runner, self.tokenizer, method, max_model_len, settings.timeout_seconds)
        limit = kv_cache_bytes(runner, method, settings.max_num_seqs, max_model_len, settings.kv_cache_memory_bytes)
        self._model_thread = ModelThread(
            runner, settings.max_num_seqs, max_model_len, settings.max_waiting, self._post, kv_cache_bytes=limit
        )

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
        """(state, message). The state is "failed" once the model's thread has ended; the message is "" if texts are written."""
        if self.state != "stopping" and self._model_thread is not None and not self._model_thread.is_alive:
            return "failed", THREAD_FAILED
        return self.state, STATE_MESSAGES.get(self.state, "")

    @property
    def model_thread(self) -> ModelThread:
        """RequestError while there is none."""
        state, why = self.health
        if self._model_thread is None or state != "ready":
            raise RequestError(503, why, None if state == "failed" else RESTART_RETRY_SECONDS)
        return self._model_thread

    @property
    def parser(self) -> RequestParser:
        """RequestError while there is none."""
        _ = self.model_thread
        assert self._parser is not None
        return self._parser

    async def run_on_text_thread(self, call: Callable[..., Found], *given: Any) -> Found:
        """Call a function that works on texts, in the thread for texts."""
        return await self._loop.run_in_executor(self._text_thread, call, *given)

    async def parse(self, call: Callable[..., Found], *given: Any) -> Found:
        """The same for what a client sent. A ValueError is the client's mistake."""
        try:
            return await self.run_on_text_thread(call, *given)
        except ValueError as error:
            raise RequestError(400, str(error)) from None

    async def _grammar(self, body: Any) -> Grammar | None:
        """The grammar of a body, compiled in a thread of its own, so that only requests with a schema wait for it."""
        if not self.parser.has_grammar(body):
            return None
        if self._compiling >= max(self.settings.max_waiting, 1):
            message = f"{self._compiling} schemas wait to be compiled already; ask again later"
            raise RequestError(429, message, RETRY_AFTER_SECONDS)
        self._compiling += 1
        try:
            return await self._loop.run_in_executor(self._schema_thread, self.parser.compile_grammar, body)
        except ValueError as error:
            raise RequestError(400, str(error)) from None
        except NoGrammarMemory as error:
            raise RequestError(429, str(error), RETRY_AFTER_SECONDS) from None
        except TimeoutError as error:
            raise RequestError(503, str(error), RESTART_RETRY_SECONDS) from None
        finally:
            self._compiling -= 1

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
            self.metrics.running.set(model_thread.admission.num_running)
            self.metrics.waiting.set(model_thread.admission.num_waiting)
        for pending, event in events:
            unread = self._queues.pop(pending, None) if isinstance(event, RequestEnd) else self._queues.get(pending)
            if unread is not None:
                unread.put(pending, event)
        while (slow := largest_beyond_limit(self._unread)) is not None:
            self._drop(slow)
        if model_thread is not None and not model_thread.is_alive and self.state == "ready":
            self.state = "failed"
            self.failed()

    def _drop(self, unread: UnreadEvents) -> None:
        """Cancel an answer that its client does not read."""
        unread.drop()
        for pending in unread.requests:
            if self._queues.pop(pending, None) is not None and self._model_thread is not None:
                self._model_thread.cancel(pending)

    # ------------------------------------------------------------------------------------------------------ to clients

    async def answer(self, parse: Callable[..., list[PendingRequest]], body: Any, *, chat: bool) -> tuple[Answer, Updates]:
        """An answer that has begun, and its updates. parse: makes requests of a body and its grammar. RequestError before
        anything is written."""
        model_thread = self.model_thread
        requests = await self.parse(parse, body, await self._grammar(body))
        unread = UnreadEvents(requests)
        choices = [self._choice(index, pending, body) for index, pending in enumerate(requests)]
        for choice in choices:
            choice.is_streamed = body.stream
        answer = Answer(self.settings.name, choices, chat=chat, tokenizer=self.tokenizer)
        model_thread.submit(requests)
        self._queues.update(dict.fromkeys(requests, unread))
        self._unread.add(unread)
        attach_answer(answer, body)
        return answer, self._updates(model_thread, answer, unread, whole_steps=body.stream_speculative)

    def _choice(self, index: int, pending: PendingRequest, body: Any) -> Choice:
        prompt, eos = pending.prompt_ids, pending.request.eos
        if not (isinstance(body, ChatBody) and body.offered):
            return Choice(index, pending, OutputText(self.tokenizer, body.stops, eos, prompt=prompt, echo=pending.echo))
        names, max_calls = [one.function.name for one in body.offered], 1 if body.parallel_tool_calls is False else None
        special = zip(self.tokenizer.all_special_ids, self.tokenizer.all_special_tokens, strict=True)
        hidden = {token for token, text in special if text not in MARKS}
        output_text = OutputText(self.tokenizer, body.stops, eos | hidden, prompt=prompt, special=True)
        return Choice(index, pending, output_text, ToolCallParser(names, max_calls=max_calls))

    def abandon(self, answer: Answer) -> None:
        """Cancel what is not written of an answer that nobody reads."""
        for choice in answer.choices:
            if choice.finish_reason is None:
                choice.finish_reason = CANCELLED
                self._queues.pop(choice.pending, None)
                self.metrics.ended(choice)
                if self._model_thread is not None:
                    self._model_thread.cancel(choice.pending)

    async def _updates(
        self, model_thread: ModelThread, answer: Answer, unread: UnreadEvents, *, whole_steps: bool | str
    ) -> Updates:
        """Updates until all choices have ended. RequestError if one of them fails. whole_steps: whether every step is an update
        of its own."""
        running = {choice.pending: choice for choice in answer.choices}
        try:
            while running:
                pending, event = await unread.take(whole_steps=bool(whole_steps))
                if (choice := running.get(pending)) is None:
                    continue
                choice.seconds = time.monotonic() - pending.arrival_time
                update = self._add_output(choice, event) if isinstance(event, StepOutput) else self._finish(choice, event)
                if choice.finish_reason is not None:
                    del running[pending]
                    self._queues.pop(pending, None)
                    self.metrics.ended(choice)
                    if isinstance(event, StepOutput):
                        model_thread.cancel(pending)
                yield update
        finally:
            self.abandon(answer)

    def _add_output(self, choice: Choice, output: StepOutput) -> Update:
        if choice.first_token_seconds is None:
            choice.first_token_seconds = choice.seconds
        start = choice.output_text.count
        text = choice.add_text(choice.output_text.add(output.tokens))
        taken = choice.output_text.count - start
        choice.tokens += output.tokens[:taken]
        if not choice.is_streamed:
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


def kv_cache_bytes(model: ModelRunner, method: Method, max_num_seqs: int, max_model_len: int, wanted: int | None) -> int:
    """The limit of keys and values: enough for a text of full length in the default method's rows. ValueError if `wanted` is
    less."""
    group = BatchGroup(model, method, max_num_seqs, max_model_len, PREFILL_CHUNK_SIZE, lambda *_: None)
    needed = group.memory_bytes(max_model_len)
    if wanted is None:
        return max(default_kv_cache_bytes(model), needed)
    if wanted < needed:
        size = (
            f"{max_num_seqs} rows of {method.name} need {needed} bytes of keys and values for texts of {max_model_len} tokens"
        )
        remedy = "raise it, or lower --max-num-seqs or --max-model-len"
        raise ValueError(f"{size}, and --kv-cache-memory-bytes is {wanted}: {remedy}")
    return wanted


async def unless_disconnected(gone: Awaitable[Any], work: Awaitable[Found]) -> Found | None:
    """The result of some work; None if the client has gone first, and the work is cancelled."""
    working, going = asyncio.ensure_future(work), asyncio.ensure_future(gone)
    try:
        await asyncio.wait({working, going}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for one in (working, going):
            if not one.done():
                one.cancel()
