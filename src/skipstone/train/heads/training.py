"""AdaDecode's exit heads for a model, from a recipe: its own answers, its states, the heads (section 2.1 and appendix D).

prompts -> answers (greedy, resumable) -> features (one frozen pass, on the disk) -> heads (KL, resumable) -> a folder of heads

Heads learn from stored states, by KL(p* || p_theta) to the last layer's distribution. The model is read and never written:
neither its weights, of which the LM head alone takes part, nor its files.

accelerate does what several devices and mixed precision need. A checkpoint is whole or not there, and a run that goes on from
it gives the same heads as one that was never stopped.
"""

import copy
import json
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
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from skipstone.engines.loading import BUNDLED, COMMIT, load, usable_device
from skipstone.engines.model_runner import ModelRunner
from skipstone.methods.adadecode.heads import ExitHeads, new_card, usual_layers
from skipstone.train import Say, beside, checkpoint, refuse_used, sharding, silent
from skipstone.train.heads import answers as answering
from skipstone.train.heads.answers import Features, ModelAnswer
from skipstone.train.heads.prompts import asked_of
from skipstone.train.heads.recipe import HeadSchedule, HeadsRecipe
from skipstone.utils.files import digest

HEADS = "heads"  # folder in that of the run: the finished heads
ANSWERS = "answers.jsonl"  # file in the folder of the run: the model's own answers
PATIENCE = timedelta(days=7)  # how long processes wait for the first, which writes the answers and the features
LOGITS = 2**24  # most logits of one head that exist at once
ROWS = 8192  # rows of the LM head that exist in float64 at once
SURE = 0.75  # the paper's threshold, for the report on how often a head is sure


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
    """Train what a recipe describes, or go on with it. base: the folder that relative paths belong to. output: instead of the
    recipe's own. max_disk: most bytes of features. fresh: refuse to go on. Returns the folder of the finished heads.

    ValueError for a recipe that cannot be and for a folder of another run; OSError for missing data and for a full disk.
    """
    folder = output or Path(recipe.output)
    if fresh:
        refuse_used(folder)
    place = usable_device(device)
    processes = PartialState(cpu=place.type == "cpu", timeout=PATIENCE)
    say = say if processes.is_main_process else silent
    place = place if processes.num_processes == 1 else processes.device or place
    dtype = recipe.model_dtype if recipe.model_dtype == "auto" else getattr(torch, recipe.model_dtype)
    model, tokenizer = load(None if recipe.model is None else beside(recipe.model, base), dtype=dtype, device=place)
    runner = ModelRunner(model.eval().requires_grad_(False), "eager")  # gradients go through its LM head
    heads, spectrum = _untrained(recipe, runner), singular_values(runner.head.weight)
    say(f"{sum(one.numel() for one in heads.parameters()) / 1e6:.2f} M parameters after layers {heads.card.layers}")
    say("the LM head is {} x {}, of rank {}, its singular values {:.3g} to {:.3g}".format(*spectrum.values()))
    asked = asked_of(recipe.prompts, base, recipe.answers.chat)
    folder.mkdir(parents=True, exist_ok=True)
    with processes.main_process_first():  # the others find what it has made
        written, wrote = answering.write(
            model, asked, tokenizer, recipe.answers, folder / ANSWERS, _ends(model, tokenizer), say
        )
        began = time.perf_counter()
        features = answering.extract(runner, written, heads.card.layers, folder, max_disk, say, _mixed(recipe))
    extracted = time.perf_counter()
    if heads.shortlist is not None:
        heads.shortlist.copy_(commonest([one.tokens for one in written], len(heads.shortlist), runner.head.weight.shape[0]))
    state = _HeadTrainingRun(heads, runner, features, recipe.training, recipe.seed)
    metrics = state.train(folder, _fingerprint(recipe, heads, written), say)
    seconds = {"answers": wrote, "features": extracted - began, "training": time.perf_counter() - extracted}
    account = {**_account(recipe, state, seconds), "lm_head": spectrum}
    heads.card = heads.card.model_copy(update={"training": account, "metrics": metrics})
    if processes.is_main_process:
        heads.save(folder / HEADS, runner.dtype if recipe.dtype is None else getattr(torch, recipe.dtype))
    processes.wait_for_everyone()
    _tell(metrics, say)
    return folder / HEADS


