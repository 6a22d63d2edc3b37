"""EAGLE-3 heads (Li et al., arXiv 2503.01840): their files, and the model of one layer that they are.

Folders in EAGLE's own layout and in that of the `speculators` package are read without either package. What a head is follows
from its tensors; its config only says what they do not show.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn

from skipstone.models.families import Family
from skipstone.models.fetching import fetch
from skipstone.models.mapped_config import MappedConfig, UnmappableError
from skipstone.models.mapped_model import FURTHER_TENSORS, Embedding, Linear, MappedModel, Part, RotaryPhases

CONFIG, SINGLE, INDEX, PICKLED = "config.json", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
SPECULATORS = "speculators_model_type"
"""Key of a config in the layout of `speculators`."""
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
OF_OTHER_KINDS = {
    "a Medusa head": r"^(medusa_head\.)?\d+\.\d+\.(linear\.)?weight$|^medusa",
    "a P-EAGLE head": r"(^|\.)mask_hidden$",
    "a head with latent attention (MLA)": r"kv_a_proj_with_mqa",
}
"""Heads that skipstone does not run, and tensors that only they have."""
OTHER_KINDS = {
    r"^eagle$": "an EAGLE-1 head",
    "peagle": "a P-EAGLE head",
    "dflash": "a DFlash head",
    "^mtp": "an MTP layer in the format of speculators",
    "medusa": "a Medusa head",
    "gemma4.*assistant": "an assistant model of Gemma 4",
}
"""The same by their model type, that of `speculators` or their architecture."""


@dataclass(frozen=True)
class HeadFiles:
    """The contents of a head's folder. name: as the user wrote it. folder: on this machine. config: of config.json. tensors: by
    the names of `Eagle3Model`, mapped from the file. ids: [S] int64, the target's ids of the LM head's rows, ascending; None
    for all ids. vocabulary_size: of the target, as `t2d` says; None without it."""

    name: str
    folder: Path
    config: Mapping[str, Any]
    tensors: "HeadTensors"
    ids: Tensor | None
    vocabulary_size: int | None

    @property
    def is_of_speculators(self) -> bool:
        return SPECULATORS in self.config or "speculators_config" in self.config

    @property
    def layer(self) -> str:
        """What the names of the layer's tensors begin with: "midlayer" in EAGLE's layout."""
        return "layers.0" if any(name.startswith("layers.0.") for name in self.tensors) else "midlayer"

    @property
    def layer_config(self) -> Mapping[str, Any]:
        """The part of the config with the sizes of the layer."""
        return self.config.get("transformer_layer_config", self.config)

    def setting(self, key: str, default: Any = None) -> Any:
        """A setting of the head, also from `eagle_config`."""
        inner = self.config.get("eagle_config") or {}
        return self.config[key] if self.config.get(key) is not None else inner.get(key, default)


class HeadTensors(dict[str, Tensor]):
    """Tensors by name, in the place of `WeightFiles`."""

    @property
    def names(self) -> list[str]:
        return list(self)

    def file_place(self, name: str) -> None:
        """None: they are read through their mapping."""

    def are_unwritten(self) -> bool:
        return True

    def mapped(self) -> "HeadTensors":
        return self


def read_files(name: str | Path) -> HeadFiles:
    """Read a head's folder or hub id. OSError for missing files, ValueError for anything that is no EAGLE-3 head of one
    layer."""
    folder = _folder_of(name)
    with _naming(name, CONFIG):
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    stored = _tensors_of(folder, name).items()
    tensors = HeadTensors({key.removeprefix("model."): one for key, one in stored if not FURTHER_TENSORS.search(key)})
    if not isinstance(config, dict):
        raise ValueError(f"the config.json of {name} is no object of settings")
    if config.get("quantization_config") is not None:
        raise ValueError(f"the head {name} is quantised: name the one in full precision, which head_quantize can quantise")
    _expect_eagle3(name, config, tensors)
    t2d, d2t = tensors.pop("t2d", None), tensors.pop("d2t", None)
    ids = _ids(str(name), tensors, d2t, t2d)
    return HeadFiles(str(name), folder, config, tensors, ids, None if t2d is None else len(t2d))


def _folder_of(name: str | Path) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / CONFIG).exists():
            raise FileNotFoundError(f"the head {name} has no {CONFIG}")
        return path
    if path.exists():
        raise OSError(f"the head {name} is a file: name its folder, which has {CONFIG} and the weights")
    with suppress(OSError):
        return fetch(str(name), CONFIG, SINGLE)
    return fetch(str(name), CONFIG, PICKLED)


@contextmanager
def _naming(name: str | Path, file: str) -> Iterator[None]:
    """Make a ValueError of errors that a damaged file of a head causes."""
    try:
        yield
    except (SafetensorError, RuntimeError, UnpicklingError, EOFError, ValueError, KeyError) as error:
        raise ValueError(f"the head {name} has a damaged {file}, get it again: {error}") from error


def _tensors_of(folder: Path, name: str | Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    files, tensors = [SINGLE], dict[str, Tensor]()
    if not (folder / SINGLE).exists() and (folder / INDEX).exists():
        with _naming(name, INDEX):
            files = dict.fromkeys(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    elif not (folder / SINGLE).exists() and (folder / PICKLED).exists():
        with _naming(name, PICKLED):
            return torch.load(folder / PICKLED, map_location="cpu", weights_only=True, mmap=True)
    elif not (folder / SINGLE).exists():
        raise FileNotFoundError(f"{folder} has neither {SINGLE} nor {PICKLED}")
    for file in files:
        with _naming(name, file):
            tensors |= load_file(folder / file)
    return tensors


def _expect_eagle3(name: str | Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """ValueError for another kind of head, by its name."""
    own = [config.get(SPECULATORS), config.get("model_type"), *(config.get("architectures") or ())]
    types = [str(one).lower() for one in own if one]
    kind = next((kind for pattern, kind in OTHER_KINDS.items() if any(re.search(pattern, one) for one in types)), None)
    for other, pattern in OF_OTHER_KINDS.items():
        kind = kind or (other if any(re.search(pattern, one) for one in tensors) else None)
    if kind is None and not any(one.endswith(".hidden_norm.weight") for one in tensors):
        kind = "an EAGLE-1 or EAGLE-2 head" if "fc.weight" in tensors else "no head that drafts"
    if kind is None and config.get(SPECULATORS, "eagle3") != "eagle3":
        kind = f"a head of the type {config[SPECULATORS]}"
    if kind is None and any(re.search(r"^layers\.[1-9]", one) for one in tensors):
        kind = "an EAGLE-3 head of several layers"
    if kind is None and (config.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
        kind = "an EAGLE-3 head that reads the last state only (use_aux_hidden_state is false)"
    if kind is not None:
        raise ValueError(f"{name} is {kind}: skipstone runs EAGLE-3 heads of one layer")


def _ids(name: str, tensors: HeadTensors, d2t: Tensor | None, t2d: Tensor | None) -> Tensor | None:
    """The target's ids of the LM head's rows, which are sorted by them here. `d2t` has offsets: id i means i + d2t[i]."""
    head = tensors.get("lm_head.weight")
    if d2t is None:
        return None
    if head is None:
        raise ValueError(f"the head {name} lacks lm_head.weight, and d2t says that it has logits of its own")
    if len(d2t) != len(head):
        raise ValueError(f"the head {name} has a d2t of {len(d2t)} tokens and an lm_head.weight of {len(head)}")
    ids = d2t.long() + torch.arange(len(d2t), dtype=torch.int64, device="cpu")
    if t2d is not None and not torch.equal(t2d.bool().nonzero()[:, 0], ids.sort().values):
        raise ValueError(f"the head {name} has a d2t and a t2d that name different tokens")
    if int(ids.min()) < 0 or len(ids.unique()) < len(ids):
        raise ValueError(f"the head {name} has a d2t that names a token twice, or one below 0")
    if not torch.equal(sorted_ids := ids.sort().values, ids):
        tensors["lm_head.weight"] = head[ids.argsort()]
    return sorted_ids


class Eagle3Layer(Part):
    """The decoder layer (paper, section 3.1): its attention reads the embedding of a token next to the state before it.

    norm_before_residual: the residual stream starts with the normed state, as some heads of `speculators` are trained.
    """

    norm_before_residual: bool

    def forward(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        past_key_values: Any,
    ) -> Tensor:
        """[b, n, 2 d], embedding and state -> [b, n, d]. position_ids: not used. Others: as in transformers' layers."""
        own: Any = self
        embedding, state = hidden_states.chunk(2, -1)
        normed = own.hidden_norm(state)
        inputs = torch.cat([own.input_layernorm(embedding), normed], -1)
        state = normed if own.norm_before_residual else state
        state = state + self._attend(inputs, attention_mask, position_embeddings, past_key_values)
        return state + own.mlp(own.post_attention_layernorm(state))

    def _attend(self, inputs: Tensor, mask: Tensor | None, phases: tuple[Tensor, Tensor], cache: Any) -> Tensor:
        own: Any = self.self_attn
        shape = (*inputs.shape[:2], -1, own.head_dim)
        query, key, value = (part(inputs).view(shape) for part in (own.q_proj, own.k_proj, own.v_proj))
        if hasattr(own, "q_norm"):
            query, key = own.q_norm(query), own.k_norm(key)
        query, key = (_rotated(one.transpose(1, 2), *phases) for one in (query, key))
        key, value = cache.update(key, value.transpose(1, 2), 0)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=own.scaling, enable_gqa=True)
        return own.o_proj(attended.transpose(1, 2).flatten(2))


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary phases (Su et al., arXiv 2104.09864, section 3.2.2). heads: [b, heads, n, size]. cos, sin: [b, n, size]."""
    first, second = heads.chunk(2, -1)
    return heads * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]


class Eagle3Model(MappedModel):
    """A head as a model of one layer, which the eager and the native engine run.

    fc: [d, E * D], makes the state of a column from E states of the target. fc_norms: norms of each of them, may be empty.
    input_norm: of all of them together, or None. ids: as in `HeadFiles`. norm_output: what is fed back has passed the final
    norm. owns_embedding: the embedding comes from the head's files, not from the target.
    """

    has_forward = True

    def __init__(
        self, files: HeadFiles, target: Any, num_states: int, norm_before_residual: bool | None, norm_output: bool | None
    ) -> None:
        """target: a `DecoderModel`. Its embedding and LM head are used if the files have none. num_states: E. The others
        replace settings of the files. UnmappableError, the end of a sentence about the head, for what does not fit."""
        self._files, self._target, self._num_states = files, target, num_states
        self.owns_embedding = "embed_tokens.weight" in files.tensors
        self._norm_before_residual = _norm_before_residual(files) if norm_before_residual is None else norm_before_residual
        self.norm_output = bool(files.setting("norm_output", False) if norm_output is None else norm_output)
        dtype = _unify_dtypes(files.tensors, target)
        config = MappedConfig(_layer_values(files, target))
        config.name_or_path = files.name
        vars(config)["_attn_implementation"] = "sdpa"
        super().__init__(config, files.tensors, None, dtype)  # type: ignore[arg-type]
        self.caches_panels = False
        self.register_buffer("ids", files.ids, persistent=False)
        del self._files, self._target

    @property
    def family(self) -> Family:
        return replace(super().family, attention_interface=False)

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    def stored_values(self) -> Iterator[tuple[str, Tensor]]:
        """As in `MappedModel`, by the files' names."""
        return iter(self.files.mapped().items())  # type: ignore[union-attr]

    def _build(self, config: MappedConfig) -> None:
        target, width, states = self._target, self._target.config.hidden_size, self._num_states
        decoder: Any = Part()
        decoder.embed_tokens = self._shared("embed_tokens", target.model.get_input_embeddings().weight, Embedding)
        decoder.layers = nn.ModuleList([self._layer(self._files.layer, 0)])
        decoder.norm, decoder.rotary_emb = self._norm("norm", config.hidden_size), RotaryPhases(config)
        self.model, self.lm_head = decoder, self._shared("lm_head", target.head.weight, Linear)
        self.fc = self._linear("fc", config.hidden_size, states * width)
        numbers = range(states) if "fc_norm.0.weight" in self.files or self._files.setting("fc_norm") else ()
        self.fc_norms = nn.ModuleList(self._norm(f"fc_norm.{number}", width) for number in numbers)
        has_input_norm = "input_norm.weight" in self.files or self._files.setting("norm_before_fc")
        self.input_norm = self._norm("input_norm", states * width) if has_input_norm else None

    def _shared(self, name: str, of_target: Tensor, kind: Any) -> Any:
        """A matrix of all tokens: the head's own, else the target's."""
        key, size = f"{name}.weight", self.config.hidden_size
        files: Any = self.files
        if key in files:
            if kind is Embedding or self._files.ids is None:
                files[key] = _fitted(files[key], len(of_target), fills=kind is Embedding)
            return kind(self._weight(key, (len(files[key]), size)))
        if of_target.shape[1] != size:
            raise UnmappableError(f"lacks {key}, and the target's has states of {of_target.shape[1]} numbers, expected {size}")
        files[key] = of_target
        return kind(of_target)

    def _layer(self, name: str, index: int) -> nn.Module:
        layer: Any = Eagle3Layer()
        size = self.config.hidden_size
        layer.self_attn, layer.mlp = self._attention(f"{name}.self_attn", index, 2), self._mlp(f"{name}.mlp")
        for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            setattr(layer, norm, self._norm(f"{name}.{norm}", size))
        layer.norm_before_residual = self._norm_before_residual
        return layer


