"""What SWIFT learns, and what it tries when: a state under a simulated decoder, and timings by a clock that the test holds."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from skipstone import Swift
from skipstone.decoding.batch import Request
from skipstone.decoding.draft import RowVerdict
from skipstone.decoding.loop import Decoder
from skipstone.methods.shared import payoff
from skipstone.methods.shared.layer_sets import Costs, LayerMask, Space
from skipstone.methods.swift import optimisation as optimising
from skipstone.methods.swift import state as swift_state
from skipstone.methods.swift import timings as pass_timings
from skipstone.methods.swift.state import SwiftState
from skipstone.methods.swift.swift import SwiftSession
from skipstone.methods.swift.timings import Timings
from skipstone.models.layered import LayeredModel
from tests.helpers import families
from tests.helpers.machine import llama, running
from tests.helpers.pairwise import all_but


class World:
    """Decoding with a state, simulated: matchness of a set -> drafts right with that probability, stopped at the first that is
    wrong or at `most`."""

    def __init__(self, state: SwiftState, matchness: Callable[[LayerMask], float], most: int = 6, seed: int = 0) -> None:
        self.state, self.matchness, self.most, self.rng = state, matchness, most, np.random.default_rng(seed)
        self.tokens = self.cost = 0.0

    def step(self) -> None:
        state = self.state
        before = sum(state.spent.values())
        if (z := state.candidate()) is not None:
            state.evaluated(z, float(self.rng.binomial(32, self.matchness(z))) / 32, 32)
        drafted = state.most_drafts(self.most)
        right = self.rng.random(drafted) < self.matchness(state.optimisation.skipped)
        accepted = int(right.cumprod().sum()) if drafted else 0
        verdict = RowVerdict(list(range(accepted)), [0] * (accepted + 1), "bonus", drafted, 0, drafted, drafted)
        seconds = drafted * state.costs.draft(state.optimisation.skipped) + state.costs.score(drafted + 1)
        state.record(SimpleNamespace(width=drafted, levels=None), [verdict], seconds)  # type: ignore[arg-type]
        self.tokens += accepted + 1
        self.cost += sum(state.spent.values()) - before


def state_of(**settings: Any) -> SwiftState:
    """A state of a model of 24 layers whose passes were timed: a sublayer costs a fiftieth, scoring 4 % a token."""
    layered: Any = SimpleNamespace(depth=24, layers=LayeredModel(families.cached("llama")).layers)
    layered.family, layered.head = LayeredModel(families.cached("llama")).family, torch.nn.Linear(1, 1)
    state = SwiftState(Swift(**settings), layered)
    state.timings = None
    state.set_costs(Costs(0.02, 0.02, tuple(1 + 0.04 * extra for extra in range(90))))
    return state


def test_where_a_set_pays_it_is_found_and_drafted_with() -> None:
    """Only the MLPs matter; a set of attentions alone agrees at .97."""

    def matchness(z: LayerMask) -> float:
        return max(0.97 - 0.04 * int(z[22:].sum()), 0.02)

    state = state_of()
    world = World(state, matchness, most=3)
    for _ in range(1500):
        world.step()
    assert matchness(state.optimisation.skipped) > 0.9
    assert world.tokens / world.cost > 1.05
    late = World(state, matchness, most=3, seed=1)
    before = state.drafted_steps, state.steps
    for _ in range(300):
        late.step()
    assert late.tokens / late.cost > 1.1
    assert state.drafted_steps - before[0] > 0.9 * (state.steps - before[1])


@pytest.mark.parametrize("matchness", all_but((0.2,), (0.0, 0.2, 0.4)))
def test_where_nothing_pays_hardly_anything_is_lost(matchness: float) -> None:
    state = state_of(max_steps=200, adjust=False)
    world = World(state, lambda z: matchness)
    longest = 6 * state.costs.draft(state.optimisation.skipped) + state.costs.score(
        7
    )  # a step in vain that began with some slack
    while state.optimisation.searching:
        world.step()
        assert world.cost <= (1 + swift_state.SEARCH_LOSS) * world.tokens + payoff.FIRST_SLACK + longest
    assert state.optimisation.evaluations == 200
    assert world.tokens / world.cost > 0.9
    after = World(state, lambda z: matchness, seed=1)
    for _ in range(3000):
        after.step()
    assert after.tokens / after.cost > 0.95
    said = state.remark()
    assert said is not None
    assert "the best of 200 evaluations leaves out 20 of 44 sublayers" in said


def test_a_changed_task_starts_the_search_again() -> None:
    good = [0.97]
    state = state_of(max_steps=150, adjust=False)
    world = World(state, lambda z: good[0])
    while state.optimisation.searching:
        world.step()
    done = state.optimisation.evaluations
    for _ in range(1000):
        world.step()
    assert state.optimisation.evaluations == done, "nothing is searched for while the task stays"
    good[0] = 0.75
    for _ in range(300):
        world.step()
    assert state.optimisation.evaluations > done


def test_the_skip_ratio_goes_down_where_few_drafts_are_accepted() -> None:
    """A search that knows of the sets it has seen only: alpha lowers the ratio (METHODS, section 2)."""

    def matchness(z: LayerMask) -> float:
        return 0.9 if z.sum() <= 14 else 0.75

    state = state_of(search="random", max_steps=100, patience=50)
    world = World(state, matchness, most=3)
    for _ in range(15_000):
        world.step()
    assert state.search.count < 0.4 * state.space.size
    assert state.optimisation.skipped.sum() == state.search.count
    kept = state_of(search="random", max_steps=100, patience=50, adjust=False)
    world = World(kept, matchness, most=3)
    for _ in range(4000):
        world.step()
    assert kept.search.count == 20


def test_the_skip_ratio_goes_down_where_the_search_expects_more_of_fewer_and_then_stays() -> None:
    """Every sublayer takes .005 of matchness, from the 13th on .05. What is settled stays so: no search begins again."""
    state = state_of(max_steps=150)
    world = World(state, lambda z: max(0.98 - 0.005 * min(z.sum(), 12) - 0.05 * max(z.sum() - 12, 0), 0.02))
    while state.optimisation.searching:
        world.step()
    assert 8 <= state.search.count <= 14
    done = state.optimisation.evaluations
    for _ in range(6000):
        world.step()
    assert state.optimisation.evaluations == done
    assert not state.optimisation.searching


def test_a_judging_pass_costs_what_it_took_by_the_clock() -> None:
    """Twice what was thought here, in plain steps of a second: paid, counted for the share of the search, and believed next."""
    state = state_of()
    state.evaluation_took(9.0)
    assert state.evaluation_ratio == 1.0, "nothing to compare with yet"
    world = World(state, lambda z: 0.5)
    while not state._charged:
        world.step()
    thought, slack, spent = (
        state.draft_cost * state.costs.score(state.evaluation_width),
        state.payoff.slack,
        state.spent["search"],
    )
    assert state._charged == pytest.approx(thought)
    before = state._search_cost()
    state.evaluation_took(2 * thought)
    assert state.spent["search"] - spent == pytest.approx(thought)
    assert slack - state.payoff.slack == pytest.approx(thought)
    assert state._search_cost() - before == pytest.approx(thought)
    state.payoff.slack, state.tokens, state._evaluated_last = 60.0, 1e6, False
    spent = state.spent["search"]
    assert state.candidate() is not None
    assert state.spent["search"] - spent == pytest.approx(2 * thought)
    state.evaluation_took(1000 * thought)
    assert state.evaluation_ratio == pytest.approx(2 * payoff.SPIKE), "a stall is something else's doing"


def test_passes_are_timed_up_to_the_width_that_will_be_needed() -> None:
    for settings, widest in (({}, 32), ({"context_window": 12}, 32), ({"num_speculative_tokens": 3, "context_window": 7}, 8)):
        timings = state_timings(Swift(**settings))
        assert max(tokens for tokens, _ in timings.left) == widest
    assert max(tokens for tokens, _ in state_timings(Swift(guard=False)).left) == 82
    assert [tokens for tokens, _ in Timings(Space(6), 1).left if tokens > 1] == [2, 2, 2]


def test_how_many_runners_up_and_how_likely() -> None:
    """A row costs .04 here: two cost less than a tenth of a plain step. The paper's are bounded by what a tree may hold."""
    most, least = state_of().leaves(3)
    assert (most, least) == (2, pytest.approx(0.04))
    assert state_of(guard=False).leaves(3) == (27, 0.0)
    assert state_of(dynamic_verification=False).leaves(3) == (0, 0.0)
    flat = state_of()
    flat.set_costs(Costs(0.02, 0.02, tuple(1 + 0.0005 * extra for extra in range(32))))
    assert flat.leaves(25)[0] == 32 - 26, "what a wider pass costs was not timed"


