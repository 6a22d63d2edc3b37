"""The conformance suite: what every method promises, on every family. A new method is one row of ROWS.

Greedy text is that of `model.generate` on each row alone, token for token. Sampled text is that of our own plain decoding with
the same seeds, under every rule for which a method promises it. A lossy method has an oracle of its own. No cell may pass
without drafts that were rejected, and none but those of `rare` rows without drafts that were accepted.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
from transformers import PreTrainedModel

from skipstone import (
    METHODS,
    AdaDecode,
    AdaSD,
    Autoregressive,
    EarlyExit,
    Jacobi,
    LayerSkip,
    Lookahead,
    Method,
    Output,
    PromptLookup,
    SelfSpeculative,
    Speculative,
    Swift,
)
from tests.helpers import families
from tests.helpers.support import decode, margin, plainly, references

EXIT = 2
DRAFTS = (1, 4, 7)
NEW = 24
# how fast a tiny model runs is no matter here
pytestmark = pytest.mark.filterwarnings("ignore:.*x the speed of plain decoding:RuntimeWarning")


@dataclass(frozen=True)
class Row:
    """make: (num_speculative_tokens, rejection_sample_method) -> the method. speculative: it drafts.

    same_text: rules under which sampling gives the text of plain sampling with the same seeds ("standard" where drafts are
    deterministic). oracle: for a lossy method, the model whose text it should give. variant: a setting of a method that has a
    row already: one cell of the grid, all in the full product. learns: the drafter grows better, so that of a short text's
    drafts all may be right. rare: it drafts what stood there before, which random models hardly ever say again: where they do,
    tests/test_lookups.py asks for drafts that were accepted, family by family.
    """

    make: Callable[[int, Any], Method]
    speculative: bool = True
    same_text: tuple[str, ...] = ("coupled",)
    oracle: Callable[[str], PreTrainedModel] | None = None
    variant: bool = False
    learns: bool = False
    rare: bool = False

    def of(self, family: str, drafts: int, rule: str) -> Method:
        """The method for a family's model: what drafts with a second model is given its first layers as one."""
        method = self.make(drafts, rule)
        second = any(field.name == "draft_model" for field in fields(method))
        return replace(method, draft_model=truncated(family)) if second else method  # type: ignore[call-arg]


@functools.cache
def truncated(name: str) -> PreTrainedModel:
    """The first EXIT layers of a family's model as a model of its own."""
    full, short = families.cached(name), families.build(name, layers=EXIT)
    missing, extra = short.load_state_dict(full.state_dict(), strict=False)
    assert not missing, missing
    assert extra, "there was nothing to cut off"
    return short


SWIFT = functools.partial(Swift, skip_ratio=0.5, context_window=6, guard=False, objective="matchness")
"""It always drafts, and judges layer sets from the seventh token on."""

