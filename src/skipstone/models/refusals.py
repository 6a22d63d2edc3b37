"""Models that skipstone would decode wrongly, or has never been tested with, are refused by name: here for the state that they
are in, in families.py for their architecture."""

from typing import Any

import torch

ADAPTERS = ("LORA", "IA3", "LOHA", "LN_TUNING", "VERA", "TRAINABLE_TOKENS")
"""PEFT types that live wholly inside the model's modules, each with a test in tests/models/test_peft.py."""


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
    """ValueError for weights that are quantised, sharded, not there, or on several devices. Walks all parameters."""
    config = getattr(model.config, "quantization_config", None)
    method = config.get("quant_method") if isinstance(config, dict) else getattr(config, "quant_method", None)
    method = getattr(method, "value", method)
    parameters = list(model.parameters())
    dtypes = {str(parameter.dtype) for parameter in parameters if not parameter.is_floating_point()}
    if getattr(model, "hf_quantizer", None) is not None or dtypes:
        found = method or ", ".join(sorted(dtypes)) or "unknown method"
        raise ValueError(f"the model is quantised ({found}); no quantised kernel is tested here yet: load it unquantised")
    special = {type(parameter.data).__name__ for parameter in parameters if type(parameter.data) is not torch.Tensor}
    if special:
        raise ValueError(f"the weights are {', '.join(sorted(special))}, expected plain tensors: load without sharding")
    devices = {str(parameter.device) for parameter in parameters}
    if "meta" in devices:
        raise ValueError("some weights are on the meta device (never loaded, or offloaded); load the whole model on one device")
    placed = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(devices) > 1 or len(placed) > 1:
        spread = ", ".join(sorted(devices if len(devices) > 1 else placed))
        raise ValueError(f"the model is spread over {spread}; skipstone decodes on one device: load the whole model there")
