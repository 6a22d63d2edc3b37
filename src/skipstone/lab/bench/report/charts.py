"""The papers' figures from a run, as SVG pictures for the report's page."""

import io
import json
import math
from collections.abc import Iterable, Mapping
from itertools import accumulate, cycle
from textwrap import fill
from typing import Any

from skipstone.lab.bench.plan import BASELINE
from skipstone.lab.bench.report.aggregate import PARTS, MeasurementGroup, tokens_per_second
from skipstone.methods.adadecode.adadecode import AdaDecode
from skipstone.utils.extras import installed

SIZE = (6.4, 3.6)  # inches
NAME_WIDTH = 20  # letters of a line; names are wrapped to fit fixed margins, because an automatic layout is slow
WINDOW = 4  # prompts per point of a speed curve
THREE_STYLES = ("o-", "s--", "^:")  # of the curves by threshold
MAX_CHANGES = 40  # latest changes of a layer set in a picture
Point = tuple[float, float]


def charts(group: MeasurementGroup) -> dict[str, str]:
    """Title -> SVG of every picture that the group has data for. ImportError that says what to install without matplotlib."""
    figures = {group.display_name(label): group.figures(label, group.shown_lines()) for label in group.labels}
    by_name = {name: one for name, one in figures.items() if one is not None}
    drawn = {
        "Speed-up over plain decoding": _speedups(by_name),
        "Tokens a step": _step_lengths(by_name),
        "Where a step's time goes": _step_times(by_name),
        "Speed against settings": _settings(group),
        "Speed and score": _speed_and_score(by_name),
        "What every exit knows": _exits(group),
        "Speed and early predictions by threshold": _curves("threshold", "", by_threshold(group), THREE_STYLES, reference=1),
        **_layer_sets(group),
    }
    return {title: _svg(figure, f"{title}: {group.title}") for title, figure in drawn.items() if figure is not None}


def speedup_chart(figures: Mapping[str, Any], title: str) -> str:
    """SVG of speed-ups over plain decoding. figures: name -> figures with `speedups`, two names at least."""
    return _svg(_speedups(figures), title)


def _axes(x: str = "", y: str = "", left: float = 0.12, reference: float | None = None) -> tuple[Any, Any]:
    """A figure and its axes. x, y: labels. left: the margin as a share of the width. reference: height of a horizontal line."""
    figure = installed("matplotlib.figure", "pictures need matplotlib").Figure(figsize=SIZE)
    axes = figure.subplots(gridspec_kw={"left": left, "right": 0.9, "bottom": 0.22, "top": 0.9})
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if reference is not None:
        axes.axhline(reference, color="black", linewidth=0.8)
    return figure, axes


def _curves(x: str, y: str, curves: Mapping[str, Iterable[Point]], styles: Iterable[str], **more: Any) -> Any:
    """A figure with one curve per name, or None without curves. more: arguments of `_axes`."""
    if not curves:
        return None
    figure, axes = _axes(x, y, **more)
    for (name, points), style in zip(curves.items(), cycle(styles), strict=False):
        axes.plot(*zip(*points, strict=True), style, label=name)
    axes.legend(fontsize=7)
    return figure


