"""`skipstone search`: searches offline for the layer set with the most tokens per second (Draft & Verify, arXiv 2309.08168,
section 3.2). All trials are in a file, so an interrupted search goes on. The result is the fastest set that was decoded with.

Two searches. linear_ts, ours: a proposal is judged by its matchness, in one pass over each text; the set that the linear model
of matchness expects to be fastest is then decoded with. bayesian, the paper's: every set that the Gaussian process of
`bayesian.py` proposes is decoded with, and its tokens per second are the objective.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from skipstone.decoding.stats import Stats
from skipstone.engines.host_transfer import on_device
from skipstone.engines.model_runner import ModelRunner
from skipstone.hf.generation_defaults import neutral_defaults
from skipstone.lab.search.bayesian import BayesianProposer, skipped_sublayers
from skipstone.lab.timing.measure import GenerationBackend, MethodBackend, measure, options_for, run_tokens, store_for
from skipstone.lab.timing.measure_costs import costs_of
from skipstone.methods.autoregressive import Autoregressive
from skipstone.methods.drafting.layer_sets import MAX_DRAFTS, LayerMask, LayerSetSpace, SearchObjective, SkipCosts
from skipstone.methods.self_speculative import SelfSpeculative
from skipstone.methods.swift.layer_set_search import LinearThompson
from skipstone.models.fingerprint import fingerprint
from skipstone.models.passes import SkipSet
from skipstone.utils.cached_property import cached_property
from skipstone.utils.files import LineFile, read_lines

RATIOS = (0.3, 0.4, 0.45, 0.5)  # default skip ratios, which take turns
PER_DECODE = 12  # sets judged by matchness per set that is decoded with
PLAIN_RUNS = 4  # of plain decoding before a Bayesian search
LUCK = 0.05  # standard error of a speed-up that was measured once


@dataclass(frozen=True)
class LayerSetResult:
    """One trial of a layer set."""

    kind: str  # "judged" by its matchness, or "decoded" with
    attention: list[int]  # layers whose attention it leaves out
    mlp: list[int]
    matchness: float | None  # None for a Bayesian search, which does not judge
    seconds: float = 0.0  # since the beginning of the search, over all of its runs
    speed: float | None = None  # speed-up over plain decoding, if it was decoded with
    acceptance: float | None = None  # acceptance rate, if it was decoded with
    point: list[float] | None = None  # the proposal of a Bayesian search, one number in [0, 1] per sublayer


@dataclass
class SearchResult:
    """All trials."""

    trials: list[LayerSetResult]

    @property
    def best(self) -> LayerSetResult | None:
        """The last trial of the best set, with the mean speed of its n decodings. LUCK / sqrt(n) is subtracted before sets are
        compared, so that not the luckiest one wins."""
        sets: dict[tuple[Any, ...], list[LayerSetResult]] = {}
        for one in self.trials:
            if one.speed is not None:
                sets.setdefault((*one.attention, None, *one.mlp), []).append(one)
        means = [(fmean(one.speed or 0.0 for one in own), own) for own in sets.values()]
        best = max(means, key=lambda pair: pair[0] - LUCK / math.sqrt(len(pair[1])), default=None)
        return None if best is None else replace(best[1][-1], speed=best[0])

    @property
    def curve(self) -> list[tuple[float, float]]:
        """(seconds, best speed so far)."""
        ends = [number for number, one in enumerate(self.trials, 1) if one.speed is not None]
        found = [(self.trials[end - 1].seconds, SearchResult(self.trials[:end]).best) for end in ends]
        return [(seconds, best.speed or 0.0) for seconds, best in found if best is not None]


@dataclass(frozen=True)
class SearchSettings:
    """Settings of a search."""

    texts: Sequence[Tensor]  # prompts, [T] int64 each
    tokens: int = 32  # generated of each
    ratios: Sequence[float] = RATIOS  # skip ratios that take turns; linear_ts only
    drafts: int = 12  # most draft tokens a step
    threshold: float | Literal["adaptive"] | None = "adaptive"  # SelfSpeculative's confidence_threshold
    seed: int = 0
    search: str = "linear_ts"  # or "bayesian"


Done = Callable[[SearchResult, float], None]


def search(
    model: PreTrainedModel,
    settings: SearchSettings,
    budget: float,
    path: Path,
    done: Done = lambda *_: None,
    iterations: float = math.inf,
) -> SearchResult:
    """Searches for `budget` seconds and at most `iterations` trials, including those in the file. done: called after every
    trial with all trials and the seconds spent. ValueError for a model of too few layers, for one that cannot skip any, and for
    another search's file. ImportError for a Bayesian search without its package."""
    runner = ModelRunner(model)
    SelfSpeculative.check_states(runner)
    space = LayerSetSpace.of(runner)
    for ratio in settings.ratios:
        LinearThompson(space, space.count(ratio))  # ValueError where nothing would be left out, or nothing left
    key = _key(model, settings)
    with neutral_defaults(model), LineFile(path) as file:
        known = _read(path, key)
        found = SearchResult(known)
        begun = time.perf_counter() - (known[-1].seconds if known else 0.0)
        if known:
            file.go_on()
        else:
            file.begin(key, f"{path} is no file of trials: name another --out, or remove it")
        source = (BayesianTrials if settings.search == "bayesian" else LinearThompsonTrials)(runner, space, settings, known)
        while len(found.trials) < iterations and time.perf_counter() - begun < budget:
            trial = source.next_trial()
            spent = time.perf_counter() - begun
            found.trials.append(replace(trial, seconds=spent))
            file.add(asdict(found.trials[-1]))
            done(found, spent)
    return found


