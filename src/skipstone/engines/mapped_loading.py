"""Loads a model for decoding: without transformers where the native engine runs it, else as `loading.load` does."""

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from skipstone.assets import NANO
from skipstone.engines.choose_engine import VARIABLE, EngineOptions, attach
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.native import library, packed_cache
from skipstone.engines.native.weights import BLOCKS, QUANTIZED, embedding_bytes, packed_weights, quantised_bytes, tensor_paths
from skipstone.models.fetching import local_model
from skipstone.models.generation_config import FILE, GenerationFields, read_generation_config
from skipstone.models.gguf.reader import GgufFile
from skipstone.models.gguf.tokenizer import gguf_tokenizer
from skipstone.models.gguf.weights import GgufWeights
from skipstone.models.mapped_config import MappedConfig, UnmappableError
from skipstone.models.mapped_gguf import gguf_path, map_gguf
from skipstone.models.mapped_model import MappedModel
from skipstone.models.tokenizer import FURTHER_FILES, read_tokenizer
from skipstone.models.vocabularies import COMMIT
from skipstone.models.weight_files import weight_files
from skipstone.utils.limits import available_memory_bytes
from skipstone.utils.progress import progress_line

CONFIG = "config.json"
UNREADABLE = (UnmappableError, SafetensorError, OSError, ValueError, LookupError, TypeError, AttributeError)
"""Errors of a checkpoint's folder that is not as expected. transformers loads it or says what is wrong."""


def load_for_decoding(  # noqa: PLR0913
    name: str | Path | None = None,
    *,
    dtype: torch.dtype | str = "auto",
    device: str | torch.device = "cpu",
    engine: str = "auto",
    quantize: str | None = None,
    kv_dtype: str | None = None,
    compute_dtype: str | None = None,
    cache: bool = True,
    generation_config: Callable[[], Any] = lambda: None,
    mtp: bool = True,
    **others: Any,
) -> tuple[Any, Any]:
    """A model, ready to decode, and its tokenizer. Only skipstone decodes with the model.

    It is a `MappedModel` if the native engine runs it, else a PreTrainedModel. The first start of a hub id downloads it through
    transformers. Arguments and errors are those of `loading.load`. cache: quantised weights may be read
    from the disk's cache, and written there. generation_config: makes that argument.
    """
    name_of_engine = None if engine == "auto" else engine
    engine_options = EngineOptions(name_of_engine, quantize, kv_dtype, compute_dtype, keep_weights=False)  # validates
    keep_weights = others.pop("keep_weights", False)  # of a model that transformers loads
    wants_native = (os.environ.get(VARIABLE) or "auto" if engine == "auto" else engine) in ("auto", "native")
    is_plain = torch.device(device).type == "cpu" and not any(others.values())
    if wants_native and is_plain and library.missing() is None:
        try:
            model, place = read_model(name, dtype)
        except UnmappableError as error:
            if name is not None and gguf_path(local_model(name)) is not None:
                warnings.warn(f"{name} {error}: transformers unpacks it", RuntimeWarning, stacklevel=2)
        else:
            tokenizer = _tokenizer_of(place)
            attach(model, engine_options)
            model.caches_panels = cache
            expect_memory(model, quantize)
            num_weights = sum(one.numel() for one in packed_weights(model))
            with progress_line("packing the weights", num_weights) as model.report_packed:
                engine_of_model: Any = ModelRunner(model).engine  # packs the weights
            model.report_packed = None
            warn_of_floats(model, quantize)
            with progress_line("writing the quantised weights", engine_of_model.nbytes) as report_written:
                engine_of_model.cache_panels(model, report_written)
            return model, tokenizer
    from skipstone.engines import loading

    arguments = {"dtype": dtype, "device": device, "engine": engine, "quantize": quantize, **others}
    arguments |= {"kv_dtype": kv_dtype, "compute_dtype": compute_dtype, "mtp": mtp}
    return loading.load(name, keep_weights=keep_weights, generation_config=generation_config(), **arguments)


def load_to_measure(name: str | Path | None = None, **arguments: Any) -> tuple[Any, Any]:
    """As `loading.load`, but a GGUF file is loaded as by `load_for_decoding`: its blocks are measured as they are stored."""
    from skipstone.engines import loading

    if name is not None and gguf_path(local_model(name)) is not None:
        return load_for_decoding(name, **{"keep_weights": True, **arguments})
    return loading.load(name, **arguments)


