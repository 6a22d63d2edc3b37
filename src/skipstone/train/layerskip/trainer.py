"""`LayerSkipTrainer`: transformers' Trainer with LayerSkip's loss, exact resume and a report on every exit.

schedules.py, dropout.py and objective.py hold the paper's additions, sharding.py FSDP2. transformers and accelerate do the
rest: data loading, mixed precision, DDP, schedulers, gradient accumulation.
"""

import json
import math
import warnings
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from skipstone.decoding.settings import TRAINED_EXITS
from skipstone.engines.exit_statistics import ExitTally
from skipstone.models.decoder_model import DecoderModel
from skipstone.train import checkpoint, sharding
from skipstone.train.layerskip.arguments import LayerSkipArguments
from skipstone.train.layerskip.dropout import BatchLayout, forwards_replaced, layout_of
from skipstone.train.layerskip.metrics import exit_quality, flat
from skipstone.train.layerskip.objective import LayerSkipObjective
from skipstone.train.layerskip.schedules import LayerSkipRecipe

SCHEDULER = "scheduler.pt"  # in a checkpoint: transformers' name for the state of the learning rate's schedule
LOSS_MEANS = "tally.json"  # in a checkpoint: the sums of the next log entry
_TORCH_WRITER = ("PytorchStreamWriter", "inline_container")
"""Words in the RuntimeError that torch.save raises when the disk is full; safetensors has an error class of its own."""


