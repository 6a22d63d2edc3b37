"""What is proposed, and what became of it: Draft -> Verdict on the device -> RowVerdict and Step on the host.

Shapes: B rows, n draft tokens, V vocabulary. p is the target's processed distribution, q the draft's.
"""

from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from skipstone.models import host
from skipstone.models.frontier import Frontier


@dataclass(slots=True)
class Draft:
    """Tokens proposed for one step, one row of nodes per batch row.

    tokens: [B, n] int64. valid: [B, n] bool, False where a row proposed fewer.
    parents: [B, n] int64, the index of the node's parent, -1 for the root (the last committed token); None is a chain.
    q: [B, n, V] float, the processed distribution each token was drawn from; None means every q is one-hot
        (a deterministic drafter, or one whose draws are coupled to the target's).
    stochastic: [B, n] bool, only beside q: False marks a node whose q is one-hot whatever `q` holds.
    candidate: [B, n] bool, False for nodes that are scored but may never be accepted (Lookahead's window).
    exit_layer: [B, n] int64, the layer that each token was drafted at, for reports only.
    confidence: [B, n] float, the drafter's probability of each token.
    draft_steps: [B] int64, passes of the drafter each row took part in; None means one per token that may be accepted.
    levels: most nodes on one path, where the builder of a tree knows; None means as many as there are nodes.
    Law: no two siblings that may be accepted carry the same token.
    """

    tokens: Tensor
    valid: Tensor
    frontier: Frontier | None
    parents: Tensor | None = None
    q: Tensor | None = None
    stochastic: Tensor | None = None
    candidate: Tensor | None = None
    exit_layer: Tensor | None = None
    confidence: Tensor | None = None
    draft_steps: Tensor | None = None
    levels: int | None = None

    @classmethod
    def empty(cls, rows: int, device: torch.device, frontier: Frontier | None = None) -> "Draft":
        """No proposal: the step is plain decoding."""
        return cls(*_nothing(rows, device), frontier)

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    @property
    def offered(self) -> Tensor:
        """[B, n] bool: the nodes that may be accepted."""
        return self.valid if self.candidate is None else self.valid & self.candidate

    def check(self) -> None:
        """Assert the invariants (for tests; it synchronises with the device)."""
        assert self.tokens.shape == self.valid.shape, (self.tokens.shape, self.valid.shape)
        assert self.q is None or self.parents is None, "stochastic drafts are chains"
        if self.parents is None:
            assert bool((self.valid[:, 1:] <= self.valid[:, :-1]).all()), "a chain is valid up to its end"
            return
        for row in range(self.tokens.shape[0]):
            seen = set()
            for node in self.valid[row].nonzero().flatten().tolist():
                parent = int(self.parents[row, node])
                assert -1 <= parent < node, f"node {node} of row {row} has parent {parent}"
                assert parent < 0 or bool(self.valid[row, parent]), "a valid node has a valid parent"
                if not self.offered[row, node]:
                    continue
                key = (parent, int(self.tokens[row, node]))
                assert key not in seen, f"siblings of row {row} share token {key[1]}"
                seen.add(key)


