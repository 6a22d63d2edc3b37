"""A batch on Ray Data: the same answers, by an actor a device, on this machine or on a cluster that is there.

The driver alone writes: it keeps the journal and the output, as a batch in one process does, so that either goes on with what
the other has begun. An actor that dies is started again, and the requests that it had are answered again.
"""

import asyncio
import json
import logging
import math
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from skipstone.assets import NANO
from skipstone.extras import installed
from skipstone.offline.answering import Died, answered
from skipstone.offline.batch import Chosen, Numbered, Tell, answers
from skipstone.offline.journal import Answer, Journal
from skipstone.offline.lines import Line, Lines, parsed
from skipstone.serving.server import Server

PATIENCE = 5.0
"""Seconds that a cluster has to answer."""
LINES_A_ROW = 4
"""Requests of a task for every row of an actor: so many are lost when it dies."""
TASKS = 2
"""Tasks that an actor works on at a time: the rows that one leaves at its end are the other's."""
OBJECT_STORE = 256 << 20
"""Bytes of shared memory of a cluster that is made here: it holds requests and answers, no weights."""
OVER_WEIGHTS = 2
"""Memory of an actor, in sizes of its checkpoint: the weights while they are packed for the native engine."""
DIED = "worker_died"
"""The code of an error: the actor died while it wrote this answer, and once more when it wrote it by itself."""
BEFORE_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_gcs_server_port_wait_time_s": "2",  # tries to reach a cluster
    "RAY_gcs_rpc_server_connect_timeout_s": "1",  # seconds of each
    "RAY_CLIENT_INITIAL_CONNECTION_TIMEOUT_S": "2",
    "RAY_CLIENT_MAX_CONNECTION_TIMEOUT_S": "3",
}
"""Environment variables that Ray reads when it is imported. It would wait for minutes."""
GIB = 1 << 30


@dataclass(frozen=True)
class Placing:
    """Where a batch runs. address: of a cluster, None for a new one on this machine. actors: how many, None for as many as
    there are devices. cpus: of each."""

    address: str | None = None
    actors: int | None = None
    cpus: int = 1

    @property
    def where(self) -> str:
        """For a sentence."""
        return "this machine" if self.address is None else f"the cluster at {self.address}"


def run(chosen: Chosen, placing: Placing, output: Path, lines: Lines, tell: Tell) -> int:
    """As `batch.run`. ImportError without Ray; ValueError where the cluster does not answer, or has no machine for an actor."""
    if chosen.name is not None and Path(chosen.name).exists():
        chosen = replace(chosen, name=str(Path(chosen.name).resolve()))
    with _connected(placing) as ray:
        actors, needs = _placed(ray, chosen, placing)
        with Journal(output, lines, chosen.about()) as journal:
            tell(journal.done, journal.failures)
            if missing := journal.missing:
                for several in _mapped(ray, chosen, actors, needs, [(index, lines.raw(index)) for index in missing]):
                    journal.add(*several)
                    tell(journal.done, journal.failures)
            journal.finish()
            return journal.failures


