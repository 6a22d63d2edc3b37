"""Trains AdaDecode's exit heads for a model, from a recipe (section 2.1 and appendix D).

prompts -> answers (greedy, resumable) -> features (one frozen pass, on the disk) -> heads (KL, resumable) -> a folder of heads

Heads learn from stored states, by KL(p* || p_theta) to the last layer's distribution. The model's weights and files never
change.

accelerate handles several devices and mixed precision. A resumed run gives the same heads as an uninterrupted one.
"""

import copy
import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list, set_seed
from torch import Tensor, nn

from skipstone.engines.loading import BUNDLED, load
from skipstone.engines.model_runner import ModelRunner
from skipstone.methods.adadecode.heads import ExitHeads, new_card, usual_layers
from skipstone.models.device_map import usable_device
from skipstone.models.vocabularies import COMMIT
from skipstone.train import Say, checkpoint, refuse_used, resolve_model, sharding, silent
from skipstone.train.heads import answers as answering
from skipstone.train.heads.answers import Features, ModelAnswer
from skipstone.train.heads.recipe import HeadSchedule, HeadsRecipe, read_prompts
from skipstone.utils.files import digest

HEADS = "heads"  # folder of the finished heads in the run's folder
ANSWERS = "answers.jsonl"  # file of the model's own answers in the run's folder
WAITING_TIME = timedelta(days=7)  # how long processes wait for the first, which writes the answers and the features
MAX_LOGITS = 2**24  # logits of one head that exist at once
ROWS = 8192  # rows of the LM head that exist in float64 at once
STATE_FILE = "state.pt"  # file of a checkpoint: weights, the optimiser's state, and STATE
STATE = ("epoch", "before", "best", "least_divergence", "epochs_without_gain")
"""Fields of a run that its checkpoints hold."""
SURE = 0.75  # probability from which a head counts as sure in reports: the paper's threshold


def run(
    recipe: HeadsRecipe,
    base: Path,
    output: Path | None = None,
    *,
    max_disk: float = 20 * answering.GIB,
    device: str = "auto",
    fresh: bool = False,
    say: Say = print,
) -> Path:
    """Train what a recipe describes, or resume it. base: the folder of relative paths. output: folder of the run, instead of
    the recipe's. max_disk: limit of features in bytes. fresh: refuse to resume. Returns the folder of the finished heads.

    ValueError for an impossible recipe and for a folder of another run; OSError for missing data and for a full disk.
    """
    folder = output or Path(recipe.output)
    if fresh:
        refuse_used(folder)
    place = usable_device(device)
    processes = PartialState(cpu=place.type == "cpu", timeout=WAITING_TIME)
    say = say if processes.is_main_process else silent
    place = place if processes.num_processes == 1 else processes.device or place
    dtype = recipe.model_dtype if recipe.model_dtype == "auto" else getattr(torch, recipe.model_dtype)
    model, tokenizer = load(None if recipe.model is None else resolve_model(recipe.model, base), dtype=dtype, device=place)
    runner = ModelRunner(model.eval().requires_grad_(False), "eager")  # gradients go through its LM head
    heads, spectrum = _untrained(recipe, runner), singular_values(runner.head.weight)
    say(f"{sum(one.numel() for one in heads.parameters()) / 1e6:.2f} M parameters after layers {heads.card.layers}")
    say("the LM head is {} x {}, of rank {}, its singular values {:.3g} to {:.3g}".format(*spectrum.values()))
    prompts = read_prompts(recipe.prompts, base, recipe.answers.chat)
    folder.mkdir(parents=True, exist_ok=True)
    with processes.main_process_first():  # the others find what it has made
        ends, file = _ends(model, tokenizer), folder / ANSWERS
        written, wrote = answering.write(model, prompts, tokenizer, recipe.answers, file, ends, say)
        began = time.perf_counter()
        features = answering.extract(runner, written, heads.card.layers, folder, max_disk, say, _mixed(recipe))
    extracted = time.perf_counter()
    if heads.shortlist is not None:
        size = runner.head.weight.shape[0]
        heads.shortlist.copy_(most_frequent_ids([answer.tokens for answer in written], len(heads.shortlist), size))
    state = _HeadTrainingRun(heads, runner, features, recipe.training, recipe.seed)
    metrics = state.train(folder, _fingerprint(recipe, heads, written), say)
    seconds = {"answers": wrote, "features": extracted - began, "training": time.perf_counter() - extracted}
    account = {**_account(recipe, state, seconds), "lm_head": spectrum}
    heads.card = heads.card.model_copy(update={"training": account, "metrics": metrics})
    if processes.is_main_process:
        heads.save(folder / HEADS, runner.dtype if recipe.dtype is None else getattr(torch, recipe.dtype))
    processes.wait_for_everyone()
    for layer, one in metrics.items():
        old, new = (f"divergence {of['divergence']:.3f}, agreement {of['agreement']:.3f}" for of in (one["before"], one))
        say(f"E={layer}: {old} -> {new}, sure of {100 * one['sure']:.0f} % of all tokens")
    return folder / HEADS


