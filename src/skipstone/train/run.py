"""One training run from one file: a recipe in YAML names data, tokenizer, model, LayerSkip's settings and the schedule.

`run` makes what the recipe describes, resumes where an earlier run of it stopped, and leaves a folder that loads as a model.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
)

from skipstone import api
from skipstone.train.data import Plan, Prepared, Rows, prepare
from skipstone.train.documents import collect, deduplicate, split
from skipstone.train.metrics import Curves, JsonLog
from skipstone.train.recipe import PRESETS
from skipstone.train.sources import Source
from skipstone.train.tokenizer import check_fits, train_bpe
from skipstone.train.trainer import LayerSkipArguments, LayerSkipTrainer

TOKENIZER = "tokenizer"
CACHE = "data"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Start(_Part):
    """What to train: a model to go on from (a folder or hub id), or a config to start from scratch with (`model_type` and its
    fields). Exactly one of them. lora: PEFT's LoraConfig fields, to train adapters only."""

    pretrained: str | None = None
    config: dict[str, Any] | None = None
    lora: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one(self) -> Start:
        if (self.pretrained is None) == (self.config is None):
            raise ValueError("model needs either `pretrained` (a folder or hub id) or `config` (to start from scratch)")
        return self


class Words(_Part):
    """The tokenizer: a trained one (a folder or hub id), or the vocabulary size of a new byte-level BPE. None: the model's."""

    pretrained: str | None = None
    vocab_size: int | None = None


class Data(_Part):
    """length: tokens a row. held_out: share of documents that are not trained on. eval_rows: most held-out rows a source."""

    sources: list[Source] = Field(min_length=1)
    length: int = Field(ge=2)
    held_out: float = Field(default=0.02, gt=0, lt=1)
    eval_rows: int = Field(default=64, ge=1)


class Recipe(_Part):
    """A training run. preset: where dropout, exits and schedule come from unless given (recipe.PRESETS). training: fields of
    transformers' TrainingArguments and of LayerSkipArguments. decoding: the trained model's `generation_config.skipstone`."""

    output: str
    model: Start
    data: Data
    tokenizer: Words = Words()
    preset: str | None = None
    dropout: dict[str, Any] = {}
    exits: dict[str, Any] = {}
    training: dict[str, Any] = {}
    decoding: dict[str, Any] = {}
    seed: int = 0


def read(path: Path) -> Recipe:
    """A recipe from a file. ValueError names what is unknown, missing or impossible."""
    try:
        values = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a mapping of settings, found {type(values).__name__}")
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the recipe"
        raise ValueError(f"{path}: {where}: {first['msg']} (found {first.get('input')!r:.80})") from error


def arguments(recipe: Recipe, output: Path) -> LayerSkipArguments:
    """The trainer's settings: the preset's, overridden by the recipe's own. ValueError for unknown or impossible ones."""
    if recipe.preset is not None and recipe.preset not in PRESETS:
        raise ValueError(f"unknown preset {recipe.preset!r}: expected one of {', '.join(PRESETS)}")
    preset = PRESETS.get(recipe.preset or "continual")
    assert preset is not None
    schedule: dict[str, Any] = {}
    if recipe.preset is not None:
        schedule = {
            "learning_rate": preset.learning_rate,
            "per_device_train_batch_size": preset.batch_size,
            "max_steps": preset.steps,
        }
    exits = {**recipe.exits}
    if isinstance(exits.get("exits"), list):
        exits["exits"] = tuple(exits["exits"])
    training = {**recipe.training}
    if isinstance(training.get("eval_exits"), list):
        training["eval_exits"] = tuple(training["eval_exits"])
    fixed = {
        "output_dir": str(output),
        "seed": recipe.seed,
        "train_sampling_strategy": "sequential",  # the data are in training order
        "report_to": "none",
        "remove_unused_columns": False,
        "use_cpu": not torch.cuda.is_available(),
    }
    return LayerSkipArguments(
        dropout=_changed("dropout", preset.recipe.dropout, recipe.dropout),
        exits=_changed("exits", preset.recipe.exits, exits),
        **_known({**schedule, **training}, fixed),
        **fixed,
    )


