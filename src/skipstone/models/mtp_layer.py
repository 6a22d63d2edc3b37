"""Reads a checkpoint's layer for multi-token prediction (MTP)."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from skipstone.models import torch_defaults
from skipstone.models.families import text_config
from skipstone.models.fetching import cached_folder, hub_name
from skipstone.models.mtp_layouts import BLOCK, EH_PROJ, EMBEDDING, ENORM, HEAD, HNORM, NORM, MtpTensors, NoMtpError, find_mtp
from skipstone.models.tensor_parallel import is_sharded
from skipstone.models.vocabularies import COMMIT
from skipstone.models.weight_files import DTYPES, INDEX, SINGLE


class MtpLayer:
    """A checkpoint's first MTP layer. It does not refer to the target, only to two of its Parameters.

    model: of transformers, with this layer, its final norm, and the target's embedding and LM head unless the files have
    others for the layer. enorm, hnorm, eh_proj: of a token's embedding, of the target's state, and of both next to each other.
    nbytes: of all weights that are not the target's. num_layers: number of MTP layers of the checkpoint.
    """

    def __init__(self, target: Any, folder: Path) -> None:
        """target: a PreTrainedModel. folder: of its files.

        NoMtpError without an MTP layer that skipstone runs. OSError for files that cannot be read. ValueError for weights that
        are quantised, missing or misshapen, and for a target on several devices.
        """
        places = _files_by_tensor(folder)
        tensors = find_mtp(places)
        for name in tensors.missing:
            raise ValueError(f"it lacks {tensors.name_in_files(name)}")
        _expect_one_device(target)
        self._shared, self.num_layers = _shared(target), tensors.num_layers
        with ExitStack() as stack:
            files = {
                path: stack.enter_context(safe_open(path, "pt")) for path in {places[one] for one in tensors.names.values()}
            }
            slices = {name: files[places[one]].get_slice(one) for name, one in tensors.names.items()}
            _expect_floats(slices, tensors)
            self.model = _one_layer_model(target, slices, tensors)
            self._read_inputs(slices, tensors)
            self._share(target, slices, tensors)
        parts = (self.model, self.enorm, self.hnorm, self.eh_proj)
        weights = chain.from_iterable(part.state_dict(keep_vars=True).values() for part in parts)
        self.nbytes = sum(one.nbytes for one in weights if not any(one is other for other in self._shared))

    def _read_inputs(self, slices: Mapping[str, Any], tensors: MtpTensors) -> None:
        """Make enorm, hnorm and eh_proj."""
        norm = self.model.get_decoder().norm
        self.enorm, self.hnorm = deepcopy(norm), deepcopy(norm)
        size = norm.weight.shape[0]
        self.eh_proj = nn.Linear(2 * size, size, bias=False, device=norm.weight.device, dtype=norm.weight.dtype)
        for name, module in {ENORM: self.enorm, HNORM: self.hnorm, EH_PROJ: self.eh_proj}.items():
            module.weight = _parameter(slices[name], module.weight, tensors.name_in_files(name))

    def _share(self, target: Any, slices: Mapping[str, Any], tensors: MtpTensors) -> None:
        """Give the layer the target's embedding and LM head, or its own if the files have others."""
        weights = []
        for name, weight in zip((EMBEDDING, HEAD), self._shared, strict=True):
            if name in slices and not torch.equal(own := _parameter(slices[name], weight, tensors.name_in_files(name)), weight):
                weight = own
            weights.append(weight)
        embedding = nn.Embedding(*weights[0].shape, device="meta", dtype=torch.float32)
        head: Any = nn.Linear(*reversed(weights[1].shape), bias=False, device="meta", dtype=torch.float32)
        embedding.weight, head.weight = weights
        head.bias = getattr(target.get_output_embeddings(), "bias", None)
        self.model.set_input_embeddings(embedding)
        self.model.set_output_embeddings(head)
        self.model.config.vocab_size = len(weights[0])

    def fits(self, target: Any) -> bool:
        """Whether the target still has the embedding and the LM head that the layer was read for, in its place and dtype."""
        own, present = self.eh_proj.weight, _shared(target)
        same = all(one is other for one, other in zip(self._shared, present, strict=True))
        return same and all((one.device, one.dtype) == (own.device, own.dtype) for one in present)


def folder_of(config: Any) -> Path:
    """The folder that a model was loaded from, by its config. FileNotFoundError if it is not on this machine."""
    name = getattr(config, "name_or_path", None) or "the model"
    if Path(name).is_dir():
        return Path(name)
    known = cached_folder(name, getattr(config, COMMIT, None), "config.json") if hub_name(name) else None
    if known is None:
        raise FileNotFoundError(2, "no folder with its files, which have its MTP layer", name)
    return known


