"""What passes cost on this machine, timed one by one between the steps of a request."""

from __future__ import annotations

import time

import numpy as np
import torch

from skipstone.decoding.session import Session
from skipstone.methods.shared.layer_sets import UNKNOWN_SLOPE, Costs, Space
from skipstone.models.layered import LayeredModel
from skipstone.models.passes import Pass
from skipstone.models.skipping import SkipSet

WIDTHS = (2, 4, 8, 16, 32, 48, 82)  # tokens of the scoring passes that are timed; what lies between is interpolated
ROUNDS = 3  # times that every pass is timed, the first time to warm up
LONG = 0.05  # seconds of a plain pass from which on once is enough
DEAR = 1.8  # plain steps that a pass costs from which on wider ones are not timed
CAUTION = 1.5  # times what a pass is thought to cost that is asked for before it is timed
PLAIN = "plain"


class Timings:
    """Passes timed one by one, each when there is slack for it: a whole one, one without attentions, one without MLPs, one
    without both, and scoring passes of several widths, up to the first that is dear or as wide as any will be."""

    def __init__(self, space: Space, widest: int = WIDTHS[-1]) -> None:
        middle = frozenset(range(1, space.layers - 1))
        self.space = space
        self.widths = [width for width, before in zip(WIDTHS, (0, *WIDTHS), strict=False) if before < widest]
        self.passes: dict[str | int, tuple[int, SkipSet | None]] = {  # name -> (tokens, what is left out)
            PLAIN: (1, None),
            "no attention": (1, SkipSet(attention=middle)),
            "no mlp": (1, SkipSet(mlp=middle)),
            "neither": (1, SkipSet(middle, middle)),
            **{width: (width, None) for width in self.widths},
        }
        self.seconds: dict[str | int, float] = {}  # the shortest of each
        self.left = [PLAIN, *(name for _ in range(ROUNDS) for name in self.passes)]  # plain twice at first: one may be a stall

    def time_next(self, session: Session) -> float:
        """Time one pass behind everything that is committed. Returns what it cost in plain steps."""
        width, skip = self.passes[self.left[0]]
        model, store = session.model, session.store
        start = max(session.store.length)
        if width > min(store.limit, model.max_positions) - start:
            self.left = [name for name in self.left if name != self.left[0]]  # the others say what it may cost
            return 0.0
        name = self.left.pop(0)
        again, settled = name in self.seconds, name != PLAIN or PLAIN in self.seconds
        store.reserve(start + width)
        places = torch.arange(start, start + width, device=model.device).expand(store.rows, -1)
        at = Pass(places, places, None, slice(0, store.rows), start + width, start)
        began = _now(model.device)
        hidden = model.embed(places % model.embeddings, places)  # different tokens, for the sake of mixtures of experts
        model.logits(model.run(hidden, at, store, range(store.layers), skip))
        seconds = _now(model.device) - began
        self.seconds[name] = min(seconds, self.seconds.get(name, seconds))
        plain = self.seconds[PLAIN]
        if long := settled and plain > LONG:
            self.left = [name for name in self.left if name not in self.seconds]
        if (again or long) and skip is None and self.seconds[name] > DEAR * plain:
            self.left = [name for name in self.left if self.passes[name][0] <= width]
        return seconds / plain

    def next_cost(self, before: Costs) -> float:
        """What the next one may cost, by what was timed so far, else by what was thought before."""
        name, plain = self.left[0], self.seconds.get(PLAIN, 0.0)
        if name in self.seconds:
            return CAUTION * self.seconds[name] / plain
        width, _ = self.passes[name]
        if not (known := [one for one in self.seconds if isinstance(one, int)]):
            return CAUTION * before.score(width)
        widest = max(known)
        return CAUTION * self.seconds[widest] / plain * max(1.0, width / widest)

    def costs(self) -> Costs | None:
        """None while passes are left to be timed."""
        if self.left:
            return None
        plain, middle = self.seconds[PLAIN], self.space.layers - 2
        attention, mlp, whole = (
            max(1 - self.seconds[name] / plain, 0.0) / middle for name in ("no attention", "no mlp", "neither")
        )
        timed = [width for width in self.widths if width in self.seconds]
        scores = [1.0, *(max(self.seconds[width] / plain, 1.0) for width in timed)]
        scoring = np.interp(range(1, max(timed, default=1) + 1), [1, *timed], scores)
        return Costs(attention, mlp, tuple(scoring.tolist()), max(whole - attention - mlp, 0.0))


def costs_by_weight(model: LayeredModel, space: Space) -> Costs:
    """Before anything was timed: a sublayer costs what it weighs, and a token more a little."""
    layer = model.layers[1]
    attention = sum(one.numel() for one in getattr(layer, model.family.attention).parameters())
    whole = sum(one.numel() for one in layer.parameters())
    everything = whole * space.layers + model.head.weight.numel()
    scoring = tuple(1 + UNKNOWN_SLOPE * extra for extra in range(WIDTHS[-1]))
    return Costs(attention / everything, (whole - attention) / everything, scoring)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