def _tell(metrics: dict[str, dict[str, Any]], say: Say) -> None:
    """What training made of every head."""
    for layer, one in metrics.items():
        old, new = (f"divergence {of['divergence']:.3f}, agreement {of['agreement']:.3f}" for of in (one["before"], one))
        say(f"E={layer}: {old} -> {new}, sure of {100 * one['sure']:.0f} % of all tokens")


def _fingerprint(recipe: HeadsRecipe, heads: ExitHeads, written: Sequence[ModelAnswer]) -> dict[str, Any]:
    """What a run that goes on must have in common with the one that began."""
    wish = {"training": recipe.training.model_dump(), "heads": recipe.heads.model_dump(), "seed": recipe.seed}
    wish |= {"states": "mixed"} if _mixed(recipe) else {}  # so were they not always
    return {**wish, "model": heads.card.model, "answers": digest([one.tokens for one in written])}


def _mixed(recipe: HeadsRecipe) -> bool:
    """Whether the states that heads learn from are made in mixed precision."""
    return recipe.training.mixed_precision == "bf16"


def _ends(model: Any, tokenizer: Any) -> set[int]:
    """The ids that end an answer."""
    own = model.generation_config.eos_token_id
    return {one for one in (tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])) if isinstance(one, int)}


def _untrained(recipe: HeadsRecipe, model: ModelRunner) -> ExitHeads:
    layers = recipe.heads.layers or usual_layers(model.depth)
    name = recipe.name or (Path(recipe.model).name if recipe.model and Path(recipe.model).is_dir() else recipe.model) or BUNDLED
    set_seed(recipe.seed)
    most = recipe.heads.vocabulary
    most = None if most is None or most >= model.head.weight.shape[0] else most
    heads = ExitHeads(new_card(model, layers, recipe.heads.kind, recipe.heads.rank, name, most))
    heads.start_from(model)
    return heads.to(model.device)


def _account(recipe: HeadsRecipe, state: "_HeadTrainingRun", seconds: dict[str, float]) -> dict[str, Any]:
    """How heads were trained, for their card."""
    return {
        **recipe.training.model_dump(),
        "prompts": [source.name for source in recipe.prompts],
        "answers": len(state.training),
        "held_out_answers": len(state.held_out),
        "tokens": state.features.bounds[-1],
        "epochs_trained": state.epoch,
        "seed": recipe.seed,
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        **_commit(state.model),
    }


def _commit(model: ModelRunner) -> dict[str, str]:
    """The commit that a model of the hub was loaded from; nothing for a folder."""
    found = getattr(model.model.config, COMMIT, None)
    return {} if found is None else {"model_revision": found}


@torch.no_grad()
def singular_values(weight: Tensor) -> dict[str, float]:
    """Of the LM head E* [V, d]: "tokens", "size", "rank", "least" and "largest" singular value (Table 4). Where the rank is d,
    T loses nothing against a head of its own (appendix A). By the eigenvalues of E*' E* in float64."""
    tokens, size = weight.shape
    gram = torch.zeros((size, size), dtype=torch.double, device=weight.device)
    for part in weight.split(ROWS):
        gram.addmm_(part.double().t(), part.double())
    values = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()  # [d], ascending
    noise = (
        max(tokens, size) * torch.finfo(torch.double).eps
    ) ** 0.5  # of the root of an eigenvalue, as a share of the largest
    rank = int((values > max(noise, torch.finfo(torch.float).eps) * values[-1]).sum())
    return {"tokens": tokens, "size": size, "rank": rank, "least": float(values[0]), "largest": float(values[-1])}


def commonest(answers: Iterable[Sequence[int]], count: int, vocabulary: int) -> Tensor:
    """[count] int64, ascending: the ids below `vocabulary` that answers hold most often, of equally frequent ones the lowest
    ones."""
    found = Counter(token for tokens in answers for token in tokens)
    return torch.tensor(sorted(sorted(range(vocabulary), key=lambda id: (-found[id], id))[:count]))