def _fingerprint(recipe: HeadsRecipe, heads: ExitHeads, written: Sequence[ModelAnswer]) -> dict[str, Any]:
    """The settings and data that must not change when a run resumes."""
    return {
        **recipe.model_dump(include={"training", "heads", "seed"}),
        **({"states": "mixed"} if _mixed(recipe) else {}),  # older runs have no such entry
        "model": heads.card.model,
        "answers": digest([one.tokens for one in written]),
    }


def _mixed(recipe: HeadsRecipe) -> bool:
    """Whether the states that heads learn from are made in mixed precision."""
    return recipe.training.mixed_precision == "bf16"


def _ends(model: Any, tokenizer: Any) -> set[int]:
    """The ids that end an answer."""
    own = model.generation_config.eos_token_id
    return {one for one in (tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])) if isinstance(one, int)}


def _untrained(recipe: HeadsRecipe, model: ModelRunner) -> ExitHeads:
    shape, name = recipe.heads, recipe.name or recipe.model or BUNDLED
    if recipe.name is None and Path(name).is_dir():
        name = Path(name).name
    set_seed(recipe.seed)
    size = shape.vocabulary if shape.vocabulary and shape.vocabulary < model.head.weight.shape[0] else None
    heads = ExitHeads(
        new_card(model, shape.layers or usual_layers(model.depth), shape.kind, shape.rank, name=name, vocabulary=size)
    )
    heads.start_from(model)
    return heads.to(model.device)


def _account(recipe: HeadsRecipe, state: "_HeadTrainingRun", seconds: dict[str, float]) -> dict[str, Any]:
    """The training of heads, for their card."""
    commit = getattr(state.model.model.config, COMMIT, None)
    return {
        **recipe.training.model_dump(),
        "prompts": [source.name for source in recipe.prompts],
        "answers": len(state.training),
        "held_out_answers": len(state.held_out),
        "tokens": state.features.bounds[-1],
        "epochs_trained": state.epoch,
        "seed": recipe.seed,
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        **({} if commit is None else {"model_revision": commit}),
    }


@torch.no_grad()
def singular_values(weight: Tensor) -> dict[str, float]:
    """ "tokens", "size", "rank", "least" and "largest" singular value of the LM head E* [V, d] (Table 4), from the eigenvalues
    of E*' E* in float64. If the rank is d, T loses nothing against a full head (appendix A)."""
    tokens, size = weight.shape
    gram = torch.zeros((size, size), dtype=torch.double, device=weight.device)
    for part in weight.split(ROWS):
        gram.addmm_(part.double().t(), part.double())
    values = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()  # [d], ascending
    noise = (max(tokens, size) * torch.finfo(torch.double).eps) ** 0.5  # relative error of the root of an eigenvalue
    rank = int((values > max(noise, torch.finfo(torch.float).eps) * values[-1]).sum())
    return {"tokens": tokens, "size": size, "rank": rank, "least": float(values[0]), "largest": float(values[-1])}


def most_frequent_ids(answers: Iterable[Sequence[int]], count: int, vocabulary: int) -> Tensor:
    """[count] int64, ascending: the ids below `vocabulary` that are most frequent in answers; of equally frequent ones the
    lowest."""
    counts = Counter(token for tokens in answers for token in tokens)
    return torch.tensor(sorted(sorted(range(vocabulary), key=lambda id: (-counts[id], id))[:count]))


