"""A model behind a queue: what the HTTP routes ask, and what the model's thread tells, brought together on the event loop."""

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
from skipstone.serving.answers import Answer, Choice
from skipstone.serving.asking import Asking
from skipstone.serving.engine import CHUNK, DIED, RETRY_AFTER, Engine, Steps, Told, default_kv_cache_bytes
from skipstone.serving.grammar import Grammar, NoGrammarMemory
from skipstone.serving.jobs import CANCELLED, FAILED, STOP, Ended, Event, Job, Piece, Refused
from skipstone.serving.lanes import Lane
from skipstone.serving.metrics import Metrics
from skipstone.serving.schemas import ChatBody
from skipstone.serving.settings import Settings
from skipstone.serving.tools import MARKS, Calls
from skipstone.serving.unread import UnreadEvents, largest_beyond_limit
from skipstone.serving.watch import begun
from skipstone.serving.writing import Writer

logger = logging.getLogger(__name__)
Found = TypeVar("Found")


WHY = {
    "loading": "the model is being loaded",
    "failed": "the model could not be loaded: see the server's log",
    "stopping": "the server is shutting down",
}
"""State -> why nothing is written in it."""
COMES_BACK = 5
"""Seconds after which a server that is loading, or is started anew, may be asked again."""
LAST_WORDS = 3
"""Seconds that clients have to read the end of their answers after nothing more is written."""
DRAIN_POLL = 0.02
"""Seconds between two looks at whether all streams are sent."""
MOST_CAPACITY = 4096
"""Tokens of a text where nobody says more: the memory of keys and values follows it."""

Update = tuple[Choice, str, Piece | None, int]
"""A choice, the text that is new in it, the piece that brought it, and the tokens before that."""
Updates = AsyncGenerator[Update, None]


