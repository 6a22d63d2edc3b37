"""Tokens that the native engine draws are those of torch's warpers and of the same noise."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.logits_process import TypicalLogitsWarper

from skipstone import Sampling
from skipstone.decoding.noise import TARGET, Noise
from skipstone.decoding.sampling import Sampler, WarpedLogits, WarperSettings
from skipstone.engines.model_runner import ModelRunner
from tests.helpers import families
from tests.helpers.native import NATIVE_ONLY, native
from tests.helpers.pairwise import slow_except

pytestmark = NATIVE_ONLY
CPU = torch.device("cpu")
SETTINGS = [
    Sampling(0.8, 50, 0.9),
    Sampling(1.0, 1),
    Sampling(1.3, 100, 1.0, 0.05),
    Sampling(0.6, 20, 0.3, 0.2),
    Sampling(2.0, 40, 0.0),
    Sampling(1.0, 7, 0.95),
    Sampling(1.0),
    Sampling(0.7, 0, 0.9),
    Sampling(1.5, 0, 1.0, 0.02),
    Sampling(1.1, 0, 0.6, 0.1),
    Sampling(1.0, 1 << 20, 0.99),
]


@functools.cache
def engine() -> ModelRunner:
    return native(families.build("llama"))


def drawn(logits: Tensor, rows: list[Sampling | None], noise: Noise, position: Tensor) -> Tensor:
    """What the engine draws; -1 for a row that it leaves."""
    draw = engine().engine.draw
    assert draw is not None
    return draw(logits, WarperSettings(rows, CPU).engine_warps, noise.counters(position, TARGET))


def expected(logits: Tensor, row: Sampling, noise: Noise, position: Tensor) -> int:
    """The draw of one row [1, V] from transformers' own warpers over the whole vocabulary."""
    chain = LogitsProcessorList([TemperatureLogitsWarper(row.temperature)])
    chain += [TopKLogitsWarper(row.top_k)] if row.top_k else []
    chain += [TopPLogitsWarper(row.top_p)] if row.top_p < 1 else []
    chain += [MinPLogitsWarper(row.min_p)] if row.min_p else []
    p = chain(torch.zeros(1, 1, dtype=torch.long), logits.clone()).softmax(-1)  # type: ignore[arg-type]
    return int(noise.race(p, position, TARGET).argmax())


@pytest.mark.parametrize("vocabulary", slow_except([102], [102, 700, 5000]))
def test_draws_are_those_of_transformers_warpers(vocabulary: int) -> None:
    dice = torch.Generator().manual_seed(vocabulary)
    several: list[int] = []
    for trial in range(20):
        logits = torch.randn(len(SETTINGS), vocabulary, generator=dice) * (1 + trial % 5)
        if trial % 3 == 0:
            logits[:, torch.randperm(vocabulary, generator=dice)[: vocabulary - 30]] = float("-inf")
        noise = Noise(torch.arange(len(SETTINGS)) * 7919 + trial)
        position = torch.arange(len(SETTINGS)) + trial
        found = drawn(logits, list(SETTINGS), noise, position)
        apart = torch.stack([logits, logits.roll(1)], 1)[:, 0]  # rows that are apart in memory
        assert torch.equal(drawn(apart, list(SETTINGS), noise, position), found)
        for row, one in enumerate(SETTINGS):
            alone, at = Noise(noise.seed[row : row + 1]), position[row : row + 1]
            assert int(found[row]) == expected(logits[row : row + 1], one, alone, at)
            assert torch.equal(alone.counters(at, TARGET), noise.counters(position, TARGET)[row : row + 1])
            itself = drawn(logits[row : row + 1], [one], alone, at)
            assert int(itself) == int(found[row])
        several += (found != logits.argmax(-1)).tolist()
    assert sum(several) > 25, "hardly anything was drawn at random"


