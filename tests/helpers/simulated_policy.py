"""The policy of `auto` in a simulated world."""

from collections.abc import Sequence

from skipstone.policy.choose_drafter import LOOKUP, PLAIN, PROBE, RECYCLE, Decision, DrafterState, Policy, StepResult
from skipstone.policy.cost_model import HOST, LearnedCosts, LineTime, MeanTime, ScoringTime, typical
from tests.helpers.simulated_worlds import Machine, Simulation, Workload


def first_policy(
    machine: Machine, drafters: Sequence[str], *, recycles: bool = True, measurements: int = 3,
    drafting: float = 1.0, scoring: float = 1.0, fixed: float = 1.0, replays: float = 1.0,
) -> Policy:  # fmt: skip
    """A policy with costs that so many measurements have told. drafting, scoring, fixed, replays: factors by which they are
    wrong."""
    table = ScoringTime()
    for n in (2, 4, 8, 16, 32, 64):
        table.places[n] = scoring * machine.scoring(n), 50.0
        table.line.observe(n - 1, scoring * machine.scoring(n))
    table.line.measurements = measurements
    table.draw()
    chains = [name for name in drafters if name not in machine.schedules]
    costs = LearnedCosts(
        plain=MeanTime(1.0, 3),
        fixed=fixed * machine.fixed,
        drafting={name: LineTime(0.0, drafting * machine.drafts[name], measurements) for name in chains},
        scoring={HOST: table},
        schedules={
            name: MeanTime(drafting * machine.schedules[name][1], measurements) for name in drafters if name not in chains
        },
        replays={name: MeanTime(replays * machine.replays[name], measurements) for name in chains},
    )
    for line in costs.drafting.values():
        line.guess = line.start, line.step
    known = {name: DrafterState() for name in (*drafters, *([RECYCLE] if recycles else []))}
    return Policy(costs, known, rows=machine.rows)


def take(simulation: Simulation, policy: Policy, decision: Decision) -> StepResult:
    if decision.kind in (PLAIN, PROBE):
        return simulation.plain()
    if decision.kind == LOOKUP:
        return simulation.lookup(decision.drafts)
    if decision.kind == RECYCLE:
        assert decision.tree is not None
        return simulation.recycle(decision.tree.parents, decision.tree.ranks)
    if decision.kind in simulation.machine.schedules:
        return simulation.own_schedule(decision.kind)
    predict = policy.drafters[decision.kind].acceptance.predict
    return simulation.chain(decision.kind, decision.thresholds, decision.shared, predict)


def run(work: Workload, seed: int, everything: bool = True, policy: Policy | None = None) -> tuple[Simulation, Policy]:
    simulation = work.simulation(seed)
    simulation.looks_up = everything
    policy = policy or first_policy(work.machine, work.drafters, recycles=everything)
    while not simulation.finished:
        if simulation.begins_request():
            policy.begin_request()
        if (name := policy.next_replay({})) is not None:
            policy.observe_replay(name, *simulation.replay(name, policy.position % policy.rows))
        decision, results = policy.decide(simulation.matches()), list[StepResult]()
        while len(results) < decision.steps and not simulation.finished:
            if results and not policy.stands(decision, simulation.matches()):
                break
            results.append(take(simulation, policy, decision))
            if decision.kind not in (PLAIN, PROBE) and not results[-1].drafts:
                decision = decision._replace(kind=PLAIN)
                break
        policy.observe(decision, results if decision.kind not in (PLAIN, PROBE) else [together(results)])
    return simulation, policy


def together(results: list[StepResult]) -> StepResult:
    warm = [one.warm_seconds for one in results if one.warm_steps]
    return StepResult(
        tokens=sum(one.tokens for one in results),
        seconds=sum(one.seconds for one in results),
        steps=len(results),
        matches=[match for one in results for match in one.matches],
        ranks=[rank for one in results for rank in one.ranks],
        warm_steps=len(warm),
        warm_seconds=typical(warm),
    )
