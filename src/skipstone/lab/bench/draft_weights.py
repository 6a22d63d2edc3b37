"""Computes the share of the weights that a draft step reads, the paper's cost of drafting before anything is timed."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from skipstone.decoding.method import Method
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.native.weights import QUANTIZED_HEAD, matrix_bytes
from skipstone.methods.adadecode.adadecode import AdaDecode
from skipstone.methods.drafting.draft_model import DraftModelMethod
from skipstone.methods.drafting.feature_drafter import FeatureMethod
from skipstone.methods.jacobi import Jacobi
from skipstone.methods.layerskip import LayerSkip
from skipstone.methods.lookahead import Lookahead
from skipstone.methods.prompt_lookup import PromptLookup
from skipstone.methods.recycle import Recycle
from skipstone.methods.self_speculative import SelfSpeculative
from skipstone.methods.swift.swift import Swift


class ModelWeights:
    """Bytes of the matrices that a plain step of a model reads, in the weights of its engine. All experts of a mixture count.

    mlp: of each layer's MLP; attention: of the rest of each layer; head: of the LM head. Embeddings are looked up, not read.
    """

    def __init__(self, runner: ModelRunner) -> None:
        kind = runner.engine.quantize
        layers = [_bytes(layer.parameters(), kind) for layer in runner.layers]
        modules = [[layer.get_submodule(name) for name in runner.family.mlp] for layer in runner.layers]
        self.mlp = [_bytes((one for module in each for one in module.parameters()), kind) for each in modules]
        self.attention = [layer - mlp for layer, mlp in zip(layers, self.mlp, strict=True)]
        self.head = _bytes([runner.head.weight], kind and QUANTIZED_HEAD)

    def layers(self, layers: Iterable[int] | None = None) -> int:
        """Of some layers, all if None."""
        return sum(self.attention[layer] + self.mlp[layer] for layer in (range(len(self.mlp)) if layers is None else layers))

    def without(self, attention: Iterable[int], mlp: Iterable[int]) -> int:
        """Of all layers without the sublayers of a skip set."""
        return self.layers() - sum(self.attention[layer] for layer in attention) - sum(self.mlp[layer] for layer in mlp)


def _bytes(weights: Iterable[Tensor], quantize: str | None) -> int:
    return sum(matrix_bytes(one, quantize) for one in weights if one.dim() > 1)


def share_read(method: Method, runner: ModelRunner, row: Mapping[str, Any]) -> float | None:
    """Bytes of the weights that a mean draft step reads, over those that a plain step reads; None without drafts or a known way
    to draft. Lookups read none: their drafts are only scored.

    row: of a prompt, for what the method has learnt (`known`) and done (`grown`).
    """
    target = ModelWeights(runner)
    read = _bytes_read(method, runner, target, row)
    return None if read is None else read / (target.layers() + target.head)


def _bytes_read(method: Method, runner: ModelRunner, target: ModelWeights, row: Mapping[str, Any]) -> float | None:
    match method:
        case LayerSkip():
            return target.layers(range(method.exit_layer or 0)) + target.head * _head_share(method, runner)
        case SelfSpeculative():
            copy, skip = ModelWeights(method.drafting_model(runner) or runner), method.skip_set(runner)
            return copy.without(skip.attention, skip.mlp) + copy.head * _head_share(method, runner)
        case Swift() if row.get("known"):
            return target.without(**row["known"]["skipped"]) + target.head * _head_share(method, runner)
        case AdaDecode() if row.get("grown"):
            return _read_by_exits(method, runner, target, row["grown"]["exits"])
        case DraftModelMethod():
            draft_model = method.draft_model_for(runner)
            weights = ModelWeights(draft_model)
            return weights.layers() + weights.head * _head_share(method, draft_model)
        case FeatureMethod():
            head = method.head_for(runner)
            return _bytes(head.weights, head.engine.quantize)
        case PromptLookup() | Lookahead() | Jacobi() | Recycle():
            return 0.0
        case _:
            return None


def _head_share(method: Any, drafter: ModelRunner) -> float:
    """The share of an LM head's rows that drafting reads."""
    shortlist = method.shortlist(drafter) if hasattr(method, "shortlist") else None
    return 1.0 if shortlist is None else len(shortlist) / len(drafter.head.weight)


def _read_by_exits(
    method: AdaDecode, runner: ModelRunner, target: ModelWeights, exits: Mapping[str, Mapping[str, int]]
) -> float | None:
    """A token that exit l predicts runs through l layers, and through the heads of all exits up to there."""
    heads, share = method.heads_for(runner), _head_share(method, runner)
    total = read = tested = 0.0
    for layer, tally in sorted((int(layer), tally) for layer, tally in exits.items()):
        head = heads.heads[heads.card.layers.index(layer)]
        own = _bytes(head.parameters(), None)
        tested += own if heads.card.kind == "full" else own + target.head * share
        total += tally["predicted"]
        read += tally["predicted"] * (target.layers(range(layer)) + tested)
    return read / total if total else None
