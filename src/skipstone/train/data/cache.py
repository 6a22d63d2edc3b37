"""Results on disk, one folder each, complete or not there at all; arrays are mapped into memory, not read."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

FORMAT = 2
"""Part of every key: raise it when the same documents give other rows."""
CONTENTS = "contents.json"


def key(facts: list[Any], tokenizer: PreTrainedTokenizerBase) -> str:
    """The name of a result, a hash of all that it depends on: what JSON can hold, and a tokenizer. ValueError for a tokenizer
    that cannot be told from others."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            f"prepared data are kept for tokenizers of the tokenizers package (PreTrainedTokenizerFast), whose content can be "
            f"compared, found {type(tokenizer).__name__}"
        )
    parts = [FORMAT, facts, backend.to_str(), tokenizer.eos_token_id]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def save(folder: Path, arrays: Sequence[Tensor], report: dict[str, Any]) -> None:
    """Write tensors and a report that JSON can hold, under a temporary name that becomes `folder` when all is on disk.

    Where another process was faster, its result stays. OSError (a full disk) leaves nothing behind.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    temporary.mkdir()
    try:
        files = {}
        for index, tensor in enumerate(arrays):
            path = temporary / f"{index}.npy"
            with path.open("wb") as file:
                np.save(file, tensor.numpy(), allow_pickle=False)
                _to_disk(file)
            files[path.name] = _hash(path)
        with (temporary / CONTENTS).open("w", encoding="utf-8") as file:
            json.dump({"files": files, "report": report}, file, indent=1)
            _to_disk(file)
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def load(folder: Path) -> tuple[list[Tensor], dict[str, Any]] | None:
    """What `save` wrote, the tensors mapped from their files; None where there is nothing.

    What is damaged is removed with a warning, and None.
    """
    if not folder.is_dir():
        return None
    try:
        contents = json.loads((folder / CONTENTS).read_text(encoding="utf-8"))
        return [_mapped(folder / name, sha256) for name, sha256 in contents["files"].items()], contents["report"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        warnings.warn(f"the cached data in {folder} is damaged ({error}) and is made anew", UserWarning, stacklevel=2)
        shutil.rmtree(folder)
        return None


def _to_disk(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _mapped(path: Path, sha256: str) -> Tensor:
    if (found := _hash(path)) != sha256:
        raise ValueError(f"{path.name} has the SHA-256 {found:.12}, expected {sha256:.12}")
    return torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))  # "c": torch wants an array it may write to


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
