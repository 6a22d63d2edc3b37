"""The tokens that drafts are picked from. The LM head of a small model with a large vocabulary is a large part of what a draft
costs, and most of what is said is said with few of its tokens (FR-Spec, Zhao et al., ACL 2025, arXiv 2502.14856, section 3).

The target verifies with its whole vocabulary: a shortlist changes speed and never a text.
"""

import json
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import torch
from torch import Tensor

from skipstone.decoding.method import Method
from skipstone.decoding.settings import setting, whole_number
from skipstone.models.layered import LayeredModel
from skipstone.models.memo import Memo

_MADE: Memo[Tensor] = Memo()


@dataclass(frozen=True)
class ShortlistMethod(Method):
    """A method whose drafts an LM head picks, from all tokens or from some."""

    _: KW_ONLY
    draft_vocabulary: int | str | None = setting(
        None, "tokens that drafts are picked from: the first so many ids, or a JSON file with a list of ids; none: all."
    )

    def shortlist(self, drafter: LayeredModel) -> Tensor | None:
        """[S] int64, the ids that a model's drafts are picked from, ascending; None for all of them. ValueError for a number of
        ids that it does not have and for a file that holds no list of its ids, OSError for a file that cannot be read."""
        wanted = self.draft_vocabulary
        return (
            None if wanted is None else _MADE.get(drafter.model, (wanted, str(drafter.device)), lambda: _made(wanted, drafter))
        )


def _made(wanted: int | str, drafter: LayeredModel) -> Tensor:
    size = min(int(drafter.head.weight.shape[0]), drafter.embeddings)
    if not isinstance(wanted, str):
        whole_number("draft_vocabulary", wanted, 1)
        ids = range(wanted)
    else:
        ids = _read(Path(wanted))
    if not ids or min(ids) < 0 or max(ids) >= size:
        raise ValueError(f"draft_vocabulary={wanted} must name ids of the model's vocabulary, 0 to {size - 1}, at least one")
    return torch.tensor(sorted(set(ids)), device=drafter.device)


def _read(path: Path) -> list[int]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"draft_vocabulary: {path} is no JSON: {error}") from error
    if not isinstance(found, list) or not all(type(one) is int for one in found):
        raise ValueError(f"draft_vocabulary: {path} must hold a list of token ids, such as [0, 1, 17]")
    return found
