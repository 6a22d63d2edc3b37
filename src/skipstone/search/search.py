"""`skipstone search`: a layer set for a model, found before it is used, by measured tokens a second (Draft & Verify, arXiv
2309.08168, section 3.2, where it takes hours of Bayesian optimisation).

A proposal costs a draft-sized pass over each text, which tells its matchness; what the linear model of matchness expects to be
fastest is then decoded with, and the fastest set that was decoded with is kept. All trials stand in a file: a search that was
interrupted goes on with them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from skipstone.files import LineFile, read_lines
from skipstone.methods.autoregressive import Autoregressive
from skipstone.methods.self_speculative import SelfSpeculative
from skipstone.methods.shared.layer_sets import MOST_DRAFTS, Costs, LayerMask, Objective, Space
from skipstone.methods.swift.search import LinearThompson
from skipstone.models.fingerprint import fingerprint
from skipstone.models.kvstore import KVStore
from skipstone.models.layered import LayeredModel
from skipstone.models.passes import Pass
from skipstone.models.skipping import SkipSet
from skipstone.timing.machine import timings
from skipstone.timing.measure import Row, Skipstone, measure, neutral_defaults
from skipstone.timing.passes import measure_costs
from skipstone.timing.statistics import pooled

RATIOS = (0.3, 0.4, 0.45, 0.5)
"""Skip ratios that take turns where none is asked for."""
PER_DECODE = 12
"""Sets judged by matchness for each that is decoded with."""
REPEATS = 5
LUCK = 0.05
"""Standard error of a speed-up that was measured once."""


@dataclass(frozen=True)
class Trial:
    """One set. kind: "judged" by its matchness or "decoded" with. speed: tokens a second over those of plain decoding in turns
    with it, of what was decoded with. seconds: into the search, all of its runs together."""

    kind: str
    attention: list[int]
    mlp: list[int]
    matchness: float
    seconds: float
    speed: float | None = None
    acceptance: float | None = None


@dataclass
class Found:
    """The best set that was decoded with, and everything tried. curve: (seconds, best speed so far)."""

    trials: list[Trial]

    @property
    def best(self) -> Trial | None:
        """The set of the highest mean speed over its n decodings, LUCK / sqrt(n) taken off: not the luckiest one. Its last
        trial, with that mean."""
        sets: dict[tuple[Any, ...], list[Trial]] = {}
        for one in self.trials:
            if one.speed is not None:
                sets.setdefault((*one.attention, None, *one.mlp), []).append(one)
        means = [(fmean(one.speed or 0.0 for one in of), of) for of in sets.values()]
        best = max(means, key=lambda pair: pair[0] - LUCK / math.sqrt(len(pair[1])), default=None)
        return None if best is None else replace(best[1][-1], speed=best[0])

    @property
    def curve(self) -> list[tuple[float, float]]:
        ends = [number for number, one in enumerate(self.trials, 1) if one.speed is not None]
        found = [(self.trials[end - 1].seconds, Found(self.trials[:end]).best) for end in ends]
        return [(seconds, best.speed or 0.0) for seconds, best in found if best is not None]


@dataclass(frozen=True)
class Wish:
    """What is searched with. texts: prompts [T] int64. tokens: generated of each. drafts, threshold: of SelfSpeculative."""

    texts: Sequence[Tensor]
    tokens: int = 32
    ratios: Sequence[float] = RATIOS
    drafts: int = 12
    threshold: float | str | None = "adaptive"
    seed: int = 0


def search(
    model: PreTrainedModel, wish: Wish, budget: float, path: Path, done: Callable[[Found, float], None] = lambda *_: None
) -> Found:
    """Search for `budget` seconds, what the file of trials already spent included. done: called after every trial with all that
    was found and the seconds spent. ValueError for a model of too few layers, and for another search's file."""
    layered = LayeredModel(model)
    space = Space(layered.depth)
    for ratio in wish.ratios:
        LinearThompson(space, space.count(ratio))  # ValueError where nothing would be left out, or nothing left
    key = _key(model, wish)
    with neutral_defaults(model), LineFile(path) as file:
        known = _read(path, key)
        found = Found(known)
        begun = time.perf_counter() - (known[-1].seconds if known else 0.0)
        if known:
            file.go_on()
        else:
            file.begin(key, f"{path} is no file of trials: name another --out, or remove it")
        judged = [_Text(layered, model, text, wish.tokens) for text in wish.texts]
        objective = Objective(_costs(layered, len(wish.texts[0])), most=min(wish.drafts, MOST_DRAFTS))
        learner = LinearThompson(space, space.count(wish.ratios[0]), objective, wish.seed + len(known))
        for trial in known:
            learner.observe(space.from_skip_set(_set(trial)), trial.matchness, wish.tokens * len(judged))
        number = len(known)
        while (spent := time.perf_counter() - begun) < budget:
            learner.resize(space.count(wish.ratios[number % len(wish.ratios)]))
            decode = number % (PER_DECODE + 1) == PER_DECODE
            z = _most_promising(learner, space, wish) if decode else learner.propose()
            skip = space.to_skip_set(z)
            matchness = float(np.mean([text.matchness(skip) for text in judged]))
            learner.observe(z, matchness, wish.tokens * len(judged))
            speed, acceptance = _decoded(model, wish, skip) if decode else (None, None)
            kind = "decoded" if decode else "judged"
            spent = time.perf_counter() - begun
            found.trials.append(Trial(kind, sorted(skip.attention), sorted(skip.mlp), matchness, spent, speed, acceptance))
            file.add(asdict(found.trials[-1]))
            number += 1
            done(found, spent)
    return found


