"""What a training run starts with: the model at its first step, and the one that it learns from."""

import difflib
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from skipstone.loading import load_model, load_tokenizer
from skipstone.models.modules import DecoderModules
from skipstone.train.data.tokenizer import check_fits
from skipstone.train.layerskip.recipe_file import Recipe
from skipstone.train.runs import beside

SPECIAL = ("bos", "eos", "pad")


def initial_model(recipe: Recipe, base: Path, tokenizer: PreTrainedTokenizerBase) -> Any:
    """The model at the first step, in float32."""
    torch.manual_seed(recipe.seed)
    if recipe.model.pretrained is not None:
        model: Any = load_model(beside(recipe.model.pretrained, base), dtype=torch.float32)
        if recipe.model.layers is not None:
            shorten(model, recipe.model.layers)
    else:
        assert recipe.model.config is not None
        model = AutoModelForCausalLM.from_config(_config(recipe.model.config, tokenizer), dtype=torch.float32)
    check_fits(tokenizer, model.config)
    return model if recipe.model.lora is None else _adapted(model, recipe.model.lora)


def shorten(model: Any, layers: int) -> None:
    """Leave a model its first layers only. ValueError where it has no more than that."""
    modules, config = DecoderModules(model), model.config
    if layers >= modules.depth:
        raise ValueError(f"model.layers must be less than the model's {modules.depth} layers, found {layers}")
    setattr(modules.decoder, modules.family.layers, torch.nn.ModuleList(modules.layers[:layers]))
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = list(config.layer_types)[:layers]


def teacher_model(recipe: Recipe, base: Path, tokenizer: PreTrainedTokenizerBase, model: Any) -> Any:
    """The model to learn from, if there is one. ValueError for one of another vocabulary."""
    if recipe.teacher is None:
        return None
    place = beside(recipe.teacher, base)
    teacher = load_model(place, dtype=torch.float32)
    same = load_tokenizer(place).get_vocab() == tokenizer.get_vocab()
    if not same or teacher.config.vocab_size != model.config.vocab_size:
        raise ValueError(
            f"the teacher {recipe.teacher} has another vocabulary: its distributions mean nothing to this model "
            f"({teacher.config.vocab_size} and {model.config.vocab_size} logits, tokenizers {'alike' if same else 'different'})"
        )
    return teacher


def _config(given: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Any:
    """ValueError for settings that the family does not have: transformers would take them and do nothing with them."""
    settings = {**given}
    kind = settings.pop("model_type", None)
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise ValueError(f"model.config needs a model_type that transformers knows, for example llama, found {kind!r}")
    if dtype := settings.keys() & {"dtype", "torch_dtype"}:
        raise ValueError(f"model.config.{min(dtype)}: weights are trained in float32; training.bf16 computes in bfloat16")
    plain = CONFIG_MAPPING[kind]()
    older = {"rope_theta", "rope_scaling", "partial_rotary_factor"}  # spellings that become rope_parameters
    if unknown := [name for name in settings if not hasattr(plain, name) and name not in older]:
        near = difflib.get_close_matches(unknown[0], plain.to_dict(), 1)
        raise ValueError(f"unknown model.config setting {unknown[0]!r} for {kind}" + (f": is it {near[0]}?" if near else ""))
    ids = {"vocab_size": len(tokenizer)} | {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in SPECIAL}
    try:
        return AutoConfig.for_model(kind, **{**ids, **settings})
    except (StrictDataclassError, TypeError, ArithmeticError) as error:
        raise ValueError(f"model.config: {error}") from error


def _adapted(model: Any, lora: dict[str, Any]) -> Any:
    """The model with trainable adapters; its own weights are frozen."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ImportError('model.lora needs peft: pip install "skipstone[train]"') from error
    try:
        return get_peft_model(model, LoraConfig(**{"task_type": "CAUSAL_LM", **lora}))
    except TypeError as error:
        raise ValueError(f"model.lora: {error}; expected fields of PEFT's LoraConfig") from error
