"""How far to draft, against brute force."""

import itertools
import math
import operator
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skipstone.policy.draft_length import NEVER, best_drafts, best_tree, stop_thresholds

chances = st.floats(0.02, 0.98)
prices = st.floats(1.0, 6.0)
scorings = st.lists(st.floats(0.0, 0.5), min_size=64, max_size=64).map(
    lambda steps: lambda rows: 1.0 + sum(steps[: rows - 1])  # rises, with flats and cliffs
)


def flat(rows: int) -> float:
    return 1.0


def test_a_threshold_by_hand() -> None:
    """V flat: price c / A for every place, and the first one pays for the fixed time, over all that follows it."""
    found = stop_thresholds(0.1, 0.0, flat, acceptance=0.8, price=2.0, max_drafts=3)
    assert found == pytest.approx([2 * 0.1 / 0.8] * 3)
    first = stop_thresholds(0.1, 0.05, flat, acceptance=0.8, price=2.0, max_drafts=9)[0]
    gain = [sum(0.8**n for n in range(1, m + 1)) for m in range(1, 9)]
    assert first == pytest.approx(min(2 * (m * 0.1 + 0.05) / gain[m - 1] for m in range(1, 9)))
    assert stop_thresholds(0.1, 0.0, flat, acceptance=0.0, price=2.0, max_drafts=2) == [NEVER, NEVER]


def test_thresholds_look_across_a_cliff() -> None:
    """Two rows cost .3 more, further ones nothing: a single draft does not pay, six do."""
    first = stop_thresholds(0.02, 0.0, lambda rows: 1.0 + 0.3 * (rows > 1), acceptance=0.9, price=3.0, max_drafts=8)[0]
    assert 3.0 * (0.02 + 0.3) / 0.9 > 1.0 > first


def subtrees(branches: int, depth: int, most: int) -> Iterator[frozenset[tuple[int, ...]]]:
    """All trees of at most so many nodes; a node is the path of ranks that leads to it."""
    paths = [path for level in range(1, depth + 1) for path in itertools.product(range(branches), repeat=level)]
    for size in range(most + 1):
        for nodes in itertools.combinations(paths, size):
            chosen = frozenset(nodes)
            if all(len(path) == 1 or path[:-1] in chosen for path in chosen):
                yield chosen


@settings(deadline=None, max_examples=25)
@given(st.lists(st.floats(0.05, 0.45), min_size=2, max_size=2), prices, scorings)
def test_a_tree_is_the_best_of_all_trees(acceptances: list[float], price: float, scoring: Callable[[int], float]) -> None:
    most, depth = 5, 3
    found = best_tree(acceptances, price, scoring, max_nodes=most, max_depth=depth)
    paths: list[tuple[int, ...]] = []
    for parent, rank in zip(found.parents, found.ranks, strict=True):
        assert parent < len(paths), "a prefix is a tree"
        paths.append((*(paths[parent] if parent >= 0 else ()), rank))
    assert len(set(paths)) == len(paths)
    assert all(len(path) <= depth for path in paths)

    def worth(nodes: frozenset[tuple[int, ...]]) -> float:
        gained = sum(math.prod(acceptances[rank] for rank in path) for path in nodes)
        return 1 + gained - price * scoring(1 + len(nodes))

    assert worth(frozenset(paths)) == pytest.approx(max(map(worth, subtrees(2, depth, most))))


@settings(deadline=None)
@given(st.lists(st.lists(chances, max_size=5), min_size=1, max_size=3), prices, scorings)
def test_of_a_batch_the_best_numbers_of_drafts_are_scored(
    chains: list[list[float]], price: float, scoring: Callable[[int], float]
) -> None:
    rows = [list(itertools.accumulate(chain, operator.mul)) for chain in chains]
    found = best_drafts(rows, price, scoring)
    assert all(0 <= count <= len(chain) for count, chain in zip(found, rows, strict=True))

    def worth(counts: tuple[int, ...]) -> float:
        gained = sum(sum(chain[:count]) for chain, count in zip(rows, counts, strict=True))
        return gained - price * scoring(len(rows) + sum(counts))

    every = itertools.product(*(range(len(chain) + 1) for chain in rows))
    assert worth(tuple(found)) == pytest.approx(max(map(worth, every)))


@given(chances, st.floats(0.02, 0.6), st.floats(0.0, 0.1))
def test_with_one_acceptance_the_rule_finds_the_best_length(acceptance: float, step: float, fixed: float) -> None:
    """If every draft is accepted with the same probability, the best policy drafts a fixed number. At the price of that
    policy's rate, the rule reaches .99 of it."""

    def rate(drafts: int) -> float:
        tokens = sum(acceptance**n for n in range(drafts + 1))
        return tokens / (drafts * step + 1 + (fixed if drafts else 0.0))

    most, drafts = 40, 0
    best = max(map(rate, range(most + 1)))
    theta = stop_thresholds(step, fixed, flat, acceptance, best, most)
    while drafts < most and acceptance**drafts >= theta[drafts]:
        drafts += 1
    assert rate(drafts) >= 0.99 * best
