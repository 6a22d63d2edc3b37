"""The simulator of replicas agrees with queueing theory where that has formulas, and a conversation that stays is read once."""

import math
from dataclasses import replace
from statistics import mean

import pytest

from recipes.measure.scaling import MAX_TURNS, Fleet, Service, Simulation, Workload, rate_for

pytestmark = pytest.mark.slow

ALIKE = Service({1: 1.0, 64: 64.0}, 1e9)
"""A token a second for every text, however many there are: rows are then servers of their own."""
ALONE = Workload(rate=1.0, turns=1.0, first=0.0, more=0.0, written=1.0, pause=0.0)
"""Conversations of one turn, no prompt, one second of writing on average: M/M/c."""
REQUESTS = 40_000


def erlang_c(servers: int, offered: float) -> float:
    """The probability that a request of M/M/c waits. offered: arrivals times the mean service time."""
    terms = [offered**n / math.factorial(n) for n in range(servers)]
    last = offered**servers / math.factorial(servers) * servers / (servers - offered)
    return last / (sum(terms) + last)


def test_rows_that_do_not_disturb_each_other_are_erlangs_servers() -> None:
    servers, offered = 6, 0.6 * 6
    load = replace(ALONE, rate=offered)
    seen = Simulation(Fleet(3, 2, True), ALIKE, load, REQUESTS, warm=100.0).run()
    waits = erlang_c(servers, offered)
    assert sum(one > 0 for one in seen.waits) / REQUESTS == pytest.approx(waits, rel=0.07)
    assert mean(seen.waits) == pytest.approx(waits / (servers - offered), rel=0.15)
    assert mean(seen.totals) == pytest.approx(1 + waits / (servers - offered), rel=0.07)
    assert seen.busy == pytest.approx(0.6, rel=0.03)


def test_speeds_between_measured_numbers_lie_on_a_line() -> None:
    service = Service({1: 100.0, 2: 180.0, 4: 300.0}, 1000.0)
    assert [service.speed(rows) for rows in (1, 2, 3, 4, 8)] == pytest.approx([1.0, 0.9, 0.8, 0.75, 0.375])


def test_the_rate_of_a_load_is_where_a_replica_without_any_reuse_is_full() -> None:
    service, work = Service({1: 100.0, 8: 400.0}, 1000.0), Workload(1.0, turns=2.0, first=100.0, more=20.0, written=30.0)
    # the second turn comes with probability 1/2, the third with 1/4: prompts of 100, 150, 200, ...
    prompts = sum(0.5**turn * (100 + 50 * turn) for turn in range(MAX_TURNS))
    turns = sum(0.5**turn for turn in range(MAX_TURNS))
    seconds = prompts / 1000 + turns * 30 / 100
    assert rate_for(0.5, 3, 8, service, work) == pytest.approx(0.5 * 3 * 4 / seconds)


def test_a_conversation_that_stays_finds_what_it_said_and_one_that_moves_does_not() -> None:
    service = Service({1: 100.0, 4: 100.0}, 500.0)
    work = Workload(rate_for(0.4, 16, 4, service, Workload(1.0, pause=2.0)), pause=2.0)
    spread, stayed = (
        Simulation(Fleet(16, 4, affine), service, work, 5000, warm=60.0, seed=1).run() for affine in (False, True)
    )
    assert spread.kept / spread.prompt < 0.2
    assert stayed.kept / stayed.prompt > 0.5
    assert mean(stayed.firsts) < 0.6 * mean(spread.firsts)
    again = Simulation(Fleet(16, 4, True), service, work, 5000, warm=60.0, seed=1).run()
    assert again.firsts == stayed.firsts, "a seed decides everything"
