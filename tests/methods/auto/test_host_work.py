"""When `auto` looks texts up and keeps continuations, and what a plain step in which it does counts as."""

from __future__ import annotations

import pytest

from skipstone.decoding.request import Request
from skipstone.engines.model_runner import ModelRunner
from skipstone.methods.auto.auto import Auto, AutoDrafter
from skipstone.methods.auto.learned import HostWork, median_interval
from skipstone.methods.prompt_lookup import PromptLookup
from skipstone.methods.recycle import Recycle
from skipstone.policy.choose_drafter import PLAIN_AT_ONCE, WINDOW
from tests.helpers.machine import llama, prompt, start


def looked_up_in(steps: int, requests: int, paying: int = 0) -> list[int]:
    """How many steps of every request, of so many each, look their text up. paying: of the first ones, in which that pays."""
    work, step, found = HostWork(), 0, []
    for _ in range(requests):
        work.begin_text(step)
        count = 0
        for _ in range(steps):
            count += work.is_wanted(step, step < paying)
            step += 1
        found.append(count)
    return found


def test_texts_are_looked_up_now_and_then_and_new_ones_at_first() -> None:
    short = looked_up_in(64, 64)
    assert short[:4] == [64, 64, WINDOW, WINDOW], "128 steps, then new texts only"
    assert [place for place, count in enumerate(short) if count == 64] == [0, 1, 6, 7, 16, 17, 34, 35]
    assert looked_up_in(100, 3, paying=300) == [100, 100, 100]
    work = HostWork(until=0, rest=16 * PLAIN_AT_ONCE)
    assert work.is_wanted(5, pays=True)
    assert work.rest == HostWork().rest, "what paid once is asked for again soon"


def looking() -> AutoDrafter:
    """In the midst of a text, with lookups and recycled tokens."""
    decoder = start(Auto((PromptLookup(), Recycle())), ModelRunner(llama()), [Request(prompt(9), 100)])
    for _ in range(20):
        decoder.step()
    assert isinstance(decoder.session.drafter, AutoDrafter)
    decoder.session.drafter._settle()
    return decoder.session.drafter


def test_of_plain_steps_only_those_that_are_warm_tell() -> None:
    drafter = looking()
    drafter._looks_up, drafter._keeps, drafter._ran_prompt = False, False, False
    drafter._plain_in_a_row = 0
    for seconds in (1.3, 1.1, 9.0, 1.0, 1.2):
        drafter._add_plain(1.0, seconds)
    (result,) = drafter._results
    assert (result.tokens, result.steps) == (5.0, 5)
    assert result.seconds == pytest.approx(13.6, abs=2.4), "the first two count as one and a half plain steps at most"
    drafter._settle()
    assert list(drafter.learned.plain_seconds)[-3:] == [9.0, 1.0, 1.2]
    assert (result.warm_steps, result.warm_seconds) == (3, pytest.approx((1.0 + 1.2 + 2 * 1.2) / 3)), (
        "a stall counts twice the median"
    )


def test_the_median_of_what_values_are_drawn_from_lies_in_the_interval() -> None:
    """For 64 values the chance that fewer than 24 lie below the median, or above it, is .033 (binomial distribution)."""
    assert median_interval([float(one) for one in range(64)]) == (24.0, 39.0)
    assert median_interval([2.0, 1.0]) == (1.0, 2.0)
    assert median_interval([3.0]) == (3.0, 3.0)
