"""Sources of documents: text files, JSON lines, data sets of the Hugging Face hub, and scripts of a recipe.

Every source is a frozen model that refuses unknown keys. `read(base)` yields its texts in an order that does not depend on the
file system. A line, or a script's document, is named after its text: so a split stays the same when other documents come or go.
"""

import hashlib
import inspect
import string
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from types import ModuleType
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, ValidationInfo, field_validator, model_validator

from skipstone.utils.records import HubRecords, Placed, decoded, json_lines, value
from skipstone.utils.settings_files import SettingsPart

STDLIB = "{stdlib}"  # placeholder in a path for the folder of Python's standard library


class SourceText(NamedTuple):
    """A text of a source. prompt: text before it that is read, not predicted."""

    name: str
    text: str
    prompt: str = ""


def resolve(path: str, base: Path) -> Path:
    """An existing file or folder: absolute, or relative to the recipe's folder `base`, else to the current directory.

    FileNotFoundError that names what was tried.
    """
    relative = Path(path.replace(STDLIB, sysconfig.get_paths()["stdlib"])).expanduser()
    tried = list(dict.fromkeys(folder.resolve() / relative for folder in (base, Path.cwd())))  # once if it is absolute
    for candidate in tried:
        if candidate.exists():
            return candidate
    raise FileNotFoundError(f"{path} does not exist: tried {' and '.join(map(str, tried))}")


class DocumentSource(SettingsPart):
    """The fields of all sources. weight: the source's share of the training rows, relative to the others'."""

    path: str = Field(min_length=1)
    name: str = ""
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _named(cls, values: Any) -> Any:
        """Name a source after its file, folder or data set if it has no name."""
        if isinstance(values, dict) and isinstance(values.get("path"), str) and values.get("name") in (None, ""):
            values = {**values, "name": PurePath(values["path"]).stem.strip("{}") or values["path"]}
        return values


class TextFiles(DocumentSource):
    """One document per file: `path` itself, or the files of the folder `path` that fit `glob` and no pattern of `exclude`.

    exclude: patterns for the path within the folder, with forward slashes; `*` matches any characters, slashes too.
    """

    kind: Literal["text"] = "text"
    glob: str = "**/*.txt"
    exclude: tuple[str, ...] = ()

    @field_validator("glob")
    @classmethod
    def _relative(cls, glob: str) -> str:
        if not glob or PurePath(glob).is_absolute():
            raise ValueError(f"expected a pattern within the folder, such as **/*.txt, found {glob!r}")
        return glob

    def read(self, base: Path) -> Iterator[SourceText]:
        """Texts by their path within the folder, sorted. FileNotFoundError for none, ValueError for one that is not UTF-8."""
        root = resolve(self.path, base)
        found = [root] if root.is_file() else [file for file in root.glob(self.glob) if file.is_file()]
        files = {file.name if file == root else file.relative_to(root).as_posix(): file for file in found}
        kept = [name for name in sorted(files) if not any(fnmatchcase(name, pattern) for pattern in self.exclude)]
        if not kept:
            left_out = f", and exclude leaves out all {len(files)}" if files else ""
            raise FileNotFoundError(f"source {self.name!r}: no file in {root} fits glob {self.glob!r}{left_out}")
        for name in kept:
            advice = "convert it, or leave it out with exclude"
            yield SourceText(name, decoded(files[name].read_bytes(), str(files[name]), advice))


