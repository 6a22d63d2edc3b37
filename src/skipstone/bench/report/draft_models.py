"""What a run says of methods with a draft model, and of what the lossy ones cost (AdaSD, Tables 1 to 5)."""

from __future__ import annotations

from typing import Any

from skipstone.bench.report.cells import NONE, Table, number
from skipstone.bench.report.figures import Group

MEANS = {
    "JSD accepted": "distance_accepted",
    "JSD rejected": "distance_rejected",
    "threshold": "distance_threshold",
    "bits accepted": "entropy_accepted",
    "bits rejected": "entropy_rejected",
}
"""Column -> what AdaSD's report calls it."""


def means(group: Group, label: str) -> dict[str, float]:
    """Means over all tokens of the group's prompts, by AdaSD's names; without those that nothing was counted for."""
    totals: dict[str, list[float]] = {}
    for line in group.lines:
        grown = line["rows"].get(label, {}).get("grown") or {}
        for name, one in grown.get("means", {}).items():
            total = totals.setdefault(name, [0.0, 0.0])
            total[0], total[1] = total[0] + one["sum"], total[1] + one["count"]
    return {name: value / count for name, (value, count) in totals.items() if count}


def likelihood(group: Group, label: str) -> float | None:
    """Mean log-likelihood of a row's tokens under the target, in nats; None where it was not asked for."""
    rows = [line["rows"][label] for line in group.lines if label in line["rows"]]
    tokens = sum(row["tokens"] for row in rows)
    if not tokens or any(row.get("log_likelihood") is None for row in rows):
        return None
    return sum(row["log_likelihood"] for row in rows) / tokens


def by_draft_model(group: Group) -> Table:
    """A row for every method, where one of them may change the text or knows entropies and distances."""
    known = {label: means(group, label) for label in group.labels}
    nats = {label: likelihood(group, label) for label in group.labels}
    title = f"{group.subject}, {group.name}: drafts, and what keeping them costs, all prompts"
    columns = ["method", "tokens/s", "#cand", "#match", "AccRate", *MEANS, "overruled", "log-likelihood", "score"]
    if not any(known.values()) and not any(value is not None for value in nats.values()):
        return Table(title, columns, [])
    rows = []
    for label in group.labels:
        figures: dict[str, Any] = group.figures(label, group.lines) or {}
        drafts = bool(figures.get("drafted"))
        per_step = [number(figures[name] / figures["steps"], 2) if drafts else NONE for name in ("drafted", "accepted")]
        overruled = f"{100 * figures['overruled'] / figures['tokens']:.1f} %" if drafts else NONE
        shown = [number(known[label].get(name), 3) for name in MEANS.values()]
        score = ", ".join(f"{name} {value:.3f}" for name, value in (figures.get("scores") or {}).items()) or NONE
        rate = number(figures.get("acceptance_rate"), 3) if drafts else NONE
        rows.append(
            [
                group.shown_as(label),
                number(figures.get("tokens_per_second"), 1),
                *per_step,
                rate,
                *shown,
                overruled,
                number(nats[label], 3),
                score,
            ]
        )
    return Table(title, columns, rows)
