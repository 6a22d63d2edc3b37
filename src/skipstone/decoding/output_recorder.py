"""Records probabilities of tokens, raw logits and processed scores of every step."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from skipstone.decoding.draft import Draft, RowVerdict, Step, TokenRecord
from skipstone.decoding.sampling import Scores
from skipstone.decoding.verify import entropy, one_hot_where

Place = tuple[Tensor, Tensor, list[bool]]
"""Of a committed token in all rows: the node before it [B], the tokens before it [B, place], and which rows have it."""


@dataclass
class OutputRecorder:
    """A recorder of the loop. record: figures of every token, rejected drafts included.

    logits, scores: [k, V] per row and step. Scores are log p for sampled rows (transformers' warped scores plus a constant) and
    processed logits for greedy rows.
    """

    record: bool = False
    logits: bool = False
    scores: bool = False

    def __call__(self, step: Step, draft: Draft, scores: Scores, verdicts: list[RowVerdict]) -> None:
        places = [
            _at(verdicts, place, scores.logits.device) for place in range(max((len(v.tokens) for v in verdicts), default=0))
        ]
        if self.logits:
            step.logits = _by_row([scores.at(node) for node, _, _ in places], verdicts, scores.logits)
        if self.record or self.scores:
            self._record_processed(places, step, draft, scores, verdicts)

    def _record_processed(
        self, places: list[Place], step: Step, draft: Draft, scores: Scores, verdicts: list[RowVerdict]
    ) -> None:
        """What needs the processors and warpers, which are expensive for large vocabularies."""
        sampler, processed_scores = scores.sampler, list[Tensor]()
        records: list[list[TokenRecord]] = [[] for _ in verdicts]
        for place, (node, path, reached) in enumerate(places):
            processed = sampler.process(scores.at(node), path, reached)
            p = sampler.warped(processed, path, reached) if self.record or not sampler.greedy else processed
            if self.scores:
                processed_scores.append(processed if sampler.greedy else p.log())
            if self.record:
                spread = entropy(processed.softmax(-1), base=math.e)
                for row in (row for row, is_reached in enumerate(reached) if is_reached):
                    records[row] += _records(draft, row, verdicts[row], place, int(node[row]), p[row], spread[row])
        if self.record:
            step.records = records
        if self.scores:
            step.scores = _by_row(processed_scores, verdicts, scores.logits)


def _by_row(columns: list[Tensor], verdicts: list[RowVerdict], logits: Tensor) -> list[Tensor]:
    """[k, V] for every row, of one [B, V] per place. logits: of the step."""
    empty = logits.new_empty((0, logits.shape[2]))
    rows = [[column[row] for column in columns[: len(v.tokens)]] for row, v in enumerate(verdicts)]
    return [torch.stack(row) if row else empty for row in rows]


def _records(
    draft: Draft, row: int, verdict: RowVerdict, place: int, node: int, p: Tensor, spread: Tensor
) -> Iterator[TokenRecord]:
    """Of the committed token number `place`, which follows a node. With the last one also those of the drafts rejected there,
    with the target's p, and of the drafts that the verification did not reach."""
    is_accepted = place < len(verdict.path)
    yield _token(draft, row, verdict.path[place] if is_accepted else None, verdict.tokens[place], p, spread, is_accepted)
    if place < len(verdict.tokens) - 1:
        return
    valid = draft.valid[row].nonzero().flatten().tolist()
    parents = list(range(-1, draft.width - 1)) if draft.parents is None else draft.parents[row].tolist()
    rejected = [] if is_accepted else [child for child in valid if parents[child] == node]
    for child in rejected:
        yield _token(draft, row, child, int(draft.tokens[row, child]), p, spread, False)
    for unreached in sorted({*valid} - {*rejected, *verdict.path}):
        yield _token(draft, row, unreached, int(draft.tokens[row, unreached]), None, None, False)


def _at(verdicts: list[RowVerdict], place: int, device: torch.device) -> Place:
    """Where the committed token number `place` was chosen."""
    nodes = [v.path[place - 1] if 0 < place <= len(v.path) else -1 for v in verdicts]
    path = [(v.tokens[:place] + [0] * place)[:place] for v in verdicts]
    before = torch.tensor(path, device=device, dtype=torch.long).reshape(len(verdicts), place)
    return torch.tensor(nodes, dtype=torch.int64, device=device), before, [place < len(v.tokens) for v in verdicts]


def _token(
    draft: Draft, row: int, node: int | None, token: int, p: Tensor | None, spread: Tensor | None, accepted: bool
) -> TokenRecord:
    q = exit_layer = None
    if node is not None:
        q = float(one_hot_where(draft)[row, node, token]) if draft.q is not None else 1.0
        layer = draft.exit_layer
        exit_layer = int(layer[row, node]) if isinstance(layer, Tensor) else layer
    probability = None if p is None else float(p[token])
    return TokenRecord(token, probability, q, None if spread is None else float(spread), exit_layer, accepted)
