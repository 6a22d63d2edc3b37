"""What is made once per model and key."""

from skipstone.models.per_model_cache import PerModelCache


class Model:
    """Something that can be referred to weakly."""


def test_a_value_is_made_once_per_model_and_key_and_again_where_it_holds_no_longer() -> None:
    memo, one, other = PerModelCache[list[int]](), Model(), Model()
    first = memo.get(one, "a", lambda: [1])
    assert memo.get(one, "a", lambda: [2]) is first
    assert memo.get(other, "a", lambda: [3]) == [3]
    assert memo.get(one, "a", lambda: [4], holds=lambda value: value == [2]) == [4]
    assert memo.known(one) == {"a": [4]}
    few = PerModelCache[int](max_values=2)
    for key in (1, 2, 1, 3):
        few.get(one, key, lambda key=key: 10 * key)
    assert few.known(one) == {1: 10, 3: 30}, "the value that was used longest ago goes"


def test_of_values_that_take_more_bytes_than_allowed_the_oldest_go_and_the_last_one_stays() -> None:
    memo, model = PerModelCache[bytearray](max_bytes=100, nbytes=len), Model()
    for key, size in (("a", 40), ("b", 40), ("c", 40)):
        memo.get(model, key, lambda size=size: bytearray(size))
    assert list(memo.known(model)) == ["b", "c"]
    memo.known(model)["c"].extend(bytes(200))  # it grows while it is in use
    memo.get(model, "c", bytearray)
    assert list(memo.known(model)) == ["c"]
    memo.get(model, "d", bytearray)
    assert list(memo.known(model)) == ["d"]
