"""A method as the callable that transformers' `generate(custom_generate=...)` wants."""

from collections.abc import Callable
from typing import Any

from torch import LongTensor, Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList

from skipstone.hf import generation
from skipstone.hf.call import Call, MethodLike, resolve_for
from skipstone.hf.fields import refuse_fields
from skipstone.hf.output import Output


def custom_generate(method: MethodLike = None) -> Callable[..., Output | LongTensor]:
    """What `model.generate(..., custom_generate=skipstone.custom_generate(method))` calls. method: as in `skipstone.generate`.

    transformers drops `streamer` and stop strings on this path; `skipstone.enable` keeps them.
    """

    def decode(
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        seed: int | list[int] | None = None,
        **model_kwargs: Any,
    ) -> Output | LongTensor:
        refuse_fields(generation_config.to_dict())
        chosen = resolve_for(model, method, generation_config)
        call = Call(model, input_ids, logits_processor, stopping_criteria, generation_config, seed, model_kwargs)
        output = generation.complete(chosen, call)
        return output if generation_config.return_dict_in_generate else output.sequences  # type: ignore[return-value]

    return decode
