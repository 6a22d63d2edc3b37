"""Describes a transformers decoder: its parts, its family, its limits, its state and the places of its weights."""

from typing import Any
from weakref import ref

import torch
from torch import Tensor

from skipstone.models.device_map import input_device
from skipstone.models.families import attention_reaches, layer_types, max_positions, text_config, text_ids
from skipstone.models.quantised_checkpoints import kernels
from skipstone.models.recognition import recognise
from skipstone.models.tensor_parallel import TensorParallelGroup

ADAPTERS = ("LORA", "IA3", "LOHA", "LN_TUNING", "VERA", "TRAINABLE_TOKENS")
"""PEFT types that are wholly inside the model's modules, tested in tests/engines/test_peft.py."""


def unwrapped(model: Any) -> Any:
    """The transformers model inside a PEFT wrapper (its adapters live in the layers), or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def refuse_state(wrapper: Any, model: Any) -> None:
    """ValueError for a state in which the layers do not give the model's own text. Reads no parameter.

    wrapper: the user's object, a PEFT wrapper or the model itself. model: the transformers model inside.
    """
    if model.training:
        raise ValueError("the model is in training mode, where dropout makes every pass differ; call model.eval() first")
    # during a wrapper's generate() PEFT lends the model its own method: custom_generate sees the wrapper only there
    lender = getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None)
    for place in (model, wrapper, lender):
        for name, adapter in getattr(place, "peft_config", {}).items():
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


class DecoderModel:
    """Describes one model, in training or not. ValueError for a model that skipstone cannot decode.

    config: of the text model. family: what surrounds the layers. decoder: the module that owns the layers. layers: all of them.
    depth: their number, L. head: the LM head. kinds, reaches: layer type of every layer, and how far it attends back.
    max_positions: of a sequence; max_positions_source: the config field that sets this limit. embeddings: number
    of text ids with an embedding. device: tokens enter and logits leave here; layers may be on other devices. weight_dtype: of
    the stored weights. ranks: the processes that share the weights. spread: a phrase for weights on several devices or in
    several processes; None if one device of this process has all. is_quantised: another package's kernels compute some layers.
    """

    def __init__(self, model: Any) -> None:
        inner = unwrapped(model)
        self._model = ref(inner)
        self.config: Any = text_config(inner)
        self.family = recognise(inner).family
        self.decoder: Any = self.family.owner(inner)
        self.layers = list(getattr(self.decoder, self.family.layers))[: self.config.num_hidden_layers]
        self.depth = len(self.layers)
        self.head: Any = inner.get_output_embeddings()
        self.kinds, self.reaches = layer_types(self.config), attention_reaches(self.config, self.family)
        self.max_positions, self.max_positions_source = max_positions(self.config, self.family)
        self.embeddings = text_ids(inner)
        self.device: torch.device = input_device(inner)
        self.weight_dtype: torch.dtype = inner.dtype
        self.ranks = TensorParallelGroup.of(inner)
        self.spread = _describe_spread(inner, self.ranks.size)
        self.is_quantised = bool(kernels(inner))

    @property
    def model(self) -> Any:
        """The transformers model, without a PEFT wrapper. This object does not keep it alive."""
        return self._model()

    def normed(self, hidden: Tensor) -> Tensor:
        """The input of the LM head: states after the final norm (and OPT-350m's projection). [..., d] -> [..., d']."""
        return self.family.finish(self.decoder, hidden)

    def project(self, normed: Tensor) -> Tensor:
        """LM head and the family's scaling of logits. [..., d'] -> [..., V]."""
        return self.family.scored(self.head(normed), self.config)

    def logits(self, hidden: Tensor) -> Tensor:
        """g(.): final norm, LM head and the family's scaling of logits. [..., d] -> [..., V]."""
        return self.project(self.normed(hidden))


def _describe_spread(model: Any, processes: int) -> str | None:
    """A phrase for weights on several devices or in several processes; None if one device of this process has all."""
    if processes > 1:
        return f"sharded over {processes} processes"
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) == 1 and "meta" not in devices:
        return None
    present = ", ".join(sorted(devices - {"meta"}))
    return " and ".join([*[f"on {present}"] * bool(present), *["offloaded"] * ("meta" in devices)])