@contextmanager
def _connected(placing: Placing) -> Iterator[Any]:
    """Ray, connected; a connection that was there stays."""
    for name, value in BEFORE_RAY.items():
        os.environ.setdefault(name, value)
    ray = installed("ray", "--ray needs ray", "ray")
    installed("ray.data", "--ray needs Ray Data", "ray")
    if ray.is_initialized():
        yield ray
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if placing.address is None:
        here = {"include_dashboard": False, "object_store_memory": OBJECT_STORE, "_node_ip_address": "127.0.0.1"}
        ray.init(address="local", **here, **quiet)
    else:
        _expect_listener(placing.address)
        try:
            ray.init(address=placing.address, **quiet)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ValueError(f"no Ray cluster answers at {placing.address}: {_first_line(error)}") from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _expect_listener(address: str) -> None:
    """ValueError where nobody listens at an address; Ray itself would try for much longer."""
    parts = urlsplit(address if "://" in address else f"//{address}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port:
        raise ValueError(f"--address is HOST:PORT or ray://HOST:PORT, found {address!r}")
    try:
        socket.create_connection((host, port), timeout=PATIENCE).close()
    except OSError as error:
        raise ValueError(f"no Ray cluster answers at {address}: {_first_line(error)}") from None


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _placed(ray: Any, chosen: Chosen, placing: Placing) -> tuple[int, dict[str, float]]:
    """How many actors there are, and what each has of a machine. ValueError where there is no machine for one."""
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = chosen.device != "cpu" and any(one.get("GPU", 0) >= 1 for one in machines)
    needs = {"CPU": float(placing.cpus), "memory": _memory(chosen.name)} | ({"GPU": 1.0} if gpus else {})
    fitting = [min(int(one.get(name, 0) // amount) for name, amount in needs.items() if amount) for one in machines]
    said = f"{placing.cpus} CPUs and {needs['memory'] / GIB:.2f} GiB of memory"
    if not (most := sum(fitting)):
        found = "; ".join(f"{one.get('CPU', 0):g} CPUs and {one.get('memory', 0) / GIB:.2f} GiB" for one in machines)
        raise ValueError(f"an actor needs {said}, and no machine of {placing.where} has them: found {found or 'none'}")
    if (placing.actors or 0) > most:
        raise ValueError(f"--actors {placing.actors}: {placing.where} has room for {most}, of {said} each")
    return placing.actors or most, needs


def _memory(name: str | None) -> float:
    """Bytes of an actor, where the checkpoint lies here; 0, which is not checked, of a name on the hub."""
    place = NANO if name is None else Path(name)
    files = [place] if place.is_file() else place.glob("*.safetensors")
    return float(OVER_WEIGHTS * sum(file.stat().st_size for file in files))


def _mapped(
    ray: Any, chosen: Chosen, actors: int, needs: dict[str, float], missing: Sequence[tuple[int, bytes]]
) -> Iterator[list[tuple[int, Answer]]]:
    """Answers as they come."""
    data = ray.data
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
        fn_constructor_kwargs={"chosen": chosen, "cpus": int(needs["CPU"]), "tries": tries},
        compute=data.ActorPoolStrategy(size=actors, enable_true_multi_threading=True, **pool),
        num_cpus=needs["CPU"],
        num_gpus=needs.get("GPU"),
        memory=needs["memory"] or None,
    )
    for batch in found.iter_batches(batch_size=None, prefetch_batches=0):
        yield [(int(index), json.loads(answer)) for index, answer in zip(batch["index"], batch["answer"], strict=True)]


class Tries:
    """An actor that knows which requests were begun, as those who answer them may die. A task is known by its first request."""

    def __init__(self) -> None:
        self._begun: dict[int, int] = {}  # task -> how often it was begun
        self._alone: set[int] = set()  # requests that were answered by themselves, and may have ended an actor

    def begin(self, task: int) -> int:
        """How often a task was begun, this time included."""
        self._begun[task] = self._begun.get(task, 0) + 1
        return self._begun[task]

    def alone(self, index: int) -> bool:
        """Whether a request may be answered by itself: it was not begun so before without an end."""
        if index in self._alone:
            return False
        self._alone.add(index)
        return True

    def ended(self, index: int) -> None:
        """A request that was answered by itself has ended no actor."""
        self._alone.discard(index)


class Worker:
    """A model in an actor. `map_batches` calls it from several threads."""

    def __init__(self, chosen: Chosen, cpus: int, tries: Any) -> None:
        os.environ.setdefault("SKIPSTONE_THREADS", str(cpus))
        self._tries, self._loop, self._stack = tries, asyncio.new_event_loop(), AsyncExitStack()
        self._working, self._alone = asyncio.Semaphore(TASKS), asyncio.Lock()
        threading.Thread(target=self._loop.run_forever, name="skipstone-answers", daemon=True).start()
        self._server: Server = self._do(self._stack.enter_async_context(chosen.load().server()))

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        """batch: `index` and `line` of requests. Returns `index` and `answer`, JSON in a text."""
        lines = [(int(index), parsed(str(line).encode())) for index, line in zip(batch["index"], batch["line"], strict=True)]
        try:
            found = self._do(self._answered(lines))
        except Died:
            os.abort()  # Ray starts another actor, which begins anew
        told = [json.dumps(answer, ensure_ascii=False) for _, answer in found]
        return {"index": [index for index, _ in found], "answer": told}

    async def _answered(self, lines: list[Numbered]) -> list[tuple[int, Answer]]:
        """All at a time; one by one, and with nothing else beside, where an actor has died with them: so it is known which
        request ends one."""
        if await self._tries.begin.remote(lines[0][0]) == 1:
            async with self._working:
                return [one async for several in answers(self._server, lines) for one in several]
        async with self._alone, AsyncExitStack() as all_of_it:
            for _ in range(TASKS):
                await all_of_it.enter_async_context(self._working)
            return [(index, await self._one(index, line)) for index, line in lines]

    async def _one(self, index: int, line: Line) -> Answer:
        if not await self._tries.alone.remote(index):
            error = {"code": DIED, "message": "the process that wrote this answer died, and died again when it wrote only this"}
            return {"id": line.id, "custom_id": line.custom_id, "response": None, "error": error}
        found = await answered(self._server, line)
        await self._tries.ended.remote(index)
        return found
