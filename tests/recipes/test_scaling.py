"""The simulator of replicas agrees with queueing theory where that has formulas, and a conversation that stays is read once."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import mean

import pytest

from recipes.measure.scaling import MOST_TURNS, Fleet, Service, Simulation, Workload, rate_for
from tests.helpers.pairwise import slow_except

ALIKE = Service({1: 1.0, 64: 64.0}, 1e9)
"""A token a second for every text, however many there are: rows are then servers of their own."""
SHARED = Service({1: 1.0, 64: 1.0}, 1e9)
"""A token a second for all texts together: rows share one server."""
ALONE = Workload(rate=1.0, turns=1.0, first=0.0, more=0.0, written=1.0, pause=0.0)
"""Conversations of one turn, no prompt, one second of writing on average: M/M/c."""
REQUESTS = 40_000


def erlang_c(servers: int, offered: float) -> float:
    """The probability that a request of M/M/c waits. offered: arrivals times the mean service time."""
    terms = [offered**n / math.factorial(n) for n in range(servers)]
    last = offered**servers / math.factorial(servers) * servers / (servers - offered)
    return last / (sum(terms) + last)


@pytest.mark.parametrize(
    ("replicas", "rows", "affine"), slow_except([(3, 2, True)], [(4, 1, False), (1, 4, False), (3, 2, True)])
)
def test_rows_that_do_not_disturb_each_other_are_erlangs_servers(replicas: int, rows: int, affine: bool) -> None:
    servers = replicas * rows
    offered = 0.6 * servers
    load = replace(ALONE, rate=offered)
    seen = Simulation(Fleet(replicas, rows, affine), ALIKE, load, REQUESTS, warm=100.0).run()
    waits = erlang_c(servers, offered)
    assert sum(one > 0 for one in seen.waits) / REQUESTS == pytest.approx(waits, rel=0.07)
    assert mean(seen.waits) == pytest.approx(waits / (servers - offered), rel=0.15)
    assert mean(seen.totals) == pytest.approx(1 + waits / (servers - offered), rel=0.07)
    assert seen.busy == pytest.approx(0.6, rel=0.03)


@pytest.mark.slow
def test_rows_that_share_a_processor_are_theorys_processor_sharing() -> None:
    seen = Simulation(Fleet(1, rows=64), SHARED, replace(ALONE, rate=0.6), REQUESTS, warm=100.0).run()
    assert sum(one > 0 for one in seen.waits) == 0, "with 64 rows, more than 64 texts at a time are as good as impossible"
    assert mean(seen.totals) == pytest.approx(1 / (1 - 0.6), rel=0.1)


def test_speeds_between_measured_numbers_lie_on_a_line() -> None:
    service = Service({1: 100.0, 2: 180.0, 4: 300.0}, 1000.0)
    assert [service.speed(rows) for rows in (1, 2, 3, 4)] == pytest.approx([1.0, 0.9, 0.8, 0.75])
    assert service.speed(8) == pytest.approx(0.375), "more rows than were measured give no more together"
    assert service.writing == 100.0


def test_the_rate_of_a_load_is_where_a_replica_without_any_reuse_is_full() -> None:
    service, work = Service({1: 100.0, 8: 400.0}, 1000.0), Workload(1.0, turns=2.0, first=100.0, more=20.0, written=30.0)
    # the second turn comes with probability 1/2, the third with 1/4: prompts of 100, 150, 200, ...
    prompts = sum(0.5**turn * (100 + 50 * turn) for turn in range(MOST_TURNS))
    turns = sum(0.5**turn for turn in range(MOST_TURNS))
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


def test_a_replica_that_is_alone_keeps_only_as_many_conversations_as_it_has_rows() -> None:
    service, shares = Service({1: 100.0, 8: 400.0}, 5000.0), []
    for rows in (1, 2, 8):
        work = Workload(0.2, turns=5.0, pause=5.0, written=10.0)
        seen = Simulation(Fleet(1, rows), service, work, 3000, warm=100.0, seed=2).run()
        shares.append(seen.kept / seen.prompt)
    assert shares == sorted(shares)
    assert shares[0] < 0.3
    assert shares[2] > 0.5
