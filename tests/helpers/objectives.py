"""LayerSkip's loss and its layers by hand: what the training of a model is compared with."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from skipstone.models.decoder_model import DecoderModel
from skipstone.train.data.rows import IGNORED
from skipstone.train.layerskip.objective import LayerSkipObjective
from skipstone.train.layerskip.schedules import EarlyExitLoss, LayerDropout, LayerSkipRecipe
from tests.helpers import families

LAYERS, STEPS, SEED = 4, 10, 2
# L = 4, e_scale = .5, R = 2, the last layer always: e = 0, .5, 1.5 and 3 + .5 x 3, by hand
WEIGHTS = [{0: 0, 2: 0.25, 3: 0.75}, {1: 0.1, 3: 0.9}]
KL = 1.5
PLAIN, RATE = LayerDropout(0.0), LayerDropout(0.9)
RATES = [0, 0.9 * (2 ** (1 / 3) - 1), 0.9 * (2 ** (2 / 3) - 1), 0.9]
CE = EarlyExitLoss(0.5, "rotational", 2)
TOWARDS_LAST = EarlyExitLoss(0.5, "rotational", 2, kl_weight=KL)
NO_DROPOUT = {
    "gpt2": {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0},
    "opt": {"dropout": 0.0},
    "opt_projected": {"dropout": 0.0},
}
SINGLE = ("gemma2", "qwen3_moe")  # its attention masks overflow in float64; its grouped products know no float64


def merged(m: Any, streams: Tensor) -> Tensor:
    """Gemma 3n's streams [4, B, T, d] as its own forward merges them."""
    magnitude, sum_of_all = streams[0].pow(2).mean(-1, keepdim=True) ** 0.5, streams[0]
    for projection, stream in zip(m.model.altup_unembed_projections, streams[1:], strict=True):
        projected = projection(stream)
        sum_of_all = sum_of_all + projected * magnitude / projected.pow(2).mean(-1, keepdim=True).clamp(min=1e-5).sqrt()
    return sum_of_all / len(streams)


Heads = dict[str, Callable[[Any, Tensor], Tensor]]
# g(.) by hand: what this family does between a layer's output and its logits
HEADS: Heads = {
    "llama": lambda m, x: m.lm_head(m.model.norm(x)),
    "qwen3": lambda m, x: m.lm_head(m.model.norm(x)),
    "qwen3_moe": lambda m, x: m.lm_head(m.model.norm(x)),
    "gemma2": lambda m, x: 20 * torch.tanh(m.lm_head(m.model.norm(x)) / 20),
    "gemma3_text": lambda m, x: 20 * torch.tanh(m.lm_head(m.model.norm(x)) / 20),
    "gemma3n_text": lambda m, x: 20 * torch.tanh(m.lm_head(m.model.norm(merged(m, x))) / 20),
    "granite": lambda m, x: m.lm_head(m.model.norm(x)) / 2,
    "cohere": lambda m, x: m.lm_head(m.model.norm(x)) * 0.6,
    "gpt2": lambda m, x: m.lm_head(m.transformer.ln_f(x)),
    "falcon": lambda m, x: m.lm_head(m.transformer.ln_f(x)),
    "opt": lambda m, x: m.lm_head(m.model.decoder.final_layer_norm(x)),
    "opt_projected": lambda m, x: m.lm_head(m.model.decoder.project_out(m.model.decoder.final_layer_norm(x))),
}


def build(name: str, tied: bool = False) -> PreTrainedModel:
    """A model of four layers in training mode, in float64 where its kernels can, without any dropout of its own."""
    model = families.build(name, tie_word_embeddings=tied, **NO_DROPOUT.get(name, {})).train()
    return model if name in SINGLE else model.double()


def inputs(rows: int = 3) -> dict[str, Tensor]:
    """Left-padded rows with labels: nothing for the padding, nor for two tokens more."""
    generator = torch.Generator().manual_seed(5)
    batch = families.padded([torch.randint(1, 97, (length,), generator=generator) for length in (11, 5, 10, 11)[:rows]])
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
    labels[0, 3] = labels[-1, -1] = IGNORED
    return {**batch, "labels": labels}


