"""Loads models and tokenizers from folders and from the hub, completely or not at all."""

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils.hub import cached_file

from skipstone.assets import BUNDLED as BUNDLED
from skipstone.assets import NANO
from skipstone.engines.choose_engine import EngineOptions, attach
from skipstone.engines.host_transfer import out_of_memory
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.mtp_head import attach_mtp
from skipstone.models import torch_defaults
from skipstone.models import unpacked_gguf as gguf
from skipstone.models.checkpoints import auto_class, expect_fit
from skipstone.models.device_map import usable_device
from skipstone.models.fetching import cached_folder, choose_gguf_error, hub_name, local_model, not_found_error
from skipstone.models.generation_config import FILE, KEPT_DEFAULTS, read_generation_config, refuse_small_values
from skipstone.models.gguf.reader import GgufError, GgufFile, expect_gguf
from skipstone.models.known_types import REFUSED
from skipstone.models.quantised_checkpoints import expect_loadable
from skipstone.models.tensor_parallel import cannot_share
from skipstone.models.unsupported import refuse_sizes
from skipstone.models.vocabularies import COMMIT
from skipstone.utils.extras import installed

EXPORT = "export.json"  # describes an exported model: the source model and the exported part
MAX_CAUSE_CHARACTERS = 200
"""Length at which a library's message is cut off."""
OF_CHECKPOINT = "correct its config.json, or fetch its files again, the weights as safetensors"
OF_CONFIG = "correct it, or fetch it again"
OF_TOKENIZER = "fetch its tokenizer.json and tokenizer_config.json again"
"""Remedies for files that cannot be loaded."""
DeviceMap = str | Mapping[str, Any] | None
"""transformers' `device_map`: a strategy, or devices by module names."""


