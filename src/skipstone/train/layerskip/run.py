"""One training run from one file: a recipe in YAML names data, tokenizer, model, LayerSkip's settings and the schedule.

`run` makes what the recipe describes, resumes where an earlier run of it stopped, and leaves a folder that loads as a model.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedTokenizerBase,
    PrinterCallback,
    ProgressCallback,
)

from skipstone.decoding.method import OWN_FIELD
from skipstone.files import whole_folder, write_json
from skipstone.loading import load_tokenizer
from skipstone.methods import resolve
from skipstone.models.fingerprint import fingerprint as weights_of
from skipstone.models.layered import LayeredModel
from skipstone.train import checkpoint
from skipstone.train.data.documents import Document, collect, deduplicate, fingerprint, split
from skipstone.train.data.rows import Prepared, RowPlan, TokenRows, prepare
from skipstone.train.data.tokenizer import train_bpe
from skipstone.train.layerskip.arguments import LayerSkipArguments
from skipstone.train.layerskip.initial import initial_model, teacher_model
from skipstone.train.layerskip.metrics import Curves, JsonLog, Progress
from skipstone.train.layerskip.recipe_file import Recipe, arguments, read
from skipstone.train.layerskip.trainer import LayerSkipTrainer, check
from skipstone.train.runs import Say, beside, refuse_used, silent

TOKENIZER = "tokenizer"  # folder in that of the run: the tokenizer that was trained for it
MADE_FROM = "made_from.json"  # file beside that tokenizer: what it was made from
CACHE = "data"  # folder in that of the run: prepared rows
MODEL = "model"  # folder in that of the run: the finished model
ADAPTER = "adapter"  # folder in that of the finished model: the adapter alone, with LoRA


def run(path: Path, output: Path | None = None, fresh: bool = False, data_dir: Path | None = None, say: Say = print) -> Path:
    """Train what a recipe describes, the recipe that it goes on from first. output: instead of the recipe's own folder. fresh:
    refuse to resume. data_dir: of files that stand for data sets of the hub. Returns the folder of the finished model. Of a
    finished run nothing is done again.

    ValueError for a recipe that cannot be, and for a folder of another run; OSError for missing data and for a full disk.
    """
    recipe = _started(read(path, data_dir), path, data_dir, say)
    folder = output or Path(recipe.output)
    settings = arguments(recipe, folder)
    first = settings.process_index == 0
    say = say if first else silent
    if fresh and first:
        refuse_used(folder)
    folder.mkdir(parents=True, exist_ok=True)
    documents = collect(recipe.data.sources, path.parent)
    with settings.main_process_first(local=False):
        tokenizer = _tokenizer(recipe, documents, path.parent, folder)
    model = initial_model(recipe, path.parent, tokenizer)
    teacher = teacher_model(recipe, path.parent, tokenizer, model)
    check(model, settings)  # before the data, which take time
    _check_length(recipe.data.length, model)
    if recipe.decoding:
        resolve(recipe.decoding).check(LayeredModel(model.eval()))
    with settings.main_process_first(local=False):
        prepared = _prepared(recipe, documents, folder, settings, tokenizer)
    if settings.eval_strategy != "no" and not prepared.held_out:
        raise ValueError("training.eval_strategy asks for evaluations, but nothing is held out that fills a row")
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    say("\n".join([*_told(prepared), f"{trained / 1e6:.1f} M parameters to train"]))
    trainer = _trainer(recipe, model, settings, prepared, folder, teacher)
    last = _last(trainer, folder)
    if last is None or not (folder / MODEL).is_dir():
        _train(trainer, say)
        _save(trainer, tokenizer, recipe, prepared, folder / MODEL)
        return folder / MODEL
    say(f"{folder} is finished: nothing is left to train")
    if not _as_wished(recipe, model, folder / MODEL):
        trainer._load_from_checkpoint(str(last))
        _save(trainer, tokenizer, recipe, prepared, folder / MODEL)
    return folder / MODEL


def _started(recipe: Recipe, path: Path, data_dir: Path | None, say: Say) -> Recipe:
    """The recipe with the model that it goes on from, which is trained now if it is another recipe's."""
    if recipe.model.recipe is None:
        return recipe
    model = run(path.parent / recipe.model.recipe, data_dir=data_dir, say=say)
    begun = recipe.model.model_copy(update={"pretrained": str(model.absolute()), "recipe": None})
    return recipe.model_copy(update={"model": begun})


def _check_length(length: int, model: Any) -> None:
    most = getattr(model.config, "max_position_embeddings", None)
    if most is not None and length > most:
        raise ValueError(f"data.length must be at most the model's {most} positions, found {length}")


def _prepared(
    recipe: Recipe, documents: list[Document], folder: Path, settings: LayerSkipArguments, tokenizer: PreTrainedTokenizerBase
) -> Prepared:
    batch = settings.per_device_train_batch_size * settings.gradient_accumulation_steps * settings.world_size
    plan = RowPlan(length=recipe.data.length, rows=settings.max_steps * batch, held_out=recipe.data.held_out, seed=recipe.seed)
    weights = {source.name: source.weight for source in recipe.data.sources}
    return prepare(documents, weights, tokenizer, plan, folder / CACHE)


def _told(prepared: Prepared) -> list[str]:
    """What is trained on, a line a source."""
    return [
        f"{name}: {facts['kept']} documents, {facts['train']['tokens'] / 1e6:.2f} M tokens, {facts['epochs']:.2f} times"
        for name, facts in prepared.report["sources"].items()
    ]


