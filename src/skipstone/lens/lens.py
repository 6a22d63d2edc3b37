"""`skipstone inspect`: what every layer already knows, and where an early exit would pay.

The logit lens: the model's norm and head on the output of each layer (LayerSkip, arXiv 2404.16710, Figure 2; AdaDecode,
arXiv 2506.03700, Figure 3). With the measured time of each layer it follows what drafting with layers[:E] would bring here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from skipstone import api
from skipstone.models.layered import LayeredModel
from skipstone.tasks.exits import states
from skipstone.timing.measure import neutral_defaults
from skipstone.timing.passes import LENGTHS, Costs, measure_costs


@dataclass(frozen=True)
class Expected:
    """What LayerSkip would bring with an exit layer, at its best draft length."""

    exit_layer: int
    agreement: float
    num_speculative_tokens: int
    speed_up: float


@dataclass(frozen=True)
class Lens:
    """All that was seen, over n generated tokens of one or more prompts; lists of layers begin with layer 1, L is the last.

    tokens: [n] ids. top, probability: [L][n], the best token after each layer and its probability. first: [n], the first layer
    from which on the final token stays the best. agreement: [L], share of tokens at which a layer's best token is the last
    layer's. similarity: [L], mean cosine of what enters a layer and what leaves it. breaks: where prompts begin in n.
    """

    tokens: list[int]
    top: list[list[int]]
    probability: list[list[float]]
    first: list[int]
    agreement: list[float]
    similarity: list[float]
    breaks: list[int]
    costs: Costs
    expected: list[Expected]

    def report(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def look(model: PreTrainedModel, prompts: Sequence[Tensor], max_new_tokens: int) -> Lens:
    """Generate greedily and look at every layer. prompts: [T] int64 ids. ValueError for models that skipstone cannot decode."""
    layered = LayeredModel(model)
    parts, tokens, breaks = [], [], []
    with neutral_defaults(model, stop_at_eos=True):  # what follows the end is no text
        for prompt in prompts:
            options = {"max_new_tokens": max_new_tokens, "do_sample": False}
            new = api.generate(model, prompt[None].to(model.device), "autoregressive", **options).new_tokens
            assert new is not None
            breaks.append(len(tokens))
            tokens += new[0]
            parts.append(_seen(model, layered, prompt, new[0]))
    top, probability, similarity = (torch.cat([part[i] for part in parts], 1) for i in range(3))
    same = top == top[-1]
    stays = same.flip(0).cumprod(0).flip(0)  # from here to the last layer
    first = (layered.depth + 1 - stays.sum(0)).tolist()
    agreement = same.double().mean(1).tolist()
    length = min(len(prompts[0]), layered.max_positions - max(LENGTHS) - 1)
    if length < 0:
        raise ValueError(f"the model has {layered.max_positions} positions, too few to time drafts of {max(LENGTHS)} tokens")
    costs = measure_costs(layered, length)
    return Lens(
        tokens,
        top.tolist(),
        probability.tolist(),
        first,
        agreement,
        similarity.mean(1).tolist(),
        breaks,
        costs,
        expectations(agreement, costs),
    )


@torch.inference_mode()
def _seen(model: PreTrainedModel, layered: LayeredModel, prompt: Tensor, new: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """(best tokens, their probabilities, cosines), each [L, n] on the CPU, by a forward over the whole text."""
    seen = states(model, layered, torch.cat([prompt, torch.tensor(new)]))
    span = slice(len(prompt) - 1, len(prompt) + len(new) - 1)
    best = [layered.logits(state[:, span])[0].softmax(-1).max(-1) for state in seen[1:]]
    pairs = pairwise(state[0, span].float() for state in seen)
    cosines = torch.stack([F.cosine_similarity(before, after, -1) for before, after in pairs])
    return torch.stack([one.indices for one in best]).cpu(), torch.stack([one.values for one in best]).cpu(), cosines.cpu()


def expectations(agreement: Sequence[float], costs: Costs) -> list[Expected]:
    """For every exit layer E < L the best draft length and the speed-up that its agreement allows, were agreement the same at
    every token: (1 - a^(d+1)) / (1 - a) tokens a step, for d passes of layers[:E] with the head and one scoring pass of the
    remaining layers over d + 1 tokens."""
    depth, found = len(costs.layers), []
    for exit_layer in range(1, depth):
        a = agreement[exit_layer - 1]
        draft = sum(costs.layers[:exit_layer]) + costs.head
        last = sum(costs.layers[:exit_layer])  # the last draft goes through layers[:E] too, to be scored
        best = max(
            (
                _tokens(a, length)
                * costs.plain
                / (length * draft + last + seconds * (depth - exit_layer) / depth + costs.head),
                length,
            )
            for length, seconds in costs.rows.items()
        )
        found.append(Expected(exit_layer, a, best[1], best[0]))
    return found


def _tokens(agreement: float, length: int) -> float:
    """Expected tokens of a step (Leviathan et al., arXiv 2211.17192, Eq. 1)."""
    return length + 1.0 if agreement >= 1 else (1 - agreement ** (length + 1)) / (1 - agreement)
