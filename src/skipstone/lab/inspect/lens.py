"""`skipstone inspect`: the logit lens, the speed-up that every early exit would bring here, and both as pictures.

The logit lens is the model's norm and head on the output of each layer (LayerSkip, arXiv 2404.16710, Figure 2; AdaDecode,
arXiv 2506.03700, Figure 3). The measured time of each layer gives the speed-up of drafting with layers[:E].
"""

import base64
import html
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from skipstone.engines.exit_statistics import layer_states
from skipstone.engines.model_runner import ModelRunner
from skipstone.hf import api
from skipstone.hf.generation_defaults import neutral_defaults
from skipstone.lab.timing.measure import PassTimes, measure_passes
from skipstone.methods.adadecode.heads import ExitHeads
from skipstone.policy.cost_model import StepCosts, expected_tokens
from skipstone.utils.files import write_whole
from skipstone.utils.pictures import image_of, new_figure

MAX_TOKENS = 40  # columns of a heat map


@dataclass(frozen=True)
class ExitForecast:
    """The expected speed-up of LayerSkip at an exit layer, with the best draft length."""

    exit_layer: int
    agreement: float
    num_speculative_tokens: int
    speed_up: float


@dataclass(frozen=True)
class Lens:
    """The lens over n generated tokens of one or more prompts. Lists over layers begin with layer 1 and end with L."""

    tokens: list[int]  # [n] ids
    top: list[list[int]]  # [L][n], the best token after each layer
    probability: list[list[float]]  # [L][n], its probability
    first: list[int]  # [n], the first layer after which the final token stays the best
    agreement: list[float]  # [L], share of tokens with the same best token as the last layer
    similarity: list[float]  # [L], mean cosine of a layer's input and output
    breaks: list[int]  # index in n at which each prompt begins
    costs: PassTimes
    expected: list[ExitForecast]


@dataclass(frozen=True)
class LensReading:
    """k exits and the last layer over n tokens."""

    probability: list[list[float]]  # [k + 1][n], of the generated token
    divergence: list[float]  # [k + 1], mean KL(p* || p) in nats
    agreement: list[float]  # [k + 1], share of tokens with the same best token as the last layer


@dataclass(frozen=True)
class HeadLens:
    """The lens through AdaDecode's exit heads and through the model's own head (AdaDecode, Figure 3)."""

    layers: list[int]  # of every exit, and L
    own: LensReading  # by the model's LM head
    trained: LensReading  # by the exit heads


def look(model: PreTrainedModel, prompts: Sequence[Tensor], max_new_tokens: int) -> Lens:
    """Generate greedily and read every layer. prompts: [T] int64 ids. ValueError for models that skipstone cannot decode."""
    runner = ModelRunner(model)
    parts, tokens, breaks = [], [], []
    with neutral_defaults(model, stop_at_eos=True):  # tokens after the end are no text
        for prompt in prompts:
            options = {"max_new_tokens": max_new_tokens, "do_sample": False}
            new = api.generate(model, prompt[None].to(model.device), "autoregressive", **options).new_tokens
            assert new is not None
            breaks.append(len(tokens))
            tokens += new[0]
            parts.append(_seen(runner, prompt, torch.tensor(new[0], dtype=torch.int64, device="cpu")))
    top, probability, similarity = (torch.cat([part[i] for part in parts], 1) for i in range(3))  # [L, n] each
    same = top == top[-1]
    stays = same.flip(0).cumprod(0).flip(0)  # from here to the last layer
    agreement = same.double().mean(1).tolist()
    costs = measure_passes(runner, len(prompts[0]))
    first, cosines = (runner.depth + 1 - stays.sum(0)).tolist(), similarity.mean(1).tolist()
    expected = expectations(agreement, costs)
    return Lens(tokens, top.tolist(), probability.tolist(), first, agreement, cosines, breaks, costs, expected)


def _states(runner: ModelRunner, prompt: Tensor, new: Tensor) -> list[Tensor]:
    """States from which the new tokens are chosen, before the first and after every layer: L + 1 tensors [1, n, d]."""
    span = slice(len(prompt) - 1, len(prompt) + len(new) - 1)
    return [state[:, span] for state in layer_states(runner, torch.cat([prompt, new]))]


