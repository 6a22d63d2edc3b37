"""What is proposed, and what became of it: Draft -> Verdict on the device -> RowVerdict and Step on the host.

Shapes: B rows, n draft tokens, V vocabulary. p is the target's processed distribution, q the draft's.
"""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from skipstone.engines import host_transfer
from skipstone.engines.partial_forward import PartialForward


@dataclass(slots=True)
class Draft:
    """Tokens proposed for one step, one row of nodes per batch row.

    tokens: [B, n] int64. valid: [B, n] bool, False where a row proposed fewer.
    parents: [B, n] int64, the index of the node's parent, -1 for the root (the last committed token); None is a chain.
    q: [B, n, V] float, the processed distribution each token was drawn from; None means every q is one-hot
        (a deterministic drafter, or one whose draws are coupled to the target's).
    stochastic: [B, n] bool, only beside q: False marks a node whose q is one-hot whatever `q` holds.
    candidate: [B, n] bool, False for nodes that are scored but may never be accepted (Lookahead's window).
    exit_layer: [B, n] int64, the layer that each token was drafted at, or one number for all of them; for reports only.
    confidence: [B, n] float, the drafter's probability of each token.
    draft_steps: [B] int64, passes of the drafter each row took part in; None means one per token that may be accepted.
    levels: most nodes on one path, where the builder of a tree knows; None means as many as there are nodes.
    Law: no two siblings that may be accepted carry the same token.
    """

    tokens: Tensor
    valid: Tensor
    forward: PartialForward | None
    parents: Tensor | None = None
    q: Tensor | None = None
    stochastic: Tensor | None = None
    candidate: Tensor | None = None
    exit_layer: Tensor | int | None = None
    confidence: Tensor | None = None
    draft_steps: Tensor | None = None
    levels: int | None = None

    @classmethod
    def empty(cls, rows: int, device: torch.device, forward: PartialForward | None = None) -> "Draft":
        """No proposal: the step is plain decoding."""
        return cls(*_nothing(rows, device), forward)

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
    tokens: [B, n+1] int64, the accepted tokens followed by the recovered or bonus token; NO_TOKEN where there is none.
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
        more = [one for one in (self.overruled, self.notes) if one is not None]
        if not draft.width and not more and draft.draft_steps is None:
            return [RowVerdict([], tokens, "bonus", 0, 0) for tokens in self.tokens.tolist()]
        accepted, path, tokens, told, *rest = _together([self.accepted[:, None], self.path, self.tokens], draft, more)
        overruled = None if self.overruled is None else rest[0]
        notes = None if self.notes is None else rest[-1]
        verdicts = []
        for row, (count,) in enumerate(accepted):
            mine = told[row]
            nodes = path[row][:count]
            verdict = mine.verdict(nodes, tokens[row][: count + 1])
            if overruled is not None:
                verdict.against = overruled[row]
                verdict.overruled = sum(overruled[row])
            if notes is not None:
                verdict.notes = notes[row]
            verdicts.append(verdict)
        return verdicts


