"""The conformance suite: what every method promises, on every family. A new method is one row of tests/helpers/conformance.py.

Rows, draft lengths, greedy or sampled, processors and engines are spread over all pairs of a family and a method, so that every
pair of values meets. `make test` runs a few of these cells, `make test-full` every method on every family, and
`make test-all` all cells and the product.
"""

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers.generation.logits_process import (
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TypicalLogitsWarper,
)

import skipstone
from skipstone import METHODS, Autoregressive, LayerSkip, Method, Request, Sampling
from skipstone.engines.model_runner import ModelRunner
from tests.helpers import families, support
from tests.helpers.conformance import DRAFTS, LOSSLESS, ROWS, assert_greedy_equals_alone, assert_sampling_equals_plain
from tests.helpers.machine import decode, llama, mistral, prompt, serve
from tests.helpers.pairwise import slow_except
from tests.helpers.support import TIE, margin, references
from tests.helpers.trees import Trees, reference

NEW = 16
"""New tokens of a text; two or four times as many if no draft was accepted or none rejected."""
MAIN = [name for name, row in ROWS.items() if row.oracle is None and not row.variant]
PROCESSORS: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "no_repeat_ngram_size": 3,
    "min_new_tokens": 12,
    "bad_words_ids": [[7], [11, 12]],
    "eos_token_id": [5, 60],
}
SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 1.3, "top_k": 40, "top_p": 0.95}
ENGINES = ("fastest", "eager")
SETTINGS = list(itertools.product((2, 1), DRAFTS, (False, True), (False, True), ENGINES))
"""Rows, draft length, sampled, with processors, engine."""
STRIDES = 5, 7
"""Steps through SETTINGS from one family, and from one method, to the next: coprime to the number of settings."""
# how fast a tiny model runs is no matter here
pytestmark = pytest.mark.filterwarnings("ignore:.*x the speed of plain decoding:RuntimeWarning")


def allowed(family: str, methods: Sequence[str]) -> list[str]:
    """The methods that decode a family: states without positions do not allow all of them."""
    fitting = [name for name in methods if (rows := ROWS[name].families) is None or family in rows]
    fitting = [name for name in fitting if family not in ROWS[name].refused]
    return [name for name in fitting if family not in families.HYBRIDS or not ROWS[name].make(2, "standard").positional]


def spread(names: Sequence[str], methods: Sequence[str]) -> list[tuple[Any, ...]]:
    """Every family with every method that it allows, each with one cell of SETTINGS."""
    return [
        (family, method, *SETTINGS[(STRIDES[0] * place + STRIDES[1] * number) % len(SETTINGS)])
        for place, family in enumerate(names)
        for number, method in enumerate(allowed(family, methods))
    ]


