"""The tokens that drafts are picked from. The LM head of a small model with a large vocabulary is a large part of what a draft
costs, and most of what is said is said with few of its tokens (FR-Spec, Zhao et al., ACL 2025, arXiv 2502.14856, section 3).

The target verifies with its whole vocabulary: a shortlist changes speed and no text of a lossless method.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from skipstone.decoding.method import DraftingMethod
from skipstone.decoding.settings import setting, whole_number
from skipstone.engines.model_runner import ModelRunner
from skipstone.models.per_model_cache import PerModelCache

_MADE: PerModelCache[Tensor | None] = PerModelCache()


def vocabulary_setting() -> Any:
    """The field `draft_vocabulary` of a method."""
    return setting(
        None,
        "tokens that drafts are picked from: the first so many ids, or a JSON file with a list of ids; none: all.",
        kw_only=True,
    )


class ShortlistMethod(DraftingMethod):
    """A method whose drafts an LM head picks, from all tokens or from some. Its fields have the one below."""

    draft_vocabulary: int | str | None

    def shortlist(self, drafter: ModelRunner) -> Tensor | None:
        """[S] int64, the ids that a model's drafts are picked from, ascending, each once; None for all that it may draft.
        ValueError for a number of ids that it does not have and for a file that holds no list of its ids, OSError for a file
        that cannot be read."""
        wanted: Any = self.draft_vocabulary
        if wanted is None:
            return None
        size = drafter.num_draftable_tokens
        if isinstance(wanted, (str, Path)):
            file = Path(wanted).expanduser()
            about = file.stat()
            key = str(file), about.st_mtime_ns, about.st_size, size, str(drafter.device)  # it may be written anew
            return _MADE.get(drafter.model, key, lambda: _made(read_ids(file, size), drafter))
        whole_number("draft_vocabulary", wanted, 1)
        if wanted > size:
            raise ValueError(f"draft_vocabulary must be at most {size}, the ids that can be drafted, found {wanted}")
        return _MADE.get(drafter.model, (wanted, size, str(drafter.device)), lambda: _made(range(wanted), drafter))


def _made(ids: Iterable[int], drafter: ModelRunner) -> Tensor | None:
    listed = sorted(set(ids))
    whole = len(listed) == drafter.head.weight.shape[0]
    return None if whole else torch.tensor(listed, dtype=torch.int64, device=drafter.device)


def read_ids(file: Path, size: int, setting: str = "draft_vocabulary") -> list[int]:
    """The token ids that a file lists, each from 0 to size - 1. setting: what the file is given as, for messages.

    ValueError for a file that holds no such list, OSError for one that cannot be read."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{setting}: {file} is no JSON: {error}") from error
    if not isinstance(found, list) or not found or not all(type(one) is int for one in found):
        raise ValueError(f"{setting}: {file} must hold a list of token ids, such as [0, 1, 17]")
    if beyond := [one for one in found if not 0 <= one < size]:
        raise ValueError(f"{setting}: {file} must name ids from 0 to {size - 1}, found {beyond[0]}")
    return found
