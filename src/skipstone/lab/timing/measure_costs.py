"""Measures the costs of decoding, once per model, engine, dtype, number of threads and batch size, and stores them.

The calls that decoding makes are timed: steps of the loop, drafts, scoring and verification. No timed call commits a token, so
all find the same context. All entries take turns, round after round. The shortest time of an entry counts, because other
programs only add time, once a second one has confirmed it. `EntryTimes` has the rule for a machine that is always busy.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedModel

from skipstone.decoding.draft import Draft
from skipstone.decoding.drafter import Drafter
from skipstone.decoding.loop import NOTHING, DecodingLoop
from skipstone.decoding.request import Request
from skipstone.decoding.session import Session
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.native import library
from skipstone.lab.timing import machine
from skipstone.lab.timing.cost_tables import BatchCosts, CostCurve, CostTables
from skipstone.lab.timing.measure import synchronise
from skipstone.methods.autoregressive import Autoregressive
from skipstone.methods.drafting.draft_model import DraftModel, DraftModelDrafter, DraftModelMethod
from skipstone.methods.drafting.lookups import LookupDrafter, RowDraft
from skipstone.methods.drafting.sublayer_skipping import SkippingDrafter
from skipstone.methods.layerskip import LayerSkip, LayerSkipDrafter
from skipstone.methods.swift.swift import Swift
from skipstone.models.passes import SkipSet
from skipstone.utils.cached_property import cached_property
from skipstone.utils.files import cache_place, digest, write_cache
from skipstone.utils.processor_watch import ProcessorWatch, was_busy
from skipstone.utils.settings_files import SettingsPart, read_json

VERSION = 2  # of the file
BATCHES = (1, 8)  # default batch sizes
CONTEXT = 128  # tokens of context of all measurements, fewer if the model has fewer positions
FAR_CONTEXT = 512  # tokens of context for the slope of the context, fewer likewise
MAX_TOKENS = 64  # tokens of all rows of a pass, at most
TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # tokens of a row in the timed passes
FEW_TOKENS = (1, 4, 8, 16, 64)  # those of the passes through layers only, and of all passes if steps are long
SLOPES = (1, 8)  # those that are also timed with FAR_CONTEXT tokens
EXITS = (1 / 4, 1 / 2, 3 / 4)  # exit layers between the first and the last but one, as shares of the depth
DRAFTS = (1, 3)  # draft tokens of two chains; their difference is the cost of draft steps
MAX_SECONDS = 5.0  # for one batch size (only a busy machine needs them); one round is made in any case
MIN_ROUNDS, MAX_ROUNDS = 3, 40
MAX_SPREAD = 0.25  # of the times of an idle machine
MIN_PROCESSOR_SHARE = 0.9  # processor time over clock time on an idle machine
MAX_DIFFERENCE = 0.05  # share by which the two shortest times of an entry may differ
MAX_TIMES_IN_A_ROW = 3  # of an entry, per turn
TURN_SECONDS = 0.004  # after which an entry is not timed again in the same turn
PLAIN_STEPS = 48  # of a text of plain decoding, before it starts again
LONG_STEP_SECONDS = 0.05  # time of a plain step above which fewer entries are timed

TimedCall = Callable[[], float]
Entry = tuple[str, int]
"""(what is timed, of how many tokens, layers or drafts)."""


class CostTimer:
    """The timed calls of a batch with `context` tokens in every row. Only the first of these was run, because the values of
    keys and values do not change the time.
    """

    def __init__(self, runner: ModelRunner, batch: int) -> None:
        """ValueError for a model with too few positions, or with recurrent states."""
        if runner.family.recurrent:
            raise ValueError("costs are measured behind tokens that were never run, which a model with recurrent states needs")
        self.runner, self.batch = runner, batch
        self.widest = max(1, MAX_TOKENS // batch)
        spare = self.widest + 1 + PLAIN_STEPS
        self.context = min(CONTEXT, (runner.max_positions - spare) // 2)
        self.far = min(FAR_CONTEXT, runner.max_positions - spare)
        if self.context < 1:
            raise ValueError(f"the model has {runner.max_positions} positions, too few to measure what decoding costs")
        self.room = self.far + spare
        self.plain = DecodingLoop(Autoregressive().start(runner, batch, self.room))
        max_drafts = max(DRAFTS)
        self.lookups = self._behind(LookupDrafter(batch))
        self.exits = self._behind(LayerSkipDrafter(LayerSkip(1, max_drafts), runner, batch))
        skipping = partial(SkippingDrafter, runner, batch, max_drafts=max_drafts, threshold=None)
        self.chains, self.ranked_chains = (self._behind(skipping(ranks=ranks)) for ranks in (1, max(Swift.candidate_counts)))

    def _behind(self, drafter: Drafter) -> Session:
        """A session with a context that was never run."""
        session = self.session(drafter, torch.zeros(1, dtype=torch.int64, device="cpu"), self.room)
        session.store.length = [self.context] * self.batch
        return session

    def session(self, drafter: Drafter, prompt: Tensor, room: int) -> Session:
        """A session after the prefill of a prompt [T] in every row. room: its capacity in tokens."""
        session = Session(self.runner, self.batch, room, drafter)
        for row in range(self.batch):
            session.admit(row, Request(prompt, 1))
        while session.prefilling:
            drafter.prefill_tokens(len(prompt))
            session.prefill(len(prompt))
        return session

    def entries(self, sparse: bool) -> dict[Entry, TimedCall]:
        """All timed calls. sparse: fewer of them."""
        depth, shares = self.runner.depth, () if sparse else EXITS
        tokens = sorted({n for n in (FEW_TOKENS if sparse else TOKENS) if n <= self.widest} | {self.widest})
        exits = sorted({1, *(round(depth * share) for share in shares), depth - 1} & {*range(1, depth)})
        middle = frozenset(range(1, depth - 1))
        skips = {"attention": SkipSet(middle), "mlp": SkipSet(mlp=middle), "layer": SkipSet(middle, middle)} if middle else {}
        chains = [(f"exit {layer}", self.exits, {"exit_layer": layer}) for layer in exits]
        chains += [("ranked", self.ranked_chains, {"skip": SkipSet()}), (f"exit {depth}", self.chains, {"skip": SkipSet()})]
        chains += [(name, self.chains, {"skip": skip}) for name, skip in skips.items()]
        found: dict[Entry, TimedCall] = {("plain", 1): self._plain_step}
        found["propose", 1] = lambda: self._clock(lambda: self._given(1))
        found |= {("score", n): partial(self._scored, n, self.context) for n in tokens}
        found |= {("layers", n): partial(self._layers, n) for n in tokens if n in FEW_TOKENS or n == self.widest}
        found |= {("far", n): partial(self._scored, n, self.far) for n in SLOPES if n in tokens and self.far > self.context}
        found |= {(name, k): partial(self.drafted, session, k, **how) for k in DRAFTS for name, session, how in chains}
        return found

    # ---------------------------------------------------------------------------------------------- timed calls

    def _clock(self, work: Callable[[], Any]) -> float:
        synchronise(self.runner.device)
        began = time.perf_counter()
        work()
        synchronise(self.runner.device)
        return time.perf_counter() - began

    def _plain_step(self) -> float:
        """One step of the loop."""
        if not self.plain.busy:  # at first, and after the end of the texts
            for row in range(self.batch):
                self.plain.admit(row, Request(torch.zeros(1, dtype=torch.int64, device="cpu"), 2 + PLAIN_STEPS))
            while self.plain.session.prefilling:
                self.plain.step()
        self.plain.session.store.length = [self.context] * self.batch
        return self._clock(self.plain.step)

    def _given(self, tokens: int) -> Draft:
        """A draft of so many tokens less one: scoring adds the last committed token."""
        drafter: Any = self.lookups.drafter
        known = [place % self.runner.embeddings for place in range(1, tokens)]
        return drafter.as_draft([RowDraft().chain(known) for _ in range(self.batch)])

    def _scored(self, tokens: int, context: int) -> float:
        session = self.lookups
        session.store.length = [context] * self.batch

        def work() -> None:
            draft = self._given(tokens)
            session.verify(draft, session.score(draft)).tolist(draft)

        return self._clock(work)

    def _layers(self, tokens: int) -> float:
        self.lookups.store.length = [self.context] * self.batch
        forward = self._given(tokens).forward
        assert forward is not None
        return self._clock(lambda: forward.advance(self.runner.depth))

    def drafted(self, session: Session, drafts: int, **settings: Any) -> float:
        """The time of a chain. Nothing of it is committed. A pass through all layers runs first, as in decoding, so the
        processor's caches do not hold the layers that draft. settings: attributes of the drafter."""
        vars(session.drafter).update(settings)
        self._scored(1, self.context)
        seconds = self._clock(lambda: session.drafter.propose_draft([drafts] * self.batch))
        session.commit(None, [NOTHING] * self.batch)
        return seconds


