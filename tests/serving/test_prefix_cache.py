"""Which row a new prompt takes, and which row has its prefix, by hand."""

from skipstone.serving.prefix_cache import MIN_REUSED_TOKENS, PrefixCache

SYSTEM = [*range(100, 150)]
"""The first 50 tokens of several conversations."""


def conversation(number: int, length: int = 60) -> list[int]:
    return [*SYSTEM, *range(1000 * number, 1000 * number + length)]


def filled(*texts: list[int]) -> PrefixCache:
    """The text of row 0 is the oldest."""
    cache = PrefixCache(len(texts), is_enabled=True)
    for row, tokens in enumerate(texts):
        cache.store(row, tokens)
    return cache


def test_a_conversation_goes_on_in_its_own_row() -> None:
    cache = filled(*map(conversation, range(1, 5)))
    assert cache.choose_row([*conversation(3), 7, 8], range(4)) == (2, 2, 110)


def test_a_prompt_that_comes_again_takes_the_row_of_its_last_answer() -> None:
    prompt = conversation(3)
    cache = filled(conversation(1), [*prompt, *range(40)], conversation(4))
    assert cache.choose_row(prompt, range(3)) == (1, 1, 109), "the last token of a prompt runs"


def test_a_new_conversation_takes_the_least_recently_used_row_and_no_other_is_lost() -> None:
    cache = filled([1] * 80, *map(conversation, range(1, 4)))
    assert cache.choose_row(conversation(9), range(4)) == (0, 1, 50), "its first tokens are copied"
    cache = filled(*(conversation(number, 20) for number in range(1, 5)))
    cache.store(0, conversation(1, 20))
    assert cache.choose_row(conversation(9), range(4)) == (1, 1, 50), "all have the same prefix, row 1 is the oldest"


def test_a_free_row_is_taken_with_its_prefix_if_a_busy_one_has_little_more() -> None:
    cache = filled([1] * 80, conversation(1), conversation(2))
    prompt = [*conversation(1)[:-1], 7, 8]
    cache.store(2, [*conversation(1)[:-1], 7, 9])
    assert cache.choose_row(prompt, [0, 1]) == (1, 1, 109)
    cache.store(1, conversation(1)[: 110 - MIN_REUSED_TOKENS])
    assert cache.choose_row(prompt, [0, 1]) == (0, 2, 110)


def test_without_a_prefix_that_is_worth_it_the_oldest_row_is_taken() -> None:
    cache = filled(conversation(1), conversation(2), conversation(3))
    cache.store(0, conversation(1))
    short = SYSTEM[: MIN_REUSED_TOKENS - 1]
    assert cache.choose_row([*short, 7, 8, 9], range(3)) == (1, 1, 0)
    assert cache.choose_row([*short, SYSTEM[MIN_REUSED_TOKENS - 1], 8], [0, 2]) == (2, 1, MIN_REUSED_TOKENS)
    recurrent = PrefixCache(2, is_enabled=False)
    recurrent.store(0, conversation(1))
    assert recurrent.choose_row(conversation(1), range(2)) == (1, 1, 0)
