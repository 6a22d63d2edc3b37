"""Skipped sublayers add nothing to the residual stream, as in the model's own forward with hooks on its sublayers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import skipstone
from skipstone import Method, SelfSpeculative, Swift
from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_runner import ModelRunner
from skipstone.models import recognition
from skipstone.models.derivation import derive, find_layers
from skipstone.models.families import Family, text_config
from skipstone.models.passes import Pass, SkipSet
from tests.helpers import families
from tests.helpers.pairwise import slow_except
from tests.helpers.settings import QUIET

EXACT = 1e-4  # of the largest entry of what a layer returns: float32 rounding in another order
VISIBLE = 0.05  # the same that leaving a sublayer out must change at least, where the test is to prove anything
NEW = 12  # tokens of a text
SKIPS = (SkipSet(frozenset({1})), SkipSet(mlp=frozenset({1})), SkipSet(frozenset({1}), frozenset({1})))
pytestmark = QUIET

# models of which a sublayer returns or is something else than in others: (type, config fields)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "two MLPs beside each other": ("granitemoeshared", {"shared_intermediate_size": 32}),
    "dense and sparse layers by turns": ("llama4_text", {"moe_layers": [0, 2]}),
    "sparse layers behind a dense one": ("llama4_text", {"moe_layers": [1, 2]}),
    "norms of the residual stream": ("bloom", {"apply_residual_connection_post_layernorm": True}),
    "an MLP beside routed experts": ("gemma4_text", {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}),
    "experts and inputs of every layer": ("gemma4_text", {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
        "moe_intermediate_size": 32}),
    "an MLP no wider inside": ("opt", {"ffn_dim": 32}),
    "norms behind an MLP no wider inside": ("opt_post_norm", {"ffn_dim": 32}),
}  # fmt: skip
TABLED: list[str] = [name for name in families.NAMES + families.FURTHER if name not in families.HYBRIDS]
MEANING: list[str] = [*TABLED, *VARIANTS]

SUMS = {"bloom": ("self_attention.dense", "mlp.dense_4h_to_h"), "mpt": ("attn", "ffn.down_proj")}
"""Where the attention and the MLP hand over what they compute, of types whose sublayers add the residual stream themselves."""
QUICK = (
    *("gpt_neox_japanese", "gpt_oss", "llama4_text"),  # attention that returns three values, an MLP that returns two
    *("gptj", "bloom", "mpt", "biogpt", "doge", "gemma4_text", "opt_post_norm", *[*VARIANTS][::2]),
)


@torch.no_grad()
def built(name: str) -> PreTrainedModel:
    """A model that is a row of the tables, or a variant. Scalars that layers multiply their output by are not 1 (Gemma 4)."""
    kind, fields = VARIANTS.get(name, (name, {}))
    model = families.build(kind, **fields)
    for path, buffer in model.named_buffers():
        if path.endswith("layer_scalar"):
            buffer.fill_(0.8)
    return model


def sublayers(kind: str, layer: nn.Module) -> tuple[list[str], list[str]]:
    """(attention, modules of the MLP) of a layer by their names and weights alone."""
    if kind in SUMS:
        attention_sum, mlp_sum = SUMS[kind]
        return [attention_sum], [mlp_sum]
    names = [
        name for name, child in layer.named_children() if any(one.ndim > 1 for one in child.parameters()) and "norm" not in name
    ]
    attention = [name for name in names if "attn" in name or "attention" in name]
    others = ("per_layer", "router", "altup", "laurel")  # what stays: Gemma 4's gates and routers, Gemma 3n's streams
    mlp = [name for name in names if name not in attention and not any(other in name for other in others)]
    assert len(attention) == 1, attention
    assert mlp
    return attention, mlp


def emptied(width: int) -> Callable[..., Any]:
    """A hook that replaces what a module returns: zeros first, None for a bias that is still to be added to them."""

    def hook(module: nn.Module, given: Any, output: Any) -> Any:
        first, rest = (output[0], output[1:]) if isinstance(output, tuple) else (output, None)
        if first.shape[-1] != width:
            return output  # inside an MLP
        nothing = torch.zeros_like(first)
        return nothing if rest is None else (nothing, *rest[:1], *[None] * len(rest[1:]))

    return hook


def states(output: Any) -> Tensor:
    """The hidden states that a layer returned, [1, T, d], of several streams (Gemma 3n) the first."""
    hidden = output[0] if isinstance(output, tuple) else output
    return hidden[0] if hidden.ndim == 4 else hidden


@contextmanager
def without(model: PreTrainedModel, skip: SkipSet) -> Iterator[list[Tensor]]:
    """The model's own forward without the sublayers of a skip set. Yields what every layer returns in it."""
    config, returned = text_config(model), []
    _, _, layers = find_layers(model, config)
    hooks = [layer.register_forward_hook(lambda _, __, output: returned.append(states(output))) for layer in layers]
    for part, chosen in ((0, skip.attention), (1, skip.mlp)):
        for index in chosen:
            for name in sublayers(config.model_type, layers[index])[part]:
                hooks.append(layers[index].get_submodule(name).register_forward_hook(emptied(config.hidden_size)))
    try:
        yield returned
    finally:
        for hook in hooks:
            hook.remove()