def _fitted(weight: Tensor, rows: int, fills: bool) -> Tensor:
    """At most `rows` rows of a matrix of all tokens. Models with one tokenizer pad it to different sizes. fills: the last row
    is repeated for ids that it lacks."""
    missing = rows - len(weight)
    return torch.cat([weight, weight[-1:].expand(missing, -1)]) if fills and missing > 0 else weight[:rows]


def _unify_dtypes(tensors: HeadTensors, target: Any) -> torch.dtype:
    """Convert a head's tensors to the target's dtype if they, or a borrowed LM head, have several. Returns their dtype."""
    dtypes = {one.dtype for one in tensors.values() if one.is_floating_point()}
    if "lm_head.weight" not in tensors:
        dtypes.add(target.head.weight.dtype)
    dtype = dtypes.pop() if len(dtypes) == 1 else target.weight_dtype
    for key, one in tensors.items():
        tensors[key] = one.to(dtype) if one.is_floating_point() else one
    return dtype


def _norm_before_residual(files: HeadFiles) -> bool:
    """UnmappableError if a head of `speculators` does not say it: readers of that format assume different values."""
    known = files.setting("norm_before_residual")
    if known is None and files.is_of_speculators:
        raise UnmappableError("has no norm_before_residual in its config.json: give norm_before_residual=true or false")
    return bool(known)


