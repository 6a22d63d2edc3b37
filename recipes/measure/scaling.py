"""Simulates 1 to 1,000 replicas behind a router, with measured times of one replica.

    skipstone serve --method autoregressive --port 8000                          # one replica, in another terminal
    python recipes/measure/scaling.py --measure http://127.0.0.1:8000 --out runs/service.json
    python recipes/measure/scaling.py --drive http://127.0.0.1:8000 --service runs/service.json --replicas 2 --load 0.5
    python recipes/measure/scaling.py [--service runs/service.json] [--replicas 1 2 8 64 256 1000] [--load 0.5 0.7]

Conversations begin at random times (a Poisson process). A turn is a text of the user, an answer and a pause. Its prompt is the
conversation so far. A replica decodes one request per row at a time; more requests make each one slower. It keeps the keys and
values of the latest conversations, one per row. A turn of such a conversation reads only the new tokens.

`affine` sends a turn to the replica of its conversation, `least loaded` to the less loaded of two. If the conversation's
replica has no free row, `affine` does the same as `least loaded`. If no replica has a free row, requests wait in order.

--drive plays the same conversations to a running server for comparison; for `least loaded` every request has a new session.

--load is the share of the time that replicas would be busy if they kept nothing. docs/lab/scaling.md has the assumptions.
"""

import argparse
import asyncio
import heapq
import json
import random
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

import httpx

WARM = 3.0
"""Mean lengths of a conversation before requests count. Until then replicas keep too little."""
CHOICES = 2
"""Replicas that the router compares, as in `skipstone serve --ray`."""
MAX_TURNS = 16
"""Maximum per conversation; more would not fit into a small model's context."""
LONG, SHORT = 1200, 64
"""Tokens of the prompts that measure reading."""
IDS = 200, 500
"""Range of the ids of random prompts, which any vocabulary has."""
ANSWER = 64
"""Tokens of the answers that measure writing."""


@dataclass(frozen=True)
class Service:
    """Measured speed of one replica. rates: number of concurrent texts -> tokens per second of all of them together.
    reading: prompt tokens per second. hop: seconds that gateway and router add to the first token."""

    rates: dict[int, float]
    reading: float
    hop: float = 0.0

    def speed(self, rows: int) -> float:
        """Speed of one of `rows` texts relative to a single text, interpolated linearly between measured numbers."""
        known = sorted(self.rates)
        below = max((one for one in known if one <= rows), default=known[0])
        above = min((one for one in known if one >= rows), default=known[-1])
        share = 0.0 if above == below else (rows - below) / (above - below)
        rate = self.rates[below] + share * (self.rates[above] - self.rates[below])
        return rate / rows / self.rates[known[0]] * known[0]

    @property
    def writing(self) -> float:
        """Tokens per second of a single text."""
        fewest = min(self.rates)
        return self.rates[fewest] / fewest


@dataclass(frozen=True)
class Workload:
    """The conversations of all clients.

    rate: new conversations per second. turns: mean number of turns, geometrically distributed up to MAX_TURNS. first, more:
    tokens of the user's first and of each further text. written: mean tokens of an answer, exponentially distributed. pause:
    mean seconds between an answer and the next turn, likewise.
    """

    rate: float
    turns: float = 5.0
    first: float = 200.0
    more: float = 30.0
    written: float = 60.0
    pause: float = 10.0


@dataclass
class RequestStatistics:
    """Statistics of the counted requests.

    waits, firsts, totals: seconds until a request has a row, its first token and its last token. prompt: prompt tokens. kept:
    prompt tokens with kept keys and values. busy: mean share of busy rows.
    """

    waits: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    totals: list[float] = field(default_factory=list)
    prompt: float = 0.0
    kept: float = 0.0
    busy: float = 0.0
    requests_per_second: float = 0.0


@dataclass(frozen=True)
class Fleet:
    """The replicas. rows: per replica. affine: send turns to the replica of their conversation."""

    replicas: int
    rows: int = 8
    affine: bool = False