def test_every_judging_pass_of_a_session_is_clocked(monkeypatch: Any) -> None:
    asked = []
    monkeypatch.setattr(SwiftState, "evaluation_took", lambda self, seconds: asked.append(seconds))
    model = LayeredModel(llama(layers=6))
    method = Swift(0.5, 4, context_window=6, guard=False, objective="matchness", search="random")
    state = SwiftState(method, model)
    decoder = Decoder(SwiftSession(method, model, 1, 60, state))
    decoder.admit(0, Request(torch.arange(1, 10), 40))
    while decoder.busy:
        decoder.step()
    assert len(asked) == state.optimisation.evaluations > 5
    assert min(asked) > 0


def state_timings(method: Swift) -> Timings:
    state = SwiftState(method, LayeredModel(families.cached("llama")))
    assert state.timings is not None
    return state.timings


def test_a_search_for_matchness_alone_moves_no_ratio() -> None:
    """It is always better with fewer."""
    state = state_of(objective="matchness", max_steps=150)
    world = World(state, lambda z: 0.98 - 0.01 * int(z.sum()))
    for _ in range(2400):
        world.step()
    assert state.optimisation.evaluations > 40
    assert state.search.count == 20


@pytest.mark.parametrize(
    ("search", "least", "most"), all_but([("linear_ts", 0.65, 0.8)], [("linear_ts", 0.65, 0.8), ("random", 0.45, 0.45)])
)
def test_the_skip_ratio_goes_up_where_more_may_be_left_out(search: str, least: float, most: float) -> None:
    """Nothing is lost by leaving out sublayers: as many as allowed, as far as the search says so."""
    state = state_of(search=search, enough=1.0)
    world = World(state, lambda z: 0.96, most=6)
    for _ in range(2500):
        world.step()
    assert round(least * state.space.size) <= state.search.count <= round(most * state.space.size)
    fixed = state_of(search=search, adjust=False)
    world = World(fixed, lambda z: 0.96, most=6)
    for _ in range(500):
        world.step()
    assert fixed.search.count == 20


