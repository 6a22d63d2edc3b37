"""Figures as tables: our own layout, and those of the papers, so that a reader can lay them side by side; then what a run says
of single kinds of methods, over all its prompts: layer sets (SWIFT), exit heads (AdaDecode), draft models and the price of
lossy methods (AdaSD, Tables 1 to 5)."""

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skipstone.lab.bench.plan import BASELINE, THEIRS
from skipstone.lab.bench.prompts import added
from skipstone.lab.bench.report.aggregate import EARLY_EXIT, PARTS, VANILLA, MeasurementGroup
from skipstone.lab.timing.statistics import LOOPING, NGRAM
from skipstone.methods.adadecode.adadecode import AdaDecode
from skipstone.methods.drafting.layer_sets import measured_speedup

NONE = "-"  # stands where there is no figure
Figures = Mapping[str, Any]  # what `MeasurementGroup.figures` says of a method
Cell = Callable[[Figures], str]
LEGEND = f"""\
x plain, x HF, x HF exit: speed-up over {BASELINE}, {THEIRS} and {EARLY_EXIT}, total tokens over total time, prefill included,
with 95 % paired bootstrap intervals over prompts. Only prompts count whose text has a share of repeated {NGRAM}-grams
(repeats) under {LOOPING} in all rows; the last column takes all. ceiling: share of what the memory's bandwidth would allow
plain decoding. TTFT, TPOT: to the first token, and for each further one. ms a step: draft + scoring + other. predicted: the
speed-up that M and these costs allow, setup and prefill apart; reached: the share of it that was reached. by costs: the
speed-up that M and the costs of `skipstone costs` predict, which know nothing of this run / the one measured, both apart.
equal: greedy texts identical to {THEIRS}."""


@dataclass(frozen=True)
class Table:
    """A title, the columns' names, and rows of texts."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """With its title as a heading."""
        lines = (
            "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
            for cells in (self.columns, ["---"] * len(self.columns), *self.rows)
        )
        return f"### {self.title}\n\n{''.join(lines)}"

    def csv(self) -> str:
        """With its title in the first column."""
        return _csv([["table", *self.columns], *([self.title, *row] for row in self.rows)])


def _table(title: str, rows: Sequence[Mapping[str, str]]) -> Table:
    """rows: column -> cell, of the same columns each."""
    return Table(title, [*rows[0]] if rows else [], [[*row.values()] for row in rows])


def _csv(rows: Iterable[Iterable[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue()


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """A figure, or a dash where there is none."""
    return NONE if value is None else f"{value:.{digits}f}{unit}"


def percent(value: float | None, digits: int = 0, unit: str = " %") -> str:
    """A share in percent, or a dash where there is none."""
    return number(None if value is None else 100 * value, digits, unit)


def scores(figures: Figures) -> str:
    """A method's scores by name."""
    return ", ".join(f"{name} {value:.3f}" for name, value in (figures.get("scores") or {}).items()) or NONE


def _steps(figures: Figures) -> str:
    parts = [figures.get(f"{part}_ms_per_step") for part in ("draft", "score", "other")]
    return "+".join(f"{part:.1f}" for part in parts if part is not None) or NONE


def _by_costs(figures: Figures) -> str:
    """The speed-up that costs predict beside the one that decoding reached."""
    costed = figures.get("costed_speedup")
    return NONE if costed is None else f"{costed:.2f} / {figures['decode_speedup']:.2f}"


def _equal(figures: Figures) -> str:
    same = figures["equal"].get(THEIRS)
    return NONE if same is None else f"{same}/{figures['prompts']}"


def _consistency(figures: Figures) -> str:
    """The share of greedy texts that are plain decoding's."""
    same = figures["equal"].get(BASELINE)
    return number(None if same is None else same / figures["prompts"], 3)


def _speed_up(reference: str, short: bool = False) -> Callable[[Figures | None], str]:
    """The speed-up over a method, with its interval; short: without."""

    def cell(figures: Figures | None) -> str:
        value = None if figures is None else figures["speedups"].get(reference)
        if value is None:
            return NONE
        exact = value["high"] - value["low"] < 1e-9  # a row beside itself, or a single prompt
        return number(value["value"]) + ("" if short or exact else f" ({value['low']:.2f}-{value['high']:.2f})")

    return cell


