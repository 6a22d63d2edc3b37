"""Merges the options of a call on a `MappedModel` as transformers does, without importing it, if they are common ones.

tests/hf/test_common_options.py compares the requests with those of transformers' own way.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from skipstone.hf.generation_config_fields import CHANGES_NOTHING, FIELDS
from skipstone.models.generation_config import OWN_FIELD, GenerationFields, refuse_wrong_types

COMMON: Mapping[str, Any] = {
    **{"max_new_tokens": None, "max_length": None, "do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0},
    **{"min_p": None, "repetition_penalty": 1.0, "eos_token_id": None, "pad_token_id": None, "bos_token_id": None},
    **{"num_return_sequences": 1, "use_cache": True, "prefill_chunk_size": None, OWN_FIELD: None},
}
"""The common fields of a generation config, with transformers' defaults."""
IGNORED = ("transformers_version", "return_dict_in_generate")
"""Further fields that change no request."""
NEUTRAL: Mapping[str, Any] = {
    **{"min_length": 0, "num_beams": 1, "num_beam_groups": 1, "length_penalty": 1.0, "diversity_penalty": 0.0},
    **{"typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "encoder_repetition_penalty": 1.0},
    **{"no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0},
}
"""transformers' defaults of other fields, which some files name."""


def merge_common_options(own: GenerationFields, options: Mapping[str, Any], length: int) -> Any:
    """The merged fields for a prompt of `length` tokens, with `max_length` and `eos` set. None if transformers must merge them,
    because an option is not common, or has a value about which transformers warns or raises an error.

    own: the model's defaults. Unknown fields in it are ignored, as in transformers."""
    if not options.keys() <= FIELDS.keys():
        return None
    known = {**COMMON, **FIELDS}
    given = {name: value for name, value in own.to_dict().items() if name in known and value is not None}
    fields = {**COMMON, **given, **options}
    if not all(name in COMMON or name in IGNORED or _is_neutral(name, value) for name, value in fields.items()):
        return None
    merged: Any = GenerationFields(fields)
    if not _are_valid(merged):
        return None
    if merged.max_new_tokens is not None:
        merged.max_length = length + merged.max_new_tokens
    if merged.max_length is None or merged.max_length <= length:
        return None
    ends = _ids(merged.eos_token_id)
    merged.eos = frozenset(ends)
    merged._pad_token_tensor = next(iter(ends), None) if merged.pad_token_id is None else merged.pad_token_id
    return merged


def _is_neutral(name: str, value: Any) -> bool:
    """Whether a field has a value with which it changes nothing."""
    return value is False or value in CHANGES_NOTHING.get(name, ()) or value == NEUTRAL.get(name)


def _are_valid(merged: Any) -> bool:
    """Whether transformers takes the common fields without an error or a warning."""
    try:
        refuse_wrong_types(merged.to_dict(), "options")
    except ValueError:
        return False
    factors = [factor for factor in (merged.temperature, merged.repetition_penalty) if factor not in (None, 1)]
    shares = [share for share in (merged.top_p, merged.min_p) if share is not None]
    counts = (merged.top_k or 0, merged.pad_token_id or 0, *_ids(merged.eos_token_id))
    return (
        all(isinstance(factor, float) and factor > 0 for factor in factors)
        and all(0 <= share <= 1 for share in shares)
        and all(count >= 0 for count in counts)
        and merged.eos_token_id != []
        and merged.num_return_sequences == 1
    )


def _ids(value: Any) -> list[int]:
    """A field with one token id, several or none."""
    return [value] if isinstance(value, int) else value or []


class RepetitionPenalty:
    """Divides positive logits of tokens in the text by `penalty`, and multiplies others (Keskar et al., arXiv 1909.05858,
    section 4.1)."""

    def __init__(self, penalty: float) -> None:
        self.penalty = penalty

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """ids: [1, T]. scores: [1, V]."""
        own = scores.gather(1, ids)
        return scores.scatter(1, ids, (own * self.penalty).where(own < 0, own / self.penalty))
