"""A `generate` call, prepared by transformers itself: its options are merged and validated there, and refused here."""

import copy
import difflib
import inspect
import reprlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList

from skipstone.decoding.method import Method
from skipstone.decoding.stop_strings import StopStrings
from skipstone.engines.model_runner import ModelRunner, unwrapped
from skipstone.hf.generation_config_fields import FIELDS, refuse_fields
from skipstone.methods import MethodLike, resolve
from skipstone.models.generation_config import OWN_FIELD

ARGUMENTS = (
    *("generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn"),
    *("attention_mask", "position_ids"),
)
"""Keyword arguments of `model.generate` that are no fields of GenerationConfig and that skipstone takes."""

DRAFT_MODEL = (
    "it belongs to transformers' assisted generation; to draft with a model, pass "
    "method={'method': 'speculative', 'draft_model': FOLDER OR HUB ID}"
)
"""What to do instead of passing an assistant model."""

REFUSED_ARGUMENTS = {
    "past_key_values": "skipstone keeps its own KV store",
    "inputs_embeds": "skipstone needs token ids",
    "assistant_model": DRAFT_MODEL,
    "assistant_tokenizer": DRAFT_MODEL,
    "logits_to_keep": "transformers passes it to an assistant_model, which must not be enabled: call skipstone.disable on it",
    "custom_generate": "skipstone is the decoding function; an enabled model.generate passes such calls on",
    "negative_prompt_ids": "classifier-free guidance is not implemented",
    "negative_prompt_attention_mask": "classifier-free guidance is not implemented",
    "synced_gpus": "processes that share a model take the same steps here by themselves",
    "token_type_ids": "skipstone hands nothing but token ids to the model; tokenise with return_token_type_ids=False",
    "trust_remote_code": "it is an option of skipstone.load",
}

LIKE_AN_OPTION = 0.75
"""Similarity from which an unknown name counts as a misspelt option."""


@dataclass
class GenerateCall:
    """A `generate` call as transformers hands it to a custom decoding function: everything prepared for the padded batch.

    input_ids: [B, T] int64, left-padded. logits_processor, stopping_criteria: prepared lists, user's objects included.
    seed: of row 0, from which further rows get their own (`noise.row_seed`); a list has one per row; None draws one from
    torch's generator. runner: runs the model. stop_strings: end the rows.
    """

    runner: ModelRunner
    input_ids: Tensor
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    config: GenerationConfig
    seed: int | list[int] | None = None
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    stop_strings: StopStrings | None = None

    @property
    def prompts(self) -> list[Tensor]:
        """The rows without their padding, [T_row] each."""
        mask = self.model_kwargs.get("attention_mask")
        if mask is None:
            return list(self.input_ids)
        return [ids[row != 0] for ids, row in zip(self.input_ids, mask, strict=True)]


def prepare_method(method: MethodLike, call: GenerateCall) -> Method:
    """The method of a call. ValueError if it does not fit the model. A text is read and checked once per prepared model."""
    runner, config = call.runner, call.config
    key = method, repr(getattr(config, OWN_FIELD, None)), runner.engine_options
    is_text = method is None or isinstance(method, str)
    if is_text and key in runner.methods:
        return runner.methods[key]
    resolved = resolve_for(runner.model, method, config)
    with runner.lock:
        resolved.check(runner)
    if is_text:
        runner.methods[key] = resolved
    return resolved


def resolve_for(model: PreTrainedModel, method: MethodLike, config: GenerationConfig | None = None) -> Method:
    """The method a user asked for, completed by the defaults in `config.skipstone` or `model.generation_config.skipstone`."""
    own = getattr(unwrap(model).generation_config, OWN_FIELD, None)
    return resolve(method, getattr(config, OWN_FIELD, None) or own)


def prepare_call(
    model: PreTrainedModel,
    ids: Tensor | None,
    tokenizer: Any,
    seed: int | list[int] | None,
    options: dict[str, Any],
    engine: str | None = None,
) -> GenerateCall:
    """A prepared call on a model that can be decoded. ValueError for what the user got wrong, before any forward.

    engine, and quantize and kv_dtype among the options: as in `ModelRunner`.
    """
    options = dict(options)
    unwrap(model)
    runner = ModelRunner(model, engine, options.pop("quantize", None), options.pop("kv_dtype", None))
    with runner.lock:
        strings = _take_stop_strings(options, runner.model.generation_config, tokenizer)
        return prepare(runner, ids, seed, strings, **options)


