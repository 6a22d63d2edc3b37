"""A row's text depends on its own prompt, seed and settings only."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from transformers import PreTrainedModel

from skipstone import Autoregressive, DecodingLoop, LayerSkip, ModelRunner, Request, Sampling
from skipstone.decoding.loop import run
from skipstone.decoding.noise import row_seed
from tests.helpers import families
from tests.helpers.pairwise import slow_except
from tests.helpers.settings import COUPLED, QUIET, SAMPLING, SKIP
from tests.helpers.support import alone, decode

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

    def test_a_greedy_row_does_not_depend_on_its_neighbours(self, model: PreTrainedModel, batch: list[Tensor]) -> None:
        others = families.prompts(3, seed=9)
        mixed = decode(model, [others[0], batch[1], others[2]], SKIP, eos_token_id=[4, 9]).new_tokens
        assert mixed is not None
        assert mixed[1] == alone(model, batch[1], max_new_tokens=24, eos_token_id=[4, 9])

    def test_an_adaptive_threshold_does_not_carry_over_from_row_to_row(
        self, model: PreTrainedModel, batch: list[Tensor]
    ) -> None:
        method = LayerSkip(2, 6, confidence_threshold="adaptive")
        together = decode(model, batch, method, seed=[1, 2, 3], **SAMPLING).new_tokens
        single = [decode(model, [p], method, seed=[s], **SAMPLING).new_tokens for p, s in zip(batch, (1, 2, 3), strict=True)]
        assert together == [text for texts in single for text in texts or []]

    def test_an_adaptive_threshold_does_not_carry_over_to_the_next_request(
        self, model: PreTrainedModel, batch: list[Tensor]
    ) -> None:
        method = LayerSkip(2, 6, confidence_threshold="adaptive")
        requests = [Request(prompt, 40, sampling=Sampling(1.2, seed=7)) for prompt in batch]

        def texts(decoder: DecodingLoop, *admitted: Request) -> list[list[int]]:
            """One request after the other on row 0."""
            found = []
            for request in admitted:
                decoder.admit(0, request)
                found.append([token for step in run(decoder) for token in step.tokens[0]])
            return found

        def fresh() -> DecodingLoop:
            return DecodingLoop(method.start(ModelRunner(model), 1, 80))

        assert texts(fresh(), *requests) == [texts(fresh(), request)[0] for request in requests]

    def test_a_seed_gives_every_row_its_own(self, model: PreTrainedModel, batch: list[Tensor]) -> None:
        derived = decode(model, batch, SKIP, seed=5, **SAMPLING).new_tokens
        assert derived == decode(model, batch, SKIP, seed=[5, row_seed(5, 1), row_seed(5, 2)], **SAMPLING).new_tokens
        assert derived != decode(model, batch, SKIP, seed=[5, 5, 5], **SAMPLING).new_tokens

    def test_calls_with_neighbouring_seeds_share_no_row(self, model: PreTrainedModel, batch: list[Tensor]) -> None:
        same = [batch[0]] * 3
        rows = [tuple(row) for seed in (5, 6, 7) for row in decode(model, same, SKIP, seed=seed, **SAMPLING).new_tokens or []]
        assert len(set(rows)) == 9

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
