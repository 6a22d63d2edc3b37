"""Break the Sequential Dependency of LLM Inference Using Lookahead Decoding
(Fu, Bailis, Stoica & Zhang, ICML 2024, arXiv 2402.02057), section 3 and Algorithm 2.

Every pass has two branches under one mask. The lookahead branch refines W guesses, as in Jacobi decoding, and keeps the last
N - 1 versions of each. With the new version, each of the W columns is an n-gram of N tokens by the model itself. The
verification branch drafts n-grams that begin with the last committed token. Both are one tree: the window's first row is a
chain after the last token, each later row consists of children of the row before it, and the n-grams form a trie.

`match` verifies the trie, so sampled texts are exact, too. Nodes of the window are never accepted (`candidate`). The window
moves by the target's likeliest tokens at every temperature. The pool starts with the n-grams of the prompt. Deviation: all rows
of the window have W tokens (in the released code the first has one fewer).
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from skipstone.decoding.draft import Draft, GreedyVerdict, RowVerdict, Verdict
from skipstone.decoding.drafter import Drafter
from skipstone.decoding.method import DraftingMethod, Preset
from skipstone.decoding.request import Request
from skipstone.decoding.sampling import Scores
from skipstone.decoding.settings import setting
from skipstone.engines.engine import SurvivalThresholds
from skipstone.engines.model_runner import ModelRunner
from skipstone.methods.drafting.lookups import LookupDrafter, RowDraft, random_prompt_tokens


@dataclass(frozen=True)
class Lookahead(DraftingMethod):
    """Lookahead decoding: a window of guesses and a pool of n-grams."""

    name: ClassVar[str] = "lookahead"
    positional: ClassVar[str] = "verifies trees"
    presets: ClassVar[dict[str, Preset]] = {
        "release": Preset(
            "minimal.py of LookaheadDecoding, for a 7B model. AdaDecode's paper takes it as a baseline; SWIFT's does not say",
            {"window": 7, "ngram": 5, "guesses": 7},
        )
    }
    if_few_accepted: ClassVar[str] = "An acceptance rate that low says that the model's own n-grams do not come again."

    window: int = setting(7, "W, guesses that a pass refines.")
    ngram: int = setting(5, "N, tokens of an n-gram.", min_value=2)
    guesses: int = setting(7, "G, stored and drafted n-grams for each first token.")

    def create_drafter(self, model: ModelRunner, rows: int, capacity: int) -> Drafter:
        return LookaheadDrafter(self, rows)


class NgramPool:
    """The latest `max_ngrams` (G) n-grams for each first token."""

    def __init__(self, max_ngrams: int) -> None:
        self.max_ngrams = max_ngrams
        self._ngrams: dict[int, OrderedDict[tuple[int, ...], None]] = {}

    def add(self, gram: tuple[int, ...]) -> None:
        """Add an n-gram as the newest of its first token."""
        ngrams = self._ngrams.setdefault(gram[0], OrderedDict())
        ngrams[gram[1:]] = None
        ngrams.move_to_end(gram[1:])
        if len(ngrams) > self.max_ngrams:
            ngrams.popitem(last=False)

    def after(self, token: int) -> list[tuple[int, ...]]:
        """The n-grams of a first token without it, the newest first."""
        return list(reversed(self._ngrams.get(token, ())))


@dataclass
class LookaheadWindow:
    """The lookahead branch of a row.

    levels: up to N - 1 versions of the W guesses, the oldest first. bottom: number of the newest version's first node in this
    step's tree; None if the tree does not have the window.
    """

    levels: list[list[int]] = field(default_factory=list)
    bottom: int | None = None

    def add_to(self, draft: RowDraft) -> None:
        """Add the window to a row's draft. The oldest version is a chain; later guesses are children of the version before."""
        previous: list[int] = []
        for number, level in enumerate(self.levels):
            self.bottom = len(draft.tokens)
            nodes: list[int] = []
            for column, token in enumerate(level):
                parent = previous[column] if number else nodes[-1] if nodes else -1
                nodes.append(draft.add(token, parent, candidate=False))
            previous = nodes

    def move(self, guesses: list[int], size: int, pool: NgramPool) -> None:
        """Add a new version of the guesses. A full window adds its n-grams to the pool and drops its oldest version."""
        self.levels.append(guesses)
        if len(self.levels) == size:
            for gram in zip(*self.levels, strict=True):
                pool.add(gram)
            del self.levels[0]


class LookaheadDrafter(LookupDrafter):
    """Drafts with a window and an n-gram pool for every row."""

    def __init__(self, method: Lookahead, rows: int) -> None:
        self.ngram, self.width, self.guesses = method.ngram, method.window, method.guesses
        super().__init__(rows, scratch_slots=(self.ngram - 1) * (self.width + self.guesses))
        self.pools = [NgramPool(self.guesses) for _ in range(rows)]
        self.windows = [LookaheadWindow() for _ in range(rows)]

    def add_request(self, row: int, request: Request) -> None:
        super().add_request(row, request)
        tokens, pool = self.text[row], NgramPool(self.guesses)
        for first in range(len(tokens) - self.ngram + 1):
            pool.add(tuple(tokens[first : first + self.ngram]))
        self.pools[row], self.windows[row] = pool, LookaheadWindow([random_prompt_tokens(request, self.width)])

    def propose_draft(self, limits: list[int], stop_rule: SurvivalThresholds | None = None) -> Draft:
        """Both branches of every row."""
        rows = [self._row_draft(row, allowed) for row, allowed in enumerate(limits)]
        return self.as_draft(rows, tree=True, levels=self.ngram - 1)

    def _row_draft(self, row: int, allowed: int) -> RowDraft:
        """The window and a trie of the n-grams of the last committed token. allowed: maximum number of tokens on a path."""
        draft, window = RowDraft(), self.windows[row]
        window.bottom = None
        if not self.view.alive[row] or not allowed:
            return draft
        children: dict[tuple[int, int], int] = {}  # (parent, token) -> node
        for gram in self.pools[row].after(self.text[row][-1]):
            parent = -1
            for token in gram[:allowed]:
                if (parent, token) not in children:
                    children[parent, token] = draft.add(token, parent)
                parent = children[parent, token]
        window.add_to(draft)
        return draft

    def observe_scores(self, draft: Draft, scores: Scores, verdict: Verdict | GreedyVerdict) -> Tensor:
        """[B, n + 1] int64: the target's likeliest tokens after the root and every node; arbitrary instead of NO_TOKEN."""
        return scores.best.clamp_min(0)

    def observe_commits(self, draft: Draft | None, verdicts: list[RowVerdict]) -> None:
        super().observe_commits(draft, verdicts)
        if draft is None:
            return
        for window, pool, verdict in zip(self.windows, self.pools, verdicts, strict=True):
            if window.bottom is not None and verdict.notes:
                guesses = verdict.notes[1 + window.bottom : 1 + window.bottom + self.width]
                window.move(guesses, self.ngram, pool)
