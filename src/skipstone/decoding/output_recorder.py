"""Records probabilities of single tokens, raw logits and processed scores of every step."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from skipstone.decoding.draft import Draft, RowVerdict, Step, TokenRecord
from skipstone.decoding.sampling import Scores
from skipstone.decoding.verify import entropy, one_hot_where


@dataclass
class OutputRecorder:
    """A recorder of the loop. record: per-token figures, rejected drafts included. logits, scores: [k, V] per row and step.

    scores are log p for sampled rows (up to a constant HF's warped scores) and processed logits for greedy ones.
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
        """[k, V] per row: what each of the k committed tokens was chosen from."""
        kept: list[list[Tensor]] = [[] for _ in verdicts]
        for place in range(max((len(v.tokens) for v in verdicts), default=0)):
            node, path, reached = _at(verdicts, place, scores.logits.device)
            values = scores.at(node)
            if processed:
                p = scores.sampler.process(values, path, reached)
                values = p if scores.sampler.greedy else scores.sampler.warped(p, path, reached).log()
            for row, verdict in enumerate(verdicts):
                if place < len(verdict.tokens):
                    kept[row].append(values[row])
        empty = scores.logits.new_empty((0, scores.logits.shape[2]))
        return [torch.stack(rows) if rows else empty for rows in kept]

    def _records(self, draft: Draft, scores: Scores, verdicts: list[RowVerdict]) -> list[list[TokenRecord]]:
        """Per row: the committed tokens, then the drafts that were not accepted: first those rejected at the final token's
        place, with the target's p, then those that the verification never reached."""
        records: list[list[TokenRecord]] = [[] for _ in verdicts]
        for place in range(max((len(v.tokens) for v in verdicts), default=0)):
            node, path, reached = _at(verdicts, place, scores.logits.device)
            processed = scores.sampler.process(scores.at(node), path, reached)
            p = scores.sampler.warped(processed, path, reached)
            spread = entropy(processed.softmax(-1), base=math.e)
            for row, verdict in enumerate(verdicts):
                if not reached[row]:
                    continue
                own = place < len(verdict.path)
                source = verdict.path[place] if own else None
                records[row].append(_token(draft, row, source, verdict.tokens[place], p[row], spread[row], own))
                if place == len(verdict.tokens) - 1:
                    judged = [] if own else _children(draft, row, int(node[row]))
                    for lost in judged:
                        token = int(draft.tokens[row, lost])
                        records[row].append(_token(draft, row, lost, token, p[row], spread[row], False))
                    for lost in sorted(set(_valid(draft, row)) - set(judged) - set(verdict.path)):
                        token = int(draft.tokens[row, lost])
                        records[row].append(_token(draft, row, lost, token, None, None, False))
        return records


def _at(verdicts: list[RowVerdict], place: int, device: torch.device) -> tuple[Tensor, Tensor, list[bool]]:
    """(node that the committed token number `place` follows [B], tokens before it [B, place], rows that have such a token)."""
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
