"""skipstone behind `model.generate`: `enable` a method on a model, `disable` it again."""

from __future__ import annotations

from typing import Any

from torch import LongTensor, Tensor
from transformers import GenerationConfig, PreTrainedModel

from skipstone.api import MethodLike, prepare_call, resolve_for
from skipstone.core import generation
from skipstone.core.model import LayeredModel
from skipstone.core.types import Output

_MARK = "_skipstone_method"


def enable(model: PreTrainedModel, method: MethodLike = None) -> PreTrainedModel:
    """Make `model.generate` decode with a method, streamers and stop strings included.

    Calls that ask for another engine (`custom_generate`, `assistant_model`) go to transformers as before; options that
    skipstone does not support are a ValueError. Returns the model.
    """
    chosen = resolve_for(model, method)
    chosen.check(LayeredModel(model))

    def generate(
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        streamer: Any = None,
        tokenizer: Any = None,
        seed: int | list[int] | None = None,
        **options: Any,
    ) -> Output | LongTensor:
        if options.get("custom_generate") is not None or options.get("assistant_model") is not None:
            passed = {"streamer": streamer, "tokenizer": tokenizer, **options}
            kind: Any = type(model)
            return kind.generate(model, inputs, generation_config, **passed)
        if inputs is None:
            inputs = options.pop("input_ids", None)
        if generation_config is not None:
            options["generation_config"] = generation_config
        call = prepare_call(model, inputs, tokenizer, seed, options)
        output = generation.complete(chosen, call, streamer)
        return output if call.config.return_dict_in_generate else output.sequences  # type: ignore[return-value]

    model.__dict__[_MARK] = chosen
    model.__dict__["generate"] = generate
    return model


def disable(model: PreTrainedModel) -> PreTrainedModel:
    """Give `model.generate` back to transformers. Does nothing where no method is enabled."""
    if model.__dict__.pop(_MARK, None) is not None:
        del model.__dict__["generate"]
    return model
