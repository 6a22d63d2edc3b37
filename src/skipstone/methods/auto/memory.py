"""What `auto` has learnt of a model on a machine, in a file: costs, calibrations, rates. `skipstone tune` writes it, and every
process that decodes the same model in the same way begins with it."""

import json
import platform
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from skipstone.control import learning
from skipstone.control.record import state_from_json, state_to_json
from skipstone.control.state import RECYCLE, State
from skipstone.files import cache_folder, digest, write_json
from skipstone.models.layered import LayeredModel

VERSION = 5
"""Of the file."""


def key_of(model: LayeredModel) -> dict[str, Any]:
    """What it was learnt of, one row at a time."""
    return {
        "model": model.fingerprint,
        "dtype": str(model.model.dtype),
        "device": str(model.device),
        "engine": model.engine.name,
        "detail": model.engine.detail,  # of the native engine with its threads and what the weights are quantised to
        "machine": platform.machine() + platform.node(),
    }


def place_of(model: LayeredModel) -> Path | None:
    """The file; None where the user has no home."""
    with suppress(RuntimeError):
        return cache_folder() / "auto" / f"{digest(key_of(model))}.json"
    return None


def remember(model: LayeredModel, state: State, identities: dict[str, str], about: dict[str, Any]) -> Path:
    """Write what was learnt. identities: drafter -> what tells it from others of its name. about: what a reader may want to
    know of it, as plain JSON values. OSError where it cannot be written."""
    path = place_of(model)
    if path is None:
        raise OSError("there is no cache folder: SKIPSTONE_CACHE names one")
    path.parent.mkdir(parents=True, exist_ok=True)
    held = {"version": VERSION, "key": key_of(model), "about": about, "drafters": identities}
    write_json(path, {**held, "state": state_to_json(state)})
    return path


def recalled(model: LayeredModel, first: State, identities: dict[str, str]) -> State | None:
    """What a file says of these drafters; None where there is none, or where it is damaged or of another version or machine.
    first: where decoding would begin without it, whose rules and ledger count, and what it says of drafters that the file does
    not know. A request begins, so that rates count half."""
    path = place_of(model)
    if path is None or not path.exists():
        return None
    with suppress(OSError, ValueError, KeyError, TypeError):
        held = json.loads(path.read_text(encoding="utf-8"))
        if held["version"] != VERSION or held["key"] != key_of(model):
            return None
        state = state_from_json(held["state"])
        same = {name for name, one in identities.items() if held["drafters"].get(name) == one}
        costs = replace(
            state.costs,
            drafts={name: state.costs.drafts[name] if name in same else one for name, one in first.costs.drafts.items()},
            wholes={name: state.costs.wholes[name] if name in same else one for name, one in first.costs.wholes.items()},
            shadows={**first.costs.shadows, **{name: one for name, one in state.costs.shadows.items() if name in same}},
            scorings={name: one for name, one in state.costs.scorings.items() if name in same},
        )
        drafters = {**first.drafters, **{name: state.drafters[name] for name in same}}
        recycling = first.ranks is not None
        current = state.current if state.current in same or (recycling and state.current == RECYCLE) else None
        ranks = (state.ranks or first.ranks) if recycling else None
        kept = replace(state, costs=costs, drafters=drafters, current=current, ranks=ranks, rules=first.rules)
        return learning.begin(replace(kept, ledger=first.ledger, pace=first.pace, steady=None))
    return None
