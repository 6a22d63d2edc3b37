"""The only place that builds requests: one Request per row of a prepared call.

`skipstone.generate`, an enabled `model.generate`, HTTP, batch files and the command line all pass keyword arguments of
`skipstone.generate`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from skipstone.decoding.noise import row_seed
from skipstone.decoding.request import Criterion, Request
from skipstone.decoding.sampling import Sampling
from skipstone.engines.model_runner import ModelRunner
from skipstone.hf.generate_call import REFUSED_ARGUMENTS, GenerateCall, check_shapes, prepare_call
from skipstone.hf.generation_config_fields import EXOTIC
from skipstone.hf.processors import processors_of_rows, warpers
from skipstone.models.tensor_parallel import TensorParallelGroup

_PREPARED = ("attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep")
"""Arguments that transformers prepares for the model's forward, or that `_check_inputs` checks."""


def build_request(model: ModelRunner, prompt: Sequence[int], tokenizer: Any, seed: int, options: dict[str, Any]) -> Request:
    """One request. prompt: token ids. options: keyword arguments of `skipstone.generate` for one row.

    ValueError for unsupported settings in the options or in the model's generation config.
    """
    ids = torch.tensor([list(prompt)], dtype=torch.int64, device=model.device)
    # without a mask transformers would treat pad tokens as padding; max_new_tokens overrides the model's own max_length
    options = {"attention_mask": torch.ones_like(ids), **options, "num_return_sequences": 1}
    if options.get("max_new_tokens") is not None:
        options["max_length"] = None
    (request,) = build_requests(prepare_call(model.model, ids, tokenizer, seed, options))
    return request


def build_requests(call: GenerateCall) -> list[Request]:
    """One Request per row. ValueError for unsupported settings and for inputs that cannot be decoded."""
    _check_inputs(call)
    max_new_tokens = call.max_length - call.input_ids.shape[1]
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, found {max_new_tokens} (max_length less the prompt)")
    criteria, prompts = [_synchronised(criterion, call.runner.ranks) for criterion in call.criteria], call.prompts
    rows = zip(prompts, _seeds(call, len(prompts)), processors_of_rows(call, prompts, max_new_tokens), strict=True)
    return [
        Request(prompt, max_new_tokens, call.eos, _sampling(call, seed, own), criteria, stop_strings=call.stop_strings)
        for prompt, seed, own in rows
    ]


def _check_inputs(call: GenerateCall) -> None:
    ids, extra = call.input_ids, call.model_kwargs
    mask = extra.get("attention_mask")
    check_shapes(ids, mask)
    for name, value in extra.items():
        is_unset = value is None or value is False or (isinstance(value, dict) and not value)  # {}: a prompt without images
        if name not in _PREPARED and not is_unset:
            reason = REFUSED_ARGUMENTS.get(name, "skipstone hands nothing but token ids to the model")
            raise ValueError(f"{name} is not supported: {reason}")
    cache = extra.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError(
            f"past_key_values of {cache.get_seq_length()} tokens are not supported: {REFUSED_ARGUMENTS['past_key_values']}"
        )
    real = torch.ones_like(ids) if mask is None else (mask != 0).long()
    if not bool(real.any(1).all()):
        row = int(real.any(1).int().argmin())
        raise ValueError(f"row {row} of the batch is all padding; every row needs at least one token")
    positions = extra.get("position_ids")
    if positions is not None and not bool(((positions == real.cumsum(1) - 1) | (real == 0)).all()):
        raise ValueError("position_ids other than 0, 1, 2, ... over the unpadded tokens of a row are not supported")


def _synchronised(criterion: Criterion, ranks: TensorParallelGroup) -> Criterion:
    """A stopping criterion with one result in all processes of a model, because it may depend on time."""
    if ranks.size == 1:
        return criterion

    def synchronised(ids: Tensor, scores: Any) -> Tensor:
        met = torch.as_tensor(criterion(ids, scores), dtype=torch.bool, device=ids.device)
        return torch.tensor([ranks.agreed(float(met.all())) > 0], dtype=torch.bool, device=ids.device)

    return synchronised


def _seeds(call: GenerateCall, rows: int) -> list[int]:
    seed = call.seed
    if seed is None:  # greedy rows draw nothing, so torch's generator does not advance
        drawn = torch.randint(1 << 62, (), dtype=torch.int64, device="cpu") if call.config.do_sample else None
        seed = 0 if drawn is None else call.runner.ranks.agreed_whole(int(drawn))
    if isinstance(seed, int) and not isinstance(seed, bool):
        return [row_seed(seed, row) for row in range(rows)]
    if isinstance(seed, list) and len(seed) == rows and all(type(s) is int for s in seed):
        return [s % (1 << 63) for s in seed]
    raise ValueError(f"seed must be an integer or a list of {rows} integers, one per row, found {seed!r}")


def _sampling(call: GenerateCall, seed: int, processors: list[Any]) -> Sampling:
    config = call.config
    if not config.do_sample:
        return Sampling(seed=seed, processors=processors)
    temperature = 1.0 if config.temperature is None else config.temperature
    if temperature <= 0:
        raise ValueError(f"temperature must be positive when do_sample=True, found {temperature}; greedy is do_sample=False")
    exotic = any(getattr(config, name, None) not in (None, neutral) for name, neutral in EXOTIC.items())
    return Sampling(
        temperature=temperature,
        top_k=config.top_k or 0,
        top_p=1.0 if config.top_p is None else config.top_p,
        min_p=config.min_p or 0.0,
        seed=seed,
        processors=processors,
        warpers=warpers(call.runner, config) if exotic else [],
    )
