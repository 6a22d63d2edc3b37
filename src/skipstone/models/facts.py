"""What is found once per model: its modules, its family, its limits, and that its weights can be decoded with."""

from typing import Any

import torch

from skipstone.models.device_map import hooks, input_device
from skipstone.models.families import attention_reaches, layer_types, max_positions, text_config, text_ids
from skipstone.models.modules import DecoderModules
from skipstone.models.packed import PackedWeight
from skipstone.models.quantised import kernels, warm_up_kernels
from skipstone.models.tensor_parallel import TensorParallelGroup
from skipstone.models.unsupported import refuse_weights
from skipstone.models.weight_version import model_version


class Facts:
    """Facts and modules of one model, as long as `hold` says so. ValueError for a model that skipstone cannot decode exactly.

    layers: decoder layers. head: the LM head. embeddings: ids of text that have an embedding. kinds, reaches: layer type of
    every layer, and how far it sees back. device: on which tokens enter and logits leave; layers may be on others. ranks: the
    processes that share the weights. spread: how weights are anywhere else, in words; None where they are not. is_quantised:
    whether another package's kernels compute some of it.
    """

    def __init__(self, model: Any) -> None:
        refuse_weights(model)
        config = text_config(model)
        warm_up_kernels(model)
        modules = DecoderModules(model)
        self.family, self.decoder, self.layers, self.head = modules.family, modules.decoder, modules.layers, modules.head
        self.embeddings = text_ids(model)
        self.kinds = layer_types(config)
        self.reaches = attention_reaches(config, self.family)
        self.max_positions, self.max_positions_source = max_positions(config, self.family)
        self.device: torch.device = input_device(model)
        self.ranks = TensorParallelGroup.of(model)
        self.spread = self._spread(model)
        self.dtype: torch.dtype = model.dtype
        self.is_quantised = any(kernels(model).values())
        parts = list(model.modules())
        self._weight_places = [part._parameters for part in parts]
        dispatched = any(hooks(part) for part in parts)
        self._hook_places = [vars(part) for part in parts[1:]] if dispatched else []  # the model's own would keep it alive
        self._modules = model_version(model).modules
        self._settings = self._current_settings(model)

    def _spread(self, model: Any) -> str | None:
        """How the weights are not all on one device of this process; None where they are."""
        if self.ranks.size > 1:
            return f"sharded over {self.ranks.size} processes"
        devices = {str(one.device) for one in model.parameters()}
        if len(devices) == 1 and "meta" not in devices:
            return None
        found = ", ".join(sorted(devices - {"meta"}))
        return " and ".join([*[f"on {found}"] * bool(found), *["offloaded"] * ("meta" in devices)])

    @property
    def places(self) -> str:
        """Where the model is, for users."""
        return str(self.device) if self.spread is None else f"{self.device}, weights {self.spread}"

    def hold(self, model: Any, modules: int) -> bool:
        """Whether nothing has changed since. modules: the version of the model's modules now."""
        return self._modules == modules and self._settings == self._current_settings(model)

    def replace(self, weight: Any, packed: PackedWeight) -> None:
        """Put another object wherever a weight stands."""
        for place in self._weight_places:
            for name, one in place.items():
                if one is weight:
                    place[name] = packed

    def _current_settings(self, model: Any) -> tuple[Any, ...]:
        placed = repr(getattr(model, "hf_device_map", None)), [id(place.get("_hf_hook")) for place in self._hook_places]
        return repr(vars(model.config)), placed, getattr(model, "hf_quantizer", None)
