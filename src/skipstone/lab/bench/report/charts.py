"""The papers' figures out of a run: pictures as SVG, for the report's page."""

import io
import json
import math
from collections.abc import Mapping
from itertools import accumulate
from textwrap import fill
from typing import Any

from skipstone.lab.bench.plan import BASELINE
from skipstone.lab.bench.report.aggregate import PARTS, MeasurementGroup, tokens_per_second
from skipstone.lab.bench.report.tables import learnt, rates
from skipstone.methods.adadecode.adadecode import AdaDecode
from skipstone.utils.extras import installed

SIZE = (6.4, 3.6)  # inches
NAME = 20  # longer names are wrapped, so that fixed margins hold them: laying out every picture anew is half of a report's time
WINDOW = 4  # prompts whose tokens and seconds make a point of a curve
CHANGES = 40  # most changes of a layer set that a picture has room for, the latest


def charts(group: MeasurementGroup) -> dict[str, str]:
    """Title -> SVG of what can be drawn of a group, titled. ImportError that says what to install without matplotlib."""
    found = {group.shown_as(label): group.figures(label, group.shown()) for label in group.labels}
    figures = {name: one for name, one in found.items() if one is not None}
    drawn = {
        "Speed-up over plain decoding": _speedups(figures),
        "Tokens a step": _lengths(figures),
        "Where a step's time goes": _breakdown(figures),
        "Speed against settings": _settings(group),
        "Speed and score": _pareto(figures),
        "What every exit knows": _exits(group),
        "Speed and early predictions by threshold": _thresholds(group),
        **_learnt(group),
    }
    return {title: _svg(figure, f"{title}: {group.title}") for title, figure in drawn.items() if figure is not None}


def _axes(x: str = "", y: str = "", left: float = 0.12, line: float | None = None) -> tuple[Any, Any]:
    """A figure and its axes. x, y: what stands at them. left: the margin, as a share of the width. line: a height at which
    a line is drawn."""
    figure = installed("matplotlib.figure", "pictures need matplotlib").Figure(figsize=SIZE)
    axes = figure.subplots(gridspec_kw={"left": left, "right": 0.9, "bottom": 0.22, "top": 0.9})
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if line is not None:
        axes.axhline(line, color="black", linewidth=0.8)
    return figure, axes


def _svg(figure: Any, title: str) -> str:
    """Without the XML declaration and a date; words stay words, and the same figures make the same bytes."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    figure.suptitle(title.replace("$", r"\$"), fontsize=9)
    text = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "skipstone"}):
        FigureCanvasSVG(figure).print_svg(text, metadata={"Date": None})  # `savefig` lays out and draws twice
    return "".join(text.getvalue().partition("<svg")[1:])


def _speedups(figures: dict[str, Any]) -> Any:
    """Bars with 95 % intervals."""
    found = {label: one["speedups"][BASELINE] for label, one in figures.items() if BASELINE in one["speedups"]}
    if len(found) < 2:
        return None
    figure, axes = _axes(y="x plain decoding", line=1)
    ends = [(one["value"], one["value"] - one["low"], one["high"] - one["value"]) for one in found.values()]
    values, *errors = zip(*ends, strict=True)
    axes.bar([fill(name, NAME) for name in found], values, yerr=errors, capsize=4, color="#4878a8")
    axes.tick_params(axis="x", labelrotation=20)
    return figure


def _lengths(figures: dict[str, Any]) -> Any:
    """How many tokens the steps committed, as shares of steps."""
    found = {label: one["acceptance_histogram"] for label, one in figures.items() if one.get("acceptance_rate") is not None}
    if not found:
        return None
    figure, axes = _axes("tokens a step", "share of steps")
    width = 0.8 / len(found)
    for index, (label, histogram) in enumerate(found.items()):
        total = sum(histogram.values())
        places = [int(accepted) + 1 + (index - (len(found) - 1) / 2) * width for accepted in histogram]
        axes.bar(places, [count / total for count in histogram.values()], width, label=label)
    axes.legend()
    return figure


def _breakdown(figures: dict[str, Any]) -> Any:
    """Milliseconds of a step, drafting, scoring and the rest on top of one another."""
    found = {label: one for label, one in figures.items() if "draft_ms_per_step" in one}
    if not found:
        return None
    figure, axes = _axes("ms a step", left=0.27)
    names, bottom = [fill(name, NAME) for name in found], [0.0] * len(found)
    for part in PARTS:
        values = [one[f"{part}_ms_per_step"] for one in found.values()]
        axes.barh(names, values, left=bottom, label=part)
        bottom = [low + value for low, value in zip(bottom, values, strict=True)]
    axes.legend()
    return figure


def _settings(group: MeasurementGroup) -> Any:
    """Of what was tuned: tokens a second of the best candidates, by the first setting of which there were several."""
    tried = [trial["settings"] for line in group.tuned.values() for trial in line["trials"]]
    names = ("exit_layer", "confidence_threshold", "num_speculative_tokens", "num_assistant_tokens")
    name = next((one for one in names if len({settings.get(one) for settings in tried} - {None}) > 1), None)
    if name is None:
        return None
    figure, axes = _axes(name, "tokens/s while tuning")
    for label, line in group.tuned.items():
        pairs = [(trial["settings"].get(name), trial["tokens_per_second"]) for trial in line["trials"]]
        if points := [point for point in pairs if point[0] is not None]:
            axes.plot(*zip(*sorted(points, key=str), strict=True), "o", label=label)
    axes.legend()
    return figure


def _pareto(figures: dict[str, Any]) -> Any:
    """Speed against the first score; what only loses is pale."""
    scored = {label: one for label, one in figures.items() if one["scores"]}
    found = {label: (one["tokens_per_second"], next(iter(one["scores"].values()))) for label, one in scored.items()}
    if len(found) < 2 or all(figures[label]["lossless"] for label in found):
        return None
    figure, axes = _axes("tokens/s", next(name for one in figures.values() for name in one["scores"]))
    for label, (speed, score) in found.items():
        beaten = any(a >= speed and b >= score and (a, b) != (speed, score) for a, b in found.values())
        axes.plot(speed, score, "o", alpha=0.35 if beaten else 1)
        axes.annotate(label, (speed, score), textcoords="offset points", xytext=(5, 5))
    return figure


def _exits(group: MeasurementGroup) -> Any:
    """Perplexity of the task's answers at every exit, and how often an exit agrees with the last."""
    if group.exits is None:
        return None
    figure, axes = _axes("exit layer")
    layers = range(1, len(group.exits["perplexity"]) + 1)
    axes.plot(layers, group.exits["perplexity"], "o-", color="#4878a8")
    axes.set_yscale("log")
    axes.set_ylabel("perplexity", color="#4878a8")
    other = axes.twinx()
    other.plot(layers, group.exits["agreement"], "s--", color="#a85448")
    other.set_ylabel("agreement with the last layer", color="#a85448")
    return figure