def _times(digits: int, unit: str = "", reference: str = BASELINE) -> Cell:
    """The speed-up over plain decoding, or another method, as papers write it."""
    return lambda f: number(f["speedups"].get(reference, {}).get("value"), digits, unit)


def _per_step(name: str) -> Cell:
    return lambda f: number(f[name] / f["steps"], 3) if f.get("steps") else NONE


COLUMNS: dict[str, Cell] = {
    "n": lambda f: str(f["prompts"]),
    "tokens/s": lambda f: number(f["tokens_per_second"], 1),
    "x plain": _speed_up(BASELINE),
    "x HF": _speed_up(THEIRS),
    "x HF exit": _speed_up(EARLY_EXIT),
    "M": lambda f: number(f.get("mean_acceptance_length")),
    "alpha": lambda f: number(f.get("acceptance_rate")),
    "ms a step": _steps,
    "predicted": lambda f: number(f.get("predicted_speedup")),
    "reached": lambda f: number(f.get("measured_over_predicted")),
    "by costs": _by_costs,
    "equal": _equal,
    "score": scores,
    "repeats": lambda f: number(f["repeated_share"]),
    "TTFT ms": lambda f: number(f["ttft_ms"], 1),
    "TPOT ms": lambda f: number(f["tpot_ms"], 1),
    "peak MiB": lambda f: NONE if f["peak_memory"] is None else f"{f['peak_memory'] / 2**20:.0f}",
    "ceiling": lambda f: number(f["share_of_ceiling"]),
}


def own(group: MeasurementGroup) -> Table:
    """Every figure of a group, the headline's prompts, and the speed-up over all of them."""
    headline, rows = group.headline(), []
    for label in group.labels:
        figures = group.figures(label, headline)
        cells = ["0", *[NONE] * (len(COLUMNS) - 1)] if figures is None else [cell(figures) for cell in COLUMNS.values()]
        rows.append([group.shown_as(label), *cells, _speed_up(BASELINE, short=True)(group.over_all(label))])
    return Table(group.title, ["method", *COLUMNS, "x plain, all"], rows)


LENGTHS = ("num_speculative_tokens", "num_assistant_tokens", "prompt_lookup_num_tokens", "num_draft_tokens")
"""How methods call the drafts of a step."""


def layerskip(group: MeasurementGroup) -> Table:
    """The shape of LayerSkip's Tables 3 to 6 and 11."""
    rows = []
    for label in group.labels:
        figures, settings = group.figures(label, group.shown()), group.settings(label)
        assert figures is not None
        rows.append(
            {
                "Generation": group.shown_as(label),
                "E": str(settings.get("exit_layer", NONE)),
                "d": next((str(settings[name]) for name in LENGTHS if name in settings), NONE),
                "Score": scores(figures),
                "Token Acc.": percent(figures.get("acceptance_rate"), 1, "%"),
                "Tokens per Sec.": number(figures["tokens_per_second"], 1),
                "Time per Token (ms)": number(1000 * figures["seconds"] / figures["tokens"], 1),
                "Speedup": _times(2, "x")(figures),
            }
        )
    return _table(group.title, rows)


def _across(title: str, groups: Sequence[MeasurementGroup], cells: Mapping[str, Cell], overall: bool) -> Table:
    """Methods down, tasks across, with the same cells for each; overall: tokens/s and speed-up over all tasks at the end."""
    columns = ["Methods", *(f"{group.name} {name.format(n=_prompts(group))}" for group in groups for name in cells)]
    parts: dict[float, list[MeasurementGroup]] = {}
    for group in groups if overall else ():
        parts.setdefault(group.temperature, []).append(group)
    for t in parts:
        columns += [f"{name}{f', T = {t:g}' if t else ''}" for name in ("Speed (tokens/s)", "Overall Speedup")]
    rows = []
    for label in dict.fromkeys(label for group in groups for label in group.labels):
        found = [group.figures(label, group.shown()) for group in groups]
        shown = next(group.shown_as(label) for group in groups if label in group.labels)
        row = [shown, *(NONE if one is None else cell(one) for one in found for cell in cells.values())]
        rows.append([*row, *(cell for part in parts.values() for cell in _overall(label, part))])
    return Table(title, columns, rows)