@pytest.mark.parametrize("count", [1, 2, 8, 100, 101])
def test_the_largest_logits_are_those_of_a_sort(count: int) -> None:
    logits = torch.randn(2, 5, 700, generator=torch.Generator().manual_seed(count))
    found = engine().top_k_tokens(logits, count)
    assert torch.equal(found, logits.sort(dim=-1, descending=True).indices[..., :count])
    few = logits[..., :count]
    assert torch.equal(engine().top_k_tokens(few, count).sort(-1).values, torch.arange(count).expand(2, 5, count))
    ties = torch.zeros(1, 1, 300).index_fill(2, torch.tensor([7, 200, 201]), 1.0)
    assert engine().top_k_tokens(ties, 5).tolist() == [[[7, 200, 201, 0, 1]]], "of equal logits the lower token is the larger"


@pytest.mark.parametrize("row", [Sampling(1.0, 10), Sampling(1.0, 0, 0.5)], ids=["top-k", "top-p"])
def test_what_the_engine_leaves_to_its_caller(row: Sampling) -> None:
    noise, position = Noise(torch.tensor([1, 2])), torch.tensor([3, 4])
    ordinary = torch.linspace(0, 9, 300)[None].repeat(2, 1)
    before = drawn(ordinary, [row, row], noise, position).tolist()
    assert min(before) >= 0
    last = 290 if row.top_k else int((ordinary[1].softmax(-1).cumsum(-1) <= 0.5).sum())
    for place, value in ((last, ordinary[1, last - 1]), (5, float("nan")), (7, float("inf")), (slice(None), float("-inf"))):
        logits = ordinary.clone()
        logits[1, place] = value
        assert drawn(logits, [row, row], noise, position).tolist() == [before[0], -1]
        assert drawn(logits, [row, None], noise, position).tolist() == [before[0], 0], "a free row may hold anything"


@pytest.mark.parametrize("wish", [{"top_k": 12, "top_p": 0.9}, {"top_p": 0.9}], ids=["top-k", "top-p"])
def test_a_sampler_asks_the_engine_and_falls_back(wish: dict[str, Any]) -> None:
    asked: list[bool] = []
    draw = engine().engine.draw
    assert draw is not None

    def watched(*arguments: Tensor) -> Tensor:
        tokens = draw(*arguments)  # type: ignore[arg-type]
        asked.append(int(tokens.min()) >= 0)
        return tokens

    sampler = Sampler(2, CPU, engine_draw=watched)  # type: ignore[arg-type]
    for row in range(2):
        sampler.admit(row, Sampling(0.9, **wish, seed=row), torch.tensor([1]))
    dice, path = torch.Generator().manual_seed(1), torch.empty(2, 0, dtype=torch.long)
    for trial in range(40):
        logits, position = torch.randn(2, 400, generator=dice), torch.tensor([trial, trial + 3])
        if trial % 2:
            logits[1] = logits[1].round()  # ties
        chances = sampler.chances(logits, path)
        assert isinstance(chances, WarpedLogits)
        found = sampler.noise.draw(chances, position, TARGET)
        assert torch.equal(found, sampler.noise.draw(sampler.distribution(logits, path), position, TARGET))
    assert asked == [True, False] * 20


def test_a_row_draws_the_same_whatever_is_beside_it() -> None:
    own = Sampling(1.0, seed=3)
    others = [Sampling(0.0), Sampling(1.0, 150), Sampling(1.0, warpers=[TypicalLogitsWarper(0.9)]), Sampling(0.8, 5), None]
    draw, path = engine().engine.draw, torch.empty(2, 0, dtype=torch.long)
    dice = torch.Generator().manual_seed(4)

    def token(beside: Sampling | None, logits: Tensor, position: int) -> list[int]:
        sampler = Sampler(2, CPU, engine_draw=draw)
        for row, one in enumerate((own, beside)):
            if one is not None:
                sampler.admit(row, one, torch.tensor([1]))
        return sampler.noise.draw(sampler.chances(logits, path), torch.tensor([position, position]), TARGET).tolist()

    for position in range(30):
        logits = torch.randn(2, 400, generator=dice)
        found = [token(beside, logits, position) for beside in others]
        assert {one[0] for one in found} == {found[0][0]}
        assert found[0][1] == int(logits[1].argmax())
