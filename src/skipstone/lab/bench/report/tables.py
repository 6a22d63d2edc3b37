"""Figures as tables, in our own layout and in those of the papers.

Further tables show layer sets (SWIFT), exit heads (AdaDecode), and draft models with the cost of lossy methods (AdaSD,
Tables 1 to 5). They are over all prompts.
"""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from skipstone.lab.bench.plan import BASELINE, THEIRS
from skipstone.lab.bench.report.aggregate import EARLY_EXIT, PARTS, VANILLA, MeasurementGroup, share, tokens_per_second
from skipstone.lab.bench.run_file import Line
from skipstone.lab.timing.measure import WARM_UP_TOKENS
from skipstone.lab.timing.statistics import LOOPING, NGRAM
from skipstone.methods.adadecode.adadecode import AdaDecode

NONE = "-"  # a cell without a figure
Figures = Mapping[str, Any]  # what `MeasurementGroup.figures` returns, and what `_figures` adds
LEGEND = f"""\
All figures but "first s" are steady: of requests after a warm-up. first s: seconds of the first request for at most
{WARM_UP_TOKENS} tokens, with its set-up work. If methods share work, such as a copy of the weights, the first one does it.
Copies that the plan names are there before.
x plain, x HF, x HF exit: speed-up over {BASELINE}, {THEIRS} and {EARLY_EXIT}, total tokens over total time, prefill included,
with 95 % paired bootstrap intervals over prompts. Prompts count only if the share of repeated {NGRAM}-grams (repeats) is below
{LOOPING} in all rows but those of an early exit alone; the last column takes all prompts. ceiling: share of the speed that the
memory's bandwidth allows plain decoding. TTFT, TPOT: time to the first token and per further token. ms a step: draft + scoring
+ other. reads: share of the weights that a draft step reads, in bytes. c, v: time of a draft step and of scoring in plain
steps. predicted: the speed-up without setup and prefill by SWIFT's Eq. 6, M / ((M - 1) c / alpha + v); v = 1: the same as the
paper has it; reached: the share of "predicted" that was reached. by costs: the speed-up that M and `skipstone costs` predict
without this run / the measured one, both without setup and prefill.
equal: greedy texts identical to {THEIRS}. score: with 95 % intervals, Wilson's for scores of 0 and 1 and bootstraps over
prompts for others; score - plain: the mean difference to {BASELINE}, prompt by prompt, with a paired bootstrap interval."""