@dataclass
class EntryTimes:
    """All times of every entry, in seconds, without the first ones.

    The cost of an entry is its shortest time, which nothing has disturbed. A machine that is always busy disturbs every call
    that is longer than a time slice. Then the cost is the mean, so that all costs are too long by about the same factor.
    """

    all: dict[Entry, list[float]]
    processor_share: float = 1.0  # processor time of the process over clock time; above 1 with threads

    def spread(self) -> float:
        """The median over all entries of (median / minimum - 1)."""
        return median(median(times) / min(times) - 1 for times in self.all.values())

    @cached_property
    def busy(self) -> bool:
        """Whether the machine ran other programs."""
        return self.spread() > MAX_SPREAD or self.processor_share < MIN_PROCESSOR_SHARE

    def cost(self, name: str, number: int) -> float:
        times = self.all[name, number]
        return fmean(times) if self.busy else min(times)

    def by_number(self, name: str) -> dict[int, float]:
        """Number -> cost, of all entries of a name."""
        return {number: self.cost(name, number) for one, number in self.all if one == name}

    def step(self, name: str) -> float:
        """The cost of a draft step: the difference of a long and a short chain per step. At least half of the long chain's
        mean, because a stall may have made the short one too long."""
        short, long = (self.cost(name, drafts) for drafts in DRAFTS)
        return max((long - short) / (DRAFTS[1] - DRAFTS[0]), long / DRAFTS[1] / 2)


