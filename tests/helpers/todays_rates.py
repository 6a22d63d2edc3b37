"""Rates of the policy in `skipstone.control`, which the policy in `skipstone.policy` replaces, over all simulated workloads.

Runs only at a commit that still has `control/`. From the project's root:

    python -m tests.helpers.todays_rates

It writes tests/policy/todays_rates.json: (group, workload, mode) -> the rates (tokens a plain step) and the worst requests of
two seeds. Groups: `workloads`, on which a policy may be tuned, and `held_out`, on which none is. Modes: everything, and chains
only (no lookups, no recycled tokens).
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median_low

from skipstone.control import control, learning
from skipstone.control.costs import Cost, Costs, Line, Scoring, typical
from skipstone.control.state import LOOKUP, PLAIN, PROBE, RECYCLE, Done, Drafter, Judged, Plan, Ranks, State
from tests.helpers.simulated_worlds import LOOKUP as LOOKUP_TIME
from tests.helpers.simulated_worlds import Machine, Outcome, Simulation, Workload, held_out, workloads

TOKENS, SEEDS = 6000, (0, 1)
FILE = Path("tests/policy/todays_rates.json")


def first_state(machine: Machine, drafters: tuple[str, ...], *, recycling: bool = True) -> State:
    """What the policy knows at first: costs that were measured on this machine."""
    whole = [name for name in drafters if name in machine.schedules]
    chains = [name for name in drafters if name not in machine.schedules]
    costs = Costs(
        plain=Cost(1.0, 3),
        scoring=Scoring.of({n: machine.scoring(n) for n in (2, 4, 8, 16, 32, 64)}),
        fixed=machine.fixed,
        drafts={name: Line(machine.drafts[name], 0.0, control.FEW + 1) for name in chains},
        wholes={name: Cost(machine.schedules[name][1], 1) for name in whole},
        shadows={name: Cost(machine.replays[name], 1) for name in chains},
        lookup=LOOKUP_TIME,
    )
    known = {name: Drafter(own_rule=name in machine.schedules) for name in drafters}
    return State(costs, known, ranks=Ranks() if recycling else None, rows=machine.rows)


def take(simulation: Simulation, state: State, plan: Plan, matches: list[int], lookups: bool) -> tuple[Plan, Done]:
    """Carry a plan out."""
    if plan.kind in (PLAIN, PROBE):
        steps = [simulation.plain(lookups) for _ in range(plan.steps if plan.kind == PROBE else 1)]
        return plan, plain_done(steps)
    if plan.kind == LOOKUP:
        told = iter(plan.drafts)
        out = simulation.lookup([next(told) for _ in matches])
    elif plan.kind == RECYCLE:
        assert plan.tree is not None
        out = simulation.recycle(plan.tree.parents, plan.tree.ranks)
    elif state.drafters[plan.kind].own_rule:
        out = simulation.own_schedule(plan.kind)
        return plan, Done(out.tokens, out.seconds, verified=round(out.drafts), matches=judged(out), ranks=out.ranks)
    else:
        out = simulation.chain(plan.kind, plan.thresholds, plan.beside, state.drafters[plan.kind].calibration.predict)
        if not out.drafts:
            return replace(plan, kind=PLAIN), plain_done([out])
    done = Done(
        tokens=out.tokens,
        seconds=out.seconds,
        confidences=out.confidences,
        verified=round(out.drafts),
        passes=out.passes,
        drafting=out.drafting if out.passes else None,
        scoring=out.scoring,
        matches=judged(out) if lookups else [],
        ranks=out.ranks,
        preparing=out.preparing,
    )
    return plan, done


def judged(out: Outcome) -> list[Judged]:
    return [Judged(match, min(right, told), told) for match, right, told in out.matches]


def plain_done(steps: list[Outcome]) -> Done:
    warm = [one.seconds for one in steps if one.warm]
    return Done(
        tokens=sum(one.tokens for one in steps),
        seconds=sum(one.seconds for one in steps),
        matches=[match for one in steps for match in judged(one)],
        ranks=[rank for one in steps for rank in one.ranks],
        steps=len(steps),
        warm=(len(warm), typical(warm)),
        warm_median=median_low(warm) if warm else None,
    )


def run(work: Workload, seed: int, everything: bool) -> Simulation:
    """One text, or one batch of texts."""
    simulation, state = work.simulation(seed), first_state(work.machine, work.drafters, recycling=everything)
    while not simulation.finished:
        if simulation.begins_request():
            state = learning.begin(state)
        aside, row = 0.0, state.position % work.machine.rows
        if (name := control.due(state)) is not None:
            sure, right, aside = simulation.replay(name, row)
            state = learning.shadow(state, name, sure, right, aside)
        matches = simulation.matches() if everything else []
        plan, done = take(simulation, state, control.decide(state, matches), matches, everything)
        state = learning.observe(state, plan, replace(done, aside_seconds=aside))
    return simulation


def main() -> None:
    found = json.loads(FILE.read_text()) if FILE.exists() else {}
    for group, works in (("workloads", workloads(TOKENS)), ("held_out", held_out(TOKENS))):
        for name, work in works.items():
            for mode in ("everything", "chains only"):
                key = f"{group}: {name}: {mode}"
                if key in found or (sys.argv[1:] and name not in sys.argv[1:]):
                    continue
                runs = [run(work, seed, mode == "everything") for seed in SEEDS]
                rates, worst = [round(one.rate(), 4) for one in runs], [round(one.worst_request(), 4) for one in runs]
                found[key] = {"rates": rates, "worst": worst}
                print(key, rates, worst, flush=True)
                FILE.parent.mkdir(exist_ok=True)
                FILE.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
