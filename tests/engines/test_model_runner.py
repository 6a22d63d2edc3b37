"""What is promised of every family below the text: logits at every depth, skipped sublayers and trees equal what transformers'
own forward gives, and a pass leaves the model as it was.
"""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import skipstone
from skipstone import EarlyExit
from skipstone.decoding.draft import Draft, RowVerdict
from skipstone.decoding.drafter import NoDrafter, Requirements
from skipstone.decoding.request import Request
from skipstone.decoding.session import Session
from skipstone.engines.model_runner import ModelRunner
from skipstone.models import recognition
from skipstone.models.derivation import derive
from skipstone.models.families import Family, InputStep, RotarySource
from skipstone.models.passes import AttentionReach, SkipSet
from tests.helpers import families, support
from tests.helpers.pairwise import slow_except

EXACT = 1e-5  # of the largest logit: float32 rounding in another order
NAMES = [*families.NAMES, "gemma3n_text"]
"""Those, and the one whose layers hand on several streams of states."""
IMPLEMENTATIONS = [
    (name, kind) for name in NAMES for kind in ("eager", "sdpa") if kind == "eager" or name not in families.EAGER_ONLY
]
ONCE = [
    (name, kind)
    for name, kind in IMPLEMENTATIONS
    if name in families.EAGER_ONLY or kind == ("sdpa", "eager")[NAMES.index(name) % 2]
]
"""Every family once, every second one with its eager implementation of attention."""
# where a sublayer hands its result over, inside a decoder layer
ATTENTION_OUT = ("self_attn.o_proj", "self_attn.out_proj", "attn.c_proj", "attention.dense", "self_attention.dense")
MLP_OUT = ("mlp.down_proj", "mlp.experts", "mlp.c_proj", "fc2", "mlp.dense_4h_to_h")


def same(found: Tensor, expected: Tensor) -> None:
    """Assert equality up to rounding, and that there is something to compare."""
    assert found.shape == expected.shape
    assert expected.std() > 0.1, "the reference is degenerate"
    error, scale = (found - expected).abs().max().item(), expected.abs().max().item()
    assert error <= EXACT * scale, f"logits of size {scale:.3g} differ by {error:.3g}"


@pytest.mark.parametrize(("name", "kind"), slow_except(ONCE, IMPLEMENTATIONS))
def test_logits_layer_by_layer_equal_the_models_own(name: str, kind: str) -> None:
    model = families.build(name, attn_implementation=kind)
    runner, ids = ModelRunner(model), families.prompts(1)[0][None]
    with torch.no_grad():
        expected = model(ids).logits
        same(support.logits_in_chunks(runner, ids, [21]), expected)
        same(support.logits_in_chunks(runner, ids, [13, 21]), expected)
        same(support.logits_in_chunks(runner, ids, [*range(1, 22)]), expected)


# a fact of a family, or a reach, got wrong in a model that shows it
WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "a window forgotten": ("mistral", {"reaches": [AttentionReach()] * 4}),
    "a window too large": ("starcoder2", {"reaches": [AttentionReach(families.WINDOW + 1)] * 4}),
    "a window on every layer": ("qwen2", {"reaches": [AttentionReach(families.WINDOW)] * 4}),
    "one RoPE for both layer kinds": ("gemma3_text", {"rotary": (RotarySource("rotary_emb", "full_attention"),) * 4}),
    "no logit soft-cap": ("gemma2", {"logits": ("", "")}),
    "no logit scale": ("cohere", {"logits": ("", "")}),
    "no logits scaling": ("granite", {"logits": ("", "")}),
    "no embedding multiplier": ("granite", {"input_scale": None}),
    "no learned positions": ("gpt2", {"entering": (InputStep("wte", "tokens"),)}),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_fact_would_be_noticed(mistake: str) -> None:
    name, changes = WRONG[mistake]
    model, ids = families.cached(name), families.prompts(1)[0][None]
    runner: Any = ModelRunner(model, "eager")
    engine = runner.engine = copy.copy(runner.engine)
    engine.reaches = changes.get("reaches", engine.reaches)
    facts = {key: value for key, value in changes.items() if key != "reaches"}
    engine.family = replace(engine.family, **facts)
    with torch.no_grad(), pytest.raises(AssertionError, match="differ by"):
        same(support.logits_in_chunks(runner, ids, [13, 21]), model(ids).logits)


