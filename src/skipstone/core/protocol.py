"""What a decoding method is: a frozen dataclass of hyper-parameters that starts sessions.

The loop knows methods only through this file and `Session`. A method is also the callable that transformers'
`generate(custom_generate=...)` wants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from torch import LongTensor, Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList

from skipstone.core import generation, options
from skipstone.core.fields import OWN_FIELD
from skipstone.core.model import LayeredModel
from skipstone.core.session import Session
from skipstone.core.types import Output

RejectionRule = Literal["standard", "coupled"]


@dataclass(frozen=True)
class Method:
    """Base of all methods. Fields of subclasses are the paper's hyper-parameters with the paper's defaults.

    name: how users call it. aliases: other packages' spellings of
    fields, accepted with a warning. if_few_accepted: what it means for this method that hardly any draft is accepted.
    by_model: fields that have no default but a model's own; None leaves them to it.
    """

    name: ClassVar[str]
    aliases: ClassVar[dict[str, str]] = {}
    if_few_accepted: ClassVar[str] = ""
    by_model: ClassVar[tuple[str, ...]] = ()

    @property
    def lossless(self) -> bool:
        """Whether the text (or its law) is the target's own."""
        return True

    @property
    def settings(self) -> dict[str, Any]:
        """The hyper-parameters by name, as plain JSON values: a model that was given as an object is called what it is."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        plain = (str, int, float, bool, tuple, list, dict, type(None))
        return {name: one if isinstance(one, plain) else _called(one) for name, one in values.items()}

    def completed(self, default: Any) -> Self:
        """This method with the fields that it leaves to the model, from a model's default (`generation_config.skipstone`)."""
        if not isinstance(default, Mapping) or default.get("method") != self.name:
            return self
        left = {name: default[name] for name in self.by_model if getattr(self, name) is None and name in default}
        return replace(self, **left)

    def check(self, model: LayeredModel) -> None:
        """Raise ValueError where the settings do not fit the model. Called before any work."""

    def new_state(self, model: LayeredModel) -> Any:
        """What lives across requests (a search, thresholds, measured costs); None where nothing does."""
        return None

    def report(self, model: PreTrainedModel) -> dict[str, Any]:
        """What the method has learnt about a model across requests, as plain JSON values; empty where it learns nothing."""
        return {}

    def start(self, model: LayeredModel, rows: int, capacity: int, state: Any = None) -> Session:
        """A session for `rows` rows of at most `capacity` tokens each."""
        raise NotImplementedError

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        seed: int | list[int] | None = None,
        **model_kwargs: Any,
    ) -> Output | LongTensor:
        """`model.generate(..., custom_generate=method)`. transformers drops `streamer` and stop strings on this path;
        `skipstone.enable` keeps them."""
        call = options.Call(model, input_ids, logits_processor, stopping_criteria, generation_config, seed, model_kwargs)
        output = generation.complete(self.completed(getattr(generation_config, OWN_FIELD, None)), call)
        return output if generation_config.return_dict_in_generate else output.sequences  # type: ignore[return-value]


def _called(value: Any) -> str:
    return str(value) if isinstance(value, Path) else getattr(value, "name_or_path", "") or type(value).__name__


def check_rule(value: Any) -> None:
    """ValueError unless value is a RejectionRule."""
    if value not in ("standard", "coupled"):
        raise ValueError(f'rejection_sample_method must be "standard" or "coupled", found {value!r}')


def layer_in_range(name: str, value: Any, model: LayeredModel) -> None:
    """ValueError unless value is an int in [1, L-1]."""
    if value is None:
        raise ValueError(
            f"{name} is not set and this model carries no default for it: pass an integer from 1 to {model.depth - 1}; "
            "`skipstone inspect MODEL` shows where an early exit would pay"
        )
    whole_number(name, value, 1)
    if value >= model.depth:
        raise ValueError(f"{name} must lie between 1 and {model.depth - 1} for a model of {model.depth} layers, found {value}")


def layer_numbers(name: str, value: Any) -> tuple[int, ...]:
    """Layers as a tuple: YAML and JSON have lists. ValueError for what are no whole numbers."""
    layers = [value] if type(value) is int else value
    if not isinstance(layers, (list, tuple)) or not all(type(layer) is int for layer in layers):
        raise ValueError(f"{name} must be layer numbers, found {value!r}")
    return tuple(layers)


def whole_number(name: str, value: Any, least: int) -> None:
    """ValueError unless value is an int (no bool) of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, found {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, found {value}")
