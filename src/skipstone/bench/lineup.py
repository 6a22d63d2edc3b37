"""Who takes part: from wishes such as `layerskip exit_layer=3,6` to engines.

A wish is a method's name with settings. A setting with several values is a choice: which of them is best is measured, on other
prompts than those reported (tuning.py).
"""

import dataclasses
import itertools
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from skipstone import methods
from skipstone.api import resolve_for
from skipstone.bench import tuning
from skipstone.bench.peers import PEERS
from skipstone.decoding.method import OWN_FIELD
from skipstone.methods import METHODS
from skipstone.models.layered import LayeredModel
from skipstone.timing.measure import Engine, Skipstone

Wish = dict[str, Any]
KINDS: Mapping[str, type] = ChainMap(PEERS, METHODS)
BASELINE, THEIRS = "autoregressive", "hf-generate"


@dataclass(frozen=True)
class Entrant:
    """One method in the table."""

    label: str  # what the table calls it
    method: str
    candidates: tuple[Engine, ...]  # its engine, or those that are to be chosen from
    sampled: bool = True  # it takes part at a temperature too
    lossless: bool = True  # its text is the model's own

    def about(self) -> dict[str, Any]:
        """What the file of results says of it. settings: None where they are chosen."""
        settings = self.candidates[0].settings if len(self.candidates) == 1 else None
        return {"method": self.method, "settings": settings, "lossless": self.lossless}


def parse(text: str) -> Wish:
    """`layerskip exit_layer=3,6 confidence_threshold=none,0.4`, or JSON. ValueError for anything else."""
    wish = methods.parse(text, KINDS, labels=("label",), several=True)
    if "method" not in wish:
        raise ValueError(f'a method as JSON names itself, {{"method": "layerskip", ...}}; found {text!r}')
    return wish


def label(wish: Wish) -> str:
    """What the table calls it: its own `label`, else the method's name."""
    return str(wish.get("label") or wish["method"])


def check(wishes: Sequence[Wish]) -> None:
    """ValueError for methods and settings that do not exist and labels that are given twice, before any model is loaded."""
    for wish in wishes:
        name = wish.get("method")
        kind = methods.find(name, KINDS)
        for key in wish:
            if key not in ("method", "label"):
                methods.find_setting(kind, key)
        if label(wish) != name and label(wish) in KINDS:
            raise ValueError(f"label={label(wish)} is another method's name")
    labels = [label(wish) for wish in wishes]
    if twice := [name for name in labels if labels.count(name) > 1]:
        raise ValueError(f"two methods are called {twice[0]}: give one of them a label=...")


def entrants(wishes: Sequence[Wish], model: PreTrainedModel, tune: bool) -> tuple[list[Entrant], dict[str, str]]:
    """(who takes part, label -> why a peer cannot). tune: what a wish leaves open is a choice among the usual values.

    ValueError for settings that do not fit the model.
    """
    found, refused, layered = [], {}, LayeredModel(model)
    for wish in wishes:
        name = wish["method"]
        given = {key: value for key, value in wish.items() if key not in ("method", "label")}
        if tune:
            given = {**tuning.usual(name, model.config.num_hidden_layers), **given}
        if name in METHODS:
            engines = [Skipstone(resolve_for(model, {"method": name, **one})) for one in choices(given, METHODS[name])]
            for engine in engines:
                engine.method.check(layered)
            lossless = all(engine.method.lossless for engine in engines)
            if len(engines) > 1 and not lossless:
                raise ValueError(
                    f"{name} may change the text, so a choice by speed would be none: name every setting as a method of its "
                    "own with a label=..."
                )
            found.append(Entrant(label(wish), name, tuple(engines), lossless=lossless))
            continue
        peers = [_peer(PEERS[name], one, model) for one in choices(given, PEERS[name])]
        if (reason := peers[0].refusal(model)) is not None:
            refused[label(wish)] = reason
        else:
            for peer in peers:
                peer.check(model)
            kind = PEERS[name]
            found.append(Entrant(label(wish), name, tuple(peers), sampled=kind.sampled, lossless=kind.lossless))
    return found, refused


def offered(kind: Any, key: str, value: Any) -> bool:
    """Whether a value is a choice: a list, but for settings that are lists themselves, of which a choice is a list of lists."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    itself = key in fields and isinstance(fields[key].default, tuple)
    some = value[0] if isinstance(value, (list, tuple)) and value else None
    return isinstance(some, (list, tuple)) if itself else isinstance(value, (list, tuple))


def choices(settings: Mapping[str, Any], kind: Any) -> list[Wish]:
    """Every combination of the values that are choices."""
    values = [value if offered(kind, key, value) else [value] for key, value in settings.items()]
    if empty := [key for key, options in zip(settings, values, strict=True) if not options]:
        raise ValueError(f"{empty[0]} has no values to choose from")
    return [dict(zip(settings, one, strict=True)) for one in itertools.product(*values)]


def _peer(kind: Any, settings: Wish, model: PreTrainedModel) -> Any:
    """A peer, with what it takes from the model where nothing is said. ValueError for what is missing."""
    own = getattr(model.generation_config, OWN_FIELD, None) or {}
    settings = {**kind.defaults(own), **settings}
    needed = [field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING]
    if missing := [name for name in needed if settings.get(name) is None]:
        raise ValueError(f"{kind.name} needs {missing[0]}=..., and this model carries no default for it")
    return kind(**settings)
