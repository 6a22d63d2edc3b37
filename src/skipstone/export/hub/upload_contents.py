"""Recognises a folder or file and chooses the files that go to the hub; an error names what is missing."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from skipstone.engines.loading import expect_config
from skipstone.export.hub import provenance
from skipstone.export.hub.card import README
from skipstone.export.hub.provenance import DATA, Provenance
from skipstone.methods.adadecode.heads import CARD, WEIGHTS, read_heads
from skipstone.methods.auto import saved_profile
from skipstone.methods.drafting.layer_sets import PROFILE, read_profile
from skipstone.models.generation_config import OWN_FIELD
from skipstone.utils.files import file_digest

MODEL, HEADS, LAYER_SET, TUNED = "a model", "exit heads", "a layer set", "a tuned profile"
MARKS = {"config.json": MODEL, CARD: HEADS, PROFILE: LAYER_SET, saved_profile.TUNED: TUNED}
"""File that identifies a repository -> kind."""
RUNS = ("model", "heads")  # folders in that of a training run: its results
SINGLE = "model.safetensors"  # a model's weights in one file
INDEX = "model.safetensors.index.json"  # lists the weights of several files
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
TEXT_FILES = (".json", ".jinja", ".model", ".txt", ".tiktoken")  # suffixes of a model's files other than weights
LICENCES = ("LICENSE", "LICENSE.md", "NOTICE")
DRAFTS = "num_assistant_tokens"  # in generation_config.json, as `skipstone export` writes it: this model drafts


@dataclass(frozen=True)
class UploadContents:
    """kind: one of MARKS' values. about: the records for its card. files: name in the repository -> the local file, or its
    content. left_out: names of files that are not uploaded."""

    kind: str
    about: Provenance
    files: dict[str, Path | bytes]
    left_out: tuple[str, ...] = ()

    @property
    def digests(self) -> dict[str, tuple[int, str]]:
        """file -> (bytes, SHA-256), without the card."""
        return {name: _digest(content) for name, content in self.files.items() if name != README}


def collect_upload(path: Path) -> UploadContents:
    """The upload of what lies at a path. OSError if nothing does; ValueError for what skipstone has not made, and for what is
    incomplete or damaged."""
    if path.is_file():
        return _file(path)
    if not path.is_dir():
        raise FileNotFoundError(2, "no such file or folder", str(path))
    if (path / "config.json").is_file():
        return _model(path)
    if (path / CARD).is_file() or (path / WEIGHTS).is_file():
        return _heads(path)
    for name in RUNS:
        if (path / name / "config.json").is_file() or (path / name / CARD).is_file():
            raise ValueError(f"{path} is the folder of a run: push what it has made, {path / name}")
    raise ValueError(f"{path} holds nothing that skipstone has made: no model, no exit heads; a profile is a file")


def _heads(folder: Path) -> UploadContents:
    _expect(folder, (CARD, WEIGHTS))
    return _of_folder(HEADS, provenance.of_heads(read_heads(folder).card, folder), folder, {CARD, WEIGHTS})


def _model(folder: Path) -> UploadContents:
    own = provenance.json_in(folder / "generation_config.json")
    trained, drafts = (folder / DATA).is_file(), DRAFTS in own
    if not trained and not drafts and OWN_FIELD not in own:
        raise ValueError(f"{folder} holds a model that skipstone has neither trained nor exported: `hf upload` uploads it")
    expect_config(folder)  # whether its config can be read
    weights = _weights(folder)
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise ValueError(f"{folder} is incomplete: it has no tokenizer ({', '.join(TOKENIZERS)})")
    texts = {path.name for path in folder.iterdir() if path.suffix in TEXT_FILES and path.name != INDEX}
    return _of_folder(MODEL, provenance.of_checkpoint(folder, drafts), folder, {*weights, *texts})


def _weights(folder: Path) -> list[str]:
    """Names of the files of a model's weights. ValueError if one is missing, damaged or lacks weights that the index lists."""
    if (folder / SINGLE).is_file():
        _keys(folder / SINGLE)
        return [SINGLE]
    if not (folder / INDEX).is_file():
        raise ValueError(f"{folder} is incomplete: it has no weights ({SINGLE}, or several files with {INDEX})")
    try:
        listed = set(json.loads((folder / INDEX).read_text("utf-8"))["weight_map"].items())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{folder / INDEX} is damaged: it lists no weights ({error})") from error
    shards = sorted({file for _, file in listed})
    _expect(folder, shards)
    if missing := sorted(listed - {(name, shard) for shard in shards for name in _keys(folder / shard)}):
        name, shard = missing[0]
        raise ValueError(f"{folder} is incomplete: {shard} lacks {name}, which {INDEX} lists")
    return [*shards, INDEX]


def _keys(path: Path) -> set[str]:
    """The names of a file's weights, without reading them."""
    try:
        with safe_open(path, "pt") as file:
            return set(file.keys())
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _file(path: Path) -> UploadContents:
    """A file of `skipstone search`, or of `skipstone tune`."""
    try:
        profile: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no profile: {error}; a model or exit heads are pushed as a folder") from error
    if not isinstance(profile, dict) or not {"state", "attention"} & set(profile):
        raise ValueError(f"{path} is neither a profile of `skipstone search` nor one of `skipstone tune`")
    if "state" in profile:
        tuned = saved_profile.read(path).model_dump()
        tuned["key"].pop(saved_profile.NODE, None)  # the machine's name is private
        content = (json.dumps(tuned, indent=1) + "\n").encode()
        return UploadContents(TUNED, provenance.of_tuned(tuned), {saved_profile.TUNED: content})
    return UploadContents(LAYER_SET, provenance.of_profile(read_profile(path)), {PROFILE: path})


def _expect(folder: Path, names: Iterable[str]) -> None:
    """ValueError where files are missing."""
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ValueError(f"{folder} is incomplete: it has no {', '.join(missing)}")


def _of_folder(kind: str, about: Provenance, folder: Path, names: set[str]) -> UploadContents:
    """The files of a folder with these names, its card and its licence."""
    entries = sorted(folder.iterdir())
    wanted = names | {README, *LICENCES}
    chosen: dict[str, Path | bytes] = {path.name: path for path in entries if path.name in wanted and path.is_file()}
    return UploadContents(kind, about, chosen, tuple(path.name for path in entries if path.name not in chosen))


def _digest(content: Path | bytes) -> tuple[int, str]:
    if isinstance(content, bytes):
        return len(content), hashlib.sha256(content).hexdigest()
    return content.stat().st_size, file_digest(content)