@dataclass(slots=True)
class GreedyVerdict:
    """A verdict where every row is greedy: along a draft the target's picks decide, and the host walks it by itself.

    picks: [B, n+1] int64, the target's pick after every node, the root's first; NO_TOKEN as in `Verdict`. notes: as there.
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
        picks, told, *notes = _together([self.picks], draft, [] if self.notes is None else [self.notes])
        verdicts = []
        for row, (mine, drafted) in enumerate(zip(picks, told, strict=True)):
            path = drafted.walk(mine)
            verdict = drafted.verdict(path, [*(drafted.tokens[node] for node in path), mine[path[-1] + 1 if path else 0]])
            if notes:
                verdict.notes = notes[0][row]
            verdicts.append(verdict)
        return verdicts


@dataclass(slots=True)
class _HostDraft:
    """A row's draft on the host. offered: the nodes that may be accepted, as 0 and 1. parents: None for a chain."""

    tokens: list[int]
    offered: list[int]
    parents: list[int] | None
    scored: int
    draft_steps: int | None

    def walk(self, picks: list[int]) -> list[int]:
        """The nodes that the target's picks accept. picks: after the root and every node."""
        if self.parents is None:
            count = 0
            while count < len(self.tokens) and self.offered[count] and self.tokens[count] == picks[count]:
                count += 1
            return list(range(count))
        nodes = zip(self.parents, self.tokens, self.offered, strict=True)
        children = {(parent, token): node for node, (parent, token, offered) in enumerate(nodes) if offered}
        path, node = [], -1
        while (child := children.get((node, picks[node + 1]))) is not None:
            path.append(child)
            node = child
        return path

    def verdict(self, path: list[int], kept: list[int]) -> "RowVerdict":
        """What became of it. path: accepted nodes. kept: their tokens and the target's own."""
        if self.parents is None:
            more = len(path) < len(self.tokens) and bool(self.offered[len(path)])
        else:
            last = path[-1] if path else -1
            more = any(offered and parent == last for parent, offered in zip(self.parents, self.offered, strict=True))
        drafted = sum(self.offered)
        steps = drafted if self.draft_steps is None else self.draft_steps
        return RowVerdict(path, kept, "recovered" if more else "bonus", drafted, 0, self.scored, steps)


def _together(before: list[Tensor], draft: Draft, behind: list[Tensor]) -> list[Any]:
    """Tensors [B, k] and a draft between them on the host, in one transfer: lists of rows, the draft's as `_HostDraft`."""
    parts = [draft.tokens, draft.valid, draft.parents, None if draft.candidate is None else draft.offered]
    parts.append(None if draft.draft_steps is None else draft.draft_steps[:, None])
    found = iter(host_transfer.read(*before, *(part for part in parts if part is not None), *behind))
    first = [next(found) for _ in before]
    tokens, valid, parents, offered, steps = (None if part is None else next(found) for part in parts)
    assert tokens is not None
    assert valid is not None
    rows = []
    for row, scored in enumerate(valid):
        above, passes = None if parents is None else parents[row], None if steps is None else steps[row][0]
        rows.append(_HostDraft(tokens[row], scored if offered is None else offered[row], above, sum(scored), passes))
    return [*first, rows, *found]


@dataclass(slots=True)
class RowVerdict:
    """One row's verdict on the host.

    path: accepted nodes. tokens: committed tokens, accepted ones first. final: what the token after the accepted ones is.
    drafted: draft tokens that could be accepted. nodes: draft tokens scored. draft_steps: passes of the drafter. finished: set
    by the stopping rules. is_broken: it was cut before NO_TOKEN. notes: those of the verdict. against: 1 for what was accepted
    against the target's choice.
    """

    path: list[int]
    tokens: list[int]
    final: str
    drafted: int
    overruled: int
    nodes: int = 0
    draft_steps: int = 0
    finished: bool = False
    is_broken: bool = False
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
    prefill: the step ran a part of a prompt. probe: a plain step taken to learn what plain decoding costs. drafter: what
    drafted, where the session had the choice, and reason: why. finished: rows that ended in this step. errors: of these, the
    rows that failed, and why.
    Seconds are wall-clock; on CUDA those of searching, drafting and scoring are device time, and other is what is left of the
    step. seconds_search: spent for later steps (`Drafter.run_background_work`).
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
    drafter: str = ""
    reason: str = ""
    seconds_search: float = 0.0
    seconds_draft: float = 0.0
    seconds_score: float = 0.0
    seconds_other: float = 0.0
    finished: list[int] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)
    records: list[list[TokenRecord]] | None = None
    logits: list[Tensor] | None = None
    scores: list[Tensor] | None = None

    @property
    def seconds(self) -> float:
        return self.seconds_search + self.seconds_draft + self.seconds_score + self.seconds_other