def _svg(figure: Any, title: str) -> str:
    """SVG without XML declaration and date. Words stay words, and equal figures give equal bytes."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    figure.suptitle(title.replace("$", r"\$"), fontsize=9)
    text = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "skipstone"}):
        FigureCanvasSVG(figure).print_svg(text, metadata={"Date": None})  # `savefig` lays out and draws twice
    return "".join(text.getvalue().partition("<svg")[1:])


def _speedups(figures: Mapping[str, Any]) -> Any:
    """Bars with 95 % intervals."""
    intervals = {name: one["speedups"][BASELINE] for name, one in figures.items() if BASELINE in one["speedups"]}
    if len(intervals) < 2:
        return None
    figure, axes = _axes(y="x plain decoding", reference=1)
    values = [one["value"] for one in intervals.values()]
    errors = zip(*((one["value"] - one["low"], one["high"] - one["value"]) for one in intervals.values()), strict=True)
    axes.bar([fill(name, NAME_WIDTH) for name in intervals], values, yerr=[*errors], capsize=4, color="#4878a8")
    axes.tick_params(axis="x", labelrotation=20)
    return figure


def _step_lengths(figures: dict[str, Any]) -> Any:
    """Committed tokens per step, as shares of the steps."""
    histograms = {name: one["acceptance_histogram"] for name, one in figures.items() if one.get("acceptance_rate") is not None}
    if not histograms:
        return None
    figure, axes = _axes("tokens a step", "share of steps")
    width = 0.8 / len(histograms)
    for index, (name, histogram) in enumerate(histograms.items()):
        total = sum(histogram.values())
        places = [int(accepted) + 1 + (index - (len(histograms) - 1) / 2) * width for accepted in histogram]
        axes.bar(places, [count / total for count in histogram.values()], width, label=name)
    axes.legend()
    return figure


def _step_times(figures: dict[str, Any]) -> Any:
    """Milliseconds of a step, its parts stacked."""
    timed = {fill(name, NAME_WIDTH): one for name, one in figures.items() if "draft_ms_per_step" in one}
    if not timed:
        return None
    figure, axes = _axes("ms a step", left=0.27)
    bottom = [0.0] * len(timed)
    for part in PARTS:
        values = [one[f"{part}_ms_per_step"] for one in timed.values()]
        axes.barh([*timed], values, left=bottom, label=part)
        bottom = [low + value for low, value in zip(bottom, values, strict=True)]
    axes.legend()
    return figure


def _settings(group: MeasurementGroup) -> Any:
    """Tokens per second of the best candidates while tuning, by the first setting that had several values."""
    trials = {label: line["trials"] for label, line in group.tuned.items()}
    for name in ("exit_layer", "confidence_threshold", "num_speculative_tokens", "num_assistant_tokens"):
        points = {
            label: [(value, one["tokens_per_second"]) for one in tried if (value := one["settings"].get(name)) is not None]
            for label, tried in trials.items()
        }
        if len({value for tried in points.values() for value, _ in tried}) > 1:
            curves = {label: sorted(tried, key=str) for label, tried in points.items() if tried}
            return _curves(name, "tokens/s while tuning", curves, "o")
    return None


def _speed_and_score(figures: dict[str, Any]) -> Any:
    """Speed against the first score; methods that another one beats are pale."""
    scored = {name: one for name, one in figures.items() if one["scores"]}
    points = {name: (one["tokens_per_second"], next(iter(one["scores"].values()))["value"]) for name, one in scored.items()}
    if len(points) < 2 or all(figures[name]["lossless"] for name in points):
        return None
    figure, axes = _axes("tokens/s", next(score for one in figures.values() for score in one["scores"]))
    for name, (speed, score) in points.items():
        beaten = any(a >= speed and b >= score and (a, b) != (speed, score) for a, b in points.values())
        axes.plot(speed, score, "o", alpha=0.35 if beaten else 1)
        axes.annotate(name, (speed, score), textcoords="offset points", xytext=(5, 5))
    return figure


def _exits(group: MeasurementGroup) -> Any:
    """Perplexity of the task's answers at every exit, and its agreement with the last layer."""
    if group.exits is None:
        return None
    figure, axes = _axes("exit layer")
    layers = range(1, len(group.exits["perplexity"]) + 1)
    axes.set_yscale("log")
    for side, name, label, style, color in (
        (axes, "perplexity", "perplexity", "o-", "#4878a8"),
        (axes.twinx(), "agreement", "agreement with the last layer", "s--", "#a85448"),
    ):
        side.plot(layers, group.exits[name], style, color=color)
        side.set_ylabel(label, color=color)
    return figure