def objective(
    model: PreTrainedModel, exits: EarlyExitLoss, dropout: LayerDropout = PLAIN, chunk: int = 7
) -> LayerSkipObjective:
    return LayerSkipObjective(model, LayerSkipRecipe(dropout, exits), STEPS, SEED, chunk)


def combined(logits: dict[int, Tensor], labels: Tensor, weights: dict[int, float], kl: bool) -> Tensor:
    """The loss summed over tokens, from all logits {exit: [B, T, V]}."""
    targets = labels[:, 1:]
    kept = targets != IGNORED
    p = {layer: each[:, :-1].log_softmax(-1)[kept] for layer, each in logits.items()}
    chosen = {layer: -each.gather(1, targets[kept][:, None]).sum() for layer, each in p.items()}
    if not kl:
        return torch.stack([weight * chosen[layer] for layer, weight in weights.items()]).sum()
    teacher = p[LAYERS - 1].detach()
    apart = [(teacher.exp() * (teacher - p[layer])).sum() for layer in weights if layer < LAYERS - 1]
    return chosen[LAYERS - 1] + KL * sum(apart, torch.zeros(())) / len(apart)


def naive(name: str, model: Any, batch: dict[str, Tensor], step: int, kl: bool) -> Tensor:
    """Summed over tokens, by the hidden states and last logits that the model itself gives out."""
    given = {key: value for key, value in batch.items() if key not in ("labels", "num_items_in_batch")}
    out = model(**given, output_hidden_states=True, use_cache=False)
    logits = {layer: HEADS[name](model, out.hidden_states[layer + 1]) for layer in range(LAYERS - 1)}
    return combined({**logits, LAYERS - 1: out.logits}, batch["labels"], WEIGHTS[step % 2], kl)


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def assert_same(model: Any, own: Tensor, reference: Tensor) -> None:
    digits = 1e-5 if model.dtype == torch.float32 else 1e-6  # norms compute in float32 in either case
    torch.testing.assert_close(own, reference, rtol=digits, atol=0, check_dtype=False)
    found, expected = gradients(model, own), gradients(model, reference)
    largest = {name: float(gradient.abs().max()) for name, gradient in expected.items()}
    for name, gradient in expected.items():  # what should be 0 (a bias of the keys) is noise beside the others
        noise = digits * largest[name] + digits * 1e-2 * max(largest.values())
        torch.testing.assert_close(found[name], gradient, rtol=100 * digits, atol=noise, msg=name)
    assert sum(size > 0 for size in largest.values()) > 5


@contextmanager
def outputs(layers: Sequence[nn.Module]) -> Iterator[dict[int, Tensor]]:
    seen: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        return lambda _module, _args, out: seen.__setitem__(layer, out[0] if isinstance(out, tuple) else out)

    with ExitStack() as hooks:
        for index, layer in enumerate(layers):
            hooks.callback(layer.register_forward_hook(keep(index)).remove)
        yield seen


def alone(modules: DecoderModel, inputs: dict[str, Tensor], row: int, kept: Sequence[bool]) -> tuple[dict[int, Tensor], Tensor]:
    """One row by itself through the layers that are kept: ({layer: x_{l+1} [T, d]}, last hidden state [T, d])."""
    falcon = modules.config.model_type == "falcon"
    with pytest.MonkeyPatch.context() as patch, outputs(modules.layers) as seen:
        for layer, on in zip(modules.layers, kept, strict=True):
            if not on:
                patch.setattr(layer, "forward", (lambda x, *_, **__: (x,)) if falcon else (lambda x, *_, **__: x))
        last = modules.decoder(**{key: value[row : row + 1] for key, value in inputs.items()}, use_cache=False)
    return {layer: state[0] for layer, state in seen.items()}, last.last_hidden_state[0]