class LinearThompsonTrials:
    """Our search: judges the proposals of a linear model, and decodes with every thirteenth set."""

    def __init__(
        self, runner: ModelRunner, space: LayerSetSpace, settings: SearchSettings, known: Sequence[LayerSetResult]
    ) -> None:
        self.model, self.space, self.settings = runner.model, space, settings
        self.judged = [_SearchText(runner, text, settings.tokens) for text in settings.texts]
        objective = SearchObjective(_skip_costs(runner), max_drafts=settings.drafts)
        self.learner = LinearThompson(space, space.count(settings.ratios[0]), objective, settings.seed + len(known))
        self.number = 0  # of trials
        for trial in known:
            skip = SkipSet(frozenset(trial.attention), frozenset(trial.mlp))
            self._observe(space.from_skip_set(skip), trial.matchness or 0.0)

    def next_trial(self) -> LayerSetResult:
        ratios, number = self.settings.ratios, self.number
        self.learner.resize(self.space.count(ratios[number % len(ratios)]))
        decode = number % (PER_DECODE + 1) == PER_DECODE
        z = self._most_promising() if decode else self.learner.propose()
        skip = self.space.to_skip_set(z)
        matchness = float(np.mean([text.matchness(skip) for text in self.judged]))
        self._observe(z, matchness)
        trial = LayerSetResult("judged", sorted(skip.attention), sorted(skip.mlp), matchness)
        if not decode:
            return trial
        speed, acceptance = _decoded(self.model, self.settings, skip)
        return replace(trial, kind="decoded", speed=speed, acceptance=acceptance)

    def _observe(self, z: LayerMask, matchness: float) -> None:
        self.number += 1
        self.learner.observe(z, matchness, self.settings.tokens * len(self.judged))

    def _most_promising(self) -> LayerMask:
        """The most valuable of the estimated best sets of all sizes."""
        sets = []
        for ratio in self.settings.ratios:
            self.learner.resize(self.space.count(ratio))
            sets.append(self.learner.best())
        return max(sets, key=lambda z: self.learner.objective(self.learner.estimate(z) or 0.0, z))


class BayesianTrials:
    """Draft & Verify's search: decodes with every proposal. The objective is tokens per second, over those of plain decoding at
    the beginning of the run."""

    def __init__(
        self, runner: ModelRunner, space: LayerSetSpace, settings: SearchSettings, known: Sequence[LayerSetResult]
    ) -> None:
        self.model, self.space, self.settings = runner.model, space, settings
        self.proposer = BayesianProposer(space.size, settings.seed)
        for trial in known:
            self.proposer.observe(trial.point or [], trial.speed or 0.0)

    @cached_property
    def plain_rate(self) -> float:
        """Tokens per second of plain decoding."""
        plain = [_decode_texts(self.model, self.settings, [MethodBackend(Autoregressive())])[0][0] for _ in range(PLAIN_RUNS)]
        return median(plain[1:])  # the first run prepares the engine

    def next_trial(self) -> LayerSetResult:
        plain_rate = self.plain_rate
        point = self.proposer.propose()
        skip = self.space.to_skip_set(skipped_sublayers(point))
        ((rate, stats),) = _decode_texts(self.model, self.settings, [_drafting_without(skip, self.settings)])
        speed = rate / plain_rate
        self.proposer.observe(point, speed)
        layers = sorted(skip.attention), sorted(skip.mlp)
        return LayerSetResult("decoded", *layers, None, speed=speed, acceptance=stats.acceptance_rate, point=point)


