"""When `auto` looks texts up, keeps continuations and looks at drafters, and what a plain step in which it does counts as."""

from __future__ import annotations

from dataclasses import replace

import pytest

from skipstone.control import control
from skipstone.control.ledger import Account, Ledger
from skipstone.control.state import PLAIN, RECYCLE, WARM_AFTER, Done, Plan
from skipstone.decoding.request import Request
from skipstone.methods.auto.auto import LEAST_FOR_LOOKING, Auto, AutoDrafter
from skipstone.methods.auto.mind import ASLEEP, AWAKE, MOST_ASLEEP, NEW_TEXT, NEW_TEXT_TRIED, Shift, Tally
from skipstone.methods.layerskip import LayerSkip
from skipstone.methods.prompt_lookup import PromptLookup
from skipstone.methods.recycle import Recycle
from skipstone.models.layered import LayeredModel
from tests.helpers.machine import llama, prompt, start


def looked_up_in(steps: int, requests: int, paying: int = 0) -> list[int]:
    """How many steps of every request, of so many each, look their text up. paying: of the first ones, in which that pays."""
    shift, step, found = Shift(), 0, []
    for _ in range(requests):
        shift.begin(step)
        count = 0
        for _ in range(steps):
            count += shift.goes_on(step, step < paying)
            step += 1
        found.append(count)
    return found


def test_texts_are_looked_up_in_shifts_and_new_ones_at_first() -> None:
    short = looked_up_in(64, 64)
    assert short[:4] == [64, 64, 8, 8], "128 steps, then what is new only"
    awake = [place for place, count in enumerate(short) if count == 64]
    assert awake == [0, 1, 8, 9, 22, 23, 48, 49], "for 384 steps they rest, then for 768, and so on"
    assert looked_up_in(100, 3, paying=300) == [100, 100, 100]
    (long,) = looked_up_in(3 * MOST_ASLEEP, 1)
    assert long == 5 * AWAKE, "at 0, 512, 1408, 3072 and 6272"
    shift = Shift(until=0, asleep=MOST_ASLEEP)
    assert shift.goes_on(5, pays=True)
    assert shift.asleep == ASLEEP, "what paid once is asked for again soon"


def test_a_new_text_that_repeats_what_stands_before_is_looked_up_longer() -> None:
    def looked_up(repeating: int) -> int:
        shift, count = Shift(until=0), 0
        shift.begin(0)
        for step in range(200):
            found = shift.goes_on(step, pays=False)
            count += found
            if found and step < repeating:
                shift.repeats(step + 1)
        return count

    assert looked_up(0) == NEW_TEXT_TRIED
    assert looked_up(10) == 10 + NEW_TEXT_TRIED
    assert looked_up(200) == NEW_TEXT


def looking() -> AutoDrafter:
    """In the midst of a text, beside lookups and recycled tokens."""
    decoder = start(Auto((PromptLookup(), Recycle())), LayeredModel(llama()), [Request(prompt(9), 100)])
    for _ in range(20):
        decoder.step()
    assert isinstance(decoder.session.drafter, AutoDrafter)
    decoder.session.drafter._settle()
    return decoder.session.drafter


@pytest.mark.parametrize(("room", "looks"), [(LEAST_FOR_LOOKING + 0.1, True), (LEAST_FOR_LOOKING - 0.1, False), (-1.0, False)])
def test_nothing_is_looked_up_or_kept_where_little_of_it_could_be_drafted(room: float, looks: bool) -> None:
    session = looking()
    assert session.mind.state is not None
    session.mind.state = replace(session.mind.state, ledger=Ledger(0.0, Account(4.0 - room), Account()))
    assert session.mind.state.ledger.room == pytest.approx(room)
    session._wake()
    assert (session._looks_up, session._keeps, session._reads_logits) == (looks, looks, looks)
    session.mind.state = replace(session.mind.state, current=RECYCLE)
    session._wake()
    assert (session._looks_up, session._keeps) == (looks, room >= 0), "what is drafted from is kept up to date"


@pytest.mark.parametrize(
    ("keeps", "plain_before", "behind_prompt", "by_its_parts"),
    [(False, WARM_AFTER, False, True), (False, 0, True, True), (False, 0, False, False), (True, WARM_AFTER, True, False)],
)
def test_a_plain_step_that_looks_up_takes_what_a_plain_one_does_and_the_looking(
    keeps: bool, plain_before: int, behind_prompt: bool, by_its_parts: bool
) -> None:
    """Where it finds the caches that a plain step of plain decoding finds. Keeping continuations needs logits, too, which takes
    part of the scoring: there it counts as what it took."""
    session = looking()
    assert session.mind.state is not None
    plain = session.mind.state.costs.plain.value
    session.plan, session._tally = Plan(PLAIN, 1.0, None, ""), Tally()
    session._looks_up, session._keeps = True, keeps
    session._plain_in_a_row, session._ran_prompt, session._host_seconds = plain_before, behind_prompt, plain / 10
    session._plainly(1.0, 9 * plain, 0.0)
    steps, seconds = session._tally.busy
    assert steps == 1
    assert seconds == pytest.approx(1.1 * plain if by_its_parts else 9 * plain)


@pytest.mark.parametrize(("price", "goes_on"), [(1.0, True), (2.0, False)])
def test_a_look_pays_for_what_the_drafter_that_decodes_now_would_have_won(price: float, goes_on: bool) -> None:
    """Two steps have taken three plain steps for four tokens: one was won against plain decoding, and one lost against what
    is twice as fast, where half of one was saved."""
    decoder = start(Auto((LayerSkip(1),)), LayeredModel(llama()), [Request(prompt(9), 100)])
    for _ in range(20):
        decoder.step()
    session = decoder.session.drafter
    assert isinstance(session, AutoDrafter)
    assert session.mind.state is not None
    rich = Ledger(0.0, Account(-50.0), Account(-50.0))
    session.mind.state = state = replace(session.mind.state, ledger=rich, shadow_account=0.5)
    look = Plan("layerskip, exit 1", price, None, "", thresholds=control.TRIED_ON, trial=True, steps=8)
    step = Done(2.0, 1.5 * state.costs.plain.value, verified=2, passes=2)
    session.plan, session._left, session._tally = look, 6, Tally()
    for _ in range(2):
        session._tally.add(step, trial=True)
    assert session._further(state, step) == (look if goes_on else None)
