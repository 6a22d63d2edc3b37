"""SWIFT: On-the-Fly Self-Speculative Decoding for LLM Inference Acceleration
(Xia et al., ICLR 2025, arXiv 2410.06916), section 4 and appendix B.

Draft with the target itself, some attention and MLP sublayers left out; verify the chain and its runners-up as one tree. Which
sublayers is found while decoding: the text that was just written tells how often a layer set would have chosen the same tokens.
Keys and values of the draft lie at the draft's own slots and are overwritten by verification; nothing is cloned.

The search is in search.py, its stopping rule in optimisation.py, the tree in tree.py. Deviations, all ours: drafts are
deterministic given the seed (coupled to the target's noise), so the tree is verified by match at every temperature;
`search="linear_ts"` stands in for random sets with a Gaussian process; the worth of a set is the speed-up that it would bring
on this machine. shared/payoff.py decides what pays: what is not known to pay is tried within a bounded loss, changed texts are
noticed, and where no set pays there is no drafting.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from skipstone.decoding.batch import Request
from skipstone.decoding.draft import Draft, Picked, RowVerdict, Verdict
from skipstone.decoding.sampling import Scores
from skipstone.decoding.session import Session
from skipstone.methods.shared import states
from skipstone.methods.shared.layer_sets import LayerMask, load_profile, save_profile
from skipstone.methods.shared.skipping_session import SkippingSession
from skipstone.methods.swift.settings import SwiftSettings
from skipstone.methods.swift.state import SwiftState
from skipstone.methods.swift.tree import MOST_LEAVES, RANKS, with_leaves
from skipstone.models.host import on_device
from skipstone.models.layered import LayeredModel, unwrapped
from skipstone.models.passes import Pass, SkipSet, Tree

Window = deque[tuple[int, Tensor]]


@dataclass(frozen=True)
class Swift(SwiftSettings):
    """SWIFT: the target without sublayers that it finds while decoding drafts."""

    def start(self, model: LayeredModel, rows: int, capacity: int) -> Session:
        skip = None if self.profile is None else load_profile(self.profile, model.model).skip
        state = states.of(self, model, rows, skip, lambda: SwiftState(self, model, skip, rows))
        return SwiftSession(self, model, rows, capacity, state)

    def report(self, model: PreTrainedModel) -> dict[str, Any]:
        return states.known(self, None, model)

    def save(self, model: PreTrainedModel, path: str | Path) -> None:
        """Write the layer set that was found on a model into a profile. ValueError before its first request."""
        if not (found := self.report(model)):
            raise ValueError("there is nothing to save: swift has not decoded with this model and these settings yet")
        about = {name: found[name] for name in ("matchness", "evaluations", "skip_ratio")}
        save_profile(Path(path), unwrapped(model), about, **found["skipped"])


class SwiftSession(SkippingSession):
    """Drafts with the layer set of a state that outlives it, and lets that state learn from what is written."""

    def __init__(self, method: SwiftSettings, model: LayeredModel, rows: int, capacity: int, state: SwiftState) -> None:
        most = method.num_speculative_tokens
        ranks, threshold = RANKS if method.dynamic_verification else 1, method.confidence_threshold
        scratch = max(min(most * RANKS, most + MOST_LEAVES), method.context_window)
        super().__init__(model, rows, capacity, most=most, threshold=threshold, ranks=ranks, scratch=scratch)
        self.state, self.shortlist = state, method.shortlist(model)
        self.gamma = method.context_window
        # context accumulation (section 4.1.1): the latest 1 + gamma tokens of every row, and the target's own choice of each
        self.windows: list[Window] = [deque(maxlen=1 + self.gamma) for _ in range(rows)]
        self._choices: Tensor | None = None  # [B, 1 + n], what the target chose in the step that is going on
        self._evaluation: tuple[LayerMask, Tensor] | None = None  # a set, and of how many tokens it was right
        self._turn = 0  # evaluations so far; the rows take turns
        self._began = 0.0

    def begin(self, row: int, request: Request) -> None:
        super().begin(row, request)
        self.windows[row].clear()
        self.state.payoff.begin_text()

    def optimise(self) -> None:
        """An optimisation step (section 4.1.2): the latest tokens of one row evaluate a candidate. Passes are timed before."""
        if self.state.timings is not None:
            if any(self.alive):
                self.state.time_pass(self)
            return
        if not self.state.optimisation.searching:
            return
        rows = [row for row, alive in enumerate(self.alive) if alive and len(self.windows[row]) > self.gamma]
        if not rows or (candidate := self.state.candidate()) is None:
            return
        began = self.model.ranks.now()
        self._turn += 1
        row = rows[self._turn % len(rows)]
        tokens, chosen = zip(*self.windows[row], strict=True)
        predicted = self.logits_without(self.state.space.to_skip_set(candidate), row, tokens[:-1]).argmax(-1)  # [gamma]
        self._evaluation = candidate, (predicted == torch.stack(chosen[1:])).sum().to("cpu", non_blocking=True)
        if self.model.device.type == "cpu":
            self.state.evaluation_took(self.model.ranks.since(began))

    def logits_without(self, skip: SkipSet, row: int, tokens: Sequence[int]) -> Tensor:
        """Eq. 3: logits [n, V] of n tokens, a row's latest but the newest, in one pass of the draft model. It reads the
        target's keys and values before them and writes its own behind everything that is committed."""
        end, width, device = self.store.length[row], len(tokens), self.model.device
        self.store.reserve(end + width)
        positions = torch.arange(end - width, end, device=device)[None]  # [1, n]
        base = on_device([end], device)
        below = torch.ones((1, width, width), dtype=torch.bool, device=device).tril()
        tree = Tree(base, below, positions, seen=base - width)
        at = Pass(positions, positions + width, None, slice(row, row + 1), end + width, end, tree)
        hidden = self.model.embed(on_device([tokens], device), positions)
        states = self.model.run(hidden, at, self.store, range(self.store.layers), skip)
        return self.model.logits(states, self.shortlist)[0]

    def draft(self, limit: list[int]) -> Draft:
        """Section 4.2: a chain with the layer set, as long as it is confident; then its runners-up, all in one tree."""
        most = self.state.most_drafts(max(limit))
        self._began = self.model.ranks.now()
        chain, ranked = self.chain([min(allowed, most) for allowed in limit], self.state.skip)
        if ranked is None or self.ranks == 1:
            return chain
        leaves, least = self.state.leaves(chain.width)
        tree = with_leaves(chain, *ranked, leaves, least) if leaves else chain
        if tree.width == chain.width:
            return chain
        tree.frontier = self.frontier([tree.width if alive else 0 for alive in self.alive])
        tree.frontier.append(tree.tokens, tree.valid, tree.parents)
        return tree

    def verify(self, draft: Draft, scores: Scores) -> Verdict | Picked:
        self._choices = scores.best if self.state.optimisation.searching else None
        return super().verify(draft, scores)

    def learn(self, draft: Draft | None, verdicts: list[RowVerdict]) -> None:
        super().learn(draft, verdicts)
        self._accumulate(verdicts)
        if draft is not None:
            # on an accelerator the step has waited for the evaluation before it, too
            waited = self._evaluation is not None and self.model.device.type != "cpu"
            self.state.record(draft, verdicts, None if waited else self.model.ranks.since(self._began))
        if self._evaluation is not None:  # the step's one transfer came after this one, and is done
            (candidate, matched), self._evaluation = self._evaluation, None
            self.state.evaluated(candidate, float(matched.numpy()) / self.gamma, self.gamma)  # Eq. 4

    def _accumulate(self, verdicts: list[RowVerdict]) -> None:
        """Context accumulation: the tokens of a step, and what the target chose at each."""
        choices, self._choices = self._choices, None  # [B, 1 + n]
        for row, verdict in enumerate(verdicts):
            if choices is None:
                self.windows[row].clear()
            elif verdict.tokens:
                nodes = [0, *(node + 1 for node in verdict.path)]  # the places of the tokens in `choices`
                chosen = choices[row].unbind(0)
                self.windows[row].extend((token, chosen[node]) for token, node in zip(verdict.tokens, nodes, strict=False))

    def remark(self) -> str | None:
        return self.state.remark()