@cache
def _nothing(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(tokens [B, 0] int64, valid [B, 0] bool), made once."""
    with torch.inference_mode(False):
        tokens = torch.empty((rows, 0), dtype=torch.long, device=device)
        return tokens, tokens.bool()


@dataclass(slots=True)
class Verdict:
    """What the target says of a draft.

    path: [B, n] int64, the accepted nodes in order (only the first `accepted` entries of a row mean anything).
    tokens: [B, n+1] int64, the accepted tokens followed by the recovered or bonus token.
    accepted: [B] int64. overruled: [B, n] bool, tokens accepted against the target's own choice (AdaSD), or None.
    notes: [B, k] int64, what else a method wants on the host: it travels with the verdict, in the same transfer.
    """

    path: Tensor
    tokens: Tensor
    accepted: Tensor
    overruled: Tensor | None = None
    notes: Tensor | None = None

    def tolist(self, draft: Draft) -> "list[RowVerdict]":
        """The verdict on the host, in one transfer from the device: the only synchronisation of a step."""
        width = self.path.shape[1]
        nodes, drafted = draft.valid.sum(1, keepdim=True), draft.offered.sum(1, keepdim=True)
        last = torch.cat([torch.full_like(drafted, -1), self.path], 1).gather(1, self.accepted[:, None])
        if draft.parents is None:
            offered = torch.nn.functional.pad(draft.offered, (0, 1)).gather(1, self.accepted[:, None]).long()
        else:
            offered = (draft.offered & (draft.parents == last)).any(1, keepdim=True).long()
        passes = drafted if draft.draft_steps is None else draft.draft_steps[:, None]
        columns = [self.accepted[:, None], drafted, passes, nodes, offered, self.path, self.tokens]
        columns += [] if self.overruled is None else [self.overruled.long()]
        columns += [] if self.notes is None else [self.notes]
        behind = 2 * width + 1
        verdicts = []
        for accepted, count, steps, scored, more, *rest in torch.cat(columns, dim=1).tolist():
            path, tokens, notes = rest[:accepted], rest[width : width + accepted + 1], rest[behind:]
            final, against = "recovered" if more else "bonus", notes[: 0 if self.overruled is None else width]
            mine = RowVerdict(path, tokens, final, count, sum(against), scored, steps, notes=notes[len(against) :])
            mine.against = against
            verdicts.append(mine)
        return verdicts


@dataclass(slots=True)
class Picked:
    """A verdict where every row is greedy: along a draft the target's picks decide, and the host walks it by itself.

    picks: [B, n+1] int64, the target's pick after every node, the root's first. notes: as in `Verdict`.
    """

    draft: Draft
    picks: Tensor
    notes: Tensor | None = None

    @property
    def accepted(self) -> Tensor:
        """[B] int64, how many tokens of a chain are accepted."""
        assert self.draft.parents is None, "of a tree only the host knows"
        return ((self.draft.tokens == self.picks[:, :-1]) & self.draft.offered).long().cumprod(1).sum(1)

    def tolist(self, draft: Draft) -> "list[RowVerdict]":
        """The verdict on the host, in one transfer from the device: the only synchronisation of a step."""
        if not draft.width and self.notes is None:
            return [RowVerdict([], picks, "bonus", 0, 0) for picks in self.picks.tolist()]
        asked = [self.picks, draft.tokens, draft.valid]
        more = (draft.parents, draft.candidate, None if draft.draft_steps is None else draft.draft_steps[:, None], self.notes)
        told = iter(host.read(*asked, *(tensor for tensor in more if tensor is not None)))
        picks, tokens, valid = next(told), next(told), next(told)
        parents, candidate, steps, notes = (None if tensor is None else next(told) for tensor in more)
        verdicts = []
        for row, mine in enumerate(picks):
            offered = valid[row] if candidate is None else [a and b for a, b in zip(valid[row], candidate[row], strict=True)]
            if parents is None:
                path, rest = _along_chain(tokens[row], offered, mine)
            else:
                path, rest = _along_tree(tokens[row], offered, parents[row], mine)
            kept = [*(tokens[row][node] for node in path), mine[path[-1] + 1 if path else 0]]
            drafted = sum(offered)
            verdict = RowVerdict(path, kept, "recovered" if rest else "bonus", drafted, 0, sum(valid[row]), drafted)
            if steps is not None:
                verdict.draft_steps = steps[row][0]
            if notes is not None:
                verdict.notes = notes[row]
            verdicts.append(verdict)
        return verdicts


def _along_chain(tokens: list[int], offered: list[int], picks: list[int]) -> tuple[list[int], bool]:
    """(the accepted nodes of a row's chain, whether another one was on offer)."""
    count = 0
    while count < len(tokens) and offered[count] and tokens[count] == picks[count]:
        count += 1
    return list(range(count)), count < len(tokens) and bool(offered[count])


def _along_tree(tokens: list[int], offered: list[int], parents: list[int], picks: list[int]) -> tuple[list[int], bool]:
    """The same for a tree."""
    children = {(parents[node], tokens[node]): node for node in range(len(tokens)) if offered[node]}
    path, node = [], -1
    while (child := children.get((node, picks[node + 1]))) is not None:
        path.append(child)
        node = child
    return path, any(parent == node for parent, _ in children)


@dataclass(slots=True)
class RowVerdict:
    """One row's verdict on the host.

    path: accepted nodes. tokens: committed tokens, accepted ones first. final: what the token after the accepted ones is.
    drafted: draft tokens that could be accepted. nodes: draft tokens scored. draft_steps: passes of the drafter. finished: set
    by the stopping rules. notes: those of the verdict. against: 1 for what was accepted against the target's choice.
    """

    path: list[int]
    tokens: list[int]
    final: str
    drafted: int
    overruled: int
    nodes: int = 0
    draft_steps: int = 0
    finished: bool = False
    notes: list[int] = field(default_factory=list)
    against: list[int] = field(default_factory=list)

    def cut(self, kept: int) -> None:
        """Keep the first `kept` tokens only."""
        self.tokens = self.tokens[:kept]
        self.path = self.path[:kept]
        self.overruled = sum(self.against[: len(self.path)])

    @property
    def origin(self) -> list[str]:
        accepted = len(self.path)
        return ["draft"] * accepted + [self.final] * (len(self.tokens) - accepted)


@dataclass(slots=True)
class TokenRecord:
    """What `record=True` keeps of one token: probabilities under p and q, the target's entropy in nats (after processors,
    before warpers, at temperature 1), and where it came from. p and entropy are None for drafts that the verification never
    reached; q is None for tokens that were not drafted."""

    token: int
    p: float | None
    q: float | None
    entropy: float | None
    exit_layer: int | None
    accepted: bool


@dataclass(slots=True)
class Step:
    """One turn of the loop, all rows. Lists have one entry per row; a row that took no part has empty lists and zeros.

    origin says for each token whether it is the "prefill"'s, an accepted "draft", the "recovered" or the "bonus" token.
    draft_steps counts passes of the drafter, drafted the tokens submitted, verified_nodes the scored nodes (leaves too).
    prefill: the step ran a part of a prompt. probe: a plain step taken to learn what plain decoding costs. finished: rows that
    ended in this step.
    Seconds are wall-clock; on CUDA those of searching, drafting and scoring are device time, and other is what is left of the
    step. seconds_search: spent for later steps (`Session.optimise`).
    """

    tokens: list[list[int]]
    origin: list[list[str]]
    drafted: list[int]
    draft_steps: list[int]
    accepted: list[int]
    overruled: list[int]
    verified_nodes: int = 0
    prefill: bool = False
    probe: bool = False
    seconds_search: float = 0.0
    seconds_draft: float = 0.0
    seconds_score: float = 0.0
    seconds_other: float = 0.0
    finished: list[int] = field(default_factory=list)
    records: list[list[TokenRecord]] | None = None
    logits: list[Tensor] | None = None
    scores: list[Tensor] | None = None

    @property
    def seconds(self) -> float:
        return self.seconds_search + self.seconds_draft + self.seconds_score + self.seconds_other
