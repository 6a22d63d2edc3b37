"""What is told of a step beside its tokens, where a request asks for it: probabilities, drafts that were refused, layers."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from skipstone.decoding.draft import Draft, RowVerdict

MAX_BRANCHES = 12
"""Branches of refused drafts that are told of a step: trees have many."""


@dataclass(slots=True)
class TokenDetails:
    """One token, committed or refused. model: its probability by the model before any setting, None for a draft that the
    verification never reached. drafter: its probability by what drafted it, None where that says none. confidence: in place of
    it, where the token was drawn at random from what is not kept, that of the drafter's likeliest token. layer: after how many
    layers it was predicted, None for all of them. overruled: it was kept against the model's own choice."""

    token: int
    model: float | None = None
    drafter: float | None = None
    confidence: float | None = None
    layer: int | None = None
    overruled: bool = False


@dataclass(slots=True)
class RejectedBranch:
    """Refused drafts, each behind the one before. place: the number, among the step's tokens, of that in whose place the first
    of them was drafted."""

    place: int
    tokens: list[TokenDetails]


@dataclass(slots=True)
class StepDetails:
    """Of one row in one step. tokens: those that were committed. left_out: refused branches that are not told. layers: as in
    `describe_layers`, where they are not what was told before. plain_milliseconds: of a plain step, where the method has timed
    it."""

    tokens: list[TokenDetails]
    refused: list[RejectedBranch] = field(default_factory=list)
    left_out: int = 0
    layers: dict[str, Any] | None = None
    plain_milliseconds: float | None = None


def describe_step(
    draft: Draft, row: int, verdict: RowVerdict, logits: Tensor, *, greedy: bool, depth: int, runs: int | None = None
) -> StepDetails:
    """Of a row. logits: [k, V], what its k tokens were chosen from. greedy: whether drafts are the drafter's likeliest tokens.
    depth: layers of the model. runs: of these, those that decode; None for all."""
    own = None if runs == depth else runs
    against = [*verdict.against, *[0] * len(verdict.tokens)]
    tokens = [
        _drafted(draft, row, verdict.path[place], greedy, depth)
        if place < len(verdict.path)
        else TokenDetails(token, layer=own)
        for place, token in enumerate(verdict.tokens)
    ]
    for place, one in enumerate(tokens):
        one.overruled = place < len(verdict.path) and bool(against[place])
    ended = len(verdict.path) == len(verdict.tokens)  # within the draft: what is behind the end was neither kept nor refused
    branches = [] if ended else list(_branches(draft, row, verdict.path))
    refused = [
        RejectedBranch(place, [_drafted(draft, row, node, greedy, depth) for node in nodes])
        for place, nodes, _ in branches[:MAX_BRANCHES]
    ]
    judged = [(one.place, one.tokens[0]) for one, (_, _, reached) in zip(refused, branches, strict=False) if reached]
    _ask(logits, [*enumerate(tokens), *judged])
    return StepDetails(tokens, refused, len(branches) - len(refused))


def _ask(logits: Tensor, asked: list[tuple[int, TokenDetails]]) -> None:
    """Set the model's probabilities of tokens at places."""
    chances = logits.float().softmax(-1)  # [k, V]
    places, tokens = [place for place, _ in asked], [one.token for _, one in asked]
    for (_, one), chance in zip(asked, chances[places, tokens].tolist(), strict=True):
        one.model = chance


def _branches(draft: Draft, row: int, path: list[int]) -> Iterator[tuple[int, list[int], bool]]:
    """The nodes that might have been accepted and were not, as (place of the first one, nodes that follow one another, whether
    the verification reached the first one). path: accepted nodes."""
    offered = draft.offered[row].tolist()
    parents = list(range(-1, draft.width - 1)) if draft.parents is None else draft.parents[row].tolist()
    kept = {-1, *path}
    behind = {node: place for place, node in enumerate((-1, *path))}  # node -> place of what follows it
    found: list[tuple[int, list[int], bool]] = []
    ends: dict[int, list[int]] = {}  # last node of a branch -> that branch
    for node, parent in enumerate(parents):
        if not offered[node] or node in kept or parent not in behind:
            continue
        branch = ends.pop(parent, None)
        if branch is None:
            branch = []
            found.append((behind[parent], branch, parent in kept))
        branch.append(node)
        ends[node] = branch
        behind[node] = behind[parent] + 1
    yield from found


def _drafted(draft: Draft, row: int, node: int, greedy: bool, depth: int) -> TokenDetails:
    """What the drafter says of a node."""
    token, drafter, confidence = int(draft.tokens[row, node]), None, None
    drawn = draft.q is not None and (draft.stochastic is None or bool(draft.stochastic[row, node]))
    if drawn and draft.q is not None:
        drafter = float(draft.q[row, node, token])
    elif draft.confidence is not None and node < draft.confidence.shape[1]:
        sure = float(draft.confidence[row, node])
        drafter, confidence = (sure, None) if greedy else (None, sure)
    layer = draft.exit_layer
    if isinstance(layer, Tensor):
        layer = int(layer[row, node]) if node < layer.shape[1] else None
    return TokenDetails(token, None, drafter, confidence, layer if layer and layer < depth else None)
