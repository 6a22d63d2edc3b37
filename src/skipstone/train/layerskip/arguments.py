"""Reads and checks a training recipe, one YAML file, and derives the trainer's `LayerSkipArguments` from it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import torch
from pydantic import Field, TypeAdapter, ValidationError, model_validator
from transformers import TrainingArguments

from skipstone.train.data.sources import Source, from_folder
from skipstone.train.layerskip.objective import CHUNK
from skipstone.train.layerskip.schedules import PRESETS, EarlyExitLoss, LayerDropout, LayerSkipRecipe, renamed_exits
from skipstone.utils.settings_files import SettingsPart, first_fault
from skipstone.utils.yaml_files import mapping

DECIDING = (
    *("max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "train_sampling_strategy", "data_seed"),
    *("learning_rate", "muon_learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "weight_decay"),
    *("adam_beta1", "adam_beta2", "adam_epsilon", "optim_args", "max_grad_norm", "neftune_noise_alpha", "bf16", "fp16"),
    *("average_tokens_across_devices", "dataloader_drop_last"),
)
"""Arguments that must not change when a run resumes: other values would make another run, or have no effect."""
REFUSED_IN_RECIPES = {
    "num_train_epochs": "has no effect: training.max_steps says how long a run is, and sources repeat as their weights ask",
    "resume_from_checkpoint": "has no effect: a run resumes from its own folder; --fresh refuses to",
    **dict.fromkeys(("dropout", "exits"), "is a part of its own of the recipe: write it next to training, not inside"),
    **dict.fromkeys(
        ("fsdp", "fsdp_config"),
        "belongs to the launch, so that any number of processes can resume a run: "
        "accelerate launch --use_fsdp --fsdp_version 2",
    ),
}
"""Training settings that a recipe must not have, and why."""
UNSUPPORTED = {
    "load_best_model_at_end": "every checkpoint is kept or removed by its step alone",
    "metric_for_best_model": "every checkpoint is kept or removed by its step alone",
    "auto_find_batch_size": "a run resumes with the batch size that it was started with",
    "save_only_model": "a checkpoint without the optimiser cannot be resumed from",
    "label_smoothing_factor": "the early-exit loss has no label smoothing",
    "logging_nan_inf_filter": "a loss that is not finite stops the run",
    "use_liger_kernel": "it replaces the forward that the early-exit loss is computed in",
    "ignore_data_skip": "a run resumes at the row where it stopped",
    "bf16_full_eval": "exits are measured in the precision of the weights",
    "fp16_full_eval": "exits are measured in the precision of the weights",
    "prediction_loss_only": "an evaluation reports every exit",
}
"""Settings of transformers that contradict what this trainer promises."""


@dataclass
class LayerSkipArguments(TrainingArguments):
    """transformers' TrainingArguments and the recipe's.

    dropout, exits: see schedules.py. muon_learning_rate: Muon for the layers' matrices at this rate, AdamW at `learning_rate`
    for the rest; None leaves the choice of optimiser to transformers. loss_chunk: positions whose logits exist at once.
    eval_exits: exit layers E that evaluations report, None for all. ValueError for impossible values and for ignored ones.
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
        if self.ddp_find_unused_parameters is None and (self.dropout.p_max > 0 or not self.exits.keep_last):
            self.ddp_find_unused_parameters = True  # a layer may drop all rows, or lie above all exits of a step
        muon = () if self.muon_learning_rate is None else ("optim", "optim_args")
        reasons = dict.fromkeys(muon, "muon_learning_rate makes the optimiser, Muon with AdamW")
        for name, reason in (UNSUPPORTED | reasons).items():
            value = getattr(self, name)
            if value and value != type(self).__dataclass_fields__[name].default:
                raise ValueError(f"{name}={value!r} is not supported: {reason}")

    def to_dict(self) -> dict[str, Any]:
        """As transformers writes arguments, with plain values only."""
        exits = asdict(self.exits)
        chosen = exits.pop("exit_layers")
        exits["exits"] = None if chosen is None else [layer - 1 for layer in chosen]  # as checkpoints of older runs have it
        return super().to_dict() | {"dropout": asdict(self.dropout), "exits": exits}

    def deciding(self) -> dict[str, Any]:
        """The arguments that must not change when a run resumes, as plain values."""
        values = self.to_dict()
        own = {"world_size": self.world_size}
        if self.max_steps <= 0:
            own["num_train_epochs"] = self.num_train_epochs
        if self.muon_learning_rate is None:
            own["optim"] = values["optim"]
        return {name: values[name] for name in DECIDING} | own


