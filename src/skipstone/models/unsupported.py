"""Refuses models that skipstone would decode wrongly or that are untested: by structure, state or weights."""

from typing import Any

import torch

from skipstone.models import quantised_checkpoints
from skipstone.models.device_map import lacks_hooks
from skipstone.models.families import RECURRENT, Family, layer_types, text_config
from skipstone.models.known_types import ONLY_RECURRENT, REFUSED
from skipstone.models.packed_weight import PackedWeight
from skipstone.models.passes import AttentionReach
from skipstone.models.tensor_parallel import MESH, cannot_share, is_sharded

TYPES = {"full_attention", "sliding_attention", "chunked_attention", *RECURRENT}  # of layers
SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    "max_position_embeddings",
)
"""Fields of a config that are at least 1."""
KNOWN_TENSORS: tuple[type, ...] = (torch.Tensor,)
"""Allowed classes of weights, next to shards of tensor parallelism."""


def refuse_kind(model: Any) -> None:
    """ValueError with cause and remedy if a model's family cannot be derived. Runs nothing."""
    config, kind = text_config(model), model.config.model_type
    if reason := REFUSED.get(kind) or REFUSED.get(config.model_type):
        raise ValueError(f"{kind} {reason}")
    refuse_sizes(config, f"this {kind} model")
    if reason := _unsupported_structure(model, config):
        raise ValueError(f"{kind} {reason}")
    if reason := _unsupported_setting(config):
        raise ValueError(f"this {kind} model uses {reason}, which skipstone does not support")
    origin = type(model).forward.__module__
    if not origin.startswith("transformers."):
        raise ValueError(
            f"the forward of {type(model).__name__} comes from {origin}; skipstone knows transformers' own {kind} only: "
            f"load with trust_remote_code=False"
        )
    if model.get_output_embeddings() is None:
        raise ValueError(f"{type(model).__name__} has no LM head: load with AutoModelForCausalLM")
    if config._attn_implementation not in ("sdpa", "eager"):
        raise ValueError(
            f"attention {config._attn_implementation!r} cannot take the masks of speculative decoding; "
            f'load with attn_implementation="sdpa" (or "eager")'
        )


def refuse_sizes(config: Any, name: str) -> None:
    """ValueError for impossible sizes. config: of the text model. name: of the model."""
    for field in SIZES:
        count = getattr(config, field, None)
        if type(count) is int and count < 1:
            raise ValueError(f"{field} of {name} must be at least 1, found {count}: correct its config")
    heads, kv_heads = getattr(config, "num_attention_heads", None), getattr(config, "num_key_value_heads", None)
    if type(heads) is int and type(kv_heads) is int and heads % kv_heads:
        raise ValueError(
            f"num_attention_heads of {name} must be a multiple of num_key_value_heads, found {heads} and {kv_heads}: correct "
            "its config"
        )


def _unsupported_setting(config: Any) -> str | None:
    """A setting of a config that cannot be decoded, or None."""
    if getattr(config, "use_bidirectional_attention", False) not in (None, False, "vision"):  # which is for pictures only
        return "bidirectional attention"
    if getattr(config, "add_cross_attention", False):
        return "cross-attention"
    if getattr(config, "alibi", False):
        return "alibi position biases inside its masks"
    if "sliding_attention" in layer_types(config) and not getattr(config, "sliding_window", None):
        return "sliding layers with sliding_window=None"
    return None


def _unsupported_structure(model: Any, config: Any) -> str | None:
    """A structure that no `Family` can describe, or None."""
    if getattr(config, "is_encoder_decoder", False):
        return "is an encoder-decoder; skipstone decodes decoder-only models"
    if not hasattr(config, "num_hidden_layers"):
        return "is a composite model (its layers belong to a model inside it); load the text model by itself"
    types = set(layer_types(config))
    if not types <= TYPES:
        return f"has layers of type {sorted(types - TYPES)}; skipstone handles {sorted(TYPES)}"
    if types <= {*RECURRENT} or (model._is_stateful and not types & {*RECURRENT}):
        return ONLY_RECURRENT
    return None


def refuse_contradiction(config: Any, seen: list[AttentionReach], family: Family) -> None:
    """ValueError if the layer types, which transformers' caches follow, contradict the model's masks. seen: the reach of every
    layer's mask; recurrent layers have none."""
    masked = [layer for layer in range(len(seen)) if not family.recurs(layer)]
    found, reaches = [layer_types(config)[layer] for layer in masked], [seen[layer] for layer in masked]
    names = [
        ("chunked_attention" if one.chunk else "sliding_attention") if one != AttentionReach() else "full_attention"
        for one in reaches
    ]
    if found != names:
        raise ValueError(
            f"this {config.model_type} config contradicts itself: its layer types are {found}, but with "
            f"sliding_window={getattr(config, 'sliding_window', None)} the model masks its layers as {names}, so that "
            f"transformers' own cached and uncached results differ; correct layer_types or sliding_window"
        )


def refuse_weights(model: Any) -> None:
    """ValueError for weights that are missing, quantised by untested kernels, or distributed in an unsupported way. Walks all
    parameters."""
    quantised_checkpoints.refuse_untested_kernels(model)
    parameters = list(model.parameters())
    packed = {
        id(one) for layers in quantised_checkpoints.kernels(model).values() for layer in layers for one in layer.parameters()
    }
    own = [one.data for one in parameters if not isinstance(one, PackedWeight) and id(one) not in packed]
    special = {type(values).__name__ for values in own if type(values) not in KNOWN_TENSORS and not is_sharded(values)}
    if special:
        raise ValueError(f"the weights are {', '.join(sorted(special))}, expected plain tensors: load without sharding")
    _refuse_shards(model, [one for one in parameters if is_sharded(one)])
    _refuse_places(model, {str(parameter.device) for parameter in parameters})


def _refuse_shards(model: Any, shards: list[Any]) -> None:
    """ValueError for weights that are not sharded by tensor parallelism, or over too many processes."""
    found = {tuple(one.device_mesh.mesh_dim_names or (MESH,)) for one in shards}
    if found - {(MESH,)}:
        names = ", ".join(sorted(" and ".join(names) for names in found))
        raise ValueError(f"the weights are sharded over {names}; skipstone knows tensor parallelism ({MESH}) only")
    sizes = {one.device_mesh.size() for one in shards}
    if reason := next((reason for size in sizes if (reason := cannot_share(text_config(model), size))), None):
        raise ValueError(reason)


def _refuse_places(model: Any, devices: set[str]) -> None:
    """ValueError for missing weights, and for weights on several devices without accelerate's hooks."""
    placed = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(devices) < 2 and len(placed) < 2 and "meta" not in devices:
        return
    if lacks_hooks(model):
        if "meta" in devices:
            raise ValueError(
                "some weights are on the meta device, and no hook of accelerate's loads them: load the whole model on one "
                "device, or offloaded by device_map="
            )
        spread = ", ".join(sorted(devices if len(devices) > 1 else placed))
        raise ValueError(
            f"the model is spread over {spread} without the hooks of accelerate's that bring states from one device to the "
            "next: load it on one device, or with device_map="
        )
