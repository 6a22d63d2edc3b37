"""A rotated model has the original's logits after every layer and other weights. Bugs of the rotation are seen."""

import sys
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import skipstone
from recipes import rotated
from recipes.rotated import rotate
from tests.helpers import families

ROUNDING = 1e-4  # of the largest logit


@torch.no_grad()
def exit_logits(model: Any) -> Tensor:
    """Logits [L, T, V] after every layer: the final norm and the head on its output."""
    ids = families.prompts(1)[0][None]
    *states, last = model(ids, output_hidden_states=True).hidden_states[1:]  # the last one has gone through the norm
    return torch.cat([model.lm_head(model.model.norm(state)) for state in states] + [model.lm_head(last)])


def difference(model: Any, other: Any) -> float:
    """The largest difference of any exit's logits, relative to its largest logit."""
    expected, found = exit_logits(model), exit_logits(other)
    return float(((found - expected).abs().amax((1, 2)) / expected.abs().amax((1, 2))).max())


def matrices(model: Any) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict().items() if value.ndim == 2}


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "granite", "smollm3"])
def test_logits_of_all_exits_stay_and_all_matrices_change(family: str, tied: bool) -> None:
    model = families.build(family, tie_word_embeddings=tied)
    other = deepcopy(model)
    rotate(other, seed=1)
    assert difference(model, other) < ROUNDING
    assert not other.config.tie_word_embeddings
    assert other.lm_head.weight is not other.model.embed_tokens.weight
    before, after = matrices(model), matrices(other)
    assert before.keys() == after.keys()
    for name in before:
        assert (after[name] - before[name]).norm() > 0.3 * before[name].norm(), name
    norms = [module.weight for name, module in other.named_modules() if name.endswith(("layernorm", "model.norm"))]
    assert len(norms) == 9
    assert all((norm == 1).all() for norm in norms)


def test_the_seed_decides_the_weights() -> None:
    models = [families.build("llama") for _ in range(3)]
    for model, seed in zip(models, (5, 5, 6), strict=True):
        rotate(model, seed)
    one, same, other = (model.lm_head.weight for model in models)
    assert torch.equal(one, same)
    assert not torch.allclose(one, other)


PARTS = ["embed_tokens", "lm_head"] + [f"layers.2.self_attn.{part}_proj" for part in "qkvo"]
PARTS += [f"layers.2.mlp.{part}_proj" for part in ("gate", "up", "down")]


@pytest.mark.parametrize("part", PARTS)
def test_a_matrix_that_stays_behind_is_seen(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = families.build("llama")
    other = deepcopy(model)
    forgotten, set_weight = next(one for name, one in other.named_modules() if name.endswith(part)), rotated.set_weight
    monkeypatch.setattr(rotated, "set_weight", lambda module, weight: module is forgotten or set_weight(module, weight))
    rotate(other)
    assert difference(model, other) > 10 * ROUNDING


@pytest.mark.parametrize("norm", ["model.norm", "layers.0.input_layernorm", "layers.3.post_attention_layernorm"])
def test_a_norm_that_stays_behind_is_seen(norm: str) -> None:
    model = families.build("llama")
    other = deepcopy(model)
    rotate(other)
    pairs = zip(model.named_modules(), other.modules(), strict=True)
    before, after = next((one, two) for (name, one), two in pairs if name.endswith(norm))
    with torch.no_grad():
        after.weight.copy_(before.weight)  # folded, and applied again
    assert difference(model, other) > 10 * ROUNDING


REFUSED = {
    "gemma": "its norms do not compute",
    "gemma2": "its layers are not made of",
    "olmo2": "its layers are not made of",
    "gpt2": "its layers are not made of",
    "phi3": "its layers are not made of",
    "mixtral": "the matrices of a layer are",
    "cohere": "its layers are not made of",
    "starcoder2": "the matrices of a layer are",
}


@pytest.mark.parametrize("family", REFUSED)
def test_other_layers_are_refused_and_stay_as_they_are(family: str) -> None:
    model = families.build(family)
    before = deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=f"{family}: {REFUSED[family]}"):
        rotate(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("fields", [{"attention_bias": True}, {"mlp_bias": True}], ids=["attention", "mlp"])
def test_biases_on_what_writes_the_stream_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="llama: biases of o_proj and down_proj are not supported"):
        rotate(families.build("llama", **fields))


def test_a_norm_of_another_kind_is_refused() -> None:
    model: Any = families.build("llama")
    model.model.layers[3].input_layernorm = torch.nn.LayerNorm(model.config.hidden_size, bias=False)
    with pytest.raises(ValueError, match="its norms do not compute"):
        rotate(model)


def run_script(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["rotated.py", *arguments])
    rotated.main()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_command_writes_a_model_that_loads(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_script(monkeypatch, "nano", str(tmp_path), "--dtype", dtype)
    model, tokenizer = skipstone.load(dtype=torch.float32)
    other, same = skipstone.load(tmp_path)
    assert other.dtype == getattr(torch, dtype)
    assert same.get_vocab() == tokenizer.get_vocab()
    assert difference(model, other.float()) < (ROUNDING if dtype == "float32" else 0.1)


def test_the_command_refuses_what_it_cannot_rotate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = families.build("gemma")
    monkeypatch.setattr(skipstone, "load", lambda *args, **options: (model, None))
    with pytest.raises(SystemExit, match="cannot rotate this model: gemma: its norms"):
        run_script(monkeypatch, "folder", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_the_command_writes_nothing_if_logits_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.linalg, "qr", lambda noise: SimpleNamespace(Q=noise))  # not orthogonal
    with pytest.raises(SystemExit, match="the rotated model is another function"):
        run_script(monkeypatch, "nano", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
