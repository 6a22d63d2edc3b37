"""Figures as tables, in our own layout and in those of the papers.

Further tables show layer sets (SWIFT), exit heads (AdaDecode), and draft models with the cost of lossy methods (AdaSD,
Tables 1 to 5). They are over all prompts.
"""

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from skipstone.lab.bench.plan import BASELINE, THEIRS
from skipstone.lab.bench.prompts import add_counts
from skipstone.lab.bench.report.aggregate import EARLY_EXIT, PARTS, VANILLA, MeasurementGroup, tokens_per_second
from skipstone.lab.bench.run_file import Line
from skipstone.lab.timing.statistics import LOOPING, NGRAM
from skipstone.methods.adadecode.adadecode import AdaDecode
from skipstone.policy.cost_model import StepCosts

NONE = "-"  # a cell without a figure
Figures = Mapping[str, Any]  # what `MeasurementGroup.figures` returns
Cell = Callable[[Figures], str]
LEGEND = f"""\
x plain, x HF, x HF exit: speed-up over {BASELINE}, {THEIRS} and {EARLY_EXIT}, total tokens over total time, prefill included,
with 95 % paired bootstrap intervals over prompts. Prompts count only if the share of repeated {NGRAM}-grams (repeats) is
below {LOOPING} in all rows; the last column takes all prompts. ceiling: share of the speed that the memory's bandwidth allows
plain decoding. TTFT, TPOT: time to the first token and per further token. ms a step: draft + scoring + other. predicted: the
speed-up that M and these costs allow without setup and prefill; reached: the share of it that was reached. by costs: the
speed-up that M and `skipstone costs` predict without this run / the measured one, both without setup and prefill.
equal: greedy texts identical to {THEIRS}."""


