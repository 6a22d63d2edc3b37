"""Records probabilities of tokens, raw logits and processed scores of every step."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from skipstone.decoding.draft import Draft, RowVerdict, Step, TokenRecord
from skipstone.decoding.sampling import Scores
from skipstone.decoding.verify import entropy, one_hot_where


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
        if self.record:
            step.records = self._records(draft, scores, verdicts)
        if self.logits:
            step.logits = self._committed(scores, verdicts, processed=False)
        if self.scores:
            step.scores = self._committed(scores, verdicts, processed=True)

    def _committed(self, scores: Scores, verdicts: list[RowVerdict], processed: bool) -> list[Tensor]:
        """[k, V] per row: the logits or scores of each of the k committed tokens."""
        values_by_row: list[list[Tensor]] = [[] for _ in verdicts]
        for place in range(max((len(v.tokens) for v in verdicts), default=0)):
            node, path, reached = _at(verdicts, place, scores.logits.device)
            values = scores.at(node)
            if processed:
                p = scores.sampler.process(values, path, reached)
                values = p if scores.sampler.greedy else scores.sampler.warped(p, path, reached).log()
            for row, verdict in enumerate(verdicts):
                if place < len(verdict.tokens):
                    values_by_row[row].append(values[row])
        empty = scores.logits.new_empty((0, scores.logits.shape[2]))
        return [torch.stack(row_values) if row_values else empty for row_values in values_by_row]

    def _records(self, draft: Draft, scores: Scores, verdicts: list[RowVerdict]) -> list[list[TokenRecord]]:
        """Per row: the committed tokens, the drafts rejected at the final token's place with the target's p, and the drafts
        that the verification did not reach."""
        records: list[list[TokenRecord]] = [[] for _ in verdicts]
        for place in range(max((len(v.tokens) for v in verdicts), default=0)):
            node, path, reached = _at(verdicts, place, scores.logits.device)
            processed = scores.sampler.process(scores.at(node), path, reached)
            p = scores.sampler.warped(processed, path, reached)
            spread = entropy(processed.softmax(-1), base=math.e)
            for row, verdict in enumerate(verdicts):
                if not reached[row]:
                    continue
                is_accepted = place < len(verdict.path)
                source = verdict.path[place] if is_accepted else None
                records[row].append(_token(draft, row, source, verdict.tokens[place], p[row], spread[row], is_accepted))
                if place == len(verdict.tokens) - 1:
                    rejected = [] if is_accepted else _children(draft, row, int(node[row]))
                    for child in rejected:
                        token = int(draft.tokens[row, child])
                        records[row].append(_token(draft, row, child, token, p[row], spread[row], False))
                    for unreached in sorted(set(_valid(draft, row)) - set(rejected) - set(verdict.path)):
                        token = int(draft.tokens[row, unreached])
                        records[row].append(_token(draft, row, unreached, token, None, None, False))
        return records


def _at(verdicts: list[RowVerdict], place: int, device: torch.device) -> tuple[Tensor, Tensor, list[bool]]:
    """Where the committed token number `place` was chosen: (node before it [B], tokens before it [B, place], rows with it)."""
    nodes = [v.path[place - 1] if 0 < place <= len(v.path) else -1 for v in verdicts]
    path = [(v.tokens[:place] + [0] * place)[:place] for v in verdicts]
    before = torch.tensor(path, device=device, dtype=torch.long).reshape(len(verdicts), place)
    return torch.tensor(nodes, dtype=torch.int64, device=device), before, [place < len(v.tokens) for v in verdicts]


def _valid(draft: Draft, row: int) -> list[int]:
    return draft.valid[row].nonzero().flatten().tolist()


def _children(draft: Draft, row: int, node: int) -> list[int]:
    """Valid draft nodes that follow a node (-1: the root)."""
    parents = list(range(-1, draft.width - 1)) if draft.parents is None else draft.parents[row].tolist()
    return [child for child in _valid(draft, row) if parents[child] == node]


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
