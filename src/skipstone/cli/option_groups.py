"""The groups of options that several verbs share: the model, the method, texts to measure with, sampling; and users' files.

What needs no model is checked before torch is imported. `ModelOptions.load` is the one place that loads a model for a verb.
"""

import json
import os
import warnings
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from skipstone.assets import BUNDLED
from skipstone.cli.method_table import known_methods
from skipstone.cli.options import OptionGroup, argument, option
from skipstone.decoding import method_text
from skipstone.decoding.method_text import Known, MethodMissing


def expect_parent_folder(*files: Path | None) -> None:
    """FileNotFoundError if the folder of an output file does not exist."""
    for file in files:
        if file is not None and not file.absolute().parent.is_dir():
            raise FileNotFoundError(2, "no such folder", str(file.parent))


def expect_folder(folder: Path | None) -> None:
    """FileNotFoundError for a folder that does not exist."""
    if folder is not None and not folder.is_dir():
        raise FileNotFoundError(2, "no such folder", str(folder))


def expect_readable(*files: Path | None) -> None:
    """OSError for a file that cannot be read."""
    for file in files:
        if file is not None:
            file.open("rb").close()


def expect_writable(*files: Path | None) -> None:
    """OSError for a file that cannot be written."""
    expect_parent_folder(*files)
    for file in files:
        if file is not None and file.is_dir():
            raise IsADirectoryError(21, "a folder; name a file", str(file))
        if file is not None and not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
            raise PermissionError(13, "no permission to write it", str(file))


def _read_device_map(text: str | None) -> Any:
    """--device-map as transformers takes it: a word, or a JSON object."""
    if text is None or not text.lstrip().startswith("{"):
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--device-map is neither a word nor JSON ({error}), found {text!r}") from None


CONFIG = "config.json"  # every folder and repository of a model has it
DTYPES = ("auto", "float32", "bfloat16", "float16")
ENGINES = ("auto", "eager", "native", "compiled")  # as in skipstone.engines, which would import torch
QUANTIZED = ("none", "int8", "int4")  # likewise
KV_DTYPES = COMPUTE_DTYPES = ("float32", "bfloat16")  # likewise
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


def expect_model(name: str | None) -> None:
    """OSError if there is no model of this name. It is checked before torch is imported."""
    if name is None:
        return
    from skipstone.models.fetching import fetch, hub_name, local_model
    from skipstone.models.gguf.reader import expect_gguf

    path = Path(local_model(name)).expanduser()
    if path.is_file():
        expect_gguf(path)
    elif path.exists():
        if not (path / CONFIG).exists():
            file = next(path.glob("*.gguf"), None)
            meant = "" if file is None else f"; did you mean {file}?"
            raise FileNotFoundError(2, f"it has no {CONFIG}; a model is such a folder, a .gguf file or a hub id{meant}", name)
    elif hub_name(name) is None:
        raise FileNotFoundError(2, "no such folder or file, and not a hub id either", name)
    else:
        fetch(name, CONFIG)


MODEL = argument("A folder, a hub id or a .gguf file. Default: the bundled model.", None, metavar="MODEL")
DTYPE = option("auto", "auto is the checkpoint's.", choices=DTYPES)
DEVICE = option("auto", "auto is cuda where there is one, else cpu.")
ENGINE = option("auto", "auto is native where it can run the model.", choices=ENGINES)
DEVICE_MAP = option(None, 'Layers on several devices: "auto", or JSON of modules and devices.', read=_read_device_map)
QUANTIZE = option("none", "what the native engine quantises the weights to.", choices=QUANTIZED)


@dataclass(frozen=True)
class ModelOptions(OptionGroup):
    """A model, its dtype, its device and its engine."""

    model: str | None = MODEL
    dtype: str = DTYPE
    device: str = DEVICE
    engine: str = ENGINE
    quantize: str = QUANTIZE
    compute_dtype: str | None = option(
        None,
        "float32 rounds no input of a matrix product. Default: bfloat16 for bfloat16 weights on the native engine.",
        choices=COMPUTE_DTYPES,
    )
    no_mtp: bool = option(False, "Leave out the checkpoint's layer for multi-token prediction (MTP).", "--no-mtp")

    @property
    def name(self) -> str:
        """What messages and documents call the model."""
        return self.model or BUNDLED

    def with_absolute_path(self) -> Self:
        """For processes that have another working directory."""
        is_path = self.model is not None and Path(self.model).exists()
        return replace(self, model=os.path.abspath(self.model or "")) if is_path else self

    def load(self, **arguments: Any) -> tuple[Any, Any]:
        """The model and its tokenizer. arguments: further ones of `skipstone.load`. A GGUF file stays packed."""
        from skipstone.engines.mapped_loading import load_to_measure

        return load_to_measure(self.model, **self._arguments(**{"keep_weights": False, **arguments}))

    def _arguments(self, **arguments: Any) -> dict[str, Any]:
        """Keyword arguments of `skipstone.load`."""
        import torch

        from skipstone.models.device_map import usable_device

        dtype = self.dtype if self.dtype == "auto" else getattr(torch, self.dtype)
        is_placed = arguments.get("device_map") is not None or arguments.get("tp_plan") is not None
        device = "cpu" if is_placed and self.device == "auto" else usable_device(self.device)
        own = {"engine": self.engine, "quantize": self.quantize, "compute_dtype": self.compute_dtype, "mtp": not self.no_mtp}
        return {"dtype": dtype, "device": device, **own, **arguments}