@dataclass(eq=False)
class Conversation:
    """home: its replica. tokens: so far."""

    home: int
    remaining_turns: int
    tokens: float


@dataclass(eq=False)
class Request:
    """A turn. prompt, written: tokens. arrival: time. is_counted: it is part of the statistics."""

    conversation: Conversation
    prompt: float
    written: float
    arrival: float
    is_counted: bool


class Replica:
    """Rows that share a processor.

    Its clock runs at the speed of a row. So the end of a text has a fixed time on this clock, whatever else begins or ends.
    """

    def __init__(self, number: int, rows: int, service: Service) -> None:
        self.number, self.rows, self.service, self.busy_rows = number, rows, service, 0
        self.clock = self.updated_at = self.row_seconds = 0.0
        self.work_queue: list[tuple[float, int, bool, Request]] = []  # (time on the clock, order, whether a text ends, request)
        self.kept: OrderedDict[Conversation, float] = OrderedDict()  # least recently used first
        self.plan_number = 0

    def advance_clock(self, now: float) -> None:
        """Advance the clock to the time `now`."""
        if self.busy_rows:
            self.clock += (now - self.updated_at) * self.service.speed(self.busy_rows)
            self.row_seconds += (now - self.updated_at) * self.busy_rows
        self.updated_at = now

    def keep(self, conversation: Conversation, tokens: float) -> None:
        """Keep the keys and values of a conversation and drop the least recently used ones."""
        self.kept[conversation] = tokens
        self.kept.move_to_end(conversation)
        while len(self.kept) > self.rows:
            self.kept.popitem(last=False)