def _take_turns(entries: Mapping[Entry, TimedCall], max_seconds: float) -> EntryTimes:
    """Times entries round after round, starting each round with another entry: all of them MIN_ROUNDS times. After
    that, it times an entry again only if its two shortest times differ."""
    times: dict[Entry, list[float]] = {entry: [] for entry in entries}
    began, processor = time.perf_counter(), time.process_time()
    for number in range(MAX_ROUNDS):
        left = [entry for entry, found in times.items() if number < MIN_ROUNDS or not _confirmed(found)]
        if not left or (number and time.perf_counter() - began > max_seconds):
            break
        first = number * len(left) // 3 % len(left)
        for entry in left[first:] + left[:first]:
            times[entry] += _turn(entries[entry])
    share = (time.process_time() - processor) / (time.perf_counter() - began)
    return EntryTimes({entry: found[1:] or found for entry, found in times.items()}, share)


def _confirmed(times: Sequence[float]) -> bool:
    """Whether the two shortest times agree: two stalls are hardly ever equally long."""
    shortest, second = sorted(times)[:2]
    return second <= (1 + MAX_DIFFERENCE) * shortest


def _turn(timed: TimedCall) -> list[float]:
    """Some times in a row; the first may find cold caches."""
    found, end = [timed()], time.perf_counter() + TURN_SECONDS
    while len(found) < MAX_TIMES_IN_A_ROW and time.perf_counter() < end:
        found.append(timed())
    return found


@torch.inference_mode()
def measure(runner: ModelRunner, batch: int, max_seconds: float = MAX_SECONDS) -> BatchCosts:
    """The costs of one batch size. ValueError for a model that has too few positions or only one layer."""
    if runner.depth < 2:
        raise ValueError("costs are measured of models with at least 2 layers")
    bench = CostTimer(runner, batch)
    sparse = min(bench.entries(True)["plain", 1]() for _ in range(MIN_ROUNDS)) > LONG_STEP_SECONDS
    with ProcessorWatch() as watch:
        times = _take_turns(bench.entries(sparse), 0.0 if sparse else max_seconds)
    depth, middle = runner.depth, max(runner.depth - 2, 1)
    scoring = CostCurve.fitted(times.by_number("score"))
    layers = CostCurve.fitted({n: min(own, scoring(n)) for n, own in times.by_number("layers").items()})
    exits = {int(name.removeprefix("exit ")): times.step(name) for name, _ in times.all if name.startswith("exit ")}
    plain, whole = times.cost("plain", 1), exits[depth]
    starts = [times.cost(f"exit {layer}", DRAFTS[0]) - DRAFTS[0] * exits[layer] for layer in exits]
    skips = ("attention", "mlp", "layer")
    attention, mlp, both = (max(whole - times.step(kind), 0.0) / middle if depth > 2 else 0.0 for kind in skips)
    distance = max(bench.far - bench.context, 1)
    slopes = {n: max(own - times.cost("score", n), 0.0) / distance for n, own in times.by_number("far").items()}
    return BatchCosts(
        batch=batch,
        context=bench.context,
        plain=plain,
        fixed=max(plain - scoring(1), 0.0),
        chain=max(median(starts) - times.cost("propose", 1), 0.0),
        scoring=scoring,
        layers=layers,
        exits=CostCurve.fitted(exits),
        attention=attention,
        mlp=mlp,
        layer=max(both - attention - mlp, 0.0),
        ranked=max(times.step("ranked") - whole, 0.0),
        context_slope=CostCurve.fitted(slopes or {1: 0.0}),
        spread=times.spread(),
        busy=times.busy or was_busy(watch.waited_share),
    )


