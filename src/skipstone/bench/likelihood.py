"""How likely a model itself finds a text: what a lossy method costs, where there is no score to ask."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from skipstone.models.layered import LayeredModel

CHUNK = 256
"""Positions whose logits exist at once."""


@torch.inference_mode()
def log_likelihood(model: PreTrainedModel, prompt: Tensor, answer: list[int]) -> float:
    """Sum over an answer's tokens of log p, in nats, at temperature 1, each after all before it. prompt: [T] int64, T >= 1."""
    if not answer:
        return 0.0
    layered = LayeredModel(model)
    wanted = torch.tensor(answer, device=layered.device)
    ids = torch.cat([prompt.to(layered.device), wanted[:-1]])[None]
    states = layered.decoder(input_ids=ids, use_cache=False).last_hidden_state[:, len(prompt) - 1 :]
    total = torch.zeros((), dtype=torch.double, device=layered.device)
    for part, tokens in zip(states.split(CHUNK, 1), wanted.split(CHUNK), strict=True):
        chosen = layered.project(part)[0].double().log_softmax(-1)
        total += chosen.gather(1, tokens[:, None]).sum()
    return float(total)