def load(  # noqa: PLR0913
    name: str | Path | None = None,
    *,
    dtype: torch.dtype | str = "auto",
    device: str | torch.device = "cpu",
    device_map: DeviceMap = None,
    offload_folder: str | Path | None = None,
    tp_plan: str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    engine: str = "auto",
    quantize: str | None = None,
    kv_dtype: str | None = None,
    compute_dtype: str | None = None,
    keep_weights: bool = True,
    generation_config: GenerationConfig | None = None,
    mtp: bool = True,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model, ready to decode, and its tokenizer.

    name: a folder, a hub id (ORG/NAME or ORG/NAME@REVISION; with :Q4_K_M a GGUF file of the repository) or a .gguf file; None
    for the bundled model, skipstone-nano.
    dtype: of the weights; "auto" is the checkpoint's, and float32 for the bundled model and for .gguf files, which are
    unpacked. Other weights are read from safetensors only.
    device_map: places layers on several devices, on the CPU or on disk: transformers' "auto", or module names and devices.
    offload_folder: folder of the weights on disk.
    tp_plan: "auto" shards the weights over the processes of torchrun, each on its own accelerator or on the CPU.
    engine: "eager", "native" or "compiled"; "auto" is the environment variable SKIPSTONE_ENGINE, else native if possible, else
    eager.
    quantize: "int8" or "int4" quantises the native engine's copy of the weights; None or "none" does not.
    kv_dtype: of keys and values, "float32" or "bfloat16" (half the memory, rounded); None is the environment variable
    SKIPSTONE_KV, else float32.
    compute_dtype: "float32" rounds no input of a matrix product. "bfloat16" rounds those of the native engine's products with
    bfloat16 weights and nothing else; CPUs with such products read prompts faster then. It needs that engine and such weights,
    not quantised. None rounds wherever "bfloat16" could.
    keep_weights: False if only skipstone decodes with the model. The native engine's copy of the matrices is then the only one.
    A read unpacks it, and a change in place is a RuntimeError. Other engines keep the weights.
    generation_config: replaces the model's own generation_config.json, which is not read then.
    mtp: False leaves out the checkpoint's layer for multi-token prediction, and saves its memory. Drafts need it, texts do not.

    OSError if nothing is found. ValueError for a corrupt or incomplete checkpoint, an invalid engine or dtype, a quantize or
    compute_dtype that the native engine cannot do for the model, and untested quantised kernels. ImportError with installation
    advice if a package is missing.
    """
    name_of_engine = None if engine == "auto" else engine
    engine_options = EngineOptions(name_of_engine, quantize, kv_dtype, compute_dtype, keep_weights)  # validates first
    if name is None:
        name, dtype = NANO, torch.float32 if dtype == "auto" else dtype
    options: dict[str, Any] = {"attn_implementation": attn_implementation, "trust_remote_code": trust_remote_code}
    options |= {"device": device, "device_map": device_map, "offload_folder": offload_folder, "tp_plan": tp_plan}
    options |= {"generation_config": generation_config}
    model, tokenizer = load_model(name, dtype=dtype, **options), load_tokenizer(name, trust_remote_code)
    attach(model, engine_options)
    if "gguf_file" not in _locate(name)[1]:
        attach_mtp(model, mtp)
    if engine_options.quantizes or compute_dtype or not keep_weights:
        ModelRunner(model)  # quantises or raises, and gives the weights up
    return model, tokenizer


def load_model(  # noqa: PLR0913
    name: str | Path,
    *,
    dtype: torch.dtype | str = "auto",
    device: str | torch.device = "cpu",
    device_map: DeviceMap = None,
    offload_folder: str | Path | None = None,
    tp_plan: str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    generation_config: GenerationConfig | None = None,
) -> PreTrainedModel:
    """The model alone, as `load` loads it."""
    name, options = _locate(name)
    revision = options.get("revision")
    place, placed = usable_device(device), _placement(name, device, device_map, offload_folder, tp_plan, revision)
    options |= {"trust_remote_code": trust_remote_code, **placed}
    if attn_implementation is not None:
        if "flash" in attn_implementation:  # before transformers reports a missing package
            raise ValueError(
                f"attn_implementation={attn_implementation!r} is not supported: load with attn_implementation='sdpa'"
            )
        options["attn_implementation"] = attn_implementation
    if "gguf_file" in options:
        path = Path(name, options.pop("gguf_file"))
        with _explained_errors(f"the GGUF file {path}", "fetch it again", name), torch_defaults.loading():
            model = gguf.load_model(path, dtype, **options)
    else:
        model = _load_checkpoint(name, dtype, generation_config, options)
    return (model if placed else model.to(place)).eval()  # pyright: ignore[reportArgumentType]


def _load_checkpoint(
    name: str, dtype: torch.dtype | str, generation_config: GenerationConfig | None, options: dict[str, Any]
) -> PreTrainedModel:
    """A model of a folder or a hub id. options: of `from_pretrained`."""
    revision, trust_remote_code = options.get("revision"), options["trust_remote_code"]
    config = _read_config(name, revision)
    auto = _auto_class(name, config, trust_remote_code)
    if generation_config is not None:
        options["generation_config"] = generation_config
    elif (values := _read_defaults(name, revision)) is not None:
        build_generation_config(values, f"{FILE} of {name}")  # checks it
    expect_loadable(config.get("quantization_config"))
    with _explained_errors(f"the checkpoint {name}", OF_CHECKPOINT, name, config), torch_defaults.loading():
        loaded: Any = auto.from_pretrained(
            name, dtype=dtype, use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    model, report = loaded
    expect_fit(name, config.get("model_type"), model, report)
    if not Path(name).exists() and (folder := cached_folder(name, revision, "config.json")) is not None:
        setattr(model.config, COMMIT, folder.name)
    return model


@contextmanager
def _explained_errors(what: str, remedy: str, place: str, config: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Turn any error of a library that reads files into one sentence, as an OSError or a ValueError.

    what: name of the files. remedy: for incomplete files. place: as in `_locate`. config: its values, to explain the cause. The
    system's OSErrors, which name the file, errors about GGUF files and missing packages pass unchanged.
    """
    try:
        yield
    except (ImportError, GgufError):
        raise
    except Exception as error:  # libraries fail in any way on unexpected contents
        if (reason := out_of_memory(error)) is not None:
            raise type(error)(f"{what} cannot be loaded: {reason}") from error
        if isinstance(error, OSError) and error.filename is not None:
            raise
        if isinstance(error, OSError) and not Path(place).exists() and (choose_gguf := choose_gguf_error(place)) is not None:
            raise choose_gguf from error
        guess = "if no option is wrong," if type(error) is ValueError else "a file is corrupt, missing or does not fit:"
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(f"{what} cannot be loaded ({_cause(error, config or {})}): {guess} {remedy}") from error


def _cause(error: Exception, config: Mapping[str, Any]) -> str:
    """A library's message with the type of its error, or the config's field with the missing key as its value."""
    if isinstance(error, KeyError):
        for field, value in _fields(config):
            if value == error.args[0]:
                return f"transformers {transformers.__version__} does not know {field} = {value!r}"
    kind = "" if isinstance(error, OSError) or type(error) is ValueError else f"{type(error).__name__}: "
    return shorten(f"{kind}{error}", MAX_CAUSE_CHARACTERS, placeholder="...")


def _fields(config: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values of a config, including nested objects."""
    for name, value in config.items():
        yield before + name, value
        if isinstance(value, Mapping):
            yield from _fields(value, f"{before}{name}.")


def _placement(
    name: str,
    device: str | torch.device,
    device_map: DeviceMap,
    offload_folder: str | Path | None,
    tp_plan: str | None,
    revision: str | None,
) -> dict[str, Any]:
    """Options of `from_pretrained` for several devices; none for one. ValueError for impossible combinations."""
    if device_map is None and tp_plan is None:
        if offload_folder is not None:
            raise ValueError("offload_folder is where a device_map sends weights to disk: give device_map, too")
        return {}
    if device_map is not None and tp_plan is not None:
        raise ValueError("device_map is for one process on several devices, tp_plan for several processes: give one of them")
    if str(device) != "cpu":
        what = "device_map" if tp_plan is None else "tp_plan"
        raise ValueError(f"{what} places the weights, found device={str(device)!r} as well: give one of them")
    if tp_plan is not None:
        return _tensor_parallel_options(name, tp_plan, revision)
    installed("accelerate", "a device_map needs accelerate", "train")
    return {"device_map": device_map} | ({} if offload_folder is None else {"offload_folder": str(offload_folder)})


def _tensor_parallel_options(name: str, tp_plan: str, revision: str | None) -> dict[str, Any]:
    """Options of `from_pretrained` for tensor parallelism. ValueError if the processes cannot share the model."""
    if tp_plan != "auto":
        raise ValueError(f'tp_plan must be "auto" or None, found {tp_plan!r}')
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise ValueError(
            'tp_plan="auto" shares a model among processes, found a single one: start them by `torchrun --nproc-per-node N`'
        )
    config = AutoConfig.from_pretrained(name, revision=revision).get_text_config(decoder=True)
    size = int(os.environ["WORLD_SIZE"])
    if size == 1:
        return {}
    if (reason := cannot_share(config, size)) is not None:
        raise ValueError(reason)
    return {"distributed_config": DistributedConfig(tp_plan="auto")}


def _read_config(name: str, revision: str | None) -> dict[str, Any]:
    """The config of a checkpoint as plain JSON values. OSError without one, so that an unreachable hub is tried only once."""
    try:
        with _explained_errors(f"the config.json of {name}", OF_CONFIG, name):
            config = PreTrainedConfig.get_config_dict(name, revision=revision)[0]
            if not isinstance(config, dict):  # transformers does not check it
                raise TypeError(f"expected a JSON object of settings, found {config!r}")
    except OSError as error:
        if Path(name).exists():
            raise
        raise not_found_error(name if revision is None else f"{name}@{revision}", error, "config.json") from error
    if not config and not Path(name).exists() and (choose_gguf := choose_gguf_error(name)) is not None:
        raise choose_gguf
    text = config.get("text_config")
    refuse_sizes(SimpleNamespace(**(text if isinstance(text, dict) else config)), f"the checkpoint {name}")
    return config


def generation_defaults(
    name: str | Path | None, replacement: Mapping[str, Any] | None, overrides: Mapping[str, Any]
) -> GenerationConfig | None:
    """The generation_config for `load`, without invalid fields that are replaced or overridden anyway.

    replacement, overrides: as in `replace_defaults`. None if nothing changes, or if the model has no generation_config.json.
    ValueError for values that a GenerationConfig does not allow.
    """
    place, options = _locate(NANO if name is None else name)
    if "gguf_file" in options or (replacement is None and not overrides):
        return None
    revision = options.get("revision")
    try:
        own = _read_defaults(place, revision)
    except ValueError:
        if replacement is None:
            raise
        own = {}  # the broken file is replaced
    if own is None:
        return None
    if replacement is not None:
        config = _read_config(place, revision)
        own = {**{field: own.get(field, config.get(field)) for field in KEPT_DEFAULTS}, **replacement}
    return build_generation_config({**own, **overrides}, "the chosen generation config")


def _read_defaults(name: str, revision: str | None) -> dict[str, Any] | None:
    """The fields of a model's generation_config.json, None without one. ValueError for a broken file (transformers would ignore
    it)."""
    missing: Any = dict.fromkeys((f"_raise_exceptions_for_{what}" for what in ("missing_entries", "connection_errors")), False)
    path = cached_file(name, FILE, revision=revision, **missing)
    return None if path is None else read_generation_config(Path(path))


def build_generation_config(values: dict[str, Any], source: str) -> GenerationConfig:
    """Build a GenerationConfig. ValueError with a remedy for values that it does not allow."""
    try:
        refuse_small_values(values)
        return GenerationConfig.from_dict(values)
    except (ValueError, TypeError) as error:
        remedy = "correct it, or choose other defaults with --generation-config or --override-generation-config"
        raise ValueError(f"{source} cannot be used ({str(error).rstrip('.')}): {remedy}") from error


def _auto_class(name: str, config: dict[str, Any], trust_remote_code: bool) -> Any:
    """transformers' class for a checkpoint. config: as JSON values. ValueError for a model type that skipstone cannot decode,
    before its weights are loaded."""
    kind = config.get("model_type")
    if not isinstance(kind, str):
        found = "no model_type" if kind is None else f"the model_type {kind!r}"
        raise ValueError(
            f'the config.json of {name} has {found}, expected a type that `skipstone families` lists, such as "llama": '
            "it is no transformers model, or its config.json is not whole"
        )
    if kind in REFUSED:
        raise ValueError(f"{kind} {REFUSED[kind]}")
    if kind in CONFIG_MAPPING:
        return auto_class(kind)
    if config.get("auto_map") and not trust_remote_code:
        raise ValueError(
            f"{name} brings modelling code of its own for the type {kind!r}; skipstone decodes transformers' own models only, "
            "and runs no code of a checkpoint"
        )
    raise ValueError(
        f"transformers {transformers.__version__} does not know the model type {kind!r}; `skipstone families` lists those that "
        "it knows, and a newer transformers may know more"
    )


def load_tokenizer(name: str | Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer alone, as `load` loads it."""
    place, options = _locate(name)
    with _explained_errors(f"the tokenizer of {name}", OF_TOKENIZER, place):
        if "gguf_file" in options:
            return gguf.load_tokenizer(Path(place, options["gguf_file"]))
        return AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code, **options)


def expect_config(name: str | Path) -> None:
    """OSError or ValueError if a name has no readable config. Loads nothing else."""
    place, options = _locate(name)
    if "gguf_file" in options:
        GgufFile(Path(place, options["gguf_file"]))
        return
    _read_config(place, options.get("revision"))
    with _explained_errors(f"the config of {name}", OF_CONFIG, place):
        AutoConfig.from_pretrained(place, **options)


def _locate(name: str | Path) -> tuple[str, dict[str, Any]]:
    """(folder or repository, options of transformers: the name of a GGUF file or the revision of a hub id). OSError for other
    names."""
    path = Path(local_model(name)).expanduser()
    if path.is_file():
        expect_gguf(path)
        return str(path.parent), {"gguf_file": path.name}
    if path.exists():
        return str(path), {}
    meant = hub_name(name)
    if meant is None:
        raise FileNotFoundError(errno.ENOENT, "no such folder or file, and not a hub id either", str(name))
    return meant.repo, {} if meant.revision is None else {"revision": meant.revision}
