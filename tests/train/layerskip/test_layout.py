"""Rows of a step on other processes and passes than those that the run was started with."""

from __future__ import annotations

import pytest

from skipstone.train.layerskip.dropout import BatchLayout, kept_elsewhere


def dealt(layout: BatchLayout, step: int) -> list[tuple[int, int]]:
    """(pass within the run, row of its process) of every row of a step, by dealing them out one by one."""
    return [
        (step * layout.passes + number, row)
        for number in range(layout.passes)
        for _ in range(layout.processes)
        for row in range(layout.rows)
    ]


@pytest.mark.parametrize(
    "now", [BatchLayout(2, 2, 2), BatchLayout(2, 4, 1), BatchLayout(2, 1, 4), BatchLayout(4, 1, 2), BatchLayout(1, 2, 4)]
)
def test_the_same_rows_of_a_step_keep_the_same_layers(now: BatchLayout) -> None:
    started, step = BatchLayout(2, 2, 2), 3
    drawn = {6: [[0, 1], [1], []], 7: [[0, 1], [0], [0, 1]]}  # by pass of the run that was started: rows that layers keep
    wanted = [[own in drawn[at][layer] for at, own in dealt(started, step)] for layer in range(3)]
    found: list[list[bool]] = [[], [], []]
    for number in range(now.passes):
        each = [
            kept_elsewhere(started, now, process, step, number, lambda rows, at: drawn[at] if rows == 2 else [], now.rows)
            for process in range(now.processes)
        ]
        for kept, joining in each:
            for layer in range(3):
                found[layer] += [row in kept[layer] for row in range(now.rows)]
                assert joining[layer] == any(own[layer] for own, _ in each)
    assert found == wanted


def test_passes_on_other_processes() -> None:
    assert BatchLayout(2, 1, 8).passes_of(BatchLayout(2, 1, 2)) == 4
    with pytest.raises(ValueError, match="3 processes of 2 rows cannot share 16 rows equally"):
        BatchLayout(2, 1, 8).passes_of(BatchLayout(2, 1, 3))
