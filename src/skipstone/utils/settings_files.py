"""Settings in files. A setting that is unknown or of the wrong type is an error."""

import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from skipstone.utils.spelling import did_you_mean


class SettingsPart(BaseModel):
    """Base class of a part of a settings file. ValueError for unknown settings."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, values: Any) -> Any:
        if isinstance(values, dict) and (unknown := [name for name in values if name not in cls.model_fields]):
            meant = did_you_mean(unknown[0], cls.model_fields)
            raise ValueError(f"unknown setting {unknown[0]!r}{meant}: expected one of {', '.join(cls.model_fields)}")
        return values


Form = TypeVar("Form", bound=SettingsPart)


def read_json(path: Path, form: type[Form], version: int, what: str, source: object = None) -> Form:
    """A file of JSON, checked. what: the thing it describes; source: the user's name for it.

    OSError if there is no file; ValueError for one that is damaged, has other content, or has another version.
    """
    source = path if source is None else source
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        settings = form.model_validate(values)
    except ValidationError as error:
        raise ValueError(f"{source}: {path.name} says nothing of {what}: {first_fault(error)}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{source}: {path.name} is damaged: {error}") from error
    if (other := values.get("version", version)) != version:
        raise ValueError(f"{source}: {path.name} holds {what} of version {other}, this skipstone reads version {version}")
    return settings


def first_fault(error: ValidationError) -> str:
    """One line about the first error."""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    if first["type"] == "missing":
        return f"{where} is missing"
    said = first["msg"].removeprefix("Value error, ")
    found = "" if first["type"] == "value_error" else f" (found {first.get('input')!r:.80})"  # our own sentences say it
    return f"{where}: {said}{found}".removeprefix(": ")
