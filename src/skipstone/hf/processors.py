"""Builds transformers' logits processors for each row, because transformers builds them for the padded batch."""

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from skipstone.engines.model_runner import ModelRunner
from skipstone.hf.generate_call import GenerateCall, generation_host
from skipstone.hf.generation_config_fields import EXOTIC

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel


def processors_of_rows(call: GenerateCall, prompts: list[Tensor], max_new_tokens: int) -> list[list[Any]]:
    """The lists that `model.generate` would build for each row alone, in the same order and without warpers.

    The call has transformers' list for the padded batch. Entries that transformers built from the options are built again for
    the row alone. The user's own objects are used unchanged. prompts: [T] int64 each, unpadded.
    """
    if not call.logits_processor or call.has_row_processors:
        return [list(call.logits_processor) for _ in prompts]
    from transformers.generation.logits_process import LogitNormalization

    model, config = generation_host(call.runner.model), call.config
    built = _built(model, config, call.input_ids, call.model_kwargs)
    plan = [(processor, _take(built, processor)) for processor in call.logits_processor]
    # as in transformers, normalise the reported scores of a greedy call; this changes no choice
    normalises = config.renormalize_logits and config.output_scores and not config.do_sample
    lists = []
    for row, prompt in enumerate(prompts):
        own = _row_processors(model, config, prompt.to(call.runner.device), max_new_tokens)
        rebuilt = {type(processor): processor for processor in own}
        processors = []
        for processor, is_built in plan:
            if not is_built:
                processors.append(_for_row(processor, row))
            elif type(processor) in rebuilt:  # the others are warpers, which `warpers` handles
                processors.append(rebuilt[type(processor)])
        lists.append([*processors, LogitNormalization()] if normalises else processors)
    return lists


def _row_processors(model: "PreTrainedModel", config: "GenerationConfig", prompt: Tensor, max_new_tokens: int) -> list[Any]:
    """The processors that transformers builds from the options for one row, without warpers. prompt: [T] int64, unpadded."""
    config = copy.deepcopy(config)
    config.do_sample, config.renormalize_logits = False, False
    if (ends := config._eos_token_tensor) is not None:  # it may be on another device, that of the batch's ids
        config._eos_token_tensor = ends.to(prompt.device)
    config.max_length = len(prompt) + max_new_tokens
    if config.min_new_tokens:  # transformers has set min_length from it, for the padded batch
        config.min_length = 0
    return _built(model, config, prompt[None], {})


def _built(model: "PreTrainedModel", config: "GenerationConfig", ids: Tensor, model_kwargs: dict[str, Any]) -> list[Any]:
    """transformers' list for ids [B, T]."""
    build: Any = model._get_logits_processor  # private; tests/hf/test_canary.py checks that it exists
    of_ids = {"input_ids_seq_length": ids.shape[1], "encoder_input_ids": ids, "device": str(ids.device)}
    return list(build(generation_config=config, model_kwargs=model_kwargs, **of_ids))


def warpers(runner: ModelRunner, config: "GenerationConfig") -> list[Callable[[Tensor, Tensor], Tensor]]:
    """transformers' own warpers in order, for rows with one that has no vectorised form."""
    from transformers import GenerationConfig

    bare = GenerationConfig(do_sample=True, num_beams=1)
    for name in ("temperature", "top_k", "top_p", "min_p", *EXOTIC):
        setattr(bare, name, getattr(config, name, None))
    bare._eos_token_tensor = None
    build: Any = generation_host(runner.model)._get_logits_processor
    return list(build(generation_config=bare, input_ids_seq_length=1, device=str(runner.device), model_kwargs={}))


def _take(built: list[Any], processor: Any) -> bool:
    """Whether `built` has an equal processor, which is removed from it."""
    for index, candidate in enumerate(built):
        if _is_equal(processor, candidate):
            del built[index]
            return True
    return False


def _is_equal(a: Any, b: Any) -> bool:
    """Whether two processors have the same type and state."""
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
    """The processor for a row: the one that passes a row number to the user's function gets this row, others are unchanged."""
    from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor

    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        return PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row, ids), 1)
    return processor