@dataclass(frozen=True)
class Table:
    """A title, the names of the columns, and rows of texts."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """The table with its title as a heading."""
        lines = (
            "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
            for cells in (self.columns, ["---"] * len(self.columns), *self.rows)
        )
        return f"### {self.title}\n\n{''.join(lines)}"

    def csv(self) -> str:
        """The table with its title in the first column."""
        return _csv([["table", *self.columns], *([self.title, *row] for row in self.rows)])


def _csv(rows: Iterable[Iterable[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue()


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """A number, or a dash for None."""
    return NONE if value is None else f"{value:.{digits}f}{unit}"


def percent(value: float | None, digits: int = 0, unit: str = " %") -> str:
    """A share in percent, or a dash for None."""
    return number(None if value is None else 100 * value, digits, unit)


def share(count: float, total: float) -> float | None:
    """count / total, or None if the total is 0."""
    return count / total if total else None


def _scores(figures: Figures) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in (figures.get("scores") or {}).items()) or NONE


def _step_milliseconds(figures: Figures) -> str:
    parts = [figures.get(f"{part}_ms_per_step") for part in ("draft", "score", "other")]
    return "+".join(f"{part:.1f}" for part in parts if part is not None) or NONE


def _predicted_by_costs(figures: Figures) -> str:
    costed = figures.get("costed_speedup")
    return NONE if costed is None else f"{costed:.2f} / {figures['decode_speedup']:.2f}"


def _equal_texts(figures: Figures) -> str:
    same = figures["equal"].get(THEIRS)
    return NONE if same is None else f"{same}/{figures['prompts']}"


def _speedup(reference: str = BASELINE, digits: int = 2, unit: str = "") -> Cell:
    return lambda figures: number(figures["speedups"].get(reference, {}).get("value"), digits, unit)


def _speedup_interval(reference: str) -> Cell:
    def cell(figures: Figures) -> str:
        interval = figures["speedups"].get(reference, {"low": 0, "high": 0})
        exact = interval["high"] - interval["low"] < 1e-9  # a method compared with itself, or a single prompt
        return _speedup(reference)(figures) + ("" if exact else f" ({interval['low']:.2f}-{interval['high']:.2f})")

    return cell


def _per_step(name: str, digits: int = 3) -> Cell:
    return lambda figures: number(figures[name] / figures["steps"], digits) if figures.get("steps") else NONE


def _figure(name: str, digits: int = 2) -> Cell:
    return lambda figures: number(figures.get(name), digits)


def _percent(name: str, digits: int = 0, unit: str = " %") -> Cell:
    return lambda figures: percent(figures.get(name), digits, unit)


COLUMNS: dict[str, Cell] = {
    "n": lambda figures: str(figures["prompts"]),
    "tokens/s": _figure("tokens_per_second", 1),
    "x plain": _speedup_interval(BASELINE),
    "x HF": _speedup_interval(THEIRS),
    "x HF exit": _speedup_interval(EARLY_EXIT),
    "M": _figure("mean_acceptance_length"),
    "alpha": _figure("acceptance_rate"),
    "ms a step": _step_milliseconds,
    "predicted": _figure("predicted_speedup"),
    "reached": _figure("measured_over_predicted"),
    "by costs": _predicted_by_costs,
    "equal": _equal_texts,
    "score": _scores,
    "repeats": _figure("repeated_share"),
    "TTFT ms": _figure("ttft_ms", 1),
    "TPOT ms": _figure("tpot_ms", 1),
    "peak MiB": lambda figures: number(figures.get("peak_memory") and figures["peak_memory"] / 2**20, 0),
    "ceiling": _figure("share_of_ceiling"),
}
ACROSS_TASKS: dict[str, dict[str, Cell]] = {
    "tasks": {"tokens/s": COLUMNS["tokens/s"], "x plain ({n})": COLUMNS["x plain"]},
    # SWIFT's Tables 2, 3 and 8
    "swift": {"M": COLUMNS["M"], "alpha": COLUMNS["alpha"], "Acc.": _scores, "Speedup": _speedup(unit="x")},
    # AdaDecode's Tables 2 and 3; consistency is the share of greedy texts that equal plain decoding's
    "adadecode": {
        "Throughput (Tokens/s)": COLUMNS["tokens/s"],
        "Speedup (vs. Vanilla)": _speedup(unit="x"),
        "Consistency": lambda f: number(f["equal"][BASELINE] / f["prompts"], 3) if BASELINE in f["equal"] else NONE,
    },
    # AdaSD's Tables 1 and 2: JSDist is the mean threshold, #cand and #match are draft tokens and accepted tokens per step
    "adasd": {
        "tks/sec": _figure("tokens_per_second", 3),
        "JSDist": lambda f: number(f["means"].get("distance_threshold"), 3),
        "acc": _scores,
        "#cand": _per_step("drafted"),
        "#match": _per_step("accepted"),
        "AccRate": _figure("acceptance_rate", 3),
        "speedup": _speedup(VANILLA, 3),
    },
}
"""Layout -> the cells that every method has for every task. {n} stands for the number of prompts."""
DRAFT_LENGTHS = ("num_speculative_tokens", "num_assistant_tokens", "prompt_lookup_num_tokens", "num_draft_tokens")
"""Names of the draft tokens per step among the settings of methods."""
NO_FIGURES: Figures = {"prompts": 0, "speedups": {}, "equal": {}, "means": {}}
METHOD: dict[str, Cell] = {"method": lambda figures: figures["name"]}
BY_METHOD: dict[str, dict[str, Cell]] = {
    "own": {**METHOD, **COLUMNS, "x plain, all": lambda f: _speedup()(f["all"])},
    # LayerSkip's Tables 3 to 6 and 11
    "layerskip": {
        "Generation": METHOD["method"],
        "E": lambda f: str(f["settings"].get("exit_layer", NONE)),
        "d": lambda f: next((str(f["settings"][name]) for name in DRAFT_LENGTHS if name in f["settings"]), NONE),
        "Score": _scores,
        "Token Acc.": _percent("acceptance_rate", 1, "%"),
        "Tokens per Sec.": COLUMNS["tokens/s"],
        "Time per Token (ms)": lambda f: number(1000 / f["tokens_per_second"], 1),
        "Speedup": _speedup(unit="x"),
    },
}
"""Layout -> the cells that every method has in a table of its group. `all` has the figures over all prompts."""


def _figures(group: MeasurementGroup, label: str, lines: Sequence[Line]) -> dict[str, Any]:
    """What cells know of a method: its name, and its figures over some lines."""
    return {"name": group.display_name(label), **(group.figures(label, lines) or NO_FIGURES)}


def _table(group: MeasurementGroup, about: str, cells: Mapping[str, Cell], rows: Iterable[Figures]) -> Table:
    """A further table of a group, over all prompts."""
    title = f"{group.subject}, {group.name}: {about}"
    return Table(title, [*cells], [[cell(row) for cell in cells.values()] for row in rows])


def _by_method(group: MeasurementGroup, layout: str) -> Table:
    """A row per method: our own layout over the headline's prompts, LayerSkip's over the prompts that are shown."""
    lines, rows = group.headline() if layout == "own" else group.shown_lines(), list[Figures]()
    for label in group.labels:
        more = {"all": group.over_all(label)} if layout == "own" else {"settings": group.settings(label)}
        rows.append(_figures(group, label, lines) | more)
    return replace(_table(group, "", BY_METHOD[layout], rows), title=group.title)


def _across_tasks(groups: Sequence[MeasurementGroup], layout: str) -> Table:
    """Methods down, tasks across. SWIFT's layout ends with tokens per second and speed-up over all tasks."""
    by_temperature: dict[float, list[MeasurementGroup]] = {}
    for group in groups if layout == "swift" else ():
        by_temperature.setdefault(group.temperature, []).append(group)
    rows = []
    for label in dict.fromkeys(label for group in groups for label in group.labels):
        row = [("Methods", next(group.display_name(label) for group in groups if label in group.labels))]
        for group in groups:
            figures, calm = _figures(group, label, group.shown_lines()), len(group.headline())
            prompts = f"n = {calm}" if calm else f"all {len(group.lines)}, every one loops"
            row += [(f"{group.name} {name.format(n=prompts)}", cell(figures)) for name, cell in ACROSS_TASKS[layout].items()]
        for t, parts in by_temperature.items():
            pairs = [pair for group in parts for pair in group.pairs_with_plain(label, group.shown_lines())]
            own, plain = map(tokens_per_second, zip(*pairs, strict=True)) if pairs else (0.0, 0.0)
            suffix = f", T = {t:g}" if t else ""
            row.append((f"Speed (tokens/s){suffix}", number(own or None)))
            row.append((f"Overall Speedup{suffix}", number(share(own, plain), unit="x")))
        rows.append(row)
    return Table(groups[0].subject, [column for column, _ in rows[0]], [[cell for _, cell in row] for row in rows])


