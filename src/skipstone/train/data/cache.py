"""Prepared data on the disk: a folder for each result, complete or not there; arrays are mapped into memory, not read."""

import json
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from skipstone.files import digest, file_digest, first_folder, write_json

FORMAT = 2  # part of every key: raise it when the same documents give other rows
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
    return digest([FORMAT, facts, backend.to_str(), tokenizer.eos_token_id], 32)


def save(folder: Path, arrays: Sequence[Tensor], report: dict[str, Any]) -> None:
    """Write tensors and a report that JSON can hold. Where another process was faster, its result stays. OSError (a full disk)
    leaves nothing behind."""
    with first_folder(folder) as made:
        for index, tensor in enumerate(arrays):
            np.save(made / f"{index}.npy", tensor.numpy(), allow_pickle=False)
        files = {f"{index}.npy": file_digest(made / f"{index}.npy") for index in range(len(arrays))}
        write_json(made / CONTENTS, {"files": files, "report": report})


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


def _mapped(path: Path, sha256: str) -> Tensor:
    if (found := file_digest(path)) != sha256:
        raise ValueError(f"{path.name} has the SHA-256 {found:.12}, expected {sha256:.12}")
    return torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))  # "c": torch wants an array it may write to
