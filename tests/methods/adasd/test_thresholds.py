"""AdaSD's thresholds against traces computed by hand, and against the formulas with lists."""

from __future__ import annotations

import math
import random
from statistics import mean

import pytest
import torch
from torch import Tensor

from skipstone.decoding.draft import RowVerdict
from skipstone.methods.adasd.thresholds import AdaSDCounts, GenerationThreshold, Variant, VerificationThreshold

CPU = torch.device("cpu")


def bools(*rows: str) -> Tensor:
    return torch.tensor([[letter == "x" for letter in row] for row in rows])


def test_the_papers_own_example() -> None:
    """Twenty accepted drafts of mean distance .15 and twenty rejected ones of mean .49: the threshold is .32 (section 4.4)."""
    near = VerificationThreshold(1, CPU)
    for number in range(20):
        shift = 0.05 if number % 2 else -0.05
        near.add(torch.tensor([[0.15 + shift, 0.49 - shift]]), bools("x."), bools(".x"))
    assert near.value.item() == pytest.approx(0.32, abs=1e-7)


TRACE = [
    (torch.tensor([[0.1, 0.2, 0.6]]), bools("xx."), bools("..x")),
    (torch.tensor([[0.3, 0.0, 0.0]]), bools("x.."), bools("...")),
    (torch.tensor([[0.8, 0.0, 0.0]]), bools("..."), bools("x..")),
    (torch.tensor([[0.0, 0.4, 0.9]]), bools("xx."), bools("...")),
]
"""Accepted: .1 .2 .3 .0 .4, mean .2, in three drafts; rejected: .6 .8, mean .7, in two. The last .9 was not reached."""


@pytest.mark.parametrize(
    ("variant", "after_one", "in_the_end"),
    [
        (None, (0.15 + 0.6) / 2, (0.2 + 0.7) / 2),
        ("A", 0.15, 0.2),
        ("B", (0.1 + 0.2 + 0.6) / 3, (1.0 + 1.4) / 7),
        ("C", (0.15 + 0.6) / 2, (3 * 0.2 + 2 * 0.7) / 5),
    ],
)
def test_verification_threshold_by_hand(variant: Variant | None, after_one: float, in_the_end: float) -> None:
    near = VerificationThreshold(1, CPU, variant)
    assert near.value.item() == 0, "without data there is no threshold: no distance is below 0"
    near.add(*TRACE[0])
    assert near.value.item() == pytest.approx(after_one, abs=1e-7)
    for distances, accepted, rejected in TRACE[1:]:
        near.add(distances, accepted, rejected)
    assert near.value.item() == pytest.approx(in_the_end, abs=1e-7)
    for accepted, rejected in (("xx", ".."), ("..", "x.")):
        near.reset(0)
        assert near.value.item() == 0
        near.add(torch.tensor([[0.2, 0.4]]), bools(accepted), bools(rejected))
        assert near.value.item() == 0, "accepted or rejected drafts alone are no threshold"
    near.reset(0)
    near.add(*TRACE[0])
    assert near.value.item() == pytest.approx(after_one, abs=1e-7), "nor do its counts outlive a request"


@pytest.mark.parametrize("variant", [None, "A", "B", "C"])
def test_rows_keep_lists_of_their_own(variant: Variant | None) -> None:
    """Against the formulas over plain lists, row by row, with random drafts."""
    dice, rows = random.Random(4), 3
    near, enough = VerificationThreshold(rows, CPU, variant), GenerationThreshold(rows, CPU)
    kept: list[list[float]] = [[] for _ in range(rows)]
    lost: list[list[float]] = [[] for _ in range(rows)]
    drafts = [[0, 0] for _ in range(rows)]
    for _ in range(30):
        distances = [[dice.random() for _ in range(5)] for _ in range(rows)]
        ends = [dice.randrange(7) for _ in range(rows)]  # 5: all accepted, 6: the row took no part
        accepted = torch.tensor([[place < end < 6 for place in range(5)] for end in ends])
        rejected = torch.tensor([[place == end for place in range(5)] for end in ends])
        near.add(torch.tensor(distances, dtype=torch.float64), accepted, rejected)
        enough.add(torch.tensor(distances, dtype=torch.float64), rejected)
        for row, end in enumerate(ends):
            if end == 6:
                continue
            kept[row] += distances[row][:end]
            lost[row] += distances[row][end : end + 1]
            drafts[row][0] += end > 0
            drafts[row][1] += end < 5
    for row in range(rows):
        a, r = mean(kept[row]), mean(lost[row])
        counts = {"A": (1, 0), "B": (len(kept[row]), len(lost[row])), "C": tuple(drafts[row]), None: (1, 1)}[variant]
        assert near.value[row].item() == pytest.approx((counts[0] * a + counts[1] * r) / sum(counts), abs=1e-12)
        assert enough.value[row].item() == pytest.approx(r, abs=1e-12)
    enough.reset(0)
    assert enough.value[0] == math.inf != enough.value[1], "a new request begins without a threshold"


def test_counts_are_pooled_over_rows_and_requests() -> None:
    counts = AdaSDCounts(CPU)
    accepted, rejected = bools("x.", "x."), bools(".x", "..")
    for name, values, threshold, known in (
        ("distance", [[0.1, 0.5], [0.3, 0.7]], [0.0, 0.4], [False, True]),
        ("entropy", [[1.0, 2.0], [3.0, 4.0]], [9.0, math.inf], [True, False]),
    ):
        counts.add_means(name, torch.tensor(values), accepted, rejected, torch.tensor(threshold), torch.tensor(known))
    verdicts = [RowVerdict([0], [5, 6], "recovered", 2, 1), RowVerdict([0], [5, 7], "recovered", 2, 0)]
    counts.add([*verdicts, RowVerdict([], [], "", 0, 0)])
    found = counts.report()
    assert [found[name] for name in ("steps", "drafted", "accepted", "overruled")] == [2, 4, 2, 1]
    assert {name: (round(one["sum"], 6), one["count"]) for name, one in found["means"].items()} == {
        "entropy_accepted": (4.0, 2),
        "entropy_rejected": (2.0, 1),
        "entropy_threshold": (9.0, 1),
        "distance_accepted": (0.4, 2),
        "distance_rejected": (0.5, 1),
        "distance_threshold": (0.4, 1),
    }
