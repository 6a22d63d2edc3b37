"""A layer set that was found, in a file that knows which model it is for."""

from pathlib import Path
from typing import Any

from pydantic import Field

from skipstone.files import write_json
from skipstone.forms import Part, read_json
from skipstone.models.fingerprint import fingerprint
from skipstone.models.skipping import SkipSet

VERSION = 1


class Profile(Part):
    """model: fingerprint of the weights. name: what the model was called. attention, mlp: layers, counted from 0, whose
    sublayer drafting leaves out. about: how it was found."""

    version: int = VERSION
    model: str
    name: str = ""
    attention: tuple[int, ...] = ()
    mlp: tuple[int, ...] = ()
    about: dict[str, Any] = Field(default_factory=dict)

    @property
    def skip(self) -> SkipSet:
        return SkipSet(frozenset(self.attention), frozenset(self.mlp))


def save(path: Path, profile: Profile) -> None:
    """Write a profile, whole or not at all."""
    write_json(path, profile.model_dump(mode="json"))


def load(path: str | Path, model: Any) -> Profile:
    """The profile of a model. OSError where there is no file; ValueError for what is no profile, and for another model's."""
    if not isinstance(path, (str, Path)):
        raise ValueError(f"profile must be the name of a file, found {path!r}")
    profile = read_json(Path(path).expanduser(), Profile, VERSION, "a layer set", path)
    if profile.model != (here := fingerprint(model)):
        raise ValueError(f"{path} is the profile of another model ({profile.name or profile.model}; this one is {here})")
    return profile
