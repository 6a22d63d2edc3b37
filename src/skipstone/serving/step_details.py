"""Details of a step for the playground: probabilities, rejected drafts, layers."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from skipstone.decoding.draft import Draft, RowVerdict

MAX_BRANCHES = 12
"""Rejected branches that are reported for a step. Trees have many."""


@dataclass(slots=True)
class TokenDetails:
    """One token, committed or rejected.

    model: its probability by the model before any sampling setting; None for a draft that verification did not reach. drafter:
    its probability by the drafter, None if unknown. confidence: the drafter's top probability, if the token was drawn from a
    distribution that is not kept. layer: the layer that predicted it, None for the last. overruled: it was kept against the
    model's own choice."""

    token: int
    model: float | None = None
    drafter: float | None = None
    confidence: float | None = None
    layer: int | None = None
    overruled: bool = False


@dataclass(slots=True)
class RejectedBranch:
    """Rejected drafts that follow one another. place: of the first one, among the step's tokens."""

    place: int
    tokens: list[TokenDetails]


@dataclass(slots=True)
class StepDetails:
    """Details of one row. left_out: rejected branches that are not reported. layers: of `describe_layers`, None if unchanged.
    plain_milliseconds: time of a plain step, None if unknown."""

    tokens: list[TokenDetails]
    rejected: list[RejectedBranch] = field(default_factory=list)
    left_out: int = 0
    layers: dict[str, Any] | None = None
    plain_milliseconds: float | None = None


def describe_step(
    draft: Draft, row: int, verdict: RowVerdict, logits: Tensor, *, greedy: bool, depth: int, runs: int | None = None
) -> StepDetails:
    """The details of a row. logits: [k, V], from which its k tokens were chosen. greedy: whether drafts are the drafter's
    likeliest tokens. depth: number of layers. runs: number of layers that decode, None for all."""
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
    rejected = [
        RejectedBranch(place, [_drafted(draft, row, node, greedy, depth) for node in nodes])
        for place, nodes, _ in branches[:MAX_BRANCHES]
    ]
    judged = [(one.place, one.tokens[0]) for one, (_, _, reached) in zip(rejected, branches, strict=False) if reached]
    _set_model_probabilities(logits, [*enumerate(tokens), *judged])
    return StepDetails(tokens, rejected, len(branches) - len(rejected))


def _set_model_probabilities(logits: Tensor, wanted: list[tuple[int, TokenDetails]]) -> None:
    """Set the model's probability of tokens at their places."""
    chances = logits.float().softmax(-1)  # [k, V]
    places, tokens = [place for place, _ in wanted], [one.token for _, one in wanted]
    for (_, one), chance in zip(wanted, chances[places, tokens].tolist(), strict=True):
        one.model = chance


def _branches(draft: Draft, row: int, path: list[int]) -> Iterator[tuple[int, list[int], bool]]:
    """Rejected branches, as (place of the first node, nodes that follow one another, whether verification reached the first
    node). path: accepted nodes."""
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
    """The details of a draft node, by its drafter."""
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
