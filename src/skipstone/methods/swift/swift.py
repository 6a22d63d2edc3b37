"""SWIFT: On-the-Fly Self-Speculative Decoding for LLM Inference Acceleration
(Xia et al., ICLR 2025, arXiv 2410.06916), section 4 and appendix B.

Draft with the target itself, some attention and MLP sublayers left out; verify the chain and its runners-up as one tree. Which
sublayers is found while decoding: the text that was just written says how often a layer set would have chosen the same tokens.
Keys and values of the draft lie at the draft's own slots and are overwritten by verification; nothing is cloned.

Deviations, all ours: drafts are deterministic given the seed (coupled to the target's noise), so the tree is verified by match
at every temperature; `search="linear_ts"` instead of random sets with a Gaussian process (skip_search.py); a set is worth
the speed-up that it would bring on this machine; what is not known to pay is tried within a bounded loss, a changed task is
noticed, and where no set pays there is no drafting (skip_state.py).
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from skipstone.decoding.draft import Draft, RowVerdict, Verdict
from skipstone.decoding.method import Method
from skipstone.decoding.sampling import Scores
from skipstone.decoding.session import Request, Session
from skipstone.decoding.settings import setting, whole_number
from skipstone.methods.shared import profiles, states
from skipstone.methods.shared.confidence import check_threshold
from skipstone.methods.shared.layer_sets import Space, Z
from skipstone.methods.shared.skipping import SkippingSession
from skipstone.methods.swift.search import SEARCHES
from skipstone.methods.swift.state import SkipState
from skipstone.methods.swift.tree import MOST_LEAVES, RANKS, with_leaves
from skipstone.models.host import on_device
from skipstone.models.layered import LayeredModel, unwrapped
from skipstone.models.passes import Pass, Tree
from skipstone.models.skipping import SkipSet


@dataclass(frozen=True)
class Swift(Method):
    """SWIFT: the target without sublayers that it finds while decoding drafts."""

    name: ClassVar[str] = "swift"
    aliases: ClassVar[dict[str, str]] = {"num_assistant_tokens": "num_speculative_tokens"}
    if_few_accepted: ClassVar[str] = (
        "An acceptance rate that low says that this model does not bear skipping so many sublayers."
    )

    skip_ratio: float = setting(
        0.45, "share of the sublayers between the first and the last layer that drafting leaves out, at the start."
    )
    num_speculative_tokens: int = setting(25, "most drafts a step.")
    confidence_threshold: float | Literal["adaptive"] | None = setting(
        0.8, "stop after a draft whose probability is below it; None never stops early."
    )
    context_window: int = setting(32, "generated tokens that a layer set is judged by.")
    search: str = setting("linear_ts", "linear_ts, swift (the paper's), random or uniform (none).")
    objective: Literal["speed", "matchness"] = setting("speed", '"speed" or the paper\'s "matchness".')
    max_steps: int = setting(1000, "evaluations after which the search ends.")
    patience: int = setting(300, "evaluations without a better set after which it ends.")
    enough: float = setting(0.95, "matchness at which it ends.")
    dynamic_verification: bool = setting(True, "runners-up are verified too.")
    adjust: bool = setting(True, "the skip ratio moves to where more is expected.")
    guard: bool = setting(True, "draft only where that pays.")
    profile: str | None = setting(None, "a file of `skipstone search`, instead of a search.")
    search_seed: int = setting(0, "of the search; it changes speed and never the text.")

    def check(self, model: LayeredModel) -> None:
        space = Space(model.depth)
        if isinstance(self.skip_ratio, bool) or not isinstance(self.skip_ratio, (int, float)) or not 0 <= self.skip_ratio < 1:
            raise ValueError(f"skip_ratio must lie in [0, 1), found {self.skip_ratio!r}")
        if not 0 < space.count(self.skip_ratio) < space.size:
            raise ValueError(
                f"skip_ratio={self.skip_ratio} leaves out {space.count(self.skip_ratio)} of the {space.size} sublayers that "
                f"may be skipped in a model of {model.depth} layers: at least one must go and one must stay"
            )
        for name, least in (("num_speculative_tokens", 1), ("context_window", 1), ("max_steps", 0), ("patience", 1)):
            whole_number(name, getattr(self, name), least)
        whole_number("search_seed", self.search_seed, 0)
        check_threshold(self.confidence_threshold)
        for name in ("dynamic_verification", "adjust", "guard"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, found {getattr(self, name)!r}")
        if isinstance(self.enough, bool) or not isinstance(self.enough, (int, float)) or not 0 <= self.enough <= 1:
            raise ValueError(f"enough is a matchness in [0, 1], found {self.enough!r}")
        if self.search not in SEARCHES:
            raise ValueError(f"unknown search {self.search!r}; there are {', '.join(SEARCHES)}")
        if self.objective not in ("speed", "matchness"):
            raise ValueError(f'objective must be "speed" or "matchness", found {self.objective!r}')
        if self.profile is not None:
            space.from_skip_set(profiles.load(self.profile, model.model).skip)

    def report(self, model: PreTrainedModel) -> dict[str, Any]:
        return states.known(self, None, model)

    def start(self, model: LayeredModel, rows: int, capacity: int) -> Session:
        return SwiftSession(self, model, rows, capacity, self._state(model, rows))

    def _state(self, model: LayeredModel, rows: int) -> SkipState:
        skip = None if self.profile is None else profiles.load(self.profile, model.model).skip
        return states.of(self, model, rows, skip, lambda: SkipState(self, model, skip, rows))

    def save(self, model: PreTrainedModel, path: str | Path) -> None:
        """Write the layer set that was found on a model into a profile. ValueError before its first request."""
        if not (found := self.report(model)):
            raise ValueError("there is nothing to save: swift has not decoded with this model and these settings yet")
        about = {name: found[name] for name in ("matchness", "evaluations", "skip_ratio")}
        attention, mlp = (tuple(found["skipped"][kind]) for kind in ("attention", "mlp"))
        key = profiles.fingerprint(unwrapped(model))
        profiles.save(Path(path), profiles.Profile(model=key, about=about, attention=attention, mlp=mlp))


class SwiftSession(SkippingSession):
    """Drafts with the layer set of a state that outlives it, and lets that state learn from what is written."""

    def __init__(self, method: Swift, model: LayeredModel, rows: int, capacity: int, state: SkipState) -> None:
        most = method.num_speculative_tokens
        super().__init__(
            model,
            rows,
            capacity,
            most=most,
            threshold=method.confidence_threshold,
            ranks=RANKS if method.dynamic_verification else 1,
            scratch=max(min(most * RANKS, most + MOST_LEAVES), method.context_window),
        )
        self.state, self.window = state, method.context_window
        self.latest = [Latest(self.window) for _ in range(rows)]
        self._said: Tensor | None = None
        self._judged: tuple[Z, Tensor] | None = None
        self._turn = 0
        self._began = 0.0

    def admit(self, row: int, request: Request) -> None:
        super().admit(row, request)
        self.latest[row].clear()
        self.state.another_text()

    def optimise(self) -> None:
        """An optimisation step (section 4.1), where the state wants one: the last tokens of one row judge a layer set."""
        rows = [row for row, alive in enumerate(self.alive) if alive and self.latest[row].enough]
        if not any(self.alive) or (z := self.state.due(self, bool(rows))) is None:
            return
        began = time.perf_counter()
        self._turn += 1
        row = rows[self._turn % len(rows)]
        tokens, said = self.latest[row].window()
        choice = self.judge(row, tokens[:-1], self.state.space.to_skip_set(z)).argmax(-1)
        matched = (choice == said).sum()
        self._judged = (z, matched.to("cpu", non_blocking=True))
        if self.model.device.type == "cpu":
            self.state.took(time.perf_counter() - began)

    def draft(self, limit: list[int]) -> Draft:
        """A chain with the layer set; then its runners-up, all in one tree (section 4.2)."""
        room = self.state.room(max(limit))
        self._began = time.perf_counter()
        chain, ranked = self.chain([min(allowed, room) for allowed in limit], self.state.skip)
        if ranked is None or self.ranks == 1:
            return chain
        leaves, least = self.state.leaves(chain.width)
        if not leaves:
            return chain
        tree = with_leaves(chain, *ranked, leaves, least)
        if tree.width == chain.width:
            return chain
        tree.frontier = self.frontier([tree.width if alive else 0 for alive in self.alive])
        tree.frontier.append(tree.tokens, tree.valid, tree.parents)
        return tree

    def verify(self, draft: Draft, scores: Scores) -> Verdict:
        self._said = scores.best if self.state.searching else None
        return super().verify(draft, scores)

    def remark(self) -> str | None:
        return self.state.remark()

    def commit(self, draft: Draft | None, verdicts: list[RowVerdict]) -> None:
        super().commit(draft, verdicts)
        for row, verdict in enumerate(verdicts):
            if self._said is None:
                self.latest[row].clear()
            elif verdict.tokens:
                self.latest[row].add(verdict, self._said[row])
        self._said = None
        if draft is not None:
            # on an accelerator the step has waited for the judging pass before it, too
            waited = self._judged is not None and self.model.device.type != "cpu"
            self.state.learn(draft, verdicts, None if waited else time.perf_counter() - self._began)
        if self._judged is not None:  # the step's one transfer came after this one, and is done
            z, matched = self._judged
            self._judged = None
            self.state.judged(z, float(matched.numpy()) / self.window, self.window)

    def judge(self, row: int, tokens: list[int], skip: SkipSet) -> Tensor:
        """Logits [n, V] of n tokens, a row's latest but the newest, through what a skip set leaves, in one pass. It reads the
        target's keys and values before them and writes its own behind everything that is committed."""
        end, width, device = self.store.length[row], len(tokens), self.model.device
        self.store.reserve(end + width)
        positions = torch.arange(end - width, end, device=device)[None]
        base = on_device([end], device)
        below = torch.ones((1, width, width), dtype=torch.bool, device=device).tril()
        tree = Tree(base, below, positions, seen=base - width)
        at = Pass(positions, positions + width, None, slice(row, row + 1), end + width, end, tree)
        hidden = self.model.embed(on_device([tokens], device), positions)
        return self.model.logits(self.model.run(hidden, at, self.store, range(self.store.layers), skip))[0]


class Latest:
    """What a row has written lately, and what the target itself would have said there. size: tokens that are judged at once."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.clear()

    def clear(self) -> None:
        self.steps: deque[tuple[list[int], Tensor, list[int]]] = deque(maxlen=self.size + 1)
        self.tokens = 0

    def add(self, verdict: RowVerdict, said: Tensor) -> None:
        """Take over a step. said: [1 + n] int64, the target's choice after the root and after every draft of it."""
        self.steps.append((verdict.tokens, said, [0, *(node + 1 for node in verdict.path)][: len(verdict.tokens)]))
        self.tokens += len(verdict.tokens)

    @property
    def enough(self) -> bool:
        """Whether so many tokens are there, and one before them."""
        return self.tokens > self.size

    def window(self) -> tuple[list[int], Tensor]:
        """The latest 1 + size tokens, and the target's choices [size] int64 for all but the first."""
        tokens: list[int] = []
        nodes: list[int] = []
        first = 0
        for text, said, places in self.steps:
            tokens += text
            nodes += [first + place for place in places]
            first += len(said)
        said = torch.cat([said for _, said, _ in self.steps])
        return tokens[-self.size - 1 :], said[on_device(nodes[-self.size :], said.device)]
