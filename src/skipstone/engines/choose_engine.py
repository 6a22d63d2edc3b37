"""Chooses the engine of a model, by the user's options and by which engine can run it, and keeps prepared models."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import repeat
from typing import Any
from weakref import WeakKeyDictionary

import torch

from skipstone.engines.engine import COMPUTE_DTYPES, ENGINES, QUANTIZED, Engine
from skipstone.engines.model_lock import RECOGNITION_LOCK
from skipstone.engines.native import packed_cache
from skipstone.engines.native.engine import NativeEngine, why_not
from skipstone.engines.native.weights import has_bfloat16_matrices, quantised_bytes
from skipstone.models.decoder_model import DecoderModel, unwrapped
from skipstone.models.device_map import hooks
from skipstone.models.mapped_model import MappedModel
from skipstone.models.quantised_checkpoints import warm_up_kernels
from skipstone.models.unsupported import refuse_weights
from skipstone.models.weight_version import model_version
from skipstone.utils.limits import COPIES_SHARE, available_memory_bytes
from skipstone.utils.setup_times import setup_work

VARIABLE = "SKIPSTONE_ENGINE"
"""Environment variable for the engine of models without a setting."""
KV_VARIABLE = "SKIPSTONE_KV"
"""Environment variable for the dtype of keys and values of models without a setting."""
KV_DTYPES: dict[str, torch.dtype | None] = {"float32": None, "bfloat16": torch.bfloat16}
"""Names of dtypes of keys and values, and the dtype of a `KVCache`. "float32" is the dtype of the computation."""


@dataclass(frozen=True)
class EngineOptions:
    """Settings of a model's engine; None leaves a setting open.

    engine: one of ENGINES. quantize: "none", "int8" or "int4", for the native engine's weights. kv_dtype: of stored
    keys and values, "float32" or "bfloat16". compute_dtype: "float32" rounds no input of a matrix product. "bfloat16" rounds
    those of products with bfloat16 weights and needs such weights, unquantised, on the native engine. None rounds where
    "bfloat16" could. keep_weights: False frees the model's own weights once the native engine has its copy. ValueError for
    another value.
    """

    engine: str | None = None
    quantize: str | None = None
    kv_dtype: str | None = None
    compute_dtype: str | None = None
    keep_weights: bool | None = None

    def __post_init__(self) -> None:
        choices = {"engine": ENGINES, "quantize": QUANTIZED, "kv_dtype": KV_DTYPES, "compute_dtype": COMPUTE_DTYPES}
        for name, values in choices.items():
            _expect_choice(name, getattr(self, name), values)

    def over(self, other: "EngineOptions") -> "EngineOptions":
        """These options; settings that they leave open are taken from `other`."""
        return replace(other, **{name: value for name, value in vars(self).items() if value is not None})

    @property
    def quantizes(self) -> bool:
        return self.quantize not in (None, "none")

    @property
    def engine_key(self) -> tuple[str | None, str | None, bool]:
        """Options with the same key have the same engine."""
        may_round = self.engine in ("auto", "native") and not self.quantizes and self.compute_dtype != "float32"
        return self.engine, self.quantize, may_round

    @property
    def for_drafts(self) -> "EngineOptions":
        """These options of a target for weights that draft: they need not be in bfloat16, and are kept or not on their own."""
        compute_dtype = None if self.compute_dtype == "bfloat16" else self.compute_dtype
        return replace(self, compute_dtype=compute_dtype, keep_weights=None)


def _expect_choice(source: str, value: str | None, choices: Any) -> None:
    if value is not None and value not in choices:
        raise ValueError(f"{source} must be one of {', '.join(choices)}, found {value!r}")


_ATTACHED: WeakKeyDictionary[Any, EngineOptions] = WeakKeyDictionary()


def attach(model: Any, options: EngineOptions) -> None:
    """Remember options of a model's engine for as long as the model lives. None keeps an earlier setting."""
    _ATTACHED[unwrapped(model)] = options.over(attached(model))


def attached(model: Any) -> EngineOptions:
    """The options that `load`, `enable` or `attach` has set for a model."""
    return _ATTACHED.get(unwrapped(model), EngineOptions())


def options_for(model: Any, given: EngineOptions) -> EngineOptions:
    """All options of a model's engine: those given, then those attached to the model, then the environment's, then "auto",
    "none" and "float32". ValueError for an unknown name in the environment."""
    return _complete_options(given, attached(model), os.environ.get(VARIABLE), os.environ.get(KV_VARIABLE))