def _prompts(group: MeasurementGroup) -> str:
    """How many prompts a group's figures are of."""
    return f"n = {len(group.headline())}" if group.headline() else f"all {len(group.lines)}, every one loops"


def _overall(label: str, groups: Sequence[MeasurementGroup]) -> list[str]:
    """Total tokens over total time of all tasks, and the same against plain decoding's."""
    shared = [group for group in groups if {label, group.called(BASELINE)} <= set(group.labels)]
    if not shared:
        return [NONE, NONE]
    rates = []
    for plain in (False, True):
        found = [group.figures(str(group.called(BASELINE)) if plain else label, group.shown()) for group in shared]
        rates.append(sum(one["tokens"] for one in found if one) / sum(one["seconds"] for one in found if one))
    return [number(rates[0]), number(rates[0] / rates[1], 2, "x")]


def by_category(group: MeasurementGroup) -> Table:
    """Speed-ups over plain decoding, categories down: prompts that do not loop with their intervals, then all."""
    labels = [label for label in group.labels if label != group.called(BASELINE)]
    rows = []
    for part in group.by_category():
        row = [part.task or NONE]
        for lines, short in ((part.headline(), False), (part.lines, True)):
            row += [str(len(lines)), *(_speed_up(BASELINE, short)(part.figures(label, lines)) for label in labels)]
        rows.append(row)
    names = [group.shown_as(label) for label in labels]
    columns = ["category", "n", *names, "n, all", *(f"{name}, all" for name in names)]
    return Table(f"{group.subject}, {group.name}: x plain by category", columns, rows)


def by_exit(group: MeasurementGroup) -> Table:
    """The shape of LayerSkip's Table 1: perplexity of the task's answers at every exit."""
    assert group.exits is not None
    pairs = zip(group.exits["perplexity"], group.exits["agreement"], strict=True)
    rows = [[str(layer), number(ppl), number(same)] for layer, (ppl, same) in enumerate(pairs, 1)]
    title = f"{group.subject}, {group.name}: {group.exits['tokens']} tokens of {group.exits['prompts']} answers, teacher-forced"
    return Table(title, ["exit layer", "perplexity", "agreement with the last"], rows)


# ---------------------------------------------------------------------------------------------- layer sets


def learnt(group: MeasurementGroup) -> dict[str, Mapping[str, Any]]:
    """Label -> what a method knew after the group's last prompt, of methods that leave out layers."""
    known = {label: group.rows(label)[-1].get("known") for label in group.labels}
    return {label: one for label, one in known.items() if one and "skipped" in one}


def by_layer_set(group: MeasurementGroup) -> Table:
    """What was left out at the end, how often it was right, and what that should have brought (SWIFT, Eq. 6) beside what it
    brought, over all prompts: the search sees them all."""
    rows = []
    for label, known in learnt(group).items():
        figures = group.over_all(label)
        spent = [figures.get(f"{part}_ms_per_step", 0.0) for part in PARTS]
        rows.append(
            {
                "method": group.shown_as(label),
                "skip ratio": number(known["skip_ratio"]),
                "left out": str(sum(map(len, known["skipped"].values()))),
                "matchness": number(known["matchness"]),
                "judged": str(known["evaluations"]),
                "steps that drafted": percent(figures.get("drafting_share")),
                "time in search": percent(share(spent[0], sum(spent)), 1),
                **_expected(figures),
            }
        )
    return _table(f"{group.subject}, {group.name}: layer sets, all prompts", rows)


def _expected(figures: Figures) -> dict[str, str]:
    """c, v, E as in the paper and with the measured v, and what decoding reached, prefill apart."""
    names = ("c", "v", "E, v = 1", "E", "decode speed-up")
    if not figures.get("acceptance_rate") or "plain_ms_per_token" not in figures:
        return dict.fromkeys(names, NONE)
    plain, length, alpha = (figures[name] for name in ("plain_ms_per_token", "mean_acceptance_length", "acceptance_rate"))
    c, v = figures["draft_ms_per_step"] / figures["drafts_per_step"] / plain, figures["score_ms_per_step"] / plain
    expected = [measured_speedup(length, alpha, c, score) for score in (1.0, v)]
    return dict(zip(names, map(number, (c, v, *expected, figures["decode_speedup"])), strict=True))


