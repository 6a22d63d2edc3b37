"""What is found once per model: its modules, its family, its limits, and that its weights can be decoded with."""

from typing import Any

import torch

from skipstone.models.families import kinds, max_positions, windows
from skipstone.models.modules import DecoderModules
from skipstone.models.packed import PackedWeight
from skipstone.models.quantised import settle
from skipstone.models.refusals import refuse_weights


class Facts:
    """Facts and modules of one model, as long as `hold` says so. ValueError for a model that skipstone cannot decode exactly.

    layers: decoder layers. head: the LM head. embeddings: ids that the input embedding has rows for. kinds, windows: layer type
    and sliding window of every layer.
    """

    def __init__(self, model: Any) -> None:
        refuse_weights(model)
        config = model.config
        modules = DecoderModules(model)
        settle(model)
        self.family, self.decoder, self.layers, self.head = modules.family, modules.decoder, modules.layers, modules.head
        self.embeddings: int = model.get_input_embeddings().weight.shape[0]
        self.kinds = kinds(config)
        self.windows = windows(config)
        self.max_positions, self.max_positions_source = max_positions(config)
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        parts = list(model.modules())
        self._child_places = [part._modules for part in parts]
        self._weight_places = [part._parameters for part in parts]
        self._stamp = self._now(model)

    def hold(self, model: Any) -> bool:
        """Whether nothing has changed since. No module is walked: the places that held modules and parameters are known."""
        return self._stamp == self._now(model)

    def replace(self, weight: Any, packed: PackedWeight) -> None:
        """Put another object wherever a weight stands. The facts do not hold until `renew`."""
        for place in self._weight_places:
            for name, one in place.items():
                if one is weight:
                    place[name] = packed

    def renew(self, model: Any) -> None:
        """Say that the facts hold of the model as it is now: what has changed is who keeps its weights."""
        self._stamp = self._now(model)

    def _now(self, model: Any) -> tuple[Any, ...]:
        children = [id(child) for place in self._child_places for child in place.values()]
        found = (one for place in self._weight_places for one in place.values() if one is not None)
        weights = [(id(one), one.dtype, one.device) for one in found]
        placed = repr(getattr(model, "hf_device_map", None))
        return children, weights, repr(vars(model.config)), placed, getattr(model, "hf_quantizer", None)