class RecordSource(DocumentSource):
    """A source of records. where: key -> accepted values; a pair [low, high] accepts all numbers between, both included. limit:
    most records that are taken."""

    where: dict[str, list[Any]] | None = None
    limit: int | None = Field(default=None, ge=1)

    @field_validator("where")
    @classmethod
    def _has_values(cls, where: dict[str, list[Any]] | None) -> dict[str, list[Any]] | None:
        for key, wanted in (where or {}).items():
            if not wanted:
                raise ValueError(f"where[{key!r}] is empty, so that nothing would be taken; expected at least one value")
            for span in (each for each in wanted if isinstance(each, list)):
                if len(span) != 2 or not all(map(_is_number, span)) or span[0] > span[1]:
                    raise ValueError(f"where[{key!r}]: expected [low, high], two numbers with low <= high, found {span}")
        return where

    def lines(self, base: Path) -> Placed:
        """The records of a file of JSON lines. FileNotFoundError if it is a folder."""
        path = resolve(self.path, base)
        if not path.is_file():
            raise FileNotFoundError(f"source {self.name!r}: expected a file of JSON lines, found the folder {path}")
        return json_lines(path)

    def select(self, records: Placed, expected: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each accepted (place, record). expected: the keys of a record, for messages. ValueError for a record that is no
        object or lacks a key, and if none is accepted."""
        seen = taken = 0
        for place, record in records:
            seen += 1
            if not isinstance(record, dict):
                raise ValueError(f"{place}: expected an object with {expected}, found {record!r:.80}")
            if all(_fits(value(record, key, place, "where"), wanted) for key, wanted in (self.where or {}).items()):
                taken += 1
                yield place, record
                if taken == self.limit:
                    return
        if not taken:
            found = f"none of its {seen} records fits where={self.where}"
            raise ValueError(f"source {self.name!r} ({self.path}) has no documents: {found}")


class _RecordDocuments(RecordSource):
    """Documents made of records.

    template: the document, with the keys of a record in braces ({{ and }} are braces). A list of texts becomes lines.
    prompt: text before it, such as a question, that is read but not predicted: the loss is the answer's alone.
    """

    template: str = "{text}"
    prompt: str | None = None

    @field_validator("template", "prompt")
    @classmethod
    def _plain_keys(cls, template: str | None, info: ValidationInfo) -> str | None:
        for _, key, form, conversion in string.Formatter().parse(template or ""):
            if key == "" or form or conversion:
                raise ValueError(f"expected plain keys such as {{question}} in the template, found {template!r}")
        if info.field_name == "template" and not _keys(template or ""):
            raise ValueError(f"the template {template!r} names no key in braces: every document would be the same")
        return template

    def _texts(self, records: Placed) -> Iterator[SourceText]:
        """The texts of the accepted records."""
        for place, record in self.select(records, f"the key {_keys(self.template)[0]!r}"):
            prompt = "" if self.prompt is None else self._filled(self.prompt, record, place)
            text = self._filled(self.template, record, place)
            yield SourceText(name_of(prompt + text), text, prompt)

    def _filled(self, template: str, record: dict[str, Any], place: str) -> str:
        parts = []
        for literal, key, _, _ in string.Formatter().parse(template):
            parts += [literal, "" if key is None else _text(value(record, key, place, "template"), key, place)]
        return "".join(parts)


class JsonLines(_RecordDocuments):
    """A file of JSON lines, one document a line."""

    kind: Literal["jsonl"] = "jsonl"
    template: str = "{question}\n{answer}"

    def read(self, base: Path) -> Iterator[SourceText]:
        """Texts in the file's order. ValueError with the number of the line that is no JSON or lacks a key."""
        return self._texts(self.lines(base))


class HubDataset(_RecordDocuments):
    """A split of a data set of the Hugging Face hub, read with the package `datasets`. revision: a commit to stay at.

    file: name of a file of JSON lines with the same records, which `local` reads from a data folder instead of the hub.
    """

    kind: Literal["hub"] = "hub"
    split: str
    config: str | None = None
    revision: str | None = None
    file: str | None = None

    def local(self, folder: Path) -> JsonLines:
        """The source that reads the same documents from its `file` in a folder."""
        shared = self.model_dump(include=set(_RecordDocuments.model_fields) - {"path"})
        return JsonLines(path=str((folder / str(self.file)).absolute()), **shared)

    def read(self, base: Path) -> Iterator[SourceText]:
        """Texts in the data set's order. ImportError that says what to install where `datasets` is missing."""
        files = f"give the folder of {self.file} with --data-dir, " if self.file else ""
        otherwise = f"{files}or make it a source of kind jsonl"
        records = HubRecords(self.path, self.split, self.config, self.revision)
        # a part of a large data set is read without fetching the whole
        return self._texts(records.read(f"source {self.name!r}", otherwise, streaming=self.limit is not None))


class ScriptSource(DocumentSource):
    """A Python file of the recipe, which is run: its function `documents(**arguments)` gives texts, or pairs of a prompt that
    is only read and the text that follows it."""

    kind: Literal["script"] = "script"
    arguments: dict[str, Any] = Field(default_factory=dict)

    def read(self, base: Path) -> Iterator[SourceText]:
        """Texts in the script's order. ValueError where it has no such function or gives something else than texts."""
        path = resolve(self.path, base)
        documents = getattr(_run(path), "documents", None)
        if not callable(documents):
            raise ValueError(f"{path} has no function documents(**arguments) that yields texts")
        signature = inspect.signature(documents)
        try:
            signature.bind(**self.arguments)
        except TypeError as error:
            raise ValueError(f"{path}: documents{signature} does not take arguments={self.arguments}: {error}") from error
        texts = documents(**self.arguments)
        if isinstance(texts, str) or not isinstance(texts, Iterable):
            raise ValueError(f"{path}: documents() must give an iterable of texts, found {type(texts).__name__}")
        for number, given in enumerate(texts):
            prompt, text = given if isinstance(given, tuple) and len(given) == 2 else ("", given)
            if not isinstance(prompt, str) or not isinstance(text, str):
                raise ValueError(f"{path}: document {number} is {type(given).__name__}, expected str or a pair of str")
            yield SourceText(name_of(prompt + text), text, prompt)


Source = Annotated[TextFiles | JsonLines | HubDataset | ScriptSource, Field(discriminator="kind")]
"""One entry of a recipe's list of sources, told apart by `kind`."""


def from_folder(sources: Sequence[Any], data_dir: Path | None) -> list[Any]:
    """The sources, each that names a `file` replaced by that file in `data_dir`. ValueError if none names one."""
    named = [source for source in sources if getattr(source, "file", None)]
    if data_dir is not None and not named:
        raise ValueError(f"--data-dir {data_dir} has no effect: no source of the hub names a `file` that may lie there")
    return [source.local(data_dir) if data_dir is not None and source in named else source for source in sources]


def _run(path: Path) -> ModuleType:
    """Run a file as a module that can import its neighbours, as a script can. No compiled file is written."""
    if not path.is_file():
        raise FileNotFoundError(f"expected a Python file, found the folder {path}")
    module = ModuleType(f"skipstone_recipe_{path.stem}_{name_of(str(path.resolve()))}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look their module up
    sys.path.append(str(path.parent))
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    finally:
        sys.path.remove(str(path.parent))
    return module


def name_of(text: str) -> str:
    """A short hash of a text, used as the name of a text without one."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


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
    """Whether a value equals a wanted one, or lies in one of their pairs [low, high]; True is not 1."""
    spans = [each for each in wanted if isinstance(each, list)] if _is_number(value) else []
    same = any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in wanted)
    return same or any(low <= value <= high for low, high in spans)
