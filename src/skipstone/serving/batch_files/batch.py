"""A batch in this process. Requests take rows as they become free, so no request waits for the end of another."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from skipstone.models.fingerprint import fingerprint
from skipstone.serving.batch_files.answer_line import answer_line, is_worth_retrying
from skipstone.serving.batch_files.journal import Journal, OutputLine
from skipstone.serving.batch_files.request_lines import RequestFile, RequestLine
from skipstone.serving.server import Server
from skipstone.serving.settings import Load, ServerSettings

REQUESTS_PER_ROW = 2
"""Submitted requests per row: while one is written, the next one is parsed and ready when the row is free."""

NumberedLine = tuple[int, RequestLine]
"""A request, and its number in the input."""
Answers = list[tuple[int, OutputLine]]
"""Answers with the numbers of their requests."""
AnswerLine = Callable[[RequestLine], Awaitable[OutputLine]]
AnswerLines = Callable[[Iterable[NumberedLine]], AsyncGenerator[Answers, None]]
Progress = Callable[[int, int], None]
"""Called with the number of answered requests and the number of errors among them."""


@dataclass(frozen=True)
class BatchSettings:
    """How to load a model and write with it.

    load: returns the model and its tokenizer; another machine can receive it. server: settings of the server that answers.
    journal: what must not change when a run goes on, as far as it is known without the model."""

    load: Load
    server: ServerSettings
    journal: dict[str, Any]

    @property
    def num_running(self) -> int:
        """Requests of one model at a time."""
        return REQUESTS_PER_ROW * self.server.max_num_seqs


async def answer_lines(
    answer: AnswerLine, lines: Iterable[NumberedLine], num_running: int, num_models: int = 1
) -> AsyncGenerator[Answers, None]:
    """Yield answers as they come, those together that came at once. At the end, a request that a defect has ended is tried once
    more, alone with its model. num_running: requests at a time. num_models: number of models that answer."""
    retried: list[NumberedLine] = []
    async with aclosing(_answer_all(answer, lines, num_running)) as pieces:
        async for ended in pieces:
            retried += [pair for pair, found in ended if is_worth_retrying(found)]
            if answers := [(index, found) for (index, _), found in ended if not is_worth_retrying(found)]:
                yield answers
    async with aclosing(_answer_all(answer, retried, num_models)) as pieces:
        async for ended in pieces:
            yield [(index, found) for (index, _), found in ended]


async def _answer_all(
    answer: AnswerLine, lines: Iterable[NumberedLine], limit: int
) -> AsyncGenerator[list[tuple[NumberedLine, OutputLine]], None]:
    """Yield requests with their answers. limit: requests at a time."""
    waiting, running = iter(lines), dict[asyncio.Future[OutputLine], NumberedLine]()
    ended: list[tuple[NumberedLine, OutputLine]] = []
    try:
        while True:
            for pair in islice(waiting, limit - len(running)):
                running[asyncio.ensure_future(answer(pair[1]))] = pair
            if ended:  # after the next requests have begun, so that no row waits for the journal
                yield ended
            if not running:
                return
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            ended = [(running.pop(task), task.result()) for task in done]
    finally:
        for task in running:
            task.cancel()


def complete(output: Path, requests: RequestFile, settings: dict[str, Any], report: Progress, answer: AnswerLines) -> int:
    """Answer all requests that have no answer yet, and write the output. Returns the number of errors among all answers.

    settings: of the run. answer: yields the answers of requests. The journal keeps what is answered, however the run ends.
    ValueError as of `Journal`, and what `answer` raises."""

    async def answer_missing() -> None:
        async with aclosing(answer((index, requests[index]) for index in journal.missing)) as pieces:
            async for answers in pieces:
                await asyncio.to_thread(journal.add, *answers)
                report(journal.num_done, journal.num_errors)

    with Journal(output, requests, settings) as journal:
        report(journal.num_done, journal.num_errors)
        if journal.missing:
            asyncio.run(answer_missing())
        journal.finish()
        return journal.num_errors


def run(settings: BatchSettings, output: Path, requests: RequestFile, report: Progress) -> int:
    """As `complete`, by a model of this process. ModelThreadError if its thread has ended."""
    model, tokenizer = settings.load()

    async def answer(lines: Iterable[NumberedLine]) -> AsyncGenerator[Answers, None]:
        async with (
            loaded_server(lambda: (model, tokenizer), settings.server) as server,
            aclosing(answer_lines(partial(answer_line, server), lines, settings.num_running)) as pieces,
        ):
            async for answers in pieces:
                yield answers

    return complete(output, requests, settings.journal | {"weights": fingerprint(model)}, report, answer)


@asynccontextmanager
async def loaded_server(load: Load, settings: ServerSettings) -> AsyncIterator[Server]:
    """A server without HTTP that takes requests. It raises what `Server.load` raises."""
    server = Server(load, settings)
    try:
        await server.load()
        yield server
    finally:
        await server.stop()