class Simulation:
    """A fleet, a router and clients. requests: number of counted requests, the first ones after `warm` seconds."""

    def __init__(self, fleet: Fleet, service: Service, load: Workload, requests: int, warm: float, seed: int = 0) -> None:
        self.fleet, self.service, self.load, self.requests, self.warm = fleet, service, load, requests, warm
        self.draw = random.Random(seed)
        self.replicas = [Replica(number, fleet.rows, service) for number in range(fleet.replicas)]
        self.free = list(range(fleet.replicas))  # replicas with a free row, in any order
        self.free_index = {number: number for number in range(fleet.replicas)}  # replica -> its index in `free`
        self.waiting: deque[Request] = deque()
        self.events: list[tuple[float, int, Any]] = []
        self.order = self.counted = 0
        self.now = self.began = self.row_seconds_before = 0.0
        self.seen = RequestStatistics()

    def run(self) -> RequestStatistics:
        """Run until all counted requests have their answers. Further requests arrive until then."""
        self._schedule(self._sample(1 / self.load.rate), None)
        while len(self.seen.totals) < self.requests:
            self.now, _, event = heapq.heappop(self.events)
            if isinstance(event, tuple):
                self._finish_work(*event)
            else:
                self._send_request(event)
        return self.seen

    # ------------------------------------------------------------------------------------------------------ clients

    def _schedule(self, when: float, event: Any) -> None:
        self.order += 1
        heapq.heappush(self.events, (when, self.order, event))

    def _sample(self, average: float) -> float:
        return self.draw.expovariate(1 / average) if average else 0.0

    def _send_request(self, conversation: Conversation | None) -> None:
        """Send the next turn of a conversation; None begins a new one."""
        if conversation is None:
            self._schedule(self.now + self._sample(1 / self.load.rate), None)
            turns = turns_of(self.draw, self.load)
            conversation = Conversation(self.draw.randrange(len(self.replicas)), turns, self.load.first)
        else:
            conversation.tokens += self.load.more
        request = Request(conversation, conversation.tokens, self._sample(self.load.written), self.now, self._is_counted())
        number = self._choose_replica(conversation)
        if number is None:
            self.waiting.append(request)
        else:
            self._begin(request, self.replicas[number])

    def _is_counted(self) -> bool:
        """Whether the request that has just arrived is counted."""
        if self.now < self.warm or self.counted == self.requests:
            return False
        if not self.counted:
            self.began, self.row_seconds_before = self.now, self._row_seconds()
        self.counted += 1
        if self.counted == self.requests:
            took = self.now - self.began
            self.seen.busy = (self._row_seconds() - self.row_seconds_before) / took / len(self.replicas) / self.fleet.rows
            self.seen.requests_per_second = self.requests / took
        return True

    def _row_seconds(self) -> float:
        """Busy seconds of all rows so far."""
        return sum(one.row_seconds + (self.now - one.updated_at) * one.busy_rows for one in self.replicas)

    # ------------------------------------------------------------------------------------------------------- router

    def _choose_replica(self, conversation: Conversation) -> int | None:
        """A replica with a free row, or None."""
        if not self.free:
            return None
        if self.fleet.affine and conversation.home in self.free_index:
            return conversation.home
        candidates = [self.free[self.draw.randrange(len(self.free))] for _ in range(CHOICES)]
        return min(candidates, key=lambda number: self.replicas[number].busy_rows)

    def _begin(self, request: Request, replica: Replica) -> None:
        replica.advance_clock(self.now)
        replica.busy_rows += 1
        if replica.busy_rows == replica.rows:
            last, place = self.free.pop(), self.free_index.pop(replica.number)
            if last != replica.number:
                self.free[place], self.free_index[last] = last, place
        kept = min(replica.kept.get(request.conversation, 0.0), request.prompt)
        replica.keep(request.conversation, request.prompt)
        if request.is_counted:
            self.seen.waits.append(self.now - request.arrival)
            self.seen.prompt += request.prompt
            self.seen.kept += kept
        self._start_work(replica, (request.prompt - kept) / self.service.reading, False, request)

    # ----------------------------------------------------------------------------------------------------- replicas

    def _start_work(self, replica: Replica, work: float, ended: bool, request: Request) -> None:
        """Start reading a prompt or writing a text. work: its seconds if no other text is decoded."""
        self.order += 1
        heapq.heappush(replica.work_queue, (replica.clock + work, self.order, ended, request))
        self._plan(replica)

    def _plan(self, replica: Replica) -> None:
        """Schedule the replica's next event. Its earlier plan becomes void."""
        replica.plan_number += 1
        if replica.work_queue:
            left = (replica.work_queue[0][0] - replica.clock) / self.service.speed(replica.busy_rows)
            self._schedule(self.now + max(left, 0.0), (replica, replica.plan_number))

    def _finish_work(self, replica: Replica, plan_number: int) -> None:
        """Finish reading a prompt or writing a text."""
        if plan_number != replica.plan_number:
            return
        replica.advance_clock(self.now)
        replica.clock, _, ended, request = heapq.heappop(replica.work_queue)  # the exact time, without rounding errors
        if ended:
            self._end(request, replica)
            self._plan(replica)
            return
        if request.is_counted:
            self.seen.firsts.append(self.now - request.arrival + self.service.hop)
        self._start_work(replica, request.written / self.service.writing, True, request)

    def _end(self, request: Request, replica: Replica) -> None:
        conversation = request.conversation
        if request.is_counted:
            self.seen.totals.append(self.now - request.arrival + self.service.hop)
        replica.busy_rows -= 1
        if replica.number not in self.free_index:
            self.free_index[replica.number] = len(self.free)
            self.free.append(replica.number)
        conversation.tokens = request.prompt + request.written
        if conversation in replica.kept:
            replica.keep(conversation, conversation.tokens)
        conversation.remaining_turns -= 1
        if conversation.remaining_turns:
            self._schedule(self.now + self._sample(self.load.pause), conversation)
        if self.waiting:
            self._begin(self.waiting.popleft(), replica)