ROWS: dict[str, Row] = {
    "autoregressive": Row(lambda d, rule: Autoregressive(), speculative=False, same_text=("standard",)),
    "early_exit": Row(lambda d, rule: EarlyExit(exit_layer=EXIT), speculative=False, same_text=(), oracle=truncated),
    "layerskip": Row(
        lambda d, rule: LayerSkip(exit_layer=EXIT, num_speculative_tokens=d, rejection_sample_method=rule),
    ),
    "layerskip, cache not reused": Row(
        lambda d, rule: LayerSkip(EXIT, d, reuse_cache=False, rejection_sample_method=rule),
        variant=True,
    ),
    "layerskip, confident": Row(
        lambda d, rule: LayerSkip(EXIT, d, confidence_threshold=0.2, rejection_sample_method=rule),
        variant=True,
    ),
    "swift": Row(lambda d, rule: SWIFT(num_speculative_tokens=d), same_text=("standard",), learns=True),
    "self_speculative": Row(lambda d, rule: SelfSpeculative((1,), (2,), None, d), same_text=("standard",)),
    "adadecode": Row(
        lambda d, rule: AdaDecode("original", 0.3, d, exit_layers=(1, EXIT), guard=False, rejection_sample_method=rule),
    ),
    "adadecode, deeper heads look again": Row(
        lambda d, rule: AdaDecode("original", 0.2, d, recheck=True, guard=False, rejection_sample_method=rule),
        variant=True,
    ),
    "speculative": Row(lambda d, rule: Speculative(None, d, rejection_sample_method=rule)),
    "speculative, heuristic schedule": Row(
        lambda d, rule: Speculative(None, d, "heuristic", rejection_sample_method=rule), variant=True
    ),
    "speculative, confident": Row(
        lambda d, rule: Speculative(None, d, "confidence", 0.2, rejection_sample_method=rule), variant=True
    ),
    "adasd": Row(lambda d, rule: AdaSD(None, d, relaxed=False, rejection_sample_method=rule)),
    "prompt_lookup": Row(lambda d, rule: PromptLookup(num_speculative_tokens=d), same_text=("standard",), rare=True),
    "prompt_lookup, first place": Row(
        lambda d, rule: PromptLookup(num_speculative_tokens=d, prefer="first"), same_text=("standard",), variant=True, rare=True
    ),
    "jacobi": Row(lambda d, rule: Jacobi(d), same_text=("standard",), rare=True),
    "lookahead": Row(lambda d, rule: Lookahead(d, 3, d), same_text=("standard",), rare=True),
    "swift, chains that never stop early": Row(
        lambda d, rule: SWIFT(skip_ratio=0.75, num_speculative_tokens=d, confidence_threshold=None, dynamic_verification=False),
        same_text=("standard",),
        variant=True,
        learns=True,
    ),
}
LOSSLESS = [name for name, row in ROWS.items() if row.oracle is None]
MAIN = [name for name in LOSSLESS if not ROWS[name].variant]
GRID = [(name, 3, d) for name in MAIN for d in (DRAFTS if ROWS[name].speculative else (1,))]
GRID += [(name, 1, 4) for name in MAIN]
GRID += [(name, 3, 4) for name in LOSSLESS if ROWS[name].variant]

PROCESSORS: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "no_repeat_ngram_size": 3,
    "min_new_tokens": NEW // 2,
    "bad_words_ids": [[7], [11, 12]],
    "eos_token_id": [5, 60],
}
SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 1.3, "top_k": 40, "top_p": 0.95}


def assert_not_vacuous(row: Row, output: Output) -> None:
    stats = output.stats
    assert stats is not None
    if row.speculative:
        assert stats.drafted > 0
        assert stats.accepted > 0 or row.rare, "no draft was ever accepted"
        few = row.learns and stats.drafted < 20
        assert stats.drafted > stats.accepted or few, "no draft was ever rejected"
    else:
        assert stats.drafted == 0


def assert_greedy_equals_alone(row: Row, model_name: str, rows: int, drafts: int, options: dict[str, Any]) -> None:
    options = {"max_new_tokens": NEW, **options}
    prompts, expected, _ = references(model_name, rows, **options)
    output = decode(families.cached(model_name), prompts, row.of(model_name, drafts, "standard"), **options)
    assert output.new_tokens == expected
    assert_not_vacuous(row, output)


def assert_sampling_equals_plain(row: Row, name: str, rows: int, drafts: int, rule: str, options: dict[str, Any]) -> None:
    prompts, expected = plainly(name, rows, seed=11, **options)
    output = decode(families.cached(name), prompts, row.of(name, drafts, rule), seed=11, **options)
    assert output.new_tokens == expected
    assert_not_vacuous(row, output)


def test_every_method_has_a_row() -> None:
    assert {row.make(2, "standard").name for row in ROWS.values()} == set(METHODS)


def test_lossless_labels_agree_with_the_oracles() -> None:
    for row in ROWS.values():
        assert row.make(2, "standard").lossless == (row.oracle is None)


@pytest.mark.parametrize("family", families.NAMES)
def test_few_greedy_references_are_near_ties(family: str) -> None:
    prompts, expected, dropped = references(family, 3, max_new_tokens=NEW)
    assert dropped <= 1
    assert len(prompts) == len(expected) == 3


