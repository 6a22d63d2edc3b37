"""Runs a training recipe: one YAML file names data, tokenizer, model, LayerSkip's settings and the schedule.

`run` trains it, resumes an interrupted run, and leaves a folder that loads as a model.
"""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers import PreTrainedTokenizerBase as Tokenizer

from skipstone.engines.loading import load_model, load_tokenizer
from skipstone.engines.model_runner import ModelRunner
from skipstone.hf.generation_defaults import saved_field
from skipstone.methods import resolve
from skipstone.methods.drafting.shortlist import read_ids
from skipstone.models.decoder_model import DecoderModel
from skipstone.models.families import text_config
from skipstone.models.fingerprint import fingerprint as weights_of
from skipstone.models.generation_config import OWN_FIELD
from skipstone.train import Say, checkpoint, refuse_used, resolve_model, silent
from skipstone.train.data.documents import Document, collect, deduplicate, fingerprint, split
from skipstone.train.data.rows import RowPlan, TokenRows, TrainingData, prepare
from skipstone.train.data.tokenizer import check_fits, train_bpe
from skipstone.train.layerskip.arguments import LayerSkipArguments, TrainingRecipe, arguments, read
from skipstone.train.layerskip.dropout import layout_of
from skipstone.train.layerskip.metrics import CurvePlot, JsonLog, ProgressBar
from skipstone.train.layerskip.trainer import LayerSkipTrainer, check
from skipstone.utils.extras import installed
from skipstone.utils.files import digest, whole_folder, write_json
from skipstone.utils.spelling import did_you_mean

TOKENIZER = "tokenizer"  # folder in that of the run: the tokenizer that was trained for it
MADE_FROM = "made_from.json"  # file in that folder: the settings and documents of that tokenizer
CACHE = "data"  # folder in that of the run: prepared rows
MODEL = "model"  # folder in that of the run: the finished model
ADAPTER = "adapter"  # folder in that of the finished model: the adapter alone, with LoRA


def run(
    path: Path,
    output: Path | None = None,
    fresh: bool = False,
    data_dir: Path | None = None,
    seed: int | None = None,
    say: Say = print,
) -> Path:
    """Train what a recipe describes; if it starts from another recipe, train that one first. A finished run is not repeated.

    output, seed: folder of the run and its seed, instead of the recipe's. fresh: refuse to resume. data_dir: folder of files
    that replace data sets of the hub. Returns the folder of the finished model. ValueError for an impossible recipe and for a
    folder of another run; OSError for missing data and for a full disk.
    """
    recipe = read(path, data_dir)
    if seed is not None:
        recipe = recipe.model_copy(update={"seed": seed})
    if recipe.model.recipe is not None:
        start = run(path.parent / recipe.model.recipe, data_dir=data_dir, say=say)
        begun = recipe.model.model_copy(update={"pretrained": str(start.absolute()), "recipe": None})
        recipe = recipe.model_copy(update={"model": begun})
    folder = output or Path(recipe.output)
    settings = arguments(recipe, folder)
    first = settings.process_index == 0
    say = say if first else silent
    _match_step_rows(settings, folder, say)
    if fresh and first:
        refuse_used(folder)
    folder.mkdir(parents=True, exist_ok=True)
    documents = collect(recipe.data.sources, path.parent)
    with settings.main_process_first(local=False):
        tokenizer = _tokenizer(recipe, documents, path.parent, folder)
    model = _initial_model(recipe, path.parent, tokenizer)
    teacher, ids = _teacher_model(recipe, path.parent, tokenizer, model), _distillation_ids(recipe, path.parent, model)
    check(model, settings)  # before the data, which take time
    if recipe.decoding:
        resolve(recipe.decoding).check(ModelRunner(model.eval()))
    rows = settings.max_steps * layout_of(settings.deciding()).step_rows
    plan = RowPlan(length=recipe.data.length, rows=rows, held_out=recipe.data.held_out, seed=recipe.seed)
    weights = {source.name: source.weight for source in recipe.data.sources}
    with settings.main_process_first(local=False):
        prepared = prepare(documents, weights, tokenizer, plan, folder / CACHE)
    if settings.eval_strategy != "no" and not prepared.held_out:
        raise ValueError("training.eval_strategy asks for evaluations, but nothing is held out that fills a row")
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    for name, facts in prepared.report["sources"].items():
        tokens = facts["train"]["tokens"] / 1e6
        say(f"{name}: {facts['kept']} documents, {tokens:.2f} M tokens, {facts['epochs']:.2f} times")
    say(f"{trained / 1e6:.1f} M parameters to train")
    trainer = _trainer(recipe, model, settings, prepared, folder, teacher=teacher, distillation_ids=ids)
    last = checkpoint.latest(folder)
    if last is None or checkpoint.verify(last, trainer.fingerprint) < settings.max_steps or not (folder / MODEL).is_dir():
        _train(trainer, say)
    else:
        say(f"{folder} is finished: nothing is left to train")
        if _is_saved_as_recipe_says(recipe, model, folder / MODEL):
            return folder / MODEL
        trainer._load_from_checkpoint(str(last))
    _save(trainer, tokenizer, recipe, prepared.report, folder / MODEL)
    return folder / MODEL


