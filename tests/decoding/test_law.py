"""Coupled drafting gives the text of plain sampling, and its drafts are accepted as often as theory says."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from skipstone import Autoregressive, LayerSkip, Request, Sampling
from skipstone.engines.model_runner import ModelRunner
from tests.helpers import planted
from tests.helpers.machine import decode, llama, prompt


@pytest.fixture(scope="module")
def model() -> ModelRunner:
    return ModelRunner(llama())


def test_coupled_drafting_gives_the_text_of_plain_sampling(model: ModelRunner) -> None:
    asked = [
        Request(prompt(3 + seed % 5, seed), 16, sampling=Sampling(1.3, top_p=0.9, min_p=0.02, seed=seed)) for seed in range(40)
    ]
    texts, figures, _ = decode(LayerSkip(2, 4, "adaptive", rejection_sample_method="coupled"), model, asked)
    assert texts == decode(Autoregressive(), model, asked)[0]
    assert figures.accepted > 20
    assert figures.drafted > figures.accepted


def coupled_acceptance(p: Tensor, q: Tensor) -> Tensor:
    """Probability that Gumbel-max draws on the same noise agree [B]: sum_i 1 / sum_j max(p_j / p_i, q_j / q_i)."""
    ratios = torch.maximum(p[:, None, :] / p[:, :, None], q[:, None, :] / q[:, :, None])
    return (1 / ratios.sum(-1)).sum(-1)


def within(count: int, chances: Tensor) -> bool:
    return abs(count - float(chances.sum())) < 5 * float((chances * (1 - chances)).sum().sqrt())


def test_coupled_acceptance_of_the_loop_is_what_theory_says(model: ModelRunner) -> None:
    """The first draft of 500 rows: as often as p and q (by transformers' own forward) demand, at least (1 - TV) / (1 + TV)."""
    rows = 500
    asked = [Request(prompt(4), 3, sampling=Sampling(temperature=3.0, seed=seed)) for seed in range(rows)]
    method = LayerSkip(exit_layer=2, num_speculative_tokens=1, rejection_sample_method="coupled")
    _, _, steps = decode(method, model, asked)
    first = torch.tensor(steps[0].tokens)
    ids = torch.cat([prompt(4).expand(rows, -1), first], 1)
    output = model.model(input_ids=ids, output_hidden_states=True)
    early = model.head(model.decoder.norm(output.hidden_states[2][:, -1]))
    p, q = ((scores.double() / 3).softmax(-1) for scores in (output.logits[:, -1], early))
    chances, apart, accepted = coupled_acceptance(p, q), (p - q).abs().sum(-1) / 2, sum(steps[1].accepted)
    assert steps[1].drafted == [1] * rows
    assert within(accepted, chances)
    assert accepted > float(((1 - apart) / (1 + apart)).sum()) - 5 * np.sqrt(rows / 4)
    assert not within(int((p * q).sum()), chances), "draws on noise of their own would agree as often: the test has no power"


def first_draft_law() -> None:
    test_coupled_acceptance_of_the_loop_is_what_theory_says(ModelRunner(llama()))


@planted.found_by((planted.coupled_draft_on_its_own_noise, first_draft_law))
def test_planted_bugs_are_found(plant: Any, proof: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.assert_found(plant, proof, monkeypatch)