def by_threshold(group: MeasurementGroup) -> dict[str, list[Point]]:
    """AdaDecode's Figure 5: name -> (threshold, value) of rows that differ in their threshold alone.

    Rows with a guard are left out, because other thresholds hold under it. Empty with fewer than three rows.
    """
    families: dict[str, dict[float, tuple[float, float, float]]] = {}
    for label in group.labels:
        if group.about["methods"][label]["method"] != AdaDecode.name or label in group.tuned:
            continue
        settings = {"guard": AdaDecode.guard, "confidence_threshold": AdaDecode.confidence_threshold, **group.settings(label)}
        figures = group.over_all(label)
        early, speedup = figures.get("early_predictions"), figures.get("decode_speedup")
        if not settings["guard"] and early and speedup is not None:
            threshold = settings.pop("confidence_threshold")
            family = families.setdefault(json.dumps(settings, sort_keys=True), {})
            family[threshold] = (speedup, early["share"], early["rejected"] or 0.0)
    points = max(families.values(), key=len, default={})
    if len(points) < 3:
        return {}
    names = ("x plain decoding", "predicted early", "rejected")
    return {name: [(threshold, points[threshold][i]) for threshold in sorted(points)] for i, name in enumerate(names)}


def _layer_sets(group: MeasurementGroup) -> dict[str, Any]:
    """SWIFT's Figures 6, 7 and 12: speed and matchness along the text, and the layer sets over time."""
    last = {label: group.rows(label)[-1].get("known") or {} for label in group.labels}
    if not (reports := {label: known for label, known in last.items() if "skipped" in known}):
        return {}
    labels = {group.display_name(label): label for label in group.labels if label != group.label_of(BASELINE)}
    speed = {name: _along_text(group, label)[0] for name, label in labels.items()}
    known = {name: _along_text(group, label)[1] for name, label in labels.items() if label in reports}
    maps = {name: _layer_map(reports[labels[name]], group.about["layers"]) for name in known}
    return {
        "Speed along the text": _curves("tokens", f"x plain decoding, {WINDOW} prompts each", speed, [".-"], reference=1),
        "Matchness along the text": _curves("tokens", "matchness", known, [".-"]),
        **{f"Layers left out, {name}": drawn for name, drawn in maps.items()},
    }


def _along_text(group: MeasurementGroup, label: str) -> tuple[list[Point], list[Point]]:
    """(tokens so far, speed-up over plain decoding of the latest WINDOW prompts) and (tokens so far, matchness or nan), a point
    per prompt."""
    pairs = group.pairs_with_plain(label)
    tokens = [*accumulate(row["tokens"] for row, _ in pairs)]
    windows = (zip(*pairs[max(0, end - WINDOW) : end], strict=True) for end in range(1, len(pairs) + 1))
    speeds = (tokens_per_second(own) / tokens_per_second(plain) for own, plain in windows)
    known = ((row.get("known") or {}).get("matchness") for row, _ in pairs)
    matchness = (math.nan if value is None else value for value in known)
    return [*zip(tokens, speeds, strict=True)], [*zip(tokens, matchness, strict=True)]


def _layer_map(report: Mapping[str, Any], layers: int) -> Any:
    """The skipped sublayers at the latest changes of the layer set, a column each: all attentions, then all MLPs."""
    history = report["history"][-MAX_CHANGES:]
    if len(history) < 2:
        return None
    sets = [[layer in one[kind] for kind in ("attention", "mlp") for layer in range(layers)] for one in history]
    figure, axes = _axes("sets judged before the change", reference=layers - 0.5)
    axes.imshow([*zip(*sets, strict=True)], aspect="auto", interpolation="nearest", cmap="Blues", vmin=0, vmax=1.4)
    shown = range(0, len(history), max(1, len(history) // 8))
    axes.set_xticks(list(shown), [str(history[place]["evaluation"]) for place in shown])
    axes.set_yticks([0, layers - 1, layers, 2 * layers - 1], ["attention 0", str(layers - 1), "MLP 0", str(layers - 1)])
    return figure
