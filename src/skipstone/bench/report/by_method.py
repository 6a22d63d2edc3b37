"""What a run says of single kinds of methods, over all its prompts: layer sets (SWIFT, Figures 6, 7 and 12), exit heads
(AdaDecode, Figure 5), draft models and the price of lossy methods (AdaSD, Tables 1 to 5)."""

import json
from collections.abc import Mapping
from typing import Any

from skipstone.bench.lineup import BASELINE
from skipstone.bench.report.cells import NONE, Table, number, percent, scores
from skipstone.bench.report.figures import Group, tokens_per_second
from skipstone.methods.adadecode.adadecode import AdaDecode
from skipstone.methods.shared.layer_sets import measured_speedup

WINDOW = 4  # prompts whose tokens and seconds make a point of a curve
CHANGES = 40  # most changes of a layer set that a picture has room for, the latest
MEANS = {
    "JSD accepted": "distance_accepted",
    "JSD rejected": "distance_rejected",
    "threshold": "distance_threshold",
    "bits accepted": "entropy_accepted",
    "bits rejected": "entropy_rejected",
}
"""Column -> what AdaSD's report calls it."""


# ---------------------------------------------------------------------------------------------- layer sets


def learnt(group: Group) -> dict[str, Mapping[str, Any]]:
    """Label -> what a method knew after the group's last prompt, of methods that leave out layers."""
    known = {label: group.rows(label)[-1].get("known") for label in group.labels}
    return {label: one for label, one in known.items() if one and "skipped" in one}


def by_layer_set(group: Group) -> Table:
    """What was left out at the end, how often it was right, and what that should have brought (SWIFT, Eq. 6) beside what it
    brought, over all prompts: the search sees them all."""
    columns = ["method", "skip ratio", "left out", "matchness", "judged", "steps that drafted", "time in search"]
    columns += ["c", "v", "E, v = 1", "E", "decode speed-up"]
    rows = []
    for label, known in learnt(group).items():
        figures = group.figures(label, group.lines) or {}
        spent = [figures.get(f"{part}_ms_per_step", 0.0) for part in ("search", "draft", "score", "other")]
        cells = [
            number(known["skip_ratio"]),
            str(sum(map(len, known["skipped"].values()))),
            number(known["matchness"]),
            str(known["evaluations"]),
            percent(figures.get("drafting_share")),
            percent(spent[0] / sum(spent) if sum(spent) else None, 1),
        ]
        rows.append([group.shown_as(label), *cells, *_expected(figures)])
    return Table(f"{group.subject}, {group.name}: layer sets, all prompts", columns, rows)


def _expected(figures: Mapping[str, Any]) -> list[str]:
    """c, v, E as in the paper and with the measured v, and what decoding reached, prefill apart."""
    if not figures.get("acceptance_rate") or "plain_ms_per_token" not in figures:
        return [NONE] * 5
    plain, length, alpha = (figures[name] for name in ("plain_ms_per_token", "mean_acceptance_length", "acceptance_rate"))
    c, v = figures["draft_ms_per_step"] / figures["drafts_per_step"] / plain, figures["score_ms_per_step"] / plain
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
    both = [(line["rows"][label], line["rows"][plain]) for line in group.lines if {label, plain} <= line["rows"].keys()]
    places: list[int] = []
    speeds: list[float] = []
    known: list[float | None] = []
    for end, (row, _) in enumerate(both, 1):
        mine, base = zip(*both[max(0, end - WINDOW) : end], strict=True)
        places.append((places[-1] if places else 0) + row["tokens"])
        speeds.append(tokens_per_second(mine) / tokens_per_second(base))
        known.append((row.get("known") or {}).get("matchness"))
    return places, speeds, known


# ---------------------------------------------------------------------------------------------- exit heads


def tallies(group: Group, label: str) -> dict[int, dict[str, int]]:
    """Exit layer -> tests, predicted, accepted and rejected over the group's prompts."""
    found: dict[int, dict[str, int]] = {}
    for row in group.rows(label):
        for layer, counts in (row.get("grown") or {}).get("exits", {}).items():
            total = found.setdefault(int(layer), dict.fromkeys(("tests", "predicted", "accepted", "rejected"), 0))
            for name in total:
                total[name] += counts[name]
    return found


def rates(group: Group, label: str) -> tuple[float | None, float | None]:
    """(share of tokens that were predicted early, share of judged predictions that were rejected): Figures 5b and 5c."""
    tokens = sum(row["tokens"] for row in group.rows(label))
    found = tallies(group, label).values()
    accepted, rejected = (sum(one[name] for one in found) for name in ("accepted", "rejected"))
    return (accepted / tokens if found and tokens else None), _share(rejected, accepted + rejected)


