"""A head that drafts from hidden states of its target: EAGLE-3, or a checkpoint's layer for multi-token prediction (MTP)."""

from typing import Any

import torch
from torch import Tensor

from skipstone.engines.choose_engine import EngineOptions
from skipstone.engines.model_runner import ModelRunner


class FeatureHead(ModelRunner):
    """One decoder layer, a norm and an LM head, which read states of the target next to the tokens that follow them.

    Column p pairs the target's states of token p with token p + 1. The layer runs it at position p, and its output predicts
    token p + 2. The column of a draft has the head's own output in place of the target's states.

    depths: numbers of target layers; the head reads the states after each of them. D: size of these states. d: size of a
    column's state. w: size of what enters the layer. V: size of the target's vocabulary; logits of tokens that the head cannot
    draft are -inf.
    """

    depths: tuple[int, ...]

    def __init__(self, model: Any, options: EngineOptions | None = None) -> None:
        self._prepare(model, options or EngineOptions())

    def read_states(self, states: Tensor) -> Tensor:
        """The target's states at all depths, next to each other, [..., E * D] -> the states of columns, [..., d]."""
        raise NotImplementedError

    def enter(self, tokens: Tensor, states: Tensor) -> Tensor:
        """What enters the layer. tokens: [...] int64. states: [..., d]. Returns [..., w]."""
        raise NotImplementedError

    def feed_back(self, hidden: Tensor) -> Tensor:
        """The states of the drafts' columns, from what leaves the layer. [..., d] -> [..., d]."""
        raise NotImplementedError

    @property
    def weights(self) -> list[Tensor]:
        """All weights but the embedding, all experts of a mixture included: what a draft step may read."""
        embedding = self.model.get_input_embeddings().weight
        return [weight for weight in self.model.parameters() if weight is not embedding]

    @property
    def nbytes(self) -> int:
        """Bytes of memory that its weights take in addition to the target's."""
        raise NotImplementedError

    @property
    def state_size(self) -> int:
        """d, as above."""
        return self.head.weight.shape[1]

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Columns without states, [B, n, w], to measure what a token takes."""
        size = (*tokens.shape, self.state_size)
        return self.enter(tokens, torch.zeros(size, dtype=self.dtype, device=tokens.device))