@dataclass(frozen=True)
class Table:
    """A title, the names of the columns, and rows of texts."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """The table with its title as a heading."""
        rows = [[cell.replace("|", "\\|") for cell in row] for row in (self.columns, ["---"] * len(self.columns), *self.rows)]
        return f"### {self.title}\n\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows)

    def csv(self) -> str:
        """The table with its title in the first column."""
        return _csv([["table", *self.columns], *([self.title, *row] for row in self.rows)])


def _csv(rows: Iterable[Iterable[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue()


def fill(template: str, figures: Figures) -> str:
    """A cell: a template with its figures, or a dash if one of them is missing."""
    try:
        return template.format_map(figures)
    except (KeyError, TypeError):  # TypeError: a figure is None
        return NONE


SCORE = "{name} {value:.3f} ({low:.3f}-{high:.3f})"
PLAIN = f"{{speedups[{BASELINE}][value]:.2f}}"
COLUMNS = {
    "n": "{prompts}",
    "tokens/s": "{tokens_per_second:.1f}",
    "x plain": f"{{intervals[{BASELINE}]}}",
    "x HF": f"{{intervals[{THEIRS}]}}",
    "x HF exit": f"{{intervals[{EARLY_EXIT}]}}",
    "first s": "{first_request_seconds:.2f}",
    "M": "{mean_acceptance_length:.2f}",
    "alpha": "{acceptance_rate:.2f}",
    "ms a step": "{step_milliseconds}",
    "reads": "{weights_read:.2f}",
    "c": "{draft_step_cost:.2f}",
    "v": "{scoring_cost:.2f}",
    "v = 1": "{paper_speedup:.2f}",
    "predicted": "{predicted_speedup:.2f}",
    "reached": "{measured_over_predicted:.2f}",
    "by costs": "{costed_speedup:.2f} / {decode_speedup:.2f}",
    "equal": f"{{equal[{THEIRS}]}}/{{prompts}}",
    "score": "{score}",
    "repeats": "{repeated_share:.2f}",
    "TTFT ms": "{ttft_ms:.1f}",
    "TPOT ms": "{tpot_ms:.1f}",
    "peak MiB": "{peak_mebibytes:.0f}",
    "ceiling": "{share_of_ceiling:.2f}",
}
ACROSS_TASKS = {
    "tasks": {"tokens/s": COLUMNS["tokens/s"], "x plain ({n})": COLUMNS["x plain"]},
    # SWIFT's Tables 2, 3 and 8
    "swift": {"M": COLUMNS["M"], "alpha": COLUMNS["alpha"], "Acc.": "{score}", "Speedup": f"{PLAIN}x"},
    # AdaDecode's Tables 2 and 3; consistency is the share of greedy texts that equal plain decoding's
    "adadecode": {
        "Throughput (Tokens/s)": COLUMNS["tokens/s"],
        "Speedup (vs. Vanilla)": f"{PLAIN}x",
        "Consistency": "{consistency:.3f}",
    },
    # AdaSD's Tables 1 and 2: JSDist is the mean threshold, #cand and #match are draft tokens and accepted tokens per step
    "adasd": {
        "tks/sec": "{tokens_per_second:.3f}",
        "JSDist": "{means[distance_threshold]:.3f}",
        "acc": "{score}",
        "acc - plain": "{score_change}",
        "#cand": "{per_step[drafted]:.3f}",
        "#match": "{per_step[accepted]:.3f}",
        "AccRate": "{acceptance_rate:.3f}",
        "speedup": f"{{speedups[{VANILLA}][value]:.3f}}",
    },
}
"""Layout -> the cells that every method has for every task. {n} stands for the number of prompts."""
BY_METHOD = {
    "own": {"method": "{name}", **COLUMNS, "x plain, all": "{all[speedups][autoregressive][value]:.2f}"},
    # LayerSkip's Tables 3 to 6 and 11
    "layerskip": {
        "Generation": "{name}",
        "E": "{settings[exit_layer]}",
        "d": "{draft_length}",
        "Score": "{score}",
        "Token Acc.": "{acceptance_rate:.1%}",
        "Tokens per Sec.": COLUMNS["tokens/s"],
        "Time per Token (ms)": "{milliseconds_per_token:.1f}",
        "Speedup": f"{PLAIN}x",
    },
}
"""Layout -> the cells that every method has in a table of its group. `all` has the figures over all prompts."""
DRAFT_LENGTHS = ("num_speculative_tokens", "num_assistant_tokens", "prompt_lookup_num_tokens", "num_draft_tokens")
"""Names of the draft tokens per step among the settings of methods."""
NO_FIGURES: Figures = {"prompts": 0, "speedups": {}, "equal": {}, "means": {}, "scores": {}, "score_changes": {}}


def _figures(group: MeasurementGroup, label: str, lines: Sequence[Line]) -> dict[str, Any]:
    """What cells know of a method: its name, settings and figures over some lines, some of them as texts."""
    return cells_of(group.display_name(label), group.settings(label), group.figures(label, lines) or NO_FIGURES)


def cells_of(name: str, settings: Mapping[str, Any], figures: Figures) -> dict[str, Any]:
    """A method's figures (`MeasurementGroup.figures`) with the texts that templates of cells name."""
    speed, memory, steps = (figures.get(name) for name in ("tokens_per_second", "peak_memory", "steps"))
    equal, early, has_drafts = figures["equal"].get(BASELINE), figures.get("early_predictions"), bool(figures.get("drafted"))
    is_known = figures.get("lossless") or figures["means"]  # without verification nothing counts overruled tokens
    spent = {part: figures.get(f"{part}_ms_per_step") for part in PARTS}
    exits = early["exits"] if early else {}
    return {
        **figures,
        "name": name,
        "settings": settings,
        "intervals": {reference: interval(**one) for reference, one in figures["speedups"].items()},
        "score": ", ".join(SCORE.format(name=name, **one) for name, one in figures["scores"].items()) or NONE,
        "score_change": ", ".join(_change(**one) for one in figures["score_changes"].values()) or NONE,
        "step_milliseconds": "+".join(f"{spent[part]:.1f}" for part in PARTS[1:] if spent[part] is not None) or NONE,
        "search_share": share(spent["search"] or 0.0, sum(one or 0.0 for one in spent.values())),
        "milliseconds_per_token": speed and 1000 / speed,
        "peak_mebibytes": memory and memory / 2**20,
        "per_step": {name: figures[name] / steps for name in ("drafted", "accepted")} if steps and has_drafts else {},
        "overruled_share": figures["overruled"] / figures["tokens"] if has_drafts and is_known else None,
        "consistency": None if equal is None else equal / figures["prompts"],
        "same": NONE if equal is None else f"{equal}/{figures['prompts']}",
        "threshold": settings.get("confidence_threshold", AdaDecode.confidence_threshold if early else None),
        "at_exits": ", ".join(f"{layer}: {_exit_shares(**counts)}" for layer, counts in exits.items()) or NONE,
        "draft_length": next((settings[name] for name in DRAFT_LENGTHS if name in settings), NONE),
    }


