"""The interface of an engine, and the inputs and outputs of its calls."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from skipstone.engines.kv_cache import KVCache
from skipstone.models.passes import Pass, SkipSet

ENGINES = ("auto", "eager", "native", "compiled")
"""Values of the option `engine`. "auto" is native if that engine can run the model, else eager."""
QUANTIZED = ("none", "int8", "int4")
"""Values of the option `quantize`; "none" keeps the weights as they are stored."""
COMPUTE_DTYPES = ("float32", "bfloat16")
"""Values of the option `compute_dtype`; "float32" rounds no input of a matrix product."""


@dataclass(frozen=True, slots=True)
class SurvivalThresholds:
    """When rows stop drafting, by the probability that all of their drafts so far are accepted (their survival).

    A draft of probability p is accepted with the estimated probability sigmoid(slope logit(p) + offset). The survival is the
    product over all drafts so far.

    min_survival: for each draft position, the survival with which a row drafts on alone. The draft ends with the list.
    min_survival_shared: the same for rows that share draft steps with other rows; empty if no steps are shared. Of R
    rows, those with a survival S of at least `min_survival_shared` draft on together, as long as the sum of
    S - min_survival_shared over them is at least R (min_survival - min_survival_shared).
    """

    slope: float
    offset: float
    min_survival: Sequence[float]
    min_survival_shared: Sequence[float] = ()


@dataclass(slots=True)
class ChainInputs:
    """Inputs of `Engine.chain`: every row drafts a greedy chain after its last committed token.

    max_drafts: maximum number of drafts per row, -1 for a row that does not draft. thresholds: per row, the probability below
    which a draft is its last one; None to compute no probabilities. ends: per row, the ids that end a draft. layers: number of
    layers that draft. skip: sublayers of these that are left out. transform: [d', d'] applied to normed states before the LM
    head, or None. excludes_uncertain: a draft at or below its threshold is dropped, so that the draft before it is the last.
    survival: a further stop rule; it needs thresholds. max_entropy: per row, the entropy in bits above which a draft is its
    last one; None to compute no entropies. num_ranked: number of best tokens to return per place, 0 for none.
    distribution_size: V of the returned distributions, at least the model's vocabulary, 0 for none; it needs max_entropy.
    keep_states: return the states that leave the drafting layers (an exit).

    `PartialForward` sets the others. roots: [B] int64, the last committed id of every row. bases: their positions. extent:
    number of slots that the chain may need. columns: tokens per row in the returned states. shortlist: [S] int64, the ids that
    drafts and their probabilities are limited to; None for all. states: [B, d] float32, the states next to the roots; None for
    a model that reads tokens alone.
    """

    max_drafts: list[int]
    thresholds: list[float] | None
    ends: Sequence[frozenset[int]]
    layers: int = 0
    skip: SkipSet | None = None
    transform: Tensor | None = None
    excludes_uncertain: bool = False
    survival: SurvivalThresholds | None = None
    max_entropy: list[float] | None = None
    num_ranked: int = 0
    distribution_size: int = 0
    keep_states: bool = False
    roots: Tensor = field(init=False)
    bases: list[int] = field(init=False)
    extent: int = field(init=False)
    columns: int = field(init=False)
    shortlist: Tensor | None = None
    states: Tensor | None = None


@dataclass(slots=True)
class ChainOutputs:
    """Outputs of `Engine.chain`.

    tokens: [B, n] int64. counts: number of drafts per row. confidence: [B, n] float32, the drafter's probability of each draft
    at temperature 1; None without thresholds. states: [B, columns, d] of the roots and all drafts, 0 where a row has no token:
    with `keep_states` those that leave the drafting layers (the last draft runs through them, too), else embeddings.

    ranked: [B, n, k] int64, the k = min(num_ranked, V or S) best tokens of every place, the draft first, NO_TOKEN for those of
    logit minus infinity; None without `num_ranked`. entropy: [B, n] float32, in bits at temperature 1; None without
    `max_entropy`. distributions: [B, n, V] float32, at temperature 1; None without `distribution_size`. Their values are
    arbitrary where a row has no draft.
    """

    tokens: Tensor
    counts: list[int]
    confidence: Tensor | None
    states: Tensor
    ranked: Tensor | None = None
    entropy: Tensor | None = None
    distributions: Tensor | None = None


@dataclass(frozen=True)
class WarperInputs:
    """Sampling settings of every row for `Engine.draw`.

    temperature: [B] float32, positive. top_k: [B] int64; V or more for all tokens, 0 for an inactive row, which gets any token,
    negative for a row that the caller draws. tail: [B] float32, the probability that top-p cuts off, 0 for none. min_p: [B]
    float32, 0 for none. place: step of the noise counter from one token to the next, in 64 bits.
    """

    temperature: Tensor
    top_k: Tensor
    tail: Tensor
    min_p: Tensor
    place: int


EngineDraw = Callable[[Tensor, WarperInputs, Tensor], Tensor]
"""Type of `Engine.draw`."""


class Engine(ABC):
    """Computes one model. An engine must not refer to its model, which would then never be freed; it may refer to its modules.

    name: "eager", "native" or "compiled". detail: one line for users about how and where it computes. dtype: of the hidden
    states. row_exact: the bits of a token's result do not depend on what else is in the batch. skips_padding: invalid entries
    of a pass cost nothing. supports_chains: it has `chain` and `score_exit`. supports_draws: it has `draw`. own_threads: it
    computes on threads of its own, not on torch's. quantize: "int8" or "int4" if it has quantised the weights, else None.
    rounds_inputs: inputs of products with bfloat16 weights are rounded to bfloat16. preparations: number of passes so far that
    were compiled or recorded; their times do not predict those of later passes. version: of the weights that it has copied
    (`weight_version`); None if it has no copy.
    """

    name: str
    detail: str
    dtype: torch.dtype
    row_exact = False
    skips_padding = False
    supports_chains = False
    supports_draws = False
    own_threads = False
    quantize: str | None = None
    rounds_inputs = False
    preparations = 0
    version: int | None = None

    @property
    def compute_dtype(self) -> str:
        """One of COMPUTE_DTYPES: what the engine does, whatever the options leave open."""
        return "bfloat16" if self.rounds_inputs else "float32"

    @abstractmethod
    def is_current(self, version: int | None) -> bool:
        """Whether the engine still computes the current model: its weights, plain attributes, hooks and forwards. Outdated
        rotary tables are rebuilt when they are next used. version: of the model's weights now."""

    def warm_up(self, rows: int, slots: int, *, kv_dtype: torch.dtype | None = None) -> str:
        """Compile everything that batches of up to `rows` rows and `slots` slots (positions and tree nodes) can need. Only the
        compiled engine has something to do. kv_dtype: of the store. Returns `detail`."""
        return self.detail

    @abstractmethod
    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """[B, n] ids and positions -> [B, n, d], the states that enter layer 0."""

    @abstractmethod
    def run(self, hidden: Tensor, at: Pass, store: KVCache, layers: range, skip: SkipSet | None = None) -> Tensor:
        """Run layers over [b, n, d] and write keys and values to the pass's slots. Returns [b, n, d].

        skip: sublayers that add nothing to the residual stream in this pass.
        """

    @abstractmethod
    def normed(self, hidden: Tensor) -> Tensor:
        """The input of the LM head: states after the final norm (and OPT-350m's projection). [..., d] -> [..., d']."""

    @abstractmethod
    def project(self, normed: Tensor, head: nn.Module | None = None, shortlist: Tensor | None = None) -> Tensor:
        """LM head and the family's scaling of logits. [..., d'] -> [..., V] float32, or [..., S] for a shortlist.

        head: replaces the model's own. shortlist: [S] int64, ascending and unique, the ids to compute.
        """

    def multiply(self, linear: nn.Linear, states: Tensor) -> Tensor:
        """A further linear layer of the model, without a bias. [..., inputs] -> [..., outputs]."""
        return linear(states)

    @abstractmethod
    def greedy_tokens(self, hidden: Tensor) -> Tensor:
        """Final norm, LM head and argmax, the lowest id of equal ones; NO_TOKEN if a logit is NaN or all are minus infinity.
        [..., d] -> [...] int64."""

    @abstractmethod
    def top_k_tokens(self, logits: Tensor, count: int) -> Tensor:
        """The ids of the `count` largest logits, the largest first; equal ones in any order; NO_TOKEN if a logit is NaN.
        [..., V] float32 -> [..., count] int64. 1 <= count <= V."""

    def score_exit(self, hidden: Tensor, transform: Tensor | None, shortlist: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The greedy token of an exit head and its probability at temperature 1, if `supports_chains`. [..., d] -> [...] int64
        and float32; NO_TOKEN and 0 as in `greedy_tokens`. transform, shortlist: as in `ChainInputs`."""
        raise NotImplementedError

    def draw(self, logits: Tensor, warps: WarperInputs, counters: Tensor) -> Tensor:
        """Draw a token for every row, if `supports_draws`. logits: [B, V] float32. counters: [B] int64, where the noise of each
        row begins. Returns [B] int64, -1 for a row that the caller must draw."""
        raise NotImplementedError

    def chain(self, inputs: ChainInputs, store: KVCache) -> ChainOutputs:
        """Draft greedy chains in one call, if `supports_chains`."""
        raise NotImplementedError
