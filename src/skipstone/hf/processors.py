"""transformers' logits processors, one list per row: its own list is bound to the padded batch."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.logits_process import LogitNormalization, PrefixConstrainedLogitsProcessor

from skipstone.hf.generate_call import GenerateCall
from skipstone.hf.generation_config_fields import EXOTIC
from skipstone.models.device_map import input_device


class RowProcessors:
    """The processors of a prepared call, rebuilt per row in the same order.

    The call has transformers' list for the padded batch, the user's own objects included. An entry that transformers built from
    the options is replaced by the one it builds for the row alone; a user's object is used as it is.
    """

    def __init__(self, call: GenerateCall) -> None:
        self.model, self.config = call.runner.model, call.config
        config, built = call.config, _built(self.model, call.config, call.input_ids, call.model_kwargs)
        self._plan = [(processor, _take(built, processor)) for processor in call.logits_processor]
        # as transformers does, normalise the scores that a greedy call reports; they change no choice
        self._normalise = bool(config.renormalize_logits and config.output_scores and not config.do_sample)

    def of(self, row: int, prompt: Tensor, max_new_tokens: int) -> list[Any]:
        """The list `model.generate` would build for this row alone, warpers left out. prompt: [T] int64, unpadded."""
        own = {type(processor): processor for processor in row_processors(self.model, self.config, prompt, max_new_tokens)}
        processors = []
        for processor, built in self._plan:
            if not built:
                processors.append(_for_row(processor, row))
            elif type(processor) in own:  # what is not is a warper, and done elsewhere
                processors.append(own[type(processor)])
        return [*processors, LogitNormalization()] if self._normalise else processors


def row_processors(model: PreTrainedModel, config: GenerationConfig, prompt: Tensor, max_new_tokens: int) -> list[Any]:
    """What transformers builds from the options for one row on its unpadded ids, without warpers. prompt: [T] int64."""
    config, prompt = copy.deepcopy(config), prompt.to(input_device(model))
    config.do_sample, config.renormalize_logits = False, False
    if (ends := config._eos_token_tensor) is not None:  # transformers leaves it where the ids were
        config._eos_token_tensor = ends.to(input_device(model))
    config.max_length = len(prompt) + max_new_tokens
    if config.min_new_tokens:  # generate() turned it into a min_length of the padded batch
        config.min_length = 0
    return _built(model, config, prompt[None], {})


def _built(model: PreTrainedModel, config: GenerationConfig, ids: Tensor, model_kwargs: dict[str, Any]) -> list[Any]:
    """transformers' list for ids [B, T]."""
    build: Any = model._get_logits_processor  # private; named in tests/hf/test_canary.py
    of_ids = {"input_ids_seq_length": ids.shape[1], "encoder_input_ids": ids, "device": str(ids.device)}
    return list(build(generation_config=config, model_kwargs=model_kwargs, **of_ids))


def warpers(model: PreTrainedModel, config: GenerationConfig) -> list[Callable[[Tensor, Tensor], Tensor]]:
    """transformers' own warpers in their order, for rows that use one without a vectorised form."""
    bare = GenerationConfig(do_sample=True, num_beams=1)
    for name in ("temperature", "top_k", "top_p", "min_p", *EXOTIC):
        setattr(bare, name, getattr(config, name, None))
    bare._eos_token_tensor = None
    build: Any = model._get_logits_processor
    return list(build(generation_config=bare, input_ids_seq_length=1, device=str(input_device(model)), model_kwargs={}))


def _take(built: list[Any], processor: Any) -> bool:
    """Whether transformers built this processor from the options; each built one answers for one entry only."""
    for index, mine in enumerate(built):
        if _alike(processor, mine):
            del built[index]
            return True
    return False


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
