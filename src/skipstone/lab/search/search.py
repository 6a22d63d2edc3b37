"""`skipstone search`: searches offline for the layer set with the most tokens per second (Draft & Verify, arXiv 2309.08168,
section 3.2, which needs hours of Bayesian optimisation).

A proposal is judged by its matchness, in one pass over each text. The set that the linear model of matchness expects to be
fastest is then decoded with. The result is the fastest set that was decoded with. All trials are in a file, so an interrupted
search goes on.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from skipstone.decoding.stats import Stats
from skipstone.engines.host_transfer import on_device
from skipstone.engines.model_runner import ModelRunner
from skipstone.hf.generation_defaults import neutral_defaults
from skipstone.lab.timing.measure import MethodBackend, measure, options_for, run_tokens, store_for
from skipstone.lab.timing.measure_costs import costs_of
from skipstone.methods.autoregressive import Autoregressive
from skipstone.methods.drafting.layer_sets import MAX_DRAFTS, LayerMask, LayerSetSpace, SearchObjective, SkipCosts
from skipstone.methods.self_speculative import SelfSpeculative
from skipstone.methods.swift.layer_set_search import LinearThompson
from skipstone.models.fingerprint import fingerprint
from skipstone.models.passes import SkipSet
from skipstone.utils.files import LineFile, read_lines

RATIOS = (0.3, 0.4, 0.45, 0.5)  # default skip ratios, which take turns
PER_DECODE = 12  # sets judged by matchness per set that is decoded with
LUCK = 0.05  # standard error of a speed-up that was measured once


@dataclass(frozen=True)
class LayerSetResult:
    """One trial of a layer set."""

    kind: str  # "judged" by its matchness, or "decoded" with
    attention: list[int]  # layers whose attention it leaves out
    mlp: list[int]
    matchness: float
    seconds: float  # since the beginning of the search, over all of its runs
    speed: float | None = None  # speed-up over plain decoding in turns with it, if it was decoded with
    acceptance: float | None = None  # acceptance rate, if it was decoded with


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
    ratios: Sequence[float] = RATIOS  # skip ratios that take turns
    drafts: int = 12  # most draft tokens a step
    threshold: float | Literal["adaptive"] | None = "adaptive"  # SelfSpeculative's confidence_threshold
    seed: int = 0


Done = Callable[[SearchResult, float], None]


def search(
    model: PreTrainedModel, settings: SearchSettings, budget: float, path: Path, done: Done = lambda *_: None
) -> SearchResult:
    """Searches for `budget` seconds, including those of trials in the file. done: called after every trial with all trials and
    the seconds spent. ValueError for a model of too few layers, for one that cannot skip any, and for another search's file."""
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
        judged = [_SearchText(runner, model, text, settings.tokens) for text in settings.texts]
        objective = SearchObjective(_skip_costs(runner), max_drafts=settings.drafts)
        learner = LinearThompson(space, space.count(settings.ratios[0]), objective, settings.seed + len(known))
        for trial in known:
            skip = SkipSet(frozenset(trial.attention), frozenset(trial.mlp))
            learner.observe(space.from_skip_set(skip), trial.matchness, settings.tokens * len(judged))
        while (spent := time.perf_counter() - begun) < budget:
            number = len(found.trials)
            learner.resize(space.count(settings.ratios[number % len(settings.ratios)]))
            decode = number % (PER_DECODE + 1) == PER_DECODE
            z = _most_promising(learner, space, settings) if decode else learner.propose()
            skip = space.to_skip_set(z)
            matchness = float(np.mean([text.matchness(skip) for text in judged]))
            learner.observe(z, matchness, settings.tokens * len(judged))
            speed, acceptance = _decoded(model, settings, skip) if decode else (None, None)
            spent, layers = time.perf_counter() - begun, (sorted(skip.attention), sorted(skip.mlp))
            kind = "decoded" if decode else "judged"
            found.trials.append(LayerSetResult(kind, *layers, matchness, spent, speed, acceptance))
            file.add(asdict(found.trials[-1]))
            done(found, spent)
    return found


def _most_promising(learner: LinearThompson, space: LayerSetSpace, settings: SearchSettings) -> LayerMask:
    """The most valuable of the estimated best sets of all sizes."""
    sets = []
    for ratio in settings.ratios:
        learner.resize(space.count(ratio))
        sets.append(learner.best())
    return max(sets, key=lambda z: learner.objective(learner.estimate(z) or 0.0, z))


def _key(model: PreTrainedModel, settings: SearchSettings) -> dict[str, Any]:
    """The parameters that a continued search must share."""
    place = {"dtype": str(model.dtype), "device": str(model.device), "threads": torch.get_num_threads()}
    asked = {"tokens": settings.tokens, "drafts": settings.drafts, "threshold": settings.threshold}
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
    def __init__(self, runner: ModelRunner, model: PreTrainedModel, prompt: Tensor, tokens: int) -> None:
        written = measure(model, MethodBackend(Autoregressive()), prompt, options_for(tokens), seed=0).tokens
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


def _decoded(model: PreTrainedModel, settings: SearchSettings, skip: SkipSet) -> tuple[float, float]:
    """(speed over plain decoding, acceptance rate) with a set; both take turns text by text."""
    layers = tuple(sorted(skip.attention)), tuple(sorted(skip.mlp))
    method = SelfSpeculative(*layers, None, settings.drafts, settings.threshold)
    engines = [MethodBackend(Autoregressive()), MethodBackend(method)]
    totals = {engine: [0, 0.0] for engine in engines}  # tokens, seconds
    stats = Stats()
    for index, text in enumerate(settings.texts):
        for engine in engines if index % 2 else engines[::-1]:
            found = measure(model, engine, text, options_for(settings.tokens), seed=index)
            totals[engine] = [totals[engine][0] + len(found.tokens), totals[engine][1] + found.seconds]
            if engine is engines[1] and found.stats is not None:
                stats.merge(found.stats)
    plain, own = (tokens / seconds for tokens, seconds in totals.values())
    return own / plain, stats.acceptance_rate
