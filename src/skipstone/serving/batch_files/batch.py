"""A batch in this process. Requests take rows as they become free, so no request waits for the end of another."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from skipstone.decoding.method import Method
from skipstone.engines import loading
from skipstone.engines.model_runner import ModelRunner
from skipstone.hf.generate_call import resolve_for
from skipstone.hf.generation_defaults import expect_usable_defaults, replace_defaults
from skipstone.models.fingerprint import fingerprint
from skipstone.serving.batch_files.answer_line import ModelThreadError, answer_line, is_worth_retrying
from skipstone.serving.batch_files.journal import Journal, OutputLine
from skipstone.serving.batch_files.request_lines import RequestFile, RequestLine
from skipstone.serving.server import Server
from skipstone.serving.settings import ServerSettings

REQUESTS_PER_ROW = 2
"""Submitted requests per row: while one is written, the next one is parsed and ready when the row is free."""
UNLIMITED_WAITING = 1 << 30
"""Requests that may wait for a row. REQUESTS_PER_ROW limits them."""

NumberedLine = tuple[int, RequestLine]
"""A request, and its number in the input."""
Answers = list[tuple[int, OutputLine]]
"""Answers with the numbers of their requests."""
Progress = Callable[[int, int], None]
"""Called with the number of answered requests and the number of errors among them."""


@dataclass(frozen=True)
class ModelSettings:
    """How to load a model and write with it. All values are plain, so that another machine can receive them.

    name, dtype, device, engine, quantize, kv_dtype, trust_remote_code: as in `skipstone.load`; device may be "auto". method: as
    in `skipstone.generate`. served_name: name of the model in bodies. max_num_seqs: texts that are written at a time.
    max_model_len: maximum tokens of a text, its prompt included; None for a server's default. generation_config, overrides: as
    in `replace_defaults`."""

    name: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    engine: str = "auto"
    quantize: str = "none"
    kv_dtype: str | None = None
    trust_remote_code: bool = False
    method: Any = None
    served_name: str | None = None
    max_num_seqs: int = 8
    max_model_len: int | None = None
    generation_config: dict[str, Any] | None = None
    overrides: dict[str, Any] = field(default_factory=dict)

    def load(self) -> "LoadedModel":
        """ValueError, OSError and ImportError as of `skipstone.load`, and for a method that does not fit the model."""
        dtype = self.dtype if self.dtype == "auto" else getattr(torch, self.dtype)
        model, tokenizer = loading.load(
            self.name,
            dtype=dtype,
            device=loading.usable_device(self.device),
            engine=self.engine,
            quantize=self.quantize,
            kv_dtype=self.kv_dtype,
            trust_remote_code=self.trust_remote_code,
            keep_weights=False,
            generation_config=loading.generation_defaults(self.name, self.generation_config, self.overrides),
        )
        replace_defaults(model, self.generation_config, self.overrides)
        runner = ModelRunner(model)
        method = resolve_for(model, self.method)
        method.check(runner)
        expect_usable_defaults(runner, tokenizer)
        return LoadedModel(self, model, tokenizer, method)

    def journal_settings(self) -> dict[str, Any]:
        """The settings that must not change when a run goes on, as far as they are known without the model."""
        return {
            "model": self.name or loading.BUNDLED,
            "called": self.served_name or self.name or loading.BUNDLED,
            "method": self.method or "the model's own",
            "dtype": self.dtype,
            "engine": self.engine,
            "quantize": self.quantize,
            "kv_dtype": self.kv_dtype or "usual",
            "capacity": self.max_model_len or "usual",
            "generation_config": "the model's own" if self.generation_config is None else self.generation_config,
            "overrides": self.overrides,
        }


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model. method: decodes; None for the model's own."""

    options: ModelSettings
    model: Any
    tokenizer: Any
    method: Method | None = None

    @asynccontextmanager
    async def server(self) -> AsyncIterator[Server]:
        """A running server without HTTP. ModelThreadError if it cannot begin."""
        options = self.options
        name = options.served_name or options.name or loading.BUNDLED
        limits = options.max_num_seqs, options.max_model_len, UNLIMITED_WAITING
        settings = ServerSettings(name, self.method, *limits, drain_seconds=0.0)
        server = Server(lambda: (self.model, self.tokenizer), settings)
        await server.start()
        try:
            if server.health[0] != "ready":
                raise ModelThreadError(server.health[1])
            yield server
        finally:
            await server.stop()


async def answer_lines(server: Server, lines: Iterable[NumberedLine]) -> AsyncGenerator[Answers, None]:
    """Yield answers as they come, those together that came at once. At the end, a request whose step was ended by a defect is
    tried once more, alone. ModelThreadError if nothing can be answered any more."""
    waiting, running = iter(lines), dict[asyncio.Task[OutputLine], NumberedLine]()
    retried: list[NumberedLine] = []

    def submit() -> None:
        while len(running) < REQUESTS_PER_ROW * server.settings.max_num_seqs and (pair := next(waiting, None)) is not None:
            running[asyncio.create_task(answer_line(server, pair[1]))] = pair

    try:
        submit()
        while running:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            ended = [(running.pop(task), task.result()) for task in done]
            submit()  # first, so that no row waits for the journal
            retried += [pair for pair, answer in ended if is_worth_retrying(answer)]
            if answers := [(index, answer) for (index, _), answer in ended if not is_worth_retrying(answer)]:
                yield answers
        for index, line in retried:
            yield [(index, await answer_line(server, line))]
    finally:
        for task in running:
            task.cancel()


def run(loaded: LoadedModel, output: Path, requests: RequestFile, report: Progress) -> int:
    """Answer all requests that have no answer yet, and write the output. Returns the number of errors among all answers.

    The journal keeps what is answered, however the run ends. ValueError as of `Journal`; ModelThreadError if the model's thread
    has ended."""
    settings = loaded.options.journal_settings() | {"weights": fingerprint(loaded.model)}
    with Journal(output, requests, settings) as journal:
        report(journal.num_done, journal.num_errors)
        if journal.missing:
            asyncio.run(_run(loaded, journal, report))
        journal.finish()
        return journal.num_errors


async def _run(loaded: LoadedModel, journal: Journal, report: Progress) -> None:
    missing = ((index, journal.requests[index]) for index in journal.missing)
    async with loaded.server() as server, aclosing(answer_lines(server, missing)) as batches:
        async for answers in batches:
            await asyncio.to_thread(journal.add, *answers)
            report(journal.num_done, journal.num_errors)