def by_exit_head(group: Group) -> Table:
    """A row for every AdaDecode: its threshold at the end, its predictions, and those of every exit."""
    columns = ["method", "threshold", "tokens predicted early", "rejected", "of the tests at each exit (rejected)"]
    rows = []
    for label in group.labels:
        if not (found := tallies(group, label)):
            continue
        early, wrong = rates(group, label)
        exits = [
            f"{layer}: {percent(_share(one['predicted'], one['tests']))} "
            f"({percent(_share(one['rejected'], one['accepted'] + one['rejected']))})"
            for layer, one in found.items()
        ]
        speed_up = number((group.figures(label, group.lines) or {}).get("decode_speedup"))
        threshold = number(group.rows(label)[-1]["known"]["threshold"])
        cells = [threshold, percent(early), percent(wrong), ", ".join(exits), _same_texts(group, label), speed_up]
        rows.append([group.shown_as(label), *cells])
    title = f"{group.subject}, {group.name}: early predictions, all prompts"
    return Table(title, [*columns, "same texts", "decode speed-up"], rows)


def by_threshold(group: Group) -> dict[str, list[tuple[float, float]]]:
    """Figure 5: name -> (threshold, value) of the rows that differ in their threshold alone, without the guard, which moves it;
    empty with fewer than three."""
    families: dict[str, dict[float, tuple[float, float, float]]] = {}
    for label in group.labels:
        if group.about["methods"][label]["method"] != AdaDecode.name or label in group.tuned:
            continue
        settings = group.settings(label)
        early, wrong = rates(group, label)
        speed_up = (group.figures(label, group.lines) or {}).get("decode_speedup")
        if settings.get("guard", AdaDecode.guard) or early is None or speed_up is None:
            continue
        rest = json.dumps({name: value for name, value in settings.items() if name != "threshold"}, sort_keys=True)
        families.setdefault(rest, {})[settings.get("threshold", AdaDecode.threshold)] = (speed_up, early, wrong or 0.0)
    points = max(families.values(), key=len, default={})
    if len(points) < 3:
        return {}
    names = ("x plain decoding", "predicted early", "rejected")
    return {name: [(one, points[one][place]) for one in sorted(points)] for place, name in enumerate(names)}


def _same_texts(group: Group, label: str) -> str:
    """The consistency ratio: texts that are those of plain decoding."""
    plain = group.called(BASELINE)
    both = [(line["rows"][label], line["rows"][plain]) for line in group.lines if {label, plain} <= line["rows"].keys()]
    if not both or group.temperature:
        return NONE
    return f"{sum(mine['digests'] == base['digests'] for mine, base in both)}/{len(both)}"


def _share(count: float, of: float) -> float | None:
    return count / of if of else None


# -------------------------------------------------------------------------------------------- draft models


def means(group: Group, label: str) -> dict[str, float]:
    """Means over all tokens of the group's prompts, by AdaSD's names; without those that nothing was counted for."""
    totals: dict[str, list[float]] = {}
    for row in group.rows(label):
        for name, one in (row.get("grown") or {}).get("means", {}).items():
            total = totals.setdefault(name, [0.0, 0.0])
            total[0], total[1] = total[0] + one["sum"], total[1] + one["count"]
    return {name: value / count for name, (value, count) in totals.items() if count}


def likelihood(group: Group, label: str) -> float | None:
    """Mean log-likelihood of a method's tokens under the target, in nats; None where it was not asked for."""
    rows = group.rows(label)
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
    rows = []
    for label in group.labels if any(known.values()) or any(value is not None for value in nats.values()) else ():
        figures: dict[str, Any] = group.figures(label, group.lines) or {}
        drafts = bool(figures.get("drafted"))
        per_step = [number(figures[name] / figures["steps"], 2) if drafts else NONE for name in ("drafted", "accepted")]
        cells = [
            number(figures.get("tokens_per_second"), 1),
            *per_step,
            number(figures.get("acceptance_rate"), 3) if drafts else NONE,
            *(number(known[label].get(name), 3) for name in MEANS.values()),
            percent(figures["overruled"] / figures["tokens"], 1) if drafts else NONE,
            number(nats[label], 3),
            scores(figures),
        ]
        rows.append([group.shown_as(label), *cells])
    return Table(title, columns, rows)
