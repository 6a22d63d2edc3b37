"""Where a model keeps the parts that skipstone uses: its layers, its final norm and its LM head."""

from typing import Any

from torch import Tensor

from skipstone.models.families import text_config
from skipstone.models.recognition import recognise


def unwrapped(model: Any) -> Any:
    """The transformers model inside a PEFT wrapper (its adapters live in the layers), or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class DecoderModules:
    """The parts of one model, in training or not, and g(.), from a layer's output to logits.

    model: without a PEFT wrapper. config: of the text model. decoder: what owns the layers. layers: all of them. head: the LM
    head. ValueError for a model that skipstone cannot decode.
    """

    def __init__(self, model: Any) -> None:
        self.model: Any = unwrapped(model)
        self.config: Any = text_config(self.model)
        self.family = recognise(self.model).family
        self.decoder: Any = self.family.owner(self.model)
        self.layers = list(getattr(self.decoder, self.family.layers))[: self.config.num_hidden_layers]
        self.head: Any = self.model.get_output_embeddings()

    @property
    def depth(self) -> int:
        """Number of layers, L."""
        return len(self.layers)

    def normed(self, hidden: Tensor) -> Tensor:
        """What the LM head reads: states after the final norm (and OPT-350m's projection). [..., d] -> [..., d']."""
        return self.family.finish(self.decoder, hidden)

    def project(self, normed: Tensor) -> Tensor:
        """LM head and what the family does after it. [..., d'] -> [..., V]."""
        return self.family.scored(self.head(normed), self.config)

    def logits(self, hidden: Tensor) -> Tensor:
        """g(.): final norm, LM head and what the family does after it. [..., d] -> [..., V]."""
        return self.project(self.normed(hidden))