def _match_step_rows(settings: LayerSkipArguments, folder: Path, say: Say) -> None:
    """If a run resumes with another number of processes, give a step as many rows as before. ValueError if the processes cannot
    share them equally."""
    saved = checkpoint.fingerprint_of(checkpoint.latest(folder)).get("training", {})
    if saved.get("world_size", settings.world_size) == settings.world_size:
        return
    started = layout_of(saved)
    passes = started.passes_of(layout_of(settings.deciding()))
    say(f"started with {started.processes} processes, goes on with {settings.world_size}: gradient_accumulation_steps={passes}")
    settings.gradient_accumulation_steps = passes


def _trainer(
    recipe: TrainingRecipe, model: Any, settings: LayerSkipArguments, prepared: TrainingData, folder: Path, **teaching: Any
) -> LayerSkipTrainer:
    """teaching: the teacher and the ids that its distribution is learnt over, each None without one."""
    teacher, ids = teaching["teacher"], teaching["distillation_ids"]
    fingerprint = {
        "data": prepared.report["sha256"],
        **recipe.model.model_dump(include={"pretrained", "lora", "layers"}),  # a config is part of every fingerprint
        "teacher": None if teacher is None else weights_of(teacher),
        "distillation_vocabulary": None if ids is None else digest(ids),
    }
    trainer = LayerSkipTrainer(
        model,
        settings,
        train_dataset=TokenRows(prepared.train),
        eval_dataset={name: TokenRows(own[: recipe.data.eval_rows]) for name, own in prepared.held_out.items()} or None,
        fingerprint={key: value for key, value in fingerprint.items() if value is not None},
        **teaching,
        callbacks=[JsonLog(folder / "metrics.jsonl"), CurvePlot(folder / "curves.png")],
    )
    for callback in (transformers.ProgressCallback, transformers.PrinterCallback):  # these print on stdout
        trainer.remove_callback(callback)
    return trainer


def _is_saved_as_recipe_says(recipe: TrainingRecipe, first: Any, folder: Path) -> bool:
    """Whether the finished model has the recipe's dtype and decoding defaults (or those of the model that it started with)."""
    decoding = recipe.decoding or getattr(first.generation_config, OWN_FIELD, None)
    dtype = str(AutoConfig.from_pretrained(folder).dtype)
    return saved_field(folder, OWN_FIELD) == decoding and dtype == f"torch.{recipe.dtype}"