def run(path: Path, output: Path | None = None, fresh: bool = False, say: Callable[[str], None] = print) -> Path:
    """Train what a recipe describes. output: instead of the recipe's own folder. fresh: refuse to resume. Returns the folder
    of the finished model."""
    recipe = read(path)
    folder = output or Path(recipe.output)
    settings = arguments(recipe, folder)
    if settings.max_steps <= 0:
        raise ValueError(f"{path}: training.max_steps must be given: the data are mixed for a run of known length")
    if fresh and folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: remove it, or let the run resume from it")
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(recipe, path.parent, folder)
    model = _model(recipe, tokenizer, say)
    rows = (
        settings.max_steps * settings.per_device_train_batch_size * settings.gradient_accumulation_steps * settings.world_size
    )
    plan = Plan(length=recipe.data.length, rows=rows, held_out=recipe.data.held_out, seed=recipe.seed)
    prepared = prepare(recipe.data.sources, tokenizer, plan, path.parent, folder / CACHE)
    say(json.dumps(prepared.report, indent=1))
    trainer = LayerSkipTrainer(
        model,
        settings,
        train_dataset=Rows(prepared.train),
        eval_dataset={name: Rows(own[: recipe.data.eval_rows]) for name, own in prepared.held_out.items()},
        fingerprint={"data": prepared.report["sha256"]},
        callbacks=[JsonLog(folder / "metrics.jsonl"), Curves(folder / "curves.png")],
    )
    trainer.train(resume_from_checkpoint=True)
    trainer.evaluate()
    if trainer.is_world_process_zero():
        _save(trainer.model, tokenizer, recipe, prepared, folder / "model")
    return folder / "model"


def _changed(name: str, base: Any, changes: dict[str, Any]) -> Any:
    """A settings object with some fields replaced. ValueError for unknown ones."""
    if unknown := sorted(set(changes) - set(base.__dataclass_fields__)):
        raise ValueError(f"unknown {name} setting {unknown[0]!r}: expected {', '.join(base.__dataclass_fields__)}")
    return replace(base, **changes)


def _known(given: dict[str, Any], fixed: dict[str, Any]) -> dict[str, Any]:
    """Training settings that exist and are not the recipe's own to set. ValueError for others."""
    names = set(LayerSkipArguments.__dataclass_fields__) - {"dropout", "exits"}
    if unknown := sorted(set(given) - names):
        raise ValueError(
            f"unknown training setting {unknown[0]!r}: expected a field of TrainingArguments or LayerSkipArguments"
        )
    if taken := sorted(set(given) & set(fixed)):
        raise ValueError(f"training.{taken[0]} is set by the recipe itself ({fixed[taken[0]]!r})")
    return given


def _tokenizer(recipe: Recipe, base: Path, folder: Path) -> PreTrainedTokenizerBase:
    """The run's tokenizer. A new one is trained on the training documents once and kept in the run's folder."""
    source = recipe.tokenizer.pretrained or (None if recipe.tokenizer.vocab_size else recipe.model.pretrained)
    if source is not None:
        return AutoTokenizer.from_pretrained(source)
    if recipe.tokenizer.vocab_size is None:
        raise ValueError("a model from scratch needs tokenizer.pretrained or tokenizer.vocab_size")
    kept = folder / TOKENIZER
    if not (kept / "tokenizer.json").exists():
        documents, _ = deduplicate(collect(recipe.data.sources, base))
        train, _ = split(documents, recipe.data.held_out, recipe.seed)
        train_bpe(train, recipe.tokenizer.vocab_size).save_pretrained(kept)
    return AutoTokenizer.from_pretrained(kept)


def _model(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, say: Callable[[str], None]) -> Any:
    torch.manual_seed(recipe.seed)
    if recipe.model.pretrained is not None:
        model: Any = api.load(recipe.model.pretrained, dtype=torch.float32)[0]
    else:
        assert recipe.model.config is not None
        settings = {**recipe.model.config}
        if "model_type" not in settings:
            raise ValueError("model.config needs a model_type, for example llama")
        ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        config = AutoConfig.for_model(settings.pop("model_type"), **{"bos_token_id": None, **ids, **settings})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    check_fits(tokenizer, model.config)
    if recipe.model.lora is not None:
        try:
            from peft import LoraConfig, get_peft_model
        except ImportError as error:
            raise ImportError('model.lora needs peft: pip install "skipstone[train]"') from error
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **recipe.model.lora))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    say(f"{trained / 1e6:.1f} M parameters to train")
    return model


def _save(model: Any, tokenizer: PreTrainedTokenizerBase, recipe: Recipe, prepared: Prepared, folder: Path) -> None:
    """The finished model, as transformers loads it, with its own decoding defaults and the account of its data."""
    if recipe.decoding:
        model.generation_config = GenerationConfig(
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, skipstone=recipe.decoding
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "data.json").write_text(json.dumps(prepared.report, indent=1))
