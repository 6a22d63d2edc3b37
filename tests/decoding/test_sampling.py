"""From logits to distributions: transformers' warpers row by row, processors on a row's own ids, and only where the walk is."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitsProcessor,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

import skipstone
from skipstone import Request, Sampling
from skipstone.decoding.noise import Noise
from skipstone.decoding.sampling import NUCLEUS, Sampler, WarperSettings, warp
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.native import library
from tests.helpers import families, planted
from tests.helpers.conformance import COMMON, ROWS
from tests.helpers.machine import decode, llama, prompt
from tests.helpers.pairwise import round_robin
from tests.helpers.settings import QUIET
from tests.helpers.trees import Trees, reference

CPU = torch.device("cpu")


def theirs(scores: Tensor, row: Sampling) -> Tensor:
    """One row [V] through transformers' objects, in the order in which `generate` lists them."""
    if row.temperature == 0:
        return torch.nn.functional.one_hot(scores.argmax(), len(scores)).to(scores.dtype)
    chain: list[Any] = [TemperatureLogitsWarper(row.temperature)] if row.temperature != 1 else []
    chain += [TopKLogitsWarper(row.top_k)] if row.top_k else []
    chain += [TopPLogitsWarper(row.top_p)] if row.top_p < 1 else []
    chain += [MinPLogitsWarper(row.min_p)] if row.min_p else []
    ids, scores = torch.zeros(1, 1, dtype=torch.long), scores[None].clone()
    for warper in chain:
        scores = warper(ids, scores)
    return scores.softmax(-1)[0]


def assert_theirs(logits: Tensor, rows: list[Sampling]) -> Tensor:
    """Every row [V] has the distribution of transformers' objects, and the bits that it has alone. Returns all of them."""
    found = warp(logits, WarperSettings(rows, CPU))
    for row, sampling in enumerate(rows):
        expected = theirs(logits[row], sampling)
        assert torch.equal(found[row] > 0, expected > 0), "the same tokens are left"
        torch.testing.assert_close(found[row], expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(found[row], warp(logits[row : row + 1], WarperSettings([sampling], CPU))[0])
    return found


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-4, 0.3, 0.7, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 17, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 0.95, 0.9, 0.8, 0.5, 0.1, 0.05]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.1, 0.5, 1.0]),
)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(samplings, min_size=1, max_size=6), st.integers(0, 10_000), st.sampled_from([None, 4.0, 1.0, 0.0]))
def test_warp_is_transformers_chain_row_by_row(rows: list[Sampling], seed: int, grain: float | None) -> None:
    """Rows with different settings. grain: logits rounded to multiples, so that ties are common (0: all equal)."""
    logits = 3 * torch.randn(len(rows), 40, generator=torch.Generator().manual_seed(seed))
    found = assert_theirs(logits if grain is None else (logits * grain).round(), rows)
    assert torch.allclose(found.sum(-1), torch.ones(len(rows)), atol=1e-5)


@pytest.mark.parametrize("grain", [None, 8.0, 1.0])
@pytest.mark.parametrize("spread", [1.0, 3.0, 6.0])
def test_top_p_of_a_large_vocabulary_is_transformers(spread: float, grain: float | None) -> None:
    rows = [Sampling(1.0, top_p=top_p) for top_p in (0.95, 0.9, 0.5, 0.05)] + [Sampling(0.7), Sampling(0.7, 0, 0.9, 0.1)]
    assert 4 * NUCLEUS <= 3000
    logits = spread * torch.randn(len(rows), 3000, generator=torch.Generator().manual_seed(int(spread)))
    found = assert_theirs(logits if grain is None else (logits * grain).round() / grain, rows)
    if spread == 1.0:
        assert int((found[0] > 0).sum()) > NUCLEUS


@pytest.mark.parametrize("top_p", [0.9, 0.8, 0.7, 0.6, 0.3, 0.2, 0.1])
def test_top_p_cuts_ties_where_transformers_does(top_p: float) -> None:
    """Ten equal tokens put cumulative sums on the threshold, where the last bit of 1 - top_p decides."""
    assert_theirs(torch.zeros(1, 10), [Sampling(temperature=1.0, top_p=top_p)])


