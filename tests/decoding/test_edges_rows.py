"""A row's text depends on its own prompt, seed and settings only."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from transformers import PreTrainedModel

from skipstone import Autoregressive
from skipstone.decoding.noise import row_seed
from tests.helpers.pairwise import slow_except
from tests.helpers.settings import COUPLED, QUIET, SAMPLING, SKIP
from tests.helpers.support import decode

pytestmark = QUIET


class TestNeighbours:
    @pytest.mark.parametrize("method", [Autoregressive(), SKIP, COUPLED], ids=["plain", "standard", "coupled"])
    def test_a_sampled_row_depends_on_its_own_prompt_and_seed_only(
        self, method: Any, model: PreTrainedModel, batch: list[Tensor]
    ) -> None:
        seeds = [7, 3, 7]
        together = decode(model, batch, method, seed=seeds, **SAMPLING).new_tokens
        single = [
            decode(model, [prompt], method, seed=[seed], **SAMPLING).new_tokens
            for prompt, seed in zip(batch, seeds, strict=True)
        ]
        assert together == [text for texts in single for text in texts or []]
        turned = decode(model, batch[::-1], method, seed=seeds[::-1], **SAMPLING).new_tokens
        assert turned == together[::-1]

    def test_a_seed_gives_every_row_its_own(self, model: PreTrainedModel, batch: list[Tensor]) -> None:
        derived = decode(model, batch, SKIP, seed=5, **SAMPLING).new_tokens
        assert derived == decode(model, batch, SKIP, seed=[5, row_seed(5, 1), row_seed(5, 2)], **SAMPLING).new_tokens
        assert derived != decode(model, batch, SKIP, seed=[5, 5, 5], **SAMPLING).new_tokens

    def test_num_return_sequences_are_rows_with_seeds_of_their_own(self, model: PreTrainedModel, batch: list[Tensor]) -> None:
        output = decode(model, batch[:2], SKIP, num_return_sequences=3, seed=20, **SAMPLING)
        assert output.new_tokens is not None
        assert output.sequences.shape[0] == 6
        for row, text in enumerate(output.new_tokens):
            assert [text] == decode(model, [batch[row // 3]], SKIP, seed=row_seed(20, row), **SAMPLING).new_tokens
        assert len(set(map(tuple, output.new_tokens))) > 2


@pytest.mark.parametrize(
    "options",
    slow_except([{"typical_p": 0.6}], [{"typical_p": 0.6}, {"epsilon_cutoff": 0.05}, {"eta_cutoff": 0.05}, {"top_h": 0.4}]),
    ids=str,
)
def test_warpers_without_a_vectorised_form_are_exact_too(
    options: dict[str, Any], model: PreTrainedModel, batch: list[Tensor]
) -> None:
    settings = {**SAMPLING, **options, "seed": 4}
    plain = decode(model, batch, Autoregressive(), **settings)
    output = decode(model, batch, COUPLED, **settings)
    assert output.new_tokens == plain.new_tokens
    assert plain.new_tokens != decode(model, batch, Autoregressive(), **{**SAMPLING, "seed": 4}).new_tokens
    assert output.stats is not None
    assert 0 < output.stats.accepted < output.stats.drafted
