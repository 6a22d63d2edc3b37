"""A batch on Ray Data: the same answers, by an actor a device, on this machine or on a cluster that is there.

The driver alone writes: it keeps the journal and the output, as a batch in one process does, so that either goes on with what
the other has begun. An actor that dies is started again, and the requests that it had are answered again.
"""

import asyncio
import json
import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import AsyncExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from skipstone.serving.batch_files.answering import Died, answered
from skipstone.serving.batch_files.batch import Chosen, Numbered, Tell, answers
from skipstone.serving.batch_files.journal import Answer, Journal
from skipstone.serving.batch_files.lines import Line, Lines, parsed
from skipstone.serving.batch_files.tries import Tries
from skipstone.serving.ray.cluster import Share, connect, places, weights
from skipstone.serving.server import Server
from skipstone.utils.extras import installed

NEED = "--ray needs Ray Data"
LINES_A_ROW = 4
"""Requests of a task for every row of an actor: so many are lost when it dies."""
TASKS = 2
"""Tasks that an actor works on at a time: the rows that one leaves at its end are the other's."""
OVER_WEIGHTS = 2
"""Memory of an actor, in sizes of its checkpoint: the weights while they are packed for the native engine."""
DIED = "worker_died"
"""The code of an error: the actor died while it wrote this answer, and once more when it wrote it by itself."""
REFUSAL = "refusal"
"""The key of what an actor says in place of answers where it could not load the model."""


@dataclass(frozen=True)
class Placing:
    """Where a batch runs. address: of a cluster, None for a new one on this machine. actors: how many, None for as many as
    there are devices. cpus: of each."""

    address: str | None = None
    actors: int | None = None
    cpus: int = 1


def run(chosen: Chosen, placing: Placing, output: Path, lines: Lines, tell: Tell) -> int:
    """As `batch.run`. ImportError without Ray; ValueError where the cluster does not answer, or has no machine for an actor."""
    if chosen.name is not None and Path(chosen.name).exists():
        chosen = replace(chosen, name=str(Path(chosen.name).resolve()))
    with _connected(placing.address) as ray:
        actors, share = _placed(ray, chosen, placing)
        with Journal(output, lines, chosen.about()) as journal:
            tell(journal.done, journal.failures)
            if missing := journal.missing:
                rest = [(index, lines.raw(index)) for index in missing]
                with closing(_mapped(ray, chosen, actors, share, rest)) as found:
                    for several in found:
                        journal.add(*several)
                        tell(journal.done, journal.failures)
            journal.finish()
            return journal.failures


@contextmanager
def _connected(address: str | None) -> Iterator[Any]:
    """Ray, connected; a connection that was there is used, and stays."""
    there = sys.modules.get("ray")
    if there is not None and there.is_initialized():
        yield there
        return
    connect(address)
    ray = installed("ray", NEED, "ray")
    try:
        yield ray
    finally:
        ray.shutdown()


def _placed(ray: Any, chosen: Chosen, placing: Placing) -> tuple[int, Share]:
    """How many actors there are, and what each has of a machine. ValueError where there is no room for one."""
    nodes = ray.nodes()
    gpus = chosen.device != "cpu" and any(node["Resources"].get("GPU", 0) >= 1 for node in nodes if node["Alive"])
    share = Share(placing.cpus, 1.0 if gpus else 0.0, OVER_WEIGHTS * weights(chosen.name))
    most = places(nodes, share)
    if not most:
        raise ValueError(f"an actor needs {share}, and no machine of the Ray cluster has as much")
    if (placing.actors or 0) > most:
        raise ValueError(f"--actors {placing.actors}: the Ray cluster has room for {most}, of {share} each")
    return placing.actors or most, share


