"""Shortlists: drafting with a part of the vocabulary (FR-Spec, Zhao et al., ACL 2025, arXiv 2502.14856, section 3).

The LM head of a small model with a large vocabulary takes much of a draft step, and texts consist mostly of few tokens. The
target verifies with its whole vocabulary, so a shortlist changes no text of a lossless method.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from skipstone.decoding.method import DraftingMethod
from skipstone.decoding.settings import setting, whole_number
from skipstone.engines.model_runner import ModelRunner
from skipstone.models.per_model_cache import PerModelCache

_SHORTLISTS: PerModelCache[Tensor | None] = PerModelCache()


@dataclass(frozen=True, kw_only=True)
class ShortlistMethod(DraftingMethod):
    """A method that drafts with an LM head."""

    draft_vocabulary: int | str | None = setting(
        None, "tokens that may be drafted: a number of first ids, or a JSON file with a list of ids; none: all.", kw_only=True
    )

    def check(self, model: ModelRunner) -> None:
        super().check(model)
        self.shortlist(self.draft_model_for(model))

    def draft_model_for(self, target: ModelRunner) -> ModelRunner:
        """The model that drafts for a target, by default itself."""
        return target

    def shortlist(self, drafter: ModelRunner) -> Tensor | None:
        """The ids [S] int64 that a model may draft, ascending and unique; None for all.

        ValueError for more ids than the model has or a file without a list of its ids; OSError for an unreadable file."""
        vocabulary: Any = self.draft_vocabulary
        if vocabulary is None:
            return None
        size, device = drafter.num_draftable_tokens, str(drafter.device)
        if isinstance(vocabulary, (str, Path)):
            file = Path(vocabulary).expanduser()
            stat = file.stat()
            key = str(file), stat.st_mtime_ns, stat.st_size, size, device  # the file may change
            return _SHORTLISTS.get(drafter.model, key, lambda: _make_shortlist(read_ids(file, size), drafter))
        whole_number("draft_vocabulary", vocabulary, 1)
        if vocabulary > size:
            raise ValueError(f"draft_vocabulary must be at most {size}, the ids that can be drafted, found {vocabulary}")
        return _SHORTLISTS.get(drafter.model, (vocabulary, size, device), lambda: _make_shortlist(range(vocabulary), drafter))


def _make_shortlist(ids: Iterable[int], drafter: ModelRunner) -> Tensor | None:
    unique = sorted(set(ids))
    has_all = len(unique) == drafter.head.weight.shape[0]
    return None if has_all else torch.tensor(unique, dtype=torch.int64, device=drafter.device)


def read_ids(file: Path, size: int, setting: str = "draft_vocabulary") -> list[int]:
    """The token ids in a JSON file, from 0 to size - 1. setting: name of the setting, for messages.

    ValueError for a file without such a list; OSError for an unreadable file."""
    try:
        ids = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{setting}: {file} is no JSON: {error}") from error
    if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
        raise ValueError(f"{setting}: {file} must hold a list of token ids, such as [0, 1, 17]")
    if invalid := [token for token in ids if not 0 <= token < size]:
        raise ValueError(f"{setting}: {file} must name ids from 0 to {size - 1}, found {invalid[0]}")
    return ids