def turns_of(draw: random.Random, load: Workload) -> int:
    """Draw the number of turns of a new conversation."""
    turns = 1
    while turns < MAX_TURNS and draw.random() > 1 / load.turns:
        turns += 1
    return turns


def rate_for(load: float, replicas: int, rows: int, service: Service, work: Workload) -> float:
    """New conversations per second that keep the replicas busy for a share `load` of the time, if no prompt is reused."""
    comes = [(1 - 1 / work.turns) ** turn for turn in range(MAX_TURNS)]  # the probability that a conversation has this turn
    prompts = sum(share * (work.first + turn * (work.more + work.written)) for turn, share in enumerate(comes))
    alone = prompts / service.reading + sum(comes) * work.written / service.writing
    return load * replicas * rows * service.speed(rows) / alone


# ------------------------------------------------------------------------------------------------------------- measuring


async def _stream(client: httpx.AsyncClient, ids: list[int], tokens: int, more: dict[str, Any]) -> tuple[float, float]:
    """(seconds to the first token, seconds per further token)."""
    body = {"prompt": ids, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True, **more}
    began, arrivals = time.perf_counter(), list[float]()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                arrivals.append(time.perf_counter())
    return arrivals[0] - began, (arrivals[-1] - arrivals[0]) / max(1, tokens - 1)


async def measure_service(url: str, numbers: Sequence[int], more: dict[str, Any], times: int) -> Service:
    """Measure an idle server at a URL. numbers: of concurrent texts."""
    draw = random.Random(0)

    def ids(count: int) -> list[int]:
        return [draw.randrange(*IDS) for _ in range(count)]

    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        await _stream(client, ids(SHORT), ANSWER, more)
        reading = {}
        for count in (SHORT, LONG):
            reading[count] = median([(await _stream(client, ids(count), 2, more))[0] for _ in range(times)])
        rates = {}
        for number in numbers:
            each = []
            for _ in range(times):
                answers = [_stream(client, ids(16), ANSWER, more) for _ in range(number)]
                each += [second for _, second in await asyncio.gather(*answers)]
            rates[number] = number / median(each)
    return Service(rates, (LONG - SHORT) / (reading[LONG] - reading[SHORT]))


async def drive_server(url: str, load: Workload, seconds: float, affine: bool, seed: int) -> RequestStatistics:
    """Begin conversations with a server for `seconds`. Requests of the first fifth are not counted."""
    draw, seen, began = random.Random(seed), RequestStatistics(), time.perf_counter()
    conversations: list[asyncio.Task[None]] = []

    async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None)) as client:

        async def words(count: float) -> str:
            ids = [draw.randrange(*IDS) for _ in range(round(count))]
            return (await client.post("/detokenize", json={"tokens": ids})).json()["prompt"]

        async def converse(number: int, turns: int) -> None:
            prompt_text = await words(load.first)
            for turn in range(turns):
                tokens = max(1, round(draw.expovariate(1 / load.written)))
                headers = {"x-session-id": f"{number}" if affine else f"{number} {turn} {draw.random()}"}
                asked_at = time.perf_counter()
                body = {"prompt": prompt_text, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "speculative": "off"}
                first, text, usage = await _read_answer(client, body, headers)
                if asked_at - began > seconds / 5:
                    seen.firsts.append(first)
                    seen.totals.append(time.perf_counter() - asked_at)
                    seen.prompt += usage["prompt_tokens"]
                    seen.kept += usage["prompt_tokens_details"]["cached_tokens"]
                prompt_text += text + await words(load.more)
                await asyncio.sleep(draw.expovariate(1 / load.pause))

        while time.perf_counter() - began < seconds:
            await asyncio.sleep(draw.expovariate(load.rate))
            conversations.append(asyncio.create_task(converse(len(conversations), turns_of(draw, load))))
        for one in asyncio.as_completed(conversations, timeout=600):
            await one
    seen.requests_per_second = len(seen.firsts) / (0.8 * seconds)
    return seen


