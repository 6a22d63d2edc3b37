"""`LayerSkipArguments`: transformers' TrainingArguments and the recipe's."""

from dataclasses import asdict, dataclass, field
from typing import Any

from transformers import TrainingArguments

from skipstone.train.layerskip.objective import CHUNK
from skipstone.train.layerskip.recipe import EarlyExitLoss, LayerDropout

DECIDING = (
    *("max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "train_sampling_strategy", "data_seed"),
    *("learning_rate", "muon_learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "weight_decay"),
    *("adam_beta1", "adam_beta2", "adam_epsilon", "optim_args", "max_grad_norm", "neftune_noise_alpha", "bf16", "fp16"),
    *("average_tokens_across_devices", "dataloader_drop_last"),
)
"""Arguments that a run must keep when it resumes: with others it would be another run, or they would have no effect."""


@dataclass
class LayerSkipArguments(TrainingArguments):
    """transformers' TrainingArguments and the recipe's.

    dropout, exits: see recipe.py. muon_learning_rate: Muon for the layers' matrices at this rate, AdamW at `learning_rate` for
    the rest; None leaves the choice of optimiser to transformers. loss_chunk: positions whose logits exist at once.
    eval_exits: exit layers E that evaluations report, None for all. ValueError for what cannot be, and for what would be
    ignored.
    """

    dropout: LayerDropout = field(default_factory=LayerDropout)
    exits: EarlyExitLoss = field(default_factory=EarlyExitLoss)
    muon_learning_rate: float | None = None
    loss_chunk: int = CHUNK
    eval_exits: tuple[int, ...] | None = None
    logging_nan_inf_filter: bool = False  # transformers would log the mean of earlier losses in the place of nan

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, kind in (("dropout", LayerDropout), ("exits", EarlyExitLoss)):
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name} must be a {kind.__name__}, found {getattr(self, name)!r}")
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "loss_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, found {getattr(self, name)}")
        for name in ("learning_rate", "muon_learning_rate"):
            if getattr(self, name) is not None and not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be a finite number that is not negative, found {getattr(self, name)}")
        self._refuse()
        if self.ddp_find_unused_parameters is None and (self.dropout.p_max > 0 or not self.exits.keep_last):
            self.ddp_find_unused_parameters = True  # a layer may drop all rows, or lie above all exits of a step

    def _refuse(self) -> None:
        """ValueError for settings of transformers that contradict what this trainer promises."""
        by_metric = "load_best_model_at_end" if self.load_best_model_at_end else "metric_for_best_model"
        muon, usual = self.muon_learning_rate is not None, type(self).__dataclass_fields__["optim"].default
        refused = {
            "optim": (muon and self.optim != usual, "muon_learning_rate makes the optimiser, Muon with AdamW"),
            "optim_args": (muon and self.optim_args is not None, "muon_learning_rate makes the optimiser, Muon with AdamW"),
            by_metric: (self.metric_for_best_model is not None, "every checkpoint is kept or removed by its step alone"),
            "auto_find_batch_size": (self.auto_find_batch_size, "a run resumes with the batch size that it was started with"),
            "save_only_model": (self.save_only_model, "a checkpoint without the optimiser cannot be resumed from"),
            "label_smoothing_factor": (self.label_smoothing_factor != 0, "the early-exit loss has no label smoothing"),
            "logging_nan_inf_filter": (self.logging_nan_inf_filter, "a loss that is not finite stops the run"),
            "use_liger_kernel": (self.use_liger_kernel, "it replaces the forward that the early-exit loss is computed in"),
            "ignore_data_skip": (self.ignore_data_skip, "a run resumes at the row where it stopped"),
            "bf16_full_eval": (self.bf16_full_eval, "exits are measured in the precision of the weights"),
            "fp16_full_eval": (self.fp16_full_eval, "exits are measured in the precision of the weights"),
            "prediction_loss_only": (self.prediction_loss_only, "an evaluation reports every exit"),
        }
        for name, (wanted, reason) in refused.items():
            if wanted:
                raise ValueError(f"{name}={getattr(self, name)!r} is not supported: {reason}")

    def to_dict(self) -> dict[str, Any]:
        """As transformers writes arguments, with plain values only."""
        return super().to_dict() | {"dropout": asdict(self.dropout), "exits": asdict(self.exits)}

    def deciding(self) -> dict[str, Any]:
        """What a run must keep when it resumes, as plain values."""
        values = self.to_dict()
        own = {"world_size": self.world_size}
        if self.max_steps <= 0:
            own["num_train_epochs"] = self.num_train_epochs
        if self.muon_learning_rate is None:
            own["optim"] = values["optim"]
        return {name: values[name] for name in DECIDING} | own