def _train(trainer: LayerSkipTrainer, say: Say) -> None:
    progress = ProgressBar()
    if not trainer.args.disable_tqdm:
        trainer.add_callback(progress)
    try:
        trainer.train(resume_from_checkpoint=True)
        last = [name for entry in trainer.state.log_history if entry["step"] == trainer.state.global_step for name in entry]
        if trainer.eval_dataset is None:
            say("nothing was held out, so nothing is evaluated: every source is a single document")
        elif not any("agreement_exit" in name for name in last):
            trainer.evaluate()
    finally:
        progress.close()


def _tokenizer(recipe: TrainingRecipe, documents: list[Document], base: Path, folder: Path) -> Tokenizer:
    """The run's tokenizer. A new one is trained once, on the training documents, and saved in the run's folder."""
    source = recipe.tokenizer.pretrained or (None if recipe.tokenizer.vocab_size else recipe.model.pretrained)
    if source is not None:
        return load_tokenizer(resolve_model(source, base))
    if recipe.tokenizer.vocab_size is None:
        raise ValueError("a model from scratch needs tokenizer.pretrained or tokenizer.vocab_size")
    own = {"vocab_size": recipe.tokenizer.vocab_size, "held_out": recipe.data.held_out, "seed": recipe.seed}
    saved, settings = folder / TOKENIZER, {**own, "documents": fingerprint(documents)}
    if (saved / MADE_FROM).exists():
        before = json.loads((saved / MADE_FROM).read_text(encoding="utf-8"))
        if different := [key for key in settings if before.get(key) != settings[key]]:
            raise ValueError(f"{saved} was made from something else ({', '.join(different)} differ): remove it")
    if not (saved / "tokenizer.json").exists():
        train, _ = split(deduplicate(documents)[0], recipe.data.held_out, recipe.seed)
        with whole_folder(saved) as hidden:
            train_bpe(train, recipe.tokenizer.vocab_size).save_pretrained(hidden)
            write_json(hidden / MADE_FROM, settings)
    return load_tokenizer(saved)


def _save(trainer: LayerSkipTrainer, tokenizer: Tokenizer, recipe: TrainingRecipe, report: Any, folder: Path) -> None:
    """Save the finished model for transformers, with its decoding defaults and the report on its data. With LoRA: the merged
    model, and the adapter in a folder of its own."""
    first = trainer.is_world_process_zero()
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    causal = model if recipe.model.lora is None else model.get_base_model()
    causal.config.use_cache = True  # transformers' Trainer turns it off
    trainer.name_trained_exits()
    if recipe.decoding:
        setattr(causal.generation_config, OWN_FIELD, recipe.decoding)
        causal.generation_config._from_model_config = False  # else transformers makes a new one when it saves
    try:
        with whole_folder(folder) if first else nullcontext(folder) as made:
            if recipe.model.lora is None:
                trainer.save_model(str(made))  # every process: sharded weights are gathered
                (made / "training_args.bin").unlink(missing_ok=True)
            elif first:
                model.save_pretrained(made / ADAPTER)
                model.merge_and_unload().save_pretrained(made)
            if first:
                if recipe.dtype != "float32":
                    type(causal).from_pretrained(made, dtype=recipe.dtype).save_pretrained(made)
                tokenizer.save_pretrained(made)
                write_json(made / "data.json", report)
    except SafetensorError as error:  # a full disk
        raise OSError(f"{folder} could not be written: {error}; the last checkpoint is whole, so run it again") from error
    trainer.accelerator.wait_for_everyone()


def _initial_model(recipe: TrainingRecipe, base: Path, tokenizer: Tokenizer) -> Any:
    """The model at the first step, in float32. ValueError if rows are longer than its positions."""
    torch.manual_seed(recipe.seed)
    if recipe.model.pretrained is not None:
        model: Any = load_model(resolve_model(recipe.model.pretrained, base), dtype=torch.float32)
        if recipe.model.layers is not None:
            _shorten(model, recipe.model.layers)
    else:
        ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
        config = config_from(recipe.model.config or {}, len(tokenizer), ids)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    check_fits(tokenizer, text_config(model))
    positions = getattr(text_config(model), "max_position_embeddings", None)
    if positions is not None and recipe.data.length > positions:
        raise ValueError(f"data.length must be at most the model's {positions} positions, found {recipe.data.length}")
    return model if recipe.model.lora is None else _adapted(model, recipe.model.lora)


