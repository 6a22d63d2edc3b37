"""What `LayeredModel` asks of an engine."""

from typing import Protocol

import torch
from torch import Tensor, nn

from skipstone.models.kvstore import KVStore
from skipstone.models.passes import Pass, SkipSet

ENGINES = ("auto", "eager", "native")
"""The names that a user may ask for. "auto" is native where that can run the model, and eager elsewhere."""


class Engine(Protocol):
    """What computes one model, for as long as the facts of the model hold.

    name: "eager" or "native". detail: one line for users, on what it runs and where. dtype: of the hidden states that it hands
    out. An engine must not refer to its model, which would then never be freed; its modules it may.
    """

    @property
    def name(self) -> str: ...

    @property
    def detail(self) -> str: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """[B, n] ids and positions -> [B, n, d], the states that enter layer 0."""
        ...

    def run(self, hidden: Tensor, at: Pass, store: KVStore, layers: range, skip: SkipSet | None = None) -> Tensor:
        """Run layers over [b, n, d], writing keys and values to the pass's slots. Returns [b, n, d].

        skip: sublayers that add nothing to the residual stream in this pass.
        """
        ...

    def normed(self, hidden: Tensor) -> Tensor:
        """What the LM head reads: states after the final norm. [..., d] -> [..., d']."""
        ...

    def project(self, normed: Tensor, head: nn.Module | None = None) -> Tensor:
        """LM head and what the family does after it. [..., d'] -> [..., V] float32. head: instead of the model's own."""
        ...
