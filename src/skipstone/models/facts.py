"""What is found once per model: its modules, its family, its limits, and that its weights can be decoded with."""

from typing import Any

import torch

from skipstone.models.families import kinds, max_positions, reaches, text_config, text_ids
from skipstone.models.modules import DecoderModules
from skipstone.models.packed import PackedWeight
from skipstone.models.placing import home, hooks
from skipstone.models.quantised import kernels, settle
from skipstone.models.ranks import Ranks
from skipstone.models.refusals import refuse_weights


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
        settle(model)
        modules = DecoderModules(model)
        self.family, self.decoder, self.layers, self.head = modules.family, modules.decoder, modules.layers, modules.head
        self.embeddings = text_ids(model)
        self.kinds = kinds(config)
        self.reaches = reaches(config, self.family)
        self.max_positions, self.max_positions_source = max_positions(config, self.family)
        self.device: torch.device = home(model)
        self.ranks = Ranks.of(model)
        self.spread = self._spread(model)
        self.dtype: torch.dtype = model.dtype
        self.is_quantised = any(kernels(model).values())
        parts = list(model.modules())
        self._child_places = [part._modules for part in parts]
        self._weight_places = [part._parameters for part in parts]
        dispatched = any(hooks(part) for part in parts)
        self._hook_places = [vars(part) for part in parts[1:]] if dispatched else []  # the model's own would keep it alive
        self._stamp = self._now(model)

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
        # an offloaded weight is another object after every pass
        weights = [(0 if one.is_meta else id(one), one.dtype, one.device) for one in found]
        placed = repr(getattr(model, "hf_device_map", None)), [id(place.get("_hf_hook")) for place in self._hook_places]
        return children, weights, repr(vars(model.config)), placed, getattr(model, "hf_quantizer", None)
