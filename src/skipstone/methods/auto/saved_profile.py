"""What `auto` has learnt of a model on a machine, in a file: costs, acceptances, rates. `skipstone tune` writes it.

Every process that decodes the same model in the same way begins with it. So does one that is given such a file of another
machine of its kind, by its name or a hub id.
"""

import json
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

from skipstone.engines.model_runner import ModelRunner
from skipstone.methods.auto.policy_log import policy_from_json, policy_to_json
from skipstone.models.fetching import fetch, hub_name
from skipstone.policy.choose_drafter import RECYCLE, Policy
from skipstone.policy.cost_model import HOST
from skipstone.utils.files import cache_place, digest, write_json

VERSION = 7  # of the file
TUNED = "tune.json"  # its name in a repository on the hub
NODE = "node"  # the one entry of the key that may differ in a file that a user names: the machine's own name


def key_of(model: ModelRunner) -> dict[str, Any]:
    """What it was learnt of, one row at a time."""
    return {
        "model": model.fingerprint,
        "dtype": str(model.model.dtype),
        "device": str(model.device),
        "engine": model.engine.name,
        "detail": model.engine.detail,  # of the native engine with its threads and what the weights are quantised to
        "machine": platform.machine(),
        NODE: platform.node(),
    }


def place_of(model: ModelRunner) -> Path | None:
    """The file; None where the user has no home."""
    return cache_place("auto", f"{digest(key_of(model))}.json")


def save_profile(model: ModelRunner, policy: Policy, identities: dict[str, str], about: dict[str, Any]) -> Path:
    """Write what was learnt. identities: drafter -> what tells it from others of its name. about: what a reader may want to
    know of it, as plain JSON values. OSError where it cannot be written."""
    path = place_of(model)
    if path is None:
        raise OSError("there is no cache folder: SKIPSTONE_CACHE names one")
    held = {"version": VERSION, "key": key_of(model), "about": about, "drafters": identities}
    write_json(path, {**held, "state": policy_to_json(policy)})
    return path


def load_profile(model: ModelRunner, first: Policy, identities: dict[str, str], source: str | None = None) -> Policy | None:
    """What a file says of these drafters. source: the file that a user names, or its hub id (ORG/NAME or ORG/NAME@REVISION);
    None for what this machine has kept of the model.

    first: where decoding would begin without it, whose budget counts, and what it says of drafters that the file does not know.
    None where nothing is kept, or where that is damaged or of another version or machine; of a file that a user names, all that
    is an error as in `named`.
    """
    if source is not None:
        return _policy(named(source, model), first, identities, source)
    path = place_of(model)
    with suppress(OSError, ValueError):
        if path is not None and (held := read(path))["key"] == key_of(model):
            return _policy(held, first, identities, path)
    return None


def named(source: str, model: ModelRunner) -> dict[str, Any]:
    """What a file of `skipstone tune` holds that a user names. OSError where there is none; ValueError where it is none, is of
    another version, or was learnt of another model, device, dtype, engine or kind of machine."""
    path = Path(source).expanduser()
    if not path.exists() and path.suffix != ".json" and (meant := hub_name(source)) is not None and "/" in meant.repo:
        path = fetch(source, TUNED) / TUNED
    held = read(path, source)
    here = key_of(model)
    for part, value in here.items():
        if part != NODE and held["key"].get(part) != value:
            raise ValueError(f"{source} was learnt elsewhere: its {part} is {held['key'].get(part)}, here it is {value}")
    return held


def read(path: Path, source: object = None) -> dict[str, Any]:
    """A file of `skipstone tune`, of whichever model. source: what a user called it. OSError where there is no file; ValueError
    for one that is none, is damaged, or is of another version."""
    source = path if source is None else source
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{source}: {path.name} is damaged: {error}") from error
    parts = {"version": int, "key": dict, "about": dict, "drafters": dict, "state": dict}
    if not isinstance(held, dict) or any(not isinstance(held.get(name), kind) for name, kind in parts.items()):
        raise ValueError(f"{source}: {path.name} is no file of `skipstone tune`, which holds {', '.join(parts)}")
    if held["version"] != VERSION:
        raise ValueError(f"{source}: {path.name} is of version {held['version']}, this skipstone reads version {VERSION}")
    return held


def _policy(held: dict[str, Any], first: Policy, identities: dict[str, str], source: object) -> Policy:
    """What a file says, as `load_profile`. ValueError where it is damaged."""
    try:
        known = policy_from_json(held["state"])
        same = {name for name, one in identities.items() if held["drafters"].get(name) == one}
        costs, fresh = known.costs, first.costs
        costs.drafting = {name: costs.drafting[name] if name in same else one for name, one in fresh.drafting.items()}
        costs.schedules = {name: costs.schedules[name] if name in same else one for name, one in fresh.schedules.items()}
        costs.replays = {name: costs.replays.get(name, one) if name in same else one for name, one in fresh.replays.items()}
        costs.scoring = {name: one for name, one in costs.scoring.items() if name in same or name == HOST}
        same |= {RECYCLE} & known.drafters.keys()
        known.drafters = {name: known.drafters[name] if name in same else one for name, one in first.drafters.items()}
        return known.restarted(first.budget)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{source} is damaged: its state cannot be read ({type(error).__name__}: {error})") from error
