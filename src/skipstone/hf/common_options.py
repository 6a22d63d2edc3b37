"""Merges the options of a call on a `MappedModel` as transformers does, without importing it, if they are common ones.

tests/hf/test_common_options.py compares the requests with those of transformers' own way.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from skipstone.hf.generation_config_fields import CHANGES_NOTHING, FIELDS
from skipstone.models.generation_config import OWN_FIELD, GenerationFields, refuse_wrong_types

DEFAULTS: Mapping[str, Any] = {
    **{"max_new_tokens": None, "max_length": None, "do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0},
    **{"min_p": None, "repetition_penalty": 1.0, "eos_token_id": None, "pad_token_id": None, "bos_token_id": None},
    **{"num_return_sequences": 1, "use_cache": True, "prefill_chunk_size": None, OWN_FIELD: None},
}
"""The common fields of a generation config and transformers' defaults."""
IGNORED = ("transformers_version", "_from_model_config", "return_dict_in_generate")
"""Fields of saved files that change no text here."""
NEUTRAL = {"num_beams": 1, "num_beam_groups": 1, "length_penalty": 1.0, "typical_p": 1.0}
"""Values of other fields that some files name although they are transformers' defaults."""
DEFAULT_NEW_TOKENS = 20


def merge_common_options(own: GenerationFields, options: Mapping[str, Any], length: int, max_positions: int) -> Any:
    """The merged fields for a prompt of `length` tokens, with `max_length` and `eos` set. None if an option is not common, or
    has a wrong value, which transformers names. own: the model's defaults."""
    given = {name: value for name, value in own.to_dict().items() if value is not None}
    fields = {**DEFAULTS, **given, **options}
    if not _are_common(fields):
        return None
    merged: Any = GenerationFields(fields)
    if merged.max_new_tokens is not None:
        merged.max_length = length + merged.max_new_tokens
    elif merged.max_length is None:
        merged.max_length = min(length + DEFAULT_NEW_TOKENS, max_positions)
    ends = [merged.eos_token_id] if isinstance(merged.eos_token_id, int) else merged.eos_token_id or []
    merged.eos = frozenset(ends)
    merged._pad_token_tensor = next(iter(ends), None) if merged.pad_token_id is None else merged.pad_token_id
    return merged


def _are_common(fields: Mapping[str, Any]) -> bool:
    """Whether all fields that are set are common, and their values valid."""
    others = {name: value for name, value in fields.items() if name not in (*DEFAULTS, *IGNORED)}
    if not all(_is_unset(name, value) for name, value in others.items()):
        return False
    try:
        refuse_wrong_types(fields, "options")
    except ValueError:
        return False
    penalty, count = fields["repetition_penalty"], fields["num_return_sequences"]
    ends = fields["eos_token_id"]
    return (
        count in (None, 1)
        and (penalty in (None, 1.0) or (isinstance(penalty, float) and penalty > 0))
        and all((fields[name] or 1) >= 1 for name in ("max_new_tokens", "max_length"))
        and min([ends] if isinstance(ends, int) else ends or [0], default=0) >= 0
    )


def _is_unset(name: str, value: Any) -> bool:
    """Whether a field has a value with which it changes nothing."""
    return value is None or value in CHANGES_NOTHING.get(name, ()) or (name in FIELDS and value in (False, NEUTRAL.get(name)))


class RepetitionPenalty:
    """Divides positive logits of tokens in the text by `penalty`, and multiplies others (Keskar et al., arXiv 1909.05858,
    section 4.1)."""

    def __init__(self, penalty: float) -> None:
        self.penalty = penalty

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """ids: [1, T]. scores: [1, V]."""
        own = scores.gather(1, ids)
        return scores.scatter(1, ids, (own * self.penalty).where(own < 0, own / self.penalty))
