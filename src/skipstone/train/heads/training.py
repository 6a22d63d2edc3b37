"""Training of exit heads on stored states: KL(p* || p_theta) to the last layer's distribution (AdaDecode, section 2.1 and
appendix D). The model itself takes no part but for its LM head, which stays as it is.

accelerate does what several devices and mixed precision need. A checkpoint is whole or not there, and a run that goes on from
it gives the same heads as one that was never stopped.
"""

import copy
import json
import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from skipstone.methods.adadecode.heads import ExitHeads
from skipstone.models.layered import LayeredModel
from skipstone.train import checkpoint
from skipstone.train.heads.features import Features
from skipstone.train.heads.recipe import Schedule
from skipstone.train.runs import Say

LOGITS = 2**24  # most logits of one head that exist at once
SURE = 0.75  # the paper's threshold, for the report on how often a head is sure


class Divergence(nn.Module):
    """Heads under training: states -> the divergence of every head."""

    def __init__(self, heads: ExitHeads, model: LayeredModel) -> None:
        super().__init__()
        self.heads = heads
        self._model = [model]  # in a list, so that its parameters are none of this module's

    def forward(self, states: Tensor) -> Tensor:
        """states: [n, k + 1, d]. Returns [k], KL(p* || p_theta) in nats, summed over the positions."""
        (model,) = self._model
        with torch.no_grad():
            target = model.project(states[None, :, -1])[0].log_softmax(-1)
        said = [
            self.heads.read(model, index, states[None, :, index])[0].log_softmax(-1) for index in range(states.shape[1] - 1)
        ]
        return torch.stack([(target.exp() * (target - one)).sum() for one in said])


@torch.no_grad()
def quality(heads: ExitHeads, model: LayeredModel, features: Features, answers: Sequence[int]) -> list[dict[str, float]]:
    """Of every head on some answers: divergence (nats a token), agreement (share of positions where its first choice is the
    last layer's), sure (share where it gives its choice more than SURE) and right (share of those where it agrees)."""
    sums = torch.zeros(len(heads.card.layers), 4, dtype=torch.double)  # divergence, agreeing, sure, both, by head
    positions = 0
    for states in _chunks(features.states_of(answers), model):
        target = model.project(states[None, :, -1])[0].log_softmax(-1)  # [n, V]
        positions += len(states)
        for index, own in enumerate(sums):
            said = heads.read(model, index, states[None, :, index])[0].log_softmax(-1)  # [n, V]
            agrees, sure = said.argmax(-1) == target.argmax(-1), said.amax(-1).exp() > SURE
            apart = (target.exp() * (target - said)).sum().double()
            own += torch.stack([apart, *(one.sum().double() for one in (agrees, sure, agrees & sure))]).cpu()
    divergence, agreement, sure = (sums[:, :3] / max(positions, 1)).T.tolist()
    right = (sums[:, 3] / sums[:, 2].clamp(min=1)).tolist()
    names = ("divergence", "agreement", "sure", "right")
    return [dict(zip(names, one, strict=True)) for one in zip(divergence, agreement, sure, right, strict=True)]


def _by_layer(found: list[dict[str, float]], layers: Sequence[int]) -> dict[str, dict[str, float]]:
    """For people: figures of every head by its layer."""
    rounded = [{name: round(value, 4) for name, value in one.items()} for one in found]
    return {str(layer): one for layer, one in zip(layers, rounded, strict=True)}


def train(
    heads: ExitHeads,
    model: LayeredModel,
    features: Features,
    schedule: Schedule,
    folder: Path,
    fingerprint: dict[str, Any],
    seed: int,
    say: Say,
) -> dict[str, Any]:
    """Train heads in place, to the weights that were best on the held-out answers, each head for itself; those that it
    began with count, too. Returns what there is to report. A folder with checkpoints of the same run is gone on from;
    ValueError for another run's."""
    on_cpu = model.device.type == "cpu"
    accelerator = Accelerator(cpu=on_cpu, mixed_precision=_precision(schedule, model), device_placement=False)
    run = _Run(heads, model, features, schedule, accelerator, seed)
    if (last := checkpoint.latest(folder)) is not None:
        checkpoint.verify(last, fingerprint)
        run.restore(last)
        say(f"going on after epoch {run.epoch}")
    if run.epoch == 0:
        before = quality(heads, model, features, run.held_out)
        run.before = _by_layer(before, heads.card.layers)
        run.judge(before)
    while run.epoch < schedule.epochs and not run.done:
        run.one_epoch()
        found = quality(heads, model, features, run.held_out)
        (found,) = broadcast_object_list([found])  # all processes end with the same epoch
        run.judge(found)
        divergences = [one["divergence"] for one in found]
        shown = ", ".join(f"E={layer} {value:.3f}" for layer, value in zip(heads.card.layers, divergences, strict=True))
        say(f"epoch {run.epoch}: held-out divergence {shown}")
        if not all(map(math.isfinite, divergences)):
            raise ValueError(f"the divergence is not finite after epoch {run.epoch}: lower training.learning_rate")
        if accelerator.is_main_process:
            run.save(folder, fingerprint)
        accelerator.wait_for_everyone()
    heads.load_state_dict(run.best)
    after = quality(heads, model, features, run.held_out)
    return {"epochs": run.epoch, "before": run.before, "after": _by_layer(after, heads.card.layers)}


