"""Hugging Face's options, with Hugging Face's meaning: a prepared `generate` call in, one Request per row out.

FIELDS lists every field of GenerationConfig; a test walks over the installed transformers' fields, so none is ever ignored
silently.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.logits_process import LogitsProcessorList, PrefixConstrainedLogitsProcessor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from skipstone.core.sampling import Sampling
from skipstone.core.session import Request

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
    "use_cache": _OWN_CACHE,
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
_HARMLESS_CACHES = (None, "dynamic", "dynamic_full", "static", "sliding_window", "hybrid", "hybrid_chunked")
_EXOTIC = {"typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "top_h": None}
OWN_FIELD = "skipstone"  # where a model's generation_config carries its default method


@dataclass
class Call:
    """A `generate` call as transformers hands it to a custom decoding function: everything prepared for the padded batch.

    input_ids: [B, T] int64, left-padded. logits_processor, stopping_criteria: prepared lists, user's objects included.
    seed: of row 0, row i gets seed + i; or one seed per row; None draws one from torch's generator.
    """

    model: PreTrainedModel
    input_ids: Tensor
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    config: GenerationConfig
    seed: int | list[int] | None = None
    model_kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def prompts(self) -> list[Tensor]:
        """The rows without their padding, [T_row] each."""
        mask = self.model_kwargs.get("attention_mask")
        if mask is None:
            return list(self.input_ids)
        return [ids[row != 0] for ids, row in zip(self.input_ids, mask, strict=True)]


def prepare(model: PreTrainedModel, input_ids: Tensor | None, seed: int | list[int] | None = None, **kwargs: Any) -> Call:
    """Let transformers merge and validate the options of a call, and stop short of decoding. Keyword arguments are those of
    `model.generate`; an unknown one is a ValueError."""

    def capture(
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Any:
        return Call(model, input_ids, logits_processor, stopping_criteria, generation_config, seed, model_kwargs)

    kind: Any = type(model)
    return kind.generate(model, input_ids, custom_generate=capture, **kwargs)


def requests(call: Call) -> list[Request]:
    """One Request per row. ValueError for what skipstone does not support and for inputs that cannot be decoded."""
    refuse_fields(call.config)
    _check_inputs(call)
    max_new_tokens = _max_new_tokens(call)
    eos = frozenset(
        token for c in call.stopping_criteria if isinstance(c, EosTokenCriteria) for token in c.eos_token_id.tolist()
    )
    criteria = [c for c in call.stopping_criteria if not isinstance(c, (EosTokenCriteria, MaxLengthCriteria))]
    prompts = call.prompts
    seeds = _seeds(call.seed, len(prompts))
    custom = _custom_processors(call)
    return [
        Request(prompt, max_new_tokens, eos, _sampling(call, prompt, row, seeds[row], custom, max_new_tokens), criteria)
        for row, prompt in enumerate(prompts)
    ]


def refuse_fields(config: GenerationConfig) -> None:
    """ValueError for the first option that is set and that skipstone does not support, or does not know."""
    defaults = {**GenerationConfig().to_dict(), **GenerationConfig._get_default_generation_params()}
    for name, value in config.to_dict().items():
        reason = FIELDS.get(name, "unknown")
        default = defaults.get(name)
        if name.startswith("_") or reason is SUPPORTED or value is None or value == default:
            continue
        if value is False and default is None:
            continue
        if name == "cache_implementation" and value in _HARMLESS_CACHES:
            continue
        if reason == "unknown":
            if name in defaults:  # a field that transformers has grown since
                raise ValueError(f"{name}={value!r}: skipstone does not know this option")
            continue  # a model's own field: it means nothing to generate() either
        raise ValueError(f"{name}={value!r} is not supported: {reason}")


def _check_inputs(call: Call) -> None:
    ids, mask = call.input_ids, call.model_kwargs.get("attention_mask")
    if ids.ndim != 2 or ids.shape[1] == 0 or ids.shape[0] == 0:
        raise ValueError(f"input_ids must be [batch, length] with at least one token, found shape {list(ids.shape)}")
    if call.model_kwargs.get("inputs_embeds") is not None:
        raise ValueError("inputs_embeds are not supported: skipstone needs token ids")
    if mask is not None:
        if mask.shape != ids.shape:
            raise ValueError(f"attention_mask has shape {list(mask.shape)}, expected that of input_ids, {list(ids.shape)}")
        empty = (mask != 0).sum(1) == 0
        if bool(empty.any()):
            raise ValueError(f"row {int(empty.int().argmax())} of the batch is all padding; every row needs at least one token")
    embedding: Any = call.model.get_input_embeddings()
    size = embedding.weight.shape[0]
    used = ids if mask is None else ids[mask != 0]
    low, high = int(used.min()), int(used.max())
    if low < 0 or high >= size:
        wrong = low if low < 0 else high
        raise ValueError(f"token id {wrong} is out of range: the model's vocabulary has {size} entries, 0 to {size - 1}")


def _max_new_tokens(call: Call) -> int:
    limits = [c.max_length for c in call.stopping_criteria if isinstance(c, MaxLengthCriteria)]
    limits = limits or [call.config.max_length]
    count = min(limits) - call.input_ids.shape[1]
    if count < 1:
        raise ValueError(f"max_new_tokens must be at least 1, found {count} (max_length less the prompt)")
    return count


def _seeds(seed: int | list[int] | None, rows: int) -> list[int]:
    if seed is None:
        seed = int(torch.randint(1 << 62, ()).item())
    if isinstance(seed, int) and not isinstance(seed, bool):
        return [(seed + row) % (1 << 63) for row in range(rows)]
    if isinstance(seed, list) and len(seed) == rows and all(isinstance(s, int) for s in seed):
        return [s % (1 << 63) for s in seed]
    raise ValueError(f"seed must be an integer or a list of {rows} integers, found {seed!r}")


def _sampling(call: Call, prompt: Tensor, row: int, seed: int, custom: list[Any], max_new_tokens: int) -> Sampling:
    config = call.config
    processors = row_processors(call.model, config, prompt, max_new_tokens)
    processors += [_for_row(processor, row) for processor in custom]
    if not config.do_sample:
        return Sampling(seed=seed, processors=processors)
    temperature = 1.0 if config.temperature is None else config.temperature
    if temperature <= 0:
        raise ValueError(f"temperature must be positive when do_sample=True, found {temperature}; greedy is do_sample=False")
    exotic = any(getattr(config, name, None) not in (None, neutral) for name, neutral in _EXOTIC.items())
    return Sampling(
        temperature=temperature,
        top_k=config.top_k or 0,
        top_p=1.0 if config.top_p is None else config.top_p,
        min_p=config.min_p or 0.0,
        seed=seed,
        processors=processors,
        warpers=_warpers(call.model, config) if exotic else [],
    )


def row_processors(model: PreTrainedModel, config: GenerationConfig, prompt: Tensor, max_new_tokens: int) -> list[Any]:
    """transformers' processors for one row on its unpadded ids: its own list is bound to the padded batch.

    prompt: [T] int64. The list is the one `model.generate` builds for that row alone, warpers left out.
    """
    config = copy.deepcopy(config)
    config.do_sample, config.renormalize_logits, config.watermarking_config = False, False, None
    config.max_length = len(prompt) + max_new_tokens
    if config.min_new_tokens:  # generate() turned it into a min_length of the padded batch
        config.min_length = 0
    build: Any = model._get_logits_processor  # private; named in tests/test_canary.py
    return list(
        build(
            generation_config=config,
            input_ids_seq_length=len(prompt),
            encoder_input_ids=prompt[None],
            device=str(prompt.device),
            model_kwargs={},
        )
    )


def _warpers(model: PreTrainedModel, config: GenerationConfig) -> list[Any]:
    """transformers' own warpers in their order."""
    bare = GenerationConfig(do_sample=True, num_beams=1)
    for name in ("temperature", "top_k", "top_p", "min_p", *_EXOTIC):
        setattr(bare, name, getattr(config, name, None))
    bare._eos_token_tensor = None
    build: Any = model._get_logits_processor
    return list(build(generation_config=bare, input_ids_seq_length=1, device=str(model.device), model_kwargs={}))


def _custom_processors(call: Call) -> list[Any]:
    """The user's processors among the prepared ones: those that transformers would not have built from the config."""
    build: Any = call.model._get_logits_processor
    own = build(
        generation_config=call.config,
        input_ids_seq_length=call.input_ids.shape[1],
        encoder_input_ids=call.input_ids,
        device=str(call.input_ids.device),
        model_kwargs=call.model_kwargs,
    )
    return [p for p in call.logits_processor if not any(_alike(p, mine) for mine in own)]


def _alike(a: Any, b: Any) -> bool:
    """Same type and same state."""
    if type(a) is not type(b) or vars(a).keys() != vars(b).keys():
        return False
    return all(_equal(value, vars(b)[key]) for key, value in vars(a).items())


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(a, b)
    if callable(a) and callable(b):
        return getattr(a, "__qualname__", a) == getattr(b, "__qualname__", b)
    return bool(a == b)


def _for_row(processor: Any, row: int) -> Any:
    """A processor that asks which batch row it works on is told; all others are used as they are."""
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        return PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row, ids), 1)
    return processor
