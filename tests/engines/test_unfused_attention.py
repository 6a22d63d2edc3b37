"""Attention by two products and a softmax, as graphs for a GPU compute it in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from skipstone import Output
from skipstone.engines.compiled import BACKEND_VARIABLE
from skipstone.engines.eager import attention, linear
from tests.helpers import families
from tests.helpers.support import assert_same_texts, decode


@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize("seen", [True, False], ids=["bool", "added"])
def test_it_is_torch_s_attention(scaling: float | None, seen: bool) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 11, 8), torch.randn(2, 3, 11, 8)
    mask = torch.rand(2, 1, 5, 11) < 0.5  # [b, 1, n, extent]
    mask[..., 0] = True  # no row is empty
    given = mask if seen else torch.zeros(mask.shape).masked_fill_(~mask, torch.finfo(torch.float32).min)
    expected = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), attn_mask=mask, scale=scaling)
    assert torch.allclose(attention.unfused(query, key, value, given, scaling).double(), expected, atol=1e-6)


def as_on_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """Graphs for the CPU compute what those for a GPU do; nothing is compiled but traced."""
    patch.setenv(BACKEND_VARIABLE, "eager")
    patch.setattr(linear, "is_faster_transposed", lambda module: type(module) is nn.Linear)
    patch.setattr(attention, "is_faster_unfused", lambda query: torch.compiler.is_compiling())


def texts(name: str, engine: str) -> Output:
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}
    return decode(families.build(name), families.prompts(3), "layerskip exit_layer=2", engine=engine, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_a_model_computed_so_writes_the_same_texts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_gpu(monkeypatch)
    expected = texts(name, "eager").new_tokens
    assert expected is not None
    assert_same_texts(families.build(name), families.prompts(3), expected, texts(name, "compiled"), {"do_sample": False})


@pytest.mark.parametrize("part", ["unfused", "transposed"])
def test_graphs_compute_so(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a mistake in either, the texts are others."""
    as_on_a_gpu(monkeypatch)
    room: Any = attention if part == "unfused" else linear
    right = getattr(room, part)
    monkeypatch.setattr(room, part, lambda *given: -right(*given))
    assert texts("llama", "compiled").new_tokens != texts("llama", "eager").new_tokens