class Server:
    """load: gives model and tokenizer; called in a thread. state: "loading", "ready", "failed" or "stopping". became_ready: is
    called on the event loop when requests are taken. failed: is called there when nothing will be written any more, because the
    model could not be loaded or its thread has died."""

    def __init__(self, load: Callable[[], tuple[Any, Any]], settings: Settings) -> None:
        self.settings, self._load = settings, load
        self.became_ready: Callable[[], None] = lambda: None
        self.failed: Callable[[], None] = lambda: None
        self.state = "loading"
        self.failure: Exception | None = None  # why the model could not be loaded
        self.metrics = Metrics(settings.name)
        self._texts = ThreadPoolExecutor(1, thread_name_prefix="skipstone-texts")
        self._schemas = ThreadPoolExecutor(1, thread_name_prefix="skipstone-schemas")
        self._compiling = 0  # schemas that it has or will have
        self._queues: dict[Job, UnreadEvents] = {}
        self._unread: WeakSet[UnreadEvents] = WeakSet()  # of all answers that somebody may still read
        self.open_streams = 0  # streams that clients have not read to the end
        self._draining: asyncio.Task[None] | None = None
        self._engine: Engine | None = None
        self._asking: Asking | None = None
        self.tokenizer: Any = None
        self.started = int(time.time())

    async def start(self) -> None:
        """Load the model, and begin to take requests."""
        self._loop = asyncio.get_running_loop()
        try:
            await self._loop.run_in_executor(self._texts, self._begin)
        except Exception as error:  # whatever it was, /health tells of it and the log has it
            if self.state == "stopping":
                return
            self.state, self.failure = "failed", error
            logger.error("the model could not be loaded: %s", error, exc_info=not isinstance(error, ValueError | OSError))
            self.failed()
            return
        gc.collect()
        gc.freeze()  # what was loaded stays: a full collection would walk over all of it, in the middle of a text
        if self.state == "loading":
            self.state = "ready"
            self.became_ready()

    def _begin(self) -> None:
        model, self.tokenizer = self._load()
        runner, settings = ModelRunner(model), self.settings
        method = resolve_for(model, settings.method)
        method.check(runner)
        expect_usable_defaults(runner, self.tokenizer)
        capacity = min(runner.max_positions, settings.capacity or MOST_CAPACITY)
        self._asking = Asking(runner, self.tokenizer, method, capacity, settings.seconds)
        limit = kv_cache_bytes(runner, method, settings.rows, capacity, settings.kv_cache_memory_bytes)
        self._engine = Engine(runner, settings.rows, capacity, settings.waiting, self._post, kv_cache_bytes=limit)

    async def drain(self) -> None:
        """Take nothing more, let texts end, and wait until streams are sent. A text that is not written within
        `settings.drain` seconds ends by an error."""
        if self._draining is None:
            self.state = "stopping"
            self._draining = asyncio.ensure_future(self._drain())
        await self._draining

    async def _drain(self) -> None:
        end = time.monotonic() + self.settings.drain
        if self._engine is not None:
            await self._loop.run_in_executor(None, self._engine.stop, self.settings.drain)
        end = max(end, time.monotonic() + LAST_WORDS)
        while self.open_streams and time.monotonic() < end:
            await asyncio.sleep(DRAIN_POLL)

    async def stop(self) -> None:
        """Drain, then leave."""
        await self.drain()
        for threads in (self._texts, self._schemas):
            threads.shutdown(wait=False, cancel_futures=True)

    @property
    def health(self) -> tuple[str, str]:
        """The state, "failed" as soon as the model's thread has died; and why nothing is written in it, "" where texts are."""
        if self.state != "stopping" and self._engine is not None and not self._engine.lives:
            return "failed", DIED
        return self.state, WHY.get(self.state, "")

    @property
    def engine(self) -> Engine:
        """Refused while there is none."""
        state, why = self.health
        if self._engine is None or state != "ready":
            raise Refused(503, why, None if state == "failed" else COMES_BACK)
        return self._engine

    @property
    def asking(self) -> Asking:
        """Refused while there is none."""
        _ = self.engine
        assert self._asking is not None
        return self._asking

    async def in_texts(self, call: Callable[..., Found], *given: Any) -> Found:
        """What works on texts, in its own thread."""
        return await self._loop.run_in_executor(self._texts, call, *given)

    async def asked(self, call: Callable[..., Found], *given: Any) -> Found:
        """The same of what a client sent: what cannot be done with it is the client's mistake."""
        try:
            return await self.in_texts(call, *given)
        except ValueError as error:
            raise Refused(400, str(error)) from None

    async def _grammar(self, body: Any) -> Grammar | None:
        """That of a body, compiled in a thread of its own: nobody waits for a schema but those who bring one."""
        if not self.asking.restricts(body):
            return None
        if self._compiling >= max(self.settings.waiting, 1):
            raise Refused(429, f"{self._compiling} schemas wait to be compiled already; ask again later", RETRY_AFTER)
        self._compiling += 1
        try:
            return await self._loop.run_in_executor(self._schemas, self.asking.grammar, body)
        except ValueError as error:
            raise Refused(400, str(error)) from None
        except NoGrammarMemory as error:
            raise Refused(429, str(error), RETRY_AFTER) from None
        except TimeoutError as error:
            raise Refused(503, str(error), COMES_BACK) from None
        finally:
            self._compiling -= 1

    # -------------------------------------------------------------------------------------------------- from the model

    def _post(self, told: Told, steps: Steps) -> None:
        try:
            self._loop.call_soon_threadsafe(self._take, told, steps)
        except RuntimeError:  # the loop is closed: nobody listens any more
            logger.debug("an event came after the end")

    def _take(self, told: Told, steps: Steps) -> None:
        for method, step in steps:
            self.metrics.step(method, step)
        if (engine := self._engine) is not None:
            self.metrics.running.set(engine.running)
            self.metrics.waiting.set(engine.waits)
        for job, event in told:
            listener = self._queues.pop(job, None) if isinstance(event, Ended) else self._queues.get(job)
            if listener is not None:
                listener.put(job, event)
        while (slow := largest_beyond_limit(self._unread)) is not None:
            self._drop(slow)
        if engine is not None and not engine.lives and self.state == "ready":
            self.state = "failed"
            self.failed()

    def _drop(self, unread: UnreadEvents) -> None:
        """Give up an answer that its client does not read."""
        unread.drop()
        for job in unread.jobs:
            if self._queues.pop(job, None) is not None and self._engine is not None:
                self._engine.cancel(job)

    # ------------------------------------------------------------------------------------------------------ to clients

    async def answer(self, ask: Callable[..., list[Job]], body: Any, *, chat: bool) -> tuple[Answer, Updates]:
        """An answer that is begun, and its updates. ask: makes jobs of a body and its grammar. Refused before anything is
        written."""
        engine = self.engine
        jobs = await self.asked(ask, body, await self._grammar(body))
        listener = UnreadEvents(jobs)
        choices = [self._choice(index, job, body) for index, job in enumerate(jobs)]
        for choice in choices:
            choice.is_streamed = body.stream
        answer = Answer(self.settings.name, choices, chat=chat, tokenizer=self.tokenizer)
        engine.submit(jobs)
        self._queues.update(dict.fromkeys(jobs, listener))
        self._unread.add(listener)
        begun(answer, body)
        return answer, self._updates(engine, answer, listener, whole_steps=body.stream_speculative)

    def _choice(self, index: int, job: Job, body: Any) -> Choice:
        if not (isinstance(body, ChatBody) and body.offered):
            return Choice(index, job, Writer(self.tokenizer, body.stops, job.request.eos, prompt=job.ids, echo=job.echo))
        names, most = [one.function.name for one in body.offered], 1 if body.parallel_tool_calls is False else None
        special = zip(self.tokenizer.all_special_ids, self.tokenizer.all_special_tokens, strict=True)
        hidden = {token for token, text in special if text not in MARKS}
        writer = Writer(self.tokenizer, body.stops, job.request.eos | hidden, prompt=job.ids, special=True)
        return Choice(index, job, writer, Calls(names, most=most))

    def abandon(self, answer: Answer) -> None:
        """Nobody reads an answer any more: what is not written of it is given up."""
        for choice in answer.choices:
            if choice.reason is None:
                choice.reason = CANCELLED
                self._leave(choice.job)
                self.metrics.ended(choice)
                if self._engine is not None:
                    self._engine.cancel(choice.job)

    async def _updates(self, engine: Engine, answer: Answer, listener: UnreadEvents, *, whole_steps: bool | str) -> Updates:
        """Until all have ended, or nobody listens any more. Refused where one could not be written. whole_steps: whether what
        every step has committed is an update of its own."""
        running = {choice.job: choice for choice in answer.choices}
        try:
            while running:
                job, event = await listener.take(whole_steps=bool(whole_steps))
                if (choice := running.get(job)) is None:
                    continue
                update = self._update(choice, event)
                if choice.reason is not None:
                    del running[job]
                    self._leave(job)
                    self.metrics.ended(choice)
                    if isinstance(event, Piece):
                        engine.cancel(job)
                yield update
        finally:
            self.abandon(answer)

    def _update(self, choice: Choice, event: Event) -> Update:
        choice.seconds = time.monotonic() - choice.job.asked
        return self._more(choice, event) if isinstance(event, Piece) else self._last(choice, event)

    def _leave(self, job: Job) -> None:
        self._queues.pop(job, None)

    def _more(self, choice: Choice, piece: Piece) -> Update:
        if choice.first is None:
            choice.first = choice.seconds
        start = choice.writer.count
        text = choice.shown(choice.writer.add(piece.tokens))
        taken = choice.writer.count - start
        choice.tokens += piece.tokens[:taken]
        if not choice.is_streamed:
            choice.likely += (piece.likely or [])[:taken]
        if choice.writer.stopped:
            text += choice.end(STOP)
        return choice, text, piece, start

    def _last(self, choice: Choice, ended: Ended) -> Update:
        if ended.message:
            choice.reason = ended.reason
            self.metrics.ended(choice)
            raise Refused(ended.status if ended.reason != FAILED or ended.status < 500 else 500, ended.message)
        start = choice.writer.count
        text = choice.shown(choice.writer.rest())
        text += choice.end(STOP if choice.writer.stopped else ended.reason)
        return choice, text, None, start


def kv_cache_bytes(model: ModelRunner, method: Method, rows: int, capacity: int, wanted: int | None) -> int:
    """What keys and values may take: so much that the default method's rows have room for a text of full length. ValueError
    where less is wanted."""
    needed = Lane(model, method, rows, capacity, CHUNK, lambda *_: None).memory_bytes(capacity)
    if wanted is None:
        return max(default_kv_cache_bytes(model), needed)
    if wanted < needed:
        raise ValueError(
            f"{rows} rows of {method.name} need {needed} bytes of keys and values for texts of {capacity} tokens, and "
            f"--kv-cache-memory-bytes is {wanted}: raise it, or lower --max-num-seqs or --max-model-len"
        )
    return wanted


async def unless(gone: Awaitable[Any], work: Awaitable[Found]) -> Found | None:
    """What comes of some work; None where something else has happened before it is done, which then is given up."""
    working, going = asyncio.ensure_future(work), asyncio.ensure_future(gone)
    try:
        await asyncio.wait({working, going}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for one in (working, going):
            if not one.done():
                one.cancel()