def _trainer(
    recipe: Recipe, model: Any, settings: LayerSkipArguments, prepared: Prepared, folder: Path, teacher: Any
) -> LayerSkipTrainer:
    taught = None if teacher is None else weights_of(teacher)
    begun = {"pretrained": recipe.model.pretrained, "lora": recipe.model.lora, "teacher": taught, "layers": recipe.model.layers}
    trainer = LayerSkipTrainer(
        model,
        settings,
        train_dataset=TokenRows(prepared.train),
        eval_dataset={name: TokenRows(own[: recipe.data.eval_rows]) for name, own in prepared.held_out.items()} or None,
        fingerprint={
            "data": prepared.report["sha256"],
            **{key: value for key, value in begun.items() if value is not None},  # a config is part of every fingerprint
        },
        teacher=teacher,
        callbacks=[JsonLog(folder / "metrics.jsonl"), Curves(folder / "curves.png")],
    )
    for callback in (ProgressCallback, PrinterCallback):  # these print every log entry as it is, on stdout
        trainer.remove_callback(callback)
    return trainer


def _last(trainer: LayerSkipTrainer, folder: Path) -> Path | None:
    """The checkpoint of the last step, if this very run has come so far before. ValueError where the folder holds another."""
    last = checkpoint.latest(folder)
    return last if last is not None and checkpoint.verify(last, trainer.fingerprint) >= trainer.args.max_steps else None


def _as_wished(recipe: Recipe, first: Any, folder: Path) -> bool:
    """Whether the finished model has the recipe's dtype and decoding defaults (or those that it started with)."""
    wished = recipe.decoding or getattr(first.generation_config, OWN_FIELD, None)
    found = getattr(GenerationConfig.from_pretrained(folder), OWN_FIELD, None)
    return found == wished and str(AutoConfig.from_pretrained(folder).dtype) == f"torch.{recipe.dtype}"


def _train(trainer: LayerSkipTrainer, say: Say) -> None:
    progress = Progress()
    if not trainer.args.disable_tqdm:
        trainer.add_callback(progress)
    try:
        trainer.train(resume_from_checkpoint=True)
        measured = any(
            "agreement_exit" in name
            for entry in trainer.state.log_history
            if entry["step"] == trainer.state.global_step
            for name in entry
        )
        if trainer.eval_dataset is None:
            say("nothing was held out, so nothing is evaluated: every source is a single document")
        elif not measured:
            trainer.evaluate()
    finally:
        progress.close()


def _tokenizer(recipe: Recipe, documents: list[Document], base: Path, folder: Path) -> PreTrainedTokenizerBase:
    """The run's tokenizer. A new one is trained on the training documents once and kept in the run's folder."""
    source = recipe.tokenizer.pretrained or (None if recipe.tokenizer.vocab_size else recipe.model.pretrained)
    if source is not None:
        return load_tokenizer(beside(source, base))
    if recipe.tokenizer.vocab_size is None:
        raise ValueError("a model from scratch needs tokenizer.pretrained or tokenizer.vocab_size")
    own = {"vocab_size": recipe.tokenizer.vocab_size, "held_out": recipe.data.held_out, "seed": recipe.seed}
    kept, wish = folder / TOKENIZER, {**own, "documents": fingerprint(documents)}
    if (kept / MADE_FROM).exists():
        found = json.loads((kept / MADE_FROM).read_text(encoding="utf-8"))
        if different := [key for key in wish if found.get(key) != wish[key]]:
            raise ValueError(
                f"{kept} was made from something else ({', '.join(different)} differ): remove it, or use another output folder"
            )
    if not (kept / "tokenizer.json").exists():
        train, _ = split(deduplicate(documents)[0], recipe.data.held_out, recipe.seed)
        with whole_folder(kept) as made:
            train_bpe(train, recipe.tokenizer.vocab_size).save_pretrained(made)
            write_json(made / MADE_FROM, wish)
    return load_tokenizer(kept)


def _save(
    trainer: LayerSkipTrainer, tokenizer: PreTrainedTokenizerBase, recipe: Recipe, prepared: Prepared, folder: Path
) -> None:
    """The finished model, as transformers loads it, with its own decoding defaults and the account of its data. With LoRA: the
    merged model, and the adapter beside it."""
    first = trainer.is_world_process_zero()
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    causal = model if recipe.model.lora is None else model.get_base_model()
    causal.config.use_cache = True  # transformers' Trainer turns it off
    if recipe.decoding:
        setattr(causal.generation_config, OWN_FIELD, recipe.decoding)
        causal.generation_config._from_model_config = False  # else it is made anew when it is saved
    with _model_folder(folder) if first else nullcontext(folder) as made:
        if recipe.model.lora is None:
            trainer.save_model(str(made))  # every process: sharded weights are gathered
            (made / "training_args.bin").unlink(missing_ok=True)
        elif first:
            model.save_pretrained(made / ADAPTER)
            model.merge_and_unload().save_pretrained(made)
        if first:
            if recipe.dtype != "float32":
                AutoModelForCausalLM.from_pretrained(made, dtype=recipe.dtype).save_pretrained(made)
            tokenizer.save_pretrained(made)
            write_json(made / "data.json", prepared.report)
    trainer.accelerator.wait_for_everyone()


@contextmanager
def _model_folder(folder: Path) -> Iterator[Path]:
    """`whole_folder` for a model. OSError where the disk is full, which safetensors says in an error of its own."""
    try:
        with whole_folder(folder) as made:
            yield made
    except SafetensorError as error:
        raise OSError(f"{folder} could not be written: {error}; the last checkpoint is whole, so run it again") from error
