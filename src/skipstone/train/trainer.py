"""`LayerSkipTrainer`: transformers' Trainer with LayerSkip's loss, exact resume and a report on every exit.

What the paper adds to training is in recipe.py, dropout.py and loss.py; what remains (data loading, mixed precision, DDP, FSDP,
DeepSpeed, schedulers, gradient accumulation) is transformers' and accelerate's.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainingArguments

from skipstone.train import checkpoint
from skipstone.train.evaluation import exit_quality
from skipstone.train.loss import CHUNK
from skipstone.train.objective import Objective
from skipstone.train.optimizer import muon_with_adamw
from skipstone.train.recipe import EarlyExit, LayerDropout, LayerSkipRecipe


@dataclass
class LayerSkipArguments(TrainingArguments):
    """transformers' TrainingArguments and the recipe's.

    dropout, exits: see recipe.py. muon_learning_rate: Muon for the layers' matrices at this rate, AdamW at `learning_rate` for
    the rest; None leaves the choice of optimiser to transformers. loss_chunk: positions whose logits exist at once.
    eval_exits: exit layers E that evaluations report, None for all.
    """

    dropout: LayerDropout = field(default_factory=LayerDropout)
    exits: EarlyExit = field(default_factory=EarlyExit)
    muon_learning_rate: float | None = None
    loss_chunk: int = CHUNK
    eval_exits: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.load_best_model_at_end:
            raise ValueError("load_best_model_at_end is not supported: every checkpoint is kept or removed by its step alone")
        if self.ddp_find_unused_parameters is None and self.dropout.p_max > 0:
            self.ddp_find_unused_parameters = True  # a layer may drop all rows


class LayerSkipTrainer(Trainer):
    """Train a causal language model with layer dropout and early exits.

    train_dataset: items with input_ids and labels [T] int64. eval_dataset: the same, or a dict of several.
    fingerprint: what else a run must have in common with a checkpoint to resume from it (hashes of data and tokenizer).
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
        **options: Any,
    ) -> None:
        super().__init__(model, args, *more, **options)
        self.recipe = LayerSkipRecipe(args.dropout, args.exits)
        self.fingerprint = {
            "recipe": repr(self.recipe),
            "seed": args.seed,
            "model": model.config.to_json_string(),
            **(fingerprint or {}),
        }
        self.objective: Objective | None = None
        self._saving: Path | None = None

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> Any:
        """Run the recipe. ValueError for a checkpoint that is damaged or of another run."""
        source: str | None = None
        if resume_from_checkpoint:
            folder = (
                Path(resume_from_checkpoint)
                if isinstance(resume_from_checkpoint, str)
                else checkpoint.latest(Path(str(self.args.output_dir)))
            )
            if folder is not None:
                checkpoint.verify(folder, self.fingerprint)
                source = str(folder)
        self.objective = Objective(self.model, self.recipe, self._steps(), self.args.seed, self.args.loss_chunk)
        with self.objective.installed():
            return super().train(source, trial, ignore_keys_for_eval)

    def _steps(self) -> int:
        """T: optimiser steps of the whole run."""
        if self.args.max_steps > 0:
            return self.args.max_steps
        loader = self.get_train_dataloader()
        return self.set_initial_training_values(self.args, loader)[-1]

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        assert self.objective is not None
        step = self.state.global_step
        if step != self.objective.step or self.objective.micro < step * self.args.gradient_accumulation_steps:
            self.objective.step, self.objective.micro = step, step * self.args.gradient_accumulation_steps
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.objective.micro += 1
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.objective is not None and "loss" in logs:
            logs = {**logs, **{name: float(part) for name, part in self.objective.parts.items()}}
        super().log(logs, start_time)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None and self.args.muon_learning_rate is not None:
            betas = (self.args.adam_beta1, self.args.adam_beta2)
            rates = self.args.muon_learning_rate, self.args.learning_rate
            self.optimizer = muon_with_adamw(self.model, *rates, betas, self.args.weight_decay)
        return super().create_optimizer(model)

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Perplexity and agreement of every exit on the held-out rows, by data set where there are several."""
        chosen = eval_dataset if eval_dataset is not None else self.eval_dataset
        if chosen is None:
            raise ValueError("evaluation needs an eval_dataset")
        metrics: dict[str, float] = {}
        for name, rows in chosen.items() if isinstance(chosen, dict) else [("", chosen)]:
            prefix = f"{metric_key_prefix}_{name}" if name else metric_key_prefix
            quality = exit_quality(self.model, rows, self.args.per_device_eval_batch_size, self.args.eval_exits)
            metrics |= {f"{prefix}_{key}": value for key, value in quality.flat().items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._saving) if self._saving is not None else super()._get_output_dir(trial)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """transformers' checkpoint, made whole before it has its name (checkpoint.py)."""
        run = Path(super()._get_output_dir(trial))
        step = self.state.global_step
        try:
            if self.args.should_save:
                self._saving = checkpoint.partial_folder(run)
            else:
                self._saving = run / ".partial"
            self.accelerator.wait_for_everyone()
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                checkpoint.publish(self._saving / f"checkpoint-{step}", run, step, self.fingerprint)
                checkpoint.keep_latest(run, self.args.save_total_limit or 2)
        except OSError as error:
            last = checkpoint.latest(run)
            raise OSError(
                f"the checkpoint of step {step} could not be written to {run}: {error}; "
                + (f"the last good one is {last.name}" if last else "there is none yet")
            ) from error
        finally:
            self._saving = None


def describe(args: LayerSkipArguments) -> dict[str, Any]:
    """The recipe's settings as plain values."""
    return {"dropout": asdict(args.dropout), "exits": asdict(args.exits)}
