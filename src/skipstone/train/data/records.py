"""Documents made of records: JSON lines and data sets of the Hugging Face hub."""

from __future__ import annotations

import string
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from skipstone.records import OnHub, json_lines, value
from skipstone.train.data.reading import Origin, Text, digest, resolve


class _Records(Origin):
    """Documents made of records.

    template: the document, with the keys of a record in braces ({{ and }} are braces). A list of texts stands one per line.
    prompt: what stands before it, such as a question, and is read but not predicted: the loss is the answer's alone.
    where: key -> values that are taken; [low, high] among them takes what lies between, both included.
    limit: only the first so many that are taken.
    """

    template: str = "{text}"
    prompt: str | None = None
    where: dict[str, list[Any]] | None = None
    limit: int | None = Field(default=None, ge=1)

    @field_validator("template", "prompt")
    @classmethod
    def _plain_keys(cls, template: str | None) -> str | None:
        for _, key, form, conversion in string.Formatter().parse(template or ""):
            if key == "" or form or conversion:
                raise ValueError(f"expected plain keys such as {{question}} in the template, found {template!r}")
        return template

    @field_validator("template")
    @classmethod
    def _has_keys(cls, template: str) -> str:
        if not _keys(template):
            raise ValueError(f"the template {template!r} names no key in braces: every document would be the same")
        return template

    @field_validator("where")
    @classmethod
    def _has_values(cls, where: dict[str, list[Any]] | None) -> dict[str, list[Any]] | None:
        for key, wanted in (where or {}).items():
            if not wanted:
                raise ValueError(f"where[{key!r}] is empty, so that nothing would be taken; expected at least one value")
            for span in (one for one in wanted if isinstance(one, list)):
                if len(span) != 2 or not all(map(_is_number, span)) or span[0] > span[1]:
                    raise ValueError(f"where[{key!r}]: expected [low, high], two numbers with low <= high, found {span}")
        return where

    def _texts(self, records: Iterable[tuple[str, Any]]) -> Iterator[Text]:
        """The texts of the (place, record) that are taken. ValueError that names the place, or says that none was taken."""
        seen = taken = 0
        for place, record in records:
            seen += 1
            if not isinstance(record, dict):
                raise ValueError(f"{place}: expected an object with the key {_keys(self.template)[0]!r}, found {record!r:.80}")
            if all(_fits(value(record, key, place, "where"), wanted) for key, wanted in (self.where or {}).items()):
                prompt = "" if self.prompt is None else self._filled(self.prompt, record, place)
                text = self._filled(self.template, record, place)
                taken += 1
                yield Text(digest(prompt + text), text, prompt)
                if taken == self.limit:
                    return
        if not taken:
            reason = f"none of its {seen} records fits where={self.where}" if seen else "it is empty"
            raise ValueError(f"source {self.name!r} ({self.path}) has no documents: {reason}")

    def _filled(self, template: str, record: dict[str, Any], place: str) -> str:
        parts = []
        for literal, key, _, _ in string.Formatter().parse(template):
            parts += [literal, "" if key is None else _text(value(record, key, place, "template"), key, place)]
        return "".join(parts)


class JsonLines(_Records):
    """A file of JSON lines, one document a line."""

    kind: Literal["jsonl"] = "jsonl"
    template: str = "{question}\n{answer}"

    def read(self, base: Path) -> Iterator[Text]:
        """Texts in the file's order. ValueError with the number of the line that is no JSON or lacks a key."""
        path = resolve(self.path, base)
        if not path.is_file():
            raise FileNotFoundError(f"source {self.name!r}: expected a file of JSON lines, found the folder {path}")
        return self._texts(json_lines(path))


class HubDataset(_Records):
    """A split of a data set of the Hugging Face hub, read with the package `datasets`. revision: a commit to stay at.

    file: what the same records are called as a file of JSON lines, in a data folder of those who have no hub.
    """

    kind: Literal["hub"] = "hub"
    split: str
    config: str | None = None
    revision: str | None = None
    file: str | None = None

    def local(self, folder: Path) -> JsonLines | HubDataset:
        """The source that reads the records from `folder`; itself where it names no file. Both give the same documents."""
        if self.file is None:
            return self
        shared = self.model_dump(include=set(_Records.model_fields) - {"path"})
        return JsonLines(path=str((folder / self.file).absolute()), **shared)

    def read(self, base: Path) -> Iterator[Text]:
        """Texts in the data set's order. ImportError that says what to install where `datasets` is missing."""
        files = f"give the folder of {self.file} with --data-dir, " if self.file else ""
        otherwise = f"{files}or make it a source of kind jsonl"
        records = OnHub(self.path, self.split, self.config, self.revision)
        # a part of a large data set is read without fetching the whole
        return self._texts(records.read(f"source {self.name!r}", otherwise, streaming=self.limit is not None))


def _keys(template: str) -> list[str]:
    return [key for _, key, _, _ in string.Formatter().parse(template) if key]


def _text(value: Any, key: str, place: str) -> str:
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if isinstance(value, str) or _is_number(value):
        return str(value)
    raise ValueError(f"{place}: expected a text, a number or a list of texts under {key!r}, found {value!r:.80}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _fits(value: Any, wanted: list[Any]) -> bool:
    """Whether a value is one of those, or lies in one of their [low, high]; True is not 1."""
    spans = [one for one in wanted if isinstance(one, list)] if _is_number(value) else []
    same = any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in wanted)
    return same or any(low <= value <= high for low, high in spans)
