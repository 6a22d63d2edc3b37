"""What methods that skip sublayers found out while a group was measured: a table, and SWIFT's Figures 6, 7 and 12."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skipstone.bench.lineup import BASELINE
from skipstone.bench.report.cells import NONE, Table, number
from skipstone.bench.report.figures import Group
from skipstone.methods.shared.layer_sets import measured_speedup
from skipstone.timing.statistics import pooled

WINDOW = 4
"""Prompts whose tokens and seconds make a point of a curve."""
CHANGES = 40
"""Most changes of a layer set that a picture has room for, the latest."""


def learnt(group: Group) -> dict[str, Mapping[str, Any]]:
    """Label -> what a method knew after the group's last prompt, of methods that leave out layers."""
    found = {}
    for label in group.labels:
        said = [line["rows"][label].get("known") for line in group.lines if label in line["rows"]]
        if said and said[-1] and "skipped" in said[-1]:
            found[label] = said[-1]
    return found


def by_layer_set(group: Group) -> Table:
    """What was left out at the end, how often it was right, and what that should have brought (SWIFT, Eq. 6) beside what it
    brought, over all prompts: the search sees them all."""
    rows = []
    for label, known in learnt(group).items():
        figures = group.figures(label, group.lines) or {}
        left_out = sum(len(layers) for layers in known["skipped"].values())
        seconds = [figures.get(f"{part}_ms_per_step", 0.0) for part in ("search", "draft", "score", "other")]
        rows.append(
            [
                group.shown_as(label),
                number(known["skip_ratio"]),
                str(left_out),
                number(known["matchness"]),
                str(known["evaluations"]),
                _percent(figures.get("drafting_share")),
                _percent(seconds[0] / sum(seconds) if sum(seconds) else None, 1),
                *_expected(figures),
            ]
        )
    columns = ["method", "skip ratio", "left out", "matchness", "judged", "steps that drafted", "time in search"]
    return Table(
        f"{group.subject}, {group.name}: layer sets, all prompts",
        [*columns, "c", "v", "E, v = 1", "E", "decode speed-up"],
        rows,
    )


def _percent(share: float | None, digits: int = 0) -> str:
    return NONE if share is None else f"{100 * share:.{digits}f} %"


def _expected(figures: Mapping[str, Any]) -> list[str]:
    """c, v, E as in the paper and with the measured v, and what decoding reached, prefill apart."""
    if not figures.get("acceptance_rate") or "plain_ms_per_token" not in figures:
        return [NONE] * 5
    plain, length, alpha = (figures[name] for name in ("plain_ms_per_token", "mean_acceptance_length", "acceptance_rate"))
    passes = figures["drafts_per_step"]
    c, v = figures["draft_ms_per_step"] / passes / plain, figures["score_ms_per_step"] / plain
    expected = [measured_speedup(length, alpha, c, score) for score in (1.0, v)]
    return [number(one) for one in (c, v, *expected, figures["decode_speedup"])]


def matrix(known: Mapping[str, Any], layers: int) -> tuple[list[int], list[list[bool]]]:
    """(evaluations at which the layer set changed, what was left out then): a column for each change, the latest CHANGES; rows
    are the attentions of all layers, then their MLPs."""
    history = known["history"][-CHANGES:]
    sets = [[layer in one[kind] for kind in ("attention", "mlp") for layer in range(layers)] for one in history]
    return [one["evaluation"] for one in history], [list(row) for row in zip(*sets, strict=True)]


def along(group: Group, label: str) -> tuple[list[int], list[float], list[float | None]]:
    """(tokens so far, speed-up over plain decoding of the latest WINDOW prompts, matchness), a point a prompt."""
    plain = group.called(BASELINE)
    places: list[int] = []
    speeds: list[float] = []
    known: list[float | None] = []
    lines = [line for line in group.lines if label in line["rows"] and plain in line["rows"]]
    for end in range(1, len(lines) + 1):
        mine, base = ([line["rows"][name] for line in lines[max(0, end - WINDOW) : end]] for name in (label, plain))
        places.append(sum(line["rows"][label]["tokens"] for line in lines[:end]))
        rates = [pooled([row["tokens"] for row in rows], [row["seconds"] for row in rows]) for rows in (mine, base)]
        speeds.append(rates[0] / rates[1])
        known.append((mine[-1].get("known") or {}).get("matchness"))
    return places, speeds, known
