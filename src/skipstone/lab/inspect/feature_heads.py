"""`skipstone inspect`: what a head that reads hidden states would bring, of EAGLE-3 or of a checkpoint's MTP layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor

from skipstone.engines.feature_head import FeatureHead
from skipstone.engines.host_transfer import to_device
from skipstone.engines.model_runner import ModelRunner
from skipstone.lab.bench.draft_weights import share_read
from skipstone.lab.timing.measure import PassTimes, one_row, store_for, timings
from skipstone.methods.drafting.feature_drafter import FeatureMethod
from skipstone.models.passes import Pass, Tree
from skipstone.policy.cost_model import StepCosts


@dataclass(frozen=True)
class FeatureHeadForecast:
    """A head, and its expected speed-up with the best draft length."""

    kind: str  # name of its method
    layers: list[int]  # it reads the target's states after them
    nbytes: int  # of memory in addition to the target's
    weights_read: float  # by a draft step, over those that a plain step reads
    accepted: list[float]  # share of the places at which the first 1, 2, ... drafts are all the target's tokens
    num_speculative_tokens: int
    speed_up: float


def forecast(
    method: FeatureMethod, target: ModelRunner, texts: Sequence[tuple[Tensor, Tensor]], costs: PassTimes
) -> FeatureHeadForecast:
    """What a method's head brings on greedy texts of the target. texts: (prompt [T], new tokens [n]) int64.

    OSError and ValueError as in `FeatureMethod.head_for`.
    """
    head, most = method.head_for(target), max(costs.rows)
    parts = torch.cat([accepted_drafts(target, head, *text, most) for text in texts])
    accepted = [float((column == 1).double().sum() / count) for column in parts.T if (count := int((column >= 0).sum()))]
    seconds = _draft_step_seconds(head, len(texts[0][0]))
    length, speed_up = best_length(accepted, seconds, costs)
    read = share_read(method, target, {}) or 0.0
    return FeatureHeadForecast(method.name, [*head.depths], head.nbytes, read, accepted, length, speed_up)


def best_length(accepted: Sequence[float], draft_step_seconds: float, costs: PassTimes) -> tuple[int, float]:
    """The best draft length and its speed-up. accepted: as in `FeatureHeadForecast`."""
    scoring = {length + 1: max(seconds + costs.head, costs.plain) for length, seconds in costs.rows.items()}
    step = StepCosts(costs.plain, draft_step_seconds, scoring.__getitem__)
    lengths = [length for length in costs.rows if length <= len(accepted)]
    speed_up, length = max(((step.speedup(1 + sum(accepted[:one]), one), one) for one in lengths), default=(1.0, 0))
    return length, speed_up


@torch.inference_mode()
def accepted_drafts(target: ModelRunner, head: FeatureHead, prompt: Tensor, new: Tensor, num_drafts: int) -> Tensor:
    """Greedy chains of drafts after every new token but the last, [n - 1, num_drafts] int64 on the CPU.

    1: this draft of the chain and all before it are the target's tokens. 0: one is not. -1: the text ends before it.

    The columns of the text run in one pass, then the chains' next drafts, as nodes of one tree. Each chain goes on with the
    target's tokens. As long as all its drafts are right, it would have done the same.
    """
    text, first, places = torch.cat([prompt, new]).to(head.device), len(prompt) - 1, len(new) - 1
    if places < 1:
        return torch.empty((0, num_drafts), dtype=torch.int64, device="cpu")
    columns = len(text) - 2  # column p has the states of token p and token p + 1, and predicts token p + 2
    roots = torch.arange(first, columns, device=head.device, dtype=torch.int64)  # the column of each chain's first draft
    store, depths = store_for(head, columns + (num_drafts - 1) * places), [*pairwise(sorted({0, *head.depths}))]
    outputs = target.read_layers(text[None, :columns].to(target.device), [range(*ends) for ends in depths])[1:]
    states = dict(zip([high for _, high in depths], outputs, strict=True))
    read = head.read_states(to_device(torch.cat([states[depth][0] for depth in head.depths], -1), head.device))
    hidden = head.run(head.enter(text[1:-1], read)[None], one_row(0, columns, head.device), store, range(1))[:, first:]
    found = [_is_right(head, hidden, text, roots + 2)]
    for number in range(1, num_drafts):
        tokens = text[(roots + 1 + number).clamp(max=len(text) - 1)]
        entering = head.enter(tokens[None], head.feed_back(hidden))
        hidden = head.run(entering, _chains_pass(roots, columns, number), store, range(1))
        found.append(_is_right(head, hidden, text, roots + 2 + number))
    right = torch.stack(found, 1).cpu()
    return torch.where(right < 0, right, right.cumprod(1))


def _is_right(head: FeatureHead, hidden: Tensor, text: Tensor, at: Tensor) -> Tensor:
    """Whether the best tokens after states [1, m, d] are those of the text at [m], -1 beyond its end."""
    best = head.logits(hidden)[0].argmax(-1).to(text.device)
    return torch.where(at < len(text), (best == text[at.clamp(max=len(text) - 1)]).long(), -1)


def _chains_pass(roots: Tensor, columns: int, number: int) -> Pass:
    """A pass over one more column of every chain, behind the text's columns and `number` - 1 columns of every chain. Each sees
    the text up to its root, and its own chain."""
    places, own = len(roots), torch.eye(len(roots), dtype=torch.bool, device=roots.device)
    sees = torch.arange(columns, device=roots.device, dtype=torch.int64) <= roots[:, None]  # [m, columns]
    ancestors = torch.cat([sees, own.repeat(1, number)], 1)[None]
    steps = torch.arange(1, number + 1, device=roots.device, dtype=torch.int64)
    positions = torch.cat([torch.arange(columns, device=roots.device, dtype=torch.int64), (roots + steps[:, None]).flatten()])[
        None
    ]
    start, nothing = columns + (number - 1) * places, roots.new_zeros(1)
    slots = torch.arange(start, start + places, device=roots.device, dtype=torch.int64)[None]
    tree = Tree(nothing, ancestors, positions, nothing)
    return Pass(positions[:, start:], slots, None, slice(0, 1), start + places, start, tree)


@torch.inference_mode()
def _draft_step_seconds(head: FeatureHead, length: int) -> float:
    """Seconds of a draft behind `length` arbitrary columns."""
    store, at = store_for(head, length + 1), one_row(length, 1, head.device)
    entering = head.embed(torch.zeros((1, 1), dtype=torch.int64, device=head.device), at.positions)
    return median(timings(lambda: head.logits(head.feed_back(head.run(entering, at, store, range(1)))).argmax(-1), head.device))
