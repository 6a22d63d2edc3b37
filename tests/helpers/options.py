"""Options of `model.generate` that are supported: what each changes, for the tests that ask whether it does so here."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """An option that changes greedy text. base: what else is set, with and without it. prompts: how many tokens each has."""

    options: dict[str, Any]
    base: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = (21, 14)


EOS = {"eos_token_id": [60, 72]}
TEXT: dict[str, Case] = {
    "max_new_tokens": Case({"max_new_tokens": 7}),
    "min_length": Case({"min_length": 24}, EOS),
    "min_new_tokens": Case({"min_new_tokens": 9}, EOS),
    "max_time": Case({"max_time": 1e-9}),
    "stop_strings": Case({"stop_strings": ["<23>", "abc"]}),
    "eos_token_id": Case({"eos_token_id": [60, 72]}),
    "forced_eos_token_id": Case({"forced_eos_token_id": 33}),
    "forced_bos_token_id": Case({"forced_bos_token_id": 33}, lengths=(1, 1)),
    "repetition_penalty": Case({"repetition_penalty": 1.5}),
    "encoder_repetition_penalty": Case({"encoder_repetition_penalty": 2.5}),
    "no_repeat_ngram_size": Case({"no_repeat_ngram_size": 2}),
    "encoder_no_repeat_ngram_size": Case({"encoder_no_repeat_ngram_size": 1}),
    "bad_words_ids": Case({"bad_words_ids": [[60], [72, 41]]}),
    "sequence_bias": Case({"sequence_bias": [[[13], 5.0], [[60, 60], -9.0]]}),
    "suppress_tokens": Case({"suppress_tokens": [60, 72, 5]}),
    "begin_suppress_tokens": Case({"begin_suppress_tokens": [60, 55, 72, 0]}),
    "exponential_decay_length_penalty": Case({"exponential_decay_length_penalty": (4, 1.4)}, {"eos_token_id": 96}),
}
LAW: dict[str, dict[str, Any]] = {
    "do_sample": {},
    "temperature": {"temperature": 1.2},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.1},
    "top_h": {"top_h": 0.5},
    "typical_p": {"typical_p": 0.5},
    "epsilon_cutoff": {"epsilon_cutoff": 0.03},
    "eta_cutoff": {"eta_cutoff": 0.05},
}
ELSEWHERE = {"max_length", "num_return_sequences", "return_dict_in_generate", "output_scores", "output_logits", "use_cache"}
ELSEWHERE |= {"remove_invalid_values", "renormalize_logits", "pad_token_id", "bos_token_id", "prefill_chunk_size"}
ELSEWHERE |= {"decoder_start_token_id", "disable_compile", "transformers_version"}
"""Fields that have tests of their own, or that change nothing here."""