def _by_category(group: MeasurementGroup) -> Table:
    """Speed-ups over plain decoding, categories down: prompts that do not loop, with intervals, then all prompts."""
    labels = [label for label in group.labels if label != group.label_of(BASELINE)]
    choices = (("", MeasurementGroup.headline, COLUMNS["x plain"]), (", all", lambda part: part.lines, _speedup()))
    titles, rows = ["category"], []
    for suffix, _, _ in choices:
        titles += [f"n{suffix}", *(f"{group.display_name(label)}{suffix}" for label in labels)]
    for part in group.by_category():
        cells = [part.task or NONE]
        for _, choose, cell in choices:
            lines = choose(part)
            cells += [str(len(lines)), *(cell(_figures(part, label, lines)) for label in labels)]
        rows.append(cells)
    return Table(f"{group.subject}, {group.name}: x plain by category", titles, rows)


def _by_exit(group: MeasurementGroup) -> Table:
    """The layout of LayerSkip's Table 1: perplexity of the task's answers at every exit."""
    if group.exits is None:
        return Table("", [], [])
    pairs = zip(group.exits["perplexity"], group.exits["agreement"], strict=True)
    rows = [[str(layer), number(perplexity), number(agreement)] for layer, (perplexity, agreement) in enumerate(pairs, 1)]
    title = f"{group.subject}, {group.name}: {group.exits['tokens']} tokens of {group.exits['prompts']} answers, teacher-forced"
    return Table(title, ["exit layer", "perplexity", "agreement with the last"], rows)


