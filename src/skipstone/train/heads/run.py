"""AdaDecode's exit heads for a model, from a recipe: its own answers, its states, the heads (section 2.1 and appendix D).

prompts -> answers (greedy, resumable) -> features (one frozen pass, on the disk) -> heads (KL, resumable) -> a folder of heads

The model is read and never written: neither its weights nor its files.
"""

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import set_seed

from skipstone.files import digest
from skipstone.loading import BUNDLED, load, usable
from skipstone.methods.adadecode import heads as exit_heads
from skipstone.methods.adadecode.heads import ExitHeads
from skipstone.models.layered import LayeredModel
from skipstone.train.heads import answers as answering
from skipstone.train.heads import features as extracting
from skipstone.train.heads.recipe import HeadsRecipe
from skipstone.train.heads.training import split, train
from skipstone.train.runs import Say, beside, refuse_used, silent

HEADS = "heads"  # folder in that of the run: the finished heads
ANSWERS = "answers.jsonl"  # file in the folder of the run: the model's own answers
PATIENCE = timedelta(days=7)  # how long processes wait for the first, which writes the answers and the features


def run(
    recipe: HeadsRecipe,
    base: Path,
    output: Path | None = None,
    *,
    max_disk: float = 20 * extracting.GIB,
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
    place = usable(device)
    processes = PartialState(cpu=place.type == "cpu", timeout=PATIENCE)
    say = say if processes.is_main_process else silent
    place = place if processes.num_processes == 1 else processes.device or place
    dtype = recipe.model_dtype if recipe.model_dtype == "auto" else getattr(torch, recipe.model_dtype)
    model, tokenizer = load(None if recipe.model is None else beside(recipe.model, base), dtype=dtype, device=place)
    layered = LayeredModel(model.eval().requires_grad_(False))
    heads = _untrained(recipe, layered)
    say(f"{sum(one.numel() for one in heads.parameters()) / 1e6:.2f} M parameters after layers {heads.card.layers}")
    texts = [one.prompt + one.text for source in recipe.prompts for one in source.read(base)]
    prompts = answering.prompt_ids(texts, tokenizer, recipe.answers.chat)
    folder.mkdir(parents=True, exist_ok=True)
    eos = {one for one in (tokenizer.eos_token_id, *_many(model.generation_config.eos_token_id)) if isinstance(one, int)}
    with processes.main_process_first():  # the others find what it has made
        written, wrote = answering.write(model, prompts, recipe.answers, folder / ANSWERS, eos, say)
        began = time.perf_counter()
        features = extracting.extract(layered, written, heads.card.layers, folder, max_disk, say)
    extracted = time.perf_counter()
    wish = {"training": recipe.training.model_dump(), "heads": recipe.heads.model_dump(), "seed": recipe.seed}
    key = {**wish, "model": heads.card.model, "answers": digest([one.tokens for one in written])}
    found = train(heads, layered, features, recipe.training, folder, key, recipe.seed, say)
    seconds = {"answers": wrote, "features": extracted - began, "training": time.perf_counter() - extracted}
    about = _account(recipe, len(written), features.bounds[-1], found["epochs"], seconds)
    metrics = {layer: {"before": found["before"][layer], **figures} for layer, figures in found["after"].items()}
    heads.card = heads.card.model_copy(update={"training": about, "metrics": metrics})
    if processes.is_main_process:
        heads.save(folder / HEADS, layered.dtype if recipe.dtype is None else getattr(torch, recipe.dtype))
    processes.wait_for_everyone()
    for layer, one in metrics.items():
        old, new = (f"divergence {of['divergence']:.3f}, agreement {of['agreement']:.3f}" for of in (one["before"], one))
        say(f"E={layer}: {old} -> {new}, sure of {100 * one['sure']:.0f} % of all tokens")
    return folder / HEADS


def _untrained(recipe: HeadsRecipe, model: LayeredModel) -> ExitHeads:
    layers = recipe.heads.layers or exit_heads.usual_layers(model.depth)
    name = recipe.name or (Path(recipe.model).name if recipe.model and Path(recipe.model).is_dir() else recipe.model) or BUNDLED
    set_seed(recipe.seed)
    heads = ExitHeads(exit_heads.new_card(model, layers, recipe.heads.kind, recipe.heads.rank, name))
    heads.start_from(model)
    return heads.to(model.device)


def _account(recipe: HeadsRecipe, answers: int, tokens: int, epochs: int, seconds: dict[str, float]) -> dict[str, Any]:
    """How heads were trained, for their card."""
    taught, held = split(answers, recipe.training.held_out, recipe.seed)
    return {
        **recipe.training.model_dump(),
        "prompts": [source.name for source in recipe.prompts],
        "answers": len(taught),
        "held_out_answers": len(held),
        "tokens": tokens,
        "epochs_trained": epochs,
        "seed": recipe.seed,
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
    }


def _many(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
