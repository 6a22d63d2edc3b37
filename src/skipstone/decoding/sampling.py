"""From logits to tokens, row by row: every row has its own processors, temperature, top-k, top-p, min-p and seed.

Processors (repetition penalty and kin) see one row's own ids, unpadded; warpers are vectorised over rows. Temperature 0 gives
a one-hot distribution, so greedy decoding is the limit of sampling and no second branch.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from skipstone.decoding.noise import DRAFT, PLACE, TARGET, LazyDistribution, Noise, substream
from skipstone.engines import greedy_tokens, host_transfer
from skipstone.engines.engine import EngineDraw, WarperInputs
from skipstone.engines.host_transfer import on_device
from skipstone.engines.partial_forward import PartialForward
from skipstone.models.torch_defaults import stable_defaults

Processor = Callable[[Tensor, Tensor], Tensor]
"""A transformers LogitsProcessor: (ids [1, T] int64, scores [1, V] float32) -> scores [1, V]. Must be a pure function."""

NO_LIMIT = 1 << 30  # tokens: a top-k that takes all of them
GREEDY_BELOW = 1e-5  # temperature, as in vLLM: nearly all the probability is the likeliest token's, and quotients may overflow
HOTTEST = torch.finfo(torch.float32).max  # temperature: at a larger one a masked logit, -inf, would be no number
FEW = 100  # largest top-k whose tokens a CPU looks at alone
NUCLEUS = 512  # tokens among which a CPU looks for those that top-p keeps, before it puts all in order
AT_ONCE = 1 << 16  # logits of a step up to which a CPU spends more time on calling operators than in them


@dataclass(frozen=True)
class Sampling:
    """How one row samples. A temperature below GREEDY_BELOW becomes 0, which is greedy; top_k 0, top_p 1 and min_p 0 are off
    (HF's meanings and order).

    processors run before the warpers. warpers: transformers' own list, temperature included, for a row that uses one without a
    vectorised form (typical_p, epsilon_cutoff, eta_cutoff, top_h); it replaces the vectorised ones for that row.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    processors: Sequence[Processor] = ()
    warpers: Sequence[Processor] = ()

    def __post_init__(self) -> None:
        if 0 < self.temperature < GREEDY_BELOW:
            object.__setattr__(self, "temperature", 0.0)
            object.__setattr__(self, "warpers", ())  # one of them is the temperature
        if not 0 <= self.temperature < math.inf:  # nor NaN
            raise ValueError(f"temperature must be a finite number that is not negative, found {self.temperature}; 0 is greedy")
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0:
            raise ValueError(f"top_k must be a whole number that is not negative, found {self.top_k!r}; 0 takes all tokens")
        for name in ("top_p", "min_p"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie between 0 and 1, found {getattr(self, name)}")


class WarperSettings:
    """The warper settings of all rows: columns [B] on the device, and on the host what is in use at all.

    settings: None for a row that is free, which may get anything.
    """

    def __init__(self, settings: Sequence[Sampling | None], device: torch.device) -> None:
        def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
            return on_device(values, device, dtype)

        rows = [row or Sampling() for row in settings]
        self.greedy = column([row.temperature == 0 for row in rows], torch.bool)
        self.temperature = column([min(row.temperature or 1.0, HOTTEST) for row in rows], torch.float32)
        self.top_k = column([row.top_k or NO_LIMIT for row in rows], torch.long)
        # rounded once, after the subtraction, as transformers does: where tokens tie, the last bit decides
        self.tail = column([1 - row.top_p for row in rows], torch.float32)
        self.min_p = column([row.min_p for row in rows], torch.float32)
        self.any_greedy = any(row.temperature == 0 for row in rows)
        self.largest_k = max(row.top_k for row in rows)
        self.any_top_p = any(row.top_p < 1 for row in rows)
        self.all_top_p = all(row.top_p < 1 for row in rows)
        self.any_min_p = any(row.min_p > 0 for row in rows)

        # a draw from a few tokens, for rows with a small top-k
        self.taken = None if None not in settings else column([row is not None for row in settings], torch.bool)
        few = [row is None or (row.temperature > 0 and 0 < row.top_k <= FEW) for row in settings]
        self.few, self.any_few, self.all_few = column(few, torch.bool), any(few), all(few)
        self.beyond_few = self.top_k[:, None] <= host_transfer.cached_arange(
            FEW + 1, device
        )  # [B, FEW + 1]: places that top-k leaves out
        asked = column([_asked_of_engine(row) for row in settings], torch.long)
        self.engine_warps = WarperInputs(self.temperature, asked, self.tail, self.min_p, PLACE)


def _asked_of_engine(row: Sampling | None) -> int:
    """`WarperInputs.top_k` of a row."""
    if row is None:
        return 0
    if row.warpers:
        return -1
    return (row.top_k or NO_LIMIT) if row.temperature else 1


def warp(logits: Tensor, rows: WarperSettings) -> Tensor:
    """Temperature, top-k, top-p, min-p, in HF's order. logits: [B, V] or [B, n, V]. Returns p of the same shape.

    Rows with temperature 0 become one-hot at their argmax. What a row gets does not depend on the rows beside it: one that
    there is nothing to choose from for (NaN, or only minus infinity) gets NaN or zeros.
    """
    if not rows.any_few or not _worth(logits):
        return _warped(logits, rows)
    tokens, few, tied = _warped_few(logits, rows)
    p = torch.zeros_like(logits).scatter_(-1, tokens, few)
    if rows.all_few and not bool(tied.any()):
        return p
    among_few = rows.few.view(-1, *[1] * (logits.ndim - 1)) & ~tied[..., None]
    return torch.where(among_few, p, _warped(logits, rows))


@dataclass(frozen=True, slots=True)
class WarpedLogits:
    """Logits [B, V] from which tokens are drawn without a distribution over the vocabulary where that can be done.

    distribution: gives p [B, V], for rows of which it cannot. engine_draw: an engine's own way to draw; None where it has none,
    and then warpers leave a few tokens to every row.
    """

    logits: Tensor
    rows: WarperSettings
    engine_draw: EngineDraw | None
    distribution: Callable[[], Tensor]

    def drawn(self, noise: Noise, position: Tensor, stream: int) -> Tensor:
        """As in `LazyDistribution`."""
        if self.engine_draw is not None and self.logits.dtype == torch.float32:
            tokens = self.engine_draw(self.logits, self.rows.engine_warps, noise.counters(position, stream))
            left = tokens < 0
            if not bool(left.any()):
                return tokens
            return torch.where(left, noise.draw(self.distribution(), position, stream), tokens)
        if self.rows.all_few:
            tokens, few, tied = _warped_few(self.logits, self.rows)
            if not bool(tied.any()):
                return noise.draw_among(tokens, few, position, stream)
        return noise.draw(self.distribution(), position, stream)


def _worth(logits: Tensor) -> bool:
    """Whether to look at few tokens is cheaper than to look at all."""
    return host_transfer.is_on_host(logits) and logits.shape[-1] > FEW


def _warped(logits: Tensor, rows: WarperSettings) -> Tensor:
    """`warp` over the whole vocabulary."""
    shape = (-1, *[1] * (logits.ndim - 1))
    scores = logits / rows.temperature.view(shape)
    if rows.largest_k:
        ordered = scores.topk(min(rows.largest_k, scores.shape[-1]), dim=-1).values
        place = (rows.top_k.clamp(max=ordered.shape[-1]) - 1).view(shape).expand(*ordered.shape[:-1], 1)
        limited = (rows.top_k < scores.shape[-1]).view(shape)
        scores = scores.masked_fill((scores < ordered.gather(-1, place)) & limited, float("-inf"))
    if rows.any_top_p:
        tail = rows.tail.view(shape)
        by_nucleus = host_transfer.is_on_host(scores) and scores.shape[-1] > 2 * NUCLEUS
        left_out = _tail_by_nucleus(scores, tail) if by_nucleus else _tail_by_order(scores, tail)
        scores = scores.masked_fill(left_out & (tail > 0), float("-inf"))
    p = scores.softmax(-1)
    if rows.any_min_p:
        p = _without_improbable(scores, p, rows.min_p.view(shape))
    if rows.any_greedy:
        best = greedy_tokens.greedy_token(logits)[..., None]
        best = torch.zeros_like(p).scatter(-1, best.clamp_min(0), (best >= 0).to(p.dtype))  # zeros where there is no token
        p = torch.where(rows.greedy.view(shape), best, p)
    return p


def _tail_by_order(scores: Tensor, tail: Tensor) -> Tensor:
    """Which tokens [..., V] top-p leaves out: the least probable ones, as long as they sum up to `tail` at most."""
    ordered, order = scores.sort(dim=-1)
    rising = ordered.softmax(-1).cumsum(-1) <= tail
    rising[..., -1] = False
    return torch.zeros_like(rising).scatter(-1, order, rising)


def _tail_by_nucleus(scores: Tensor, tail: Tensor) -> Tensor:
    """`_tail_by_order`, found from the NUCLEUS likeliest tokens and the sum of the rest. Where a row may keep more tokens than
    these, or where equal scores leave it open which of them are kept, all are put in order."""
    p = scores.softmax(-1)
    best = p.topk(NUCLEUS, dim=-1)
    rest = p.sum(-1, keepdim=True, dtype=torch.double) - best.values.sum(-1, keepdim=True, dtype=torch.double)  # [..., 1]
    rising = (best.values.double().flip(-1).cumsum(-1) + rest).flip(-1).float() <= tail  # [..., NUCLEUS], the likeliest first
    rising[..., 0] = False
    border = rising[..., 1:] & ~rising[..., :-1] & (best.values[..., 1:] == best.values[..., :-1])
    unknown = (~rising[..., -1:] | border.any(-1, keepdim=True)) & (tail > 0)  # [..., 1]
    left_out = torch.ones_like(scores, dtype=torch.bool).scatter_(-1, best.indices, rising)
    return torch.where(unknown, _tail_by_order(scores, tail), left_out) if bool(unknown.any()) else left_out


def _warped_few(logits: Tensor, rows: WarperSettings) -> tuple[Tensor, Tensor, Tensor]:
    """`warp` for rows with a small top-k, worked out on their FEW largest logits only.

    Returns (tokens [..., FEW + 1], the likeliest first; their p; tied [...] bool, where equal logits leave it open which of
    them are kept). What it says of other rows means nothing.
    """
    shape = (-1, *[1] * (logits.ndim - 1))
    best = (logits / rows.temperature.view(shape)).topk(FEW + 1, dim=-1)  # always as many: a row's sums do not know the others
    scores = best.values.masked_fill(rows.beyond_few.view(-1, *shape[2:], FEW + 1), float("-inf"))
    # a kept logit and the next one, which may be the first that is not kept; -inf minus -inf is no number
    tied = (scores[..., :-1] - best.values[..., 1:] == 0).any(-1)
    if rows.taken is not None:
        tied &= rows.taken.view(-1, *[1] * (tied.ndim - 1))
    if rows.any_top_p:
        rising = scores.flip(-1).softmax(-1).cumsum(-1)  # HF adds up from the least probable token on
        tail = (rising <= rows.tail.view(shape)).flip(-1)
        tail[..., 0] = False
        if not rows.all_top_p:
            tail &= (rows.tail > 0).view(shape)
        scores = scores.masked_fill(tail, float("-inf"))
    p = scores.softmax(-1)
    if rows.any_min_p:
        p = _without_improbable(scores, p, rows.min_p.view(shape))
    return best.indices, p, tied


def _without_improbable(scores: Tensor, p: Tensor, min_p: Tensor) -> Tensor:
    """p without what is less probable than min_p times the most probable token."""
    return scores.masked_fill(p < min_p * p.amax(-1, keepdim=True), float("-inf")).softmax(-1)


@dataclass
class Sampler:
    """The sampling settings of all rows, and the ids their processors look at.

    rows: batch size. engine_draw: the engine's way to draw a token; None where it has none.
    """

    rows: int
    device: torch.device
    noise_type: type[Noise] = Noise
    engine_draw: EngineDraw | None = None
    settings: list[Sampling | None] = field(init=False)
    eos: list[frozenset[int]] = field(init=False)
    ids: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.settings = [None] * self.rows
        self.eos = [frozenset()] * self.rows
        self.ids = [torch.empty(0, dtype=torch.long, device=self.device)] * self.rows

    def admit(self, row: int, sampling: Sampling, prompt: Tensor, eos: frozenset[int] = frozenset()) -> None:
        """Take over a row. prompt: [T] int64 ids. eos: ids after which nothing is asked of the row's processors."""
        self.settings[row], self.ids[row], self.eos[row] = sampling, prompt.to(self.device), eos
        self._changed()

    def release(self, row: int) -> None:
        """Forget a row."""
        self.settings[row], self.eos[row] = None, frozenset()
        self._changed()

    def extend(self, row: int, tokens: list[int]) -> None:
        """Append committed tokens to the ids that processors see."""
        if self.processed:
            self.ids[row] = torch.cat([self.ids[row], on_device(tokens, self.device)])

    def _changed(self) -> None:
        """Forget what was derived from the settings; it is made anew when asked for, once for a whole batch of requests."""
        for name in ("greedy", "processed", "_own_warpers", "picks_only", "warping", "noise", "_ends"):
            self.__dict__.pop(name, None)

    @cached_property
    def greedy(self) -> bool:
        """Whether no row samples; one with warpers of its own does, whatever its temperature says."""
        return all(row is None or (row.temperature == 0 and not row.warpers) for row in self.settings)

    @cached_property
    def processed(self) -> bool:
        """Whether any row has processors or warpers of its own."""
        return any(row is not None and (row.processors or row.warpers) for row in self.settings)

    @cached_property
    def _own_warpers(self) -> bool:
        """Whether any row has warpers of its own."""
        return any(row is not None and row.warpers for row in self.settings)

    @cached_property
    def picks_only(self) -> bool:
        """Whether the likeliest tokens of raw logits are all there is to know."""
        return self.greedy and not self.processed

    @cached_property
    def warping(self) -> WarperSettings:
        return WarperSettings(self.settings, self.device)

    @cached_property
    def noise(self) -> Noise:
        seeds = [0 if row is None else row.seed for row in self.settings]
        return self.noise_type(on_device(seeds, self.device))

    @cached_property
    def _ends(self) -> Tensor | None:
        """The rows' end-of-sequence ids [B, k], -1 where a row has fewer; None where no row has any."""
        most = max(map(len, self.eos))
        return on_device([[*ids, *[-1] * (most - len(ids))] for ids in self.eos], self.device) if most else None

    def unfinished(self, tokens: Tensor) -> Tensor | None:
        """Rows [B] bool whose token [B] does not end them, for drafters to stop at. None where nobody asks: on an accelerator
        a draft that runs on past the end costs less than telling rows apart; what follows is cut after verification."""
        if self._ends is None or not host_transfer.is_on_host(tokens):
            return None
        return (tokens[:, None] != self._ends).all(1)

    def _asked(self, row: int, path: Tensor, wanted: Sequence[bool] | None) -> bool:
        """Whether a row's processors are to be called after path [B, k]: never past the end, where plain decoding stops."""
        if wanted is not None and not wanted[row]:
            return False
        return not self.eos[row] or not path.shape[1] or self.eos[row].isdisjoint(path[row].tolist())

    def process(self, logits: Tensor, path: Tensor, wanted: Sequence[bool] | None = None) -> Tensor:
        """Apply every row's processors. logits: [B, V] raw; path: [B, k], tokens after the committed ones. Returns [B, V].

        wanted: rows whose processors may be called, None for all; the others' logits come back as they are.
        """
        if not self.processed:
            return logits
        rows = []
        for row, sampling in enumerate(self.settings):
            scores = logits[row : row + 1]
            if sampling is not None and sampling.processors and self._asked(row, path, wanted):
                ids = self._text(row, path)
                scores = scores.clone()
                with stable_defaults():
                    for processor in sampling.processors:
                        scores = processor(ids, scores)
            rows.append(scores)
        return torch.cat(rows) if len(rows) > 1 else rows[0]

    def _text(self, row: int, path: Tensor) -> Tensor:
        """All ids of a row [1, T], path [B, k] included."""
        ids = self.ids[row]
        return (torch.cat([ids, path[row]]) if path.shape[1] else ids)[None]

    def warped(self, scores: Tensor, path: Tensor, wanted: Sequence[bool] | None = None) -> Tensor:
        """p [B, V] of processed scores [B, V]. path, wanted: as in `process`."""
        p = warp(scores, self.warping)
        for row, sampling in enumerate(self.settings):
            if sampling is not None and sampling.warpers and self._asked(row, path, wanted):
                ids, own = self._text(row, path), scores[row : row + 1]
                with stable_defaults():
                    for warper in sampling.warpers:
                        own = warper(ids, own)
                p[row] = own[0].softmax(-1)
        return p

    def distribution(self, logits: Tensor, path: Tensor, wanted: Sequence[bool] | None = None) -> Tensor:
        """p of raw logits [B, V], processed and warped. path, wanted: as in `process`."""
        return self.warped(self.process(logits, path, wanted), path, wanted)

    def chances(self, scores: Tensor, path: Tensor, wanted: Sequence[bool] | None = None) -> Tensor | LazyDistribution:
        """`warped` for a draw: on the CPU no distribution is worked out before it where `WarpedLogits` can do without."""
        return self._chances(scores, self.warping, not self._own_warpers, lambda: self.warped(scores, path, wanted))

    def _chances(
        self, scores: Tensor, rows: WarperSettings, by_rows: bool, distribution: Callable[[], Tensor]
    ) -> Tensor | LazyDistribution:
        """Processed scores [B, V] for a draw. by_rows: whether `rows` say all of what a token's chance is. distribution: gives
        p [B, V]."""
        own_draw = self.engine_draw is not None or (rows.all_few and by_rows)
        if self.noise_type is not Noise or not own_draw or not _worth(scores):
            return distribution()
        return WarpedLogits(scores, rows, self.engine_draw, distribution)

    def would_draw(self, row: int, logits: Tensor, positions: Tensor) -> Tensor:
        """The tokens [n] that a row without processors of its own would draw with the target's noise.

        logits: [n, V]; positions: [n] int64 that the tokens would have.
        """
        settings = self.settings[row]
        if self.greedy or settings is None:
            return greedy_tokens.greedy_token(logits)
        alike = WarperSettings([settings] * len(logits), self.device)
        noise = self.noise_type(on_device([settings.seed] * len(logits), self.device))
        return noise.draw(self._chances(logits, alike, True, lambda: warp(logits, alike)), positions, TARGET)

    def propose(
        self, logits: Tensor, position: Tensor, path: Tensor, wanted: Sequence[bool] | None = None, coupled: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Draw a draft token. logits: [B, V] raw; position: [B] the token will have; path: [B, k] the draft so far.

        wanted: as in `process`. coupled: draw from the target's own noise (Gumbel coupling), so that drafts are deterministic
        given the seed and `verify.match` is exact for them. Returns (tokens [B], q [B, V] or None where the draw is
        deterministic, processed logits [B, V] for confidences)."""
        scores = self.process(logits, path, wanted)
        return *self.drawn(scores, position, path, wanted, coupled), scores

    def drawn(
        self, scores: Tensor, position: Tensor, path: Tensor, wanted: Sequence[bool] | None = None, coupled: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """The draw of `propose`, from processed logits [B, V]."""
        if self.greedy:
            return greedy_tokens.greedy_token(scores), None
        if coupled:
            return self.noise.draw(self.chances(scores, path, wanted), position, TARGET), None
        q = self.warped(scores, path, wanted)
        return self.noise.draw(q, position, substream(DRAFT, path.shape[1])), q

    def candidates(
        self, logits: Tensor, position: Tensor, path: Tensor, count: int, wanted: Sequence[bool] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens that the target would draw if it thought as the drafter does, in the order of its own noise (greedy rows:
        of the scores). Arguments as in `propose`. Returns (tokens [B, k], possible [B, k] bool, False where q is 0, processed
        logits [B, V]); k = min(count, V).
        """
        scores = self.process(logits, path, wanted)
        order = scores
        if not self.greedy:
            order = self.noise.race(self.warped(scores, path, wanted), position, TARGET)
            if self.warping.any_greedy:
                order = torch.where(self.warping.greedy[:, None], scores.double(), order)
        best = order.topk(min(count, order.shape[-1]))
        return best.indices, best.values > float("-inf"), scores


class Scores:
    """What the target says after every node of a draft, as logits, distributions or picks, whatever is asked for.

    first: the position that the first new token of every row will have. live: rows whose scores mean anything. scored: a
    forward that is at the top; logits: [B, n+1, V] float32, where there is none. Index 0 is what follows the root.
    """

    def __init__(
        self,
        sampler: Sampler,
        first: Sequence[int],
        live: Sequence[bool],
        *,
        scored: PartialForward | None = None,
        logits: Tensor | None = None,
    ) -> None:
        self.sampler, self.first, self.live, self._scored = sampler, first, live, scored
        if logits is not None:
            self.logits = logits

    @cached_property
    def logits(self) -> Tensor:
        """Raw logits of every node [B, n+1, V] float32, the root first."""
        assert self._scored is not None
        return self._scored.finish()

    @cached_property
    def position(self) -> Tensor:
        """[B] int64, the position that the first new token will have."""
        return on_device(self.first, self.sampler.device)

    def p(self, node: Tensor, path: Tensor, walking: Tensor) -> Tensor:
        """Processed distribution after a node [B] (-1: the root) reached by path [B, k]. Returns [B, V].

        walking: [B] bool. Lazy: processors are called only for live rows that walk, at the nodes that the walk reaches.
        """
        return self.sampler.distribution(self.at(node), path, self.wanted(walking))

    def chances(self, node: Tensor, path: Tensor, walking: Tensor) -> Tensor | LazyDistribution:
        """`p` for a draw, as in `Sampler.chances`."""
        wanted = self.wanted(walking)
        return self.sampler.chances(self.sampler.process(self.at(node), path, wanted), path, wanted)

    def wanted(self, walking: Tensor) -> list[bool] | None:
        """Rows whose processors are to be called, on the host; None (nobody asks) without row processors."""
        if not self.sampler.processed:
            return None
        return [live and walks for live, walks in zip(self.live, walking.tolist(), strict=True)]

    def at(self, node: Tensor) -> Tensor:
        """Raw logits after a node [B], -1 for the root. Returns [B, V]."""
        if self.logits.shape[1] == 1:
            return self.logits[:, 0]
        index = (node + 1)[:, None, None].expand(-1, 1, self.logits.shape[2])
        return self.logits.gather(1, index).squeeze(1)

    def everywhere(self) -> Tensor | None:
        """p after every node [B, n+1, V], the root first, in one go. None where processors must not see nodes that the walk
        does not reach, and on the CPU where it reaches too few of them for that to be cheaper."""
        if self.sampler.processed or (host_transfer.is_on_host(self.logits) and self.logits.numel() > AT_ONCE):
            return None
        return warp(self.logits, self.sampler.warping)

    @cached_property
    def best(self) -> Tensor:
        """The likeliest token after every node [B, n+1] int64 by the raw logits, the root first; NO_TOKEN as of an engine."""
        if self._scored is None or "logits" in self.__dict__:
            return greedy_tokens.greedy_token(self.logits)
        return self._scored.greedy_tokens()