def share(count: float, of: float) -> float | None:
    """count / of, None of nothing."""
    return count / of if of else None


# ---------------------------------------------------------------------------------------------- exit heads


def _grown(group: MeasurementGroup, label: str, name: str) -> dict[str, dict[str, Any]]:
    """What a method counted under a name, over the group's prompts."""
    return added([(row.get("grown") or {}).get(name, {}) for row in group.rows(label)]) or {}


def tallies(group: MeasurementGroup, label: str) -> dict[int, dict[str, int]]:
    """Exit layer -> tests, predicted, accepted and rejected over the group's prompts."""
    return {int(layer): counts for layer, counts in _grown(group, label, "exits").items()}


def rates(group: MeasurementGroup, label: str) -> tuple[float | None, float | None]:
    """(share of tokens that were predicted early, share of judged predictions that were rejected): Figures 5b and 5c."""
    tokens = sum(row["tokens"] for row in group.rows(label))
    found = tallies(group, label).values()
    accepted, rejected = (sum(one[name] for one in found) for name in ("accepted", "rejected"))
    return (share(accepted, tokens) if found else None), share(rejected, accepted + rejected)


def by_exit_head(group: MeasurementGroup) -> Table:
    """A row for every AdaDecode: its threshold, its predictions, those of every exit, and the consistency ratio: texts that are
    those of plain decoding."""
    rows = []
    for label in group.labels:
        if not (found := tallies(group, label)):
            continue
        early, wrong = rates(group, label)
        both = group.beside_plain(label)
        same = sum(mine["digests"] == base["digests"] for mine, base in both)
        exits = (
            f"{layer}: {percent(share(one['predicted'], one['tests']))} "
            f"({percent(share(one['rejected'], one['accepted'] + one['rejected']))})"
            for layer, one in found.items()
        )
        rows.append(
            {
                "method": group.shown_as(label),
                "threshold": number(group.settings(label).get("confidence_threshold", AdaDecode.confidence_threshold)),
                "tokens predicted early": percent(early),
                "rejected": percent(wrong),
                "of the tests at each exit (rejected)": ", ".join(exits),
                "same texts": f"{same}/{len(both)}" if both and not group.temperature else NONE,
                "decode speed-up": number(group.over_all(label).get("decode_speedup")),
            }
        )
    return _table(f"{group.subject}, {group.name}: early predictions, all prompts", rows)


# -------------------------------------------------------------------------------------------- draft models


MEANS = {
    "JSD accepted": "distance_accepted",
    "JSD rejected": "distance_rejected",
    "threshold": "distance_threshold",
    "bits accepted": "entropy_accepted",
    "bits rejected": "entropy_rejected",
}
"""Column -> what AdaSD's report calls it."""


def likelihood(group: MeasurementGroup, label: str) -> float | None:
    """Mean log-likelihood of a method's tokens under the target, in nats; None where it was not asked for."""
    rows = group.rows(label)
    if any(row.get("log_likelihood") is None for row in rows):
        return None
    return share(sum(row["log_likelihood"] for row in rows), sum(row["tokens"] for row in rows))


def by_draft_model(group: MeasurementGroup) -> Table:
    """A row for every method, where one of them may change the text or knows entropies and distances."""
    known = {label: group.over_all(label).get("means", {}) for label in group.labels}
    nats = {label: likelihood(group, label) for label in group.labels}
    rows = []
    for label in group.labels if any(known.values()) or any(value is not None for value in nats.values()) else ():
        figures = group.over_all(label)
        drafts = bool(figures.get("drafted"))
        rows.append(
            {
                "method": group.shown_as(label),
                "tokens/s": number(figures.get("tokens_per_second"), 1),
                "#cand": number(figures["drafted"] / figures["steps"]) if drafts else NONE,
                "#match": number(figures["accepted"] / figures["steps"]) if drafts else NONE,
                "AccRate": number(figures.get("acceptance_rate"), 3) if drafts else NONE,
                **{column: number(known[label].get(name), 3) for column, name in MEANS.items()},
                "overruled": percent(figures["overruled"] / figures["tokens"], 1) if drafts else NONE,
                "log-likelihood": number(nats[label], 3),
                "score": scores(figures),
            }
        )
    return _table(f"{group.subject}, {group.name}: drafts, and what keeping them costs, all prompts", rows)


