"""Exports some layers of a model, with its norm and head, as an ordinary Hugging Face checkpoint.

Every export is read back and compared with skipstone's own computation before it is published.
"""

import copy
from collections.abc import Collection
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn

from skipstone.assets import NANO
from skipstone.decoding.settings import layer_in_range
from skipstone.engines.kv_cache import KVCache
from skipstone.engines.loading import BUNDLED, EXPORT, load_model
from skipstone.engines.model_runner import ModelRunner
from skipstone.methods import MethodLike, resolve
from skipstone.methods.drafting.layer_sets import LayerSetSpace, load_profile
from skipstone.methods.early_exit import EarlyExit
from skipstone.methods.layerskip import LayerSkip
from skipstone.methods.self_speculative import SelfSpeculative
from skipstone.methods.swift.swift import Swift
from skipstone.models.decoder_model import DecoderModel
from skipstone.models.derivation import close
from skipstone.models.generation_config import OWN_FIELD
from skipstone.models.passes import Pass, SkipSet
from skipstone.models.vocabularies import COMMIT
from skipstone.utils.files import hidden_folder, publish, write_json

NUM_PROBE_TOKENS = 24  # random ids that an export is compared on
NUMBERED = ("mlp_only_layers",)
"""Fields of a config that list layer numbers."""
COUNTED = ("max_window_layers",)
"""Fields of a config that count the first layers of some kind."""
DEFAULT_DRAFTS = 6  # drafts a step for a method without num_speculative_tokens


@dataclass(frozen=True)
class DraftLayers:
    """The layers that draft. layers: their numbers in the target, from 0, ascending. depth: number of the target's layers.
    drafts: maximum per step. threshold: probability below which drafting stops; None if the method has no fixed one."""

    layers: tuple[int, ...]
    depth: int
    drafts: int = DEFAULT_DRAFTS
    threshold: float | None = None

    @property
    def described(self) -> str:
        """Their numbers as text: "layers 0 to 5 of 24"."""
        return f"{spell_layers(self.layers)} of {self.depth}"