def _shorten(model: Any, layers: int) -> None:
    """Remove all but a model's first layers. ValueError if it has no more than those."""
    modules = DecoderModel(model)
    config = modules.config
    if modules.family.shares or modules.family.per_layer_inputs:
        raise ValueError(f"model.layers cannot shorten this {config.model_type} model: its layers share inputs")
    if layers >= modules.depth:
        raise ValueError(f"model.layers must be less than the model's {modules.depth} layers, found {layers}")
    setattr(modules.decoder, modules.family.layers, torch.nn.ModuleList(modules.layers[:layers]))
    shorten_config(config, layers)


def shorten_config(config: Any, layers: int) -> None:
    """Let a config describe a model of the first layers only."""
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = list(config.layer_types)[:layers]


def _teacher_model(recipe: TrainingRecipe, base: Path, tokenizer: Tokenizer, model: Any) -> Any:
    """The recipe's teacher, if it has one. ValueError for one with another vocabulary."""
    if recipe.teacher is None:
        return None
    place = resolve_model(recipe.teacher, base)
    teacher = load_model(place, dtype=torch.float32)
    same_size = text_config(teacher).vocab_size == text_config(model).vocab_size
    if not same_size or load_tokenizer(place).get_vocab() != tokenizer.get_vocab():
        raise ValueError(f"the teacher {place} has another vocabulary: its distributions mean nothing to this model")
    return teacher


def _distillation_ids(recipe: TrainingRecipe, base: Path, model: Any) -> list[int] | None:
    """The token ids that a distribution is learnt over, ascending; None for all. ValueError for a file that lists none."""
    if recipe.distillation_vocabulary is None:
        return None
    size = text_config(model).vocab_size
    return sorted(set(read_ids(base / recipe.distillation_vocabulary, size, "distillation_vocabulary")))


def config_from(given: dict[str, Any], tokens: int, ids: dict[str, int]) -> Any:
    """A config from a recipe's fields. tokens: size of the vocabulary. ids: of special tokens. ValueError for settings that the
    family does not have, which transformers would ignore."""
    settings = {**given}
    kind = settings.pop("model_type", None)
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise ValueError(f"model.config needs a model_type that transformers knows, for example llama, found {kind!r}")
    if dtype := settings.keys() & {"dtype", "torch_dtype"}:
        raise ValueError(f"model.config.{min(dtype)}: weights are trained in float32; training.bf16 computes in bfloat16")
    plain = CONFIG_MAPPING[kind]()
    older = {"rope_theta", "rope_scaling", "partial_rotary_factor"}  # spellings that become rope_parameters
    if unknown := [name for name in settings if not hasattr(plain, name) and name not in older]:
        raise ValueError(f"unknown model.config setting {unknown[0]!r} for {kind}{did_you_mean(unknown[0], plain.to_dict())}")
    try:
        return CONFIG_MAPPING[kind](**{"vocab_size": tokens, **ids, **settings})
    except (StrictDataclassError, TypeError, ArithmeticError) as error:
        raise ValueError(f"model.config: {error}") from error


def _adapted(model: Any, lora: dict[str, Any]) -> Any:
    """The model with trainable adapters; its own weights are frozen."""
    peft = installed("peft", "model.lora needs peft", "train")
    try:
        return peft.get_peft_model(model, peft.LoraConfig(**{"task_type": "CAUSAL_LM", **lora}))
    except TypeError as error:
        raise ValueError(f"model.lora: {error}; expected fields of PEFT's LoraConfig") from error
