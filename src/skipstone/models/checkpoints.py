"""Chooses transformers' class for a checkpoint, and checks that the weights fit the config."""

import re
from collections.abc import Collection
from typing import Any

from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from skipstone.models.families import text_config
from skipstone.models.mtp_layouts import OWN_NAME, PARTS
from skipstone.models.quantised_checkpoints import quantization_method

SHOWN = 3  # weights named in a message
LAYER = re.compile(r"\b(?:layers|h)\.(\d+)\.")  # a parameter's name inside a layer list, with the layer's number
PREDICTS = ("num_nextn_predict_layers", "num_mtp_layers")
"""Fields of a config: number of MTP layers after the last one. transformers does not load them."""
TABLES = re.compile(
    r"(^|\.)((original_)?inv_freq|(cos|sin)_cached|causal_mask|position_ids|embed_positions\.weights|version|_float_tensor"
    r"|(cross)?(attn|attention)\.(masked_)?bias)$"
)
"""Masks, positions and rotary tables, which older versions of transformers and torch saved."""
VALUES = re.compile(r"^v_head\.")  # the head of a reward trainer
OTHER_SENSES = re.compile(r"^(model\.)?(vision|visual|audio|multi_modal_projector|vqmodel|embed_vision|embed_audio)")
"""Other parts of a multimodal model than its text model."""
SCALES = re.compile(r"\.(q|k|v|kv)_(scale|zero_point)$")  # of keys and values in an 8-bit cache, which skipstone does not use


def auto_class(kind: str) -> Any:
    """transformers' class for a model type: causal language models, or multimodal models around one. ValueError for other
    types."""
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if CONFIG_MAPPING[kind] in auto._model_mapping:  # includes classes that a user has registered
            return auto
    raise ValueError(
        f"transformers loads {kind} models by neither AutoModelForCausalLM nor AutoModelForImageTextToText, the classes "
        "that skipstone decodes: load a model of a type that `skipstone families` lists"
    )


def expect_fit(name: str, kind: str | None, model: Any, report: Any) -> None:
    """ValueError if a checkpoint's weights do not fit its model. kind: model type. report: transformers' loading info."""
    mismatched: Any = report.get("mismatched_keys") or ()  # transformers only logs the shapes
    for key, found, expected in sorted(mismatched):
        raise ValueError(
            f"the checkpoint {name} does not fit its config: {key} has shape {list(found)}, expected {list(expected)}"
        )
    if missing := sorted(report.get("missing_keys") or ()):
        raise ValueError(f"the checkpoint {name} does not fit its config: it lacks {', '.join(missing[:5])}")
    if left := _superfluous(report.get("unexpected_keys") or (), kind, model):
        more = f" and {len(left) - SHOWN} more" if len(left) > SHOWN else ""
        raise ValueError(
            f"the checkpoint {name} does not fit its config: it has {', '.join(left[:SHOWN])}{more}, expected only what a "
            f"{type(model).__name__} of {text_config(model).num_hidden_layers} layers with that config has: mend config.json, "
            "or take the weights out"
        )


def _superfluous(keys: Collection[str], kind: str | None, model: Any) -> list[str]:
    """Unloaded weights that change the model's results. transformers has already removed those that the class ignores."""
    method, config = quantization_method(getattr(model.config, "quantization_config", None)), text_config(model)
    harmless = [TABLES, OWN_NAME, VALUES]
    if method is not None:
        harmless.append(SCALES)
    if method == "gptq":  # AutoGPTQ wrote a bias of zeros for every linear
        harmless.append(re.compile(r"\.bias$"))
    if kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        harmless.append(OTHER_SENSES)
    ahead = max(getattr(config, field, None) or 0 for field in PREDICTS)
    behind = range(config.num_hidden_layers, config.num_hidden_layers + ahead)
    predicting = {layer[1] for key in keys if PARTS.search(key) and (layer := LAYER.search(key))}

    def predicts(key: str) -> bool:
        layer = LAYER.search(key)
        return layer is not None and layer[1] in predicting and int(layer[1]) in behind

    return sorted(key for key in keys if not predicts(key) and not any(one.search(key) for one in harmless))
