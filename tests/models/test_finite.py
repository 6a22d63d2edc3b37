"""Weights that are no numbers are named, and no architecture is blamed for them."""

from __future__ import annotations

import pytest
import torch

from skipstone.models.layered import LayeredModel
from tests.helpers import families


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.2.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"]
)
def test_the_first_weight_that_is_not_finite_is_named(name: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model = families.build("llama", vocab=89)  # a shape that no other test has verified
    with torch.no_grad():
        model.get_parameter(name).fill_(value)
    with pytest.raises(ValueError, match=rf"not finite: {name}.*checkpoint"):
        LayeredModel(model)