def split(answers: int, held_out: float, seed: int) -> tuple[list[int], list[int]]:
    """(answers to learn from, answers to measure on), at least one of each. ValueError for fewer than two."""
    if answers < 2:
        raise ValueError(f"heads need at least 2 answers, one to learn from and one to measure on, found {answers}")
    order = torch.randperm(answers, generator=torch.Generator().manual_seed(seed)).tolist()
    count = min(max(1, round(held_out * answers)), answers - 1)
    return sorted(order[count:]), sorted(order[:count])


def _precision(schedule: Schedule, model: LayeredModel) -> str:
    return schedule.mixed_precision or ("bf16" if model.device.type == "cuda" else "no")


def _chunks(states: Tensor, model: LayeredModel) -> list[Tensor]:
    """States in parts whose logits fit, on the model's device and in its dtype."""
    rows = max(1, LOGITS // model.head.weight.shape[0])
    return [part.to(model.device, model.dtype) for part in states.split(rows)]


class _Run:
    """A training run between two epochs.

    training, held_out: numbers of the answers that heads learn from, and that they are measured on. least_divergence: of every
    head on the held-out answers so far, nats a token. epochs_without_gain: of every head since then. best: weights by name,
    each head's from then. before: figures of the untrained heads, by layer.
    """

    def __init__(
        self, heads: ExitHeads, model: LayeredModel, features: Features, schedule: Schedule, accelerator: Accelerator, seed: int
    ) -> None:
        self.heads, self.model, self.features, self.schedule, self.accelerator = heads, model, features, schedule, accelerator
        self.training, self.held_out = split(len(features.bounds) - 1, schedule.held_out, seed)
        self.seed = seed
        optimizer = torch.optim.Adam(heads.parameters(), lr=schedule.learning_rate)
        self.module, self.optimizer = accelerator.prepare(Divergence(heads, model), optimizer)
        self.steps_an_epoch = -(-len(self.training) // schedule.batch_size)
        self.epoch = 0
        self.before: dict[str, Any] = {}
        self.least_divergence = [math.inf] * len(heads.card.layers)
        self.epochs_without_gain = [0] * len(heads.card.layers)
        self.best = copy.deepcopy(heads.state_dict())

    @property
    def done(self) -> bool:
        """Whether no head has become better lately."""
        return self.schedule.patience is not None and min(self.epochs_without_gain) >= self.schedule.patience

    def one_epoch(self) -> None:
        """All answers once, in an order of the epoch's own."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = [self.training[place] for place in torch.randperm(len(self.training), generator=generator).tolist()]
        ranks, rank = self.accelerator.num_processes, self.accelerator.process_index
        for step in range(self.steps_an_epoch):
            batch = order[step * self.schedule.batch_size : (step + 1) * self.schedule.batch_size]
            for group in self.optimizer.param_groups:
                group["lr"] = self.schedule.learning_rate * self._rate(self.epoch * self.steps_an_epoch + step)
            self._step(batch[rank::ranks], sum(self.features.bounds[one + 1] - self.features.bounds[one] for one in batch))
        self.epoch += 1

    def _step(self, answers: list[int], positions: int) -> None:
        """One step; gradients of all processes are those of the mean over the positions of the whole batch."""
        states = self.features.states_of(answers) if answers else self.features.states[:1]
        parts = _chunks(states, self.model)
        weight = self.accelerator.num_processes / positions if answers else 0.0
        for number, part in enumerate(parts):
            quiet = number + 1 < len(parts)
            with self.accelerator.no_sync(self.module) if quiet else nullcontext(), self.accelerator.autocast():
                self.accelerator.backward(self.module(part).sum() * weight)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _rate(self, step: int) -> float:
        """Warm-up, then half a cosine: the share of the learning rate at a step."""
        total = self.schedule.epochs * self.steps_an_epoch
        warm = max(1, round(self.schedule.warmup * total))
        return (step + 1) / warm if step < warm else 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, total - warm)))

    def judge(self, found: list[dict[str, float]]) -> None:
        """Keep the heads that became better."""
        weights = self.heads.state_dict()
        for index, figures in enumerate(found):
            self.epochs_without_gain[index] += 1
            if figures["divergence"] < self.least_divergence[index]:
                self.least_divergence[index], self.epochs_without_gain[index] = figures["divergence"], 0
                names = [name for name in weights if name.startswith(f"heads.{index}.")]
                self.best |= {name: weights[name].detach().clone() for name in names}

    def save(self, folder: Path, fingerprint: dict[str, Any]) -> None:
        """A checkpoint of this epoch, in the place of the ones before."""
        made = checkpoint.partial_folder(folder)
        save_file({name: one.contiguous() for name, one in self.heads.state_dict().items()}, made / "heads.safetensors")
        save_file({name: one.contiguous() for name, one in self.best.items()}, made / "best.safetensors")
        torch.save(self.optimizer.state_dict(), made / "optimizer.pt")
        own = {"least": self.least_divergence, "waited": self.epochs_without_gain}
        progress = {"epoch": self.epoch, **own, "before": self.before}
        (made / "progress.json").write_text(json.dumps(progress), encoding="utf-8")
        checkpoint.publish(made, folder, self.epoch, fingerprint)
        checkpoint.keep_latest(folder, 1)

    def restore(self, folder: Path) -> None:
        """Go on from a checkpoint."""
        self.heads.load_state_dict(load_file(folder / "heads.safetensors"))
        self.best = load_file(folder / "best.safetensors", device=str(self.model.device))
        self.optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True, map_location=self.model.device))
        progress = json.loads((folder / "progress.json").read_text(encoding="utf-8"))
        self.epoch, self.before = progress["epoch"], progress["before"]
        self.least_divergence, self.epochs_without_gain = progress["least"], progress["waited"]