def _mapped(
    ray: Any, chosen: Chosen, actors: int, share: Share, missing: Sequence[tuple[int, bytes]]
) -> Generator[list[tuple[int, Answer]], None, None]:
    """Answers as they come. ValueError where an actor could not load the model."""
    data = installed("ray.data", NEED, "ray")
    context = data.DataContext.get_current()
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    size = max(1, min(LINES_A_ROW * chosen.rows, math.ceil(len(missing) / (TASKS * actors))))
    tries = ray.remote(num_cpus=0)(Tries).remote()
    items = [{"index": index, "line": raw.decode()} for index, raw in missing]
    pool = {"max_tasks_in_flight_per_actor": 2 * TASKS, "max_concurrent_calls_per_actor": TASKS}
    found = data.from_items(items, override_num_blocks=math.ceil(len(items) / size)).map_batches(
        Worker,
        batch_size=None,
        fn_constructor_kwargs={"chosen": chosen, "cpus": int(share.cpus), "tries": tries},
        compute=data.ActorPoolStrategy(size=actors, enable_true_multi_threading=True, **pool),
        num_cpus=share.cpus,
        num_gpus=share.gpus or None,
        memory=share.memory or None,
    )
    batches: Any = iter(found.iter_batches(batch_size=None, prefetch_batches=0))
    with closing(batches):  # which ends the actors, too
        for batch in batches:
            told = [(int(index), json.loads(answer)) for index, answer in zip(batch["index"], batch["answer"], strict=True)]
            for _, answer in told:
                if REFUSAL in answer:
                    raise ValueError(f"an actor could not begin: {answer[REFUSAL]}")
            yield told


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


class Worker:
    """A model in an actor. `map_batches` calls it from several threads."""

    def __init__(self, chosen: Chosen, cpus: int, tries: Any) -> None:
        os.environ.setdefault("SKIPSTONE_THREADS", str(cpus))
        self._tries, self._loop, self._stack = tries, asyncio.new_event_loop(), AsyncExitStack()
        self._working, self._alone = asyncio.Semaphore(TASKS), asyncio.Lock()
        threading.Thread(target=self._loop.run_forever, name="skipstone-answers", daemon=True).start()
        self._server: Server | None = None
        self._refusal = ""  # a sentence: an actor whose constructor raises would be started again and again
        try:
            self._server = self._do(self._stack.enter_async_context(chosen.load().server()))
        except (ValueError, OSError, ImportError) as error:
            self._refusal = _first_line(error)

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        """batch: `index` and `line` of requests. Returns `index` and `answer`, JSON in a text."""
        lines = [(int(index), parsed(str(line).encode())) for index, line in zip(batch["index"], batch["line"], strict=True)]
        if self._server is None:
            return {"index": [lines[0][0]], "answer": [json.dumps({REFUSAL: self._refusal})]}
        try:
            found = self._do(self._answered(self._server, lines))
        except Died:
            os.kill(os.getpid(), signal.SIGKILL)  # Ray starts another actor, which begins anew
            raise
        told = [json.dumps(answer, ensure_ascii=False) for _, answer in found]
        return {"index": [index for index, _ in found], "answer": told}

    async def _answered(self, server: Server, lines: list[Numbered]) -> list[tuple[int, Answer]]:
        """All at a time; one by one, and with nothing else beside, where an actor has died with them: so it is known which
        request ends one."""
        if await self._tries.begin.remote(lines[0][0]) == 1:
            async with self._working:
                return [one async for several in answers(server, lines) for one in several]
        async with self._alone, AsyncExitStack() as all_of_it:
            for _ in range(TASKS):
                await all_of_it.enter_async_context(self._working)
            return [(index, await self._one(server, index, line)) for index, line in lines]

    async def _one(self, server: Server, index: int, line: Line) -> Answer:
        if not await self._tries.alone.remote(index):
            error = {"code": DIED, "message": "the process that wrote this answer died, and died again when it wrote only this"}
            return {"id": line.id, "custom_id": line.custom_id, "response": None, "error": error}
        found = await answered(server, line)
        await self._tries.ended.remote(index)
        return found
