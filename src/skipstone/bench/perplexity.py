"""How likely the model itself finds a text: what a lossy method costs, and what every exit knows (LayerSkip, Table 1)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from skipstone.models.exits import ExitTally, layer_states
from skipstone.models.layered import LayeredModel

CHUNK = 256  # positions whose logits exist at once


@dataclass(frozen=True)
class ExitFigures:
    """What every exit knows of a task's answers. Lists of L layers, layers[:1] first."""

    tokens: int  # predicted ones
    perplexity: list[float]  # of a token, teacher-forced
    agreement: list[float]  # share of tokens at which an exit's best one is the last layer's


@torch.inference_mode()
def log_likelihood(model: PreTrainedModel, prompt: Tensor, answer: list[int]) -> float:
    """Sum over an answer's tokens of log p, in nats, at temperature 1, each after all before it. prompt: [T] int64, T >= 1."""
    if not answer:
        return 0.0
    layered = LayeredModel(model)
    wanted = torch.tensor(answer, device=layered.device)  # [A]
    ids = torch.cat([prompt.to(layered.device), wanted[:-1]])[None]  # [1, T + A - 1]
    states = layered.decoder(input_ids=ids, use_cache=False).last_hidden_state[:, len(prompt) - 1 :]  # [1, A, d]
    total = torch.zeros((), dtype=torch.double, device=layered.device)
    for part, tokens in zip(states.split(CHUNK, 1), wanted.split(CHUNK), strict=True):
        total += layered.project(part)[0].double().log_softmax(-1).gather(1, tokens[:, None]).sum()
    return float(total)


@torch.inference_mode()
def at_every_exit(
    model: PreTrainedModel, pairs: Sequence[tuple[Tensor, Tensor]], done: Callable[[], None] = lambda: None
) -> ExitFigures:
    """Perplexity of answers after their prompts at every exit, accumulated in float64. done: called after each.

    pairs: (prompt [T], answer [A]) int64, T and A at least 1. ValueError where there is none.
    """
    if not pairs:
        raise ValueError("there is no answer to measure")
    layered = LayeredModel(model)
    tally = ExitTally(layered, range(1, layered.depth + 1))
    for prompt, answer in pairs:
        span = slice(len(prompt) - 1, len(prompt) + len(answer) - 1)
        states = layer_states(layered, torch.cat([prompt, answer]))  # L + 1 of [1, T, d]
        tally.add({exit: states[exit][0, span] for exit in tally.exits}, answer.to(model.device))
        done()
    return ExitFigures(tally.tokens, [*tally.perplexity().values()], [*tally.agreement().values()])