class StartingModel(SettingsPart):
    """The model that a run starts from: exactly one of a trained model (a folder or hub id), the model of another recipe in the
    same folder, which is trained first, or a config for training from scratch (`model_type` and its fields).

    layers: number of its first layers to keep, for a draft model. lora: PEFT's LoraConfig fields, to train adapters only."""

    pretrained: str | None = None
    recipe: str | None = None
    config: dict[str, Any] | None = None
    layers: int | None = Field(default=None, ge=1)
    lora: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _either(self) -> "StartingModel":
        if sum(one is not None for one in (self.pretrained, self.recipe, self.config)) != 1:
            raise ValueError("expected either `pretrained` (a folder or hub id), `recipe` (for its model) or `config`")
        if self.layers is not None and self.config is not None:
            raise ValueError("`layers` shortens a trained model; a config says num_hidden_layers itself")
        return self


class TokenizerSettings(SettingsPart):
    """The tokenizer: trained (a folder or hub id), or the vocabulary size of a new byte-level BPE; the model's by default."""

    pretrained: str | None = None
    vocab_size: int | None = None

    @model_validator(mode="after")
    def _not_both(self) -> "TokenizerSettings":
        if self.pretrained is not None and self.vocab_size is not None:
            raise ValueError("expected either `pretrained` (a folder or hub id) or `vocab_size` (of a new one), found both")
        return self


class DataSettings(SettingsPart):
    """length: tokens per row, a preset's context by default. held_out: share of documents for evaluation only. eval_rows:
    maximum of held-out rows per source."""

    sources: list[Source] = Field(min_length=1)
    length: int = Field(ge=2)
    held_out: float = Field(default=0.02, gt=0, lt=1)
    eval_rows: int = Field(default=64, ge=1)


class TrainingRecipe(SettingsPart):
    """A training run. preset: defaults of dropout, exits and schedule (schedules.PRESETS). training: fields of transformers'
    TrainingArguments and of LayerSkipArguments. teacher: a model (folder or hub id) whose distribution replaces the labels, as
    for a draft model. distillation_vocabulary: a JSON file of token ids; the teacher's distribution, and the last layer's for
    exits with `kl_weight`, are learnt over these; all by default. decoding: the trained model's `generation_config.skipstone`.
    dtype: of the finished model's weights on the disk; they are trained in float32."""

    output: str = Field(min_length=1)
    model: StartingModel
    data: DataSettings
    tokenizer: TokenizerSettings = TokenizerSettings()
    preset: str | None = None
    dropout: dict[str, Any] = Field(default_factory=dict)
    exits: dict[str, Any] = Field(default_factory=dict)
    training: dict[str, Any] = Field(default_factory=dict)
    teacher: str | None = None
    distillation_vocabulary: str | None = None
    decoding: dict[str, Any] = Field(default_factory=dict)
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _context(cls, values: Any) -> Any:
        """Let a preset's context be the default length of rows."""
        if not isinstance(values, dict) or (name := values.get("preset")) is None:
            return values
        if name not in PRESETS:
            raise ValueError(f"unknown preset {name!r}: expected one of {', '.join(PRESETS)}")
        data = values.get("data")
        return {**values, "data": {"length": PRESETS[name].context, **data}} if isinstance(data, dict) else values

    @model_validator(mode="after")
    def _consistent(self) -> "TrainingRecipe":
        if self.distillation_vocabulary is not None and self.teacher is None and self.exits.get("kl_weight") is None:
            raise ValueError("distillation_vocabulary says over which tokens to distil: name a teacher or exits.kl_weight")
        if self.model.config is None and self.tokenizer.vocab_size is not None:
            raise ValueError("tokenizer.vocab_size goes with model.config: a trained model needs its own tokenizer")
        return self


def read(path: Path, data_dir: Path | None = None, before: tuple[Path, ...] = ()) -> TrainingRecipe:
    """Read a recipe. data_dir: folder of files that replace data sets of the hub. before: recipes that go on from this one's
    model. ValueError names what is unknown, missing or impossible."""
    try:
        recipe = TrainingRecipe.model_validate(_values(path, ()))
    except ValidationError as error:
        raise ValueError(f"{path}: {first_fault(error)}") from error
    if recipe.model.recipe is not None:
        first, before = path.parent / recipe.model.recipe, (*before, path.resolve())
        if first.resolve() in before:
            raise ValueError(f"{path} goes on from {recipe.model.recipe} again: recipes start from one another in a circle")
        read(first, before=before)
    sources = from_folder(recipe.data.sources, data_dir)
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"sources": sources})})