# ---------------------------------------------------------------------------------------------- layer sets


def layer_sets(group: MeasurementGroup) -> dict[str, Mapping[str, Any]]:
    """Label -> the report of a method that skips layers, after the group's last prompt."""
    reports = {label: group.rows(label)[-1].get("known") for label in group.labels}
    return {label: report for label, report in reports.items() if report and "skipped" in report}


LAYER_SETS: dict[str, Cell] = {
    **METHOD,
    "skip ratio": _figure("skip_ratio"),
    "left out": lambda f: str(sum(map(len, f["skipped"].values()))),
    "matchness": _figure("matchness"),
    "judged": lambda f: str(f["evaluations"]),
    "steps that drafted": _percent("drafting_share"),
    "time in search": _percent("search_share", 1),
    **{name: _figure(name) for name in ("c", "v", "E, v = 1", "E")},
    "decode speed-up": lambda f: number(f.get("E") and f["decode_speedup"]),
}


def by_layer_set(group: MeasurementGroup) -> Table:
    """Final layer sets, with the speed-up that SWIFT's Eq. 6 expects and the measured one.

    c and v are the costs of a draft pass and of scoring, in plain steps; E is Eq. 6 with the measured v.
    """
    rows = []
    for label, report in layer_sets(group).items():
        row = {**_figures(group, label, group.lines), **report}
        milliseconds = [row.get(f"{part}_ms_per_step", 0.0) for part in PARTS]
        row["search_share"] = share(milliseconds[0], sum(milliseconds))
        if row.get("acceptance_rate") and "plain_ms_per_token" in row:
            plain, length, alpha = row["plain_ms_per_token"], row["mean_acceptance_length"], row["acceptance_rate"]
            c, v = row["draft_ms_per_step"] / row["drafts_per_step"] / plain, row["score_ms_per_step"] / plain
            whole, own = (StepCosts(1.0, c, lambda _, v=v: v).speedup(length, (length - 1) / alpha) for v in (1.0, v))
            row |= {"c": c, "v": v, "E, v = 1": whole, "E": own}
        rows.append(row)
    return _table(group, "layer sets, all prompts", LAYER_SETS, rows)


# ---------------------------------------------------------------------------------------------- exit heads


def exit_counts(group: MeasurementGroup, label: str) -> dict[int, dict[str, int]]:
    """Exit layer -> counts of tests, predicted, accepted and rejected over the group's prompts."""
    total = add_counts([(row.get("grown") or {}).get("exits", {}) for row in group.rows(label)]) or {}
    return {int(layer): counts for layer, counts in total.items()}


def early_prediction_rates(group: MeasurementGroup, label: str) -> tuple[float | None, float | None]:
    """(share of tokens predicted early, share of judged predictions rejected): AdaDecode's Figures 5b and 5c."""
    exits = exit_counts(group, label).values()
    accepted, rejected = (sum(counts[name] for counts in exits) for name in ("accepted", "rejected"))
    tokens = sum(row["tokens"] for row in group.rows(label))
    return (share(accepted, tokens) if exits else None), share(rejected, accepted + rejected)


EXIT_HEADS: dict[str, Cell] = {
    **METHOD,
    "threshold": lambda f: number(f["settings"].get("confidence_threshold", AdaDecode.confidence_threshold)),
    "tokens predicted early": _percent("early"),
    "rejected": _percent("rejected"),
    "of the tests at each exit (rejected)": lambda f: ", ".join(
        f"{layer}: {percent(share(counts['predicted'], counts['tests']))} "
        f"({percent(share(counts['rejected'], counts['accepted'] + counts['rejected']))})"
        for layer, counts in f["exits"].items()
    ),
    "same texts": lambda f: f["same"],
    "decode speed-up": _figure("decode_speedup"),
}