class HeadDivergence(nn.Module):
    """The training loss of heads: states -> the divergence of every head, over the tokens that they predict."""

    def __init__(self, heads: ExitHeads, model: ModelRunner) -> None:
        super().__init__()
        self.heads = heads
        self._model = [model]  # in a list, so that its parameters do not belong to this module

    def forward(self, states: Tensor) -> Tensor:
        """states: [n, k + 1, d]. Returns [k], KL(p* || p_theta) in nats, summed over the positions. Both are distributions over
        the shortlist where there is one."""
        with torch.no_grad():
            target = self.log_target(states)
        predicted = [self.log_prediction(index, states[:, index]) for index in range(states.shape[1] - 1)]
        return torch.stack([(target.exp() * (target - own)).sum() for own in predicted])

    def log_target(self, states: Tensor) -> Tensor:
        """[n, V or S], log p*. states: [n, k + 1, d]."""
        return self._log_softmax(states[:, -1], None)

    def log_prediction(self, index: int, normed: Tensor) -> Tensor:
        """[n, V or S], log p_theta. index: of the head. normed: [n, d]."""
        return self._log_softmax(*self.heads.projected(index, normed))

    def _log_softmax(self, states: Tensor, head: nn.Module | None) -> Tensor:
        """Log probabilities of an LM head. states: [n, d]. head: as in `Engine.project`."""
        (model,) = self._model
        return model.engine.project(states[None], head, self.heads.shortlist)[0].log_softmax(-1)


@torch.no_grad()
def quality(heads: ExitHeads, model: ModelRunner, features: Features, answers: Sequence[int]) -> list[dict[str, float]]:
    """Every head's figures on some answers: divergence (nats per token), agreement (share of positions where its argmax is the
    last layer's over all tokens), sure (share where its argmax has more than SURE) and right (agreement on those)."""
    sums = torch.zeros(len(heads.card.layers), 4, dtype=torch.double)  # divergence, agreeing, sure, both, by head
    states, divergence = features.states_of(answers), HeadDivergence(heads, model)
    ids = torch.arange(model.head.weight.shape[0], device=model.device) if heads.shortlist is None else heads.shortlist
    for part in _chunks(states, model):
        target, choice = divergence.log_target(part), model.project(part[None, :, -1])[0].argmax(-1)  # [n, V or S], [n]
        for index, own in enumerate(sums):
            predicted = divergence.log_prediction(index, part[:, index])  # [n, V or S]
            agrees, sure = ids[predicted.argmax(-1)] == choice, predicted.amax(-1).exp() > SURE
            kl = (target.exp() * (target - predicted)).sum()
            own += torch.stack([each.sum().double() for each in (kl, agrees, sure, agrees & sure)]).cpu()
    figures = torch.cat([sums[:, :3] / max(len(states), 1), sums[:, 3:] / sums[:, 2:3].clamp(min=1)], 1).tolist()
    return [dict(zip(("divergence", "agreement", "sure", "right"), one, strict=True)) for one in figures]


def split(answers: int, held_out: float, seed: int) -> tuple[list[int], list[int]]:
    """(answers to learn from, answers to measure on), at least one of each. ValueError for fewer than two."""
    if answers < 2:
        raise ValueError(f"heads need at least 2 answers, one to learn from and one to measure on, found {answers}")
    order = torch.randperm(answers, generator=torch.Generator().manual_seed(seed)).tolist()
    count = min(max(1, round(held_out * answers)), answers - 1)
    return sorted(order[count:]), sorted(order[:count])