@pytest.mark.parametrize("warper", [TypicalLogitsWarper(0.6), EpsilonLogitsWarper(0.02), EtaLogitsWarper(0.05)])
def test_a_row_with_its_own_warpers_uses_them_until_it_is_released_and_leaves_its_neighbours_alone(warper: Any) -> None:
    logits = 2 * torch.randn(3, 30, generator=torch.Generator().manual_seed(1))
    sampler, ids, path = Sampler(3, CPU), torch.tensor([1, 2]), torch.empty(3, 0, dtype=torch.long)
    sampler.admit(0, Sampling(warpers=[TemperatureLogitsWarper(0.7), warper]), ids)
    sampler.admit(2, Sampling(), ids)
    assert not sampler.greedy, "the temperature of a row with warpers is theirs"
    sampler.admit(1, Sampling(temperature=0.7), ids)
    p = sampler.distribution(logits, path)
    assert torch.allclose(p[:1], warper(ids[None], logits[:1] / 0.7).softmax(-1))
    assert int((p[0] > 0).sum()) < 30
    assert torch.allclose(p[1], (logits[1] / 0.7).softmax(-1))
    assert p[2].max() == 1
    sampler.release(0)
    sampler.release(1)
    assert sampler.greedy


def test_processors_run_in_order_on_unpadded_ids_and_path() -> None:
    logits = torch.randn(3, 12, generator=torch.Generator().manual_seed(2))
    prompts = [torch.tensor([3, 4, 3]), torch.tensor([7]), torch.tensor([1, 2, 1, 2, 1])]
    path = torch.tensor([[4, 5], [7, 7], [2, 0]])
    chains: list[list[Any]] = [
        [RepetitionPenaltyLogitsProcessor(2.0), NoRepeatNGramLogitsProcessor(2)],
        [],
        [NoRepeatNGramLogitsProcessor(3), RepetitionPenaltyLogitsProcessor(1.5)],
    ]
    sampler = Sampler(3, CPU)
    for row, ids in enumerate(prompts):
        sampler.admit(row, Sampling(processors=chains[row]), ids[:-1])
        sampler.extend(row, ids[-1:].tolist())
    before = logits.clone()
    found = sampler.process(logits, path)
    for row, ids in enumerate(prompts):
        scores = before[row : row + 1].clone()
        for processor in chains[row]:
            scores = processor(torch.cat([ids, path[row]])[None], scores)
        assert torch.equal(found[row], scores[0])
    assert torch.equal(logits, before), "the raw logits are left as they are"
    assert not torch.equal(found[0], before[0])
    assert torch.equal(found[1], before[1])


def test_propose_returns_the_distribution_of_the_draft() -> None:
    logits = 2 * torch.randn(2, 9, generator=torch.Generator().manual_seed(3))
    position, path = torch.tensor([4, 6]), torch.empty(2, 0, dtype=torch.long)
    sampled, greedy = Sampler(2, CPU), Sampler(2, CPU)
    for row in range(2):
        sampled.admit(row, Sampling(temperature=0.8, top_k=4, seed=row), torch.tensor([1]))
        greedy.admit(row, Sampling(seed=row), torch.tensor([1]))
    token, q, scores = sampled.propose(logits, position, path)
    assert q is not None
    assert torch.equal(q, sampled.distribution(logits, path))
    assert bool((q.gather(1, token[:, None]) > 0).all())
    assert torch.equal(scores, logits)
    token, q, _ = greedy.propose(logits, position, path)
    assert (token.tolist(), q) == (logits.argmax(-1).tolist(), None)
    assert sampled.propose(logits, position, path, None, True)[1] is None, "a coupled draft needs no distribution"