def _thresholds(group: MeasurementGroup) -> Any:
    """AdaDecode's Figure 5."""
    if not (curves := by_threshold(group)):
        return None
    figure, axes = _axes("threshold", line=1)
    for (name, points), style in zip(curves.items(), ("o-", "s--", "^:"), strict=True):
        axes.plot(*zip(*points, strict=True), style, label=name)
    axes.legend(fontsize=7)
    return figure


def by_threshold(group: MeasurementGroup) -> dict[str, list[tuple[float, float]]]:
    """AdaDecode, Figure 5: name -> (threshold, value) of the rows that differ in their threshold alone, without a guard, under
    which other thresholds hold; empty with fewer than three."""
    families: dict[str, dict[float, tuple[float, float, float]]] = {}
    for label in group.labels:
        if group.about["methods"][label]["method"] != AdaDecode.name or label in group.tuned:
            continue
        settings = group.settings(label)
        early, wrong = rates(group, label)
        speed_up = group.over_all(label).get("decode_speedup")
        if settings.get("guard", AdaDecode.guard) or early is None or speed_up is None:
            continue
        threshold = settings.get("confidence_threshold", AdaDecode.confidence_threshold)
        rest = json.dumps({name: value for name, value in settings.items() if name != "confidence_threshold"}, sort_keys=True)
        families.setdefault(rest, {})[threshold] = (speed_up, early, wrong or 0.0)
    points = max(families.values(), key=len, default={})
    if len(points) < 3:
        return {}
    names = ("x plain decoding", "predicted early", "rejected")
    return {name: [(one, points[one][place]) for one in sorted(points)] for place, name in enumerate(names)}


def _learnt(group: MeasurementGroup) -> dict[str, Any]:
    """SWIFT's Figures 6, 7 and 12: speed and matchness as the text grows, and which layers were left out when."""
    known = learnt(group)
    if not known:
        return {}
    speeds, matchness = _axes("tokens", f"x plain decoding, {WINDOW} prompts each", line=1), _axes("tokens", "matchness")
    for label in (label for label in group.labels if label != group.called(BASELINE)):
        places, speed, seen = along(group, label)
        speeds[1].plot(places, speed, ".-", label=group.shown_as(label))
        if label in known:
            matchness[1].plot(places, [math.nan if one is None else one for one in seen], ".-", label=group.shown_as(label))
    for _, axes in (speeds, matchness):
        axes.legend(fontsize=7)
    maps = {f"Layers left out, {group.shown_as(label)}": _map(one, group.about["layers"]) for label, one in known.items()}
    return {"Speed along the text": speeds[0], "Matchness along the text": matchness[0], **maps}


def along(group: MeasurementGroup, label: str) -> tuple[list[int], list[float], list[float | None]]:
    """(tokens so far, speed-up over plain decoding of the latest WINDOW prompts, matchness), a point a prompt."""
    both = group.beside_plain(label)
    windows = (zip(*both[max(0, end - WINDOW) : end], strict=True) for end in range(1, len(both) + 1))
    speeds = [tokens_per_second(mine) / tokens_per_second(base) for mine, base in windows]
    known = [(row.get("known") or {}).get("matchness") for row, _ in both]
    return list(accumulate(row["tokens"] for row, _ in both)), speeds, known


def matrix(known: Mapping[str, Any], layers: int) -> tuple[list[int], list[list[bool]]]:
    """(evaluations at which the layer set changed, what was left out then): a column for each change, the latest CHANGES; rows
    are the attentions of all layers, then their MLPs."""
    history = known["history"][-CHANGES:]
    sets = [[layer in one[kind] for kind in ("attention", "mlp") for layer in range(layers)] for one in history]
    return [one["evaluation"] for one in history], [list(row) for row in zip(*sets, strict=True)]


def _map(known: Mapping[str, Any], layers: int) -> Any:
    """The attentions of all layers, then their MLPs, at every change of the layer set."""
    evaluations, left_out = matrix(known, layers)
    if len(evaluations) < 2:
        return None
    figure, axes = _axes("sets judged before the change", line=layers - 0.5)
    axes.imshow(left_out, aspect="auto", interpolation="nearest", cmap="Blues", vmin=0, vmax=1.4)
    shown = range(0, len(evaluations), max(1, len(evaluations) // 8))
    axes.set_xticks(list(shown), [str(evaluations[place]) for place in shown])
    axes.set_yticks([0, layers - 1, layers, 2 * layers - 1], ["attention 0", str(layers - 1), "MLP 0", str(layers - 1)])
    return figure