def by_exit_head(group: MeasurementGroup) -> Table:
    """One row per AdaDecode: threshold, early predictions overall and per exit, and texts equal to plain decoding's."""
    rows = []
    for label in group.labels:
        if exits := exit_counts(group, label):
            early, rejected = early_prediction_rates(group, label)
            pairs = group.pairs_with_plain(label)
            equal = sum(own["digests"] == plain["digests"] for own, plain in pairs)
            same = f"{equal}/{len(pairs)}" if pairs and not group.temperature else NONE
            more = {"settings": group.settings(label), "exits": exits, "early": early, "rejected": rejected, "same": same}
            rows.append(_figures(group, label, group.lines) | more)
    return _table(group, "early predictions, all prompts", EXIT_HEADS, rows)


# -------------------------------------------------------------------------------------------- draft models


MEANS = {
    "JSD accepted": "distance_accepted",
    "JSD rejected": "distance_rejected",
    "threshold": "distance_threshold",
    "bits accepted": "entropy_accepted",
    "bits rejected": "entropy_rejected",
}
"""Column -> its name in AdaSD's report."""
DRAFT_MODELS: dict[str, Cell] = {
    **METHOD,
    "tokens/s": COLUMNS["tokens/s"],
    "#cand": lambda f: _per_step("drafted", 2)(f["drafts"]),
    "#match": lambda f: _per_step("accepted", 2)(f["drafts"]),
    "AccRate": lambda f: number(f["drafts"].get("acceptance_rate"), 3),
    **{column: lambda f, name=name: number(f["means"].get(name), 3) for column, name in MEANS.items()},
    "overruled": lambda f: percent(share(f["drafts"].get("overruled", 0), f["drafts"].get("tokens", 0)), 1),
    "log-likelihood": _figure("log_likelihood", 3),
    "score": _scores,
}


def log_likelihood(group: MeasurementGroup, label: str) -> float | None:
    """Mean log-likelihood of a method's tokens under the target in nats, or None if it was not measured."""
    rows = group.rows(label)
    if any(row.get("log_likelihood") is None for row in rows):
        return None
    return share(sum(row["log_likelihood"] for row in rows), sum(row["tokens"] for row in rows))


def by_draft_model(group: MeasurementGroup) -> Table:
    """One row per method, if one of them may change the text or reports entropies and distances."""
    rows = []
    for label in group.labels:
        figures = _figures(group, label, group.lines)
        drafts = figures if figures.get("drafted") else {}
        rows.append(figures | {"drafts": drafts, "log_likelihood": log_likelihood(group, label)})
    is_relevant = any(row["means"] or row["log_likelihood"] is not None for row in rows)
    return _table(group, "drafts, and what keeping them costs, all prompts", DRAFT_MODELS, rows if is_relevant else [])


LAYOUTS = (*BY_METHOD, *ACROSS_TASKS)


def tables(groups: Sequence[MeasurementGroup], layout: str = "own") -> list[Table]:
    """All tables of a run in a layout. ValueError for an unknown layout.

    The table of a group is followed by those of its categories, layer sets, exit heads, draft models and exits, if any.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}; there are {', '.join(LAYOUTS)}")
    if layout in BY_METHOD:
        parts = (partial(_by_method, layout=layout), _by_category, by_layer_set, by_exit_head, by_draft_model, _by_exit)
        return [table for group in groups for part in parts if (table := part(group)).rows]
    by_model: dict[str, list[MeasurementGroup]] = {}
    for group in groups:
        by_model.setdefault(group.subject, []).append(group)
    return [_across_tasks(of_model, layout) for of_model in by_model.values()]


def csv_of(groups: Sequence[MeasurementGroup]) -> str:
    """All figures as numbers: one row per group, method and choice of prompts ("headline" or "all")."""
    rows: list[dict[str, Any]] = []
    for group in groups:
        for label in group.labels:
            for prompts, lines in (("headline", group.headline()), ("all", group.lines)):
                if (figures := group.figures(label, lines)) is not None:
                    key = {"model": group.subject, "task": group.task, "temperature": group.temperature}
                    rows.append({**key, "method": group.display_name(label), "prompts_taken": prompts, **_flat(figures)})
    names = list(dict.fromkeys(name for row in rows for name in row))
    return _csv([names, *([row.get(name, "") for name in names] for row in rows)])


def _flat(figures: Figures, prefix: str = "") -> dict[str, Any]:
    """Nested figures as columns with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in figures.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat
