"""A batch on Ray Data: the same answers, with one actor per device, on this machine or on an existing cluster.

Only the driver writes the journal and the output, as a batch in one process does, so each can continue a run of the other. An
actor that dies is started again, and its requests are answered again.
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

from skipstone.serving.batch_files.answer_line import ModelThreadError, answer_line
from skipstone.serving.batch_files.attempts import Attempts
from skipstone.serving.batch_files.batch import Answers, ModelSettings, NumberedLine, Progress, answer_lines
from skipstone.serving.batch_files.journal import Journal, OutputLine
from skipstone.serving.batch_files.request_lines import RequestFile, RequestLine, parse_line
from skipstone.serving.ray.cluster import NodeShare, connect, count_places, weight_bytes
from skipstone.serving.server import Server
from skipstone.utils.extras import installed

NEED = "--ray needs Ray Data"
REQUESTS_PER_ROW = 4
"""Requests of a task per row of an actor. They are lost when the actor dies."""
TASKS_PER_ACTOR = 2
"""Tasks that an actor works on at a time: the second one takes the rows that become free at the end of the first."""
MEMORY_PER_WEIGHTS = 2
"""Memory of an actor in sizes of its checkpoint: the weights while they are packed for the native engine."""
WORKER_DIED = "worker_died"
"""The error code of a request that has ended two actors, the second time alone."""
REFUSAL = "refusal"
"""The key of an actor's message if it could not load the model."""


@dataclass(frozen=True)
class RayOptions:
    """Where a batch runs. address: of a cluster, None for a new one on this machine. actors: their number, None for one per
    device. cpus: of each."""

    address: str | None = None
    actors: int | None = None
    cpus: int = 1


def run(options: ModelSettings, ray_options: RayOptions, output: Path, requests: RequestFile, report: Progress) -> int:
    """As `batch.run`. ImportError without Ray; ValueError if the cluster does not answer or has no room for an actor."""
    if options.name is not None and Path(options.name).exists():
        options = replace(options, name=str(Path(options.name).resolve()))
    with _connected(ray_options.address) as ray:
        actors, share = _place_actors(ray, options, ray_options)
        with Journal(output, requests, options.journal_settings()) as journal:
            report(journal.num_done, journal.num_errors)
            if journal.missing:
                missing = [(index, requests.raw(index)) for index in journal.missing]
                with closing(_map_requests(ray, options, actors, share, missing)) as batches:
                    for answers in batches:
                        journal.add(*answers)
                        report(journal.num_done, journal.num_errors)
            journal.finish()
            return journal.num_errors


@contextmanager
def _connected(address: str | None) -> Iterator[Any]:
    """Ray, connected. An existing connection is used and stays."""
    loaded = sys.modules.get("ray")
    if loaded is not None and loaded.is_initialized():
        yield loaded
        return
    connect(address)
    ray = installed("ray", NEED, "ray")
    try:
        yield ray
    finally:
        ray.shutdown()


def _place_actors(ray: Any, options: ModelSettings, ray_options: RayOptions) -> tuple[int, NodeShare]:
    """The number of actors, and the share of a machine that each gets. ValueError if there is no room."""
    nodes = ray.nodes()
    has_gpus = options.device != "cpu" and any(node["Resources"].get("GPU", 0) >= 1 for node in nodes if node["Alive"])
    share = NodeShare(ray_options.cpus, 1.0 if has_gpus else 0.0, MEMORY_PER_WEIGHTS * weight_bytes(options.name))
    places = count_places(nodes, share)
    if not places:
        raise ValueError(f"an actor needs {share}, and no machine of the Ray cluster has as much")
    if (ray_options.actors or 0) > places:
        raise ValueError(f"--actors {ray_options.actors}: the Ray cluster has room for {places}, of {share} each")
    return ray_options.actors or places, share


