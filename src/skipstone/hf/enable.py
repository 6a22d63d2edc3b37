"""skipstone in `model.generate`: `enable` a method on a model, or `disable` it."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import LongTensor, Tensor
from transformers import GenerationConfig, PreTrainedModel

from skipstone.decoding.method import Method
from skipstone.engines.choose_engine import EngineOptions, attach
from skipstone.engines.eager.patches import take_off
from skipstone.engines.model_lock import lock_of
from skipstone.engines.model_runner import ModelRunner, unwrapped
from skipstone.hf.api import complete
from skipstone.hf.generate_call import DRAFT_MODEL, GenerateCall, MethodLike, Seed, captured, prepare_call, resolve_for
from skipstone.hf.generation_config_fields import refuse_fields
from skipstone.hf.output import Output
from skipstone.utils.setup_times import REQUEST, collect_setup_seconds, setup_work

_OTHER_ENGINES = ("custom_generate", "assistant_model")


def enable(
    model: PreTrainedModel,
    method: MethodLike = None,
    engine: str | None = None,
    quantize: str | None = None,
    kv_dtype: str | None = None,
    compute_dtype: str | None = None,
) -> PreTrainedModel:
    """Make `model.generate` decode with a method, streamers and stop strings included. A second call changes the method.

    method: as in `skipstone.generate`; ValueError if it does not fit the model. engine ("auto", "eager", "native" or
    "compiled"), quantize ("none", "int8" or "int4"), kv_dtype and compute_dtype ("float32" or "bfloat16"): as in
    `skipstone.load`. They stay set for this model; None changes nothing. `model.generate` then also takes `seed`, and
    unsupported options are a ValueError.
    Calls with `custom_generate` or `assistant_model` still go to transformers. Returns the model.
    """
    chosen = resolve_for(model, method)
    runner = ModelRunner(model, engine, quantize, kv_dtype, compute_dtype)
    with runner.lock:
        chosen.check(runner)
        attach(model, EngineOptions(engine, quantize, kv_dtype, compute_dtype))
    _warn_of_rounding(runner)
    before = model.__dict__.get("generate")
    if isinstance(before, _Generate):
        before = before.before
    model.__dict__["generate"] = _Generate(model, chosen, before)
    return model


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=4)


def _warn_of_rounding(runner: ModelRunner) -> None:
    """Warn, once a process, if the engine rounds less than `model.generate`."""
    stored = runner.model.dtype
    if runner.dtype == torch.float32 and stored in (torch.bfloat16, torch.float16) and runner.engine.quantize is None:
        name = str(stored).removeprefix("torch.")
        _warn_once(
            f"the {runner.engine.name} engine keeps the results of this {name} model in float32, and transformers rounds them: "
            "greedy texts can differ if two tokens are almost equally likely; engine='eager' rounds like transformers"
        )


def disable(model: PreTrainedModel) -> PreTrainedModel:
    """Restore transformers' `model.generate`, and the forwards of modules that skipstone has patched.

    Decoding with skipstone patches them again. Returns the model.
    """
    with lock_of(model):
        take_off(unwrapped(model))
    enabled = model.__dict__.get("generate")
    if isinstance(enabled, _Generate):
        del model.__dict__["generate"]
        if enabled.before is not None:
            model.__dict__["generate"] = enabled.before
    return model


@dataclass(eq=False)
class _Generate:
    """`model.generate` while a method is enabled. It is an object, so that a copied or pickled model gets its own.

    before: the previous `generate` of the instance, None if it had only that of its class.
    """

    model: PreTrainedModel
    method: Method
    before: Any

    def __call__(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        *,
        streamer: Any = None,
        tokenizer: Any = None,
        seed: Seed = None,
        **options: Any,
    ) -> Output | LongTensor:
        """Arguments and results as in transformers' `generate`."""
        named = {"generation_config": generation_config, "logits_processor": logits_processor}
        named["stopping_criteria"] = stopping_criteria
        options |= {name: value for name, value in named.items() if value is not None}
        assistant = options.get("assistant_model")
        if assistant is not None and isinstance(assistant.__dict__.get("generate"), _Generate):
            raise ValueError(
                "the assistant_model is enabled by skipstone, and transformers drafts with its own generate: call "
                f"skipstone.disable(assistant_model), or let skipstone draft with it: {DRAFT_MODEL}"
            )
        if any(options.get(name) is not None for name in _OTHER_ENGINES):
            named = {"streamer": streamer, "tokenizer": tokenizer, "seed": seed}
            options |= {name: value for name, value in named.items() if value is not None}
            kind: Any = type(self.model)
            return self.before(inputs, **options) if self.before else kind.generate(self.model, inputs, **options)
        if inputs is None:
            inputs = options.pop("input_ids", None)
        with collect_setup_seconds(), setup_work(REQUEST):
            call = prepare_call(self.model, inputs, tokenizer, seed, options)
        return _as_asked(call, complete(self.method, call, streamer))


def custom_generate(method: MethodLike = None) -> Callable[..., Output | LongTensor]:
    """The function for `model.generate(..., custom_generate=skipstone.custom_generate(method))`. method: as in `generate`.

    transformers drops `streamer` and stop strings on this path; `skipstone.enable` keeps them.
    """

    def decode(model: PreTrainedModel, input_ids: Tensor, seed: Seed = None, **prepared: Any) -> Output | LongTensor:
        refuse_fields(prepared["generation_config"].to_dict())
        with collect_setup_seconds(), setup_work(REQUEST):
            call = captured(ModelRunner(model), input_ids, prepared, seed)
        return _as_asked(call, complete(method, call))

    return decode


def _as_asked(call: GenerateCall, output: Output) -> Output | LongTensor:
    """The result of a call in the form that its options ask for."""
    return output if call.config.return_dict_in_generate else output.sequences  # type: ignore[return-value]