BY_GROUP: dict[str, Callable[[MeasurementGroup], Table]] = {"own": own, "layerskip": layerskip}
ACROSS_TASKS: dict[str, dict[str, Cell]] = {
    "tasks": {"tokens/s": COLUMNS["tokens/s"], "x plain ({n})": COLUMNS["x plain"]},
    # SWIFT's Tables 2, 3 and 8
    "swift": {"M": COLUMNS["M"], "alpha": COLUMNS["alpha"], "Acc.": scores, "Speedup": _times(2, "x")},
    # AdaDecode's Tables 2 and 3
    "adadecode": {
        "Throughput (Tokens/s)": COLUMNS["tokens/s"],
        "Speedup (vs. Vanilla)": _times(2, "x"),
        "Consistency": _consistency,
    },
    # AdaSD's Tables 1 and 2: JSDist is the mean of the threshold, #cand and #match are draft tokens submitted and accepted a
    # step, the speed-up is that over Vanilla
    "adasd": {
        "tks/sec": lambda f: number(f["tokens_per_second"], 3),
        "JSDist": lambda f: number(f["means"].get("distance_threshold"), 3),
        "acc": scores,
        "#cand": _per_step("drafted"),
        "#match": _per_step("accepted"),
        "AccRate": lambda f: number(f.get("acceptance_rate"), 3),
        "speedup": _times(3, reference=VANILLA),
    },
}
"""Layout -> the cells that every method has for every task. {n} stands for the number of prompts."""
LAYOUTS = (*BY_GROUP, *ACROSS_TASKS)


def tables(groups: Sequence[MeasurementGroup], layout: str = "own") -> list[Table]:
    """All tables of a run in a layout: a group's own is followed by those of its categories, layer sets, exit heads, draft
    models and exits, where it has them. ValueError for a layout that does not exist."""
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}; there are {', '.join(LAYOUTS)}")
    found: list[Table] = []
    for group in groups if layout in BY_GROUP else ():
        parts = [part(group) for part in (by_category, by_layer_set, by_exit_head, by_draft_model)]
        exits = [by_exit(group)] if group.exits else []
        found += [BY_GROUP[layout](group), *(table for table in parts if table.rows), *exits]
    by_model: dict[str, list[MeasurementGroup]] = {}
    for group in groups if layout in ACROSS_TASKS else ():
        by_model.setdefault(group.subject, []).append(group)
    return found + [_across(model, part, ACROSS_TASKS[layout], layout == "swift") for model, part in by_model.items()]


def csv_of(groups: Sequence[MeasurementGroup]) -> str:
    """Every figure as numbers, a row for every group, method and choice of prompts ("headline": those that do not loop)."""
    rows: list[dict[str, Any]] = []
    for group in groups:
        for label in group.labels:
            for prompts, lines in (("headline", group.headline()), ("all", group.lines)):
                if (found := group.figures(label, lines)) is not None:
                    key = {"model": group.subject, "task": group.task, "temperature": group.temperature}
                    rows.append({**key, "method": group.shown_as(label), "prompts_taken": prompts, **_flat(found)})
    names = list(dict.fromkeys(name for row in rows for name in row))
    return _csv([names, *([row.get(name, "") for name in names] for row in rows)])


def _flat(found: Figures, before: str = "") -> dict[str, Any]:
    """Nested figures as columns, their names joined by dots."""
    flat: dict[str, Any] = {}
    for name, value in found.items():
        flat |= _flat(value, f"{before}{name}.") if isinstance(value, Mapping) else {f"{before}{name}": value}
    return flat