@torch.inference_mode()
def _seen(runner: ModelRunner, prompt: Tensor, new: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(best tokens, their probabilities, cosines), each [L, n] on the CPU, by a forward over the whole text."""
    states = _states(runner, prompt, new)
    values, best = zip(*(runner.logits(state)[0].softmax(-1).max(-1) for state in states[1:]), strict=True)
    pairs = pairwise(state[0].float() for state in states)
    cosines = [F.cosine_similarity(before, after, -1) for before, after in pairs]
    return torch.stack(best).cpu(), torch.stack(values).cpu(), torch.stack(cosines).cpu()


def expectations(agreement: Sequence[float], costs: PassTimes) -> list[ExitForecast]:
    """For every exit layer E < L the best draft length and its speed-up, if agreement were the same at every token.

    A step of d drafts takes d passes of layers[:E] with the head, one more pass of them for the last draft, and a scoring pass
    of the other layers over d + 1 tokens.
    """
    depth, forecasts = len(costs.layers), []
    for exit_layer, same in enumerate(agreement[: depth - 1], 1):
        early, share = sum(costs.layers[:exit_layer]), 1 - exit_layer / depth
        scoring = {length + 1: share * seconds + costs.head for length, seconds in costs.rows.items()}
        step = StepCosts(costs.plain, early + costs.head, scoring.__getitem__, fixed=early)
        speed_up, length = max((step.speedup(expected_tokens(same, length), length), length) for length in costs.rows)
        forecasts.append(ExitForecast(exit_layer, same, length, speed_up))
    return forecasts


@torch.inference_mode()
def through(model: PreTrainedModel, heads: ExitHeads, pairs: Sequence[tuple[Tensor, Tensor]]) -> HeadLens:
    """Read generated texts at every exit. pairs: (prompt [T], new tokens [n]) int64, n at least 1."""
    runner = ModelRunner(model)
    own, trained = [], []
    for prompt, new in pairs:
        states, new = _states(runner, prompt, new), new.to(runner.device)
        exits = [states[layer] for layer in heads.card.layers]
        final = runner.logits(states[-1])
        own.append(_figures([*map(runner.logits, exits), final], new))
        trained.append(_figures([*(heads.logits(runner, index, state) for index, state in enumerate(exits)), final], new))
    return HeadLens([*heads.card.layers, runner.depth], _reading(own), _reading(trained))


def _figures(logits: Sequence[Tensor], new: Tensor) -> Tensor:
    """[3, k + 1, n] on the CPU: probability of the generated token, divergence, agreement. logits: [1, n, V] of every exit and
    of the last layer."""
    said = torch.stack([one[0].double().log_softmax(-1) for one in logits])  # [k + 1, n, V]
    probability = said.gather(-1, new[None, :, None].expand(len(said), -1, 1))[..., 0].exp()
    divergence = (said[-1].exp() * (said[-1] - said)).sum(-1)
    return torch.stack([probability, divergence, (said.argmax(-1) == said[-1].argmax(-1)).double()]).cpu()


def _reading(parts: Sequence[Tensor]) -> LensReading:
    """parts: [3, k + 1, n] of every text."""
    probability, divergence, agreement = torch.cat([*parts], 2)
    return LensReading(probability.tolist(), divergence.mean(-1).tolist(), agreement.mean(-1).tolist())


# -------------------------------------------------------------------------------------------------- pictures


def heat_map(lens: Lens, texts: Sequence[Sequence[str]], final: Sequence[str]) -> Any:
    """A matplotlib figure: probability of the best token after each layer, with its text, bold if it is the final one.

    texts: [L][n]. ImportError that says what to install without matplotlib.
    """
    count, layers = min(MAX_TOKENS, len(final)), range(1, len(texts) + 1)
    figure, axes = new_figure((1.2 + 0.55 * count, 1 + 0.22 * len(texts)))
    image = _heat(axes, lens.probability, layers, final[:count], fontsize=7)
    image.set_cmap("Blues")
    middle = {"ha": "center", "va": "center", "fontsize": 6}
    for layer, row in enumerate(texts):
        for place in range(count):
            weight = "bold" if lens.top[layer][place] == lens.top[-1][place] else "normal"
            color = "white" if lens.probability[layer][place] > 0.6 else "black"
            axes.text(place, layer, _short(row[place]), color=color, fontweight=weight, **middle)
    for place in (one for one in lens.breaks if 0 < one < count):
        axes.axvline(place - 0.5, color="black", linewidth=1)  # another prompt begins
    if count < len(final):
        axes.set_xlabel(f"the first {count} of {len(final)} tokens")
    figure.colorbar(image, label="probability of the best token")
    return figure


def layer_figures(lens: Lens) -> Any:
    """A matplotlib figure: first layers, agreement and similarity, time, and expected speed-up, by layer."""
    figure, axes = new_figure((11, 7), 2, 2)
    firsts, known, costs, speed = axes.flat
    layers, counts = range(1, len(lens.agreement) + 1), Counter(lens.first)
    firsts.bar(layers, [counts[layer] / len(lens.first) for layer in layers])
    firsts.set_title("first layer that has the final token for good")
    known.plot(layers, lens.agreement, label="agreement with the last layer")
    known.plot(layers, lens.similarity, label="cosine of input and output")
    known.legend()
    costs.bar(layers, [1000 * seconds for seconds in lens.costs.layers])
    costs.set_title("ms a token")
    speed.plot([one.exit_layer for one in lens.expected], [one.speed_up for one in lens.expected], "o-")
    speed.axhline(1, color="black", linewidth=0.8)
    speed.set_title("expected speed-up of LayerSkip by exit layer")
    for axis in axes.flat:
        axis.set_xlabel("layer")
    return figure


def head_maps(seen: HeadLens, final: Sequence[str]) -> Any:
    """A matplotlib figure: probability of the generated tokens after every exit, by the model's own head and by exit heads."""
    count = min(MAX_TOKENS, len(final))
    figure, axes = new_figure((2.2 + 0.3 * count, 2 + 0.5 * len(seen.layers)), 2)
    image = None
    for axis, (title, reading) in zip(axes, (("LM head", seen.own), ("exit heads", seen.trained)), strict=True):
        image = _heat(axis, reading.probability, seen.layers, final[:count])
        axis.set_title(title, loc="left", fontsize=9)
    figure.colorbar(image, ax=axes, label="probability of the generated token")
    return figure


def save(lens: Lens, texts: list[list[str]], final: list[str], path: Path, heads: HeadLens | None = None) -> list[Path]:
    """Write the pictures as PNG files, or one page of HTML if the path ends in .html. Returns the paths."""
    figures = {"lens": heat_map(lens, texts, final), "layers": layer_figures(lens)}
    if heads is not None:
        figures["heads"] = head_maps(heads, final)
    drawn = {name: image_of(figure) for name, figure in figures.items()}
    if path.suffix == ".html":
        images = ((name, base64.b64encode(image).decode()) for name, image in drawn.items())
        body = "".join(f'<img alt="{name}" src="data:image/png;base64,{image}">' for name, image in images)
        text = html.escape("".join(final))
        write_whole(path, f"<!doctype html><meta charset=utf-8><title>skipstone inspect</title><pre>{text}</pre>{body}\n")
        return [path]
    places = [path if name == "lens" else path.with_name(f"{path.stem}-{name}{path.suffix or '.png'}") for name in drawn]
    for place, image in zip(places, drawn.values(), strict=True):
        write_whole(place, image)
    return places


def _heat(axes: Any, rows: Sequence[list[float]], layers: Sequence[int], final: Sequence[str], **numbers: Any) -> Any:
    """Probabilities of the final tokens, a row a layer, as an image. numbers: text options of the labels of layers."""
    image = axes.imshow([row[: len(final)] for row in rows], aspect="auto", origin="lower", vmin=0, vmax=1)
    axes.set_xticks(range(len(final)), [_short(text) for text in final], rotation=60, fontsize=7)
    axes.set_yticks(range(len(layers)), [str(layer) for layer in layers], **numbers)
    axes.set_ylabel("after layer")
    return image


def _short(text: str) -> str:
    """A token for a cell: visible white space, at most eight letters; `$` would start a formula."""
    shown = text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·").replace("$", r"\$")
    return shown if len(shown) <= 8 else shown[:7] + "…"