def taking_turns(sampled: int) -> list[Any]:
    """Every method on every family. What drafts is tried greedily on one family and sampled on the next, so that each pair is
    proved once (plain decoding, which is tried everywhere, is what both are compared with); the other half is in the full
    product."""
    cells = []
    for number, method in enumerate(MAIN):
        for place, family in enumerate(families.NAMES):
            other = ROWS[method].speculative and (number + place) % 2 != sampled
            if ROWS[method].speculative or not sampled:
                cells.append(pytest.param(method, family, marks=pytest.mark.slow if other else []))
    return cells


@pytest.mark.parametrize(("method", "family"), taking_turns(sampled=0))
def test_greedy_text_is_that_of_generate_on_each_row_alone(method: str, family: str) -> None:
    assert_greedy_equals_alone(ROWS[method], family, 3, 4, {})


@pytest.mark.parametrize(("method", "family"), taking_turns(sampled=1))
def test_sampled_text_is_that_of_plain_sampling(method: str, family: str) -> None:
    for rule in ROWS[method].same_text:
        assert_sampling_equals_plain(ROWS[method], family, 3, 4, rule, SAMPLING)


@pytest.mark.parametrize("family", families.NAMES)
@pytest.mark.parametrize("method", [name for name, row in ROWS.items() if row.oracle])
def test_a_lossy_method_gives_its_oracles_text(method: str, family: str) -> None:
    oracle = ROWS[method].oracle
    assert oracle is not None
    prompts = families.prompts(3)
    output = decode(families.cached(family), prompts, ROWS[method].make(4, "standard"))
    found = output.new_tokens
    assert found is not None
    proved = 0
    for prompt, mine in zip(prompts, found, strict=True):
        reference, smallest = margin(oracle(family), prompt, max_new_tokens=NEW)
        if smallest >= 1e-4:
            assert mine == reference
            proved += 1
    assert proved >= 2
    assert output.lossless is False
    assert found != decode(families.cached(family), prompts, Autoregressive()).new_tokens


@pytest.mark.parametrize(("method", "rows", "drafts"), GRID)
class TestFullGridOnLlama:
    @pytest.mark.slow
    def test_greedy(self, method: str, rows: int, drafts: int) -> None:
        assert_greedy_equals_alone(ROWS[method], "llama", rows, drafts, {"max_new_tokens": 40})

    def test_greedy_with_processors(self, method: str, rows: int, drafts: int) -> None:
        assert_greedy_equals_alone(ROWS[method], "llama", rows, drafts, {"max_new_tokens": 40, **PROCESSORS})

    @pytest.mark.slow
    def test_sampling(self, method: str, rows: int, drafts: int) -> None:
        for rule in ROWS[method].same_text:
            assert_sampling_equals_plain(ROWS[method], "llama", rows, drafts, rule, {"max_new_tokens": 40, **SAMPLING})

    def test_sampling_with_processors(self, method: str, rows: int, drafts: int) -> None:
        options = {"max_new_tokens": 40, **SAMPLING, **PROCESSORS}
        for rule in ROWS[method].same_text:
            assert_sampling_equals_plain(ROWS[method], "llama", rows, drafts, rule, options)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("method", "family"),
    [(method, family) for method in LOSSLESS for family in families.NAMES],
)
class TestFullProduct:
    def test_greedy(self, method: str, family: str, rows: int) -> None:
        for drafts, options in itertools.product(DRAFTS, ({}, PROCESSORS)):
            assert_greedy_equals_alone(ROWS[method], family, rows, drafts, {"max_new_tokens": 40, **options})

    def test_sampling(self, method: str, family: str, rows: int) -> None:
        for drafts, options in itertools.product(DRAFTS, ({}, PROCESSORS)):
            for rule in ROWS[method].same_text:
                settings = {"max_new_tokens": 40, **SAMPLING, **options}
                assert_sampling_equals_plain(ROWS[method], family, rows, drafts, rule, settings)
