"""The saved profile of `auto`: the costs, acceptances and rates that it has learnt of a model on a machine.

`skipstone tune` writes it. Every process that decodes the same model in the same way starts with it. A user can also name such
a file of a similar machine, or its hub id.
"""

import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from skipstone.engines.model_runner import ModelRunner
from skipstone.models.fetching import local_or_fetched
from skipstone.policy.choose_drafter import RECYCLE, Policy
from skipstone.policy.cost_model import HOST
from skipstone.utils.files import cache_place, digest, write_json
from skipstone.utils.settings_files import SettingsPart, read_json

VERSION = 8  # of the file
TUNED = "tune.json"  # its name in a repository on the hub
NODE = "node"  # the machine's own name: the one entry of the key that may differ in a file that a user names
POLICY = TypeAdapter(Policy)


class SavedProfile(SettingsPart):
    """key: see `key_of`. about: notes for readers. drafters: name -> identity. state: the policy as plain JSON values."""

    version: int
    key: dict[str, Any]
    about: dict[str, Any]
    drafters: dict[str, str]
    state: dict[str, Any]


def key_of(model: ModelRunner) -> dict[str, Any]:
    """What a profile is valid for: other values make other costs."""
    return {
        "model": model.fingerprint,
        "dtype": str(model.model.dtype),
        "device": str(model.device),
        "engine": model.engine.name,
        "detail": model.engine.detail,  # threads and quantisation of the native engine
        "machine": platform.machine(),
        NODE: platform.node(),
    }


def save_profile(model: ModelRunner, policy: Policy, identities: dict[str, str], about: dict[str, Any]) -> Path:
    """Writes a policy. identities: by drafter, to tell drafters of one name apart. OSError if it cannot be written."""
    key = key_of(model)
    path = cache_place("auto", f"{digest(key)}.json")
    if path is None:
        raise OSError("there is no cache folder: SKIPSTONE_CACHE names one")
    state = POLICY.dump_python(policy, mode="json")
    write_json(path, {"version": VERSION, "key": key, "about": about, "drafters": identities, "state": state})
    return path


def load_profile(model: ModelRunner, first: Policy, identities: dict[str, str], source: str | None = None) -> Policy | None:
    """The saved policy of these drafters; what the file lacks, and the budget, come from `first`. None if this machine has no
    usable file. source: a file or hub id that a user names, which must be usable: OSError or ValueError as in `read_named`."""
    if source is not None:
        return _merge(read_named(source, model), first, identities, source)
    key = key_of(model)
    path = cache_place("auto", f"{digest(key)}.json")
    with suppress(OSError, ValueError):
        if path is not None and (profile := read(path)).key == key:
            return _merge(profile, first, identities, path)
    return None


def read_named(source: str, model: ModelRunner) -> SavedProfile:
    """The file that a user names, or its hub id (ORG/NAME or ORG/NAME@REVISION). OSError if there is none. ValueError for
    another file, another version, or another model, device, dtype, engine or kind of machine."""
    profile = read(local_or_fetched(source, TUNED), source)
    for part, value in key_of(model).items():
        if part != NODE and profile.key.get(part) != value:
            raise ValueError(f"{source} was learnt elsewhere: its {part} is {profile.key.get(part)}, here it is {value}")
    return profile


def read(path: Path, source: object = None) -> SavedProfile:
    """A saved profile, of any model. source: the user's name for it. Errors as in `read_json`."""
    return read_json(path, SavedProfile, VERSION, "a profile of `skipstone tune`", source)


def _merge(profile: SavedProfile, first: Policy, identities: dict[str, str], source: object) -> Policy:
    try:
        policy = POLICY.validate_python(profile.state)
    except ValueError as error:
        raise ValueError(f"{source} is damaged: its state cannot be read ({error})") from error
    same = {name for name, identity in identities.items() if profile.drafters.get(name) == identity} | {RECYCLE}
    costs = policy.costs

    def merge(saved: dict[str, Any], fresh: dict[str, Any]) -> dict[str, Any]:
        return {name: saved.get(name, value) if name in same else value for name, value in fresh.items()}

    for times in ("drafting", "schedules", "replays"):
        setattr(costs, times, merge(getattr(costs, times), getattr(first.costs, times)))
    costs.scoring = {name: scoring for name, scoring in costs.scoring.items() if name in same or name == HOST}
    costs.timed_at = {}  # this process measures everything again
    drafters = merge(policy.drafters, first.drafters)
    return policy.renewed(drafters=drafters, budget=first.budget, exploration=first.exploration, starts_request=True)
