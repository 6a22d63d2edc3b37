"""The base class of peers: other implementations of decoding, as methods of the benchmark."""

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from torch import Tensor
from transformers import PreTrainedModel

from skipstone.decoding.settings import whole_number
from skipstone.lab.timing.measure import GeneratedOutput

COUNTS = ("num_assistant_tokens", "prompt_lookup_num_tokens", "num_draft_tokens")
"""Settings that are whole numbers from 1."""


@dataclass(frozen=True)
class Peer:
    """Base of the peers; fields of subclasses are what can be set."""

    name: ClassVar[str]
    sampled: ClassVar[bool] = True  # it can sample
    long_warm_up: ClassVar[bool] = False  # warm it up with as many tokens as the task has
    elsewhere: ClassVar[bool] = False  # it runs in another process, whose memory is not counted

    @property
    def lossless(self) -> bool:
        """Whether its text is the model's own."""
        return True

    @property
    def settings(self) -> dict[str, Any]:
        return asdict(self)

    def check(self, model: PreTrainedModel) -> None:
        """ValueError for settings that are impossible, or do not fit the model."""
        for name, value in self.settings.items():
            if name in COUNTS:
                whole_number(f"{self.name}: {name}", value, 1)
            if name == "confidence_threshold":
                number = isinstance(value, (int, float)) and not isinstance(value, bool)
                if not number or not 0 <= value <= 1:
                    raise ValueError(f"{self.name}: {name} must be a number in [0, 1], found {value!r}")

    def refusal(self, model: PreTrainedModel) -> str | None:
        """The reason why this model cannot be decoded so, or None."""
        return None

    def generate(self, model: PreTrainedModel, prompt: Tensor, options: dict[str, Any], seed: int) -> GeneratedOutput:
        """As `GenerationBackend.generate`."""
        raise NotImplementedError
