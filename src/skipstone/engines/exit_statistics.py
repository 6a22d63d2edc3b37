"""Hidden states after every layer, and the quality of its exits on given tokens."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.native.engine import NativeEngine
from skipstone.models.decoder_model import DecoderModel
from skipstone.models.torch_defaults import stable_defaults


class ExitTally:
    """Perplexity of every exit E (layers[:E]), and its agreement with the last layer.

    exits: the layers E to measure; the last layer L is always added. Sums are in float64.
    """

    def __init__(self, modules: DecoderModel, exits: Iterable[int]) -> None:
        self.modules = modules
        self.exits = sorted({*exits, modules.depth})
        self.tokens = 0
        self._nats = dict.fromkeys(self.exits, 0.0)
        self._agreed = dict.fromkeys(self.exits, 0)

    @torch.no_grad()
    def add(self, states: Mapping[int, Tensor], tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Count tokens [N] int64. states: E -> [N, d], the outputs of layers[:E] before each token.

        Returns a row for every exit, in the order of `exits`: the tokens' nats [E, N] float64, and whether each token is the
        exit's greedy token [E, N] bool.
        """
        best, nats, is_greedy = None, list[Tensor](), list[Tensor]()
        for exit_layer in reversed(self.exits):
            logits = self.modules.logits(states[exit_layer]).float()  # [N, V]
            exit_tokens = logits.argmax(-1)
            best = exit_tokens if best is None else best
            nats.append(F.cross_entropy(logits, tokens, reduction="none").double())
            is_greedy.append(exit_tokens == tokens)
            self._nats[exit_layer] += nats[-1].sum().item()
            self._agreed[exit_layer] += int((exit_tokens == best).sum())
        self.tokens += len(tokens)
        return torch.stack(nats[::-1]), torch.stack(is_greedy[::-1])

    def perplexity(self) -> dict[int, float]:
        """E -> teacher-forced perplexity of a token; it may be infinite."""
        nats = torch.tensor(list(self._nats.values()), dtype=torch.float64, device="cpu")
        return dict(zip(self._nats, (nats / self.tokens).exp().tolist(), strict=True))

    def agreement(self) -> dict[int, float]:
        """E -> share of the tokens at which an exit's greedy token is the last layer's."""
        return {exit_layer: agreed / self.tokens for exit_layer, agreed in self._agreed.items()}


@contextmanager
def watched(model: DecoderModel, exits: Iterable[int]) -> Iterator[dict[int, Tensor]]:
    """Record the states of the model's own latest forward inside the context: E -> [B, T, d], the output of the first E layers,
    or the input of layer 0 for E = 0."""
    states: dict[int, Tensor] = {}

    def record(exit: int, _: Any, *values: Any) -> None:
        """values: a layer's inputs, and its output unless it has not run yet."""
        states[exit] = model.family.folded(values[-1][0] if isinstance(values[-1], tuple) else values[-1])

    with ExitStack() as stack:
        for exit in exits:
            layer = model.layers[max(exit - 1, 0)]
            register = layer.register_forward_hook if exit else layer.register_forward_pre_hook
            stack.callback(register(partial(record, exit)).remove)
        yield states


@torch.inference_mode()
def layer_states(model: ModelRunner, ids: Tensor) -> list[Tensor]:
    """[T] int64 -> the inputs of layer 0 and the outputs of every layer, L + 1 tensors [1, T, d]. The native engine computes
    them itself, because it rounds less than the model's own forward in bfloat16. Others run that forward."""
    if isinstance(model.engine, NativeEngine):
        return model.read_layers(ids[None], [range(layer, layer + 1) for layer in range(model.depth)])
    exits = range(model.depth + 1)
    with watched(model, exits) as states, stable_defaults():
        model.model(ids[None].to(model.model.device), use_cache=False)
    return [states[exit] for exit in exits]
