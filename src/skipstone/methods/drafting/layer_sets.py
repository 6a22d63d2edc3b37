"""Layer sets: the sublayers that drafting skips, their costs and speed-up, and their files.

The first and the last layer always run. All costs are in plain steps (the time of one step of plain decoding).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from skipstone.engines.model_runner import ModelRunner
from skipstone.models.fetching import local_or_fetched
from skipstone.models.fingerprint import fingerprint
from skipstone.models.passes import SkipSet
from skipstone.policy.cost_model import StepCosts, expected_tokens
from skipstone.utils.cached_property import cached_property
from skipstone.utils.files import write_json
from skipstone.utils.settings_files import SettingsPart, read_json

LayerMask = NDArray[np.bool_]
"""A layer set, z in SWIFT: [n], n = 2 (L - 2), the attentions of layers 1 to L - 2 (counted from 0), then their MLPs. True is
skipped."""
MAX_DRAFTS = 25  # drafts of the longest step whose speed-up is computed


@dataclass(frozen=True)
class LayerSetSpace:
    """All layer sets of a model of `layers` layers. ValueError for fewer than 4 layers."""

    layers: int

    def __post_init__(self) -> None:
        if self.layers < 4:
            raise ValueError(f"skipping sublayers needs a model of at least 4 layers, found {self.layers}")

    @classmethod
    def of(cls, model: ModelRunner) -> Self:
        """All layer sets of a model. ValueError if its sublayers cannot be skipped."""
        if reason := model.family.unskippable:
            raise ValueError(f"no sublayer of this {model.config.model_type} model can be skipped: it {reason}")
        return cls(model.depth)

    @property
    def size(self) -> int:
        """Number of sublayers that may be skipped, n."""
        return 2 * (self.layers - 2)

    def count(self, ratio: float) -> int:
        """Number of skipped sublayers for a skip ratio (relative to `size`, as in SWIFT's code)."""
        return round(ratio * self.size)

    def uniform(self, count: int) -> LayerMask:
        """As many attentions as MLPs (one more if `count` is odd), each spread evenly over the depth."""
        middle = self.layers - 2
        skipped = np.zeros(self.size, dtype=bool)
        for first, number in ((0, count - count // 2), (middle, count // 2)):
            skipped[[first + (2 * place + 1) * middle // (2 * number) for place in range(number)]] = True
        return skipped

    def random(self, count: int, rng: np.random.Generator) -> LayerMask:
        """Any set of `count` sublayers, all equally likely."""
        skipped = np.zeros(self.size, dtype=bool)
        skipped[rng.permutation(self.size)[:count]] = True
        return skipped

    def to_skip_set(self, skipped: LayerMask) -> SkipSet:
        """The layer numbers of a mask."""
        attention, mlp = (np.flatnonzero(half) + 1 for half in np.split(skipped, 2))
        return SkipSet(frozenset(attention.tolist()), frozenset(mlp.tolist()))

    def from_skip_set(self, skip: SkipSet) -> LayerMask:
        """The mask of layer numbers. ValueError for layers that do not exist or must run."""
        skipped, middle = np.zeros(self.size, dtype=bool), self.layers - 2
        for kind, first, chosen in (("attention", 0, skip.attention), ("MLP", middle, skip.mlp)):
            if wrong := sorted(layer for layer in chosen if not 1 <= layer <= middle):
                raise ValueError(
                    f"the {kind} of layers 1 to {middle} may be skipped in a model of {self.layers} layers, counted from 0 "
                    f"(the first and the last always run), found {wrong}"
                )
            skipped[[first + layer - 1 for layer in chosen]] = True
        if skipped.all():
            raise ValueError("the layer set skips everything between the first and the last layer")
        if not skipped.any():
            raise ValueError("the layer set skips nothing: drafting with it would be decoding")
        return skipped


@dataclass(frozen=True)
class SkipCosts:
    """Costs in plain steps. attention, mlp: saved by skipping one such sublayer. layer: saved in addition by skipping both
    sublayers of a layer. scoring: scoring passes over 1, 2, ... tokens."""

    attention: float
    mlp: float
    scoring: Sequence[float]
    layer: float = 0.0

    def draft(self, skipped: LayerMask) -> float:
        """One draft pass with a layer set (SWIFT's c)."""
        attention, mlp = np.split(skipped, 2)
        return float(self.drafts(attention.sum(), mlp.sum(), (attention & mlp).sum()))

    def drafts(self, attentions: Any, mlps: Any, both: Any) -> Any:
        """The same by numbers of skipped attentions, MLPs and layers with both skipped: numbers or arrays [a]."""
        return np.maximum(1 - self.attention * attentions - self.mlp * mlps - self.layer * both, 1e-3)

    @cached_property
    def passes(self) -> NDArray[np.float64]:
        """Costs of scoring 1, 2, ... drafts, at most MAX_DRAFTS."""
        return np.array(self.scoring[1 : MAX_DRAFTS + 1])


def expected_speedup(matchness: Any, draft: Any, costs: SkipCosts, max_drafts: int = MAX_DRAFTS) -> Any:
    """The speed-up with the best number of drafts, below 1 if none pays.

    matchness: probability that a draft is accepted. draft: cost of a draft. Numbers or arrays [a]. max_drafts <= MAX_DRAFTS.
    """
    acceptance: Any = np.clip(matchness, 0, 1)[..., None]  # [a, 1]
    draft_step: Any = np.asarray(draft, dtype=float)[..., None]
    passes: Any = costs.passes[:max_drafts]
    drafts: Any = np.arange(1, len(passes) + 1)
    speedups: Any = StepCosts(1.0, draft_step, lambda _: passes).speedup(expected_tokens(acceptance, drafts), drafts)  # [a, k]
    return speedups.max(-1)


@dataclass(frozen=True)
class SearchObjective:
    """The objective of a search. by: "speed" or the paper's "matchness". max_drafts: drafts a step."""

    costs: SkipCosts = SkipCosts(0.0, 0.0, (1.0,))
    by: str = "speed"
    max_drafts: int = MAX_DRAFTS

    def __call__(self, matchness: float, skipped: LayerMask) -> float:
        """The value of a set with this matchness."""
        return float(self.of_many(matchness, self.costs.draft(skipped)))

    def of_many(self, matchness: Any, draft: Any) -> Any:
        """The values of many sets. matchness: [a]. draft: [a], the cost of a draft with each."""
        return matchness if self.by == "matchness" else expected_speedup(matchness, draft, self.costs, self.max_drafts)


PROFILE_VERSION = 1  # of the format of a profile
PROFILE = "profile.json"  # file of a repository on the hub: its profile


class LayerSetProfile(SettingsPart):
    """A layer set's file. model: fingerprint of the weights. name: of the model. attention, mlp: layers with a skipped
    attention or MLP, counted from 0. about: notes on the search."""

    version: int = PROFILE_VERSION
    model: str
    name: str = ""
    attention: tuple[int, ...] = ()
    mlp: tuple[int, ...] = ()
    about: dict[str, Any] = Field(default_factory=dict)

    @property
    def skip(self) -> SkipSet:
        return SkipSet(frozenset(self.attention), frozenset(self.mlp))


def save_profile(
    path: Path, model: Any, about: dict[str, Any], attention: Sequence[int], mlp: Sequence[int], name: str = ""
) -> None:
    """Write the profile of a model atomically. Other arguments: as in `LayerSetProfile`."""
    key = fingerprint(model)
    profile = LayerSetProfile(model=key, name=name, attention=tuple(attention), mlp=tuple(mlp), about=about)
    write_json(path, profile.model_dump(mode="json"))


def load_profile(source: str | Path, model: Any) -> LayerSetProfile:
    """The profile of a model, from a file or the hub (ORG/NAME or ORG/NAME@REVISION). OSError if there is none; ValueError for
    other files and for another model's profile."""
    profile = read_profile(local_or_fetched(source, PROFILE), source)
    if profile.model != (here := fingerprint(model)):
        raise ValueError(f"{source} is the profile of another model ({profile.name or profile.model}; this one is {here})")
    return profile


def read_profile(path: Path, source: object = None) -> LayerSetProfile:
    """The profile in a file, of any model. source: the user's name for the file. Errors as in `load_profile`."""
    return read_json(path, LayerSetProfile, PROFILE_VERSION, "a layer set", source)
