"""What a failed comparison says: tie or bug, which row, which position, and both texts."""

from typing import Any

import pytest

from skipstone import Autoregressive
from tests.helpers import families
from tests.helpers.support import assert_same_texts, decode


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": 3}], ids=["greedy", "sampled"])
def test_a_text_that_differs_is_named_by_row_and_position(options: dict[str, Any]) -> None:
    model, prompts = families.cached("llama"), families.prompts(2)
    output = decode(model, prompts, Autoregressive(), max_new_tokens=8, **options)
    right = [list(text) for text in output.new_tokens or []]
    assert_same_texts(model, prompts, right, output, options)
    wrong = [list(text) for text in right]
    wrong[1][5] = (wrong[1][5] + 1) % 97
    output.new_tokens = wrong
    with pytest.raises(pytest.fail.Exception) as caught:
        assert_same_texts(model, prompts, right, output, options)
    said = str(caught.value)
    parted = f"expected token {right[1][5]}, found token {wrong[1][5]}"
    for part in ("row 1, position 5", "A BUG", parted, str(right[1]), str(wrong[1])):
        assert part in said, said
    assert "row 0" not in said
