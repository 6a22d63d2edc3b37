"""What all sources of documents have: checked settings, paths, texts with names."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from pydantic import Field, model_validator

from skipstone.forms import Part

STDLIB = "{stdlib}"
"""Stands in a path for the folder of Python's standard library."""


class Text(NamedTuple):
    """What a source gives. prompt: what stands before the text and is only read, not predicted."""

    name: str
    text: str
    prompt: str = ""


def resolve(path: str, base: Path) -> Path:
    """An existing file or folder: absolute, or relative to the recipe's folder `base`, else to the current directory.

    FileNotFoundError that names what was tried.
    """
    wanted = Path(path.replace(STDLIB, sysconfig.get_paths()["stdlib"])).expanduser()
    tried = list(dict.fromkeys(folder.resolve() / wanted for folder in (base, Path.cwd())))  # absolute: its folder is ignored
    found = next((candidate for candidate in tried if candidate.exists()), None)
    if found is None:
        raise FileNotFoundError(
            f"{path} does not exist: tried {' and '.join(map(str, tried))}; expected a path relative to the recipe's folder or "
            "to the current directory, or an absolute one"
        )
    return found


class Origin(Part):
    """What all sources have. weight: the source's share of the training rows, relative to the others'."""

    path: str = Field(min_length=1)
    name: str = ""
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _named(cls, values: Any) -> Any:
        """Without a name, a source is called after its file, folder or data set."""
        if isinstance(values, dict) and isinstance(values.get("path"), str) and values.get("name") in (None, ""):
            values = {**values, "name": PurePath(values["path"]).stem.strip("{}") or values["path"]}
        return values


def digest(text: str) -> str:
    """A short hash of a text, its name where it has no other."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