class HeadDivergence(nn.Module):
    """Heads under training: states -> the divergence of every head, over the tokens that they predict."""

    def __init__(self, heads: ExitHeads, model: ModelRunner) -> None:
        super().__init__()
        self.heads = heads
        self._model = [model]  # in a list, so that its parameters are none of this module's

    def forward(self, states: Tensor) -> Tensor:
        """states: [n, k + 1, d]. Returns [k], KL(p* || p_theta) in nats, summed over the positions. Both are distributions over
        the shortlist where there is one."""
        with torch.no_grad():
            target = self.target(states)
        said = [self.said(index, states[:, index]) for index in range(states.shape[1] - 1)]
        return torch.stack([(target.exp() * (target - one)).sum() for one in said])

    def target(self, states: Tensor) -> Tensor:
        """[n, V or S], the logarithm of p*. states: [n, k + 1, d]."""
        return self._logarithm(states[:, -1], None)

    def said(self, index: int, normed: Tensor) -> Tensor:
        """[n, V or S], the logarithm of p_theta. index: of the head. normed: [n, d]."""
        return self._logarithm(*self.heads.projected(index, normed))

    def _logarithm(self, states: Tensor, head: nn.Module | None) -> Tensor:
        """Of the probabilities that an LM head gives. states: [n, d]. head: as in `Engine.project`."""
        (model,) = self._model
        return model.engine.project(states[None], head, self.heads.shortlist)[0].log_softmax(-1)


@torch.no_grad()
def quality(heads: ExitHeads, model: ModelRunner, features: Features, answers: Sequence[int]) -> list[dict[str, float]]:
    """Of every head on some answers: divergence (nats a token), agreement (share of positions where its first choice is what
    the last layer chooses of all tokens), sure (share where it gives its choice more than SURE) and right (share of those
    where it agrees)."""
    sums = torch.zeros(len(heads.card.layers), 4, dtype=torch.double)  # divergence, agreeing, sure, both, by head
    states, divergence = features.states_of(answers), HeadDivergence(heads, model)
    ids = torch.arange(model.head.weight.shape[0], device=model.device) if heads.shortlist is None else heads.shortlist
    for part in _chunks(states, model):
        target, wanted = divergence.target(part), model.project(part[None, :, -1])[0].argmax(-1)  # [n, V or S], [n]
        for index, own in enumerate(sums):
            said = divergence.said(index, part[:, index])  # [n, V or S]
            agrees, sure = ids[said.argmax(-1)] == wanted, said.amax(-1).exp() > SURE
            apart = (target.exp() * (target - said)).sum().double()
            own += torch.stack([apart, *(one.sum().double() for one in (agrees, sure, agrees & sure))]).cpu()
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
    rows = max(1, LOGITS // model.head.weight.shape[0])
    return [part.to(model.device, model.dtype) for part in states.split(rows)]


class _HeadTrainingRun:
    """A training run.

    training, held_out: numbers of the answers that heads learn from, and that they are measured on. least_divergence: of every
    head on the held-out answers so far, nats a token. epochs_without_gain: of every head since then. best: weights by name,
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
        """Train heads in place, to the weights that were best on the held-out answers, each head for itself; those that it
        began with count, too. Returns figures by layer: after training, and `before`. A folder with checkpoints of the same run
        is gone on from; ValueError for another run's."""
        if (last := checkpoint.latest(folder)) is not None:
            checkpoint.verify(last, fingerprint)
            self.restore(last)
            say(f"going on after epoch {self.epoch}")
        if self.epoch == 0:
            before = quality(self.heads, self.model, self.features, self.held_out)
            self.before = self._by_layer(before)
            self.judge(before)
        layers, schedule = self.heads.card.layers, self.schedule
        patience = math.inf if schedule.patience is None else schedule.patience
        while self.epoch < schedule.epochs and min(self.epochs_without_gain) < patience:
            self.one_epoch()
            found = quality(self.heads, self.model, self.features, self.held_out)
            (found,) = broadcast_object_list([found])  # all processes end with the same epoch
            self.judge(found)
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
        """For people: figures of every head by its layer."""
        rounded = [{name: round(value, 4) for name, value in one.items()} for one in found]
        return dict(zip(map(str, self.heads.card.layers), rounded, strict=True))

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
        figures = {"least": self.least_divergence, "waited": self.epochs_without_gain, "before": self.before}
        (made / "progress.json").write_text(json.dumps({"epoch": self.epoch, **figures}), encoding="utf-8")
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
