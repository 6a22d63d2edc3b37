"""Models and tokenizers of transformers for GGUF files. What the native engine does not run, transformers reads itself."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from skipstone.models.checkpoints import expect_fit
from skipstone.models.gguf.reader import GgufError, GgufFile
from skipstone.models.gguf.tokenizer import gguf_tokenizer
from skipstone.models.mapped_config import UnmappableError
from skipstone.models.mapped_gguf import map_gguf
from skipstone.models.mapped_model import MappedModel
from skipstone.models.packed_weight import PackedWeight
from skipstone.utils.extras import installed


def load_model(path: Path, dtype: torch.dtype | str, **options: Any) -> Any:
    """A PreTrainedModel with the weights of a file. dtype: "auto" is float32. options: further ones of `from_pretrained`.

    GgufError for a damaged file and for one that transformers cannot read, ImportError without a package."""
    kind: Any = torch.float32 if dtype == "auto" else getattr(torch, dtype) if isinstance(dtype, str) else dtype
    try:
        model, _ = map_gguf(path)
    except UnmappableError:
        options |= {"dtype": kind, "output_loading_info": True, "ignore_mismatched_sizes": True, **_unpacked()}
        with _read_by_transformers(path, "accelerate") as place:
            loaded: Any = AutoModelForCausalLM.from_pretrained(**place, **options)
            expect_fit(str(path), None, *loaded)
        return loaded[0]
    return unpacked_model(model, kind, **options)


def load_tokenizer(path: Path) -> Any:
    """The tokenizer of a file. Errors as in `load_model`. transformers reads SentencePiece: its tokenizers need merges, which
    it derives."""
    file = GgufFile(path)
    try:
        tokenizer = gguf_tokenizer(file)
    except UnmappableError:
        with _read_by_transformers(path) as place:
            return AutoTokenizer.from_pretrained(**place)
    if file.metadata["tokenizer.ggml.model"] == "llama":
        with _read_by_transformers(path) as place:
            return PreTrainedTokenizerFast.from_pretrained(**place, padding_side="left")  # AutoTokenizer would derive a config
    special, template = tokenizer.special_tokens_map, tokenizer.chat_template
    backend: Any = tokenizer.backend_tokenizer
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, padding_side="left", **special)


def unpacked_model(model: MappedModel, dtype: torch.dtype, **options: Any) -> Any:
    """transformers' model with the weights and the generation defaults of a mapped one. One weight is unpacked at a time.

    options: further ones of `from_pretrained`."""
    values = {name: value for name, value in model.config.to_dict().items() if name != "norm_offset"}
    config: Any = CONFIG_MAPPING[model.config.model_type](**values)
    kind: Any = AutoModelForCausalLM._model_mapping[type(config)]
    made = kind.from_pretrained(
        None,
        config=config,
        state_dict=dict(_weights(model, dtype)),
        dtype=dtype,
        generation_config=GenerationConfig.from_dict(model.generation_config.to_dict()),
        **options,
    )
    made.name_or_path = made.config.name_or_path = model.config.name_or_path
    return made


def _weights(model: MappedModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Weights by name. Those in blocks are unpacked when they are read. transformers' norms add their offset themselves."""
    offset = model.config.variant.norm_offset - model.config.norm_offset
    for name, weight in model.named_parameters():
        if isinstance(weight, PackedWeight):
            yield name, weight
        elif name.endswith("norm.weight"):
            yield name, weight.detach().double() - offset
        else:
            yield name, weight.detach().to(dtype, copy=True)  # the mapped file cannot be written


@contextmanager
def _read_by_transformers(path: Path, *packages: str) -> Iterator[dict[str, Any]]:
    """Arguments of `from_pretrained`. Its errors become one sentence with cause and remedy. packages: needed ones."""
    for package in ("gguf", *packages):
        installed(package, f"GGUF files of this kind need {package}", "quantised")
    try:
        yield {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    except (OSError, ValueError, LookupError, NotImplementedError) as error:
        raise GgufError(
            f"the GGUF file {path} cannot be loaded by transformers: load the model's safetensors ({error})"
        ) from error


def _unpacked() -> dict[str, Any]:
    """Options that make transformers unpack all weights, even if kernels are installed. Older versions always do."""
    config: Any = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}
