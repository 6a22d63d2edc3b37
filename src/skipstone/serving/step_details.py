"""Details of a step for the playground: probabilities, rejected drafts, and the layers that draft."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from skipstone.decoding.draft import Draft, RowVerdict
from skipstone.decoding.drafter import layers_used
from skipstone.decoding.method import Method
from skipstone.decoding.session import Session

MAX_BRANCHES = 12
"""Rejected branches that are reported for a step. Trees have many."""


@dataclass(slots=True)
class TokenDetails:
    """One token, committed or rejected.

    model: its probability by the model before any sampling setting; None for a draft that verification did not reach. drafter:
    its probability by the drafter, None if unknown. confidence: the drafter's top probability, if the token was drawn from a
    distribution that is not kept. layer: the layer that predicted it, None for the last. overruled: whether it was accepted
    against the model's own choice."""

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


def describe_layers(method: Method, session: Session) -> dict[str, Any]:
    """Which layers draft, as JSON values. count: the model's layers. lossless: of the method. drafters: `layers_used` of every
    drafter that uses layers of the model, named as in `Step.drafter`."""
    depth, used = session.model.depth, session.store.layers
    drafters = session.drafter.describe(method.name)
    if used < depth:  # the method stops early, and nothing drafts
        drafters = [layers_used(method.name, exits=[used])]
    return {"count": depth, "lossless": method.lossless, "drafters": drafters}


def describe_step(
    draft: Draft, row: int, verdict: RowVerdict, logits: Tensor, *, greedy: bool, depth: int, runs: int | None = None
) -> StepDetails:
    """The details of a row. logits: [k, V], from which its k tokens were chosen. greedy: whether drafts are the drafter's
    likeliest tokens. depth: number of layers. runs: number of layers that decode, None for all."""
    tokens = [_drafted(draft, row, node, greedy, depth) for node in verdict.path[: len(verdict.tokens)]]
    for one, against in zip(tokens, verdict.against, strict=False):
        one.overruled = bool(against)
    # a text that ends within its draft has not rejected the rest of it
    branches = [] if len(tokens) == len(verdict.tokens) else _branches(draft, row, verdict.path)
    tokens += [TokenDetails(token, layer=None if runs == depth else runs) for token in verdict.tokens[len(tokens) :]]
    shown = branches[:MAX_BRANCHES]
    drafted = [(place, [_drafted(draft, row, node, greedy, depth) for node in nodes]) for place, nodes, _ in shown]
    rejected = [RejectedBranch(place, tokens) for place, tokens in drafted]
    verified = [*enumerate(tokens)]
    verified += [(one.place, one.tokens[0]) for one, (_, _, reached) in zip(rejected, branches, strict=False) if reached]
    places, ids = [place for place, _ in verified], [one.token for _, one in verified]
    probabilities = logits.float().softmax(-1)[places, ids].tolist()
    for (_, one), probability in zip(verified, probabilities, strict=True):
        one.model = probability
    return StepDetails(tokens, rejected, len(branches) - len(rejected))


def _branches(draft: Draft, row: int, path: list[int]) -> list[tuple[int, list[int], bool]]:
    """Rejected branches, as (place of the first node, nodes that follow one another, whether verification reached the first
    node). path: accepted nodes."""
    offered = draft.offered[row].tolist()
    parents = list(range(-1, draft.width - 1)) if draft.parents is None else draft.parents[row].tolist()
    accepted = {-1, *path}
    next_place = {node: place for place, node in enumerate((-1, *path))}  # node -> place of its children
    branches: list[tuple[int, list[int], bool]] = []
    ends: dict[int, list[int]] = {}  # last node of a branch -> that branch
    for node, parent in enumerate(parents):
        if not offered[node] or node in accepted or parent not in next_place:
            continue
        branch = ends.pop(parent, None)
        if branch is None:
            branch = []
            branches.append((next_place[parent], branch, parent in accepted))
        branch.append(node)
        ends[node] = branch
        next_place[node] = next_place[parent] + 1
    return branches


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
