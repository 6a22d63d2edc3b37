"""What `auto` has learnt of a model on a machine, in a file: costs, calibrations, rates. `skipstone tune` writes it, and every
process that decodes the same model in the same way begins with it."""

import json
import platform
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from skipstone.control import control
from skipstone.control.control import State
from skipstone.control.record import state_from_json, state_to_json
from skipstone.files import cache_folder, digest, write_json
from skipstone.models.fingerprint import fingerprint
from skipstone.models.layered import LayeredModel

VERSION = 1
"""Of the file."""


def key_of(model: LayeredModel, rows: int) -> dict[str, Any]:
    """What it was learnt of. Drafters are not in it: what is known of one does not depend on which others there are."""
    return {
        "model": fingerprint(model.model),
        "dtype": str(model.model.dtype),
        "device": str(model.device),
        "engine": model.engine.name,
        "detail": model.engine.detail,  # of the native engine with its threads and what the weights are quantised to
        "machine": platform.machine() + platform.node(),
        "rows": rows,
    }


def place_of(model: LayeredModel, rows: int) -> Path | None:
    """The file; None where the user has no home."""
    with suppress(RuntimeError):
        return cache_folder() / "auto" / f"{digest(key_of(model, rows))}.json"
    return None


def remember(model: LayeredModel, rows: int, state: State, about: dict[str, Any]) -> Path:
    """Write what was learnt. about: what a reader may want to know of it, as plain JSON values. OSError where it cannot be
    written."""
    path = place_of(model, rows)
    if path is None:
        raise OSError("there is no cache folder: SKIPSTONE_CACHE names one")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"version": VERSION, "key": key_of(model, rows), "about": about, "state": state_to_json(state)})
    return path


def recalled(model: LayeredModel, rows: int, drafters: Iterable[str], recycling: bool) -> State | None:
    """What a file says of these drafters; None where there is none, or where it is damaged or of another version or machine.
    Drafters that it does not know begin anew; a request begins, so that rates count half."""
    path = place_of(model, rows)
    if path is None or not path.exists():
        return None
    with suppress(OSError, ValueError, KeyError, TypeError):
        held = json.loads(path.read_text(encoding="utf-8"))
        if held["version"] != VERSION or held["key"] != key_of(model, rows):
            return None
        state = state_from_json(held["state"])
        wanted, costs = list(drafters), state.costs
        if not set(wanted) <= set(costs.drafts):
            return None
        known = {name: state.drafters.get(name, control.Drafter()) for name in wanted}
        costs = replace(
            costs,
            drafts={name: costs.drafts[name] for name in wanted},
            shadows={name: costs.shadows[name] for name in wanted},
            scorings={name: scoring for name, scoring in costs.scorings.items() if name in known},
        )
        current = state.current if state.current in known or (recycling and state.current == control.RECYCLE) else None
        ranks = (state.ranks or control.Ranks()) if recycling else None
        return control.begin(replace(state, costs=costs, drafters=known, current=current, ranks=ranks))
    return None
