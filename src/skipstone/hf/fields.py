"""Every field of transformers' GenerationConfig: supported with its meaning there, or refused with a reason.

A test walks over the installed transformers' fields, so none is ever ignored silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig

EXOTIC = {"typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "top_h": None}
"""Warpers without a vectorised form, and the values that turn them off."""

_BEAMS = "skipstone does not search beams"
_OWN_CACHE = "skipstone keeps its own KV store"
_ASSISTED = "this is an option of transformers' assisted generation; set the method's own (see docs/migration.md)"

SUPPORTED = None
FIELDS: dict[str, str | None] = {
    # length and stopping
    "max_length": SUPPORTED,
    "max_new_tokens": SUPPORTED,
    "min_length": SUPPORTED,
    "min_new_tokens": SUPPORTED,
    "max_time": SUPPORTED,
    "stop_strings": SUPPORTED,
    "eos_token_id": SUPPORTED,
    "forced_eos_token_id": SUPPORTED,
    "forced_bos_token_id": SUPPORTED,
    # sampling
    "do_sample": SUPPORTED,
    "temperature": SUPPORTED,
    "top_k": SUPPORTED,
    "top_p": SUPPORTED,
    "min_p": SUPPORTED,
    "top_h": SUPPORTED,
    "typical_p": SUPPORTED,
    "epsilon_cutoff": SUPPORTED,
    "eta_cutoff": SUPPORTED,
    "num_return_sequences": SUPPORTED,
    "renormalize_logits": SUPPORTED,
    # processors, one list per row
    "repetition_penalty": SUPPORTED,
    "encoder_repetition_penalty": SUPPORTED,
    "no_repeat_ngram_size": SUPPORTED,
    "encoder_no_repeat_ngram_size": SUPPORTED,
    "bad_words_ids": SUPPORTED,
    "sequence_bias": SUPPORTED,
    "suppress_tokens": SUPPORTED,
    "begin_suppress_tokens": SUPPORTED,
    "exponential_decay_length_penalty": SUPPORTED,
    "remove_invalid_values": SUPPORTED,
    # output, tokens, bookkeeping
    "return_dict_in_generate": SUPPORTED,
    "output_scores": SUPPORTED,
    "output_logits": SUPPORTED,
    "pad_token_id": SUPPORTED,
    "bos_token_id": SUPPORTED,
    "prefill_chunk_size": SUPPORTED,
    "transformers_version": SUPPORTED,
    # refused where set to something else than the default
    "num_beams": _BEAMS,
    "num_beam_groups": _BEAMS,
    "early_stopping": _BEAMS,
    "length_penalty": _BEAMS,
    "diversity_penalty": _BEAMS,
    "constraints": _BEAMS,
    "force_words_ids": _BEAMS,
    "use_cache": SUPPORTED,  # it changes no text; training leaves a False in a model's own config
    "cache_implementation": _OWN_CACHE,
    "cache_config": _OWN_CACHE,
    "max_cache_len": _OWN_CACHE,
    "low_memory": "contrastive search is not implemented",
    "penalty_alpha": "contrastive search is not implemented",
    "dola_layers": "DoLa is not implemented",
    "guidance_scale": "classifier-free guidance runs the model a second time for every token",
    "watermarking_config": "watermarks are not implemented",
    "token_healing": "token healing needs a tokenizer, which transformers does not pass on",
    "output_attentions": "attention maps are not kept",
    "output_hidden_states": "hidden states are not kept",
    "compile_config": "skipstone does not compile the model",
    "disable_compile": "skipstone does not compile the model",
    "continuous_batching_config": "continuous batching of transformers does not pass through here",
    "decoder_start_token_id": "skipstone decodes decoder-only models",
    "assistant_early_exit": "use method={'method': 'layerskip', 'exit_layer': E} instead (see docs/migration.md)",
    "assistant_confidence_threshold": _ASSISTED,
    "assistant_ensemble_weight": _ASSISTED,
    "assistant_lookbehind": _ASSISTED,
    "target_lookbehind": _ASSISTED,
    "num_assistant_tokens": _ASSISTED,
    "num_assistant_tokens_schedule": _ASSISTED,
    "is_assistant": _ASSISTED,
    "prompt_lookup_num_tokens": _ASSISTED,
    "max_matching_ngram_size": _ASSISTED,
    "speculation_type": _ASSISTED,
    "use_mtp": _ASSISTED,
}
_CHANGES_NOTHING = {
    "cache_implementation": ("dynamic", "dynamic_full", "static", "sliding_window", "hybrid", "hybrid_chunked"),
    "guidance_scale": (1,),
}
"""Values of refused fields that are no wish for anything but the model's own text."""


def refuse_fields(values: Mapping[str, Any]) -> None:
    """ValueError for the first field that is set and that skipstone does not support, or does not know.

    values: as `GenerationConfig.to_dict` gives them. A field at transformers' default is not set; a field that transformers
    does not have (a model's own) means nothing to its generate() either.
    """
    fresh = GenerationConfig()
    defaults = {**fresh.to_dict(), **fresh._get_default_generation_params()}
    for name, value in values.items():
        reason = FIELDS.get(name, "skipstone does not know this option")
        default = defaults.get(name)
        unset = value is None or value == default or (value is False and default is None)
        if name.startswith("_") or name not in defaults or reason is SUPPORTED or unset:
            continue
        if value in _CHANGES_NOTHING.get(name, ()):
            continue
        raise ValueError(f"{name}={value!r} is not supported: {reason}")


def merged_fields(own: GenerationConfig, given: GenerationConfig | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of one call, by transformers' priority: keyword arguments, the config given, the model's own."""
    fields = dict(own.to_dict())
    if given is not None:
        fields |= {name: value for name, value in given.to_dict().items() if value is not None}
    return fields | {name: value for name, value in options.items() if name in FIELDS}