def _shared(target: Any) -> tuple[nn.Parameter, nn.Parameter]:
    return target.get_input_embeddings().weight, target.get_output_embeddings().weight


def _expect_one_device(target: Any) -> None:
    """ValueError unless one device of this process has what the layer shares, and the end of the model."""
    weights = [*_shared(target), *[*target.get_decoder().parameters()][-1:]]
    places = {"several processes" if is_sharded(one) else "disk" if one.is_meta else str(one.device) for one in weights}
    if len(places) > 1 or places & {"several processes", "disk"}:
        raise ValueError(f"the model's weights are on {' and '.join(sorted(places))}, expected one device")


def _files_by_tensor(folder: Path) -> dict[str, Path]:
    """The file of every tensor of a checkpoint. OSError without safetensors files."""
    if not (folder / SINGLE).exists() and (folder / INDEX).exists():
        files = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        return {name: folder / file for name, file in files.items()}
    with safe_open(folder / SINGLE, "pt") as file:
        return dict.fromkeys(file.keys(), folder / SINGLE)


def _expect_floats(slices: Mapping[str, Any], tensors: MtpTensors) -> None:
    for name, one in slices.items():
        if (kind := one.get_dtype()) not in DTYPES:
            raise ValueError(f"{tensors.name_in_files(name)} is {kind}, expected one of {', '.join(DTYPES)}: it is quantised")


def _parameter(values: Any, like: Tensor, name: str) -> nn.Parameter:
    """A tensor of a file in the place and dtype of another one. ValueError for another shape. name: in the files."""
    if (shape := list(values.get_shape())) != list(like.shape):
        raise ValueError(f"{name} has shape {shape}, expected {list(like.shape)}")
    return nn.Parameter(values[...].to(like.device, like.dtype), requires_grad=False)


def _one_layer_model(target: Any, slices: Mapping[str, Any], tensors: MtpTensors) -> Any:
    """transformers' model with the layer and its final norm, in the target's place and dtype. Its vocabulary has one token.
    NoMtpError for a target that has no model class of its own to decode text."""
    from transformers import AutoModelForCausalLM

    config, classes = text_config(target), AutoModelForCausalLM._model_mapping
    if type(config) not in classes:
        raise NoMtpError(f"has MTP layers, which skipstone does not run for {config.model_type}")
    kind: Any = classes[type(config)]
    block = {name: one for name, one in slices.items() if name == NORM or name.startswith(BLOCK)}
    block.setdefault(NORM, target.get_decoder().norm.weight.detach())
    row = torch.zeros((1, config.hidden_size), dtype=torch.float32, device="cpu")
    with torch_defaults.loading():
        model, report = kind.from_pretrained(
            None,
            config=_one_layer_config(config, block),
            state_dict={**block, EMBEDDING: row, HEAD: row.clone()},
            dtype=target.dtype,
            attn_implementation=config._attn_implementation,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    for name, found, expected in sorted(report["mismatched_keys"]):
        raise ValueError(f"{tensors.name_in_files(name)} has shape {list(found)}, expected {list(expected)}")
    for name in sorted(report["missing_keys"]):
        raise ValueError(f"it lacks {tensors.name_in_files(name)}")
    for name in sorted(report["unexpected_keys"]):
        raise ValueError(f"it has {tensors.name_in_files(name)}, which a layer of {config.model_type} does not have")
    model._is_stateful = False  # layers with recurrent states are in the target only
    return model.requires_grad_(False).to(target.get_output_embeddings().weight.device).eval()


def _one_layer_config(config: Any, names: Mapping[str, Any]) -> Any:
    """names: of the layer's tensors, by which it has experts or not."""
    one, has_experts = deepcopy(config), any(".mlp.experts." in name for name in names)
    one.num_hidden_layers, one.vocab_size, one.pad_token_id, one.tie_word_embeddings = 1, 1, None, False
    layer_types = (getattr(config, "mtp_layer_types", None) or ["full_attention"])[:1]
    kinds: dict[str, Any] = {"layer_types": layer_types, "mlp_layer_types": ["sparse" if has_experts else "dense"]}
    kinds |= {"first_k_dense_replace": int(not has_experts), "decoder_sparse_step": 1}
    kinds |= {"mlp_only_layers": [] if has_experts else [0]}
    for field, value in kinds.items():
        if getattr(one, field, None) is not None:
            setattr(one, field, value)
    if hasattr(one, "quantization_config"):
        del one.quantization_config  # the layer's weights are plain
    return one