@pytest.mark.parametrize("mistake", sorted({*WRONG} - {"a window too large"}))  # which the config says
def test_a_wrong_fact_is_refused_with_the_measured_difference(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, changes = WRONG[mistake]
    model = families.build(name, vocab=101)  # a shape of config that nobody has verified

    def mistaken(*given: Any) -> Family:
        found = derive(*given)
        kinds = {AttentionReach(): "full"}
        wrong = {key: value for key, value in changes.items() if key != "reaches"}
        if "reaches" in changes:
            wrong["reaches"] = tuple(kinds.get(one, "sliding") for one in changes["reaches"])
        return replace(found, **wrong)

    monkeypatch.setattr(recognition, "derive", mistaken)
    monkeypatch.setattr(recognition, "refuse_contradiction", lambda *_: None)
    with pytest.raises(
        ValueError, match=r"as its own forward does: .* differs by [\d.e+-]+ of its size, where 0.001 is allowed"
    ):
        ModelRunner(model, "eager")


def truncated(model: PreTrainedModel, depth: int) -> PreTrainedModel:
    """A copy of the model with its first layers only."""
    short: Any = copy.deepcopy(model)
    decoder = short.get_decoder()
    name = "layers" if hasattr(decoder, "layers") else "h"
    setattr(decoder, name, getattr(decoder, name)[:depth])
    short.config.num_hidden_layers = depth
    if getattr(short.config, "layer_types", None):
        short.config.layer_types = short.config.layer_types[:depth]
    return short


@pytest.mark.parametrize("name", slow_except(families.NAMES[::2], families.NAMES))
def test_early_exit_is_the_model_cut_down_to_its_first_layers(name: str) -> None:
    model = families.cached(name)
    short, ids = truncated(model, 3), families.prompts(1)[0][None]
    with torch.no_grad():
        same(support.logits_in_chunks(ModelRunner(model), ids, [13, 21], depth=3), short(ids).logits)
    out = skipstone.generate(model, ids, EarlyExit(exit_layer=3), max_new_tokens=12)
    assert out.new_tokens == [support.alone(short, ids[0], max_new_tokens=12, do_sample=False)]
    assert out.lossless is False


def silenced(model: PreTrainedModel, skip: SkipSet) -> PreTrainedModel:
    """A copy of the model in which the output projections of a skip set are zero."""
    copied: Any = copy.deepcopy(model)
    decoder = copied.get_decoder()
    layers = decoder.layers if hasattr(decoder, "layers") else decoder.h
    for indices, names in ((skip.attention, ATTENTION_OUT), (skip.mlp, MLP_OUT)):
        for index in indices:
            found = [module for path, module in layers[index].named_modules() if path in names]
            assert len(found) == 1, f"output projection of layer {index}: {found}"
            for parameter in found[0].parameters():
                torch.nn.init.zeros_(parameter)
    return copied


@pytest.mark.parametrize("name", slow_except(families.NAMES[1::2], families.NAMES))
def test_a_skipped_sublayer_equals_one_whose_output_projection_is_zero(name: str) -> None:
    model, ids = families.cached(name), families.prompts(1)[0][None]
    runner = ModelRunner(model)
    with torch.no_grad():
        plain = model(ids).logits
        for attention, mlp in (({1}, set()), (set(), {1}), ({0, 2}, {2, 3})):
            skip = SkipSet(frozenset(attention), frozenset(mlp))
            expected = silenced(model, skip)(ids).logits
            assert (expected - plain).abs().max() > 0.1, "the skipped sublayers did nothing anyway"
            same(support.logits_in_chunks(runner, ids, [13, 21], skip), expected)
        same(support.logits_in_chunks(runner, ids, [21]), plain)


@pytest.mark.parametrize("name", slow_except(NAMES[::2], NAMES))
def test_a_tree_gives_each_node_the_logits_of_its_branch(name: str) -> None:
    model, nodes, dice = families.cached(name), 24, random.Random(3)
    runner, prompts = ModelRunner(model), families.prompts(3)
    session = prefilled(runner, prompts, scratch=nodes)
    parents = torch.tensor([[dice.randint(max(-1, i - 4), i - 1) for i in range(nodes)] for _ in prompts])
    tokens = torch.randint(1, 97, parents.shape, generator=torch.Generator().manual_seed(4))
    valid = torch.ones_like(tokens, dtype=torch.bool)
    valid[2, nodes // 2 :] = False
    with torch.no_grad():
        forward = session.view.start_forward([nodes] * len(prompts))
        forward.append(tokens, valid, parents)
        forward.advance(2)
        logits = forward.finish()
        for row, prompt in enumerate(prompts):
            branches = [branch(parents[row].tolist(), node) for node in range(nodes) if valid[row, node]]
            deepest = max(branches, key=len)
            for path in [*branches[::5], deepest]:
                text = torch.cat([prompt, session.view.root[row : row + 1], tokens[row, path]])
                columns = [0, *(node + 1 for node in path)]
                same(logits[row, columns], model(text[None]).logits[0, len(prompt) :])
            assert len(deepest) + 1 > 4, "the tree is shallow"
            committed(session, row, prompt, tokens, parents, deepest)


def prefilled(runner: ModelRunner, prompts: list[Tensor], scratch: int) -> Session:
    """A session whose rows hold their prompts, with token 7 + row as the last committed one."""
    drafter = NoDrafter()
    drafter.requirements = Requirements(scratch)
    session = Session(runner, len(prompts), max(map(len, prompts)) + 40, drafter)
    for row, prompt in enumerate(prompts):
        session.admit(row, Request(prompt, 40))
    with torch.no_grad():
        session.prefill(512)
    session.commit(None, [RowVerdict([], [7 + row], "prefill", 0, 0) for row in range(len(prompts))])
    return session


def branch(parents: list[int], node: int) -> list[int]:
    """The nodes from the root's child down to a node."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def committed(session: Session, row: int, prompt: Tensor, tokens: Tensor, parents: Tensor, path: list[int]) -> None:
    """Accept a path of a row's tree, then compare the row's keys and values with a fresh forward over its text."""
    draft = Draft(tokens, torch.ones_like(tokens, dtype=torch.bool), None, parents=parents)
    verdicts = [RowVerdict([], [], "", 0, 0) for _ in session.alive]
    verdicts[row] = RowVerdict(path, [*tokens[row, path].tolist(), 1], "bonus", len(path), 0)
    root = session.view.root[row : row + 1].clone()
    session.commit(draft, verdicts)
    session.check(row, torch.cat([prompt, root, tokens[row, path], torch.tensor([1])]))