@cache
def _complete_options(given: EngineOptions, own: EngineOptions, engine: str | None, kv_dtype: str | None) -> EngineOptions:
    """`options_for`. own: the model's. engine, kv_dtype: the environment's."""
    options = given.over(own)
    engine, kv_dtype = engine or "auto", kv_dtype or "float32"
    if options.engine is None:
        _expect_choice(VARIABLE, engine, ENGINES)
    if options.kv_dtype is None:
        _expect_choice(KV_VARIABLE, kv_dtype, KV_DTYPES)
    return options.over(EngineOptions(options.engine or engine, "none", options.kv_dtype or kv_dtype))


class PreparedModel:
    """The description of a model and its engines, valid while `state` is the current one. ValueError for a model that skipstone
    does not compute as the model does itself.

    engines: (engine, why "auto" could not take the native engine or None) by `EngineOptions.engine_key`. methods:
    decoding methods that were read and checked for the model, by their callers' arguments.
    """

    @setup_work("model check")
    def __init__(self, model: Any) -> None:
        refuse_weights(model)
        warm_up_kernels(model)
        self.description = DecoderModel(model)
        if not isinstance(model, MappedModel):
            from skipstone.engines.agreement import ensure

            ensure(model, self.description)
        self.engines: dict[tuple[str | None, str | None, bool], tuple[Engine, str | None]] = {}
        self.methods: dict[Any, Any] = {}
        parts = list(model.modules())[1:]  # without the model itself, which would be kept alive
        self._hook_places = [vars(part) for part in parts] if any(map(hooks, parts)) or hooks(model) else []
        self.state = self.current_state(model, model_version(model).modules)

    def current_state(self, model: Any, modules: int) -> tuple[Any, ...]:
        """What the description was made of. modules: the current version of the model's modules (`model_version`)."""
        hook_ids = [*map(id, map(dict.get, self._hook_places, repeat("_hf_hook")))]
        places = repr(getattr(model, "hf_device_map", None)), hook_ids
        return modules, repr(vars(model.config)), places, getattr(model, "hf_quantizer", None)

    def choose_engine(self, options: EngineOptions, model: Any, version: int | None) -> tuple[Engine, str | None]:
        """(the engine of a model, made once; why "auto" could not take the native engine, or None). version: of the current
        weights (`Engine.is_current`).

        ValueError if the native engine is requested, by its name or by `quantize`, and cannot run the model. ValueError if
        `compute_dtype` is "bfloat16" and the engine would round nothing.
        """
        chosen = self.engines.get(key := options.engine_key)
        if chosen is not None and (chosen[1] is not None or not chosen[0].is_current(version)):  # native may be possible now
            chosen = None
        if options.compute_dtype == "bfloat16" and (chosen is None or not chosen[0].rounds_inputs):
            self._expect_rounding(options, model)
        if chosen is None:
            chosen = self.engines[key] = self._make_engine(options, model, version)
        return chosen

    def _make_engine(self, options: EngineOptions, model: Any, version: int | None) -> tuple[Engine, str | None]:
        if options.engine in ("eager", "compiled"):
            if options.quantizes:
                raise ValueError(
                    f"quantize={options.quantize!r}, asked for now or when the model was loaded, needs the native engine, "
                    f"found engine={options.engine!r}"
                )
            return _engine_of_modules(options.engine, model, self.description), None
        reason = why_not(model, self.description)
        if options.engine == "native":
            if reason is not None:
                raise ValueError(f"engine='native' cannot run this model: {reason}; take engine='auto' or 'eager'")
            quantize = options.quantize if options.quantizes else None
            with setup_work(f"{quantize} copy" if quantize else "packed weights"):
                mapped = None if quantize is None else self.map_copy(quantize, model)
                return mapped or self._make_native(model, options, version), None
        if reason is None:
            return self.choose_engine(EngineOptions("native").over(options), model, version)
        if options.quantizes:
            raise ValueError(f"quantize={options.quantize!r} needs the native engine, which cannot run this model: {reason}")
        return self.choose_engine(EngineOptions("eager").over(options), model, version)[0], reason

    def _expect_rounding(self, options: EngineOptions, model: Any) -> None:
        """ValueError if no product would round its inputs to bfloat16."""
        if options.quantizes:
            missing = f"weights that are not quantised, found quantize={options.quantize!r}"
        elif options.engine not in ("auto", "native"):
            missing = f"the native engine, found engine={options.engine!r}"
        elif (reason := why_not(model, self.description)) is not None:
            missing = f"the native engine, which cannot run this model: {reason}"
        elif has_bfloat16_matrices(model):
            return
        else:
            missing = "bfloat16 weights, and this model has none"
        raise ValueError(f"compute_dtype='bfloat16', asked for now or when the model was loaded, needs {missing}")

    def _make_native(self, model: Any, options: EngineOptions, version: int | None) -> NativeEngine:
        """A native engine. Engines without quantised weights share their panels."""
        keep_weights, rounds = options.keep_weights is not False, options.compute_dtype != "float32"
        quantize = options.quantize if options.quantizes else None
        others = (engine for engine, _ in self.engines.values() if isinstance(engine, NativeEngine))
        same = (one.panels for one in others if quantize is None is one.quantize and one.is_current(version))
        of_another = model.shared_panels if isinstance(model, MappedModel) else {}
        return NativeEngine(
            model, self.description, quantize, keep_weights, rounds_inputs=rounds, shared_panels=next(same, of_another)
        )

    def make_copy(self, model: Any, quantize: str, pause: Callable[[], None]) -> NativeEngine:
        """A native engine with quantised weights, which is not kept. pause: as in `NativeWeights`."""
        return NativeEngine(model, self.description, quantize, pause=pause)

    @property
    def copies(self) -> dict[str, NativeEngine]:
        """The native engines with quantised weights, by their quantisation. Any thread may ask."""
        made = [engine for engine, _ in list(self.engines.values()) if isinstance(engine, NativeEngine)]
        return {engine.quantize: engine for engine in made if engine.quantize is not None}

    def add_copy(self, quantize: str, engine: NativeEngine) -> None:
        """Keep a native engine with quantised weights."""
        self.engines[EngineOptions("native", quantize).engine_key] = engine, None

    def map_copy(self, quantize: str, model: Any) -> NativeEngine | None:
        """A native engine with quantised weights from the disk's cache, which is not kept; None if it has none."""
        if not isinstance(model, MappedModel) or not model.caches_panels:
            return None
        if (cached := packed_cache.read(model.files.identity, quantize)) is None:
            return None
        try:
            return NativeEngine(model, self.description, quantize, cached=cached)
        except LookupError:  # panels of other sizes
            return None