def interval(value: float, low: float, high: float) -> str:
    """A cell with a value and its interval."""
    exact = high - low < 1e-9  # a method compared with itself, or a single prompt
    return f"{value:.2f}" if exact else f"{value:.2f} ({low:.2f}-{high:.2f})"


def _change(value: float, low: float, high: float) -> str:
    return f"{value:+.3f}" if low == high else f"{value:+.3f} ({low:+.3f} to {high:+.3f})"


def _table(group: MeasurementGroup, about: str, cells: Mapping[str, str], rows: Iterable[Figures]) -> Table:
    """A further table of a group, over all prompts."""
    title = f"{group.subject}, {group.name}: {about}"
    return Table(title, [*cells], [[fill(cell, row) for cell in cells.values()] for row in rows])


def _by_method(group: MeasurementGroup, layout: str) -> Table:
    """A row per method: our own layout over the headline's prompts, LayerSkip's over the prompts that are shown."""
    lines = group.headline() if layout == "own" else group.shown_lines()
    rows = [_figures(group, label, lines) | {"all": group.over_all(label)} for label in group.labels]
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
            for name, cell in ACROSS_TASKS[layout].items():
                row.append((f"{group.name} {name.format(n=prompts)}", fill(cell, figures)))
        for t, parts in by_temperature.items():
            pairs = [pair for group in parts for pair in group.pairs_with_plain(label, group.shown_lines())]
            own, plain = map(tokens_per_second, zip(*pairs, strict=True)) if pairs else (None, 1.0)
            suffix, overall = f", T = {t:g}" if t else "", {"own": own, "ratio": own and own / plain}
            row.append((f"Speed (tokens/s){suffix}", fill("{own:.2f}", overall)))
            row.append((f"Overall Speedup{suffix}", fill("{ratio:.2f}x", overall)))
        rows.append(row)
    return _of_pairs(groups[0].subject, rows)


def _of_pairs(title: str, rows: Sequence[Sequence[tuple[str, str]]]) -> Table:
    """A table of rows of (column, cell). Columns may have the same name: of one task in two runs, for example."""
    return Table(title, [column for column, _ in rows[0]] if rows else [], [[cell for _, cell in row] for row in rows])


def _by_category(group: MeasurementGroup) -> Table:
    """Speed-ups over plain decoding, categories down: prompts that do not loop, with intervals, then all prompts."""
    labels = [label for label in group.labels if label != group.label_of(BASELINE)]
    rows = []
    for part in group.by_category():
        row = [("category", part.task or NONE)]
        for suffix, lines, cell in (("", part.headline(), COLUMNS["x plain"]), (", all", part.lines, PLAIN)):
            row.append((f"n{suffix}", str(len(lines))))
            row += [(group.display_name(label) + suffix, fill(cell, _figures(part, label, lines))) for label in labels]
        rows.append(row)
    return _of_pairs(f"{group.subject}, {group.name}: x plain by category", rows)


EXIT_FIGURES = {
    "perplexity": "perplexity",
    "agreement": "agreement with the last",
    "last_word_accuracy": "last word right",
    "choice_accuracy": "choice right",
    "choice_accuracy_per_character": "choice right, per character",
}
"""Figure of every exit -> its column."""


