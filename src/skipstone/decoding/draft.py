"""Drafts and their results: Draft -> Verdict on the device -> RowVerdict and Step on the host.

Shapes: B rows, n draft tokens, V vocabulary. p is the target's processed distribution, q the draft's.
"""

from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from skipstone.engines import host_transfer
from skipstone.engines.partial_forward import PartialForward
from skipstone.utils.setup_times import SetupSeconds


@dataclass(slots=True)
class Draft:
    """Tokens proposed for one step: n nodes for every row of the batch.

    tokens: [B, n] int64. valid: [B, n] bool, False for padding.
    parents: [B, n] int64, the index of the node's parent, -1 for the root (the last committed token); None for a chain.
    q: [B, m, V] float, the processed distributions that the children of the root (index 0) and of node i - 1 (index i) were
        drawn from; in a chain that of every token. Siblings are drawn without replacement, in the order of their nodes. None
        means every q is one-hot (the drafter is deterministic or coupled to the target's noise).
    stochastic: [B, n] bool, only for a chain with q: False means that the node's q is one-hot and `q` is ignored.
    candidate: [B, n] bool, False for nodes that are scored but must not be accepted (Lookahead's window).
    exit_layer: [B, n] int64, the layer that each token was drafted at, or one number for all; for reports only.
    confidence: [B, n] float, the drafter's probability of each token.
    draft_steps: [B] int64, number of drafter passes per row; None means one per token that may be accepted.
    levels: maximum number of nodes on a path of a tree; None means all nodes. siblings: the same of a node's children.
    Siblings that may be accepted must have different tokens.
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
    siblings: int | None = None

    @classmethod
    def empty(cls, rows: int, device: torch.device, forward: PartialForward | None = None) -> "Draft":
        """A draft without tokens, for a plain step."""
        return cls(*_nothing(rows, device), forward)

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    @property
    def offered(self) -> Tensor:
        """Nodes [B, n] bool that may be accepted."""
        return self.valid if self.candidate is None else self.valid & self.candidate

    def check(self) -> None:
        """Assert the invariants (for tests; it synchronises with the device)."""
        assert self.tokens.shape == self.valid.shape, (self.tokens.shape, self.valid.shape)
        if self.q is not None and self.parents is not None:
            assert self.stochastic is None, "all nodes of a tree with q are drawn"
            assert bool((self.parents[self.valid] + 1 < self.q.shape[1]).all()), "every node has a distribution"
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
    """(tokens [B, 0] int64, valid [B, 0] bool)."""
    with torch.inference_mode(False):
        tokens = torch.empty((rows, 0), dtype=torch.long, device=device)
        return tokens, tokens.bool()


@dataclass(slots=True)
class Verdict:
    """The accepted part of a draft and the target's next token.

    path: [B, n] int64, the accepted nodes in order; a row's entries after the first `accepted` are padding.
    tokens: [B, n+1] int64, the accepted tokens and then the recovered or bonus token; NO_TOKEN if no token can be chosen.
    accepted: [B] int64. overruled: [B, n] bool, draft tokens that were waived (AdaSD) and that the acceptance rule would have
    rejected, or None.
    notes: [B, k] int64, a method's own figures, which reach the host in the same transfer.
    """

    path: Tensor
    tokens: Tensor
    accepted: Tensor
    overruled: Tensor | None = None
    notes: Tensor | None = None

    def tolist(self, draft: Draft) -> "list[RowVerdict]":
        """The verdict on the host, in one transfer from the device: the only synchronisation of a step."""
        if not draft.width and self.notes is None and draft.draft_steps is None:
            return [RowVerdict([], tokens, "bonus", 0, 0) for tokens in self.tokens.tolist()]
        parts = {"path": self.path, "picks": self.tokens, "against": self.overruled, "notes": self.notes}
        verdicts = []
        for row in _rows_on_host(draft, accepted=self.accepted[:, None], **parts):
            count = row["accepted"][0]
            verdicts.append(_row_verdict(row, row["path"][:count], row["picks"][: count + 1], row.get("against", [])))
        return verdicts


@dataclass(slots=True)
class GreedyVerdict:
    """A verdict for greedy rows only: the host walks the draft along the target's picks.

    picks: [B, n+1] int64, the target's pick after the root and every node; NO_TOKEN and notes as in `Verdict`. waived: [B, n]
    bool, tokens of a chain that the walk accepts for any pick; None for none.
    """

    draft: Draft
    picks: Tensor
    waived: Tensor | None = None
    notes: Tensor | None = None

    @property
    def accepted(self) -> Tensor:
        """[B] int64, the number of accepted tokens of a chain."""
        assert self.draft.parents is None, "trees are walked on the host"
        passed = self.draft.tokens == self.picks[:, :-1]
        passed = passed if self.waived is None else passed | self.waived
        return (passed & self.draft.offered).long().cumprod(1).sum(1)

    def tolist(self, draft: Draft) -> "list[RowVerdict]":
        """The verdict on the host, in one transfer from the device: the only synchronisation of a step."""
        if not draft.width and self.notes is None:
            return [RowVerdict([], picks, "bonus", 0, 0) for picks in self.picks.tolist()]
        verdicts = []
        for row in _rows_on_host(draft, picks=self.picks, waived=self.waived, notes=self.notes):
            path, drafts, picks = _walk(row), row["tokens"], row["picks"]
            tokens = [*(drafts[node] for node in path), picks[path[-1] + 1 if path else 0]]
            against = [int(drafts[node] != picks[node]) for node in path] if "waived" in row else []
            verdicts.append(_row_verdict(row, path, tokens, against))
        return verdicts


@dataclass(slots=True)
class UnverifiedDraft:
    """A verdict that accepts every token of a chain. last: [B] int64, the target's own token after it; NO_TOKEN as in
    `Verdict`."""

    last: Tensor

    def tolist(self, draft: Draft) -> "list[RowVerdict]":
        """The verdict on the host, in one transfer from the device: the only synchronisation of a step."""
        verdicts = []
        for row in _rows_on_host(draft, last=self.last[:, None]):
            count = sum(row["valid"])
            verdicts.append(_row_verdict(row, [*range(count)], row["tokens"][:count] + row["last"], []))
        return verdicts


def _rows_on_host(draft: Draft, **verdict: Tensor | None) -> list[dict[str, list[int]]]:
    """A draft and its verdict, tensors [B, k], row by row without those that are None, from one transfer."""
    parts = {"tokens": draft.tokens, "valid": draft.valid, "parents": draft.parents, **verdict}
    if draft.candidate is not None:
        parts["offered"] = draft.offered
    if draft.draft_steps is not None:
        parts["draft_steps"] = draft.draft_steps[:, None]
    given = {name: part for name, part in parts.items() if part is not None}
    return [dict(zip(given, row, strict=True)) for row in zip(*host_transfer.read(*given.values()), strict=True)]


def _walk(row: dict[str, list[int]]) -> list[int]:
    """The nodes of a row that the target's picks accept."""
    tokens, picks, offered = row["tokens"], row["picks"], row.get("offered", row["valid"])
    if "parents" not in row:
        waived, count = row.get("waived", ()), 0
        while count < len(tokens) and offered[count] and (tokens[count] == picks[count] or (waived and waived[count])):
            count += 1
        return list(range(count))
    nodes = zip(row["parents"], tokens, offered, strict=True)
    children = {(parent, token): node for node, (parent, token, is_offered) in enumerate(nodes) if is_offered}
    path, node = [], -1
    while (child := children.get((node, picks[node + 1]))) is not None:
        path.append(child)
        node = child
    return path