def _engine_of_modules(name: str, model: Any, description: DecoderModel) -> Engine:
    """The eager or the compiled engine. ValueError for a model whose modules have no forward."""
    if isinstance(model, MappedModel) and not model.has_forward:
        raise ValueError(f"engine={name!r} needs transformers' modules, and this model was loaded for the native engine only")
    if name == "eager":
        from skipstone.engines.eager.eager import EagerEngine

        return EagerEngine(model, description)
    from skipstone.engines.compiled import CompiledEngine

    return CompiledEngine(model, description)


_PREPARED: WeakKeyDictionary[Any, PreparedModel] = WeakKeyDictionary()


def prepare_model(model: Any, modules: int) -> PreparedModel:
    """The prepared model, prepared again after changes. modules: as in `PreparedModel.current_state`."""
    prepared = _PREPARED.get(model)
    if prepared is None or prepared.state != prepared.current_state(model, modules):
        with RECOGNITION_LOCK:  # recognition changes configs, which models may share
            if prepared is None or prepared.state != prepared.current_state(model, modules):
                prepared = _PREPARED[model] = PreparedModel(model)
    return prepared


def copies_of(model: Any) -> dict[str, int]:
    """Bytes of a model's copies in fewer bits that exist in this process, by their quantisation."""
    prepared, own = _PREPARED.get(model), attached(model).quantize
    copies = {} if prepared is None else prepared.copies
    return {name: engine.nbytes for name, engine in copies.items() if name != own}


def missing_room_for_copy(model: Any, quantize: str, max_bytes: int | None = None) -> str | None:
    """Why there is no memory for a copy of the weights in fewer bits; None if there is. max_bytes: of all copies together; None
    for a share of the free memory."""
    made = copies_of(model)
    if quantize in made:
        return None
    needed = quantised_bytes(model, quantize)
    allowed = int(COPIES_SHARE * available_memory_bytes()) if max_bytes is None else max_bytes - sum(made.values())
    if needed <= allowed:
        return None
    return (
        f"a copy of the weights in {quantize} needs {needed} bytes, and {max(allowed, 0)} are allowed: draft without "
        "draft_quantize, or load the model with quantize"
    )
