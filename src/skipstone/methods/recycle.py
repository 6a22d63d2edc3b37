"""Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling
(Luo et al., ACL 2025, arXiv 2408.08696), section 3.

Every scoring pass tells the likeliest continuations of all tokens that it scores, of those that are rejected too, and decoding
throws them away. Here they are kept: for every token of the vocabulary the k likeliest tokens that stood behind it when it was
scored last (the paper's adjacency matrix). The draft is a tree of a fixed, unbalanced shape, filled from the last committed
token on: a node's children are the tokens that are kept for the node's own. No model drafts, and the kept tokens outlive a
request.

Deviations: nodes are the ones of greatest survival under RANK_ACCEPTANCES, of which the default takes fewer than the paper's
80, since a pass of so many tokens is dear on a CPU; of several places of a token the accepted one is kept; in sampling kept
tokens are the likeliest by the raw logits, and the tree is verified by match."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

from torch import Tensor

from skipstone.decoding.draft import Draft, GreedyVerdict, RowVerdict, Verdict
from skipstone.decoding.drafter import Candidate, Drafter
from skipstone.decoding.method import DraftingMethod
from skipstone.decoding.sampling import Scores
from skipstone.decoding.settings import setting
from skipstone.engines.engine import SurvivalThresholds
from skipstone.engines.greedy_tokens import NO_TOKEN
from skipstone.engines.model_runner import ModelRunner
from skipstone.methods.drafting import method_states
from skipstone.methods.drafting.lookups import LookupDrafter, RowDraft
from skipstone.policy.cost_model import TABLE
from skipstone.policy.draft_length import best_tree

RANK_ACCEPTANCES = (0.42, 0.14, 0.09, 0.05, 0.03, 0.02, 0.015, 0.01)
"""How often the token that was kept first, second, ... for a token is what follows it. What the tree's shape is made by."""
ENTRY_BYTES, TOKEN_BYTES = 200, 40
"""What Python takes for a token's list of continuations, and for each number in it."""
DEPTH = 6
"""Most tokens on a path (the paper's tree has as many levels)."""


@dataclass(frozen=True)
class Recycle(DraftingMethod):
    """Token Recycling: what earlier passes thought of a token is drafted behind it."""

    name: ClassVar[str] = "recycle"
    positional: ClassVar[str] = "verifies trees"
    aliases: ClassVar[dict[str, str]] = {"nodes": "num_speculative_tokens", "candidates": "num_candidates"}
    if_few_accepted: ClassVar[str] = "An acceptance rate that low says that this text goes on differently every time."

    num_speculative_tokens: int = setting(8, "tokens of the drafted tree; the paper has 80.")
    num_candidates: int = setting(8, "k, continuations that are kept for every token.", within=(1, len(RANK_ACCEPTANCES)))

    def report(self, model: Any) -> dict[str, Any]:
        return method_states.method_report(self, None, model)

    def auto_candidates(self, model: ModelRunner, rows: int, capacity: int) -> dict[str, Candidate]:
        """None: `auto` drafts like this by itself, without a model."""
        return {}

    def create_drafter(self, model: ModelRunner, rows: int, capacity: int) -> Drafter:
        return RecycleDrafter(self, model, rows, method_states.method_state(self, model, rows, None, AdjacencyMatrix))


@dataclass
class AdjacencyMatrix:
    """The paper's adjacency matrix, of the tokens that were scored so far: token -> its likeliest continuations, best first."""

    continuations: dict[int, list[int]] = field(default_factory=dict)
    steps: int = 0

    @property
    def nbytes(self) -> int:
        width = len(next(iter(self.continuations.values()), ()))
        return len(self.continuations) * (ENTRY_BYTES + width * TOKEN_BYTES)

    def report(self) -> dict[str, Any]:
        return {"steps": self.steps, "tokens": len(self.continuations)}

    def ranks(self, root: int, tokens: Sequence[int]) -> list[int]:
        """Of every token behind a root, its place among those kept for the one before it; TABLE for one that is not."""
        found = []
        for before, token in zip((root, *tokens), tokens, strict=False):
            known = self.continuations.get(before, ())
            found.append(known.index(token) if token in known else TABLE)
        return found


@cache
def shape(nodes: int, candidates: int) -> tuple[tuple[int, int], ...]:
    """(parent, rank) of every node: the tree of so many nodes that is expected to commit most."""
    found = best_tree(RANK_ACCEPTANCES[:candidates], 0.0, lambda _: 0.0, max_nodes=nodes, max_depth=DEPTH)
    return tuple(zip(found.parents, found.ranks, strict=True))


class RecycleDrafter(LookupDrafter):
    """Trees out of what was kept, and the keeping."""

    def __init__(self, method: Recycle, model: ModelRunner, rows: int, kept: AdjacencyMatrix) -> None:
        super().__init__(rows, scratch_slots=method.num_speculative_tokens)
        self.model = model
        self.candidates = min(method.num_candidates, model.embeddings)
        self.shape, self.kept = shape(method.num_speculative_tokens, method.num_candidates), kept
        self._drafts: list[RowDraft] = []

    def propose_draft(self, limits: list[int], stop_rule: SurvivalThresholds | None = None) -> Draft:
        """The tree of every row."""
        self._drafts = [self._row_draft(row, allowed) for row, allowed in enumerate(limits)]
        return self.as_draft(self._drafts, tree=True, levels=DEPTH)

    def _row_draft(self, row: int, allowed: int) -> RowDraft:
        """The shape filled from the last committed token on; nodes of which nothing is known are left out, with what is below
        them. allowed: most tokens on a path."""
        draft, known = RowDraft(), self.kept.continuations
        if not self.view.alive[row] or not allowed:
            return draft
        placed: dict[int, tuple[int, int]] = {-1: (-1, 0)}  # node of the shape -> (its number in the draft, its level)
        for node, (parent, rank) in enumerate(self.shape):
            number, level = placed.get(parent, (-1, DEPTH))
            if level >= min(allowed, DEPTH):
                continue
            above = self.text[row][-1] if parent < 0 else draft.tokens[number]
            continuations = known.get(above, ())
            if rank < len(continuations):
                placed[node] = draft.add(continuations[rank], number), level + 1
        return draft

    def needs_logits(self, draft: Draft) -> bool:
        return True

    def observe_scores(self, draft: Draft, scores: Scores, verdict: Verdict | GreedyVerdict) -> Tensor:
        """[B, (n + 1) k] int64: the k likeliest continuations of the root and of every node."""
        return self.model.top_k_tokens(scores.logits, self.candidates).flatten(1)

    def observe_commits(self, draft: Draft | None, verdicts: list[RowVerdict]) -> None:
        """Keep what was said behind every scored token, behind the accepted ones last; of what others drafted, behind those
        alone."""
        self.kept.steps += draft is not None
        for row, verdict in enumerate(verdicts):
            if not verdict.tokens or not verdict.notes:
                continue
            root = self.text[row][-1]
            said = {-1: root, **dict(zip(verdict.path, verdict.tokens, strict=False))}  # node -> its token
            if draft is not None:
                said = {-1: root, **dict(enumerate(self._drafts[row].tokens)), **said}
            for node in [*said, -1, *verdict.path]:
                first = (node + 1) * self.candidates
                noted = verdict.notes[first : first + self.candidates]
                self.kept.continuations[said[node]] = [token for token in noted if token != NO_TOKEN]
        super().observe_commits(draft, verdicts)