def spell_layers(layers: Collection[int]) -> str:
    """Layer numbers as text: "layers 0 to 3, 6 and 7"."""
    numbers = sorted(layers)
    runs = [[layer for _, layer in run] for _, run in groupby(enumerate(numbers), lambda entry: entry[1] - entry[0])]
    *others, last = [f"{run[0]}" if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    listed = f"{', '.join(others)} and {last}" if others else last
    return f"{'layer' if len(numbers) == 1 else 'layers'} {listed}"


def select_draft_layers(model: ModelRunner, method: MethodLike = None, exit_layer: int | None = None) -> DraftLayers:
    """The layers that a method drafts with, those of the model's own method by default.

    exit_layer: E, for the first E layers, instead of a method. ValueError if both or none are given and the model has no method
    of its own, for a method that does not draft with whole layers, and for layers that the model does not have.
    """
    own = getattr(model.model.generation_config, OWN_FIELD, None)
    if exit_layer is not None:
        if method is not None:
            raise ValueError("give either an exit layer or a method, found both")
        layer_in_range("exit_layer", exit_layer, model)
        method = f"{LayerSkip.name} exit_layer={exit_layer}"
    elif method is None and own is None:
        raise ValueError("this model names no method of its own: say which layers draft by --exit-layer or --method")
    chosen: Any = resolve(method, own)
    if isinstance(chosen, (LayerSkip, EarlyExit)):
        layer_in_range("exit_layer", chosen.exit_layer, model)
        layers = tuple(range(chosen.exit_layer or 0))
    else:
        layers = _remaining_layers(chosen, model)
    drafts = getattr(chosen, "num_speculative_tokens", DEFAULT_DRAFTS)
    threshold = getattr(chosen, "confidence_threshold", None)
    return DraftLayers(layers, model.depth, drafts, threshold if isinstance(threshold, (int, float)) else None)


def _remaining_layers(method: Any, model: ModelRunner) -> tuple[int, ...]:
    """The layers that a method's layer set leaves. ValueError if it has none, or one that skips a sublayer of a layer alone."""
    if isinstance(method, Swift) and method.profile is not None:
        skip = load_profile(method.profile, model.model).skip
    elif isinstance(method, Swift):
        raise ValueError("swift finds its layers while it decodes: name a set of `skipstone search` by profile=FILE")
    elif isinstance(method, SelfSpeculative):
        skip = method.skip_set(model)
    else:
        raise ValueError(f"{method.name} does not draft with layers of the model alone: take layerskip, or a layer set")
    if not skip.attention and not skip.mlp and isinstance(method, Swift):
        raise ValueError("the layer set of swift's profile is empty: the draft would be the whole model")
    if not skip.attention and not skip.mlp:
        raise ValueError(f"{method.name} drafts with all layers in fewer bits: quantise the model with the engine's tools")
    LayerSetSpace.of(model).from_skip_set(skip)
    parts = ("attention", skip.attention - skip.mlp), ("MLP", skip.mlp - skip.attention)
    if alone := [f"the {kind} of {spell_layers(layers)}" for kind, layers in parts if layers]:
        raise ValueError(f"the set skips {' and '.join(alone)} alone: other engines have whole layers only, skip both or none")
    return tuple(layer for layer in range(model.depth) if layer not in skip.attention)


def refuse(model: ModelRunner) -> None:
    """ValueError for a model that cannot be shortened: some layers with the norm and the head are no model of its type."""
    family, kind = model.family, model.config.model_type
    if model.config is not model.model.config:
        raise ValueError(f"this model wraps a {kind} model: export takes text models by themselves")
    if getattr(model.model.config, "quantization_config", None):
        raise ValueError("the weights are quantised, and an export holds plain ones: export the model that was quantised")
    if family.recurrent:
        raise ValueError(f"layers of this {kind} model keep states that have no positions: a draft model cannot take them back")
    if family.streams > 1 or family.per_layer_inputs or family.shares:
        raise ValueError(f"an early exit of this {kind} model is more than its norm and its head: layers share inputs")
    if len(family.leaving) != 1:
        raise ValueError(f"an early exit of this {kind} model is not norm and head, but {', '.join(family.leaving)} and head")


def shortened(config: Any, layers: tuple[int, ...]) -> Any:
    """The config of a model with only these layers, renumbered. ValueError if the model type has no such config."""
    depth = config.num_hidden_layers
    known = config.to_dict()
    known.pop("auto_map", None)  # names code that an export does not have
    for name, value in known.items():
        if name in NUMBERED and value:
            known[name] = [place for place, layer in enumerate(layers) if layer in value]
        elif name in COUNTED and isinstance(value, int):
            known[name] = sum(layer < value for layer in layers)
        elif isinstance(value, (list, tuple)) and len(value) == depth and name != "architectures" and "token_id" not in name:
            known[name] = [value[layer] for layer in layers]
    known[config.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = len(layers)
    try:
        return type(config).from_dict(known)
    except (ValueError, TypeError, LookupError, StrictDataclassError) as error:
        raise ValueError(f"the config of this {config.model_type} model cannot say which layers are left: {error}") from error


def cut(model: ModelRunner, layers: tuple[int, ...]) -> Any:
    """A transformers model with only these layers, which shares its weights with the model. It can be saved but not run:
    buffers that are no part of a checkpoint are missing. ValueError as in `refuse` and `shortened`."""
    refuse(model)
    if model.family.post_norm and layers != tuple(range(len(layers))):
        raise ValueError("a layer changes its input even where both of its sublayers are skipped: export the first layers")
    config = shortened(model.config, layers)
    with torch.device("meta"):
        draft = type(model.model)(config)
    try:
        draft.load_state_dict(_renumbered(model, layers), strict=True, assign=True)
    except RuntimeError as error:
        raise ValueError(f"a {config.model_type} model of {len(layers)} layers has other weights: {error}") from error
    draft.tie_weights()
    draft.generation_config = copy.deepcopy(model.model.generation_config)
    if hasattr(draft.generation_config, OWN_FIELD):
        delattr(draft.generation_config, OWN_FIELD)
    return draft.eval()


def _renumbered(model: ModelRunner, layers: tuple[int, ...]) -> dict[str, Tensor]:
    """The weights of these layers under their new numbers, and all weights outside layers."""
    owned = getattr(model.decoder, model.family.layers)
    (path,) = [f"{name}." for name, module in model.model.named_modules() if module is owned]
    outside = {name: weight for name, weight in model.model.state_dict().items() if not name.startswith(path)}
    return outside | nn.ModuleList(owned[layer] for layer in layers).state_dict(prefix=path)


def write_draft(model: ModelRunner, tokenizer: Any, kept: DraftLayers, folder: Path) -> int:
    """Write the kept layers, with norm, head and tokenizer, as a checkpoint, whole or not at all. Returns its number of
    parameters.

    folder: must not exist (FileExistsError). ValueError for a model that cannot be cut (`cut`), and for an export that computes
    something else than the layers do.
    """
    if folder.exists():
        raise FileExistsError(17, "there already, and an export overwrites nothing", str(folder))
    draft = cut(model, kept.layers)
    draft.generation_config.num_assistant_tokens = kept.drafts
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = kept.threshold or 0.0
    with hidden_folder(folder) as hidden:
        draft.save_pretrained(hidden)
        tokenizer.save_pretrained(hidden)
        write_json(hidden / EXPORT, origin(model, kept))
        expect_same(model, kept, hidden)
        publish(hidden, folder)
    return sum(weight.numel() for weight in draft.parameters())


def origin(model: ModelRunner, kept: DraftLayers) -> dict[str, Any]:
    """The origin of an export, for its card on the hub: "base", the hub id or folder name of the whole model, None for one that
    was not loaded; "revision", its commit on the hub; "fingerprint" of its weights; kept "layers", "depth" of the whole."""
    name = str(getattr(model.model.config, "name_or_path", "") or "")
    public = BUNDLED if name == str(NANO) else Path(name).resolve().name if Path(name).exists() else name
    return {
        "base": public if name else None,
        "revision": getattr(model.model.config, COMMIT, None),
        "fingerprint": model.fingerprint,
        "layers": list(kept.layers),
        "depth": kept.depth,
    }


@torch.inference_mode()
def expect_same(model: ModelRunner, kept: DraftLayers, folder: Path) -> None:
    """ValueError if the checkpoint in a folder computes something else than the kept layers of a model."""
    draft = load_model(folder, dtype=model.model.dtype)
    reaches, own = DecoderModel(draft).family.reaches, model.family.reaches
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.embeddings, (1, NUM_PROBE_TOKENS), generator=generator, dtype=torch.int64, device="cpu")
    theirs = draft(ids, use_cache=False).logits.float()
    if reaches != tuple(own[layer] for layer in kept.layers) or not close(theirs, exit_logits(model, kept, ids)):
        raise ValueError(f"a {model.config.model_type} model of {kept.described} does not compute what these layers do")


@torch.inference_mode()
def exit_logits(model: ModelRunner, kept: DraftLayers, ids: Tensor) -> Tensor:
    """Draft logits of skipstone at every position of a text: the kept layers, then norm and head. ids: [1, T]. Returns [1, T,
    V] float32."""
    length, layers = ids.shape[1], range(kept.layers[-1] + 1)
    left = frozenset(layers) - frozenset(kept.layers)
    positions = torch.arange(length, device=model.device, dtype=torch.int64)[None]
    store = KVCache(1, model.depth, length)
    store.reserve(length)
    at = Pass(positions, positions, None, slice(0, 1), length, 0)
    skip = SkipSet(left, left) if left else None
    return model.logits(model.run(model.embed(ids.to(model.device), positions), at, store, layers, skip))
