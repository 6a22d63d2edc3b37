"""Laws on samples: coupled drafting gives the very text of plain sampling, standard drafting its distribution."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from skipstone import Autoregressive, LayerSkip, Request, Sampling
from skipstone.engines.model_runner import ModelRunner
from tests.helpers import planted
from tests.helpers.machine import decode, llama, prompt

ALPHA = 1e-6


@pytest.fixture(scope="module")
def model() -> ModelRunner:
    return ModelRunner(llama())


def requests(seeds: int, tokens: int, **sampling: Any) -> list[Request]:
    """Prompts of different lengths, one seed each."""
    return [
        Request(prompt(3 + seed % 5, seed), tokens, sampling=Sampling(seed=seed, **sampling))
        for seed in range(100, 100 + seeds)
    ]


@pytest.mark.parametrize(
    ("sampling", "threshold"),
    [
        ({"temperature": 1.0}, "adaptive"),
        ({"temperature": 0.5, "top_k": 20}, None),
        ({"temperature": 1.3, "top_p": 0.9, "min_p": 0.02}, "adaptive"),
    ],
    ids=str,
)
def test_coupled_drafting_gives_the_text_of_plain_sampling(model: ModelRunner, sampling: Any, threshold: Any) -> None:
    """40 seeds: same seed, same text, with drafts accepted and rejected on the way."""
    asked = requests(40, 16, **sampling)
    texts, figures, _ = decode(LayerSkip(2, 4, threshold, rejection_sample_method="coupled"), model, asked)
    assert texts == decode(Autoregressive(), model, asked)[0]
    assert figures.accepted > 20
    assert figures.drafted > figures.accepted


def coupled_acceptance(p: Tensor, q: Tensor) -> Tensor:
    """P(both Gumbel-max draws from the same noise agree) [B] = sum_i 1 / sum_j max(p_j / p_i, q_j / q_i)."""
    ratios = torch.maximum(p[:, None, :] / p[:, :, None], q[:, None, :] / q[:, :, None])
    return (1 / ratios.sum(-1)).sum(-1)


def bound(p: Tensor, q: Tensor) -> Tensor:
    """(1 - TV) / (1 + TV) [B]."""
    distance = (p - q).abs().sum(-1) / 2
    return (1 - distance) / (1 + distance)


def within(count: int, chances: Tensor) -> bool:
    """Whether a count of independent events lies within 5 standard deviations of what is expected."""
    return abs(count - float(chances.sum())) < 5 * float((chances * (1 - chances)).sum().sqrt())


def test_coupled_acceptance_of_the_loop_is_what_theory_says(model: ModelRunner) -> None:
    """The first draft of 500 rows: accepted as often as p and q (by transformers' own forward) demand, at least the bound."""
    rows = 500
    asked = [Request(prompt(4), 3, sampling=Sampling(temperature=3.0, seed=seed)) for seed in range(rows)]
    method = LayerSkip(exit_layer=2, num_speculative_tokens=1, rejection_sample_method="coupled")
    _, _, steps = decode(method, model, asked)
    first = torch.tensor(steps[0].tokens)
    ids = torch.cat([prompt(4).expand(rows, -1), first], 1)
    output = model.model(input_ids=ids, output_hidden_states=True)
    early = model.head(model.decoder.norm(output.hidden_states[2][:, -1]))
    p, q = ((scores.double() / 3).softmax(-1) for scores in (output.logits[:, -1], early))
    chances = coupled_acceptance(p, q)
    accepted = sum(steps[1].accepted)
    assert steps[1].drafted == [1] * rows
    assert within(accepted, chances)
    assert accepted > float(bound(p, q).sum()) - 5 * np.sqrt(rows / 4)
    assert not within(int((p * q).sum()), chances), "draws on noise of their own would agree as often: the test has no power"


def conditionals(llm: Any, ids: Tensor, vocab: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """p of the next three tokens [V], [V, V], [V, V, V], and q of the second after layer 0 [V, V], by transformers' forward."""
    texts = torch.tensor(list(product(range(vocab), repeat=2)))
    output = llm(input_ids=torch.cat([ids.expand(len(texts), -1), texts], 1), output_hidden_states=True)
    p = output.logits.double().softmax(-1).reshape(vocab, vocab, -1, vocab)
    q = llm.lm_head(llm.model.norm(output.hidden_states[1])).double().softmax(-1).reshape(vocab, vocab, -1, vocab)
    last = len(ids) - 1
    return p[0, 0, last], p[:, 0, last + 1], p[:, :, last + 2], q[:, 0, last + 1]


@pytest.mark.slow
def test_layerskip_standard_passes_a_chi_square() -> None:
    """Two tokens of a step with room for two drafts, 10,000 seeds, against the exact law, at alpha 1e-6. Recovered tokens that
    are drawn from p would be missed with a chance under 1e-9."""
    vocab, rows, batches = 5, 2_000, 5
    llm: Any = llama(vocab=vocab, hidden=8, layers=2, head=2.0, seed=3)
    runner, ids = ModelRunner(llm), torch.tensor([1, 4, 2])
    found: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for batch in range(batches):
        seeds = range(batch * rows, (batch + 1) * rows)
        asked = [Request(ids, 4, sampling=Sampling(temperature=1.0, seed=seed)) for seed in seeds]
        texts, figures, _ = decode(LayerSkip(exit_layer=1, num_speculative_tokens=2), runner, asked)
        found.update((text[1], text[2]) for text in texts)
        accepted += figures.accepted
    assert accepted > rows * batches / 4

    first, second, third, q = conditionals(llm, ids, vocab)
    kept = torch.minimum(second, q)
    biased = kept + (1 - kept.sum(-1, keepdim=True)) * second
    exact = torch.einsum("a,ab,abc->bc", first, second, third).flatten().numpy()
    shifted = torch.einsum("a,ab,abc->bc", first, biased, third).flatten().numpy()
    count, cells = rows * batches, vocab * vocab
    observed = np.array([found[pair] for pair in product(range(vocab), repeat=2)])
    assert observed.sum() == count
    assert exact.min() * count > 5
    distance = count * float(((shifted - exact) ** 2 / exact).sum())
    assert stats.ncx2.cdf(stats.chi2.isf(ALPHA, cells - 1), cells - 1, distance) < 1e-9
    assert stats.chisquare(observed, exact * count).pvalue > ALPHA


@planted.found_by(
    (
        planted.coupled_draft_on_its_own_noise,
        lambda: test_coupled_acceptance_of_the_loop_is_what_theory_says(ModelRunner(llama())),
    )
)
def test_planted_bugs_are_found(plant: Any, proof: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.assert_found(plant, proof, monkeypatch)


@pytest.mark.slow
@planted.found_by((planted.recovered_from_p, test_layerskip_standard_passes_a_chi_square))
def test_a_planted_bug_moves_the_chi_square(plant: Any, proof: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.assert_found(plant, proof, monkeypatch)
