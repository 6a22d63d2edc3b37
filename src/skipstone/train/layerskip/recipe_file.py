"""A training run's one file: a recipe in YAML, read and checked, and the trainer's arguments that follow from it."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import torch
from pydantic import Field, TypeAdapter, ValidationError, model_validator

from skipstone.forms import Part, first_fault, mapping
from skipstone.train.data.sources import Source
from skipstone.train.layerskip.arguments import LayerSkipArguments
from skipstone.train.layerskip.recipe import PRESETS, EarlyExitLoss, LayerDropout, LayerSkipRecipe
from skipstone.train.runs import from_folder

NO_EFFECT = {
    "num_train_epochs": "training.max_steps says how long a run is, and sources repeat as their weights ask",
    "resume_from_checkpoint": "a run resumes from its own folder; --fresh refuses to",
}


class StartingModel(Part):
    """What to train: a model to go on from (a folder or hub id), the model of another recipe of the same folder, which is run
    first, or a config to start from scratch with (`model_type` and its fields). Exactly one of them. layers: only so many of
    its first layers, to begin a draft model with. lora: PEFT's LoraConfig fields, to train adapters only."""

    pretrained: str | None = None
    recipe: str | None = None
    config: dict[str, Any] | None = None
    layers: int | None = Field(default=None, ge=1)
    lora: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _either(self) -> "StartingModel":
        if sum(one is not None for one in (self.pretrained, self.recipe, self.config)) != 1:
            raise ValueError(
                "expected either `pretrained` (a folder or hub id), `recipe` (to go on from its model) or `config`"
            )
        if self.layers is not None and self.config is not None:
            raise ValueError("`layers` shortens a trained model; a config says num_hidden_layers itself")
        return self


class Vocabulary(Part):
    """The tokenizer: a trained one (a folder or hub id), or the vocabulary size of a new byte-level BPE. None: the model's."""

    pretrained: str | None = None
    vocab_size: int | None = None

    @model_validator(mode="after")
    def _not_both(self) -> "Vocabulary":
        if self.pretrained is not None and self.vocab_size is not None:
            raise ValueError("expected either `pretrained` (a folder or hub id) or `vocab_size` (of a new one), found both")
        return self


class Data(Part):
    """length: tokens a row, a preset's context by default. held_out: share of documents that are not trained on. eval_rows:
    most held-out rows a source."""

    sources: list[Source] = Field(min_length=1)
    length: int = Field(ge=2)
    held_out: float = Field(default=0.02, gt=0, lt=1)
    eval_rows: int = Field(default=64, ge=1)


class Recipe(Part):
    """A training run. preset: where dropout, exits and schedule come from unless given (recipe.PRESETS). training: fields of
    transformers' TrainingArguments and of LayerSkipArguments. teacher: a model (folder or hub id) whose distribution takes the
    place of the labels: the way to a draft model. decoding: the trained model's `generation_config.skipstone`.
    dtype: what the finished model's weights are saved in; they are trained in float32."""

    output: str = Field(min_length=1)
    model: StartingModel
    data: Data
    tokenizer: Vocabulary = Vocabulary()
    preset: str | None = None
    dropout: dict[str, Any] = Field(default_factory=dict)
    exits: dict[str, Any] = Field(default_factory=dict)
    training: dict[str, Any] = Field(default_factory=dict)
    teacher: str | None = None
    decoding: dict[str, Any] = Field(default_factory=dict)
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _context(cls, values: Any) -> Any:
        """A preset's context is the length of rows that are given none."""
        if not isinstance(values, dict) or (name := values.get("preset")) is None:
            return values
        if name not in PRESETS:
            raise ValueError(f"unknown preset {name!r}: expected one of {', '.join(PRESETS)}")
        data = values.get("data")
        return {**values, "data": {"length": PRESETS[name].context, **data}} if isinstance(data, dict) else values

    @model_validator(mode="after")
    def _consistent(self) -> "Recipe":
        if self.model.config is None and self.tokenizer.vocab_size is not None:
            raise ValueError(
                "tokenizer.vocab_size goes with model.config: a new tokenizer's ids mean nothing to a trained model"
            )
        return self


def read(path: Path, data_dir: Path | None = None) -> Recipe:
    """A recipe from a file. data_dir: the folder of the files that stand for data sets of the hub, where sources name them.
    ValueError names what is unknown, missing or impossible."""
    try:
        recipe = Recipe.model_validate(_values(path, ()))
    except ValidationError as error:
        raise ValueError(f"{path}: {first_fault(error)}") from error
    if recipe.model.recipe is not None:
        _check_chain(path, recipe.model.recipe)
    sources = from_folder(recipe.data.sources, data_dir)
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"sources": sources})})


