"""What `ModelRunner` asks of an engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from skipstone.engines.kv_cache import KVCache
from skipstone.models.passes import Pass, SkipSet

ENGINES = ("auto", "eager", "native", "compiled")
"""The names that a user may ask for. "auto" is native where that can run the model, and eager elsewhere."""


QUANTIZED = ("none", "int8", "int4")
"""What a user may ask weights to be quantised to; "none" leaves them as they are stored."""


@dataclass(frozen=True, slots=True)
class SurvivalThresholds:
    """Until what survival rows draft on. A draft of probability p is accepted with sigmoid(slope logit(p) + offset), as far
    as is known; a draft's survival is the product over all drafts up to it.

    min_survival: for every place from 0 on, the survival with which a row that pays its draft steps alone drafts on behind it;
    a shorter list ends the draft. min_survival_shared: the same of a row whose draft steps others pay; none where each row pays
    its own. Of R rows those with a survival S of `min_survival_shared` draft on together, as long as the sum of
    S - min_survival_shared over them is at least R (min_survival - min_survival_shared)."""

    slope: float
    offset: float
    min_survival: Sequence[float]
    min_survival_shared: Sequence[float] = ()


@dataclass(slots=True)
class ChainStart:
    """A greedy chain of drafts on every row, from its last committed token on.

    roots: [B] int64, the last committed id of every row. bases: its position. max_drafts: most drafts of a row, -1 for one that
    takes no part. layers: the first so many layers draft. skip: but for these sublayers. keep: keep what leaves them (an exit).
    thresholds: a row stops after a draft that is less probable; None asks for no probabilities. ends: ids after which a row
    stops. extent: slots that the chain may need. columns: tokens of a row that there must be states for. transform: [d', d']
    that normed states go through before the LM head; None for none. sure: a draft that is not more probable than its threshold
    does not count, and the token before it is the last. survival: what a row stops by as well; it needs thresholds.
    shortlist: [S] int64, the ids that drafts are picked from, and their
    probabilities are among; None for all.
    """

    roots: Tensor
    bases: list[int]
    max_drafts: list[int]
    layers: int
    skip: SkipSet | None
    keep: bool
    thresholds: list[float] | None
    ends: Sequence[frozenset[int]]
    extent: int
    columns: int
    transform: Tensor | None = None
    sure: bool = False
    shortlist: Tensor | None = None
    survival: SurvivalThresholds | None = None


@dataclass(slots=True)
class ChainEnd:
    """tokens: [B, n] int64. counts: drafts of every row. confidence: [B, n] float32, the probability of every draft under its
    drafter at temperature 1; None where nobody asked. states: [B, columns, d], of the roots and of all drafts: with `keep` what
    leaves the layers that draft (the last draft goes through them too), else embeddings; 0 where a row has no token.
    """

    tokens: Tensor
    counts: list[int]
    confidence: Tensor | None
    states: Tensor


@dataclass(frozen=True)
class WarperInputs:
    """What is asked of the warpers of every row, and the noise's step from a token to the next one.

    temperature: [B] float32, positive. top_k: [B] int64, V or more for all tokens, 0 for a row that takes no part and gets any
    token, negative for one that is left to the caller. tail: [B] float32, the share of the least probable tokens that top-p
    leaves out, 0 for none. min_p: [B] float32, 0 for none. place: the step, in 64 bits.
    """

    temperature: Tensor
    top_k: Tensor
    tail: Tensor
    min_p: Tensor
    place: int


EngineDraw = Callable[[Tensor, WarperInputs, Tensor], Tensor]
"""`Engine.draw`, of an engine that has it."""


class Engine(Protocol):
    """What computes one model, for as long as the facts of the model hold.

    name: "eager", "native" or "compiled". detail: one line for users, on what it runs and where. dtype: of the hidden states
    that it hands out. row_exact: it promises that a token's result has the same bits whatever is computed beside it. chains: it
    has a call for greedy chains (`chain`). draws: it has one for drawing tokens (`draw`). own_threads: it computes with threads
    that are not torch's. quantize: "int8" or "int4", what it has quantised the weights to; None where
    they are as stored. preparations: how often it compiled or recorded a pass, which then says nothing of what later ones take.
    version: of the weights that it was made of (`weight_version`); None where it has no copy of them.

    An engine must not refer to its model, which would then never be freed; its modules it may.
    """

    @property
    def name(self) -> str: ...

    @property
    def detail(self) -> str: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def row_exact(self) -> bool: ...

    @property
    def chains(self) -> bool: ...

    @property
    def draws(self) -> bool: ...

    @property
    def own_threads(self) -> bool: ...

    @property
    def quantize(self) -> str | None: ...

    @property
    def preparations(self) -> int: ...

    @property
    def version(self) -> int | None: ...

    def holds(self, version: int | None) -> bool:
        """Whether the engine still computes the current model: its weights, plain attributes, hooks and forwards. Rotary
        tables that are outdated are made again when they are next used. version: of the model's weights now."""
        ...

    def warm_up(self, rows: int, slots: int, *, kv_dtype: torch.dtype | None = None) -> str:
        """Compile all that batches of so many rows and so many slots (positions, and the nodes of a tree) may meet, where it
        compiles at all. kv_dtype: of the store. Returns `detail`."""
        ...

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """[B, n] ids and positions -> [B, n, d], the states that enter layer 0."""
        ...

    def run(self, hidden: Tensor, at: Pass, store: KVCache, layers: range, skip: SkipSet | None = None) -> Tensor:
        """Run layers over [b, n, d], writing keys and values to the pass's slots. Returns [b, n, d].

        skip: sublayers that add nothing to the residual stream in this pass.
        """
        ...

    def normed(self, hidden: Tensor) -> Tensor:
        """What the LM head reads: states after the final norm. [..., d] -> [..., d']."""
        ...

    def project(self, normed: Tensor, head: nn.Module | None = None, shortlist: Tensor | None = None) -> Tensor:
        """LM head and what the family does after it. [..., d'] -> [..., V] float32. head: instead of the model's own.
        shortlist: [S] int64, ascending, each once: the ids whose logits are wanted; then [..., S] of those alone."""
        ...

    def likeliest(self, hidden: Tensor) -> Tensor:
        """The token with the largest logit after the final norm and the LM head, the lowest of equal ones; NO_TOKEN where a
        logit is NaN or all are minus infinity. [..., d] -> [...] int64."""
        ...

    def largest(self, logits: Tensor, count: int) -> Tensor:
        """The ids of the `count` largest logits, the largest first; of equal ones any; NO_TOKEN where a logit is NaN.
        [..., V] float32 -> [..., count] int64. 1 <= count <= V."""
        ...

    def exit_picks(self, hidden: Tensor, transform: Tensor | None, shortlist: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """What the head of an exit says, which an engine with `chains` can tell: (the likeliest token, its probability at
        temperature 1), [..., d] -> [...] int64 and float32; NO_TOKEN and 0 as in `likeliest`. transform, shortlist: as in
        `ChainStart`."""
        ...

    def draw(self, logits: Tensor, warps: WarperInputs, counters: Tensor) -> Tensor:
        """Draw a token of every row, which an engine with `draws` can. logits: [B, V] float32. counters: [B] int64, where the
        noise of every row begins. Returns [B] int64, -1 for a row that is the caller's to draw."""
        ...

    def chain(self, start: ChainStart, store: KVCache) -> ChainEnd:
        """Draft a greedy chain in one call, which an engine with `chains` has."""
        ...
