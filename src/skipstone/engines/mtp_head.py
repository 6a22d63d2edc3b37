"""The layer for multi-token prediction (MTP) that a checkpoint brings, as a head that drafts.

DeepSeek-V3 (arXiv 2412.19437, section 2.2) defines it: h' = M [norm(embedding of the next token); norm(state)], one decoder
layer, the final norm and the target's LM head.
"""

import warnings
from typing import Any, Literal

import torch
from torch import Tensor

from skipstone.engines.choose_engine import EngineOptions
from skipstone.engines.feature_head import FeatureHead
from skipstone.engines.model_runner import ModelRunner
from skipstone.models.mtp_layer import MtpLayer, folder_of
from skipstone.models.mtp_layouts import NoMtpError
from skipstone.models.per_model_cache import PerModelCache

Feedback = Literal["normed", "raw"]
_LAYERS: PerModelCache[MtpLayer | str] = PerModelCache(1)
"""The MTP layer of a model, or why it has none, as the end of a sentence about the model."""


class MtpHead(FeatureHead):
    """Drafts with the MTP layer of a target. It reads the target's states after the final norm.

    feedback: the states of the drafts' columns are the layer's output after its final norm ("normed") or before it ("raw").
    layer: its weights.
    """

    def __init__(self, target: ModelRunner, layer: MtpLayer, feedback: Feedback = "normed") -> None:
        """target: the runner of the model that the layer was read for."""
        super().__init__(layer.model, EngineOptions("eager"))
        self.layer, self.feedback, self.depths = layer, feedback, (target.depth,)
        self._target_engine = target.engine  # not the runner, which keeps its model alive
        self._embed = layer.model.get_input_embeddings()

    def read_states(self, states: Tensor) -> Tensor:
        """As in `FeatureHead`."""
        return self._target_engine.normed(states).to(self.dtype)

    def enter(self, tokens: Tensor, states: Tensor) -> Tensor:
        """As in `FeatureHead`."""
        layer = self.layer
        return layer.eh_proj(torch.cat([layer.enorm(self._embed(tokens)), layer.hnorm(states)], -1))

    def feed_back(self, hidden: Tensor) -> Tensor:
        """As in `FeatureHead`."""
        return self.normed(hidden) if self.feedback == "normed" else hidden

    @property
    def weights(self) -> list[Tensor]:
        """As in `FeatureHead`."""
        return [*super().weights, self.layer.eh_proj.weight]

    @property
    def nbytes(self) -> int:
        """As in `FeatureHead`."""
        return self.layer.nbytes


def attach_mtp(model: Any, wanted: bool = True) -> None:
    """Read the MTP layer of a model that has just been loaded. If it cannot be read, a warning says why.

    wanted: False leaves the layer out.
    """

    def read() -> MtpLayer | str:
        if not wanted:
            return "was loaded without its MTP layer (mtp=False or --no-mtp)"
        try:
            return _read(model)
        except NoMtpError as reason:
            return str(reason)
        except FileNotFoundError:
            return "was loaded from files without an MTP layer"
        except Exception as error:  # the model decodes without its MTP layer, too
            remedy = "texts are the same without it, and mtp=False or --no-mtp leaves it out"
            warnings.warn(f"{model.config.name_or_path} {error}: {remedy}", RuntimeWarning, stacklevel=4)
            return str(error)

    _LAYERS.get(model, "mtp", read)


def attached_mtp(target: ModelRunner, feedback: Feedback = "normed") -> MtpHead | None:
    """The MTP head of a model, if its layer has been read; else None."""
    model = target.model
    return load_mtp(target, feedback) if isinstance(_LAYERS.known(model).get("mtp"), MtpLayer) else None


def load_mtp(target: ModelRunner, feedback: Feedback = "normed") -> MtpHead:
    """The MTP head of a model. If nobody has read its layer yet, it is read from the model's files.

    OSError if there are no files. ValueError if they have no MTP layer that skipstone runs or one that does not fit, and if the
    model was loaded without it.
    """
    model = target.model
    try:
        layer = _LAYERS.get(model, "mtp", lambda: _read(model), lambda known: isinstance(known, str) or known.fits(model))
    except ValueError as error:
        layer = str(error)
    if isinstance(layer, str):
        raise ValueError(f"{model.config.name_or_path} {layer}")
    return MtpHead(target, layer, feedback)


def _read(model: Any) -> MtpLayer:
    """Errors as in `MtpLayer`. The message of a ValueError is the end of a sentence about the model."""
    try:
        return MtpLayer(model, folder_of(model.config))
    except NoMtpError:
        raise
    except (ValueError, RuntimeError) as error:  # transformers raises the second one for weights that do not fit
        raise ValueError(f"has an MTP layer that cannot be used ({error})") from error


def mtp_notes(target: ModelRunner) -> list[str]:
    """Sentences for a user about the MTP layer that takes memory next to a model; empty without one."""
    layer = _LAYERS.known(target.model).get("mtp")
    if not isinstance(layer, MtpLayer):
        return []
    notes = [f"MTP layer, extra memory: {layer.nbytes / 1e6:.1f} MB; --no-mtp leaves it out"]
    if layer.num_layers > 1:
        notes.append(f"the checkpoint has {layer.num_layers} MTP layers, and skipstone runs the first")
    return notes