def _map_requests(
    ray: Any, options: ModelSettings, actors: int, share: NodeShare, missing: Sequence[tuple[int, bytes]]
) -> Generator[Answers, None, None]:
    """Yield answers as they come. ValueError if an actor could not load the model."""
    data = installed("ray.data", NEED, "ray")
    data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    size = max(1, min(REQUESTS_PER_ROW * options.max_num_seqs, math.ceil(len(missing) / (TASKS_PER_ACTOR * actors))))
    attempts = ray.remote(num_cpus=0)(Attempts).remote()
    items = [{"index": index, "line": raw.decode()} for index, raw in missing]
    pool = {"max_tasks_in_flight_per_actor": 2 * TASKS_PER_ACTOR, "max_concurrent_calls_per_actor": TASKS_PER_ACTOR}
    answered = data.from_items(items, override_num_blocks=math.ceil(len(items) / size)).map_batches(
        Worker,
        batch_size=None,
        fn_constructor_kwargs={"options": options, "cpus": int(share.cpus), "attempts": attempts},
        compute=data.ActorPoolStrategy(size=actors, enable_true_multi_threading=True, **pool),
        num_cpus=share.cpus,
        num_gpus=share.gpus or None,
        memory=share.memory or None,
    )
    batches: Any = iter(answered.iter_batches(batch_size=None, prefetch_batches=0))
    with closing(batches):  # this ends the actors, too
        for batch in batches:
            answers = [(int(index), json.loads(answer)) for index, answer in zip(batch["index"], batch["answer"], strict=True)]
            for _, answer in answers:
                if REFUSAL in answer:
                    raise ValueError(f"an actor could not begin: {answer[REFUSAL]}")
            yield answers


class Worker:
    """A model in an actor. `map_batches` calls it from several threads."""

    def __init__(self, options: ModelSettings, cpus: int, attempts: Any) -> None:
        os.environ.setdefault("SKIPSTONE_THREADS", str(cpus))
        self._attempts, self._loop, self._stack = attempts, asyncio.new_event_loop(), AsyncExitStack()
        self._running, self._alone = asyncio.Semaphore(TASKS_PER_ACTOR), asyncio.Lock()
        threading.Thread(target=self._loop.run_forever, name="skipstone-answers", daemon=True).start()
        self._server: Server | None = None
        self._refusal = ""  # an actor whose constructor raises would be started again and again
        try:
            self._server = self._run(self._stack.enter_async_context(options.load().server()))
        except (ValueError, OSError, ImportError) as error:
            self._refusal = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        """batch: `index` and `line` of requests. Returns `index` and `answer`, JSON in a text."""
        numbered = zip(batch["index"], batch["line"], strict=True)
        lines = [(int(index), parse_line(str(line).encode())) for index, line in numbered]
        if self._server is None:
            return {"index": [lines[0][0]], "answer": [json.dumps({REFUSAL: self._refusal})]}
        try:
            answers = self._run(self._answer_task(self._server, lines))
        except ModelThreadError:
            os.kill(os.getpid(), signal.SIGKILL)  # Ray starts another actor
            raise
        texts = [json.dumps(answer, ensure_ascii=False) for _, answer in answers]
        return {"index": [index for index, _ in answers], "answer": texts}

    async def _answer_task(self, server: Server, lines: list[NumberedLine]) -> Answers:
        """Answer all requests at a time. If an actor has died with this task, answer them one by one, with nothing else
        running, to learn which request ends an actor."""
        if await self._attempts.begin.remote(lines[0][0]) == 1:
            async with self._running:
                return [one async for answers in answer_lines(server, lines) for one in answers]
        async with self._alone, AsyncExitStack() as all_tasks:
            for _ in range(TASKS_PER_ACTOR):
                await all_tasks.enter_async_context(self._running)
            return [(index, await self._answer_alone(server, index, line)) for index, line in lines]

    async def _answer_alone(self, server: Server, index: int, line: RequestLine) -> OutputLine:
        if not await self._attempts.begin_alone.remote(index):
            message = "the process that wrote this answer died, and died again when it wrote only this"
            error = {"code": WORKER_DIED, "message": message}
            return {"id": line.id, "custom_id": line.custom_id, "response": None, "error": error}
        answer = await answer_line(server, line)
        await self._attempts.end_alone.remote(index)
        return answer
