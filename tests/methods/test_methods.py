"""The conformance suite: what every method promises, on every family. A new method is one row of tests/helpers/conformance.py.

Greedy text is that of `model.generate` on each row alone, token for token. Sampled text is that of our own plain decoding with
the same seeds, under every rule for which a method promises it. A lossy method has an oracle of its own. No cell may pass
without drafts that were rejected, and none but those of `rare` rows without drafts that were accepted.

In the fast run every method meets every second family greedily, and every two settings of a method meet on a Llama; every third
further type meets one method, by turns. `make test-all` runs the full product, and every further type with every method that it
allows.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import skipstone
from skipstone import METHODS
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.native import library
from skipstone.engines.native.weights import RECIPES
from tests.helpers import families
from tests.helpers.conformance import DRAFTS, LOSSLESS, ROWS, assert_greedy_equals_alone, assert_sampling_equals_plain
from tests.helpers.pairwise import pairwise, slow_except
from tests.helpers.support import TIE, decode, margin, references

NEW = 16
"""New tokens of a text in the fast run; twice as many where no draft was accepted or none rejected in so few."""
MAIN = [name for name in LOSSLESS if not ROWS[name].variant]
PROCESSORS: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "no_repeat_ngram_size": 3,
    "min_new_tokens": 12,
    "bad_words_ids": [[7], [11, 12]],
    "eos_token_id": [5, 60],
}
SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 1.3, "top_k": 40, "top_p": 0.95}
# how fast a tiny model runs is no matter here
pytestmark = pytest.mark.filterwarnings("ignore:.*x the speed of plain decoding:RuntimeWarning")


def test_every_method_has_a_row() -> None:
    assert {row.make(2, "standard").name for row in ROWS.values()} == set(METHODS)


def test_lossless_labels_agree_with_the_oracles() -> None:
    for row in ROWS.values():
        assert row.make(2, "standard").lossless == (row.oracle is None)


@pytest.mark.parametrize("family", families.NAMES)
def test_few_greedy_references_are_near_ties(family: str) -> None:
    prompts, expected, dropped = references(family, 2, max_new_tokens=NEW)
    assert dropped <= 1
    assert len(prompts) == len(expected) == 2


def rotated() -> list[Any]:
    """Every method on every family, family by family so that a worker computes its references once; draft lengths take turns
    along both. In the fast run every method meets every second family."""
    cells, fast = [], []
    for (place, family), (number, method) in itertools.product(enumerate(families.NAMES), enumerate(MAIN)):
        cells.append((method, family, DRAFTS[(place + number) % len(DRAFTS)]))
        fast += cells[-1:] if (place + number) % 2 else []
    return slow_except(fast, cells)


@pytest.mark.parametrize(("method", "family", "drafts"), rotated())
def test_greedy_text_is_that_of_generate_on_each_row_alone(method: str, family: str, drafts: int) -> None:
    assert_greedy_equals_alone(ROWS[method], family, 2, drafts, NEW, {})


@pytest.mark.parametrize(
    ("family", "method"),
    slow_except(
        [(family, MAIN[place % len(MAIN)]) for place, family in enumerate(families.NAMES[::2])],
        itertools.product(families.NAMES, MAIN),
    ),
)
def test_sampled_text_is_that_of_plain_sampling(method: str, family: str) -> None:
    for rule in ROWS[method].same_text:
        assert_sampling_equals_plain(ROWS[method], family, 3, 4, rule, NEW, SAMPLING)


@pytest.mark.parametrize("family", families.NAMES)
@pytest.mark.parametrize("method", [name for name, row in ROWS.items() if row.oracle])
def test_a_lossy_method_gives_its_oracles_text(method: str, family: str) -> None:
    oracle = ROWS[method].oracle
    assert oracle is not None
    prompts, plain, _ = references(family, 2, max_new_tokens=NEW)
    output = decode(families.cached(family), prompts, ROWS[method].make(4, "standard"), max_new_tokens=NEW)
    found = output.new_tokens
    assert found is not None
    proved = 0
    for prompt, mine in zip(prompts, found, strict=True):
        reference, smallest = margin(oracle(family), prompt, max_new_tokens=NEW)
        if smallest >= TIE:
            assert mine == reference
            proved += 1
    assert proved >= 1
    assert output.lossless is False
    assert found != plain


@pairwise(method=LOSSLESS, rows=(3, 1), drafts=DRAFTS, sampled=(False, True), processed=(False, True))
def test_settings_meet_on_a_llama(method: str, rows: int, drafts: int, sampled: bool, processed: bool) -> None:
    """Methods and variants x rows x draft lengths x greedy or sampled x with processors or without."""
    options = PROCESSORS if processed else {}
    if not sampled:
        assert_greedy_equals_alone(ROWS[method], "llama", rows, drafts, 24, options)
        return
    for rule in ROWS[method].same_text:
        assert_sampling_equals_plain(ROWS[method], "llama", rows, drafts, rule, 24, {**options, **SAMPLING})


def allowed(family: str) -> list[str]:
    """The methods that decode a family: states without positions do not allow all of them."""
    return [name for name in MAIN if family not in families.HYBRIDS or not METHODS[name].positional]


def with_further_types(step: int, shift: int) -> list[Any]:
    """Every further type with every method that it allows, alone or in a ragged batch of two rows by turns; draft lengths take
    turns, too. All but one method of every step-th type are slow: that is another one from type to type, the first one `shift`.
    """
    cells, fast = [], []
    for place, family in enumerate(families.FURTHER):
        methods = allowed(family)
        for number, method in enumerate(methods):
            rows, drafts = 1 + (place // len(MAIN) + number) % 2, DRAFTS[(place + number) % len(DRAFTS)]
            cells.append((family, method, rows, drafts))
            if place % step == 0 and number == (place // step + shift) % len(methods):
                fast.append(cells[-1])
    return slow_except(fast, cells)


@pytest.mark.parametrize(("family", "method", "rows", "drafts"), with_further_types(3, 0))
def test_greedy_text_of_a_further_type_is_that_of_generate(family: str, method: str, rows: int, drafts: int) -> None:
    assert_greedy_equals_alone(ROWS[method], family, rows, drafts, NEW, {})


@pytest.mark.parametrize(("family", "method", "rows", "drafts"), with_further_types(6, 5))
def test_sampled_text_of_a_further_type_is_that_of_plain_sampling(family: str, method: str, rows: int, drafts: int) -> None:
    for rule in ROWS[method].same_text:
        assert_sampling_equals_plain(ROWS[method], family, rows, drafts, rule, NEW, SAMPLING)


def test_in_the_fast_run_every_method_meets_further_types_alone_and_in_a_batch() -> None:
    greedy, sampled = ([cell.values for cell in with_further_types(*way) if not cell.marks] for way in ((3, 0), (6, 5)))
    assert [family for family, *_ in greedy] == families.FURTHER[::3]
    assert {(method, rows) for _, method, rows, _ in greedy} == set(itertools.product(MAIN, (1, 2)))
    assert {method for _, method, _, _ in sampled} == set(MAIN)


def on_both_engines() -> list[Any]:
    """Every method on both engines, of which the fast run has one by turns; so do the families that the native engine knows."""
    known, engines = list(RECIPES), ("eager", "native")
    cells = [(method, known[place % len(known)], engine) for place, method in enumerate(MAIN) for engine in engines]
    return slow_except([cells[2 * place + place % 2] for place in range(len(MAIN))], cells)


@pytest.mark.parametrize(("method", "family", "engine"), on_both_engines())
def test_both_engines_keep_the_promises(method: str, family: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if engine == "native" and library.missing() is not None:
        pytest.skip(str(library.missing()))
    monkeypatch.setenv("SKIPSTONE_ENGINE", engine)
    assert ModelRunner(families.cached(family)).engine.name == engine
    assert_greedy_equals_alone(ROWS[method], family, 2, 4, NEW, {})
    for rule in ROWS[method].same_text:
        assert_sampling_equals_plain(ROWS[method], family, 2, 4, rule, NEW, {**SAMPLING, **PROCESSORS})


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("family", "method"), list(itertools.product(families.NAMES, LOSSLESS)))
class TestFullProduct:
    def test_greedy(self, method: str, family: str, rows: int) -> None:
        for drafts, options in itertools.product(DRAFTS, ({}, PROCESSORS)):
            assert_greedy_equals_alone(ROWS[method], family, rows, drafts, 40, options)

    def test_sampling(self, method: str, family: str, rows: int) -> None:
        for drafts, options in itertools.product(DRAFTS, ({}, PROCESSORS)):
            for rule in ROWS[method].same_text:
                assert_sampling_equals_plain(ROWS[method], family, rows, drafts, rule, 40, {**SAMPLING, **options})


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
