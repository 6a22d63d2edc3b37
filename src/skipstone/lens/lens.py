"""`skipstone inspect`: what every layer already knows, and where an early exit would pay.

The logit lens: the model's norm and head on the output of each layer (LayerSkip, arXiv 2404.16710, Figure 2; AdaDecode,
arXiv 2506.03700, Figure 3). With the measured time of each layer it follows what drafting with layers[:E] would bring here.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from skipstone import api
from skipstone.hf.defaults import neutral_defaults
from skipstone.methods.adadecode.heads import ExitHeads
from skipstone.models.layered import LayeredModel
from skipstone.models.watching import layer_states
from skipstone.timing.measure import PassTimes, TimedPasses, measure_passes


@dataclass(frozen=True)
class Expected:
    """What LayerSkip would bring with an exit layer, at its best draft length."""

    exit_layer: int
    agreement: float
    num_speculative_tokens: int
    speed_up: float


@dataclass(frozen=True)
class Lens:
    """All that was seen over n generated tokens of one or more prompts. Lists of layers begin with layer 1, L is the last."""

    tokens: list[int]  # [n] ids
    top: list[list[int]]  # [L][n], the best token after each layer
    probability: list[list[float]]  # [L][n], its probability
    first: list[int]  # [n], the first layer from which on the final token stays the best
    agreement: list[float]  # [L], share of tokens at which a layer's best token is the last layer's
    similarity: list[float]  # [L], mean cosine of what enters a layer and what leaves it
    breaks: list[int]  # where prompts begin in n
    costs: PassTimes
    expected: list[Expected]

    def report(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Reading:
    """k exits and the last layer over n tokens."""

    probability: list[list[float]]  # [k + 1][n], of the generated token
    divergence: list[float]  # [k + 1], mean KL(p* || p) in nats
    agreement: list[float]  # [k + 1], share of tokens at which an exit's best one is the last layer's


@dataclass(frozen=True)
class HeadLens:
    """The lens through AdaDecode's exit heads beside the model's own (AdaDecode, Figure 3)."""

    layers: list[int]  # of every exit, and L
    own: Reading  # by the model's LM head
    trained: Reading  # by the exit heads

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
            parts.append(_seen(layered, prompt, torch.tensor(new[0])))
    top, probability, similarity = (torch.cat([part[i] for part in parts], 1) for i in range(3))  # [L, n] each
    same = top == top[-1]
    stays = same.flip(0).cumprod(0).flip(0)  # from here to the last layer
    agreement = same.double().mean(1).tolist()
    costs = measure_passes(TimedPasses(layered, len(prompts[0])))
    return Lens(
        tokens,
        top.tolist(),
        probability.tolist(),
        (layered.depth + 1 - stays.sum(0)).tolist(),
        agreement,
        similarity.mean(1).tolist(),
        breaks,
        costs,
        expectations(agreement, costs),
    )


def _states(layered: LayeredModel, prompt: Tensor, new: Tensor) -> list[Tensor]:
    """States of which the new tokens were chosen, before the first and after every layer: L + 1 tensors [1, n, d]."""
    span = slice(len(prompt) - 1, len(prompt) + len(new) - 1)
    return [state[:, span] for state in layer_states(layered, torch.cat([prompt, new]))]


@torch.inference_mode()
def _seen(layered: LayeredModel, prompt: Tensor, new: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(best tokens, their probabilities, cosines), each [L, n] on the CPU, by a forward over the whole text."""
    states = _states(layered, prompt, new)
    best = [layered.logits(state)[0].softmax(-1).max(-1) for state in states[1:]]
    pairs = pairwise(state[0].float() for state in states)
    cosines = torch.stack([F.cosine_similarity(before, after, -1) for before, after in pairs])
    return torch.stack([one.indices for one in best]).cpu(), torch.stack([one.values for one in best]).cpu(), cosines.cpu()


def expectations(agreement: Sequence[float], costs: PassTimes) -> list[Expected]:
    """For every exit layer E < L the best draft length and the speed-up that its agreement allows, were agreement the same at
    every token: (1 - a^(d+1)) / (1 - a) tokens a step, for d passes of layers[:E] with the head and one scoring pass of the
    remaining layers over d + 1 tokens."""
    depth, found = len(costs.layers), []
    for exit_layer in range(1, depth):
        early = sum(costs.layers[:exit_layer])  # one pass of layers[:E]
        speed_ups = []
        for length, whole in costs.rows.items():
            drafting = length * (early + costs.head) + early  # the last draft goes through layers[:E] too, to be scored
            scoring = whole * (depth - exit_layer) / depth + costs.head
            speed_ups.append((_tokens(agreement[exit_layer - 1], length) * costs.plain / (drafting + scoring), length))
        speed_up, length = max(speed_ups)
        found.append(Expected(exit_layer, agreement[exit_layer - 1], length, speed_up))
    return found


def _tokens(agreement: float, length: int) -> float:
    """Expected tokens of a step (Leviathan et al., arXiv 2211.17192, Eq. 1)."""
    return length + 1.0 if agreement >= 1 else (1 - agreement ** (length + 1)) / (1 - agreement)


@torch.inference_mode()
def through(model: PreTrainedModel, heads: ExitHeads, pairs: Sequence[tuple[Tensor, Tensor]]) -> HeadLens:
    """Read generated texts at every exit. pairs: (prompt [T], new tokens [n]) int64, n at least 1."""
    layered = LayeredModel(model)
    own: list[Tensor] = []
    trained: list[Tensor] = []
    for prompt, new in pairs:
        states, new = _states(layered, prompt, new), new.to(layered.device)
        exits = list(enumerate(states[layer] for layer in heads.card.layers))
        final = layered.logits(states[-1])
        own.append(_figures([*(layered.logits(state) for _, state in exits), final], new))
        trained.append(_figures([*(heads.logits(layered, index, state) for index, state in exits), final], new))
    return HeadLens([*heads.card.layers, layered.depth], _reading(own), _reading(trained))


def _figures(logits: Sequence[Tensor], new: Tensor) -> Tensor:
    """[3, k + 1, n] on the CPU: probability of the generated token, divergence, agreement. logits: [1, n, V] of every exit and
    of the last layer."""
    said = torch.stack([one[0].double().log_softmax(-1) for one in logits])  # [k + 1, n, V]
    probability = said.gather(-1, new[None, :, None].expand(len(said), -1, 1))[..., 0].exp()
    divergence = (said[-1].exp() * (said[-1] - said)).sum(-1)
    return torch.stack([probability, divergence, (said.argmax(-1) == said[-1].argmax(-1)).double()]).cpu()


def _reading(parts: Sequence[Tensor]) -> Reading:
    """parts: [3, k + 1, n] of every text."""
    probability, divergence, agreement = torch.cat(list(parts), 2)
    return Reading(probability.tolist(), divergence.mean(-1).tolist(), agreement.mean(-1).tolist())