def _chunks(states: Tensor, model: ModelRunner) -> list[Tensor]:
    """States in parts whose logits fit, on the model's device and in its dtype."""
    rows = max(1, MAX_LOGITS // model.head.weight.shape[0])
    return [part.to(model.device, model.dtype) for part in states.split(rows)]


class _HeadTrainingRun:
    """A training run.

    training, held_out: indices of the answers for training and for evaluation. least_divergence: every head's lowest divergence
    so far on the held-out answers, nats per token. epochs_without_gain: every head's epochs since then. best: weights by name,
    each head's from then. before: figures of the untrained heads, by layer.
    """

    def __init__(self, heads: ExitHeads, model: ModelRunner, features: Features, schedule: HeadSchedule, seed: int) -> None:
        self.heads, self.model, self.features, self.schedule, self.seed = heads, model, features, schedule, seed
        self.training, self.held_out = split(len(features.bounds) - 1, schedule.held_out, seed)
        place = model.device.type
        sharding.disable()
        precision = schedule.mixed_precision or ("bf16" if place == "cuda" else "no")
        self.accelerator = Accelerator(cpu=place == "cpu", mixed_precision=precision, device_placement=False)
        optimizer = torch.optim.Adam(heads.parameters(), lr=schedule.learning_rate)
        self.module, self.optimizer = self.accelerator.prepare(HeadDivergence(heads, model), optimizer)
        self.steps_an_epoch = -(-len(self.training) // schedule.batch_size)
        self.epoch = 0
        self.before: dict[str, Any] = {}
        self.least_divergence = [math.inf] * len(heads.card.layers)
        self.epochs_without_gain = [0] * len(heads.card.layers)
        self.best = copy.deepcopy(heads.state_dict())

    def train(self, folder: Path, fingerprint: dict[str, Any], say: Say) -> dict[str, dict[str, Any]]:
        """Train heads in place, or resume from a checkpoint in the folder. Each head ends with its weights that were best on
        the held-out answers, the initial ones included. Returns figures by layer, with those `before` training. ValueError for
        a checkpoint of another run."""
        if (last := checkpoint.latest(folder)) is not None:
            checkpoint.verify(last, fingerprint)
            self.restore(last)
            say(f"going on after epoch {self.epoch}")
        if self.epoch == 0:
            before = quality(self.heads, self.model, self.features, self.held_out)
            self.before = self._by_layer(before)
            self.keep_best(before)
        layers, schedule = self.heads.card.layers, self.schedule
        patience = math.inf if schedule.patience is None else schedule.patience
        while self.epoch < schedule.epochs and min(self.epochs_without_gain) < patience:
            self.one_epoch()
            found = quality(self.heads, self.model, self.features, self.held_out)
            (found,) = broadcast_object_list([found])  # all processes end with the same epoch
            self.keep_best(found)
            divergences = [one["divergence"] for one in found]
            shown = ", ".join(f"E={layer} {value:.3f}" for layer, value in zip(layers, divergences, strict=True))
            say(f"epoch {self.epoch}: held-out divergence {shown}")
            if not all(map(math.isfinite, divergences)):
                raise ValueError(f"the divergence is not finite after epoch {self.epoch}: lower training.learning_rate")
            if self.accelerator.is_main_process:
                self.save(folder, fingerprint)
            self.accelerator.wait_for_everyone()
        self.heads.load_state_dict(self.best)
        after = self._by_layer(quality(self.heads, self.model, self.features, self.held_out))
        return {layer: {"before": self.before[layer], **figures} for layer, figures in after.items()}

    def _by_layer(self, found: list[dict[str, float]]) -> dict[str, dict[str, float]]:
        """Rounded figures of every head by its layer."""
        rounded = [{name: round(value, 4) for name, value in figures.items()} for figures in found]
        return dict(zip(map(str, self.heads.card.layers), rounded, strict=True))

    def one_epoch(self) -> None:
        """Train on all answers once, in a new order."""
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
        """Train one step, with the gradient of the mean over the positions of the whole batch, over all processes."""
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
        """The share of the learning rate at a step: a linear warm-up, then half a cosine."""
        total = self.schedule.epochs * self.steps_an_epoch
        warm = max(1, round(self.schedule.warmup * total))
        return (step + 1) / warm if step < warm else 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, total - warm)))

    def keep_best(self, found: list[dict[str, float]]) -> None:
        """Keep each head's weights if they are its best so far."""
        weights = self.heads.state_dict()
        for index, figures in enumerate(found):
            self.epochs_without_gain[index] += 1
            if figures["divergence"] < self.least_divergence[index]:
                self.least_divergence[index], self.epochs_without_gain[index] = figures["divergence"], 0
                names = [name for name in weights if name.startswith(f"heads.{index}.")]
                self.best |= {name: weights[name].detach().clone() for name in names}

    def save(self, folder: Path, fingerprint: dict[str, Any]) -> None:
        """Write a checkpoint of this epoch and remove older ones."""
        made = checkpoint.partial_folder(folder)
        state = {name: getattr(self, name) for name in STATE}
        torch.save({**state, "heads": self.heads.state_dict(), "optimizer": self.optimizer.state_dict()}, made / STATE_FILE)
        checkpoint.publish(made, folder, self.epoch, fingerprint)
        checkpoint.keep_latest(folder, 1)

    def restore(self, folder: Path) -> None:
        """Load a checkpoint."""
        state = torch.load(folder / STATE_FILE, weights_only=True, map_location=self.model.device)
        self.heads.load_state_dict(state.pop("heads"))
        self.optimizer.load_state_dict(state.pop("optimizer"))
        vars(self).update(state)