def expect_memory(model: MappedModel, quantize: str | None) -> None:
    """ValueError if the panels of a model would not fit into the memory that is free. Panels in the disk's cache need none."""
    remedy = "end other programs"
    if quantize in QUANTIZED:
        if model.caches_panels and packed_cache.has(model.files.identity, quantize):
            return
        needed = quantised_bytes(model, quantize)
    else:
        itemsize = None if model.widens_to is None else model.widens_to.itemsize
        needed = quantised_bytes(model, None) if itemsize is None else itemsize * sum(map(Tensor.numel, packed_weights(model)))
    if (smaller := quantised_bytes(model, "int4")) < needed:
        remedy += f", or quantise them: int4 needs {(smaller + embedding_bytes(model)) / 1e9:.1f} GB"
    needed += embedding_bytes(model)
    available = available_memory_bytes()
    if needed > available:
        sizes = f"need {needed / 1e9:.1f} GB of memory, and {available / 1e9:.1f} GB are free"
        raise ValueError(f"the weights of {model.config.name_or_path} {sizes}: {remedy}")


def load_named(name: str | Path, dtype: torch.dtype, device: str, next_to: Any, quantize: str | None = None) -> Any:
    """A model to run next to another one, which has the same way to load and uses the disk's cache alike.

    quantize: what its weights will be packed in. Errors as in `loading.load_model`; ValueError if memory is too small.
    """
    if isinstance(next_to, MappedModel) and device == "cpu":
        try:
            model, _ = read_model(name, "auto" if gguf_path(local_model(name)) else dtype)
        except UnmappableError:
            pass
        else:
            model.caches_panels = next_to.caches_panels
            expect_memory(model, quantize)
            return model
    from skipstone.engines import loading

    return loading.load_model(name, dtype=dtype, device=device)


def read_model(name: str | Path | None, dtype: torch.dtype | str = "auto") -> tuple[MappedModel, Path | GgufFile]:
    """A mapped model and its folder or GGUF file. UnmappableError if transformers must load the model, GgufError for a GGUF
    file that cannot be loaded."""
    name = None if name is None else local_model(name)
    if name is not None and (path := gguf_path(name)) is not None:
        if dtype not in ("auto", "float32", torch.float32):
            raise UnmappableError(f"is to be computed in {dtype}, and the native engine computes it in float32")
        return map_gguf(path)
    try:
        return _read_folder(name, dtype)
    except UNREADABLE as error:
        raise UnmappableError(str(error)) from error


def _read_folder(name: str | Path | None, dtype: torch.dtype | str) -> tuple[MappedModel, Path]:
    """As `read_model`, of a checkpoint or a hub id. One of UNREADABLE if transformers must load it."""
    folder = NANO if name is None else _folder_of(name)
    config = MappedConfig(json.loads((folder / CONFIG).read_bytes()))
    config.name_or_path = str(folder if name is None else name)
    if name is not None and not Path(name).expanduser().exists():
        config.name_or_path = _repository(name)
        setattr(config, COMMIT, folder.name)
    if name is None and dtype == "auto":
        dtype = torch.float32
    own = folder / FILE
    fields = GenerationFields(read_generation_config(own)) if own.exists() else GenerationFields.of_config(config.to_dict())
    return MappedModel(config, weight_files(folder), fields, None if isinstance(dtype, str) else dtype), folder


def _folder_of(name: str | Path) -> Path:
    """The folder of a checkpoint; of a hub id, the folder of its present commit in the hub's cache, which may lack weights.
    UnmappableError for a file."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    from skipstone.models.fetching import fetch, fetch_optional

    if path.exists():
        raise UnmappableError("is no folder")
    folder = fetch(str(name), CONFIG)
    fetch_optional(_repository(name), folder.name, FILE, *FURTHER_FILES)
    return folder


def _repository(name: str | Path) -> str:
    """A hub id without its revision."""
    return str(name).partition("@")[0]


def _tokenizer_of(place: Path | GgufFile) -> Any:
    from_file = isinstance(place, GgufFile)
    try:
        return gguf_tokenizer(place) if from_file else read_tokenizer(place)
    except UnmappableError as error:
        from skipstone.engines.loading import load_tokenizer

        path = place.path if from_file else place
        if from_file:
            warnings.warn(f"{path} {error}: transformers reads it, and its ids may be wrong", RuntimeWarning, stacklevel=3)
        return load_tokenizer(path)


def warn_of_floats(model: MappedModel, quantize: str | None) -> None:
    """Warn of matrices that take more memory than in the file, because the engine has no kernels for their blocks."""
    floats = [one for one in tensor_paths(model, quantize) if one.computed == "float32" != one.kind]
    if floats and isinstance(model.files, GgufWeights):
        stored, computed = sum(one.stored_bytes for one in floats), sum(one.computed_bytes for one in floats)
        warnings.warn(
            f"{model.config.name_or_path} has matrices in {', '.join(one.kind for one in floats)}, which are computed in "
            f"float32 and take {computed / 1e9:.2f} GB instead of {stored / 1e9:.2f}; {', '.join(BLOCKS)} stay as they are",
            RuntimeWarning,
            stacklevel=3,
        )