@torch.inference_mode()
def measure_draft_model(runner: ModelRunner, draft_model: DraftModel, batch: int) -> float:
    """Seconds of a draft step of a draft model, for all rows of a batch."""
    bench = CostTimer(runner, batch)
    room = min(bench.room, draft_model.max_positions)
    drafter = DraftModelDrafter(DraftModelMethod(), runner, draft_model, batch, room, max(DRAFTS), None)
    prompt = torch.arange(8, dtype=torch.int64, device="cpu") % draft_model.embeddings
    session = bench.session(drafter, prompt, room)
    for row in range(batch):  # a token that the draft model has not read yet
        drafter.text[row].append(0)
    return _take_turns({("model", k): partial(bench.drafted, session, k) for k in DRAFTS}, MAX_SECONDS / 4).step("model")


# -------------------------------------------------------------------------------------------------------- the file


class StoredCosts(SettingsPart):
    """Costs, and their origin: the content of their file.

    key: see `key_of`. measured: the date, in UTC. seconds: time of measuring. path: the file; None if it cannot be written.
    fresh: whether they were measured now.
    """

    version: int = VERSION
    key: dict[str, Any]
    measured: str
    seconds: float
    costs: CostTables
    path: Path | None = Field(default=None, exclude=True)
    fresh: bool = Field(default=False, exclude=True)


def key_of(runner: ModelRunner) -> dict[str, Any]:
    """Everything that costs depend on."""
    engine = runner.engine
    native = engine.name == "native"
    device = runner.device
    return {
        "model": runner.fingerprint,
        "dtype": str(runner.model.dtype),
        "attention": str(getattr(runner.config, "_attn_implementation", None)),
        "engine": engine.name,
        "detail": engine.detail,
        "library": library.load().sk_source_hash().decode() if native else None,
        "threads": [torch.get_num_threads(), getattr(engine, "threads", None)],
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "cpu": machine.cpu(),
        "cores": os.cpu_count(),
        "packages": machine.versions(("skipstone", "torch", "transformers")),
    }


def costs_of(
    model: PreTrainedModel | ModelRunner,
    batches: Sequence[int] = BATCHES,
    draft_models: Sequence[DraftModel] = (),
    again: bool = False,
) -> StoredCosts:
    """The costs of a model on its engine, from its file; what the file lacks is measured and added.

    again: ignore the file. A file that is damaged, of another version or of another key is ignored, too. ValueError for a model
    with too few positions or layers.
    """
    runner = model if isinstance(model, ModelRunner) else ModelRunner(model)
    key = key_of(runner)
    path, old = cache_place("costs", f"{digest(key)}.json"), None
    if path is not None and not again:
        with suppress(OSError, ValueError):
            old = read_json(path, StoredCosts, VERSION, "costs").model_copy(update={"path": path})
            old = old if old.key == key else None
    tables = {table.batch: table for table in old.costs.batches} if old is not None else {}
    began, fresh = time.perf_counter(), False
    for batch in batches:
        if batch not in tables:
            tables[batch], fresh = measure(runner, batch), True
        for one in draft_models:
            if (name := one.fingerprint) not in tables[batch].draft_models:
                with ProcessorWatch() as watch:
                    seconds = measure_draft_model(runner, one, batch)
                known = {**tables[batch].draft_models, name: seconds}
                is_busy = tables[batch].busy or was_busy(watch.waited_share)
                tables[batch], fresh = replace(tables[batch], draft_models=known, busy=is_busy), True
    if old is not None and not fresh:
        return old
    costs = CostTables(tuple(tables[batch] for batch in sorted(tables)))
    taken = time.perf_counter() - began
    now = datetime.now(UTC).isoformat(timespec="seconds")
    kept = StoredCosts(key=key, measured=now, seconds=taken, costs=costs, path=path, fresh=True)
    return kept if write_cache(path, kept.model_dump()) else kept.model_copy(update={"path": None})