def _row_verdict(row: dict[str, list[int]], path: list[int], tokens: list[int], against: list[int]) -> "RowVerdict":
    """A row's verdict. path: accepted nodes. tokens: theirs and the target's own. against: as in `RowVerdict`."""
    offered, last = row.get("offered", row["valid"]), path[-1] if path else -1
    if "parents" in row:
        has_rejected = any(is_offered and parent == last for parent, is_offered in zip(row["parents"], offered, strict=True))
    else:
        has_rejected = last + 1 < len(offered) and bool(offered[last + 1])
    drafted, final = sum(offered), "recovered" if has_rejected else "bonus"
    steps = row["draft_steps"][0] if "draft_steps" in row else drafted
    notes = row.get("notes", [])
    return RowVerdict(path, tokens, final, drafted, sum(against), sum(row["valid"]), steps, notes=notes, against=against)


@dataclass(slots=True)
class RowVerdict:
    """One row's verdict on the host.

    path: accepted nodes. tokens: committed tokens, the accepted ones first. final: origin of the token after the accepted ones.
    drafted: number of draft tokens that could be accepted. overruled: number accepted against the target's choice, and against:
    1 for each of them. nodes: number of scored draft tokens. draft_steps: number of drafter passes. finished: set by the
    stopping rules. is_broken: it was cut before NO_TOKEN. notes: those of the verdict.
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

    def cut(self, count: int) -> None:
        """Keep only the first `count` tokens."""
        self.tokens = self.tokens[:count]
        self.path = self.path[:count]
        self.overruled = sum(self.against[: len(self.path)])

    @property
    def origin(self) -> list[str]:
        accepted = len(self.path)
        return ["draft"] * accepted + [self.final] * (len(self.tokens) - accepted)


@dataclass(slots=True)
class TokenRecord:
    """Figures of one token for `record=True`.

    p, q: the target's and the drafter's probability of it. entropy: the target's, in nats, at temperature 1 after processors
    and before warpers. p and entropy are None for a draft that the verification did not reach. q is None for a token that was
    not drafted."""

    token: int
    p: float | None
    q: float | None
    entropy: float | None
    exit_layer: int | None
    accepted: bool


@dataclass(slots=True)
class Step:
    """One step of the loop over all rows. Lists have one entry per row; an inactive row has empty lists and zeros.

    origin: for each token "prefill", "draft" (accepted), "recovered" or "bonus". drafted: number of tokens submitted.
    draft_steps: number of drafter passes. verified_nodes: number of scored nodes, leaves included. prefill: the step ran parts
    of prompts; rows that decoded had no drafts, and seconds_draft is the time in which the drafter read prompts. probe: a plain
    step to measure plain decoding. drafter, reason: the drafter that `auto` chose, and why. finished: rows that ended in this
    step. errors: failed rows among them -> reason.
    Seconds are wall-clock. On CUDA, those of searching, drafting and scoring are device time, and other is the rest of the
    step. seconds_search: spent for later steps (`Drafter.run_background_work`). seconds_outside: of learning and recording
    after these stages, and of waiting for other users of the model. setup: name of set-up work -> its seconds, which no stage
    includes. The first step has also that of the call before it.
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
    seconds_outside: float = 0.0
    setup: SetupSeconds = field(default_factory=SetupSeconds)
    finished: list[int] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)
    records: list[list[TokenRecord]] | None = None
    logits: list[Tensor] | None = None
    scores: list[Tensor] | None = None

    @property
    def decoding_rows(self) -> list[int]:
        """Rows that decoded, with drafts or without. The first token of a text comes with its prompt."""
        return [row for row, tokens in enumerate(self.tokens) if tokens and self.origin[row] != ["prefill"]]

    @property
    def seconds(self) -> float:
        """Seconds of its stages."""
        return self.seconds_search + self.seconds_draft + self.seconds_score + self.seconds_other
