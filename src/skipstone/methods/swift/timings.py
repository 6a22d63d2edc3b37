"""What passes cost on this machine, timed one by one between the steps of a request."""

import numpy as np
import torch

from skipstone.decoding.session import Session
from skipstone.methods.shared.layer_sets import UNKNOWN_SLOPE, Costs, Space
from skipstone.models.layered import LayeredModel
from skipstone.models.passes import Pass, SkipSet
from skipstone.models.ranks import Ranks

WIDTHS = (2, 4, 8, 16, 32, 48, 82)  # tokens of the scoring passes that are timed; what lies between is interpolated
ROUNDS = 3  # times that every pass is timed, the first time to warm up
LONG = 0.05  # seconds of a plain pass from which on once is enough
DEAR = 1.8  # plain steps that a pass costs from which on wider ones are not timed
CAUTION = 1.5  # times what a pass is thought to cost that is asked for before it is timed
TimedPass = tuple[int, SkipSet | None]  # (tokens, what is left out)
PLAIN: TimedPass = (1, None)


class Timings:
    """Passes timed one by one, each when there is slack for it: a whole one, one without attentions, one without MLPs, one
    without both, and scoring passes of several widths, up to the first that is dear or as wide as any will be."""

    def __init__(self, space: Space, widest: int = WIDTHS[-1]) -> None:
        self.middle = frozenset(range(1, space.layers - 1))
        self.without = (SkipSet(attention=self.middle), SkipSet(mlp=self.middle), SkipSet(self.middle, self.middle))
        widths = [width for width, before in zip(WIDTHS, (0, *WIDTHS), strict=False) if before < widest]
        passes: list[TimedPass] = [PLAIN, *((1, skip) for skip in self.without), *((width, None) for width in widths)]
        self.left = [PLAIN, *ROUNDS * passes]  # plain twice at first: one may be a stall
        self.seconds: dict[TimedPass, float] = {}  # the shortest of each

    def time_next(self, session: Session) -> float:
        """Time one pass behind everything that is committed. Returns what it cost in plain steps."""
        width, skip = timed = self.left[0]
        model, store = session.model, session.store
        start = max(session.store.length)
        if width > min(store.limit, model.max_positions) - start:
            self.left = [one for one in self.left if one != timed]  # the others say what it may cost
            return 0.0
        del self.left[0]
        again = timed in self.seconds
        store.reserve(start + width)
        places = torch.arange(start, start + width, device=model.device).expand(store.rows, -1)
        at = Pass(places, places, None, slice(0, store.rows), start + width, start)
        began = _synchronised(model).now()
        hidden = model.embed(places % model.embeddings, places)  # different tokens, for the sake of mixtures of experts
        model.logits(model.run(hidden, at, store, range(store.layers), skip))
        seconds = _synchronised(model).since(began)
        self.seconds[timed] = min(seconds, self.seconds.get(timed, seconds))
        plain = self.seconds[PLAIN]
        if long := plain > LONG and (again or timed != PLAIN):
            self.left = [one for one in self.left if one not in self.seconds]
        if (again or long) and skip is None and self.seconds[timed] > DEAR * plain:
            self.left = [(tokens, skip) for tokens, skip in self.left if tokens <= width]
        return seconds / plain

    def next_cost(self, before: Costs) -> float:
        """What the next one may cost, by what was timed so far, else by what was thought before."""
        width, _ = self.left[0]
        if self.left[0] in self.seconds:
            return CAUTION * self.seconds[self.left[0]] / self.seconds[PLAIN]
        if not (known := self._scoring()):
            return CAUTION * before.score(width)
        widest = max(known)
        return CAUTION * known[widest] * max(1.0, width / widest)

    def _scoring(self) -> dict[int, float]:
        """Tokens of the scoring passes that were timed -> their cost."""
        return {tokens: seconds / self.seconds[PLAIN] for (tokens, _), seconds in self.seconds.items() if tokens > 1}

    def costs(self) -> Costs | None:
        """None while passes are left to be timed."""
        if self.left:
            return None
        saved = [max(1 - self.seconds[1, skip] / self.seconds[PLAIN], 0.0) for skip in self.without]
        attention, mlp, whole = (cost / len(self.middle) for cost in saved)
        known = {1: 1.0, **{tokens: max(cost, 1.0) for tokens, cost in sorted(self._scoring().items())}}
        scoring = np.interp(range(1, max(known) + 1), list(known), list(known.values()))
        return Costs(attention, mlp, tuple(scoring.tolist()), max(whole - attention - mlp, 0.0))


def costs_by_weight(model: LayeredModel, space: Space) -> Costs:
    """Before anything was timed: a sublayer costs what it weighs, and a token more a little."""
    layer = model.layers[1]
    attention = sum(one.numel() for one in getattr(layer, model.family.attention).parameters())
    whole = sum(one.numel() for one in layer.parameters())
    everything = whole * space.layers + model.head.weight.numel()
    scoring = tuple(1 + UNKNOWN_SLOPE * extra for extra in range(WIDTHS[-1]))
    return Costs(attention / everything, (whole - attention) / everything, scoring)


def _synchronised(model: LayeredModel) -> Ranks:
    """The model's clock, once its device has done what it was asked to do."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return model.ranks
