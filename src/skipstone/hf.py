"""skipstone behind `model.generate`: `enable` a method on a model, `disable` it again."""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import LongTensor, Tensor
from transformers import GenerationConfig, PreTrainedModel

from skipstone.api import MethodLike, prepare_call, resolve_for
from skipstone.core import generation
from skipstone.core.model import LayeredModel
from skipstone.core.protocol import Method
from skipstone.core.types import Output

_MARK = "_skipstone"
_OTHER_ENGINES = ("custom_generate", "assistant_model")


@dataclass(frozen=True)
class _Enabled:
    """method: what decodes. before: the `generate` that the instance itself had, None where it had the class's."""

    method: Method
    before: Any


def enable(model: PreTrainedModel, method: MethodLike = None) -> PreTrainedModel:
    """Make `model.generate` decode with a method, streamers and stop strings included. A second call changes the method.

    method: as in `skipstone.generate`; ValueError where it does not fit the model. `model.generate` then also takes `seed`, and
    options that skipstone does not support are a ValueError. Calls that ask for another engine (`custom_generate`,
    `assistant_model`) go to transformers as before. Returns the model.
    """
    chosen = resolve_for(model, method)
    chosen.check(LayeredModel(model))
    enabled = model.__dict__.get(_MARK)
    before = model.__dict__.get("generate") if enabled is None else enabled.before
    model.__dict__[_MARK] = _Enabled(chosen, before)
    model.__dict__["generate"] = MethodType(_generate, model)  # bound, so that a deep copy of the model gets its own
    return model


def disable(model: PreTrainedModel) -> PreTrainedModel:
    """Give `model.generate` back to transformers. Does nothing where no method is enabled. Returns the model."""
    enabled = model.__dict__.pop(_MARK, None)
    if enabled is not None:
        del model.__dict__["generate"]
        if enabled.before is not None:
            model.__dict__["generate"] = enabled.before
    return model


def _generate(
    model: PreTrainedModel,
    inputs: Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    *,
    streamer: Any = None,
    tokenizer: Any = None,
    seed: int | list[int] | None = None,
    **options: Any,
) -> Output | LongTensor:
    """What `model.generate` is while a method is enabled."""
    enabled: _Enabled = model.__dict__[_MARK]
    named = {
        "generation_config": generation_config,
        "logits_processor": logits_processor,
        "stopping_criteria": stopping_criteria,
    }
    options |= {name: value for name, value in named.items() if value is not None}
    if any(options.get(name) is not None for name in _OTHER_ENGINES):
        own = {"streamer": streamer, "tokenizer": tokenizer, "seed": seed}
        options |= {name: value for name, value in own.items() if value is not None}
        kind: Any = type(model)
        return enabled.before(inputs, **options) if enabled.before else kind.generate(model, inputs, **options)
    if inputs is None:
        inputs = options.pop("input_ids", None)
    call = prepare_call(enabled.method, model, inputs, tokenizer, seed, options)
    output = generation.complete(enabled.method, call, streamer)
    return output if call.config.return_dict_in_generate else output.sequences  # type: ignore[return-value]
