"""What AdaDecode counts of its exits while it decodes."""

from __future__ import annotations

import skipstone
from skipstone import AdaDecode
from skipstone.decoding.draft import RowVerdict
from skipstone.methods.adadecode.exit_counts import AdaDecodeCounts
from tests.helpers.machine import llama, prompt


def verdict(accepted: int, drafted: int, finished: bool = False) -> RowVerdict:
    final = "bonus" if accepted == drafted else "recovered"
    found = RowVerdict(list(range(accepted)), [0] * (accepted + 1), final, drafted, 0, drafted, drafted)
    found.finished = finished
    return found


def test_a_prediction_behind_a_rejected_one_is_neither_right_nor_wrong() -> None:
    tallies = AdaDecodeCounts([2, 4])
    tallies.record([[2, 4, 2, 4]], [verdict(1, 4)], [(0, 2, 1), (0, 8, 5)])
    tallies.record([[4], []], [verdict(0, 1, finished=True), verdict(0, 0)], [(0, 8, 2)])
    found = tallies.report()
    assert (found["exits"]["2"]["accepted"], found["exits"]["2"]["rejected"]) == (1, 0)
    assert (found["exits"]["4"]["accepted"], found["exits"]["4"]["rejected"]) == (0, 1), "where a text ends nothing is rejected"
    assert found["passes"] == {"0, 2, 1": 1, "0, 8, 2": 1, "0, 8, 5": 1}
    assert (found["steps"], found["drafted_steps"]) == (2, 2)
    tallies.tested(2, [True, False])
    tallies.tested(2, [True], stopped=False)
    found = tallies.report()
    assert (found["exits"]["2"]["tests"], found["exits"]["2"]["predicted"]) == (3, 2)
    assert (found["tests"], found["stops"]) == (2, 1)


def test_counts_go_on_from_request_to_request_and_decide_nothing() -> None:
    model, method = llama(layers=6), AdaDecode("original", 0.3, exit_layers=(2, 4))
    wish = {"max_new_tokens": 40, "do_sample": True, "seed": 5}
    first = skipstone.generate(model, prompt(9), method, **wish)
    once = method.report(model)
    again = skipstone.generate(model, prompt(9), method, **wish)
    assert again.new_tokens == first.new_tokens
    assert first.stats is not None
    assert first.stats.drafted > 0
    assert method.report(model)["steps"] == 2 * once["steps"]
    assert method.report(model)["exits"]["2"]["tests"] == 2 * once["exits"]["2"]["tests"]