@pytest.mark.parametrize(
    ("plain", "slow", "timed"),
    [
        (0.001, {}, 1 + 3 * 11),  # short: three times each
        (0.1, {}, 2 + 10),  # long: once, the plain pass twice
        (0.001, {0: 90.0}, 1 + 3 * 11),  # a stall at first is none
        (0.001, {5: 9.0}, 1 + 3 * 11),  # a cold pass at first strikes nothing out
        (0.001, {5: 9.0, 16: 9.0}, 1 + 3 * 11 - 2 * 6),  # a dear one does: the six wider ones are timed once only
    ],
)
def test_what_is_timed_and_how_often(monkeypatch: Any, plain: float, slow: dict[int, float], timed: int) -> None:
    """By a clock that says what a pass took: `plain` seconds, or `slow` times as many for the pass of that number. Passes are
    plain, plain again, three that leave out something, then 2, 4, 8, 16, 32, 48 and 82 rows."""
    decoder, _ = running(llama(layers=6), Swift(0.5, 4), length=9, new=110, steps=1)
    timings, session, passes = Timings(Space(6)), decoder.session, [0]

    def since(began: float) -> float:
        passes[0] += 1
        return plain * slow.get(passes[0] - 1, 1.0)

    monkeypatch.setattr(session.model.ranks, "since", since)
    while timings.costs() is None:
        with torch.inference_mode():
            timings.time_next(session)
    assert passes[0] == timed
    assert timings.seconds[pass_timings.PLAIN] == pytest.approx(plain)


