"""A synthetic method that proposes random trees. Branches may peek at a reference text, so that deep paths are accepted."""

import random
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from skipstone.decoding.draft import Draft, RowVerdict
from skipstone.decoding.drafter import Drafter
from skipstone.decoding.method import Method
from skipstone.decoding.request import Request
from skipstone.engines.engine import SurvivalThresholds
from skipstone.engines.model_runner import ModelRunner

ROOT = -1


@dataclass(frozen=True)
class Trees(Method):
    """nodes: most nodes a row. branching: chance that a node hangs off any earlier node instead of the newest; 0 makes chains.

    references: texts (prompt and continuation) to peek at. peeking: chance that a node on a reference's path gets its token.
    barred: chance that a node may not be accepted.
    """

    name: ClassVar[str] = "trees"

    nodes: int = 8
    branching: float = 0.5
    peeking: float = 0.6
    barred: float = 0.0
    seed: int = 0
    references: tuple[tuple[int, ...], ...] = ()

    def create_drafter(self, model: ModelRunner, rows: int, capacity: int) -> Drafter:
        return TreeDrafter(self, model, rows)


class TreeDrafter(Drafter):
    def __init__(self, method: Trees, model: ModelRunner, rows: int) -> None:
        self.scratch_slots = method.nodes
        self.method, self.model = method, model
        self.texts: list[list[int]] = [[] for _ in range(rows)]

    def add_request(self, row: int, request: Request) -> None:
        self.texts[row] = request.prompt.tolist()

    def observe_commits(self, draft: Draft | None, verdicts: list[RowVerdict]) -> None:
        for row, verdict in enumerate(verdicts):
            self.texts[row] += verdict.tokens

    def propose_draft(self, limits: list[int], stop_rule: SurvivalThresholds | None = None) -> Draft:
        view = self.view
        trees = [self._tree(row, limits[row] if alive else 0) for row, alive in enumerate(view.alive)]
        width = max(len(tree) for tree in trees)
        if width == 0:
            return Draft.empty(view.rows, view.root.device, view.start_forward([0] * view.rows))
        tokens = torch.zeros((view.rows, width), dtype=torch.long)
        parents = torch.full_like(tokens, ROOT)
        valid, candidate = torch.zeros_like(tokens, dtype=torch.bool), torch.ones_like(tokens, dtype=torch.bool)
        for row, tree in enumerate(trees):
            dice = self._dice("holes", row)
            places = [ROOT, *sorted(dice.sample(range(width), len(tree)))]
            for node, (parent, token) in enumerate(tree):
                place = places[node + 1]
                tokens[row, place], parents[row, place], valid[row, place] = token, places[parent + 1], True
                candidate[row, place] = dice.random() >= self.method.barred
        forward = view.start_forward([width] * view.rows)
        forward.append(tokens, valid, parents)
        draft = Draft(tokens, valid, forward, parents=parents, candidate=candidate if self.method.barred else None)
        draft.check()
        return draft

    def _tree(self, row: int, depth: int) -> list[tuple[int, int]]:
        """(parent, token) per node; no node deeper than `depth`."""
        method, dice = self.method, self._dice("tree", row)
        nodes: list[tuple[int, int]] = []
        paths: dict[int, list[int]] = {ROOT: []}
        for _ in range(dice.randint(0, method.nodes) if depth > 0 else 0):
            newest = len(nodes) - 1
            parent = dice.choice(list(paths)) if dice.random() < method.branching else newest
            taken = {token for above, token in nodes if above == parent}
            free = [token for token in range(self.model.embeddings) if token not in taken]
            if len(paths[parent]) >= depth or not free:
                continue
            right = self._peek([*self.texts[row], *paths[parent]])
            token = right if right in free and dice.random() < method.peeking else dice.choice(free)
            paths[newest + 1] = [*paths[parent], token]
            nodes.append((parent, token))
        return nodes

    def _dice(self, use: str, row: int) -> random.Random:
        return random.Random(f"{use} {self.method.seed} {row} {self.texts[row]}")

    def _peek(self, text: list[int]) -> int | None:
        for reference in self.method.references:
            if list(reference[: len(text)]) == text and len(reference) > len(text):
                return reference[len(text)]
        return None


def reference(prompt: Tensor, new_tokens: list[int]) -> tuple[int, ...]:
    return (*prompt.tolist(), *new_tokens)
