"""How `generate` and `chat` choose tokens: temperature and what goes with it."""

from dataclasses import dataclass, fields
from typing import Any

from skipstone.cli.options import OptionGroup, option

NEED_TEMPERATURE = ("top_k", "top_p", "min_p", "seed")


@dataclass(frozen=True)
class SamplingOptions(OptionGroup, panel="Decoding"):
    """Options of sampling. ValueError for those that would be ignored at temperature 0."""

    temperature: float = option(0.0, "0 is greedy.", min=0.0)
    top_p: float | None = option(None, "Default: the model's own, or 1.", min=0.0, max=1.0)

    def __post_init__(self) -> None:
        for name in NEED_TEMPERATURE:
            if self.temperature == 0 and getattr(self, name, None) is not None:
                raise ValueError(f"--{name.replace('_', '-')} has no effect at temperature 0: pass --temperature too")

    def generation_options(self) -> dict[str, Any]:
        """These options as keyword arguments of `skipstone.generate`. An option that was not given is left to the model."""
        from skipstone.decoding.request import generation_options

        return generation_options(**{one.name: getattr(self, one.name) for one in fields(self) if one.name != "seed"})