def run(runner: ModelRunner, ids: Tensor, skip: SkipSet) -> list[Tensor]:
    """What every layer returns, [1, T, d] each, of ids [1, T] in two chunks."""
    store, found, start = KVCache(1, runner.depth, ids.shape[1]), [[] for _ in range(runner.depth)], 0
    store.reserve(ids.shape[1])
    width = text_config(runner.model).hidden_size
    for stop in (13, ids.shape[1]):
        positions = torch.arange(start, stop)[None]
        at = Pass(positions, positions, None, slice(0, 1), stop, start)
        store.length = [start]
        hidden = runner.embed(ids[:, start:stop], positions)
        for layer in range(runner.depth):
            hidden = runner.engine.run(hidden, at, store, range(layer, layer + 1), skip)
            found[layer].append(hidden[..., :width])
        start = stop
    return [torch.cat(parts, 1) for parts in found]


@pytest.mark.parametrize("name", slow_except(QUICK, MEANING))
@torch.no_grad()
def test_a_skipped_sublayer_adds_nothing_to_the_residual_stream(name: str) -> None:
    model, ids = built(name), families.prompts(1)[0][None]
    runner = ModelRunner(model, "eager")
    with without(model, SkipSet()) as plain:
        model(ids, use_cache=False)
    for skip in SKIPS:
        with without(model, skip) as expected:
            model(ids, use_cache=False)
        found, size = run(runner, ids, skip), expected[1].abs().max()
        assert (expected[1] - plain[1]).abs().max() > VISIBLE * size, "the skipped sublayers did nothing anyway"
        for layer, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            error, most = (mine - theirs).abs().max(), theirs.abs().max()
            assert error <= EXACT * most, f"{skip}: layer {layer} differs by {error:.3g} where entries are up to {most:.3g}"


METHODS = (
    "self_speculative skip_attention=1,2 skip_mlp=2",
    "swift num_speculative_tokens=4",
    "lookahead",
    "adadecode heads=original exit_layers=2 confidence_threshold=0.1",
)
TEXTS: list[str] = [name for name in families.FURTHER if name not in families.HYBRIDS] + [*VARIANTS]
QUICK_TEXTS = ("mpt", "biogpt", "dense and sparse layers by turns")


@pytest.mark.parametrize("name", slow_except(QUICK_TEXTS, TEXTS, full=[*TEXTS[::4], *VARIANTS]))
def test_what_drafts_without_sublayers_gives_the_text_of_plain_decoding(name: str) -> None:
    model, ids = built(name), families.prompts(1)[0][None]
    plain = skipstone.generate(model, ids, "autoregressive", max_new_tokens=NEW, do_sample=False).new_tokens
    for method in METHODS:
        assert skipstone.generate(model, ids, method, max_new_tokens=NEW, do_sample=False).new_tokens == plain, method


@pytest.mark.usefixtures("untested")
@pytest.mark.parametrize("method", [SelfSpeculative((1,), (2,)), Swift()])
def test_a_model_whose_sublayers_cannot_be_left_out_is_refused_at_once(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_mlp(*given: Any) -> Family:
        own: Any = derive
        given[2].inside[0] = [call for call in given[2].inside[0] if call.path != "mlp"]
        return own(*given)

    monkeypatch.setattr(recognition, "derive", without_mlp)
    monkeypatch.setattr(recognition, "_KNOWN", {})
    model = families.build("llama", vocab=83)  # a shape of config that nobody has verified
    with pytest.raises(ValueError, match="no sublayer of this llama model can be skipped: it has no modules for the MLPs"):
        skipstone.generate(model, families.prompts(1, 83)[0][None], method, max_new_tokens=2)
    skipstone.generate(model, families.prompts(1, 83)[0][None], "lookahead", max_new_tokens=2)