def _most_promising(learner: LinearThompson, space: Space, wish: Wish) -> LayerMask:
    """Of every size the best by what is known, and of those the one of most worth."""
    sets = []
    for ratio in wish.ratios:
        learner.resize(space.count(ratio))
        sets.append(learner.best())
    return max(sets, key=lambda z: learner.objective(learner.estimate(z) or 0.0, z))


def _set(trial: Trial) -> SkipSet:
    return SkipSet(frozenset(trial.attention), frozenset(trial.mlp))


def _key(model: PreTrainedModel, wish: Wish) -> dict[str, Any]:
    """What two searches must share to be one."""
    asked = {"tokens": wish.tokens, "drafts": wish.drafts, "threshold": wish.threshold, "ratios": list(wish.ratios)}
    place = {"dtype": str(model.dtype), "device": str(model.device), "threads": torch.get_num_threads()}
    return {"kind": "search", "model": fingerprint(model), **place, **asked, "texts": [text.tolist() for text in wish.texts]}


def _read(path: Path, key: dict[str, Any]) -> list[Trial]:
    """The trials of a file that was begun with the same key."""
    try:
        first, *rest = read_lines(path) or [key]
        trials = [Trial(**one) for one in rest]
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is no file of trials: {error}") from error
    if first != key:
        raise ValueError(f"{path} holds the trials of another search: name another --out, or remove it")
    return trials


class _Text:
    """A text that the model wrote, with its own keys and values."""

    @torch.inference_mode()
    def __init__(self, layered: LayeredModel, model: PreTrainedModel, prompt: Tensor, tokens: int) -> None:
        out = measure(model, Row("plain", Skipstone(Autoregressive())), prompt, 0, tokens, seed=0).tokens
        self.layered, self.begin = layered, len(prompt)
        self.ids = torch.cat([prompt, torch.tensor(out)])[None].to(layered.device)
        self.store = KVStore(1, layered.depth, self.ids.shape[1])
        self.store.reserve(self.ids.shape[1])
        places = torch.arange(self.begin - 1, device=layered.device)[None]
        if self.begin > 1:
            at = Pass(places, places, None, slice(0, 1), self.begin - 1, 0)
            layered.run(layered.embed(self.ids[:, : self.begin - 1], places), at, self.store, range(layered.depth))

    @torch.inference_mode()
    def matchness(self, skip: SkipSet) -> float:
        """Share of the written tokens that what is left would have chosen, after the target's keys and values of the prompt."""
        layered, first, last = self.layered, self.begin - 1, self.ids.shape[1] - 1
        places = torch.arange(first, last, device=layered.device)[None]
        at = Pass(places, places, None, slice(0, 1), last, first)
        hidden = layered.run(layered.embed(self.ids[:, first:last], places), at, self.store, range(layered.depth), skip)
        return (layered.logits(hidden).argmax(-1) == self.ids[:, first + 1 :]).double().mean().item()


@torch.inference_mode()
def _costs(layered: LayeredModel, length: int) -> Costs:
    """Of sublayers, by passes without any attention and without any MLP, and of scoring passes."""
    length = min(length, layered.max_positions - 14)
    timed = measure_costs(layered, length)
    middle = frozenset(range(1, layered.depth - 1))
    store = KVStore(1, layered.depth, length + 1)
    store.reserve(length + 1)
    places = torch.full((1, 1), length, device=layered.device)
    at, ids = Pass(places, places, None, slice(0, 1), length + 1, length), places % layered.embeddings

    def once(skip: SkipSet | None) -> float:
        def run() -> Any:
            return layered.run(layered.embed(ids, places), at, store, range(layered.depth), skip)

        return sorted(timings(run, layered.device, REPEATS))[REPEATS // 2]

    whole = once(None)
    units = [max(1 - once(skip) / whole, 0.0) / len(middle) for skip in (SkipSet(attention=middle), SkipSet(mlp=middle))]
    plain = sum(timed.layers) + timed.head
    share = sum(timed.layers) / plain
    known = {1: 1.0, **{drafts + 1: max((seconds + timed.head) / plain, 1.0) for drafts, seconds in timed.rows.items()}}
    scoring = np.interp(range(1, 27), sorted(known), [known[rows] for rows in sorted(known)])
    return Costs(units[0] * share, units[1] * share, tuple(scoring.tolist()))


def _decoded(model: PreTrainedModel, wish: Wish, skip: SkipSet) -> tuple[float, float]:
    """(speed over plain decoding, acceptance rate) with a set; both take turns text by text."""
    method = SelfSpeculative(
        tuple(sorted(skip.attention)),
        tuple(sorted(skip.mlp)),
        None,
        wish.drafts,
        wish.threshold,  # type: ignore[arg-type]
    )
    rows = [Row("plain", Skipstone(Autoregressive())), Row("set", Skipstone(method))]
    tokens: dict[str, list[float]] = {row.name: [] for row in rows}
    seconds: dict[str, list[float]] = {row.name: [] for row in rows}
    accepted = drafted = 0
    for index, text in enumerate(wish.texts):
        for row in rows if index % 2 else rows[::-1]:
            one = measure(model, row, text, index, wish.tokens, seed=index)
            tokens[row.name].append(float(len(one.tokens)))
            seconds[row.name].append(one.seconds)
            if row.name == "set" and one.stats is not None:
                accepted, drafted = accepted + one.stats.accepted, drafted + one.stats.draft_steps
    speed = pooled(tokens["set"], seconds["set"]) / pooled(tokens["plain"], seconds["plain"])
    return speed, accepted / max(drafted, 1)
