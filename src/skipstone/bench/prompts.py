"""What is continued: prompts cut from real text, the same ones for the same seed.

The default text is the source of installed pure-Python packages, code that a model trained on the standard library has not
seen.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from skipstone.loading import bos_prefix
from skipstone.records import json_lines

PACKAGES = ("rich", "typer", "pydantic")
KEYS = ("prompt", "text")


@dataclass(frozen=True)
class Document:
    """A text that prompts come from. whole: the text is itself a prompt; otherwise prompts are cut out of it."""

    name: str
    text: str
    whole: bool = False


@dataclass(frozen=True)
class Prompt:
    """Token ids [T] int64 and where they come from."""

    source: str
    ids: Tensor

    @property
    def digest(self) -> str:
        """A short hash of the ids, to tell whether two runs used the same prompts."""
        return digest(self.ids.tolist())


def digest(tokens: Sequence[int]) -> str:
    """A short hash of token ids."""
    return hashlib.sha256(" ".join(map(str, tokens)).encode()).hexdigest()[:12]


def read(where: str | None) -> list[Document]:
    """Documents of a .jsonl file (one prompt a line), a folder, a glob, or, for None, of installed packages.

    OSError where nothing is found, ValueError for a .jsonl line that holds no prompt.
    """
    if where is None:
        return _installed()
    path = Path(where).expanduser()
    if path.suffix == ".jsonl":
        return _whole_prompts(path)
    files = sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else sorted(map(Path, glob.glob(str(path))))
    documents = _texts((str(f), f) for f in files if f.is_file() and not f.name.startswith("."))
    if not documents:
        raise FileNotFoundError(f"no text file found at {where}; expected a .jsonl file, a folder of text files or a glob")
    return documents


def choose(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, count: int, prompt_tokens: int, seed: int
) -> list[Prompt]:
    """`count` different prompts of `prompt_tokens` tokens (a document that is itself a prompt: at most so many, its last ones).

    Documents are taken in a seeded order, one prompt each before any gives a second one. ValueError where there are not
    enough.
    """
    rng = random.Random(seed)
    queue = list(documents)
    rng.shuffle(queue)
    prefix = bos_prefix(tokenizer)
    encoded: dict[int, list[int]] = {}
    prompts: dict[tuple[int, ...], Prompt] = {}
    while queue and len(prompts) < count:
        fruitful = []
        for document in queue:
            if len(prompts) == count:
                break
            if id(document) not in encoded:
                encoded[id(document)] = list(tokenizer(document.text, add_special_tokens=False)["input_ids"])
            ids = _cut(encoded[id(document)], document.whole, prompt_tokens - len(prefix), rng)
            if ids and tuple(ids) not in prompts:
                prompts[tuple(ids)] = Prompt(document.name, torch.tensor(prefix + ids))
                fruitful.append(document)
        queue = [document for document in fruitful if not document.whole]
    if len(prompts) < count:
        raise ValueError(
            f"only {len(prompts)} different prompts of {prompt_tokens} tokens could be taken from {len(documents)} documents, "
            f"{count} are needed: give more text, or ask for fewer or shorter prompts"
        )
    return list(prompts.values())


def _cut(ids: list[int], whole: bool, length: int, rng: random.Random) -> list[int] | None:
    """The tokens before a cut point; None where the document is too short."""
    if whole:
        return ids[-length:] or None
    if len(ids) <= length:
        return None
    end = rng.randrange(length, len(ids))
    return ids[end - length : end]


def _installed() -> list[Document]:
    files = []
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        for root in (spec.submodule_search_locations or ()) if spec else ():
            files += [(f"{package}/{f.relative_to(root).as_posix()}", f) for f in sorted(Path(root).rglob("*.py"))]
    return _texts(files)


def _texts(files: Iterable[tuple[str, Path]]) -> list[Document]:
    documents = []
    for name, path in files:
        try:
            documents.append(Document(name, path.read_text(encoding="utf-8")))
        except UnicodeDecodeError:  # not a text
            continue
    return documents


def _whole_prompts(path: Path) -> list[Document]:
    documents = []
    for place, record in json_lines(path):
        text = next((record[key] for key in KEYS if isinstance(record, dict) and isinstance(record.get(key), str)), None)
        if not text:
            found = ", ".join(record) if isinstance(record, dict) else type(record).__name__
            raise ValueError(f"{place}: expected a text under the key {' or '.join(KEYS)}, found {found}")
        documents.append(Document(f"{path.name}:{place.rpartition(' ')[2]}", text, whole=True))
    return documents