def _check_chain(path: Path, first: str) -> None:
    """ValueError where recipes go on from one another in a circle."""
    seen, before = {path.resolve()}, first
    while before is not None:
        at = path.parent / before
        if at.resolve() in seen:
            raise ValueError(f"{path} goes on from {first}, and that from {before} again")
        seen.add(at.resolve())
        start = _values(at, ()).get("model")
        before = start.get("recipe") if isinstance(start, dict) else None


def _values(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    """What a file says, on top of the recipe beside it that it `extends`: part by part, a list or a plain value as a whole."""
    if path.resolve() in above:
        raise ValueError(f"{path} extends itself")
    values = mapping(path)
    base = values.pop("extends", None)
    if base is None:
        return values
    if Path(str(base)).name != str(base):
        raise ValueError(f"{path} extends {base}: expected a recipe of the same folder, which relative paths belong to")
    below = _values(path.parent / str(base), (*above, path.resolve()))
    if "decoding" in values:  # a method with its settings: those of another mean nothing to it
        below.pop("decoding", None)
    return _over(below, values)


def _over(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    both = {key: _over(base[key], changes[key]) for key in base.keys() & changes.keys() if _parts(base[key], changes[key])}
    return {**base, **changes, **both}


def _parts(one: Any, other: Any) -> bool:
    return isinstance(one, dict) and isinstance(other, dict)


def arguments(recipe: Recipe, output: Path) -> LayerSkipArguments:
    """The trainer's settings: the preset's, overridden by the recipe's own. ValueError for unknown or impossible ones."""
    base, schedule = LayerSkipRecipe(LayerDropout(), EarlyExitLoss()), {}
    if recipe.preset is not None:
        preset = PRESETS[recipe.preset]
        base = preset.recipe
        schedule = {
            "learning_rate": preset.learning_rate,
            "per_device_train_batch_size": preset.batch_size,
            "max_steps": preset.steps,
        }
    fixed = {
        "output_dir": str(output),
        "seed": recipe.seed,
        "train_sampling_strategy": "sequential",  # the data are in training order
        "report_to": "none",
        "remove_unused_columns": False,
        "use_cpu": not torch.cuda.is_available(),
    }
    training = _training(recipe.training, fixed)
    if training.get("max_steps", schedule.get("max_steps", 0)) <= 0:
        raise ValueError("training.max_steps must be given, at least 1: the data are mixed for a run of known length")
    exits = replace(base.exits, **_typed("exits", EarlyExitLoss, recipe.exits))
    if exits.kl_weight is not None and recipe.exits.get("e_scale"):
        raise ValueError("exits.e_scale has no effect beside kl_weight, which trains exits towards the last layer")
    if exits.curriculum != "rotational" and recipe.exits.get("dilation") is not None:
        raise ValueError(f"exits.dilation has no effect with curriculum {exits.curriculum}: it is R of the rotational one")
    return LayerSkipArguments(
        dropout=replace(base.dropout, **_typed("dropout", LayerDropout, recipe.dropout)),
        exits=exits,
        **{"disable_tqdm": False, "save_total_limit": 2, **schedule, **training},
        **fixed,
    )


def _training(given: dict[str, Any], fixed: dict[str, Any]) -> dict[str, Any]:
    """Training settings that exist, are not the recipe's own to set, and have an effect. ValueError for others."""
    if taken := [name for name in given if name in fixed]:
        raise ValueError(f"training.{taken[0]} is set by the recipe itself ({fixed[taken[0]]!r}): leave it out")
    if elsewhere := [name for name in given if name in ("dropout", "exits")]:
        raise ValueError(f"training.{elsewhere[0]}: {elsewhere[0]} is a part of its own of the recipe, beside training")
    if idle := [name for name in given if name in NO_EFFECT]:
        raise ValueError(f"training.{idle[0]} has no effect: {NO_EFFECT[idle[0]]}")
    if given.get("save_strategy") in ("no", False):
        raise ValueError("training.save_strategy: a run without checkpoints could not be resumed; raise save_steps instead")
    return _typed("training", LayerSkipArguments, given, "a field of TrainingArguments or LayerSkipArguments")


def _typed(part: str, kind: type[Any], given: Mapping[str, Any], known: str | None = None) -> dict[str, Any]:
    """Values for fields of a dataclass, of the fields' types: YAML reads 3e-5 as a text. ValueError names what does not fit."""
    hints = {name: hint for name, hint in get_type_hints(kind).items() if name in kind.__dataclass_fields__}
    if unknown := [name for name in given if name not in hints]:
        raise ValueError(f"unknown {part} setting {unknown[0]!r}: expected {known or ', '.join(hints)}")
    typed = {}
    for name, value in given.items():
        if isinstance(value, bool) and bool not in (get_args(hints[name]) or (hints[name],)):
            raise ValueError(f"{part}.{name}: expected {hints[name]}, found {value!r}")
        try:
            typed[name] = TypeAdapter(hints[name]).validate_python(value)
        except ValidationError as error:
            raise ValueError(f"{part}.{name}: {first_fault(error)}") from error
    return typed
