"""What a run says of AdaDecode's exits: how often they predicted and were wrong, and speed against threshold (Figure 5)."""

from __future__ import annotations

import json
from collections.abc import Mapping

from skipstone.bench.lineup import BASELINE
from skipstone.bench.report.cells import NONE, Table, number
from skipstone.bench.report.figures import Group
from skipstone.methods.adadecode.adadecode import AdaDecode

METHOD = AdaDecode.name
COUNTS = ("tests", "predicted", "accepted", "rejected")


def tallies(group: Group, label: str) -> dict[int, dict[str, int]]:
    """Exit layer -> tests, predicted, accepted and rejected over the group's prompts."""
    found: dict[int, dict[str, int]] = {}
    for line in group.lines:
        grown = line["rows"].get(label, {}).get("grown") or {}
        for layer, counts in grown.get("exits", {}).items():
            total = found.setdefault(int(layer), dict.fromkeys(COUNTS, 0))
            for name in COUNTS:
                total[name] += counts[name]
    return found


def rates(group: Group, label: str) -> tuple[float | None, float | None]:
    """(share of tokens that were predicted early, share of judged predictions that were rejected): Figures 5b and 5c."""
    tokens = sum(line["rows"][label]["tokens"] for line in group.lines if label in line["rows"])
    found = tallies(group, label).values()
    accepted, rejected = (sum(one[name] for one in found) for name in ("accepted", "rejected"))
    judged = accepted + rejected
    return (accepted / tokens if found and tokens else None), (rejected / judged if judged else None)


def by_exit_head(group: Group) -> Table:
    """A row for every AdaDecode: its threshold at the end, its predictions, and those of every exit."""
    rows = []
    for label in group.labels:
        if not (found := tallies(group, label)):
            continue
        early, wrong = rates(group, label)
        figures = group.figures(label, group.lines) or {}
        last = next(line["rows"][label]["known"] for line in reversed(group.lines) if label in line["rows"])
        exits = ", ".join(f"{layer}: {_share(one)}" for layer, one in found.items())
        speed = number(figures.get("decode_speedup"))
        rows.append(
            [
                group.shown_as(label),
                number(last["threshold"]),
                _percent(early),
                _percent(wrong),
                exits,
                _same(group, label),
                speed,
            ]
        )
    columns = [
        "method",
        "threshold",
        "tokens predicted early",
        "rejected",
        "of the tests at each exit (rejected)",
        "same texts",
    ]
    return Table(f"{group.subject}, {group.name}: early predictions, all prompts", [*columns, "decode speed-up"], rows)


def by_threshold(group: Group) -> dict[str, list[tuple[float, float]]]:
    """Figure 5: name -> (threshold, value) of the rows that differ in their threshold alone, without the guard, which moves it;
    empty with fewer than three."""
    families: dict[str, dict[float, tuple[float, float, float]]] = {}
    for label in (label for label in group.labels if _is(group, label) and label not in group.tuned):
        settings = group.settings(label)
        early, wrong = rates(group, label)
        speed = (group.figures(label, group.lines) or {}).get("decode_speedup")
        if settings.get("guard", AdaDecode.guard) or early is None or speed is None:
            continue
        rest = json.dumps({name: value for name, value in settings.items() if name != "threshold"}, sort_keys=True)
        families.setdefault(rest, {})[settings.get("threshold", AdaDecode.threshold)] = (speed, early, wrong or 0.0)
    points = max(families.values(), key=len, default={})
    if len(points) < 3:
        return {}
    names = ("x plain decoding", "predicted early", "rejected")
    return {name: [(one, points[one][place]) for one in sorted(points)] for place, name in enumerate(names)}


def _is(group: Group, label: str) -> bool:
    return group.about["methods"][label]["method"] == METHOD


def _share(one: Mapping[str, int]) -> str:
    judged = one["accepted"] + one["rejected"]
    shares = one["predicted"] / one["tests"] if one["tests"] else None, one["rejected"] / judged if judged else None
    return "{} ({})".format(*map(_percent, shares))


def _same(group: Group, label: str) -> str:
    """The consistency ratio: texts that are those of plain decoding."""
    plain = group.called(BASELINE)
    lines = [line for line in group.lines if label in line["rows"] and plain in line["rows"]]
    if not lines or group.temperature:
        return NONE
    return f"{sum(line['rows'][label]['digests'] == line['rows'][plain]['digests'] for line in lines)}/{len(lines)}"


def _percent(share: float | None) -> str:
    return NONE if share is None else f"{100 * share:.0f} %"