def _take_stop_strings(options: dict[str, Any], own: Any, tokenizer: Any) -> StopStrings | None:
    """The stop strings of a call, taken out of its options: transformers gives custom decoding no tokenizer. ValueError for
    what is no list of texts, and without a tokenizer."""
    given = options.get("generation_config")
    in_given = getattr(given, "stop_strings", None)
    in_configs = own.stop_strings if in_given is None else in_given
    found = options.pop("stop_strings") if "stop_strings" in options else in_configs
    if in_given is not None:
        bare: Any = copy.deepcopy(given)
        bare.stop_strings = None
        options["generation_config"] = bare
    if own.stop_strings is not None:
        options["stop_strings"] = None
    strings = [found] if isinstance(found, str) else list(found or [])
    if not strings:
        return None
    if any(not isinstance(one, str) or not one for one in strings):
        raise ValueError(f"stop_strings must be texts that are not empty, found {found!r}")
    if tokenizer is None:
        raise ValueError(f"stop_strings={found!r} need the tokenizer: pass tokenizer=")
    return StopStrings(strings, tokenizer)


def unwrap(model: Any) -> PreTrainedModel:
    """The transformers model inside a PEFT wrapper (its adapters live in the layers), or the model itself.

    ValueError for what is no transformers model with a language-modelling head.
    """
    inner = unwrapped(model)
    if not isinstance(inner, PreTrainedModel) or not inner.can_generate():
        raise ValueError(
            f"model must be a transformers model with a language-modelling head (AutoModelForCausalLM or skipstone.load), "
            f"found {type(inner).__name__}"
        )
    return inner


def prepare(
    runner: ModelRunner,
    input_ids: Tensor | None,
    seed: int | list[int] | None = None,
    stops: StopStrings | None = None,
    **kwargs: Any,
) -> GenerateCall:
    """Let transformers merge and validate the options of a call, and stop short of decoding.

    stops: stop strings, which transformers does not pass on. Keyword arguments are those of `model.generate`. ValueError for an
    unknown one, for one that skipstone does not support and for input ids and masks that do not fit one another.
    """
    model = runner.model
    _check_arguments(model, kwargs)
    if kwargs.get("attention_mask") is not None:
        kwargs["attention_mask"] = token_tensor(kwargs["attention_mask"])
    if input_ids is not None:
        input_ids = token_tensor(input_ids)
        check_shapes(input_ids, kwargs.get("attention_mask"))

    def capture(
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Any:
        return GenerateCall(
            runner, input_ids, logits_processor, stopping_criteria, generation_config, seed, model_kwargs, stops
        )

    with _no_word_of_devices() if model.device.type == "meta" else nullcontext():
        return type(model).generate(model, input_ids, custom_generate=capture, **kwargs)


@contextmanager
def _no_word_of_devices() -> Iterator[None]:
    """transformers wants ids on the meta device where the first weight is offloaded: they belong where it computes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You are calling .generate")
        yield


def _check_arguments(model: PreTrainedModel, kwargs: dict[str, Any]) -> None:
    """ValueError for an argument that transformers would not know, would drop, or that skipstone does not support."""
    for name, value in kwargs.items():
        if name in FIELDS or name in ARGUMENTS:
            continue
        if name in REFUSED_ARGUMENTS:
            if value is None or value is False:
                continue
            raise ValueError(f"{name} is not supported: {REFUSED_ARGUMENTS[name]}")
        if name in inspect.signature(model.forward).parameters:
            raise ValueError(f"{name} is not supported: skipstone hands nothing but token ids to the model; leave it out")
        close = difflib.get_close_matches(name, [*FIELDS, *ARGUMENTS], n=1, cutoff=LIKE_AN_OPTION)
        hint = f"did you mean {close[0]}?" if close else "a method's own settings go into method={'method': name, ...}"
        raise ValueError(f"unknown option {name}={reprlib.repr(value)}; {hint}")
    fields: dict[str, Any] = model.generation_config.to_dict()  # type: ignore[union-attr]
    if (given := kwargs.get("generation_config")) is not None:
        fields |= {name: value for name, value in given.to_dict().items() if value is not None}
    refuse_fields(fields | kwargs)  # transformers' priority


def token_tensor(ids: Any) -> Any:
    """Token ids as int64, whatever integer dtype they have, and numpy arrays of integers as tensors. Anything else comes back
    as it is, for `check_shapes` to refuse."""
    if isinstance(ids, np.ndarray) and ids.dtype.kind in "iu":
        return torch.from_numpy(ids.astype(np.int64))
    if not isinstance(ids, Tensor) or ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        return ids
    return ids.to(torch.int64)


def check_shapes(ids: Any, mask: Any) -> None:
    """ValueError unless ids are integers [B, T], at least one token each, and a mask has their shape."""
    if not isinstance(ids, Tensor):
        found = f"an array of {ids.dtype}" if isinstance(ids, np.ndarray) else type(ids).__name__
        raise ValueError(f"input_ids must be a tensor or a numpy array of integers, found {found}")
    if ids.ndim != 2 or ids.shape[1] == 0 or ids.shape[0] == 0:
        raise ValueError(f"input_ids must be [batch, length] with at least one token, found shape {list(ids.shape)}")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"input_ids must be integers, found {ids.dtype}")
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != ids.shape):
        found = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask must have the shape of input_ids, {list(ids.shape)}, found {found}")
