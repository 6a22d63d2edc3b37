"""Settings of OpenAI's that transformers does not have, as logits processors."""

from collections.abc import Mapping

import torch
from torch import Tensor


class Bias:
    """Adds to single tokens' logits. biases: token id -> what is added."""

    def __init__(self, biases: Mapping[int, float]) -> None:
        self.ids = torch.tensor(list(biases), dtype=torch.int64, device="cpu")
        self.values = torch.tensor(list(biases.values()), dtype=torch.float32, device="cpu")

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """ids: [1, T]. scores: [1, V]."""
        scores = scores.clone()
        scores[:, self.ids.to(scores.device)] += self.values.to(scores.device, scores.dtype)
        return scores


class Penalty:
    """Takes from the logits of tokens that were written already: `presence` once, `frequency` for each time. prompt: tokens
    before the first that was written."""

    def __init__(self, prompt: int, presence: float, frequency: float) -> None:
        self.prompt, self.presence, self.frequency = prompt, presence, frequency

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """ids: [1, T]. scores: [1, V]."""
        counts = torch.bincount(ids[0, self.prompt :], minlength=scores.shape[-1])[None]  # [1, V]
        return scores - self.frequency * counts.to(scores.dtype) - self.presence * (counts > 0).to(scores.dtype)
