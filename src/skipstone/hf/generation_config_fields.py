"""Every field of transformers' GenerationConfig: supported with the same meaning, or refused with a reason.

A test compares this list with the fields of the installed transformers, so none is ignored silently.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

EXOTIC = {"typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "top_h": None}
"""Warpers without a vectorised form -> the value that disables them."""

_SUPPORTED = (
    # length and stopping
    *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "stop_strings"),
    *("eos_token_id", "forced_eos_token_id", "forced_bos_token_id"),
    # sampling
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"),
    *("num_return_sequences", "renormalize_logits"),
    # processors, one list per row
    *("repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
    *("bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens", "exponential_decay_length_penalty"),
    "remove_invalid_values",
    # output, tokens, bookkeeping; use_cache changes no text, and some trained models have it False; decoder_start_token_id is
    # for encoder-decoders only, but some decoders have it (XGLM)
    *("return_dict_in_generate", "output_scores", "output_logits", "pad_token_id", "bos_token_id", "prefill_chunk_size"),
    *("transformers_version", "use_cache", "decoder_start_token_id", "disable_compile"),
)
"""Fields that mean the same as in transformers."""
_REFUSED = {
    "skipstone does not search beams": (
        *("num_beams", "num_beam_groups", "early_stopping", "length_penalty", "diversity_penalty", "constraints"),
        "force_words_ids",
    ),
    "skipstone keeps its own KV store": ("cache_implementation", "cache_config", "max_cache_len"),
    "contrastive search is not implemented": ("low_memory", "penalty_alpha"),
    "DoLa is not implemented": ("dola_layers",),
    "classifier-free guidance runs the model a second time for every token": ("guidance_scale",),
    "watermarks are not implemented": ("watermarking_config",),
    "token healing needs a tokenizer, which transformers does not pass on": ("token_healing",),
    "attention maps are not kept": ("output_attentions",),
    "hidden states are not kept": ("output_hidden_states",),
    "skipstone does not compile the model": ("compile_config",),
    "continuous batching of transformers does not call skipstone": ("continuous_batching_config",),
    "use method='layerskip exit_layer=E' instead (see docs/migration.md)": ("assistant_early_exit",),
    "use method='prompt_lookup' instead (see docs/migration.md)": ("prompt_lookup_num_tokens", "max_matching_ngram_size"),
    "this is an option of transformers' assisted generation; set the method's own (see docs/migration.md)": (
        *("assistant_confidence_threshold", "assistant_ensemble_weight", "assistant_lookbehind", "target_lookbehind"),
        *("num_assistant_tokens", "num_assistant_tokens_schedule", "is_assistant", "speculation_type", "use_mtp"),
    ),
}
"""Reason -> fields that are refused for it, unless they have transformers' default."""
FIELDS: dict[str, str | None] = {
    **dict.fromkeys(_SUPPORTED),
    **{name: reason for reason, names in _REFUSED.items() for name in names},
}
"""Every field of GenerationConfig -> why it is refused, None if it is supported."""
CHANGES_NOTHING = {
    "cache_implementation": ("dynamic", "dynamic_full", "static", "sliding_window", "hybrid", "hybrid_chunked"),
    "guidance_scale": (1,),
}
"""Values of refused fields that do not change the text."""


def refuse_fields(values: Mapping[str, Any]) -> None:
    """ValueError for the first field that is set and not supported.

    values: as from `GenerationConfig.to_dict`. Fields with transformers' default count as not set. Fields that transformers
    does not have, such as a model's own, are ignored, as in transformers.
    """
    defaults = _default_values()
    for name, value in values.items():
        if name.startswith("_") or name not in defaults:
            continue
        reason, default = FIELDS.get(name, "skipstone does not know this option"), defaults[name]
        unset = value is None or value == default or (value is False and default is None)
        if reason is None or unset:
            continue
        if value in CHANGES_NOTHING.get(name, ()):
            continue
        raise ValueError(f"{name}={value!r} is not supported: {reason}")


@cache
def _default_values() -> dict[str, Any]:
    """transformers' default of every field."""
    from transformers import GenerationConfig

    fresh = GenerationConfig()
    return {**fresh.to_dict(), **fresh._get_default_generation_params()}