def _layer_values(files: HeadFiles, target: Any) -> dict[str, Any]:
    """The config of a Llama-like model of one layer. What a head's tensors show is taken from them."""
    given, tensors = files.layer_config, files.tensors
    if (number := given.get("num_hidden_layers", 1)) != 1:
        raise UnmappableError(f"has {number} layers, expected 1")
    if "sliding_attention" in (given.get("layer_types") or ()):
        raise UnmappableError("attends to a sliding window, which skipstone's heads do not")
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
    names += ("hidden_act", "rope_theta", "rope_scaling", "rope_parameters")
    values = {name: given[name] for name in names if given.get(name) is not None}
    attention = f"{files.layer}.self_attn"
    biases = {part for part in ("q_proj", "o_proj") if f"{attention}.{part}.bias" in tensors}
    kind = "qwen3" if f"{attention}.q_norm.weight" in tensors else "qwen2" if biases == {"q_proj"} else "llama"
    values |= {"model_type": kind, "num_hidden_layers": 1, "max_position_embeddings": target.max_positions}
    values |= {"vocab_size": target.head.weight.shape[0], "attention_bias": bool(biases)}
    return values | {"mlp_bias": f"{files.layer}.mlp.gate_proj.bias" in tensors}


def feature_depths(files: HeadFiles, num_layers: int) -> tuple[int, ...]:
    """After how many layers of the target the states are read.

    The default is that of the released code: the inputs of layers 2, N // 2 and N - 3. A list of ids counts outputs of layers
    in EAGLE's layout, as SpecForge writes it, and inputs in that of `speculators`. Some files in EAGLE's layout count inputs,
    too: those that list N, and those that do not begin with the output of an early layer.
    """
    ids = files.setting(LAYER_IDS)
    if not ids:
        return 2, num_layers // 2, num_layers - 3
    counts_inputs = files.is_of_speculators or max(ids) == num_layers or min(ids) > 1
    return tuple(int(number) + (not counts_inputs) for number in ids)
