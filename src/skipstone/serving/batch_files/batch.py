"""A batch in this process: as many requests as have rows are written at a time, others wait behind them, none waits for the end
of others."""

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
from skipstone.serving.batch_files.answering import Died, answered, by_defect
from skipstone.serving.batch_files.journal import Answer, Journal
from skipstone.serving.batch_files.lines import Line, Lines
from skipstone.serving.server import Server
from skipstone.serving.settings import ServerSettings

AHEAD = 2
"""Requests that are under way for every row: while one is written the next is read, and stands ready when the row is free."""
UNBOUNDED = 1 << 30
"""Texts that may wait for a row: what bounds them is how many requests are under way."""

Numbered = tuple[int, Line]
"""A request, and its number in the input."""
Tell = Callable[[int, int], None]
"""Called with the requests that have an answer by now, and how many of these answers are errors."""


@dataclass(frozen=True)
class Chosen:
    """A model, and how it writes: all of it plain, so that it can be sent to another machine. name, dtype, device, engine,
    quantize, kv_dtype, trust_remote_code: as in `skipstone.load`; device may be "auto". method: as in `skipstone.generate`.
    served: what bodies call the model. rows: texts that are written at a time. capacity: most tokens of a text, its prompt
    included; None for a server's default. generation_config, overrides: as in `replace_defaults`."""

    name: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    engine: str = "auto"
    quantize: str = "none"
    kv_dtype: str | None = None
    trust_remote_code: bool = False
    method: Any = None
    served: str | None = None
    rows: int = 8
    capacity: int | None = None
    generation_config: dict[str, Any] | None = None
    overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def called(self) -> str:
        """What bodies call the model."""
        return self.served or self.name or loading.BUNDLED

    def load(self) -> "Loaded":
        """ValueError, OSError and ImportError as of `skipstone.load`, and for a method that does not fit the model."""
        dtype = self.dtype if self.dtype == "auto" else getattr(torch, self.dtype)
        more = {"engine": self.engine, "quantize": self.quantize, "kv_dtype": self.kv_dtype}
        more |= {"trust_remote_code": self.trust_remote_code, "keep_weights": False}
        more |= {"generation_config": loading.generation_defaults(self.name, self.generation_config, self.overrides)}
        model, tokenizer = loading.load(self.name, dtype=dtype, device=loading.usable_device(self.device), **more)
        replace_defaults(model, self.generation_config, self.overrides)
        runner = ModelRunner(model)
        method = resolve_for(model, self.method)
        method.check(runner)
        expect_usable_defaults(runner, tokenizer)
        return Loaded(self, model, tokenizer, method)

    def about(self) -> dict[str, Any]:
        """What a run that goes on must share with its beginning, as far as it is known without the model."""
        found = {"model": self.name or loading.BUNDLED, "called": self.called, "method": self.method or "the model's own"}
        found |= {"dtype": self.dtype, "engine": self.engine, "quantize": self.quantize}
        found |= {"kv_dtype": self.kv_dtype or "usual", "capacity": self.capacity or "usual"}
        defaults = "the model's own" if self.generation_config is None else self.generation_config
        return found | {"generation_config": defaults, "overrides": self.overrides}


@dataclass(frozen=True)
class Loaded:
    """A model that is there. chosen: how it writes. method: that it decodes with; None for the model's own."""

    chosen: Chosen
    model: Any
    tokenizer: Any
    method: Method | None = None

    def about(self) -> dict[str, Any]:
        """As of `Chosen`, and a hash of the weights."""
        return self.chosen.about() | {"weights": fingerprint(self.model)}

    @asynccontextmanager
    async def server(self) -> AsyncIterator[Server]:
        """What answers, without HTTP. Died where it cannot begin."""
        chosen = self.chosen
        settings = ServerSettings(chosen.called, self.method, chosen.rows, chosen.capacity, UNBOUNDED, None, 0.0)
        server = Server(lambda: (self.model, self.tokenizer), settings)
        await server.start()
        try:
            if server.health[0] != "ready":
                raise Died(server.health[1])
            yield server
        finally:
            await server.stop()


async def answers(server: Server, lines: Iterable[Numbered]) -> AsyncGenerator[list[tuple[int, Answer]], None]:
    """Answers to requests as they come, with their numbers, those together that have come at once. At the end, a request whose
    step was ended by a defect is asked once more, by itself. Died where nothing can be answered any more."""
    waiting, running = iter(lines), set[asyncio.Task[tuple[int, Line, Answer]]]()
    again: list[Numbered] = []

    async def one(index: int, line: Line) -> tuple[int, Line, Answer]:
        return index, line, await answered(server, line)

    def fill() -> None:
        while len(running) < AHEAD * server.settings.max_num_seqs and (pair := next(waiting, None)) is not None:
            running.add(asyncio.create_task(one(*pair)))

    try:
        fill()
        while running:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            fill()  # before anybody looks at what is done
            found = [task.result() for task in done]
            again += [(index, line) for index, line, answer in found if by_defect(answer)]
            if good := [(index, answer) for index, _, answer in found if not by_defect(answer)]:
                yield good
        for index, line in again:
            yield [(index, await answered(server, line))]
    finally:
        for task in running:
            task.cancel()


def run(loaded: Loaded, output: Path, lines: Lines, tell: Tell) -> int:
    """Answer all requests that have no answer yet, and write the output. Returns how many answers are errors. What is answered
    stays in the journal, whatever ends the run. ValueError as of `Journal`; Died where the model's thread has died."""
    with Journal(output, lines, loaded.about()) as journal:
        tell(journal.done, journal.failures)
        if journal.missing:
            asyncio.run(_run(loaded, journal, tell))
        journal.finish()
        return journal.failures


async def _run(loaded: Loaded, journal: Journal, tell: Tell) -> None:
    missing = ((index, journal.lines[index]) for index in journal.missing)
    async with loaded.server() as server, aclosing(answers(server, missing)) as found:
        async for several in found:
            await asyncio.to_thread(journal.add, *several)
            tell(journal.done, journal.failures)
