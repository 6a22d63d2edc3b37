"""The lens as pictures: a heat map of layers and tokens with what each would say, and the figures of every layer."""

import base64
import html
import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skipstone.extras import installed
from skipstone.files import write_whole
from skipstone.lens.lens import HeadLens, Lens

SHOWN = 40  # tokens across one heat map


def heat_map(lens: Lens, texts: Sequence[Sequence[str]], final: Sequence[str]) -> Any:
    """A matplotlib figure: probability of the best token after each layer, with its text, bold where it is the final one.
    texts: [L][n]. ImportError that says what to install without matplotlib."""
    figure, axes = _figure((1.2 + 0.55 * min(SHOWN, len(final)), 1 + 0.22 * len(texts)))
    count = min(SHOWN, len(final))
    image = axes.imshow([row[:count] for row in lens.probability], aspect="auto", origin="lower", vmin=0, vmax=1, cmap="Blues")
    for layer, row in enumerate(texts):
        for place in range(count):
            right = lens.top[layer][place] == lens.top[-1][place]
            dark = lens.probability[layer][place] > 0.6
            axes.text(
                place,
                layer,
                _short(row[place]),
                ha="center",
                va="center",
                fontsize=6,
                color="white" if dark else "black",
                fontweight="bold" if right else "normal",
            )
    axes.set_xticks(range(count), [_short(text) for text in final[:count]], rotation=60, fontsize=7)
    axes.set_yticks(range(len(texts)), [str(layer + 1) for layer in range(len(texts))], fontsize=7)
    axes.set_ylabel("after layer")
    for place in (one for one in lens.breaks if 0 < one < count):
        axes.axvline(place - 0.5, color="black", linewidth=1)  # another prompt begins
    if count < len(final):
        axes.set_xlabel(f"the first {count} of {len(final)} tokens")
    figure.colorbar(image, label="probability of the best token")
    return figure


def layer_figures(lens: Lens) -> Any:
    """A matplotlib figure: first layers, agreement and similarity, time, and expected speed-up, by layer."""
    figure, axes = _figure((11, 7), 2, 2)
    layers = list(range(1, len(lens.agreement) + 1))
    counts = Counter(lens.first)
    axes[0][0].bar(layers, [counts[layer] / len(lens.first) for layer in layers])
    axes[0][0].set_title("first layer that has the final token for good")
    axes[0][1].plot(layers, lens.agreement, label="agreement with the last layer")
    axes[0][1].plot(layers, lens.similarity, label="cosine of input and output")
    axes[0][1].legend()
    axes[1][0].bar(layers, [1000 * seconds for seconds in lens.costs.layers])
    axes[1][0].set_title("ms a token")
    axes[1][1].plot([one.exit_layer for one in lens.expected], [one.speed_up for one in lens.expected], "o-")
    axes[1][1].axhline(1, color="black", linewidth=0.8)
    axes[1][1].set_title("expected speed-up of LayerSkip by exit layer")
    for axis in (one for row in axes for one in row):
        axis.set_xlabel("layer")
    return figure


def head_maps(seen: HeadLens, final: Sequence[str]) -> Any:
    """A matplotlib figure: probability of the generated tokens after every exit, by the model's own head and by exit heads."""
    count = min(SHOWN, len(final))
    figure, axes = _figure((2.2 + 0.3 * count, 2 + 0.5 * len(seen.layers)), 2)
    image = None
    for axis, (title, reading) in zip(axes, (("LM head", seen.own), ("exit heads", seen.trained)), strict=True):
        image = axis.imshow([row[:count] for row in reading.probability], aspect="auto", origin="lower", vmin=0, vmax=1)
        axis.set_xticks(range(count), [_short(text) for text in final[:count]], rotation=60, fontsize=7)
        axis.set_yticks(range(len(seen.layers)), [str(layer) for layer in seen.layers])
        axis.set_ylabel("after layer")
        axis.set_title(title, loc="left", fontsize=9)
    figure.colorbar(image, ax=axes, label="probability of the generated token")
    return figure


def save(
    lens: Lens, texts: Sequence[Sequence[str]], final: Sequence[str], path: Path, heads: HeadLens | None = None
) -> list[Path]:
    """The pictures as PNG files, or one page of HTML where the path ends in .html. Returns what was written."""
    figures = {"lens": heat_map(lens, texts, final), "layers": layer_figures(lens)}
    if heads is not None:
        figures["heads"] = head_maps(heads, final)
    drawn = {name: _png(figure) for name, figure in figures.items()}
    if path.suffix == ".html":
        encoded = {name: base64.b64encode(image).decode() for name, image in drawn.items()}
        body = "".join(f'<img alt="{name}" src="data:image/png;base64,{image}">' for name, image in encoded.items())
        text = html.escape("".join(final))
        write_whole(path, f"<!doctype html><meta charset=utf-8><title>skipstone inspect</title><pre>{text}</pre>{body}\n")
        return [path]
    named = {name: path if name == "lens" else path.with_name(f"{path.stem}-{name}{path.suffix or '.png'}") for name in drawn}
    for name, place in named.items():
        write_whole(place, drawn[name])
    return [*named.values()]


def _figure(size: tuple[float, float], rows: int = 1, columns: int = 1) -> tuple[Any, Any]:
    figure = installed("matplotlib.figure", "pictures need matplotlib").Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns)


def _png(figure: Any) -> bytes:
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=120)
    return data.getvalue()


def _short(text: str) -> str:
    """A token for a cell: visible white space, at most eight letters; `$` would start a formula."""
    shown = text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·").replace("$", r"\$")
    return shown if len(shown) <= 8 else shown[:7] + "…"