def _values(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    """The values of a file, merged over the recipe that it `extends`: mappings key by key, lists and plain values as a whole.
    The older `exits.exits` becomes `exits.exit_layers`."""
    if path.resolve() in above:
        raise ValueError(f"{path} extends itself")
    values = mapping(path)
    exits = values.get("exits")
    if isinstance(exits, dict) and "exits" in exits:
        older = exits.pop("exits")
        exits["exit_layers"] = renamed_exits(older, exits.get("exit_layers")) if isinstance(older, list) else older
    base = values.pop("extends", None)
    if base is None:
        return values
    if Path(str(base)).name != str(base):
        raise ValueError(f"{path} extends {base}: expected a recipe of the same folder, which relative paths belong to")
    below = _values(path.parent / str(base), (*above, path.resolve()))
    if "decoding" in values:  # settings of another method do not apply to this one
        below.pop("decoding", None)
    return _merge(below, values)


def _merge(base: Any, changes: Any) -> Any:
    if not (isinstance(base, dict) and isinstance(changes, dict)):
        return changes
    return {**base, **{key: _merge(base.get(key), value) for key, value in changes.items()}}


def arguments(recipe: TrainingRecipe, output: Path) -> LayerSkipArguments:
    """The trainer's settings: the preset's, overridden by the recipe's own. ValueError for unknown or impossible ones."""
    preset = PRESETS[recipe.preset] if recipe.preset is not None else None
    base, schedule = preset or LayerSkipRecipe(), {}
    dropout = replace(base.dropout, **_typed("dropout", LayerDropout, recipe.dropout))
    if preset is not None:
        sizes = {"max_steps": preset.steps, "per_device_train_batch_size": preset.batch_size}
        schedule = {"learning_rate": preset.rate(dropout), **sizes}
    fixed = {
        "output_dir": str(output),
        "seed": recipe.seed,
        "train_sampling_strategy": "sequential",  # the data are in training order
        "report_to": "none",
        "remove_unused_columns": False,
        "use_cpu": not torch.cuda.is_available(),
    }
    set_here = {name: f"is set by the recipe itself ({value!r}): leave it out" for name, value in fixed.items()}
    for name, reason in (REFUSED_IN_RECIPES | set_here).items():
        if name in recipe.training:
            raise ValueError(f"training.{name} {reason}")
    if recipe.training.get("save_strategy") in ("no", False):
        raise ValueError("training.save_strategy: a run without checkpoints could not be resumed; raise save_steps instead")
    known = "a field of TrainingArguments or LayerSkipArguments"
    training = _typed("training", LayerSkipArguments, recipe.training, known)
    if training.get("max_steps", schedule.get("max_steps", 0)) <= 0:
        raise ValueError("training.max_steps must be given, at least 1: the data are mixed for a run of known length")
    exits = replace(base.exits, **_typed("exits", EarlyExitLoss, recipe.exits))
    if exits.kl_weight is not None and recipe.exits.get("e_scale"):
        raise ValueError("exits.e_scale has no effect with kl_weight, which trains exits towards the last layer")
    if exits.curriculum != "rotational" and recipe.exits.get("dilation") is not None:
        raise ValueError(f"exits.dilation has no effect with curriculum {exits.curriculum}: it is R of the rotational one")
    return LayerSkipArguments(
        dropout=dropout, exits=exits, **{"disable_tqdm": False, "save_total_limit": 2, **schedule, **training}, **fixed
    )


def _typed(part: str, kind: type[Any], given: Mapping[str, Any], known: str | None = None) -> dict[str, Any]:
    """Convert values to the types of a dataclass's fields: YAML reads 3e-5 as a text. ValueError names a value that fails."""
    hints = get_type_hints(kind, include_extras=True)
    hints = {name: hints[name] for name in kind.__dataclass_fields__ if name in hints}
    typed = {}
    for name, value in given.items():
        if name not in hints:
            raise ValueError(f"unknown {part} setting {name!r}: expected {known or ', '.join(hints)}")
        if isinstance(value, bool) and bool not in (get_args(hints[name]) or (hints[name],)):
            raise ValueError(f"{part}.{name}: expected {hints[name]}, found {value!r}")
        try:
            typed[name] = TypeAdapter(hints[name]).validate_python(value)
        except ValidationError as error:
            raise ValueError(f"{part}.{name}: {first_fault(error)}") from error
    return typed
