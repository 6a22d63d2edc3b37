"""Reads generation_config.json as plain values, or refuses it with a sentence. transformers ignores a broken file.

Nothing here imports torch, so that the command line refuses wrong values before it loads anything.
"""

import difflib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = "generation_config.json"
OWN_FIELD = "skipstone"  # field of a generation_config for the default method
KEPT_DEFAULTS = ("bos_token_id", "eos_token_id", "pad_token_id", OWN_FIELD)
"""Generation defaults that are facts of the model. They are kept if a replacement does not set them."""
MISSPELT = 0.9
"""Minimum similarity of an unknown field to a known one that counts as a typo. Models may have fields of their own."""
_BOOL = (
    *("do_sample", "renormalize_logits", "remove_invalid_values", "use_cache", "return_dict_in_generate", "output_scores"),
    *("output_logits", "output_attentions", "output_hidden_states"),
)
_WHOLE = (
    *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "top_k", "num_beams", "num_beam_groups"),
    *("num_return_sequences", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "prefill_chunk_size", "bos_token_id"),
    *("pad_token_id", "decoder_start_token_id", "forced_bos_token_id"),
)
_NUMBER = (
    *("temperature", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "repetition_penalty"),
    *("encoder_repetition_penalty", "length_penalty", "diversity_penalty", "max_time", "guidance_scale"),
)
_IDS = ("eos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens")
_LISTS = ("bad_words_ids", "exponential_decay_length_penalty")
_KINDS: dict[str, tuple[str, tuple[type, ...]]] = {
    **dict.fromkeys(_BOOL, ("true or false", (bool,))),
    **dict.fromkeys(_WHOLE, ("a whole number", (int,))),
    **dict.fromkeys(_NUMBER, ("a number", (int, float))),
    **dict.fromkeys(_IDS, ("a token id or a list of them", (int, list))),
    **dict.fromkeys(_LISTS, ("a list", (list, tuple))),
    "stop_strings": ("a text or a list of them", (str, list)),
}
"""Field -> expected value in words and as Python types."""

_AT_LEAST_1 = ("max_length", "max_new_tokens", "prefill_chunk_size")


def refuse_small_values(values: Mapping[str, Any]) -> None:
    """ValueError for numbers with which no text could be generated. transformers checks few of them."""
    for name in _AT_LEAST_1:
        if (value := values.get(name)) is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, found {value}")


def refuse_wrong_types(values: Mapping[str, Any], source: str) -> None:
    """ValueError for the first field with a value of the wrong type. Unknown fields are allowed. source: of the values."""
    for name, value in values.items():
        expected, types = _KINDS.get(name, ("", (object,)))
        is_bool = isinstance(value, bool) and bool not in types and object not in types
        ids = value if name in _IDS and isinstance(value, list) else []
        if value is not None and (is_bool or not isinstance(value, types) or any(type(one) is not int for one in ids)):
            raise ValueError(f"{source}: {name} must be {expected}, found {value!r}; correct it or remove it")


def parse_generation_config(text: str | bytes, source: str) -> dict[str, Any]:
    """The fields of a generation config. source: of the text. ValueError for anything else."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source} is no JSON ({error}); correct it or remove it") from None
    if not isinstance(values, dict):
        raise ValueError(f"{source} must be a JSON object, found {type(values).__name__}; correct it or remove it")
    refuse_wrong_types(values, source)
    for name, meant in misspelt_fields(values):
        warnings.warn(f"{source} has {name!r}, which nothing reads; did you mean {meant}?", stacklevel=2)
    return values


def misspelt_fields(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Misspelt names, each with the most similar field."""
    close = {name: difflib.get_close_matches(name, _KINDS, n=1, cutoff=MISSPELT) for name in values if name not in _KINDS}
    return [(name, found[0]) for name, found in close.items() if found]


def read_generation_config(path: Path) -> dict[str, Any]:
    """The fields in a file. OSError if it cannot be read, ValueError if it is no generation config."""
    return parse_generation_config(path.read_bytes(), str(path))


class GenerationFields:
    """Generation defaults as attributes, as transformers' GenerationConfig has them. A field that is not set is None."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.__dict__ |= values

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return None

    def to_dict(self) -> dict[str, Any]:
        """The fields that are set."""
        return dict(vars(self))

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> "GenerationFields":
        """Those of a model without a generation_config.json: fields of the same names in its config."""
        return cls({name: config[name] for name in _KINDS if config.get(name) is not None})
