"""The base class of peers: other implementations of decoding, as methods of the benchmark."""

from dataclasses import dataclass

from transformers import PreTrainedModel

from skipstone.decoding.settings import whole_number
from skipstone.lab.timing.measure import GenerationBackend

COUNTS = ("num_assistant_tokens", "prompt_lookup_num_tokens", "num_draft_tokens")
"""Settings that are whole numbers from 1."""


@dataclass(frozen=True)
class Peer(GenerationBackend):
    """Base of the peers that draft."""

    def check(self, model: PreTrainedModel) -> None:
        for name, value in self.settings.items():
            if name in COUNTS:
                whole_number(f"{self.name}: {name}", value, 1)
            if name == "confidence_threshold":
                number = isinstance(value, (int, float)) and not isinstance(value, bool)
                if not number or not 0 <= value <= 1:
                    raise ValueError(f"{self.name}: {name} must be a number in [0, 1], found {value!r}")
