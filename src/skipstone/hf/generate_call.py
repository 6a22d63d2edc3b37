"""Prepares a `generate` call: transformers merges and validates the options, skipstone refuses unsupported ones."""

import copy
import difflib
import inspect
import reprlib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from skipstone.decoding.method import Method
from skipstone.decoding.stop_strings import StopStrings
from skipstone.engines.model_runner import ModelRunner, unwrapped
from skipstone.hf.common_options import RepetitionPenalty, merge_common_options
from skipstone.hf.generation_config_fields import FIELDS, refuse_fields
from skipstone.methods import MethodLike, resolve
from skipstone.models import torch_defaults
from skipstone.models.generation_config import OWN_FIELD
from skipstone.models.mapped_model import MappedModel
from skipstone.models.per_model_cache import PerModelCache
from skipstone.utils.setup_times import SetupSeconds, collected_seconds

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

ARGUMENTS = (
    *("generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn"),
    *("attention_mask", "position_ids"),
)
"""Supported keyword arguments of `model.generate` that are no fields of GenerationConfig."""

DRAFT_MODEL = (
    "it belongs to transformers' assisted generation; to draft with a model, pass "
    "method={'method': 'speculative', 'draft_model': FOLDER OR HUB ID}"
)
"""Why `assistant_model` is refused, and what to do instead."""

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

Seed = int | list[int] | None
"""The seed of the first row, or one per row."""
LIKE_AN_OPTION = 0.75
"""Minimum similarity of an unknown name to an option to count as its misspelling."""


@dataclass
class GenerateCall:
    """A `generate` call with merged options, prepared for the padded batch.

    input_ids: [B, T] int64, left-padded. logits_processor: prepared list, with the user's objects. config: the merged fields.
    max_length: of the padded rows. eos: ids that end a row. criteria: further stopping criteria, in the user's order. seed: of
    row 0, from which other rows derive theirs (`noise.row_seed`); or one per row; None draws one from torch's generator.
    has_row_processors: the processors are those of every row, not of the padded batch. setup: seconds of set-up work.
    """

    runner: ModelRunner
    input_ids: Tensor
    logits_processor: Sequence[Any]
    config: "GenerationConfig | Any"
    max_length: int
    eos: frozenset[int]
    criteria: Sequence[Any] = ()
    seed: Seed = None
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    stop_strings: StopStrings | None = None
    setup: SetupSeconds = field(default_factory=collected_seconds)
    has_row_processors: bool = False

    @property
    def prompts(self) -> list[Tensor]:
        """The rows without their padding, [T_row] each."""
        mask = self.model_kwargs.get("attention_mask")
        if mask is None:
            return list(self.input_ids)
        return [ids[row != 0] for ids, row in zip(self.input_ids, mask, strict=True)]


def prepare_method(method: MethodLike, call: GenerateCall) -> Method:
    """The method of a call. ValueError if it does not fit the model. Texts are parsed and checked once per prepared model."""
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


def resolve_for(model: Any, method: MethodLike, config: Any = None) -> Method:
    """A user's method, completed with the defaults in `config.skipstone` or `model.generation_config.skipstone`."""
    default = getattr(unwrap(model).generation_config, OWN_FIELD, None)
    return resolve(method, getattr(config, OWN_FIELD, None) or default)


ENGINE_FIELDS = ("quantize", "kv_dtype", "compute_dtype")
"""Options of a call that choose how the model's engine computes it."""


def prepare_call(
    model: Any, ids: Tensor | None, tokenizer: Any, seed: Seed, options: dict[str, Any], engine: str | None = None
) -> GenerateCall:
    """Merge and validate the options of a call as transformers does, without decoding. ValueError for user errors, before any
    forward.

    Common options of a `MappedModel` are merged here. transformers merges all others.

    engine, and ENGINE_FIELDS among the options: as in `ModelRunner`.
    """
    options = dict(options)
    unwrap(model)
    runner = ModelRunner(model, engine, **{name: options.pop(name, None) for name in ENGINE_FIELDS})
    own = runner.model
    stops = _take_stop_strings(options, own.generation_config, tokenizer)
    if isinstance(own, MappedModel) and (call := _with_common_options(runner, ids, seed, stops, options)) is not None:
        return call
    inner = generation_host(own)
    with runner.lock, _without_device_warning() if inner.device.type == "meta" else nullcontext():
        _check_arguments(inner, options)
        if options.get("attention_mask") is not None:
            options["attention_mask"] = token_tensor(options["attention_mask"])
        if ids is not None:
            ids = token_tensor(ids)
            check_shapes(ids, options.get("attention_mask"))

        def capture(model: Any, input_ids: Tensor, **prepared: Any) -> Any:
            return captured(runner, input_ids, prepared, seed, stops)

        return type(inner).generate(inner, ids, custom_generate=capture, **options)