@dataclass(frozen=True)
class GenerationModelOptions(ModelOptions):
    """A model that answers users: its generation config can be changed."""

    kv_dtype: str | None = option(None, "of keys and values. Default: SKIPSTONE_KV, or float32.", choices=KV_DTYPES)
    trust_remote_code: bool = option(False, "Run the checkpoint's own code.", "--trust-remote-code")
    no_cache: bool = option(False, "Keep no quantised weights on the disk, and read none.", "--no-cache")
    generation_config: Any = option(
        None,
        "auto, the default, takes the model's own generation_config.json, none ignores it, a folder has another one.",
        rich_help_panel="Decoding",
        read=_read_generation_config,
    )
    override_generation_config: Any = option(
        None,
        'Fields of the generation config to change, as JSON: {"temperature": 0.7}; null unsets one.',
        rich_help_panel="Decoding",
        read=read_overrides,
    )

    def load(self, **arguments: Any) -> tuple[Any, Any]:
        """As `ModelOptions.load`, with the generation config that the options ask for, and without transformers if possible."""
        from skipstone.engines.mapped_loading import load_for_decoding

        replacement, overrides = self.generation_config, self.override_generation_config or {}

        def generation_config() -> Any:
            from skipstone.engines.loading import generation_defaults

            return generation_defaults(self.model, replacement, overrides)

        arguments |= {"kv_dtype": self.kv_dtype, "trust_remote_code": self.trust_remote_code}
        arguments |= {"generation_config": generation_config, "cache": not self.no_cache}
        loaded, tokenizer = load_for_decoding(self.model, **self._arguments(**arguments))
        if replacement is not None or overrides:
            from skipstone.hf.generation_defaults import replace_defaults

            replace_defaults(loaded, replacement, overrides)
        return loaded, tokenizer


@dataclass(frozen=True)
class MethodOptions(OptionGroup, panel="Method"):
    """A method as text, as JSON, or both."""

    method: str | None = option(None, '"layerskip exit_layer=4", or JSON (`skipstone methods`). Default: the model\'s own.')
    speculative_config: str | None = option(None, 'As in vLLM: {"method": "layerskip"}. It must not contradict --method.')

    def parse(self) -> Any:
        """The method as `skipstone.generate` takes it. ValueError for names and types that are wrong for any model."""
        known = known_methods()
        if self.speculative_config is None:
            if self.method is not None:
                check_method_text(self.method, known)
            return self.method
        merged = _merge(self.method, self.speculative_config, known)
        with suppress(MethodMissing):
            method_text.check_names(merged, known)
        return merged

    def parse_for(self, model: str | None) -> Any:
        """As `parse`. The model must exist, and values that are wrong for any model are ValueErrors. It imports torch."""
        method = self.parse()
        expect_model(model)
        check_method_values(method)
        return method


def check_method_text(text: str, known: Known, labels: tuple[str, ...] = (), several: bool = False) -> None:
    """ValueError if a method's text has names or types that are wrong for any model."""
    with suppress(MethodMissing):  # the model's own may be meant
        method_text.check_names(method_text.parse(text, known, None, labels, several), known, labels)


def check_method_values(method: Any) -> None:
    """ValueError for values of settings that are wrong for any model. It imports torch."""
    if method is None:
        return
    from skipstone.methods import resolve

    with warnings.catch_warnings(), suppress(MethodMissing):
        warnings.simplefilter("ignore")  # it is resolved again with the model's own method, and warns then
        resolve(method)


def _merge(text: str | None, config: str, known: Known) -> dict[str, Any]:
    """--speculative-config and --method together. ValueError if they contradict each other."""
    try:
        merged = json.loads(config)
    except json.JSONDecodeError as error:
        raise ValueError(f"--speculative-config is not JSON ({error}), found {config!r}") from None
    if not isinstance(merged, dict):
        raise ValueError(f'--speculative-config must be an object such as {{"method": "layerskip"}}, found {config!r}')
    own = merged.get("method")
    settings = {} if text is None else method_text.parse(text, known, own if isinstance(own, str) and own in known else None)
    for key, value in settings.items():
        if merged.setdefault(key, value) != value:
            name = "" if key == "method" else f"{key}="
            raise ValueError(f"--method says {name}{value!r}, --speculative-config says {merged[key]!r}: give one of them")
    return merged


def expect_prompt_files(*files: Path) -> None:
    """OSError or ValueError for anything but files of JSON lines."""
    expect_readable(*files)
    for file in files:
        if file.suffix != ".jsonl":
            raise ValueError(f"--prompts takes JSON lines, a file that ends in .jsonl, found {file}")


@dataclass(frozen=True)
class PromptOptions(OptionGroup):
    """Texts to measure with: given one by one, in files, or bundled."""

    prompt: list[str] | None = option(None, "A text to decode; several times. Default: bundled prompts.")
    prompts: list[Path] | None = option(None, 'JSON lines with a "prompt", instead of --prompt; several times.')

    def texts(self) -> list[str]:
        """All texts; every fifth bundled one by default. ValueError if both options are given, and for an empty text."""
        from skipstone.lab.tasks.data_sets import named

        if self.prompt and self.prompts:
            raise ValueError("give either --prompt or --prompts, found both")
        expect_prompt_files(*(self.prompts or ()))
        texts = self.prompt
        if not texts:
            tasks = [(named(str(file)), 1) for file in self.prompts or ()] or [(named("self"), 5)]
            texts = [task.ask(row)[0] for task, stride in tasks for row in task.records(None)[::stride]]
        if "" in texts:
            raise ValueError("a prompt is empty: there is no token to start from")
        return texts


def encode_texts(texts: list[str], tokenizer: Any) -> list[Any]:
    """The token ids of texts, [T] int64 each."""
    import torch

    from skipstone.hf.api import token_ids

    return [torch.tensor(token_ids(text, tokenizer), dtype=torch.int64, device="cpu") for text in texts]


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
