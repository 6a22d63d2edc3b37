"""Models that skipstone would decode wrongly, or has never been tested with, are refused by name: for what they are built of,
for the state that they are in, for their weights."""

from typing import Any

import torch

from skipstone.models import quantised
from skipstone.models.families import FAMILIES, TYPES, Family, kinds, windows
from skipstone.models.packed import PackedWeight

ADAPTERS = ("LORA", "IA3", "LOHA", "LN_TUNING", "VERA", "TRAINABLE_TOKENS")
"""PEFT types that live wholly inside the model's modules, each with a test in tests/models/test_peft.py."""


def family_of(model: Any) -> Family:
    """The facts for a model. ValueError where skipstone cannot decode it, saying what was found, why and what to do."""
    config = model.config
    kind = config.model_type
    if reason := _beyond(model, config):
        raise ValueError(f"{kind} {reason}")
    if kind not in FAMILIES:
        raise ValueError(
            f"unknown model family {kind!r}: skipstone knows {', '.join(sorted(FAMILIES))}. "
            f"To add it, enter its module names in FAMILIES (src/skipstone/models/families.py) and one row in "
            f"tests/helpers/families.py; docs/add-a-family.md shows how"
        )
    family = FAMILIES[kind]
    if reason := family.refuse(config):
        raise ValueError(f"this {kind} model uses {reason}, which skipstone does not support")
    origin = type(model).forward.__module__
    if not origin.startswith("transformers."):
        raise ValueError(
            f"the forward of {type(model).__name__} comes from {origin}; skipstone knows transformers' own {kind} only: "
            f"load with trust_remote_code=False"
        )
    if model.get_output_embeddings() is None:
        raise ValueError(f"{type(model).__name__} has no LM head: load with AutoModelForCausalLM")
    _check_windows(config)
    if config._attn_implementation not in ("sdpa", "eager"):
        raise ValueError(
            f"attention {config._attn_implementation!r} cannot take the masks of speculative decoding; "
            f'load with attn_implementation="sdpa" (or "eager")'
        )
    return family


def _beyond(model: Any, config: Any) -> str | None:
    """What a model is built of that no entry in FAMILIES could describe, or None."""
    if getattr(config, "is_encoder_decoder", False):
        return "is an encoder-decoder; skipstone decodes decoder-only models"
    if not hasattr(config, "num_hidden_layers"):
        return "is a composite model (its layers are those of a model inside it); load the text model by itself"
    if config.per_layer_attributes:
        return f"has layers that differ in {sorted(config.per_layer_attributes)}; skipstone knows uniform stacks only"
    if any(getattr(config, "kv_sharing_modes", None) or ()) or getattr(config, "num_kv_shared_layers", 0):
        return "shares keys and values between layers; early exits and skipped layers need each layer's own"
    if getattr(config, "kv_lora_rank", None):
        return "uses multi-head latent attention (MLA); skipstone stores plain keys and values"
    types = set(kinds(config))
    if not types <= TYPES:
        return f"has layers of type {sorted(types - TYPES)}; skipstone handles {sorted(TYPES)}"
    if model._is_stateful:
        return "keeps a recurrent state, which cannot be rolled back after a rejected draft"
    if config.model_type == "bloom" or getattr(getattr(config, "attn_config", None), "alibi", False):
        return "uses alibi position biases, which skipstone's masks do not carry"
    return None


def _check_windows(config: Any) -> None:
    """ValueError where the layer types, which transformers' caches follow, contradict the masks that the model builds."""
    found = kinds(config)
    masked = ["full_attention" if window is None else "sliding_attention" for window in windows(config)]
    if found != masked:
        raise ValueError(
            f"this {config.model_type} config contradicts itself: its layer types are {found}, but with "
            f"sliding_window={getattr(config, 'sliding_window', None)} the model masks its layers as {masked}, so that "
            f"transformers' own cached and uncached results differ; correct layer_types or sliding_window"
        )


def refuse_state(wrapper: Any, model: Any) -> None:
    """ValueError where a model is in a state in which its layers do not give its own text. Looks at no parameter.

    wrapper: what the user passed, a PEFT wrapper or the model itself. model: the transformers model inside.
    """
    if model.training:
        raise ValueError("the model is in training mode, where dropout makes every pass differ; call model.eval() first")
    # during a wrapper's generate() PEFT lends the model its own method: custom_generate sees the wrapper only there
    lender = getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None)
    adapters = {name: one for place in (model, wrapper, lender) for name, one in getattr(place, "peft_config", {}).items()}
    for name, adapter in adapters.items():
        _refuse_adapter(name, adapter)


def _refuse_adapter(name: str, adapter: Any) -> None:
    kind = str(getattr(adapter.peft_type, "value", adapter.peft_type))
    if getattr(adapter, "is_prompt_learning", False):
        reason = "prepends virtual tokens, which skipstone does not do"
    elif getattr(adapter, "alora_invocation_tokens", None):
        reason = "is switched on inside the prompt by its invocation tokens (activated LoRA), which skipstone does not do"
    elif kind not in ADAPTERS:
        reason = f"is not one of the tested types {', '.join(ADAPTERS)}; merge it into the weights (merge_and_unload())"
    else:
        return
    raise ValueError(f"the PEFT adapter {name!r} ({kind}) {reason}")


def refuse_weights(model: Any) -> None:
    """ValueError for weights that are quantised by what is not tested here, sharded, not there, or on several devices. Walks
    all parameters."""
    quantised.refuse(model)
    parameters = list(model.parameters())
    packed = {id(one) for layers in quantised.kernels(model).values() for layer in layers for one in layer.parameters()}
    own = [one.data for one in parameters if not isinstance(one, PackedWeight) and id(one) not in packed]
    special = {type(values).__name__ for values in own if type(values) is not torch.Tensor}
    if special:
        raise ValueError(f"the weights are {', '.join(sorted(special))}, expected plain tensors: load without sharding")
    devices = {str(parameter.device) for parameter in parameters}
    if "meta" in devices:
        raise ValueError("some weights are on the meta device (never loaded, or offloaded); load the whole model on one device")
    placed = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(devices) > 1 or len(placed) > 1:
        spread = ", ".join(sorted(devices if len(devices) > 1 else placed))
        raise ValueError(f"the model is spread over {spread}; skipstone decodes on one device: load the whole model there")
