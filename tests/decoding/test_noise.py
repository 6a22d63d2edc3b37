"""Noise is a pure function of (seed, position, stream), uniform and without visible correlation."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from skipstone.decoding import noise
from skipstone.decoding.noise import ACCEPT, DRAFT, TARGET, Noise, row_seed, substream, uniform
from tests.helpers import planted

STREAM_IDS = (TARGET, ACCEPT, DRAFT, substream(ACCEPT, 1), substream(DRAFT, 1), substream(DRAFT, 30))
ALPHA = 1e-6  # probability that a chi-square or KS test fails a right generator; seeds are fixed


def column(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.long)


def spread(seeds: int = 1, positions: int = 1, stream: int = TARGET, size: int = 1, first: int = 0) -> np.ndarray:
    grid = torch.tensor(list(product(range(first, first + seeds), range(positions))))
    return uniform(grid[:, 0], grid[:, 1], stream, size).reshape(seeds, positions, size).numpy()


def test_a_row_does_not_depend_on_its_neighbours_or_on_how_many_numbers_are_asked_for() -> None:
    seeds, positions = column(11, 4, 11, 900), column(3, 8, 4, 0)
    together = uniform(seeds, positions, TARGET, 20)
    for row in range(4):
        alone = uniform(seeds[row : row + 1], positions[row : row + 1], TARGET, 5)
        assert torch.equal(together[row, :5], alone[0])


def mixed(x: int) -> int:
    x &= 2**64 - 1
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def in_plain_python(seed: int, position: int, stream: int, place: int) -> float:
    start = mixed(seed + 0x9E3779B97F4A7C15)
    steps = place * 0x9E3779B97F4A7C15 + position * 0xD6E8FEB86659FD93 + stream * 0xDA942042E4DD58B5
    bits = mixed(start + steps)
    return float(bits - 2**64 if bits >= 2**63 else bits) * (2.0**-64 * (1 - 2.0**-52)) + 0.5


def test_numbers_stay_those_of_unsigned_arithmetic_and_streams_keep_their_places() -> None:
    """A text is reproducible from its seed across versions of skipstone: these may not change."""
    assert uniform(column(2**62), column(4096), TARGET, 2).tolist() == [[0.3587180740973547, 0.3009629211425695]]
    assert uniform(column(0), column(0), ACCEPT).item() == 0.6115865891127698
    assert uniform(column(0), column(0), substream(DRAFT, 5)).item() == 0.6930182190499421
    for seed, position, stream in product((0, 1, 77, 2**63 - 1, -5), (0, 3, 9000), (0, 1, 2, 35)):
        found = uniform(column(seed), column(position), stream, 6)[0].tolist()
        assert found == [in_plain_python(seed, position, stream, place) for place in range(6)]
    golden = 0x9E3779B97F4A7C15
    for seed, row in [(0, 1), (5, 1), (5, 2), (-3, 9), ((1 << 63) - 1, 4095)]:  # further rows are hashed from seed and row
        assert row_seed(seed, row) == mixed(mixed(seed + golden) + row * golden) % (1 << 63)


@pytest.mark.parametrize("bits", [0, -1, 1, 1 << 62])
def test_the_range_is_open_whatever_bits_the_generator_yields(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """-log u must be positive and finite: all ones used to round up to exactly 1."""
    monkeypatch.setattr(noise, "_mix", lambda x: torch.full_like(x, bits))
    u = uniform(column(1), column(1), TARGET, 3)
    assert bool((u > 0).all())
    assert bool((u < 1).all())


@pytest.mark.parametrize("axis", ["seeds", "positions", "size"])
def test_numbers_are_uniform_along_every_axis(axis: str) -> None:
    for stream in STREAM_IDS:
        numbers = spread(**{axis: 20_000}, stream=stream).ravel()
        assert stats.kstest(numbers, "uniform").pvalue > ALPHA
        low_bits = (numbers * 2**40 % 256).astype(int)
        assert stats.chisquare(np.bincount(low_bits, minlength=256)).pvalue > ALPHA


def test_streams_positions_and_seeds_are_uncorrelated() -> None:
    """|r| of two independent series of N is under 5.5 / sqrt(N) but for a chance of 4e-8 each."""
    count = 30_000
    series = [spread(positions=count, stream=stream).ravel() for stream in STREAM_IDS]
    series += [spread(positions=count, first=seed).ravel() for seed in (1, 2, 3)]
    series += [spread(positions=count + shift).ravel()[shift:] for shift in (1, 2, 3)]
    matrix = np.corrcoef(np.stack(series)) - np.eye(len(series))
    assert np.abs(matrix).max() < 5.5 / np.sqrt(count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draw_follows_p(dtype: torch.dtype) -> None:
    p = 8 * torch.tensor([0.5, 0.25, 0.125, 0.0, 0.0625, 0.0625], dtype=dtype)
    count = 40_000
    source = Noise(torch.arange(count))
    tokens = source.draw(p.expand(count, -1), torch.full((count,), 17), TARGET)
    found = np.bincount(tokens.numpy(), minlength=6)
    assert found[3] == 0
    support = p.numpy() > 0
    assert stats.chisquare(found[support], p.double().numpy()[support] / 8 * count).pvalue > ALPHA


def test_draw_never_gives_a_token_of_probability_zero_and_follows_a_one_hot() -> None:
    rows, vocab, generator = 2_000, 50, torch.Generator().manual_seed(3)
    p = torch.rand((rows, vocab), generator=generator) * (torch.rand((rows, vocab), generator=generator) < 0.1)
    p[:, 7] += 1e-30  # a row may hold nothing but one tiny weight
    source, position = Noise(torch.arange(rows)), torch.arange(rows)
    assert bool((p.gather(1, source.draw(p, position, TARGET)[:, None]) > 0).all())
    one_hot = torch.nn.functional.one_hot(position % vocab, vocab).float()
    assert torch.equal(source.draw(one_hot, position, TARGET), position % vocab)


def test_accept_is_a_bernoulli_draw_with_sure_ends() -> None:
    count = 40_000
    source, position = Noise(torch.arange(count)), torch.zeros(count, 1, dtype=torch.long)

    def accepted(probability: float) -> int:
        return int(source.accept(torch.full((count, 1), probability), position, ACCEPT).sum())

    for probability in (0.03, 0.5, 0.9):
        assert stats.binomtest(accepted(probability), count, probability).pvalue > ALPHA
    assert [accepted(one) for one in (1.0, 3.0, 0.0, float("nan"))] == [count, count, 0, 0]


def test_the_acceptance_test_and_the_draft_draw_of_a_place_are_independent() -> None:
    """Leviathan's rule needs u independent of the drafted token: 2 x V table of (accepted, token)."""
    count, vocab = 40_000, 5
    source, position = Noise(torch.arange(count)), torch.full((count,), 9)
    token = source.draw(torch.ones(count, vocab), position, substream(DRAFT, 2)).numpy()
    passed = source.accept(torch.full((count, 1), 0.5), position[:, None], substream(ACCEPT, 2))[:, 0].numpy()
    recovered = source.draw(torch.ones(count, vocab), position, TARGET).numpy()
    for table in (np.bincount(passed * vocab + token), np.bincount(token * vocab + recovered)):
        found: Any = stats.chi2_contingency(table.reshape(-1, vocab))
        assert found.pvalue > ALPHA


@planted.found_by(
    (planted.noise_knows_the_batch, test_a_row_does_not_depend_on_its_neighbours_or_on_how_many_numbers_are_asked_for),
    (planted.noise_forgets_the_position, lambda: test_numbers_are_uniform_along_every_axis("positions")),
)
def test_planted_bugs_are_found(plant: Any, proof: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.assert_found(plant, proof, monkeypatch)
