"""The second model of speculative decoding: which one it is, and whether it fits the target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from skipstone.assets import DRAFTS
from skipstone.loading import load_model, vocabulary
from skipstone.models.layered import LayeredModel
from skipstone.models.memo import Memo

DTYPES = ("float32", "bfloat16", "float16")
_LOADED: Memo[DraftModel] = Memo()


class DraftModel(LayeredModel):
    """A model that drafts for another one. target: the vocabulary that its logits are brought to."""

    def __init__(self, model: PreTrainedModel, size: int) -> None:
        super().__init__(model)
        self.name = called(model)
        self._missing = size - self.head.weight.shape[0]
        self._size = size

    def project(self, normed: Tensor, head: Any = None) -> Tensor:
        """Logits over the target's vocabulary, [B, n, V] float32: of models with the same tokenizer some pad
        their embedding further than others, and nobody draws from the padding."""
        logits = super().project(normed, head)
        if self._missing <= 0:
            return logits[..., : self._size]
        return torch.nn.functional.pad(logits, (0, self._missing), value=float("-inf"))


def called(model: Any) -> str:
    """What to call a model in an error."""
    return _place(model) or type(model).__name__


def _place(model: Any) -> str:
    """Where a model was loaded from; empty for one that was not."""
    return str(getattr(model.config, "name_or_path", "") or "")


def check_place(device: Any, dtype: Any, given: Any) -> None:
    """ValueError for where a draft model cannot be, and for moving one that was given as an object."""
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"draft_dtype must be one of {', '.join(DTYPES)} or none, found {dtype!r}")
    if device is not None and not isinstance(device, str):
        raise ValueError(f"draft_device must be the name of a device or none, found {device!r}")
    if isinstance(given, PreTrainedModel) and (device is not None or dtype is not None):
        raise ValueError("draft_device and draft_dtype go with the name of a draft model: one that is given as an object stays")
    if given is not None and not isinstance(given, (str, Path, PreTrainedModel)):
        raise ValueError(
            f"draft_model must be a folder, a hub id, one of {', '.join(DRAFTS)} or a model of transformers, "
            f"found {given if isinstance(given, (int, float, bool)) else type(given).__name__}"
        )


def of(given: str | PreTrainedModel | None, target: LayeredModel, device: str | None, dtype: str | None) -> DraftModel:
    """The draft model for a target, loaded once: by its name, the object itself, or the bundled one of the same vocabulary.

    OSError where nothing is found, ValueError for none and for one of another vocabulary.
    """
    check_place(device, dtype, given)
    if isinstance(given, PreTrainedModel):
        return _fitting(given, called(given), target)
    given = None if given is None else str(given)
    key = (given, target.head.weight.shape[0], device, dtype, str(target.device), str(target.dtype))
    return _LOADED.get(target.model, key, lambda: _made(given, target, device, dtype))


def _made(given: str | None, target: LayeredModel, device: str | None, dtype: str | None) -> DraftModel:
    name = given or _bundled(target)
    if name is None:
        raise ValueError(
            f"no draft model for {called(target.model)}: pass draft_model= (--draft-model), a folder or hub id of a smaller "
            "one with the same tokenizer"
        )
    kind = target.dtype if dtype is None else getattr(torch, dtype)
    try:
        model = load_model(DRAFTS.get(str(name), name), dtype=kind, device=device or target.device)
    except OSError as error:
        raise OSError(f"the draft model {name} for {called(target.model)} is not there: {error}") from error
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"the draft model {name} for {called(target.model)} cannot be loaded: {error}") from error
    return _fitting(model, str(name), target)


def _fitting(model: PreTrainedModel, name: str, target: LayeredModel) -> DraftModel:
    """ValueError for a model that cannot draft for the target, or that skipstone cannot decode."""
    if model.get_output_embeddings() is None:
        raise ValueError(
            f"the draft model {name} for {called(target.model)} has no LM head ({type(model).__name__}): load it with "
            "AutoModelForCausalLM"
        )
    _same_vocabulary(model, name, target)
    try:
        return DraftModel(model, target.head.weight.shape[0])
    except ValueError as error:
        raise ValueError(f"the draft model {name} for {called(target.model)} cannot draft: {error}") from error


def _bundled(target: LayeredModel) -> str | None:
    """The bundled draft model of a target's vocabulary."""
    own = vocabulary(_place(target.model))
    return next((name for name, folder in DRAFTS.items() if own is not None and own == vocabulary(str(folder))), None)


def _logits(model: Any) -> int:
    return int(model.get_output_embeddings().weight.shape[0])


def _same_vocabulary(model: PreTrainedModel, name: str, target: LayeredModel) -> None:
    """ValueError where the two models do not mean the same by the same number, as far as their tokenizers can be found."""
    theirs = target.model
    mine, other = vocabulary(_place(model)), vocabulary(_place(theirs))
    sizes = [_logits(one) for one in (model, theirs)]
    pair = f"the draft model {name} and the target {called(theirs)}"
    if mine is not None and other is not None:
        if mine != other:
            differ = sum(mine.get(token) != place for token, place in other.items())
            raise ValueError(
                f"{pair} have different vocabularies ({len(mine)} and {len(other)} tokens, {differ} of the target's mean other "
                "or none): a draft's tokens must be the target's"
            )
        if min(sizes) <= max(mine.values()):
            raise ValueError(f"{pair}: {min(sizes)} logits are too few for their {max(mine.values()) + 1} tokens")
    elif sizes[0] != sizes[1]:
        raise ValueError(f"{pair} have vocabularies of different sizes, {sizes[0]} and {sizes[1]}")
