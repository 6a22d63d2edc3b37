"""What there is to say of SWIFT's state: for reports, and for a user whom it does not serve."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skipstone.methods.swift.state import SkipState

TOLD = 96
"""Steps before anything is said of whether drafting pays."""


def report(state: SkipState) -> dict[str, Any]:
    """Plain JSON values. Costs are in plain steps, spent too."""
    return {
        "matchness": state.matchness,
        "skip_ratio": round(int(state.z.sum()) / state.space.size, 4),
        "skipped": state.places(),
        "evaluations": state.evaluations,
        "searching": state.searching,
        "pays": state.guard.pays(),
        "timed": state.timings is None,
        "cost_of_a_draft": state.c,
        "cost_of_scoring": {str(tokens): state.costs.score(tokens) for tokens in (2, 4, 8, 16, 32)},
        "spent": dict(state.spent),
        "steps": state.steps,
        "drafted_steps": state.drafted_steps,
        "history": list(state.history),
    }


def remark(state: SkipState) -> str | None:
    """That no layer set pays here; None where one does, or where too little is known."""
    worth, some = state.guard.worth(), 4 * state.drafted_steps > state.steps
    if not state.method.guard or state.guard.pays() or state.steps < TOLD or (some if worth is None else worth >= 1):
        return None
    seen = "" if state.matchness is None else f", its matchness is {state.matchness:.2f}"
    judged = f"the best of {state.evaluations} evaluations" if state.evaluations else "the one there is"
    so_far = " so far" if state.searching else ""
    return (
        f"swift found no layer set that pays here{so_far} and decodes plainly, but for trials: {judged} leaves out "
        f"{int(state.z.sum())} of {state.space.size} sublayers{seen}, a draft costs {state.c:.2f} plain steps and scoring "
        f"4 tokens {state.costs.score(4):.2f}"
    )
