"""The saved profile of `auto`: the costs, acceptances and rates that it has learnt of a model on a machine.

`skipstone tune`, servers, chats and commands that had a copy of the weights write it. Every process that decodes the same model
in the same way starts with it. A user can also name such a file of a similar machine, or its hub id.
"""

import hashlib
import platform
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from skipstone.engines.model_runner import ModelRunner
from skipstone.models.fetching import local_or_fetched
from skipstone.models.mapped_model import MappedModel
from skipstone.policy.choose_drafter import Policy
from skipstone.policy.cost_model import HOST
from skipstone.utils.dataclass_values import from_values
from skipstone.utils.files import cache_place, digest, write_json
from skipstone.utils.settings_files import SettingsPart, read_json

VERSION = 9  # of the file
TUNED = "tune.json"  # its name in a repository on the hub
NODE = "node"  # the machine's own name: the one entry of the key that may differ in a file that a user names


class SavedProfile(SettingsPart):
    """key: of `key_of`; of `local_key_of` if the profile serves this machine only. about: notes for readers. drafters: name ->
    identity. state: the policy as plain JSON values."""

    version: int
    key: dict[str, Any]
    about: dict[str, Any]
    drafters: dict[str, str]
    state: dict[str, Any]


@dataclass(frozen=True)
class SavedPolicy:
    """A policy of a file. identities: of its drafters, to tell drafters of one name apart. about, key: as in `SavedProfile`."""

    policy: Policy
    identities: dict[str, str]
    about: dict[str, Any]
    key: dict[str, Any]

    def rate(self, drafter: str) -> float | None:
        """A drafter's tokens per plain step; None if the policy does not know it."""
        known = self.policy.drafters.get(drafter)
        return None if known is None else known.rate.value


def _setting_of(model: ModelRunner) -> dict[str, Any]:
    """What costs depend on apart from the weights."""
    return {
        "dtype": str(model.model.dtype),
        "device": str(model.device),
        "engine": model.engine.name,
        "detail": model.engine.detail,  # threads and quantisation of the native engine
        "machine": platform.machine(),
        NODE: platform.node(),
    }


def key_of(model: ModelRunner) -> dict[str, Any]:
    """What a profile is valid for: other values make other costs. It reads a few weights of every matrix."""
    return {"model": model.fingerprint, **_setting_of(model)}


def local_key_of(model: ModelRunner, *, by_files: bool = True) -> dict[str, Any]:
    """What a profile is valid for on this machine. On the native engine no matrix is read, which would delay a request: a
    mapped model is known by its files, another one by its name and norms. by_files: False for the key that a mapped model would
    have if it was not mapped."""
    name = getattr(model.config, "name_or_path", "")
    if by_files and isinstance(model.model, MappedModel):
        known = digest(model.model.files.identity)
    elif not name or model.engine.name != "native":
        known = model.fingerprint
    else:
        norms = hashlib.sha256()
        for one in model.model.parameters():
            if one.dim() == 1:
                norms.update(one.detach().float().numpy().tobytes())
        path = Path(name).expanduser()
        known = digest([str(path.resolve()) if path.exists() else name, norms.hexdigest()])
    return {"model": known, **_setting_of(model)}


def _place_of(model: ModelRunner, *, by_files: bool = True) -> Path | None:
    """The path of the profile on this machine."""
    return cache_place("auto", f"{digest(local_key_of(model, by_files=by_files))}.json")


def save_profile(model: ModelRunner, saved: SavedPolicy, *, by_files: bool = True) -> Path:
    """Writes a policy. by_files: as in `local_key_of`. OSError if it cannot be written."""
    path = _place_of(model, by_files=by_files)
    if path is None:
        raise OSError("there is no cache folder: SKIPSTONE_CACHE names one")
    content = {"version": VERSION, "key": saved.key, "about": saved.about}
    content |= {"drafters": saved.identities, "state": asdict(saved.policy)}
    write_json(path, content)
    return path


def load_profile(model: ModelRunner, source: str | None = None) -> SavedPolicy | None:
    """The saved policy of a model. None if this machine has no usable file. source: a file or hub id that a user names, which
    must be usable: OSError or ValueError as in `read_named`."""
    if source is not None:
        return _policy_of(read_named(source, model), source)
    with suppress(OSError, ValueError):
        if (path := _place_of(model)) is not None:
            return _policy_of(read(path), path)
    return None


def read_named(source: str, model: ModelRunner) -> SavedProfile:
    """The file that a user names, or its hub id (ORG/NAME or ORG/NAME@REVISION). OSError if there is none. ValueError for
    another file, another version, or another model, device, dtype, engine or kind of machine."""
    profile, local = read(local_or_fetched(source, TUNED), source), local_key_of(model)
    for part, value in key_of(model).items():
        if part != NODE and profile.key.get(part) not in (value, local[part]):
            raise ValueError(f"{source} was learnt elsewhere: its {part} is {profile.key.get(part)}, here it is {value}")
    return profile


def read(path: Path, source: object = None) -> SavedProfile:
    """A saved profile, of any model. source: the user's name for it. Errors as in `read_json`."""
    return read_json(path, SavedProfile, VERSION, "a profile of `skipstone tune`", source)


def _policy_of(profile: SavedProfile, source: object) -> SavedPolicy:
    try:
        policy = from_values(Policy, profile.state)
        if missing := profile.drafters.keys() - policy.drafters.keys() | {HOST} - policy.costs.scoring.keys():
            raise ValueError(f"it says nothing of {', '.join(missing)}")
    except ValueError as error:
        raise ValueError(f"{source} is damaged: its state cannot be read ({error})") from error
    return SavedPolicy(policy, profile.drafters, profile.about, profile.key)
