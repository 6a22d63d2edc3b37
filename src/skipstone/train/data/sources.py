"""Where documents come from: text files, JSON lines, data sets of the Hugging Face hub, and scripts of a recipe.

Every source is a frozen model that refuses unknown keys. `read(base)` yields its texts in an order that does not depend on the
file system. What has no name of its own (a line, a script's document) is named after its text, so that it keeps its place in a
split when other documents come or go.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from types import ModuleType
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from skipstone.records import decoded
from skipstone.train.data.reading import Origin, Text, digest, resolve
from skipstone.train.data.records import HubDataset, JsonLines


class TextFiles(Origin):
    """One document per file: `path` itself, or the files of the folder `path` that fit `glob` and no pattern of `exclude`.

    exclude: patterns for the path within the folder, with forward slashes; `*` stands for any characters, slashes too.
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

    def read(self, base: Path) -> Iterator[Text]:
        """Texts by their path within the folder, sorted. FileNotFoundError for none, ValueError for one that is not UTF-8."""
        root = resolve(self.path, base)
        found = [root] if root.is_file() else [file for file in root.glob(self.glob) if file.is_file()]
        files = {file.name if file == root else file.relative_to(root).as_posix(): file for file in found}
        kept = [name for name in sorted(files) if not any(fnmatchcase(name, pattern) for pattern in self.exclude)]
        if not kept:
            left_out = f", and exclude leaves out all {len(files)}" if files else ""
            raise FileNotFoundError(f"source {self.name!r}: no file in {root} fits glob {self.glob!r}{left_out}")
        for name in kept:
            yield Text(name, decoded(files[name].read_bytes(), str(files[name]), "convert it, or leave it out with exclude"))


class Script(Origin):
    """A Python file of the recipe, which is run: its function `documents(**arguments)` gives texts, or pairs of a prompt that
    is only read and the text that follows it."""

    kind: Literal["script"] = "script"
    arguments: dict[str, Any] = Field(default_factory=dict)

    def read(self, base: Path) -> Iterator[Text]:
        """Texts in the script's order. ValueError where it has no such function or gives something else than texts."""
        path = resolve(self.path, base)
        documents = getattr(_run(path), "documents", None)
        if not callable(documents):
            raise ValueError(f"{path} has no function documents(**arguments) that yields texts")
        _check_arguments(documents, self.arguments, path)
        texts = documents(**self.arguments)
        if isinstance(texts, str) or not isinstance(texts, Iterable):
            raise ValueError(f"{path}: documents() must give an iterable of texts, found {type(texts).__name__}")
        for number, given in enumerate(texts):
            prompt, text = given if isinstance(given, tuple) and len(given) == 2 else ("", given)
            if not isinstance(prompt, str) or not isinstance(text, str):
                raise ValueError(f"{path}: document {number} is {type(given).__name__}, expected str or a pair of str")
            yield Text(digest(prompt + text), text, prompt)


Source = Annotated[TextFiles | JsonLines | HubDataset | Script, Field(discriminator="kind")]
"""One entry of a recipe's list of sources, told apart by `kind`."""


def _run(path: Path) -> ModuleType:
    """The module of a file, which finds its neighbours by import, as a script does; no compiled file is left behind."""
    if not path.is_file():
        raise FileNotFoundError(f"expected a Python file, found the folder {path}")
    module = ModuleType(f"skipstone_recipe_{path.stem}_{digest(str(path.resolve()))}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look their module up
    sys.path.append(str(path.parent))
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    finally:
        sys.path.remove(str(path.parent))
    return module


def _check_arguments(function: Callable[..., Any], arguments: dict[str, Any], path: Path) -> None:
    signature = inspect.signature(function)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ValueError(
            f"{path}: documents{signature} does not take arguments={arguments}: {error}; change them in the recipe"
        ) from error