def _take_stop_strings(options: dict[str, Any], own: Any, tokenizer: Any) -> StopStrings | None:
    """The stop strings of a call, which are removed from its options, because transformers gives custom decoding no tokenizer.

    own: the model's generation config. ValueError for anything but a list of texts, and without a tokenizer."""
    config = options.get("generation_config")
    in_config = getattr(config, "stop_strings", None)
    default = own.stop_strings if in_config is None else in_config
    given = options.pop("stop_strings", default)
    if in_config is not None:
        bare: Any = copy.deepcopy(config)
        bare.stop_strings = None
        options["generation_config"] = bare
    if own.stop_strings is not None:
        options["stop_strings"] = None
    strings = [given] if isinstance(given, str) else list(given or [])
    if not strings:
        return None
    if any(not isinstance(string, str) or not string for string in strings):
        raise ValueError(f"stop_strings must be texts that are not empty, found {given!r}")
    if tokenizer is None:
        raise ValueError(f"stop_strings={given!r} need the tokenizer: pass tokenizer=")
    return StopStrings(strings, tokenizer)


def _with_common_options(
    runner: ModelRunner, ids: Any, seed: Seed, stops: StopStrings | None, options: dict[str, Any]
) -> GenerateCall | None:
    """The call of one whole row with common options; None for any other."""
    mask, processors = options.get("attention_mask"), options.get("logits_processor")
    is_row = isinstance(ids, Tensor) and ids.ndim == 2 and ids.shape[0] == 1 and ids.numel() > 0 and ids.dtype == torch.int64
    if not (is_row and isinstance(mask, Tensor) and mask.shape == ids.shape and bool((mask == 1).all())):
        return None
    if any(type(one).__module__.startswith("transformers.") for one in processors or ()):
        return None  # they replace those of the same type that the options ask for
    named = {name: value for name, value in options.items() if name not in ("attention_mask", "logits_processor")}
    config = merge_common_options(runner.model.generation_config, named, ids.shape[1])
    if config is None:
        return None
    penalties = [] if config.repetition_penalty in (None, 1.0) else [RepetitionPenalty(config.repetition_penalty)]
    call = GenerateCall(runner, token_tensor(ids), [*penalties, *(processors or ())], config, config.max_length, config.eos)
    call.seed, call.stop_strings, call.has_row_processors = seed, stops, True
    return call


_HOSTS: PerModelCache[Any] = PerModelCache()


def generation_host(model: Any) -> Any:
    """The object whose `generate` merges options: the model itself, or transformers' model without weights for a
    `MappedModel`."""
    if not isinstance(model, MappedModel):
        return model
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    def without_weights() -> Any:
        with torch_defaults.loading(), torch.device("meta"):
            return AutoModelForCausalLM.from_config(AutoConfig.for_model(**model.config.to_dict()))

    host = _HOSTS.get(model, None, without_weights)
    host.generation_config = GenerationConfig.from_dict(model.generation_config.to_dict())
    return host


def unwrap(model: Any) -> Any:
    """The transformers model inside a PEFT wrapper (adapters are in its layers), or the model itself.

    ValueError unless it is a transformers model with a language-modelling head, or a `MappedModel`.
    """
    inner = unwrapped(model)
    if isinstance(inner, MappedModel):
        return inner
    from transformers import PreTrainedModel

    if not isinstance(inner, PreTrainedModel) or not inner.can_generate():
        raise ValueError(
            f"model must be a transformers model with a language-modelling head (AutoModelForCausalLM or skipstone.load), "
            f"found {type(inner).__name__}"
        )
    return inner


def captured(
    runner: ModelRunner, ids: Tensor, prepared: dict[str, Any], seed: Seed = None, stops: StopStrings | None = None
) -> GenerateCall:
    """The call that transformers has prepared for a custom decoding function. ids, prepared: the function's arguments."""
    from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

    processors, criteria = prepared.pop("logits_processor"), prepared.pop("stopping_criteria")
    config = prepared.pop("generation_config")
    limits = [one.max_length for one in criteria if isinstance(one, MaxLengthCriteria)]
    ends = [one.eos_token_id.tolist() for one in criteria if isinstance(one, EosTokenCriteria)]
    others = [one for one in criteria if not isinstance(one, (EosTokenCriteria, MaxLengthCriteria))]
    limit, eos = min(limits or [config.max_length]), frozenset(token for tokens in ends for token in tokens)
    return GenerateCall(runner, token_tensor(ids), processors, config, limit, eos, others, seed, prepared, stops)


@contextmanager
def _without_device_warning() -> Iterator[None]:
    """Suppress a wrong warning: if the first weight is offloaded, transformers expects ids on the meta device."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You are calling .generate")
        yield


def _check_arguments(model: "PreTrainedModel", kwargs: dict[str, Any]) -> None:
    """ValueError for an argument that transformers does not know or drops, or that skipstone does not support."""
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
    if (config := kwargs.get("generation_config")) is not None:
        fields |= {name: value for name, value in config.to_dict().items() if value is not None}
    refuse_fields(fields | kwargs)  # the same priority as in transformers


def token_tensor(ids: Any) -> Any:
    """Integer tensors and numpy arrays as int64 tensors. Other values are returned unchanged; `check_shapes` refuses them."""
    if isinstance(ids, np.ndarray) and ids.dtype.kind in "iu":
        return torch.from_numpy(ids.astype(np.int64))
    if not isinstance(ids, Tensor) or ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        return ids
    return ids.to(torch.int64)


def check_shapes(ids: Any, mask: Any) -> None:
    """ValueError unless ids are integers [B, T] with at least one token, and the mask is None or has their shape."""
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
