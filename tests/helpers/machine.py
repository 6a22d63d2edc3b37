"""What the proofs of the machine share: tiny random models, and a decoder run from requests to texts."""

import copy
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

from skipstone.decoding.draft import Step
from skipstone.decoding.loop import PREFILL_CHUNK, DecodingLoop
from skipstone.decoding.method import Method
from skipstone.decoding.request import Request
from skipstone.decoding.stats import Stats
from skipstone.engines.model_runner import ModelRunner
from skipstone.models.passes import SkipSet


def sharpened(model: Any, exit_layer: int, head: float = 8.0, later: float = 0.45) -> Any:
    """Quieten the layers from exit_layer on and sharpen the head, so that early exits agree with the model now and then."""
    with torch.no_grad():
        for layer in model.model.layers[exit_layer:]:
            layer.self_attn.o_proj.weight *= later
            layer.mlp.down_proj.weight *= later
        model.lm_head.weight *= head
    return model.eval().requires_grad_(False)


def small(kind: type[Any], vocab: int, hidden: int, layers: int, **more: Any) -> Any:
    return kind(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        **more,
    )


def llama(vocab: int = 97, hidden: int = 32, layers: int = 4, seed: int = 0, head: float = 8.0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return sharpened(LlamaForCausalLM(small(LlamaConfig, vocab, hidden, layers)), layers // 2, head)


def mistral(window: int, vocab: int = 97, hidden: int = 32, layers: int = 4, seed: int = 0) -> PreTrainedModel:
    """A random Mistral in float32 whose layers see `window` tokens."""
    torch.manual_seed(seed)
    config = small(MistralConfig, vocab, hidden, layers, sliding_window=window)
    return sharpened(MistralForCausalLM(config), layers // 2)


def near(model: PreTrainedModel, noise: float, seed: int = 1) -> PreTrainedModel:
    """A copy whose weights are a little off: as a draft model it is often right."""
    other: Any = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in other.parameters():
            if weight.ndim > 1:
                weight += noise * weight.std() * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return other


def prompt(length: int, seed: int = 0, vocab: int = 97) -> Tensor:
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed))


def start(method: Method, model: ModelRunner, requests: Sequence[Request], chunk: int = PREFILL_CHUNK) -> DecodingLoop:
    capacity = max(len(request.prompt) + request.max_new_tokens for request in requests)
    decoder = DecodingLoop(method.start(model, len(requests), capacity), chunk=chunk)
    for row, request in enumerate(requests):
        decoder.admit(row, request)
    return decoder


def decode(
    method: Method, model: ModelRunner, requests: Sequence[Request], chunk: int = PREFILL_CHUNK, check: bool = False
) -> tuple[list[list[int]], Stats, list[Step]]:
    """New tokens of every request, figures and steps. check: assert the store's invariant after every commit."""
    decoder = start(method, model, requests, chunk)
    texts: list[list[int]] = [[] for _ in requests]
    stats, steps = Stats(), []
    while decoder.busy:
        steps.append(decoder.step())
        stats.add(steps[-1])
        for row, more in enumerate(steps[-1].tokens):
            texts[row] += more
        for row, alive in enumerate(decoder.session.alive):
            if check and alive:
                decoder.session.check(row, torch.cat([requests[row].prompt, torch.tensor(texts[row])]))
    return texts, stats, steps


def serve(method: Method, model: ModelRunner, requests: list[Request], chunk: int = 4) -> tuple[list[list[int]], list[Any]]:
    """A server's life: three rows, a request admitted as soon as one is free.

    Returns, in the order of the requests, their texts and their traces: what each step drafted and where its tokens came from.
    """
    decoder = DecodingLoop(method.start(model, 3, 48), chunk=chunk)
    waiting, owner = deque(range(len(requests))), dict[int, int]()
    texts: list[list[int]] = [[] for _ in requests]
    traces: list[list[Any]] = [[] for _ in requests]
    while waiting or decoder.busy:
        for row in range(3):
            if row not in owner and waiting:
                owner[row] = waiting.popleft()
                decoder.admit(row, requests[owner[row]])
        step = decoder.step()
        for row, tokens in enumerate(step.tokens):
            if tokens:
                texts[owner[row]] += tokens
                traces[owner[row]].append((step.drafted[row], step.origin[row]))
        for row in step.finished:
            state = decoder.release(row)
            assert state is not None
            assert state.tokens == texts[owner.pop(row)]
    return texts, traces


def silenced(model: Any, skip: SkipSet) -> Any:
    """A copy of a Llama whose skipped sublayers write nothing, by their weights."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for layer in skip.attention:
            other.model.layers[layer].self_attn.o_proj.weight.zero_()
        for layer in skip.mlp:
            other.model.layers[layer].mlp.down_proj.weight.zero_()
    return other


def running(model: Any, method: Any, length: int = 9, new: int = 40, steps: int = 8) -> tuple[DecodingLoop, Tensor]:
    """A decoder some steps into one greedy request, and the ids that it holds."""
    runner, asked = ModelRunner(model), prompt(length)
    decoder = DecodingLoop(method.start(runner, 1, length + new))
    decoder.admit(0, Request(asked, new))
    text: list[int] = []
    for _ in range(steps):
        text += decoder.step().tokens[0]
    return decoder, torch.cat([asked, torch.tensor(text)])
