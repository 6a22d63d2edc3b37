"""A temperature so small that a quotient would overflow is greedy, for every method and engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import skipstone
from skipstone import Sampling
from skipstone.decoding.sampling import WarperSettings, warp
from skipstone.engines.native import library
from tests.helpers import families
from tests.helpers.conformance import ROWS
from tests.helpers.pairwise import round_robin
from tests.helpers.settings import QUIET

pytestmark = QUIET
ENGINES = ["eager", *([] if library.missing() else ["native"])]
TINY = [9e-6, 1e-37, 1e-38, 1e-39, 1.4e-45, 1e-46, 1e-300, 5e-324]
METHODS = [name for name, row in ROWS.items() if not row.variant and row.oracle is None]


@round_robin(
    name=METHODS, engine=ENGINES, more=[{}, {"top_k": 5}, {"top_k": 0, "top_p": 0.9, "min_p": 0.1}, {"typical_p": 0.9}]
)
def test_tiny_temperatures_give_the_greedy_text(name: str, engine: str, more: dict[str, Any]) -> None:
    model, prompt = families.cached("llama"), families.prompts(1)[0]
    common: dict[str, Any] = {"max_new_tokens": 8, "engine": engine, "seed": 5}
    expected = skipstone.generate(model, prompt, "autoregressive", do_sample=False, **common).new_tokens
    method = ROWS[name].method("llama", 3, "standard")
    for temperature in (1e-39, 1e-46) if name != "autoregressive" else TINY:
        sampled = {"do_sample": True, "temperature": temperature, **more}
        assert skipstone.generate(model, prompt, method, **common, **sampled).new_tokens == expected


@pytest.mark.parametrize("temperature", [*TINY, 1e-5, 1e-4, 1e30, 1e39, 1e300])
def test_every_temperature_gives_a_distribution(temperature: float) -> None:
    logits = torch.tensor([[3e4, -3e4, 2.5, float("-inf")]], dtype=torch.float32)
    for more in ({}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}):
        p = warp(logits, WarperSettings([Sampling(temperature, **more)], torch.device("cpu")))
        assert bool(p.isfinite().all())
        assert float(p.sum()) == pytest.approx(1)
        assert p[0, 3] == 0
