"""Random products of models, windows, rows, settings, ends, chunks, drafts and schedules."""

from __future__ import annotations

import random
from typing import Any

import pytest
from transformers.generation.logits_process import (
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TypicalLogitsWarper,
)

from skipstone import Autoregressive, LayerSkip, Method, Request, Sampling
from skipstone.engines.model_runner import ModelRunner
from tests.helpers.machine import decode, llama, mistral, prompt, serve
from tests.helpers.pairwise import slow_except
from tests.helpers.trees import Trees, reference


def a_model(dice: random.Random, vocab: int) -> ModelRunner:
    seed, window = dice.randrange(50), dice.choice([None, None, 1, 2, 5, 9])
    model: Any = llama(vocab=vocab, seed=seed) if window is None else mistral(window, vocab=vocab, seed=seed)
    return ModelRunner(model)


def a_sampling(dice: random.Random) -> Sampling:
    processors: list[Any] = [RepetitionPenaltyLogitsProcessor(1.2), NoRepeatNGramLogitsProcessor(3)]
    warpers: list[Any] = [TemperatureLogitsWarper(0.8), TypicalLogitsWarper(0.8)]
    return Sampling(
        temperature=dice.choice([0.0, 0.0, 0.7, 1.0]),
        top_k=dice.choice([0, 0, 3]),
        top_p=dice.choice([1.0, 1.0, 0.8]),
        min_p=dice.choice([0.0, 0.0, 0.05]),
        seed=dice.randrange(1000),
        processors=[processor for processor in processors if dice.random() < 0.3],
        warpers=warpers if dice.random() < 0.1 else [],
    )


def a_request(dice: random.Random, vocab: int) -> Request:
    ends = frozenset(dice.sample(range(vocab), dice.choice([0, 0, 1])))
    ids = prompt(dice.randint(1, 28), dice.randrange(1000), vocab)
    return Request(ids, dice.randint(1, 20), eos=ends, sampling=a_sampling(dice))


def a_method(dice: random.Random, references: tuple[tuple[int, ...], ...]) -> Method:
    """One whose text is that of plain sampling with the same seed."""
    if dice.random() < 0.5:
        return Trees(dice.randint(1, 20), dice.random(), dice.random(), dice.choice([0.0, 0.2]), dice.randrange(99), references)
    return a_layerskip(dice, "coupled")


def a_layerskip(dice: random.Random, rule: Any) -> LayerSkip:
    return LayerSkip(
        exit_layer=dice.randint(1, 3),
        num_speculative_tokens=dice.randint(1, 8),
        confidence_threshold=dice.choice([None, 0.5, "adaptive"]),
        reuse_cache=dice.random() < 0.7,
        rejection_sample_method=rule,
    )


@pytest.mark.parametrize("seed", slow_except((), range(60), full=range(8)))
def test_a_random_product_gives_the_text_of_plain_decoding_alone(seed: int) -> None:
    """Served by three rows or decoded as one batch. LayerSkip's standard rule gives its own text of one request alone."""
    dice = random.Random(seed)
    vocab = dice.choice([5, 30, 97])
    model = a_model(dice, vocab)
    requests = [a_request(dice, vocab) for _ in range(dice.randint(1, 6))]
    standard = seed % 3 == 0
    method: Method = a_layerskip(dice, "standard")
    alone = [decode(method if standard else Autoregressive(), model, [request])[0][0] for request in requests]
    if not standard:
        method = a_method(dice, tuple(reference(r.prompt, text) for r, text in zip(requests, alone, strict=True)))
    chunk = dice.choice([1, 3, 512])
    if seed % 2:
        texts, _ = serve(method, model, requests, chunk)
    else:
        texts, _, _ = decode(method, model, requests, chunk, check=True)
    assert texts == alone
