"""Tiny multimodal models, whose text models skipstone decodes. A picture is never shown to them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from tests.helpers.families import SHAPE, WINDOW

_TEXT: dict[str, Any] = {
    **{**SHAPE, "vocab_size": 97, "head_dim": 8},
    **{"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None},
}
_VISION: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "embed_dim"), 16),
    **dict.fromkeys(("num_hidden_layers", "depth", "conf_num_hidden_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "num_heads", "conf_num_attention_heads"), 2),
    **dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 16),
    "image_size": 28,
    "patch_size": 14,
    "out_hidden_size": 32,
}
_AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
_SHARING = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 8,
}
# model type: what its text config has beside _TEXT
WRAPPERS: dict[str, dict[str, Any]] = {
    "gemma3": {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma3n": {**_SHARING, "laurel_rank": 4},
    "gemma4": {**_SHARING, "global_head_dim": 16},
    "gemma4_unified": {**_SHARING, "global_head_dim": 16},
    "got_ocr2": {},
    "llama4": {
        "attention_chunk_size": WINDOW,
        "num_local_experts": 2,
        "intermediate_size_mlp": 64,
        "layer_types": ["chunked_attention", "full_attention"] * 2,
    },
    "llava": {},
    "mistral3": {},
    "qwen2_vl": _AXES,
    "qwen2_5_vl": _AXES,
    "qwen3_vl": _AXES,
}


def build(kind: str) -> PreTrainedModel:
    """A multimodal model in eval mode, float32."""
    whole: Any = CONFIG_MAPPING[kind]
    base = whole()
    parts = {name: getattr(base, name) for name in whole.sub_configs}
    given = {name: _cut(part, name, kind) for name, part in parts.items() if part is not None}
    auto: Any = AutoModelForCausalLM if kind == "gemma3" else AutoModelForImageTextToText
    torch.manual_seed(0)
    with without_timm():
        model = auto.from_config(whole(**given), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 2 * parameter.shape[-1] ** -0.5)
    return model


@contextmanager
def without_timm() -> Iterator[None]:
    """Models are made and loaded without the parts that only timm can build."""
    with mock.patch.object(AutoModel, "from_config", _part(AutoModel.from_config)):
        yield


def _part(own: Any) -> Any:
    def make(config: Any, **more: Any) -> Any:
        return nn.Identity() if config.model_type == "gemma3n_vision" else own(config, **more)

    return make


def _cut(part: Any, name: str, kind: str) -> dict[str, Any]:
    fields = {**_TEXT, **WRAPPERS[kind]} if "text" in name else _VISION
    known = {*part.to_dict(), *part.attribute_map}
    return type(part)(**{key: value for key, value in fields.items() if key in known}).to_dict()
