"""EAGLE-3 heads (Li et al., arXiv 2503.01840) on an engine, next to their target."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from skipstone.engines.choose_engine import EngineOptions
from skipstone.engines.feature_head import FeatureHead
from skipstone.engines.host_transfer import to_device
from skipstone.engines.model_runner import ModelRunner, only
from skipstone.engines.native.engine import NativeEngine
from skipstone.models.eagle3 import Eagle3Model, feature_depths, read_files
from skipstone.models.mapped_config import UnmappableError
from skipstone.models.vocabularies import COMMIT, vocabulary


class Eagle3Head(FeatureHead):
    """A head that reads states of three target layers, and its own output for further drafts."""

    def __init__(self, model: Eagle3Model, target: ModelRunner, depths: Sequence[int], options: EngineOptions) -> None:
        super().__init__(model, options)
        self.depths, self.name = tuple(depths), model.config.name_or_path
        self._vocabulary = target.head.weight.shape[0]
        self.ids: Tensor | None = model._buffers["ids"]
        self._target_weights = _shared_weights(target)
        self.read_states(torch.zeros((1, len(self.depths) * target.config.hidden_size), dtype=self.dtype, device=self.device))
        # which packs fc

    def read_states(self, states: Tensor) -> Tensor:
        """The features of the paper's section 3.1: the states of a low, a middle and a high layer become one by `fc`."""
        model, states = self.model, to_device(states, self.device).to(self.dtype)
        if model.fc_norms:
            parts = states.chunk(len(model.fc_norms), -1)
            states = torch.cat([norm(part) for norm, part in zip(model.fc_norms, parts, strict=True)], -1)
        if model.input_norm is not None:
            states = model.input_norm(states)
        return self.engine.multiply(model.fc, states)

    def enter(self, tokens: Tensor, states: Tensor) -> Tensor:
        tokens = to_device(tokens, self.device)
        return torch.cat([self.engine.embed(tokens, tokens).to(states.dtype), states], -1)

    def feed_back(self, hidden: Tensor) -> Tensor:
        """The state before the final norm, or after it if the head was trained so (`norm_output`)."""
        return self.normed(hidden) if self.model.norm_output else hidden

    def fits(self, target: ModelRunner) -> bool:
        """Whether the target still has the embedding and the LM head that it had when the head was loaded."""
        return all(one is other for one, other in zip(self._target_weights, _shared_weights(target), strict=True))

    @property
    def nbytes(self) -> int:
        """As in `FeatureHead`. On the native engine: of the panels that it does not share, and of an embedding of its own."""
        embedding = self.model.get_input_embeddings().weight
        if isinstance(self.engine, NativeEngine):
            return self.engine.nbytes + embedding.nbytes * self.model.owns_embedding
        return sum(one.nbytes for one in self.model.parameters() if not any(one is other for other in self._target_weights))

    def project(self, normed: Tensor, head: Any = None, shortlist: Tensor | None = None) -> Tensor:
        """Logits over the target's vocabulary, [B, n, V] float32; -inf for ids that the head does not draft."""
        logits = super().project(normed)
        if self.ids is not None:
            return only(self.ids, logits, self._vocabulary)
        missing = self._vocabulary - logits.shape[-1]
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf")) if missing else logits


def _shared_weights(target: ModelRunner) -> tuple[Tensor, Tensor]:
    """The embedding and the LM head of a target, which a head may use."""
    return target.model.get_input_embeddings().weight, target.head.weight


def load_eagle3(
    name: str | Path,
    target: ModelRunner,
    *,
    layers: Sequence[int] | None = None,
    norm_before_residual: bool | None = None,
    norm_output: bool | None = None,
    quantize: str | None = None,
) -> Eagle3Head:
    """The head of a folder or a hub id for a target, on the engine that fits the target's options.

    layers: after how many target layers the states are read, in place of the files' own. norm_before_residual, norm_output:
    replace the files' settings. quantize: "int8" or "int4" for its weights; None: as the target's.

    OSError for missing files. ValueError for another kind of head, tensors that are missing or do not fit, and a head that was
    trained for another target.
    """
    files = read_files(name)
    depths = tuple(feature_depths(files, target.depth) if layers is None else layers)
    _expect_target(str(name), files, target, depths)
    try:
        model = Eagle3Model(files, target, len(depths), norm_before_residual, norm_output)
        options = target.engine_options.for_drafts
        if target.device.type != "cpu":
            model.to(target.device)
        if quantize is not None or options.engine == "compiled":
            options = replace(options, engine="native" if quantize else "eager", quantize=quantize or options.quantize)
        if isinstance(target.engine, NativeEngine):
            model.shared_panels = target.engine.panels_of(model.parameters())
        return Eagle3Head(model, target, depths, options)
    except (UnmappableError, ValueError) as error:
        raise ValueError(f"the head {name} {error}") from error


def _expect_target(name: str, files: Any, target: ModelRunner, depths: Sequence[int]) -> None:
    """ValueError if a head was trained for another target."""
    of_target = getattr(target.config, "name_or_path", "") or "the target"
    size = files.setting("target_hidden_size") or files.layer_config.get("hidden_size")
    wrong = f"the head {name} was trained for another model than {of_target}: "
    if size is None:
        raise ValueError(f"the head {name} has no hidden_size in its config.json")
    if size != target.config.hidden_size:
        raise ValueError(f"{wrong}it reads hidden states of size {size}, and the model's have {target.config.hidden_size}")
    if any(not 1 <= depth <= target.depth for depth in depths):
        named = f"reads the states after layers {', '.join(map(str, depths))}, and the model has layers 1 to {target.depth}"
        raise ValueError(f"the head {name} {named}: feature_layers names others")
    fc = files.tensors.get("fc.weight")
    if fc is not None and fc.shape[1] != len(depths) * size:
        named = f"and its config or feature_layers names {len(depths)}"
        raise ValueError(f"the head {name} reads the states of {fc.shape[1] / size:g} layers, {named}")
    tokens = target.head.weight.shape[0]
    if files.ids is not None and int(files.ids.max()) >= tokens:
        raise ValueError(f"{wrong}it drafts the token {int(files.ids.max())}, and the model has {tokens}")
    ids = vocabulary(str(files.folder)), vocabulary(of_target, getattr(target.config, COMMIT, None))
    if None not in ids and ids[0] != ids[1]:
        raise ValueError(f"{wrong}their tokenizers have different vocabularies")
    drafted, whole = files.config.get("draft_vocab_size"), files.layer_config.get("vocab_size")
    if files.ids is None and None not in (drafted, whole) and drafted != whole:
        raise ValueError(f"the head {name} lacks d2t: its config says that it drafts {drafted} of {whole} tokens")
    matrices = [files.tensors.get(f"{matrix}.weight") for matrix in ("embed_tokens", *["lm_head"] * (files.ids is None))]
    for own in (files.vocabulary_size, *[len(matrix) for matrix in matrices if matrix is not None]):
        if own is not None and abs(own - tokens) >= MAX_PADDING:
            raise ValueError(f"{wrong}it has {own} tokens, and the model {tokens}")


MAX_PADDING = 512
"""Fewer rows than this may be padding: Qwen2.5 has 151,643 tokens, and its checkpoints have 151,936 or 152,064 rows."""