class LayerSkipTrainer(Trainer):
    """Train a causal language model with layer dropout and early exits.

    train_dataset: items with input_ids and labels [T], labels IGNORED (-100) where nothing is learned. eval_dataset: the same,
    or a dict of several. fingerprint: what else a run must have in common with a checkpoint to resume from it (hashes of data).
    teacher: a frozen model of the same vocabulary to learn from instead of the labels. distillation_ids: token ids over which
    its distribution is learnt, or the last layer's by exits (`kl_weight`); None for all.
    `train(resume_from_checkpoint=True)` resumes from the latest checkpoint, or starts where there is none.
    """

    args: LayerSkipArguments
    model: PreTrainedModel  # type: ignore[assignment]
    loss_is_scaled_for_ga = True  # the loss is a mean over the tokens of all accumulated batches

    def __init__(
        self,
        model: PreTrainedModel,
        args: LayerSkipArguments,
        *more: Any,
        fingerprint: dict[str, Any] | None = None,
        teacher: PreTrainedModel | None = None,
        distillation_ids: list[int] | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(args, LayerSkipArguments):
            raise ValueError(f"args must be LayerSkipArguments, found {type(args).__name__}")
        super().__init__(model, args, *more, **options)
        self._refuse()
        if self.is_fsdp_enabled:
            sharding.check(self.model, self.accelerator, args.muon_learning_rate is not None)
        self._decoder = DecoderModel(self.model)
        self.recipe = check(self._decoder, args)
        self._teacher: Any = teacher
        self._distillation_ids = None if distillation_ids is None else torch.tensor(distillation_ids, device=args.device)
        if teacher is not None:
            self._teacher.to(args.device).eval().requires_grad_(False)
        # the installed forward, unlike some models' own, takes num_items_in_batch and shifts labels
        self.model_accepts_loss_kwargs = self._loss_shifts_labels = True
        own = {
            "recipe": repr(self.recipe),
            "seed": args.seed,
            "model": model.config.to_json_string(),
            "training": args.deciding(),
            **(checkpoint.frozen(model) if self.is_world_process_zero() else {}),  # other processes may have no weights
            **(fingerprint or {}),
        }
        self.fingerprint = broadcast_object_list([own])[0]
        self.started = self._layout_of_run(checkpoint.latest(Path(str(args.output_dir))))
        self.objective: LayerSkipObjective | None = None
        self._saving: Path | None = None
        self._resumed: Path | None = None
        self._loss_means: dict[str, tuple[Tensor, int]] = {}  # of the next log entry: part -> (sum, steps that have it)
        self.add_callback(_LogSchedule)

    def _refuse(self) -> None:
        """ValueError for arguments of a Trainer that this one would ignore."""
        for name in ("model_init", "compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name} is not supported: LayerSkip's loss and the report on its exits are built in")
        if self.args.muon_learning_rate is not None and (self.optimizer or self.optimizer_cls_and_kwargs):
            raise ValueError("give either an optimiser or muon_learning_rate, which makes one")
        if self.args.n_gpu > 1:
            raise ValueError(f"found {self.args.n_gpu} devices, one process: use `accelerate launch` or CUDA_VISIBLE_DEVICES=0")

    def train(
        self, resume_from_checkpoint: str | Path | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> Any:
        """Run the recipe. ValueError for a checkpoint that is damaged or of another run, and if a fresh start would mix its
        checkpoints with those of another run."""
        self._resumed, self._loss_means = self._checkpoint_to_resume(resume_from_checkpoint), {}
        steps = self.args.max_steps  # T, of the whole run
        if steps <= 0:
            steps = self.set_initial_training_values(self.args, self.get_train_dataloader())[-1]
        sizes, teaching = (steps, self.args.seed, self.args.loss_chunk), (self._teacher, self._distillation_ids)
        self.objective = LayerSkipObjective(self._decoder, self.recipe, *sizes, *teaching)
        if self.started != (now := layout_of(self.args.deciding())):
            self.objective.elsewhere = (self.started, now, self.args.process_index)
        with self.objective.installed():
            result = super().train(None if self._resumed is None else str(self._resumed), trial, ignore_keys_for_eval)
        self.name_trained_exits()
        return result

    def name_trained_exits(self) -> None:
        """Write the trained exits into the model's config, so that decoding can warn of others."""
        if trained := self.recipe.exits.trained(self._decoder.depth):
            setattr(self._decoder.config, TRAINED_EXITS, trained)

    def _checkpoint_to_resume(self, requested: str | Path | bool | None) -> Path | None:
        """The checkpoint to resume from, verified."""
        run = Path(str(self.args.output_dir))
        folder = Path(requested) if isinstance(requested, (str, Path)) else checkpoint.latest(run)
        if folder is None or (not requested and self.args.save_strategy == "no"):
            return None
        if not requested:
            raise ValueError(f"{run} holds {folder.name} of an earlier run: resume from it, or choose another output_dir")
        self.started = self._layout_of_run(folder)
        checkpoint.verify(folder, self.fingerprint)
        return folder

    def _layout_of_run(self, last: Path | None) -> BatchLayout:
        """The layout that the run started with, if this process can resume it with as many rows per step; else the present
        layout. The fingerprint gets the run's layout."""
        now = layout_of(self.args.deciding())
        try:
            started = layout_of(checkpoint.fingerprint_of(last)["training"])
        except (KeyError, TypeError):
            return now
        splits = self.recipe.dropout.by_layer == "constant" and now.rows % started.rows  # layer 0 keeps a row in every pass
        if started == now or started.step_rows != now.step_rows or splits:
            return now
        own = {"per_device_train_batch_size": started.rows, "gradient_accumulation_steps": started.passes}
        self.fingerprint["training"] |= {**own, "world_size": started.processes}
        if started.processes != now.processes and (name := _own_dropout(self.model)):
            reason = f"the model draws random numbers of its own ({name}), which are others on another number of processes"
            warnings.warn(f"{reason}: the run goes on, but not as it would have", stacklevel=2)
        return started

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        assert self.objective is not None
        if self._resumed is not None:
            self._restore_loss_means(self._resumed)
            self._resumed = None
        step = self.state.global_step
        if step != self.objective.step or self.objective.micro < step * self.args.gradient_accumulation_steps:
            self.objective.step, self.objective.micro = step, step * self.args.gradient_accumulation_steps
        begins = self.objective.micro == step * self.args.gradient_accumulation_steps  # the first pass of the step
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.clamp(min=1)  # a step that predicts nothing has loss 0
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.objective.micro += 1
        scale = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1  # compute_loss has the same
        for name, part in self.objective.parts.items():
            total, steps = self._loss_means.get(name, (torch.zeros_like(part), 0))
            self._loss_means[name] = total + part * scale, steps + begins
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:  # of training: the mean since the last entry, as are its parts
            logs = {**logs, **{name: self._mean(total) / steps for name, (total, steps) in self._loss_means.items()}}
            self._loss_means = {}
            self._check_finite(math.isfinite(logs["loss"]), f"the loss is {logs['loss']}")
        super().log(logs, start_time)

    def _check_finite(self, is_finite: bool, problem: str) -> None:
        """ValueError before weights with a number that is not finite are saved."""
        if is_finite:
            return
        run = Path(str(self.args.output_dir))
        last = checkpoint.latest_good(run, self.fingerprint)
        before = f"{run / last.name} is from before" if last else "no checkpoint was written yet"
        raise ValueError(f"{problem} at step {self.state.global_step}: lower the learning rate, or look at the data; {before}")

    def _mean(self, value: Tensor) -> float:
        """The mean over the processes."""
        mean: Any = self.accelerator.reduce(value.detach().clone(), reduction="mean")
        return float(mean)

    def create_accelerator_and_postprocess(self) -> None:
        sharded = sharding.is_requested() or bool(self.args.fsdp)
        if sharded:  # else every process keeps gradients of the whole model between the passes of a step
            config: Any = self.args.accelerator_config
            config.gradient_accumulation_kwargs = {**(config.gradient_accumulation_kwargs or {}), "sync_each_batch": True}
        super().create_accelerator_and_postprocess()
        if sharded:
            sharding.enable_on_cpu(self.accelerator)
            self.is_fsdp_enabled = getattr(self.accelerator.state, "fsdp_plugin", None) is not None

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        args = self.args
        if self.is_fsdp_enabled and not sharding.is_sharded(self.model):
            sharding.shard(self.model, self.accelerator)
        if self.optimizer is None and args.muon_learning_rate is not None:
            rates, betas = (args.muon_learning_rate, args.learning_rate), (args.adam_beta1, args.adam_beta2)
            self.optimizer = muon_with_adamw(self.model, *rates, betas, args.weight_decay, args.adam_epsilon)
        return super().create_optimizer(model)

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Perplexity and agreement of every exit on the held-out rows, by data set where there are several. Every process
        measures all rows."""
        chosen = eval_dataset if eval_dataset is not None else self.eval_dataset
        if chosen is None or (isinstance(chosen, dict) and not chosen):
            raise ValueError("evaluation needs an eval_dataset, found none")
        metrics: dict[str, float] = {}
        for name, rows in chosen.items() if isinstance(chosen, dict) else [("", chosen)]:
            prefix = f"{metric_key_prefix}_{name}" if name else metric_key_prefix
            metrics |= {f"{prefix}_{key}": value for key, value in flat(self._quality(rows)).items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _quality(self, rows: Any) -> ExitTally:
        """Measure the exits. A sharded model runs it inside its own call, which gathers the root group."""

        def measure() -> ExitTally:
            size = self.args.per_device_eval_batch_size
            chosen = (size, self.args.eval_exits, self.args.loss_chunk, self.data_collator)
            return exit_quality(self.model, rows, *chosen, self._decoder)

        if not sharding.is_sharded(self.model):
            return measure()
        with torch.no_grad(), sharding.gathered(self.model), forwards_replaced([self.model], lambda _, plain: measure):
            return self.model()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save as transformers does. A sharded model is gathered first, unless it is for a checkpoint, which holds shards."""
        if not self.is_fsdp_enabled:
            super().save_model(output_dir, _internal_call)
        elif _internal_call and sharding.is_sharded(self.model):
            if self.args.should_save:
                self.model.config.save_pretrained(str(output_dir))
        else:
            self._save(output_dir, sharding.whole_weights(self.model))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not sharding.is_sharded(self.model):
            super()._save_optimizer_and_scheduler(output_dir)
            return
        sharding.save(Path(output_dir) / sharding.SHARDS, self.model, _inner(self.optimizer))
        if self.args.should_save:
            torch.save(cast(Any, self.lr_scheduler).state_dict(), Path(output_dir) / SCHEDULER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._by_parts(resume_from_checkpoint):
            sharding.load_weights(Path(resume_from_checkpoint), self.model)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not self._by_parts(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        sharding.load_optimizer(Path(checkpoint), self.model, _inner(self.optimizer))
        cast(Any, self.lr_scheduler).load_state_dict(torch.load(Path(checkpoint) / SCHEDULER, weights_only=True))

    def _by_parts(self, folder: str) -> bool:
        """Whether a checkpoint or this run's model is sharded."""
        return self.is_fsdp_enabled or (Path(folder) / sharding.SHARDS).is_dir()

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._saving) if self._saving is not None else super()._get_output_dir(trial)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write transformers' checkpoint under a hidden name, then publish it (checkpoint.py). OSError if the disk is full."""
        run = Path(super()._get_output_dir(trial))
        step = self.state.global_step
        loss = self._mean(self._tr_loss)
        self._check_finite(math.isfinite(loss), f"the loss is {loss}")
        finite = (sharding.local(one).isfinite().all() for one in self.model.parameters() if one.requires_grad)
        everywhere = self._mean(torch.stack(list(finite)).all().float())  # all processes stop, or none
        self._check_finite(everywhere == 1, "some weights are no finite numbers")
        try:
            self._saving = checkpoint.partial_folder(run) if self.args.should_save else run / checkpoint.PARTIAL
            self.accelerator.wait_for_everyone()
            super()._save_checkpoint(model, trial)
            self._save_loss_means(self._saving / f"checkpoint-{step}")
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                checkpoint.publish(self._saving / f"checkpoint-{step}", run, step, self.fingerprint)
                checkpoint.keep_latest(run, self.args.save_total_limit or 0)
        except (OSError, RuntimeError, SafetensorError) as error:
            if isinstance(error, RuntimeError) and not any(name in str(error) for name in _TORCH_WRITER):
                raise
            if self.args.should_save:
                checkpoint.clear(run)
            last = checkpoint.latest_good(run, self.fingerprint)
            before = f"the last good one is {last.name}" if last else "there is none yet"
            raise OSError(f"the checkpoint of step {step} could not be written to {run}: {error}; {before}") from error
        finally:
            self._saving = None

    def _save_loss_means(self, folder: Path) -> None:
        parts = {name: (self._mean(total), steps) for name, (total, steps) in self._loss_means.items()}
        content = {"logged": self._globalstep_last_logged, "loss": self._mean(self._tr_loss), "parts": parts}
        if self.args.should_save:
            (folder / LOSS_MEANS).write_text(json.dumps(content), encoding="utf-8")

    def _restore_loss_means(self, folder: Path) -> None:
        """Restore the sums of the next log entry, so that it is a mean over as many steps as in an uninterrupted run."""
        content = json.loads((folder / LOSS_MEANS).read_text(encoding="utf-8"))
        self._globalstep_last_logged = content["logged"]
        self._tr_loss += content["loss"]
        parts = content["parts"].items()
        self._loss_means = {name: (torch.tensor(sum_, device=self.args.device), n) for name, (sum_, n) in parts}


def check(model: PreTrainedModel | DecoderModel, args: LayerSkipArguments) -> LayerSkipRecipe:
    """The recipe of a run. ValueError for an unsupported model, a run that is too short, and exits that do not exist."""
    modules = model if isinstance(model, DecoderModel) else DecoderModel(model)
    recipe, depth = LayerSkipRecipe(args.dropout, args.exits), modules.depth
    recipe.check(depth, args.max_steps if args.max_steps > 0 else depth + 1)  # without max_steps: again when T is known
    if wrong := [exit_layer for exit_layer in args.eval_exits or () if not 1 <= exit_layer <= depth]:
        raise ValueError(f"eval_exits must lie between 1 and {depth}, the model's layers, found {wrong}")
    return recipe


def _inner(optimizer: Any) -> Optimizer:
    """torch's optimiser inside accelerate's."""
    return getattr(optimizer, "optimizer", optimizer)


def _own_dropout(model: PreTrainedModel) -> str | None:
    """The name of a rate by which a model itself drops something in training, if it does."""
    names = (name for name in vars(model.config) if "dropout" in name or name.endswith("pdrop"))
    return next((name for name in names if isinstance(rate := getattr(model.config, name), float) and rate > 0), None)


class _LogSchedule(TrainerCallback):
    """Lets the arguments say when to log, evaluate and save after a resume, where transformers uses the checkpoint's values."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        state.compute_steps(args, state.max_steps)


class CombinedOptimizer(Optimizer):
    """Several optimisers over disjoint parameters as one. It shares their parameter groups, so that a scheduler drives all."""

    def __init__(self, *parts: Optimizer) -> None:
        groups = [group for part in parts for group in part.param_groups]
        super().__init__([{"params": group["params"]} for group in groups], {})
        self.parts, self.param_groups = parts, groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise ValueError("step takes no closure: compute the loss and its gradients first")
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """ValueError for the state of another set of optimisers."""
        if len(state_dict.get("parts", ())) != len(self.parts):
            raise ValueError("the saved state is not that of Muon with AdamW: was the run started with another optimiser?")
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]


def muon_with_adamw(
    model: nn.Module, muon_rate: float, rate: float, betas: tuple[float, float], decay: float, epsilon: float = 1e-8
) -> CombinedOptimizer:
    """Muon for the matrices of the layers, AdamW for everything else.

    Muon (Jordan et al., 2024; torch.optim.Muon) orthogonalises the momentum of a matrix. It is meant for hidden weights:
    embeddings, heads, norms and biases stay with AdamW, and so do stacked experts (three dimensions), which torch's Muon does
    not take. muon_rate: learning rate of the matrices, on Muon's own scale (.02). rate, betas, epsilon: AdamW's, for the rest.
    decay: weight decay of both; vectors have none. ValueError if torch has no Muon yet, or no matrix is trained.
    """
    if not hasattr(torch.optim, "Muon"):
        raise ValueError(f"muon_learning_rate needs torch.optim.Muon, which torch {torch.__version__} does not have (2.9 does)")
    inside = {id(p) for layer in DecoderModel(model).layers for p in layer.parameters() if p.ndim == 2}
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if id(p) in inside]
    if not matrices:
        raise ValueError("muon_learning_rate is set, but no matrix inside the layers is trained: leave it out")
    muon = torch.optim.Muon(matrices, lr=muon_rate, weight_decay=decay)
    rest = [p for p in trained if id(p) not in inside]
    parts = ([p for p in rest if p.ndim > 1], decay), ([p for p in rest if p.ndim <= 1], 0.0)
    groups = [{"params": own, "weight_decay": rate_of} for own, rate_of in parts if own]  # adapters of layers leave none
    adamw = [torch.optim.AdamW(groups, lr=rate, betas=betas, eps=epsilon)] if groups else []
    return CombinedOptimizer(muon, *adamw)