def _by_exit(group: MeasurementGroup) -> Table:
    """The layout of LayerSkip's Table 1: how well every exit predicts the task's answers."""
    if group.exits is None:
        return Table("", [], [])
    known = {name: group.exits[name] for name in EXIT_FIGURES if name in group.exits}
    rows = [
        {"layer": layer, **dict(zip(known, row, strict=True))} for layer, row in enumerate(zip(*known.values(), strict=True), 1)
    ]
    cells = {"exit layer": "{layer}", **{EXIT_FIGURES[name]: f"{{{name}:.2f}}" for name in known}}
    return _table(group, f"{group.exits['tokens']} tokens of {group.exits['prompts']} answers, teacher-forced", cells, rows)


LAYER_SETS = {
    "method": "{name}",
    "skip ratio": "{layer_set[skip_ratio]:.2f}",
    "left out": "{layer_set[left_out]}",
    "matchness": "{layer_set[matchness]:.2f}",
    "judged": "{layer_set[evaluations]}",
    "steps that drafted": "{drafting_share:.0%}",
    "time in search": "{search_share:.1%}",
    "c": COLUMNS["c"],
    "v": COLUMNS["v"],
    "E, v = 1": COLUMNS["v = 1"],
    "E": COLUMNS["predicted"],
    "decode speed-up": "{decode_speedup:.2f}",
}
EXIT_HEADS = {
    "method": "{name}",
    "threshold": "{threshold:.2f}",
    "tokens predicted early": "{early_predictions[share]:.0%}",
    "rejected": "{early_predictions[rejected]:.0%}",
    "of the tests at each exit (rejected)": "{at_exits}",
    "same texts": "{same}",
    "decode speed-up": "{decode_speedup:.2f}",
}
DRAFT_MODELS = {
    "method": "{name}",
    "tokens/s": COLUMNS["tokens/s"],
    "#cand": "{per_step[drafted]:.2f}",
    "#match": "{per_step[accepted]:.2f}",
    "AccRate": "{acceptance_rate:.3f}",
    "JSD accepted": "{means[distance_accepted]:.3f}",
    "JSD rejected": "{means[distance_rejected]:.3f}",
    "JSD threshold": "{means[distance_threshold]:.3f}",
    "bits accepted": "{means[entropy_accepted]:.3f}",
    "bits rejected": "{means[entropy_rejected]:.3f}",
    "overruled": "{overruled_share:.1%}",
    "log-likelihood": "{log_likelihood:.3f}",
    "score": "{score}",
    "score - plain": "{score_change}",
}


def by_layer_set(group: MeasurementGroup) -> Table:
    """Final layer sets, with the speed-up that SWIFT's Eq. 6 expects and the measured one.

    c and v are the costs of a draft pass and of scoring, in plain steps; E is Eq. 6 with v = 1 and with the measured v.
    """
    rows = [row for row in _rows(group) if row["layer_set"]]
    return _table(group, "layer sets, all prompts", LAYER_SETS, rows)


def by_exit_head(group: MeasurementGroup) -> Table:
    """One row per AdaDecode: threshold, early predictions overall and per exit, and texts equal to plain decoding's."""
    rows = [row for row in _rows(group) if row["early_predictions"]]
    return _table(group, "early predictions, all prompts", EXIT_HEADS, rows)


def by_draft_model(group: MeasurementGroup) -> Table:
    """One row per method, if one of them may change the text or reports entropies and distances."""
    rows = _rows(group)
    is_relevant = any(row["means"] or row["log_likelihood"] is not None for row in rows)
    return _table(group, "drafts, and what keeping them costs, all prompts", DRAFT_MODELS, rows if is_relevant else [])


def _rows(group: MeasurementGroup) -> list[Figures]:
    """The figures of every method over all prompts."""
    return [_figures(group, label, group.lines) for label in group.labels]


def _exit_shares(tests: int, predicted: int, accepted: int, rejected: int) -> str:
    """The share of tests that predicted, and of judged predictions that were rejected."""
    shares = {"predicted": share(predicted, tests), "rejected": share(rejected, accepted + rejected)}
    return f"{fill('{predicted:.0%}', shares)} ({fill('{rejected:.0%}', shares)})"


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
