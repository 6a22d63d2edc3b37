"""Figures as tables: our own layout, and those of the papers, so that a reader can lay them side by side."""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from skipstone.bench.lineup import BASELINE, THEIRS
from skipstone.bench.report.by_method import by_draft_model, by_exit_head, by_layer_set
from skipstone.bench.report.cells import NONE, Table, interval, number, scores
from skipstone.bench.report.figures import EARLY_EXIT, Group
from skipstone.timing.statistics import LOOPING, NGRAM

Figures = Mapping[str, Any]  # what `Group.figures` says of a method
Cell = Callable[[Figures], str]
LEGEND = f"""\
x plain, x HF, x HF exit: speed-up over {BASELINE}, {THEIRS} and {EARLY_EXIT}, total tokens over total time, prefill included,
with 95 % paired bootstrap intervals over prompts. Only prompts count whose text has a share of repeated {NGRAM}-grams
(repeats) under {LOOPING} in all rows; the last column takes all. ceiling: share of what the memory's bandwidth would allow
plain decoding. TTFT, TPOT: to the first token, and for each further one. ms a step: draft + scoring + other. predicted: the
speed-up that M and these costs allow, prefill apart; reached: the share of it that was reached. equal: greedy texts identical
to {THEIRS}."""


def _steps(figures: Figures) -> str:
    parts = [figures.get(f"{part}_ms_per_step") for part in ("draft", "score", "other")]
    return "+".join(f"{part:.1f}" for part in parts if part is not None) or NONE


def _equal(figures: Figures) -> str:
    same = figures["equal"].get(THEIRS)
    return NONE if same is None else f"{same}/{figures['prompts']}"


def _megabytes(figures: Figures) -> str:
    return NONE if figures["peak_memory"] is None else f"{figures['peak_memory'] / 2**20:.0f}"


def _speed_up(reference: str, short: bool = False) -> Callable[[Figures | None], str]:
    """The speed-up over a method, with its interval; short: without."""
    return lambda figures: NONE if figures is None else interval(figures["speedups"].get(reference), short)


def _times(figures: Figures) -> str:
    found = figures["speedups"].get(BASELINE)
    return NONE if found is None else f"{found['value']:.2f}x"


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
    "equal": _equal,
    "score": scores,
    "repeats": lambda f: number(f["repeated_share"]),
    "TTFT ms": lambda f: number(f["ttft_ms"], 1),
    "TPOT ms": lambda f: number(f["tpot_ms"], 1),
    "peak MiB": _megabytes,
    "ceiling": lambda f: number(f["share_of_ceiling"]),
}


def own(group: Group) -> Table:
    """Every figure of a group, the headline's prompts, and the speed-up over all of them."""
    headline, rows = group.headline(), []
    for label in group.labels:
        figures, every = group.figures(label, headline), group.figures(label, group.lines)
        assert every is not None
        cells = ["0", *[NONE] * (len(COLUMNS) - 1)] if figures is None else [cell(figures) for cell in COLUMNS.values()]
        rows.append([group.shown_as(label), *cells, _speed_up(BASELINE, short=True)(every)])
    return Table(group.title, ["method", *COLUMNS, "x plain, all"], rows)


LENGTHS = ("num_speculative_tokens", "num_assistant_tokens", "prompt_lookup_num_tokens")
"""How methods call the drafts of a step."""


def layerskip(group: Group) -> Table:
    """The shape of LayerSkip's Tables 3 to 6 and 11."""
    columns = ["Generation", "E", "d", "Score", "Token Acc.", "Tokens per Sec.", "Time per Token (ms)", "Speedup"]
    rows = []
    for label in group.labels:
        figures, settings = group.figures(label, group.shown()), group.settings(label)
        assert figures is not None
        cells = [
            str(settings.get("exit_layer", NONE)),
            next((str(settings[name]) for name in LENGTHS if name in settings), NONE),
            scores(figures),
            NONE if figures.get("acceptance_rate") is None else f"{100 * figures['acceptance_rate']:.1f}%",
            number(figures["tokens_per_second"], 1),
            number(1000 * figures["seconds"] / figures["tokens"], 1),
            _times(figures),
        ]
        rows.append([group.shown_as(label), *cells])
    return Table(group.title, columns, rows)


def _across(title: str, groups: Sequence[Group], cells: Mapping[str, Cell], overall: bool) -> Table:
    """Methods down, tasks across, with the same cells for each; overall: tokens/s and speed-up over all tasks at the end."""
    columns = ["Methods", *(f"{group.name} {name}" for group in groups for name in cells)]
    parts = {group.temperature: [one for one in groups if one.temperature == group.temperature] for group in groups}
    if overall:
        sampled = {t: f", T = {t:g}" if t else "" for t in parts}
        columns += [f"{name}{sampled[t]}" for t in parts for name in ("Speed (tokens/s)", "Overall Speedup")]
    rows = []
    for label in dict.fromkeys(label for group in groups for label in group.labels):
        found = [group.figures(label, group.shown()) for group in groups]
        shown = next(group.shown_as(label) for group in groups if label in group.labels)
        row = [shown, *(NONE if one is None else cell(one) for one in found for cell in cells.values())]
        rows.append([*row, *(cell for part in parts.values() for cell in _overall(label, part))] if overall else row)
    return Table(title, columns, rows)