class Watching(LogitsProcessor):
    def __init__(self) -> None:
        self.texts: list[tuple[int, ...]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.texts.append(tuple(input_ids[0].tolist()))
        return scores


def watched(temperature: float, tokens: int, lengths: tuple[int, ...] = (4, 9, 6)) -> tuple[list[Request], list[Watching]]:
    eyes = [Watching() for _ in lengths]
    requests = [
        Request(prompt(length, length), tokens - row, sampling=Sampling(temperature, seed=row, processors=[eyes[row]]))
        for row, length in enumerate(lengths)
    ]
    return requests, eyes


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_processors_are_called_at_the_nodes_the_walk_reaches_and_nowhere_else(temperature: float) -> None:
    """A tree's session draws no drafts itself, so every call is the walk's: one per committed token and row, on the very text
    before that token. Chunked prefill and rows that stopped early add none."""
    runner = ModelRunner(llama())
    plain, _ = watched(temperature, 18)
    texts, _, _ = decode(Trees(nodes=0), runner, plain)
    paths = tuple(reference(request.prompt, text) for request, text in zip(plain, texts, strict=True))
    requests, eyes = watched(temperature, 18)
    found, figures, _ = decode(Trees(nodes=10, references=paths), runner, requests, chunk=2)
    assert found == texts
    assert figures.accepted > 10
    assert figures.verified_nodes > figures.accepted + 40
    for row, request in enumerate(requests):
        whole = reference(request.prompt, texts[row])
        assert eyes[row].texts == [whole[: len(request.prompt) + place] for place in range(len(texts[row]))]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("temperature", -1.0, "temperature must be a finite number"),
        ("temperature", float("nan"), "temperature must be a finite number"),
        ("top_k", -1, "top_k must be a whole number .* found -1"),
        ("top_k", 2.5, "top_k must be a whole number"),
        ("top_p", 1.5, "top_p must lie between 0 and 1, found 1.5"),
        ("top_p", float("nan"), "top_p must lie between 0 and 1"),
        ("min_p", 2.0, "min_p must lie between 0 and 1"),
    ],
)
def test_other_settings_are_refused(name: str, value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Sampling(**{name: value})


@planted.found_by((planted.top_p_rounded_twice, lambda: test_top_p_cuts_ties_where_transformers_does(0.8)))
def test_planted_bugs_are_found(plant: Any, proof: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.assert_found(plant, proof, monkeypatch)


@pytest.mark.parametrize("shape", ["apart", "ties", "few finite"])
def test_a_small_top_k_keeps_transformers_tokens(shape: str) -> None:
    """In vocabularies larger than the part that is sorted; as one of several nodes with the same bits."""
    dice = torch.Generator().manual_seed(3)
    for top_k, top_p, min_p, temperature in itertools.product((1, 7, 50, 100), (1.0, 0.9, 0.5), (0.0, 0.05), (0.7, 1.5)):
        logits = torch.randn(3, 700, generator=dice) * 4
        if shape == "ties":
            logits = logits.round()
        if shape == "few finite":
            logits[:, torch.randperm(700, generator=dice)[:660]] = float("-inf")
        one = Sampling(temperature, top_k, top_p, min_p)
        found = assert_theirs(logits, [one, Sampling(1.0), Sampling(0.0)])
        nodes = warp(logits[None], WarperSettings([one], logits.device))
        assert torch.equal(nodes[0, 0], found[0])


def test_a_draw_among_few_tokens_is_that_of_the_whole_race() -> None:
    dice = torch.Generator().manual_seed(4)
    for seed in range(200):
        p = torch.randn(1, 300, generator=dice).softmax(-1)
        p[0, torch.randperm(300, generator=dice)[: 299 - seed % 40]] = 0
        noise, position = Noise(torch.tensor([seed])), torch.tensor([seed % 7])
        assert torch.equal(noise.draw(p, position, 0), noise.race(p, position, 0).argmax(-1))
    nothing = torch.zeros(2, 5)
    alone, beside = (Noise(torch.zeros(rows, dtype=torch.long)) for rows in (1, 2))
    both = beside.draw(nothing, torch.tensor([3, 3]), 0)
    assert torch.equal(alone.draw(nothing[:1], torch.tensor([3]), 0), both[:1])


@pytest.mark.parametrize("vocabulary", [11, 100, 101, 700])
@pytest.mark.parametrize("top_k", [0, 20, 100, 150])
def test_what_a_row_would_draw_is_what_it_draws(vocabulary: int, top_k: int) -> None:
    """Several places of one row at once, in vocabularies smaller and larger than the tokens that are looked at alone."""
    dice = torch.Generator().manual_seed(5)
    for temperature in (0.0, 0.8):
        sampler = Sampler(2, CPU)
        for row, seed in enumerate((4, 5)):
            sampler.admit(row, Sampling(temperature, top_k, seed=seed), torch.tensor([1, 2]))
        logits, positions = torch.randn(4, vocabulary, generator=dice) * 3, torch.tensor([7, 8, 9, 10])
        nothing_drafted = torch.empty(2, 0, dtype=torch.long)
        for row in (0, 1):
            drawn = [
                int(sampler.propose(logits[n].expand(2, -1), positions[n].expand(2), nothing_drafted, coupled=True)[0][row])
                for n in range(4)
            ]
            assert sampler.would_draw(row, logits, positions).tolist() == drawn


pytestmark = QUIET
ENGINES = ["eager", *([] if library.missing() else ["native"])]
TINY = [9e-6, 1e-37, 1e-38, 1e-39, 1.4e-45, 1e-46, 1e-300, 5e-324]
LOSSLESS_METHODS = [name for name, row in COMMON.items() if row.oracle is None]


@round_robin(
    name=LOSSLESS_METHODS, engine=ENGINES, more=[{}, {"top_k": 5}, {"top_k": 0, "top_p": 0.9, "min_p": 0.1}, {"typical_p": 0.9}]
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