def few(cells: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Cells with every family, and with every method greedily and sampled, with processors and without, on both engines."""

    def pairs(cell: tuple[Any, ...]) -> set[tuple[Any, ...]]:
        return {cell[:1], *((cell[1], place, value) for place, value in enumerate(cell[4:]))}

    chosen, missing = [], set[tuple[Any, ...]]().union(*map(pairs, cells))
    while missing:
        chosen.append(max(cells, key=lambda cell: len(pairs(cell) & missing)))
        missing -= pairs(chosen[-1])
    return chosen


CELLS, FURTHER = spread(families.NAMES, LOSSLESS), spread(families.FURTHER, MAIN)
GROUPS = [[cell for cell in FURTHER if cell[0] == family] for family in families.FURTHER]
ONE_EACH = [cells[place % len(cells)] for place, cells in enumerate(GROUPS)]
"""Every further type with one method, which take turns."""
FAST, FAST_FURTHER = few([cell for cell in CELLS if cell[0] in families.NAMES[::4]]), ONE_EACH[::10]
FULL = [*(cell for place, cell in enumerate(CELLS) if cell[1] in MAIN or place % 7 == 0), *ONE_EACH]


def assert_conforms(method: str, family: str, rows: int, drafts: int, sampled: bool, processed: bool, new: int = NEW) -> None:
    options = PROCESSORS if processed else {}
    if not sampled:
        assert_greedy_equals_alone(ROWS[method], family, rows, drafts, new, options)
        return
    for rule in ROWS[method].same_text:
        assert_sampling_equals_plain(ROWS[method], family, rows, drafts, rule, new, {**SAMPLING, **options})


def test_every_method_has_a_row_and_the_lossy_ones_an_oracle() -> None:
    methods = [(row.make(2, "standard"), row) for row in ROWS.values()]
    assert {method.name for method, _ in methods} == set(METHODS)
    assert all(method.lossless == (row.oracle is None) for method, row in methods)


@pytest.mark.parametrize(("method", "family"), [(name, family) for name, row in ROWS.items() for family in row.refused])
def test_families_that_a_method_cannot_draft_for_are_refused(method: str, family: str) -> None:
    with pytest.raises(ValueError, match=f"{method} reads one hidden state per token, and this {family} model has more"):
        ROWS[method].method(family, 2, "coupled").check(ModelRunner(families.cached(family)))


def test_every_pair_of_values_meets() -> None:
    columns = [families.NAMES, LOSSLESS, *map(set, zip(*SETTINGS, strict=True))]
    for one, other in itertools.combinations(range(len(columns)), 2):
        assert {(cell[one], cell[other]) for cell in CELLS} == set(itertools.product(columns[one], columns[other]))
    assert {cell[1] for cell in FAST} == set(LOSSLESS)


@pytest.mark.parametrize(
    ("family", "method", "rows", "drafts", "sampled", "processed", "engine"),
    slow_except([*FAST, *FAST_FURTHER], [*CELLS, *FURTHER], full=FULL),
)
def test_text_is_that_of_the_reference(
    family: str, method: str, rows: int, drafts: int, sampled: bool, processed: bool, engine: str, monkeypatch: Any
) -> None:
    if engine == "eager":
        monkeypatch.setenv("SKIPSTONE_ENGINE", engine)
    assert_conforms(method, family, rows, drafts, sampled, processed)


@pytest.mark.product
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize(("family", "method"), [cell[:2] for cell in CELLS])
def test_text_is_that_of_the_reference_with_all_settings(family: str, method: str, sampled: bool) -> None:
    for rows, drafts, processed in itertools.product((1, 3), DRAFTS, (False, True)):
        assert_conforms(method, family, rows, drafts, sampled, processed, 40)


@pytest.mark.parametrize("family", slow_except(families.NAMES[::6], families.NAMES, full=families.NAMES[::2]))
@pytest.mark.parametrize("method", [name for name, row in ROWS.items() if row.oracle])
def test_a_lossy_method_gives_its_oracles_text(method: str, family: str) -> None:
    oracle: Any = ROWS[method].oracle
    prompts, plain = references(family, 2, max_new_tokens=NEW)
    output = support.decode(families.cached(family), prompts, ROWS[method].make(4, "standard"), max_new_tokens=NEW)
    found: Any = output.new_tokens
    expected = [margin(oracle(family), prompt, max_new_tokens=NEW) for prompt in prompts]
    certain = [mine == text for mine, (text, smallest) in zip(found, expected, strict=True) if smallest >= TIE]
    assert certain
    assert all(certain)
    assert output.lossless is False
    assert found != plain


@pytest.mark.parametrize("method", [skipstone.LayerSkip(exit_layer=2), skipstone.EarlyExit(exit_layer=2)], ids=str)
def test_an_exit_that_training_did_not_cover_is_warned_of(method: Any) -> None:
    model: Any = families.build("llama")
    ids = torch.arange(1, 9)[None]
    skipstone.generate(model, ids, method, max_new_tokens=4)  # nothing is known of its training
    model.config.trained_exit_layers = [2, 3]
    skipstone.generate(model, ids, method, max_new_tokens=4)
    model.config.trained_exit_layers = [1, 3]
    with pytest.warns(UserWarning, match=r"exit_layer=2 was not trained.*1, 3"):
        skipstone.generate(model, ids, method, max_new_tokens=4)


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
    """A method that gives the text of plain sampling with the same seed."""
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