def _overall(label: str, groups: Sequence[Group]) -> list[str]:
    """Total tokens over total time of all tasks, and the same against plain decoding's."""
    shared = [group for group in groups if {label, group.called(BASELINE)} <= set(group.labels)]
    if not shared:
        return [NONE, NONE]
    rates = []
    for plain in (False, True):
        names = [(group, group.called(BASELINE) if plain else label) for group in shared]
        found = [figures for group, name in names if (figures := group.figures(str(name), group.shown()))]
        rates.append(sum(one["tokens"] for one in found) / sum(one["seconds"] for one in found))
    return [number(rates[0]), f"{rates[0] / rates[1]:.2f}x"]


def _consistency(figures: Figures) -> str:
    """The share of greedy texts that are plain decoding's."""
    same = figures["equal"].get(BASELINE)
    return NONE if same is None else number(same / figures["prompts"], 3)


def _per_step(name: str) -> Cell:
    return lambda f: number(f[name] / f["steps"], 3) if f.get("steps") else NONE


def by_category(group: Group) -> Table:
    """Speed-ups over plain decoding, categories down: prompts that do not loop with their intervals, then all."""
    plain = group.called(BASELINE)
    labels = [label for label in group.labels if label != plain]
    rows = []
    for part in group.by_category():
        headline = part.headline()
        found = [part.figures(label, headline) for label in labels]
        every = [part.figures(label, part.lines) for label in labels]
        cells, over_all = (
            [_speed_up(BASELINE, short)(one) for one in these] for these, short in ((found, False), (every, True))
        )
        rows.append([part.task or NONE, str(len(headline)), *cells, str(len(part.lines)), *over_all])
    names = [group.shown_as(label) for label in labels]
    columns = ["category", "n", *names, "n, all", *(f"{name}, all" for name in names)]
    return Table(f"{group.subject}, {group.name}: x plain by category", columns, rows)


def by_exit(group: Group) -> Table:
    """The shape of LayerSkip's Table 1: perplexity of the task's answers at every exit."""
    assert group.exits is not None
    pairs = zip(group.exits["perplexity"], group.exits["agreement"], strict=True)
    rows = [[str(layer), number(ppl), number(same)] for layer, (ppl, same) in enumerate(pairs, 1)]
    title = f"{group.subject}, {group.name}: {group.exits['tokens']} tokens of {group.exits['prompts']} answers, teacher-forced"
    return Table(title, ["exit layer", "perplexity", "agreement with the last"], rows)


BY_GROUP: dict[str, Callable[[Group], Table]] = {"own": own, "layerskip": layerskip}
ACROSS_TASKS: dict[str, dict[str, Cell]] = {
    # SWIFT's Tables 2, 3 and 8
    "swift": {"M": COLUMNS["M"], "alpha": COLUMNS["alpha"], "Acc.": scores, "Speedup": _times},
    # AdaDecode's Tables 2 and 3
    "adadecode": {"Throughput (Tokens/s)": COLUMNS["tokens/s"], "Speedup (vs. Vanilla)": _times, "Consistency": _consistency},
    # AdaSD's Tables 1 and 2: #cand and #match are draft tokens submitted and accepted a step
    "adasd": {
        "tks/sec": lambda f: number(f["tokens_per_second"], 3),
        "acc": scores,
        "#cand": _per_step("drafted"),
        "#match": _per_step("accepted"),
        "AccRate": lambda f: number(f.get("acceptance_rate"), 3),
        "speedup": lambda f: number((f["speedups"].get(BASELINE) or {}).get("value"), 3),
    },
}
"""Layout -> the cells that every method has for every task."""
LAYOUTS = (*BY_GROUP, *ACROSS_TASKS)


def tables(groups: Sequence[Group], layout: str = "own") -> list[Table]:
    """All tables of a run in a layout. ValueError for one that does not exist."""
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}; there are {', '.join(LAYOUTS)}")
    if layout in BY_GROUP:
        return [table for group in groups for table in _of_group(group, BY_GROUP[layout])]
    by_model: dict[str, list[Group]] = {}
    for group in groups:
        by_model.setdefault(group.subject, []).append(group)
    return [_across(model, own_groups, ACROSS_TASKS[layout], layout == "swift") for model, own_groups in by_model.items()]


def _of_group(group: Group, layout: Callable[[Group], Table]) -> list[Table]:
    """A group's table and, where it has them, those of its categories, layer sets, exit heads, draft models and exits."""
    parts = [part(group) for part in (by_category, by_layer_set, by_exit_head, by_draft_model)]
    exits = [by_exit(group)] if group.exits else []
    return [layout(group), *(table for table in parts if table.rows), *exits]


def csv_of(groups: Sequence[Group]) -> str:
    """Every figure as numbers, a row for every group, method and choice of prompts ("headline": those that do not loop)."""
    rows: list[dict[str, Any]] = []
    for group in groups:
        for label in group.labels:
            for prompts, lines in (("headline", group.headline()), ("all", group.lines)):
                if (found := group.figures(label, lines)) is not None:
                    key = {"model": group.subject, "task": group.task, "temperature": group.temperature}
                    rows.append({**key, "method": group.shown_as(label), "prompts_taken": prompts, **_flat(found)})
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), restval="")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _flat(found: Figures, before: str = "") -> dict[str, Any]:
    """Nested figures as columns, their names joined by dots."""
    flat: dict[str, Any] = {}
    for name, value in found.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{before}{name}.")
        else:
            flat[f"{before}{name}"] = value
    return flat
