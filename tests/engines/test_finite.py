"""Weights that are no numbers are named, and no architecture is blamed for them."""

from __future__ import annotations

import errno

import pytest
import torch

from skipstone.engines.host_transfer import out_of_memory
from skipstone.engines.model_runner import ModelRunner
from tests.helpers import families


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.2.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"]
)
def test_the_first_weight_that_is_not_finite_is_named(name: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model = families.build("llama", vocab=103)  # a shape that no other test has verified
    with torch.no_grad():
        model.get_parameter(name).fill_(value)
    with pytest.raises(ValueError, match=rf"not finite: {name}.*checkpoint"):
        ModelRunner(model)


@pytest.mark.parametrize(
    ("dtype", "factor", "remedy"), [(torch.float32, 1e30, "config"), (torch.float16, 1e4, "overflows.*bfloat16 or float32")]
)
def test_finite_weights_that_overflow_are_told_from_an_unknown_architecture(
    dtype: torch.dtype, factor: float, remedy: str
) -> None:
    model = families.build("llama", vocab=107).to(dtype)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.up_proj.weight.mul_(factor)
            layer.mlp.down_proj.weight.mul_(factor)
    with pytest.raises(ValueError, match=rf"weights are finite.*{remedy}"):
        ModelRunner(model, "eager")


def test_memory_that_the_system_refuses_is_named_with_the_remedy() -> None:
    assert "quantize" in (out_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory")) or "")
    assert out_of_memory(OSError(errno.ENOENT, "No such file")) is None