def _key(model: PreTrainedModel, settings: SearchSettings) -> dict[str, Any]:
    """The parameters that a continued search must share."""
    place = {"dtype": str(model.dtype), "device": str(model.device), "threads": torch.get_num_threads()}
    asked = {name: getattr(settings, name) for name in ("search", "tokens", "drafts", "threshold")}
    lists = {"ratios": list(settings.ratios), "texts": [text.tolist() for text in settings.texts]}
    return {"kind": "search", "model": fingerprint(model), **place, **asked, **lists}


def _read(path: Path, key: dict[str, Any]) -> list[LayerSetResult]:
    """The trials of a file with the same key."""
    try:
        first, *rest = read_lines(path) or [key]
        trials = [LayerSetResult(**one) for one in rest]
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is no file of trials: {error}") from error
    if first != key:
        raise ValueError(f"{path} holds the trials of another search: name another --out, or remove it")
    return trials


class _SearchText:
    """A text that the model wrote, with the keys and values of its prompt."""

    @torch.inference_mode()
    def __init__(self, runner: ModelRunner, prompt: Tensor, tokens: int) -> None:
        written = measure(runner.model, MethodBackend(Autoregressive()), prompt, options_for(tokens), seed=0).tokens
        self.runner, self.begin = runner, len(prompt) - 1  # of the first pass that is judged
        self.ids = torch.cat([prompt, on_device(written, prompt.device)])[None].to(runner.device)  # [1, T + n]
        self.store = store_for(runner, self.ids.shape[1])
        if self.begin:
            run_tokens(runner, self.store, self.ids[:, : self.begin], 0)

    @torch.inference_mode()
    def matchness(self, skip: SkipSet) -> float:
        """Share of the written tokens that the remaining sublayers choose, given the target's KV cache of the prompt."""
        hidden = run_tokens(self.runner, self.store, self.ids[:, self.begin : -1], self.begin, skip)
        return (self.runner.logits(hidden).argmax(-1) == self.ids[:, self.begin + 1 :]).double().mean().item()


def _skip_costs(runner: ModelRunner) -> SkipCosts:
    """The model's measured costs, in plain steps."""
    costs = costs_of(runner, (1,)).costs.at(1)
    scoring = [costs.scoring(tokens) / costs.plain for tokens in range(1, MAX_DRAFTS + 2)]
    return SkipCosts(costs.attention / costs.plain, costs.mlp / costs.plain, scoring, costs.layer / costs.plain)


def _drafting_without(skip: SkipSet, settings: SearchSettings) -> MethodBackend:
    layers = tuple(sorted(skip.attention)), tuple(sorted(skip.mlp))
    return MethodBackend(SelfSpeculative(*layers, None, settings.drafts, settings.threshold))


def _decoded(model: PreTrainedModel, settings: SearchSettings, skip: SkipSet) -> tuple[float, float]:
    """(speed over plain decoding, acceptance rate) with a set; both take turns text by text."""
    engines = [MethodBackend(Autoregressive()), _drafting_without(skip, settings)]
    (plain, _), (own, stats) = _decode_texts(model, settings, engines)
    return own / plain, stats.acceptance_rate


def _decode_texts(
    model: PreTrainedModel, settings: SearchSettings, engines: Sequence[GenerationBackend]
) -> list[tuple[float, Stats]]:
    """(tokens per second, statistics) of every engine over all texts, prefill included. Engines take turns text by text."""
    totals = [(0, 0.0, Stats()) for _ in engines]
    for index, text in enumerate(settings.texts):
        order = range(len(engines))
        for place in order if index % 2 else order[::-1]:
            found = measure(model, engines[place], text, options_for(settings.tokens), seed=index)
            tokens, seconds, stats = totals[place]
            if found.stats is not None:
                stats.merge(found.stats)
            totals[place] = tokens + len(found.tokens), seconds + found.seconds, stats
    return [(tokens / seconds, stats) for tokens, seconds, stats in totals]
