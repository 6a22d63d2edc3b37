"""Logits at every depth, early exits and trees equal what transformers' own forward gives, in every family."""

import copy
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from skipstone import Autoregressive, Request
from skipstone.engines.model_runner import ModelRunner
from skipstone.models import recognition
from skipstone.models.derivation import derive
from skipstone.models.families import InputStep, RotarySource
from skipstone.models.passes import AttentionReach
from tests.helpers import families, support
from tests.helpers.machine import start
from tests.helpers.native import path_to
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


def wrong(changes: dict[str, Any]) -> dict[str, Any]:
    facts = {key: value for key, value in changes.items() if key != "reaches"}
    if "reaches" in changes:
        facts["reaches"] = tuple("full" if one == AttentionReach() else "sliding" for one in changes["reaches"])
    return facts


@pytest.mark.usefixtures("untested")
@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_fact_is_noticed_and_refused_with_the_measured_difference(
    mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, changes = WRONG[mistake]
    model, ids = families.cached(name), families.prompts(1)[0][None]
    runner: Any = ModelRunner(model, "eager")
    engine = runner.engine = copy.copy(runner.engine)
    engine.reaches = changes.get("reaches", engine.reaches)
    engine.family = replace(engine.family, **{key: value for key, value in changes.items() if key != "reaches"})
    with torch.no_grad(), pytest.raises(AssertionError, match="differ by"):
        same(support.logits_in_chunks(runner, ids, [13, 21]), model(ids).logits)
    if mistake == "a window too large":  # which the config says
        return
    monkeypatch.setattr(recognition, "derive", lambda *given: replace(derive(*given), **wrong(changes)))
    monkeypatch.setattr(recognition, "refuse_contradiction", lambda *_: None)
    with pytest.raises(ValueError, match=r"own forward does: .* differs by [\d.e+-]+ of its size, where 0.001 is allowed"):
        ModelRunner(families.build(name, vocab=101), "eager")  # a shape of config that nobody has verified


@pytest.mark.parametrize("name", slow_except(NAMES[::3], NAMES))
def test_a_tree_gives_each_node_the_logits_of_its_branch(name: str) -> None:
    model, nodes, dice = families.cached(name), 24, random.Random(3)
    prompts = families.prompts(3)
    decoder = start(Autoregressive(), ModelRunner(model), [Request(prompt, 40) for prompt in prompts])
    decoder.step()
    session = decoder.session
    parents = torch.tensor([[dice.randint(max(-1, i - 4), i - 1) for i in range(nodes)] for _ in prompts])
    tokens = torch.randint(1, 97, parents.shape, generator=torch.Generator().manual_seed(4))
    valid = torch.ones_like(tokens, dtype=torch.bool)
    valid[2, nodes // 2 :] = False
    with torch.inference_mode():
        forward = session.view.start_forward([nodes] * len(prompts))
        forward.append(tokens, valid, parents)
        forward.advance(2)
        logits = forward.finish()
        for row, prompt in enumerate(prompts):
            branches = [path_to(parents[row].tolist(), node) for node in range(nodes) if valid[row, node]]
            deepest = max(branches, key=len)
            assert len(deepest) + 1 > 4, "the tree is shallow"
            for path in [*branches[::5], deepest]:
                text = torch.cat([prompt, session.view.root[row : row + 1], tokens[row, path]])
                columns = [0, *(node + 1 for node in path)]
                same(logits[row, columns], model(text[None]).logits[0, len(prompt) :])
