"""Which model a verb uses and how it is computed: the options, and the one place that loads a model for a verb."""

import json
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from skipstone.assets import BUNDLED
from skipstone.cli.options import OptionGroup, argument, option

CONFIG = "config.json"  # every folder and repository of a model has it
DTYPES = ("auto", "float32", "bfloat16", "float16")
ENGINES = ("auto", "eager", "native", "compiled")  # as in skipstone.engines, which would import torch
QUANTIZED = ("none", "int8", "int4")  # likewise
KV_DTYPES = ("float32", "bfloat16")  # likewise
NO_CONFIG = ("none", "vllm")  # the second is vLLM's name for it


def _read_generation_config(source: str | None) -> dict[str, Any] | None:
    """--generation-config as fields, None for the model's own."""
    if source in (None, "auto"):
        return None
    if source in NO_CONFIG:
        return {}
    path = Path(source).expanduser() / "generation_config.json"
    if not path.is_file():
        raise ValueError(f"--generation-config must be auto, none or a folder with a generation_config.json, found {source!r}")
    from skipstone.models.generation_config import read_generation_config

    return read_generation_config(path)


def read_overrides(text: str | None) -> dict[str, Any]:
    """--override-generation-config as fields. ValueError for a misspelt field."""
    if text is None:
        return {}
    from skipstone.models.generation_config import misspelt_fields, parse_generation_config

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a misspelt field is an error here
        overrides = parse_generation_config(text, "--override-generation-config")
    for name, meant in misspelt_fields(overrides):
        raise ValueError(f"--override-generation-config: there is no field {name!r}; did you mean {meant}?")
    return overrides


def read_device_map(text: str | None) -> Any:
    """--device-map as transformers takes it: a word, or a JSON object."""
    if text is None or not text.lstrip().startswith("{"):
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--device-map is neither a word nor JSON ({error}), found {text!r}") from None


def expect_model(name: str | None) -> None:
    """OSError if there is no model of this name. It is checked before torch is imported."""
    if name is None:
        return
    from skipstone.models.fetching import fetch, hub_name
    from skipstone.models.gguf import expect_gguf

    path = Path(name).expanduser()
    if path.is_file():
        expect_gguf(path)
    elif path.exists():
        if not (path / CONFIG).exists():
            file = next(path.glob("*.gguf"), None)
            meant = "" if file is None else f"; did you mean {file}?"
            raise FileNotFoundError(2, f"it has no {CONFIG}; a model is such a folder, a .gguf file or a hub id{meant}", name)
    elif hub_name(name) is None:
        raise FileNotFoundError(2, "no such folder, and not a hub id either", name)
    else:
        fetch(name, CONFIG)


MODEL = argument("A folder or a hub id. Default: the bundled model.", None, metavar="MODEL")
DTYPE = option("auto", "auto is the checkpoint's.", choices=DTYPES)
DEVICE = option("auto", "auto is cuda where there is one, else cpu.")
ENGINE = option("auto", "auto is native where it can run the model.", choices=ENGINES)
QUANTIZE = option("none", "what the native engine quantises the weights to.", choices=QUANTIZED)


@dataclass(frozen=True)
class ModelOptions(OptionGroup):
    """A model, its dtype, its device and its engine."""

    model: str | None = MODEL
    dtype: str = DTYPE
    device: str = DEVICE
    engine: str = ENGINE
    quantize: str = QUANTIZE

    @property
    def name(self) -> str:
        """What messages and documents call the model."""
        return self.model or BUNDLED

    def with_absolute_path(self) -> Self:
        """For processes that have another working directory."""
        is_path = self.model is not None and Path(self.model).exists()
        return replace(self, model=str(Path(self.model or "").resolve())) if is_path else self

    def load(self, **arguments: Any) -> tuple[Any, Any]:
        """The model and its tokenizer. arguments: further ones of `skipstone.load`."""
        import torch

        from skipstone.engines import loading

        dtype = self.dtype if self.dtype == "auto" else getattr(torch, self.dtype)
        is_placed = arguments.get("device_map") is not None or arguments.get("tp_plan") is not None
        device = "cpu" if is_placed and self.device == "auto" else loading.usable_device(self.device)
        arguments = {"engine": self.engine, "quantize": self.quantize, "keep_weights": False, **arguments}
        return loading.load(self.model, dtype=dtype, device=device, **arguments)


@dataclass(frozen=True)
class GenerationModelOptions(ModelOptions):
    """A model that answers users: its generation config can be changed."""

    kv_dtype: str | None = option(
        None, "what keys and values are kept in. Default: SKIPSTONE_KV, or float32.", choices=KV_DTYPES
    )
    trust_remote_code: bool = option(False, "Run the checkpoint's own code.", "--trust-remote-code")
    generation_config: Any = option(
        None,
        "auto, the default, takes the model's own generation_config.json, none ignores it, a folder has another one.",
        panel="Decoding",
        read=_read_generation_config,
    )
    override_generation_config: Any = option(
        None,
        'Fields of the generation config to change, as JSON: {"temperature": 0.7}; null unsets one.',
        panel="Decoding",
        read=read_overrides,
    )

    def load(self, **arguments: Any) -> tuple[Any, Any]:
        """As `ModelOptions.load`, with the generation config that the options ask for."""
        from skipstone.engines.loading import generation_defaults

        replacement, overrides = self.generation_config, self.override_generation_config or {}
        arguments |= {"kv_dtype": self.kv_dtype, "trust_remote_code": self.trust_remote_code}
        arguments["generation_config"] = generation_defaults(self.model, replacement, overrides)
        loaded, tokenizer = super().load(**arguments)
        if replacement is not None or overrides:
            from skipstone.hf.generation_defaults import replace_defaults

            replace_defaults(loaded, replacement, overrides)
        return loaded, tokenizer
