"""What is made once per model and key."""

from __future__ import annotations

from skipstone.models.memo import Memo


class Model:
    """Something that can be referred to weakly."""


def test_a_value_is_made_once_per_model_and_key_and_again_where_it_holds_no_longer() -> None:
    memo, one, other = Memo[list[int]](), Model(), Model()
    first = memo.get(one, "a", lambda: [1])
    assert memo.get(one, "a", lambda: [2]) is first
    assert memo.get(other, "a", lambda: [3]) == [3]
    assert memo.get(one, "a", lambda: [4], holds=lambda value: value == [2]) == [4]
    assert memo.known(one) == {"a": [4]}


def test_of_more_values_than_may_be_kept_the_one_asked_for_longest_ago_goes() -> None:
    memo, model = Memo[int](most=2), Model()
    for key in (1, 2, 1, 3):
        memo.get(model, key, lambda key=key: 10 * key)
    assert memo.known(model) == {1: 10, 3: 30}
