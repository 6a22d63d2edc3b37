"""What passes cost on this machine, timed one by one between the steps of a request."""

from __future__ import annotations

import time
from typing import Any

import torch

from skipstone.decoding.session import Session
from skipstone.methods.shared.layer_sets import UNKNOWN_SLOPE, Costs, Space
from skipstone.models.layered import LayeredModel
from skipstone.models.passes import Pass
from skipstone.models.skipping import SkipSet

WIDTHS = (2, 4, 8, 16, 32, 48, 82)
"""Rows of the scoring passes that are timed, up to what is needed; what lies between is interpolated."""
ROUNDS, LONG, DEAR = 3, 0.05, 1.8
"""How often every pass is timed, the first time to warm up; how many seconds a plain one takes where once is enough; and from
how many plain steps on wider ones are not timed."""


class Timings:
    """Passes timed one by one, each when there is slack for it: a whole one, one without attentions, one without MLPs, one
    without both, and scoring passes of several widths, up to the first that is dear or as wide as any will be."""

    def __init__(self, space: Space, widest: int = WIDTHS[-1]) -> None:
        middle = frozenset(range(1, space.layers - 1))
        self.space = space
        self.widths = [width for width, before in zip(WIDTHS, (0, *WIDTHS), strict=False) if before < widest]
        self.kinds: dict[Any, tuple[int, SkipSet | None]] = {
            "plain": (1, None),
            "no attention": (1, SkipSet(attention=middle)),
            "no mlp": (1, SkipSet(mlp=middle)),
            "neither": (1, SkipSet(middle, middle)),
            **{width: (width, None) for width in self.widths},
        }
        self.seconds: dict[Any, float] = {}
        self.left = ["plain", *(kind for _ in range(ROUNDS) for kind in self.kinds)]  # twice at first: one may be a stall

    def next(self, session: Session) -> float:
        """Time one pass behind everything that is committed. Returns what it cost in plain steps."""
        width, skip = self.kinds[self.left[0]]
        model, store = session.model, session.store
        start = max(session.store.length)
        if width > min(store.limit, model.max_positions) - start:
            self.left = [one for one in self.left if one != self.left[0]]  # the others say what it may cost
            return 0.0
        kind = self.left.pop(0)
        again, settled = kind in self.seconds, kind != "plain" or "plain" in self.seconds
        store.reserve(start + width)
        places = torch.arange(start, start + width, device=model.device).expand(store.rows, -1)
        at = Pass(places, places, None, slice(0, store.rows), start + width, start)
        began = _now(model.device)
        hidden = model.embed(places % model.embeddings, places)  # different tokens, for the sake of mixtures of experts
        model.logits(model.run(hidden, at, store, range(store.layers), skip))
        seconds = _now(model.device) - began
        self.seconds[kind] = min(seconds, self.seconds.get(kind, seconds))
        if long := settled and self.seconds["plain"] > LONG:
            self.left = [one for one in self.left if one not in self.seconds]
        if (again or long) and skip is None and self.seconds[kind] > DEAR * self.seconds["plain"]:
            self.left = [one for one in self.left if self.kinds[one][0] <= width]
        return seconds / self.seconds["plain"]

    def estimate(self, before: Costs) -> float:
        """What the next one will cost, by what was timed so far, else by what was thought before."""
        if self.left[0] in self.seconds:
            return 1.5 * self.seconds[self.left[0]] / self.seconds["plain"]
        width, _ = self.kinds[self.left[0]]
        known = {self.kinds[kind][0]: seconds for kind, seconds in self.seconds.items() if isinstance(kind, int)}
        if "plain" not in self.seconds or not known:
            return 1.5 * before.score(width)
        widest = max(known)
        return 1.5 * known[widest] / self.seconds["plain"] * max(1.0, width / widest)

    def costs(self) -> Costs | None:
        """None while passes are left to be timed."""
        if self.left:
            return None
        plain, middle = self.seconds["plain"], self.space.layers - 2
        attention, mlp, whole = (
            max(1 - self.seconds[kind] / plain, 0.0) / middle for kind in ("no attention", "no mlp", "neither")
        )
        known = {1: 1.0, **{width: max(self.seconds[width] / plain, 1.0) for width in self.widths if width in self.seconds}}
        scoring, widths = [], sorted(known)
        for width in range(1, widths[-1] + 1):
            high = next(one for one in widths if one >= width)
            low = max(one for one in widths if one <= width)
            share = (width - low) / (high - low) if high > low else 0.0
            scoring.append(known[low] + share * (known[high] - known[low]))
        return Costs(attention, mlp, tuple(scoring), max(whole - attention - mlp, 0.0))


def by_weight(model: LayeredModel, space: Space) -> Costs:
    """Before anything was timed: a sublayer costs what it weighs, and a token more a little."""
    layer = model.layers[1]
    attention = sum(one.numel() for one in getattr(layer, model.family.attention).parameters())
    whole = sum(one.numel() for one in layer.parameters())
    everything = whole * space.layers + model.head.weight.numel()
    return Costs(
        attention / everything,
        (whole - attention) / everything,
        tuple(1 + UNKNOWN_SLOPE * extra for extra in range(WIDTHS[-1])),
    )


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