def test_runners_up_are_not_right_drafts() -> None:
    """A chain of three, the first right, then a runner-up (node 5) in the place of the second."""
    state = state_of(max_steps=0)
    state.optimisation.adaptive, told = True, []
    state._look_for_change = lambda *given: told.append(given)  # type: ignore[method-assign]
    verdict = RowVerdict([0, 5], [7, 8, 9], "recovered", 3, 0, 6, 3)
    state.record(SimpleNamespace(width=6, levels=3), [verdict], None)  # type: ignore[arg-type]
    assert told == [(1, 3, 1)]


@pytest.mark.parametrize("search", ["random", "linear_ts"])
def test_a_new_search_begins_with_the_set_in_use_and_needs_evaluations_of_its_own(search: str) -> None:
    state = state_of(search=search, adjust=False, enough=0.5)
    rng = np.random.default_rng(0)
    good = state.space.random(20, rng)
    for _ in range(optimising.LEAST_EVALUATIONS + 4):
        state.evaluated(good, 1.0, 32)
    assert not state.optimisation.searching
    assert (state.optimisation.skipped == good).all()
    state.search.doubt()
    state._search_again(100)
    assert (state.optimisation.skipped == good).all()
    state.evaluated(state.space.uniform(20), 0.9, 32)
    assert (state.optimisation.skipped == good).all()
    for _ in range(optimising.LEAST_EVALUATIONS - 2):
        state.evaluated(good, 1.0, 32)
        assert state.optimisation.searching
    state.evaluated(good, 1.0, 32)
    assert not state.optimisation.searching


@pytest.mark.parametrize("search", ["swift", "random"])
def test_the_papers_search_ends_for_good_and_still_lowers_its_ratio(search: str) -> None:
    state = state_of(search=search, bayes_interval=7, max_steps=4)
    assert state.search.interval == 7
    while state.optimisation.searching:
        state.evaluated(state.search.propose(), 0.5, 32)
    lowered: list[Any] = []
    state._lower_skip_ratio = lambda *given: lowered.append(given)  # type: ignore[method-assign]
    state.text_change = SimpleNamespace(add=lambda *_: True)  # type: ignore[assignment]
    state._look_for_change(1, 2, 1)
    assert state.optimisation.searching == (search == "random")
    assert bool(lowered) == (search == "swift")


def test_where_hardly_any_step_drafts_it_is_said_also_while_searching() -> None:
    state = state_of()
    world = World(state, lambda z: 0.0)
    while (said := state.remark()) is None:
        assert state.steps < 200
        world.step()
    assert state.optimisation.searching
    assert "found no layer set that pays here so far and decodes plainly" in said


def test_a_set_that_works_is_not_left_for_one_that_was_never_tried() -> None:
    """MLPs cost three times as much as attentions: after one evaluation of the uniform set the model thinks MLPs as good."""
    state = state_of(skip_ratio=0.5, adjust=False)
    state.set_costs(Costs(0.01, 0.03, tuple(1 + 0.04 * extra for extra in range(90))))
    first = state.optimisation.skipped.copy()
    state.payoff.record(4, 2, drafted=True)
    state.evaluated(first, 0.97, 32)
    assert (state.search.best() != first).any()
    assert (state.optimisation.skipped == first).all()
    for _ in range(8):
        state.evaluated(state.search.best(), 0.97, 32)
    assert (state.optimisation.skipped != first).any()
