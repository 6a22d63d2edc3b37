"""A batch on Ray: the same answers, with one actor per device, on this machine or on an existing cluster.

Only the driver writes the journal and the output, as a batch in one process does, so each can continue a run of the other. If
an actor dies, another one takes its place, and its requests are answered again.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from skipstone.engines.native.threads import VARIABLE
from skipstone.serving.batch_files.answer_line import ModelThreadError, answer_line
from skipstone.serving.batch_files.batch import Answers, BatchSettings, NumberedLine, Progress, answer_lines, complete
from skipstone.serving.batch_files.journal import OutputLine
from skipstone.serving.batch_files.request_lines import RequestFile, RequestLine
from skipstone.serving.ray.cluster import NodeShare, connect, count_places, weight_bytes
from skipstone.serving.server import Server
from skipstone.utils.extras import installed

NEED = "--ray needs Ray"
MEMORY_PER_WEIGHTS = 2
"""Memory of an actor in sizes of its checkpoint: the weights while they are packed for the native engine."""
WORKER_DIED = "worker_died"
"""The error code of a request that has ended two actors, the second time alone."""


@dataclass(frozen=True)
class RayOptions:
    """Where a batch runs. address: of a cluster, None for a new one on this machine. actors: their number, None for one per
    device. cpus: of each. model: its name. may_use_gpu: whether an actor takes a GPU where there is one."""

    address: str | None = None
    actors: int | None = None
    cpus: int = 1
    model: str | None = None
    may_use_gpu: bool = True


def run(settings: BatchSettings, options: RayOptions, output: Path, requests: RequestFile, report: Progress) -> int:
    """As `batch.complete`. ImportError without Ray; ValueError if the cluster does not answer or has no room for an actor, and
    if an actor cannot load the model."""
    with _connected(options.address) as ray:
        actors, share = _place_actors(ray, options)
        resources = {"num_cpus": share.cpus, "num_gpus": share.gpus, "memory": share.memory or None}
        create = partial(ray.remote(**resources)(Worker).remote, settings, options.cpus)

        async def answer(lines: Iterable[NumberedLine]) -> AsyncGenerator[Answers, None]:
            pool = WorkerPool(create, actors)
            try:
                async with aclosing(answer_lines(pool.answer, lines, actors * settings.num_running, actors)) as pieces:
                    async for answers in pieces:
                        yield answers
            finally:
                for worker in pool.num_running:
                    ray.kill(worker)

        return complete(output, requests, settings.journal, report, answer)


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


def _place_actors(ray: Any, options: RayOptions) -> tuple[int, NodeShare]:
    """The number of actors, and the share of a machine that each gets. ValueError if there is no room."""
    nodes = ray.nodes()
    has_gpus = options.may_use_gpu and any(node["Resources"].get("GPU", 0) >= 1 for node in nodes if node["Alive"])
    share = NodeShare(options.cpus, 1.0 if has_gpus else 0.0, MEMORY_PER_WEIGHTS * weight_bytes(options.model))
    places = count_places(nodes, share)
    if not places:
        raise ValueError(f"an actor needs {share}, and no machine of the Ray cluster has as much")
    if (options.actors or 0) > places:
        raise ValueError(f"--actors {options.actors}: the Ray cluster has room for {places}, of {share} each")
    return options.actors or places, share


class WorkerPool:
    """Actors that answer. create: starts one. num_running: number of requests of every actor."""

    def __init__(self, create: Callable[[], Any], size: int) -> None:
        self._create, self._exceptions = create, installed("ray.exceptions", NEED, "ray")
        self.num_running: dict[Any, int] = {create(): 0 for _ in range(size)}
        self._loaded: set[Any] = set()

    async def answer(self, line: RequestLine) -> OutputLine:
        """The answer of the actor with the fewest requests. If it dies, another one takes its place, and the answer is an
        error. The exception of an actor that cannot load the model is raised; ValueError if it dies before it has loaded it."""
        worker = min(self.num_running, key=lambda one: self.num_running[one])
        self.num_running[worker] += 1
        try:
            await worker.load.remote()
            self._loaded.add(worker)
            return await worker.answer.remote(line)
        except self._exceptions.RayActorError as error:
            if worker not in self._loaded:
                raise ValueError(f"an actor could not begin: {error}") from None
            if self.num_running.pop(worker, None) is not None:
                self.num_running[self._create()] = 0
            message = "the process that wrote this answer died, and died again when it wrote only this"
            return line.output(None, {"code": WORKER_DIED, "message": message})
        except self._exceptions.RayTaskError as error:
            raise error.cause from None
        finally:
            if worker in self.num_running:
                self.num_running[worker] -= 1


class Worker:
    """A model in an actor. Call `load` before `answer`."""

    def __init__(self, settings: BatchSettings, cpus: int) -> None:
        os.environ.setdefault(VARIABLE, str(cpus))
        self._server = Server(settings.load, settings.server)
        self._loading: asyncio.Task[None] | None = None

    async def load(self) -> None:
        """Load the model, at the first call."""
        if self._loading is None:
            self._loading = asyncio.create_task(self._server.load())
        await self._loading

    async def answer(self, line: RequestLine) -> OutputLine:
        """The line of the output."""
        try:
            return await answer_line(self._server, line)
        except ModelThreadError:
            os.kill(os.getpid(), signal.SIGKILL)  # another actor takes its place
            raise
