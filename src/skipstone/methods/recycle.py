"""Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling
(Luo et al., ACL 2025, arXiv 2408.08696), section 3.

Every scoring pass computes the likeliest continuations of all scored tokens, also of rejected ones. An adjacency matrix keeps,
for every token, its k likeliest continuations in the latest pass, across requests. The draft is a tree of a fixed, unbalanced
shape, filled from the last committed token on: a node's children are the stored continuations of its token.

Deviations: the tree has the nodes with the highest survival under RANK_ACCEPTANCES. The default has fewer than the paper's 80,
because such a pass is expensive on a CPU. If a token has several places in a pass, the accepted one counts. With sampling, the
matrix has the likeliest tokens by raw logits, and `match` verifies the tree."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

from torch import Tensor

from skipstone.decoding import method_states
from skipstone.decoding.draft import Draft, GreedyVerdict, RowVerdict, Verdict
from skipstone.decoding.drafter import Candidate, Drafter
from skipstone.decoding.method import DraftingMethod
from skipstone.decoding.sampling import Scores
from skipstone.decoding.settings import setting
from skipstone.engines.engine import SurvivalThresholds
from skipstone.engines.greedy_tokens import NO_TOKEN
from skipstone.engines.model_runner import ModelRunner
from skipstone.methods.drafting.lookups import LookupDrafter, RowDraft
from skipstone.policy.cost_model import TABLE
from skipstone.policy.draft_length import best_tree

RANK_ACCEPTANCES = (0.42, 0.14, 0.09, 0.05, 0.03, 0.02, 0.015, 0.01)
"""Assumed probability that a token's first, second, ... stored continuation follows it. It determines the tree's shape."""
ENTRY_BYTES, TOKEN_BYTES = 200, 40
"""Assumed size of a list of continuations in Python, and of each number in it."""
DEPTH = 6
"""Maximum number of tokens on a path, as in the paper."""


@dataclass(frozen=True)
class Recycle(DraftingMethod):
    """Token Recycling: drafts the continuations of tokens that earlier passes computed."""

    name: ClassVar[str] = "recycle"
    positional: ClassVar[str] = "verifies trees"
    aliases: ClassVar[dict[str, str]] = {"nodes": "num_speculative_tokens", "candidates": "num_candidates"}
    if_few_accepted: ClassVar[str] = "An acceptance rate that low says that this text goes on differently every time."

    num_speculative_tokens: int = setting(8, "tokens of the drafted tree; the paper has 80.")
    num_candidates: int = setting(8, "k, stored continuations of every token.", within=(1, len(RANK_ACCEPTANCES)))

    def auto_candidates(self, model: ModelRunner, rows: int, capacity: int) -> dict[str, Candidate]:
        """None, because `auto` drafts like this by itself."""
        return {}

    def create_drafter(self, model: ModelRunner, rows: int, capacity: int) -> Drafter:
        return RecycleDrafter(self, model, rows, method_states.method_state(self, model, rows, None, AdjacencyMatrix))


@dataclass
class AdjacencyMatrix:
    """The paper's adjacency matrix of all scored tokens: token -> its likeliest continuations, best first."""

    continuations: dict[int, list[int]] = field(default_factory=dict)
    steps: int = 0

    @property
    def nbytes(self) -> int:
        width = len(next(iter(self.continuations.values()), ()))
        return len(self.continuations) * (ENTRY_BYTES + width * TOKEN_BYTES)

    def report(self) -> dict[str, Any]:
        return {"steps": self.steps, "tokens": len(self.continuations)}

    def ranks(self, root: int, tokens: Sequence[int]) -> list[int]:
        """For every token after a root, its rank among the continuations of the token before it, or else TABLE."""
        ranks = []
        for before, token in zip((root, *tokens), tokens, strict=False):
            known = self.continuations.get(before, ())
            ranks.append(known.index(token) if token in known else TABLE)
        return ranks


@cache
def shape(nodes: int, candidates: int) -> tuple[tuple[int, int], ...]:
    """(parent, rank) of every node of the tree that is expected to commit most tokens."""
    tree = best_tree(RANK_ACCEPTANCES[:candidates], 0.0, lambda _: 0.0, max_nodes=nodes, max_depth=DEPTH)
    return tuple(zip(tree.parents, tree.ranks, strict=True))


class RecycleDrafter(LookupDrafter):
    """Drafts trees from the adjacency matrix, and updates it."""

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
        """The shape, filled from the last committed token on. Nodes without a known token, and their descendants, are missing.

        allowed: maximum number of tokens on a path."""
        draft, known = RowDraft(), self.kept.continuations
        if not self.view.alive[row] or not allowed:
            return draft
        placed: dict[int, tuple[int, int]] = {-1: (-1, 0)}  # node of the shape -> (number in the draft, level)
        for node, (parent, rank) in enumerate(self.shape):
            number, level = placed.get(parent, (-1, DEPTH))
            if level >= min(allowed, DEPTH):
                continue
            parent_token = self.text[row][-1] if parent < 0 else draft.tokens[number]
            continuations = known.get(parent_token, ())
            if rank < len(continuations):
                placed[node] = draft.add(continuations[rank], number), level + 1
        return draft

    def needs_logits(self, draft: Draft) -> bool:
        return True

    def observe_scores(self, draft: Draft, scores: Scores, verdict: Verdict | GreedyVerdict) -> Tensor:
        """[B, (n + 1) k] int64: the k likeliest continuations of the root and of every node."""
        return self.model.top_k_tokens(scores.logits, self.candidates).flatten(1)

    def observe_commits(self, draft: Draft | None, verdicts: list[RowVerdict]) -> None:
        """Store the continuations of scored tokens, of accepted ones last. Other drafters' rejected tokens are unknown here."""
        self.kept.steps += draft is not None
        for row, verdict in enumerate(verdicts):
            if not verdict.tokens or not verdict.notes:
                continue
            root = self.text[row][-1]
            token_of = {-1: root, **dict(zip(verdict.path, verdict.tokens, strict=False))}  # node -> token
            if draft is not None:
                token_of = {-1: root, **dict(enumerate(self._drafts[row].tokens)), **token_of}
            for node in [*token_of, -1, *verdict.path]:
                first = (node + 1) * self.candidates
                best = verdict.notes[first : first + self.candidates]
                self.kept.continuations[token_of[node]] = [token for token in best if token != NO_TOKEN]
        super().observe_commits(draft, verdicts)