async def _read_answer(
    client: httpx.AsyncClient, body: dict[str, Any], headers: dict[str, str]
) -> tuple[float, str, dict[str, Any]]:
    """Stream an answer: (seconds to its first text, text, usage)."""
    began, first, text, usage = time.perf_counter(), 0.0, "", dict[str, Any]()
    more = {"stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/completions", json=body | more, headers=headers) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                first = first or time.perf_counter() - began
                text += "".join(choice["text"] for choice in chunk["choices"])
                usage = chunk.get("usage") or usage
    return first, text, usage


# --------------------------------------------------------------------------------------------------------------- the table


def table_cells(seen: RequestStatistics) -> list[str]:
    """The cells of a row of the table."""
    waited = sum(one > 0 for one in seen.waits) / max(1, len(seen.waits))
    first = f"{1000 * median(seen.firsts):.0f} ({1000 * quantiles(seen.firsts, n=20)[-1]:.0f})"
    shares = seen.kept / seen.prompt, seen.busy, waited
    return [f"{seen.requests_per_second:.1f}", *(f"{one:.1%}" for one in shares), first, f"{mean(seen.totals):.2f}"]


def read(path: Path) -> Service:
    """Read a file of --out."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    return Service({int(rows): rate for rows, rate in stored["rates"].items()}, stored["reading"], stored.get("hop", 0.0))


def flags() -> argparse.Namespace:
    """Flags of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", metavar="URL", help="measure a server, and simulate nothing")
    parser.add_argument("--speculative", help="of --measure: the method of the requests")
    parser.add_argument("--times", type=int, default=5, help="of --measure: repetitions of everything")
    parser.add_argument("--drive", metavar="URL", help="play conversations to a server of --replicas, and simulate nothing")
    parser.add_argument("--seconds", type=float, default=60.0, help="of --drive: time in which conversations begin")
    parser.add_argument("--out", type=Path, help="of --measure: file for the times")
    parser.add_argument("--service", type=Path, help="measured times; default: those of docs/lab/scaling.md")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 8, 64, 256, 1000])
    parser.add_argument("--load", type=float, nargs="+", default=[0.5, 0.7])
    parser.add_argument("--pause", type=float, default=2.0, help="seconds between an answer and the next turn, on average")
    parser.add_argument("--requests", type=int, default=20_000, help="counted requests per row of the table")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = flags()
    if args.measure:
        more = {"speculative": args.speculative} if args.speculative else {}
        numbers = [number for number in (1, 2, 4, 8, 16, 32) if number <= args.rows]
        document = json.dumps(asdict(asyncio.run(measure_service(args.measure, numbers, more, args.times))))
        print(document)
        if args.out:
            args.out.write_text(document + "\n", encoding="utf-8")
        return
    service = read(args.service) if args.service else MEASURED
    columns = ("replicas", "load", "routing", "requests a second", "kept", "rows busy", "waited")
    columns += ("to the first token, ms (p95)", "whole answer, s")
    print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    for load in args.load:
        for replicas in args.replicas:
            work = Workload(rate_for(load, replicas, args.rows, service, Workload(1.0)), pause=args.pause)
            warm = WARM * work.turns * (work.pause + work.written / service.writing)
            for affine in (False, True):
                if args.drive:
                    run = asyncio.run(drive_server(args.drive, work, args.seconds, affine, args.seed))
                else:
                    run = Simulation(Fleet(replicas, args.rows, affine), service, work, args.requests, warm, args.seed).run()
                row = [str(replicas), f"{load:g}", "affine" if affine else "least loaded", *table_cells(run)]
                print(f"| {' | '.join(row)} |", flush=True)


MEASURED = Service({1: 331.0, 2: 361.0, 4: 504.0, 8: 769.0}, 2124.0)
"""skipstone-nano, float32, plain decoding, one core: see docs/lab/scaling.md."""

if __name__ == "__main__":
    main()
