"""From logits to tokens. Every row has its own processors, temperature, top-k, top-p, min-p and seed.

Processors, such as the repetition penalty, see the unpadded ids of one row. Warpers are vectorised over rows. Temperature 0
gives a one-hot distribution, so greedy decoding needs no code of its own.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from skipstone.decoding.noise import DRAFT, PLACE, TARGET, LazyDistribution, Noise, substream
from skipstone.engines import greedy_tokens, host_transfer
from skipstone.engines.engine import EngineDraw, WarperInputs
from skipstone.engines.greedy_tokens import NO_TOKEN
from skipstone.engines.host_transfer import on_device
from skipstone.engines.partial_forward import PartialForward
from skipstone.models.torch_defaults import stable_defaults
from skipstone.utils.cached_property import cached_property

Processor = Callable[[Tensor, Tensor], Tensor]
"""A transformers LogitsProcessor: (ids [1, T] int64, scores [1, V] float32) -> scores [1, V]. Must be a pure function."""

NO_LIMIT = 1 << 30  # a top-k that keeps all tokens
GREEDY_BELOW = (
    1e-5  # lower temperatures count as 0, as in vLLM: nearly all probability is on one token, and logits may overflow
)
MAX_TEMPERATURE = torch.finfo(torch.float32).max  # with an infinite one, a masked logit (-inf) would become NaN
MAX_SMALL_TOP_K = 100  # up to this top-k a CPU warps only the largest logits
NUCLEUS = 512  # number of likeliest tokens in which a CPU applies top-p before it sorts the vocabulary
MAX_LOGITS_AT_ONCE = 1 << 16  # up to so many logits a step, a CPU spends most time on calling operators


@dataclass(frozen=True)
class Sampling:
    """How one row samples. Settings mean the same as in transformers and apply in the same order.

    temperature: below GREEDY_BELOW it becomes 0, which is greedy. top_k 0, top_p 1 and min_p 0 are off. processors: run before
    the warpers. warpers: transformers' own list, temperature included, for a row with typical_p, epsilon_cutoff, eta_cutoff or
    top_h. It replaces the vectorised warpers for that row.
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
        if not 0 <= self.temperature < math.inf:  # False for NaN, too
            raise ValueError(f"temperature must be a finite number that is not negative, found {self.temperature}; 0 is greedy")
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0:
            raise ValueError(f"top_k must be a whole number that is not negative, found {self.top_k!r}; 0 takes all tokens")
        for name in ("top_p", "min_p"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie between 0 and 1, found {getattr(self, name)}")


class WarperSettings:
    """The warper settings of all rows: tensors [B] on the device, and on the host which warpers are in use.

    settings: None for a free row, whose results are ignored.
    """

    def __init__(self, settings: Sequence[Sampling | None], device: torch.device) -> None:
        def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
            return on_device(values, device, dtype)

        rows = [row or Sampling() for row in settings]
        self.greedy = column([row.temperature == 0 for row in rows], torch.bool)
        self.temperature = column([min(row.temperature or 1.0, MAX_TEMPERATURE) for row in rows], torch.float32)
        self.top_k = column([row.top_k or NO_LIMIT for row in rows], torch.long)
        # rounded once, after the subtraction, as in transformers: if tokens tie, the last bit decides
        self.tail = column([1 - row.top_p for row in rows], torch.float32)
        self.min_p = column([row.min_p for row in rows], torch.float32)
        self.any_greedy = any(row.temperature == 0 for row in rows)
        self.largest_k = max(row.top_k for row in rows)
        self.any_top_p = any(row.top_p < 1 for row in rows)
        self.all_top_p = all(row.top_p < 1 for row in rows)
        self.any_min_p = any(row.min_p > 0 for row in rows)

        self.occupied = None if None not in settings else column([row is not None for row in settings], torch.bool)
        small = [row is None or (row.temperature > 0 and 0 < row.top_k <= MAX_SMALL_TOP_K) for row in settings]
        self.small_top_k, self.any_small_top_k, self.all_small_top_k = column(small, torch.bool), any(small), all(small)
        ranks = host_transfer.cached_arange(MAX_SMALL_TOP_K + 1, device)
        self.beyond_top_k = self.top_k[:, None] <= ranks  # [B, MAX_SMALL_TOP_K + 1]
        engine_top_k = column([_engine_top_k(row) for row in settings], torch.long)
        self.engine_warps = WarperInputs(self.temperature, engine_top_k, self.tail, self.min_p, PLACE)


def _engine_top_k(row: Sampling | None) -> int:
    """The value of `WarperInputs.top_k` for a row."""
    if row is None:
        return 0
    if row.warpers:
        return -1
    return (row.top_k or NO_LIMIT) if row.temperature else 1


def warp(logits: Tensor, rows: WarperSettings) -> Tensor:
    """Temperature, top-k, top-p, min-p, in this order. logits: [B, V] or [B, n, V]. Returns p of the same shape.

    Rows with temperature 0 become one-hot at their argmax. A row's result does not depend on other rows. A row without a token
    to choose (NaN, or all logits are -inf) gets NaN or zeros.
    """
    if not rows.any_small_top_k or not _is_large_on_host(logits):
        return _warp_vocabulary(logits, rows)
    tokens, token_p, tied = _warp_small_top_k(logits, rows)
    p = torch.zeros_like(logits).scatter_(-1, tokens, token_p)
    if rows.all_small_top_k and not bool(tied.any()):
        return p
    is_exact = rows.small_top_k.view(-1, *[1] * (logits.ndim - 1)) & ~tied[..., None]
    return torch.where(is_exact, p, _warp_vocabulary(logits, rows))


@dataclass(frozen=True, slots=True)
class WarpedLogits:
    """Logits [B, V] to draw tokens from, if possible without a distribution over the vocabulary.

    distribution: computes p [B, V] if needed. engine_draw: the engine's own draw; None only if every row has a small top-k.
    """

    logits: Tensor
    rows: WarperSettings
    engine_draw: EngineDraw | None
    distribution: Callable[[], Tensor]

    def drawn(self, noise: Noise, position: Tensor, stream: int) -> Tensor:
        """As in `LazyDistribution`."""
        if self.engine_draw is not None and self.logits.dtype == torch.float32:
            tokens = self.engine_draw(self.logits, self.rows.engine_warps, noise.counters(position, stream))
            missing = tokens < 0
            if not bool(missing.any()):
                return tokens
            return torch.where(missing, noise.draw(self.distribution(), position, stream), tokens)
        if self.rows.all_small_top_k:
            tokens, token_p, tied = _warp_small_top_k(self.logits, self.rows)
            if not bool(tied.any()):
                return noise.draw_among(tokens, token_p, position, stream)
        return noise.draw(self.distribution(), position, stream)


def _is_large_on_host(logits: Tensor) -> bool:
    """Whether a draw from few tokens is cheaper than one from all."""
    return host_transfer.is_on_host(logits) and logits.shape[-1] > MAX_SMALL_TOP_K


def _warp_vocabulary(logits: Tensor, rows: WarperSettings) -> Tensor:
    """`warp` over the whole vocabulary."""
    shape = (-1, *[1] * (logits.ndim - 1))
    scores = logits / rows.temperature.view(shape)
    if rows.largest_k:
        ordered = scores.topk(min(rows.largest_k, scores.shape[-1]), dim=-1).values
        last_rank = (rows.top_k.clamp(max=ordered.shape[-1]) - 1).view(shape).expand(*ordered.shape[:-1], 1)
        has_top_k = (rows.top_k < scores.shape[-1]).view(shape)
        scores = scores.masked_fill((scores < ordered.gather(-1, last_rank)) & has_top_k, float("-inf"))
    if rows.any_top_p:
        tail = rows.tail.view(shape)
        use_nucleus = host_transfer.is_on_host(scores) and scores.shape[-1] > 2 * NUCLEUS
        is_tail = _tail_by_nucleus(scores, tail) if use_nucleus else _tail_by_sorting(scores, tail)
        scores = scores.masked_fill(is_tail & (tail > 0), float("-inf"))
    p = scores.softmax(-1)
    if rows.any_min_p:
        p = _apply_min_p(scores, p, rows.min_p.view(shape))
    if rows.any_greedy:
        best = greedy_tokens.greedy_token(logits)[..., None]
        best = torch.zeros_like(p).scatter(-1, best.clamp_min(0), (best >= 0).to(p.dtype))  # zeros for NO_TOKEN
        p = torch.where(rows.greedy.view(shape), best, p)
    return p


def _tail_by_sorting(scores: Tensor, tail: Tensor) -> Tensor:
    """The tokens [..., V] bool that top-p drops: the least probable ones with a total probability of at most `tail`."""
    ordered, order = scores.sort(dim=-1)
    is_tail = ordered.softmax(-1).cumsum(-1) <= tail
    is_tail[..., -1] = False
    return torch.zeros_like(is_tail).scatter(-1, order, is_tail)


def _tail_by_nucleus(scores: Tensor, tail: Tensor) -> Tensor:
    """`_tail_by_sorting`, computed from the NUCLEUS likeliest tokens and the sum of the others.

    All tokens are sorted if a row may keep more than NUCLEUS, or if tokens at the border have equal scores."""
    p = scores.softmax(-1)
    best = p.topk(NUCLEUS, dim=-1)
    others = p.sum(-1, keepdim=True, dtype=torch.double) - best.values.sum(-1, keepdim=True, dtype=torch.double)  # [..., 1]
    in_tail = (best.values.double().flip(-1).cumsum(-1) + others).flip(-1).float() <= tail  # [..., NUCLEUS], likeliest first
    in_tail[..., 0] = False
    tied = in_tail[..., 1:] & ~in_tail[..., :-1] & (best.values[..., 1:] == best.values[..., :-1])
    unknown = (~in_tail[..., -1:] | tied.any(-1, keepdim=True)) & (tail > 0)  # [..., 1]
    is_tail = torch.ones_like(scores, dtype=torch.bool).scatter_(-1, best.indices, in_tail)
    return torch.where(unknown, _tail_by_sorting(scores, tail), is_tail) if bool(unknown.any()) else is_tail


def _warp_small_top_k(logits: Tensor, rows: WarperSettings) -> tuple[Tensor, Tensor, Tensor]:
    """`warp` for rows with a small top-k, from their K = MAX_SMALL_TOP_K + 1 largest logits. Other rows get arbitrary values.

    Returns (tokens [..., K], the likeliest first; their p [..., K]; tied [...] bool: equal logits at the border of top-k).
    """
    shape, count = (-1, *[1] * (logits.ndim - 1)), MAX_SMALL_TOP_K + 1
    best = (logits / rows.temperature.view(shape)).topk(count, dim=-1)  # a fixed count: other rows do not change a row's sums
    scores = best.values.masked_fill(rows.beyond_top_k.view(-1, *shape[2:], count), float("-inf"))
    # compares each kept logit with the next one, which top-k may drop; -inf minus -inf is NaN
    tied = (scores[..., :-1] - best.values[..., 1:] == 0).any(-1)
    if rows.occupied is not None:
        tied &= rows.occupied.view(-1, *[1] * (tied.ndim - 1))
    if rows.any_top_p:
        rising = scores.flip(-1).softmax(-1).cumsum(-1)  # from the least probable token up, as in transformers
        tail = (rising <= rows.tail.view(shape)).flip(-1)
        tail[..., 0] = False
        if not rows.all_top_p:
            tail &= (rows.tail > 0).view(shape)
        scores = scores.masked_fill(tail, float("-inf"))
    p = scores.softmax(-1)
    if rows.any_min_p:
        p = _apply_min_p(scores, p, rows.min_p.view(shape))
    return best.indices, p, tied


def _apply_min_p(scores: Tensor, p: Tensor, min_p: Tensor) -> Tensor:
    """p without tokens that are less probable than min_p times the most probable one."""
    return scores.masked_fill(p < min_p * p.amax(-1, keepdim=True), float("-inf")).softmax(-1)


class Sampler:
    """The sampling settings of all rows, and the ids that their processors see.

    rows: batch size. engine_draw: the engine's own draw, or None.
    """

    def __init__(
        self, rows: int, device: torch.device, noise_type: type[Noise] = Noise, engine_draw: EngineDraw | None = None
    ) -> None:
        self.device, self.noise_type, self.engine_draw = device, noise_type, engine_draw
        self.settings: list[Sampling | None] = [None] * rows
        self.eos: list[frozenset[int]] = [frozenset()] * rows
        self.ids = [torch.empty(0, dtype=torch.long, device=device)] * rows

    def admit(self, row: int, sampling: Sampling, prompt: Tensor, eos: frozenset[int] = frozenset()) -> None:
        """Give a row its settings. prompt: [T] int64 ids. eos: ids after which the row's processors are not called."""
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
        """Forget what was derived from the settings. The next use computes it again, once for a batch of new requests."""
        for name in ("greedy", "processed", "_own_warpers", "uses_argmax_only", "warping", "noise", "_ends"):
            self.__dict__.pop(name, None)

    @cached_property
    def greedy(self) -> bool:
        """Whether no row samples. A row with its own warpers counts as sampling at any temperature."""
        return all(row is None or (row.temperature == 0 and not row.warpers) for row in self.settings)

    @cached_property
    def processed(self) -> bool:
        """Whether any row has processors or its own warpers."""
        return any(row is not None and (row.processors or row.warpers) for row in self.settings)

    @cached_property
    def _own_warpers(self) -> bool:
        """Whether any row has its own warpers."""
        return any(row is not None and row.warpers for row in self.settings)

    @cached_property
    def uses_argmax_only(self) -> bool:
        """Whether every token is the argmax of its raw logits."""
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
        """End-of-sequence ids of every row [B, k], padded with -1; None if no row has any."""
        count = max(map(len, self.eos))
        return on_device([[*ids, *[-1] * (count - len(ids))] for ids in self.eos], self.device) if count else None

    def unfinished(self, tokens: Tensor) -> Tensor | None:
        """Rows [B] bool that the token [B] does not end. None: all rows draft on.

        Always None on an accelerator, where a draft past the end costs less than the check. The commit cuts such drafts."""
        if self._ends is None or not host_transfer.is_on_host(tokens):
            return None
        return (tokens[:, None] != self._ends).all(1)

    def _calls_processors(self, row: int, path: Tensor, active: Sequence[bool] | None) -> bool:
        """Whether to call a row's processors after path [B, k]. Plain decoding never calls them past the end of a text."""
        if active is not None and not active[row]:
            return False
        return not self.eos[row] or not path.shape[1] or self.eos[row].isdisjoint(path[row].tolist())

    def process(self, logits: Tensor, path: Tensor, active: Sequence[bool] | None = None) -> Tensor:
        """Apply every row's processors. logits: [B, V] raw; path: [B, k], tokens after the committed ones, shorter ones padded
        with NO_TOKEN. Returns [B, V].

        active: rows with processors to call, None for all. Logits of other rows do not change.
        """
        if not self.processed:
            return logits
        rows = []
        for row, sampling in enumerate(self.settings):
            scores = logits[row : row + 1]
            if sampling is not None and sampling.processors and self._calls_processors(row, path, active):
                scores = self._run(sampling.processors, row, path, scores.clone())
            rows.append(scores)
        return torch.cat(rows) if len(rows) > 1 else rows[0]

    def _run(self, processors: Sequence[Processor], row: int, path: Tensor, scores: Tensor) -> Tensor:
        """Scores [1, V] after processors that see all ids of a row, path [B, k] included."""
        ids = (torch.cat([self.ids[row], path[row][path[row] != NO_TOKEN]]) if path.shape[1] else self.ids[row])[None]
        with stable_defaults():
            for processor in processors:
                scores = processor(ids, scores)
        return scores

    def warped(self, scores: Tensor, path: Tensor, active: Sequence[bool] | None = None) -> Tensor:
        """p [B, V] of processed scores [B, V]. path, active: as in `process`."""
        p = warp(scores, self.warping)
        for row, sampling in enumerate(self.settings):
            if sampling is not None and sampling.warpers and self._calls_processors(row, path, active):
                p[row] = self._run(sampling.warpers, row, path, scores[row : row + 1])[0].softmax(-1)
        return p

    def distribution(self, logits: Tensor, path: Tensor, active: Sequence[bool] | None = None) -> Tensor:
        """p of raw logits [B, V], processed and warped. path, active: as in `process`."""
        return self.warped(self.process(logits, path, active), path, active)

    def chances(self, scores: Tensor, path: Tensor, active: Sequence[bool] | None = None) -> Tensor | LazyDistribution:
        """`warped` for a draw. On a CPU it is lazy if `WarpedLogits` can draw without a distribution."""
        return self._chances(scores, self.warping, not self._own_warpers, lambda: self.warped(scores, path, active))

    def _chances(
        self, scores: Tensor, rows: WarperSettings, has_all_settings: bool, distribution: Callable[[], Tensor]
    ) -> Tensor | LazyDistribution:
        """Processed scores [B, V] for a draw. has_all_settings: no row has its own warpers. distribution: computes p [B, V]."""
        can_be_lazy = self.engine_draw is not None or (rows.all_small_top_k and has_all_settings)
        if self.noise_type is not Noise or not can_be_lazy or not _is_large_on_host(scores):
            return distribution()
        return WarpedLogits(scores, rows, self.engine_draw, distribution)

    def would_draw(self, row: int, logits: Tensor, positions: Tensor) -> Tensor:
        """The tokens [n] that a row without processors would draw with the target's noise.

        logits: [n, V]; positions: [n] int64, one for each token.
        """
        settings = self.settings[row]
        if self.greedy or settings is None:
            return greedy_tokens.greedy_token(logits)
        rows = WarperSettings([settings] * len(logits), self.device)
        noise = self.noise_type(on_device([settings.seed] * len(logits), self.device))
        return noise.draw(self._chances(logits, rows, True, lambda: warp(logits, rows)), positions, TARGET)

    def propose(
        self, logits: Tensor, position: Tensor, path: Tensor, active: Sequence[bool] | None = None, coupled: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Draw a draft token. logits: [B, V] raw; position: [B], the token's; path: [B, k], the draft so far.

        active: as in `process`. coupled: draw with the target's own noise (Gumbel coupling). Such drafts are deterministic
        given the seed, so `verify.match` is exact for them. Returns (tokens [B], q [B, V] or None for a deterministic draw,
        processed logits [B, V] for confidences)."""
        scores = self.process(logits, path, active)
        return *self.drawn(scores, position, path, active, coupled), scores

    def drawn(
        self, scores: Tensor, position: Tensor, path: Tensor, active: Sequence[bool] | None = None, coupled: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """`propose` from processed logits [B, V], which it does not return."""
        if self.greedy:
            return greedy_tokens.greedy_token(scores), None
        if coupled:
            return self.noise.draw(self.chances(scores, path, active), position, TARGET), None
        q = self.warped(scores, path, active)
        return self.noise.draw(q, position, substream(DRAFT, path.shape[1])), q

    def candidates(
        self,
        logits: Tensor,
        position: Tensor,
        path: Tensor,
        count: int,
        active: Sequence[bool] | None = None,
        coupled: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """k = min(count, V) tokens drawn from q without replacement, in this order. Greedy rows: the likeliest ones.

        Arguments as in `propose`. Returns (tokens [B, k], possible [B, k] bool: False if there was none left to draw, q [B, V]
        or None for a deterministic draw, processed logits [B, V]).
        """
        scores = self.process(logits, path, active)
        order, q = scores, None
        if not self.greedy:
            p = self.warped(scores, path, active)
            order = self.noise.race(p, position, TARGET if coupled else substream(DRAFT, path.shape[1]))
            if self.warping.any_greedy:
                order = torch.where(self.warping.greedy[:, None], scores.double(), order)
            q = None if coupled else p
        best = order.topk(min(count, order.shape[-1]))
        return best.indices, best.values > float("-inf"), q, scores


class Scores:
    """The target's logits, distributions and likeliest tokens after every node of a draft, computed when needed.

    Index 0 is the root. first: the position of every row's first new token. live: rows with meaningful scores. scored: a
    forward that has run all layers. logits: [B, n+1, V] float32, instead of `scored`. after_draft: [B] int64, the target's
    tokens after whole drafts, if `choose_after_draft` was called.
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
        self.after_draft: Tensor | None = None
        if logits is not None:
            self.logits = logits

    @cached_property
    def logits(self) -> Tensor:
        """Raw logits of every node [B, n+1, V] float32, the root first."""
        assert self._scored is not None
        return self._scored.finish()

    @cached_property
    def position(self) -> Tensor:
        """[B] int64, the position of the first new token."""
        return on_device(self.first, self.sampler.device)

    def choose_after_draft(self, tokens: Tensor, valid: Tensor) -> None:
        """Choose the token after every row's whole chain, tokens [B, n] with valid [B, n] bool. No other place is scored."""
        assert self._scored is not None
        model, states = self._scored.model, self._scored.last_states
        if self.sampler.uses_argmax_only:
            self.after_draft = model.greedy_tokens(states)[:, 0]
            return
        path, active = tokens.masked_fill(~valid, NO_TOKEN), self.live if self.sampler.processed else None
        p = self.sampler.chances(self.sampler.process(model.logits(states)[:, 0], path, active), path, active)
        self.after_draft = self.sampler.noise.draw(p, self.position + valid.sum(1), TARGET)

    def p(self, node: Tensor, path: Tensor, walking: Tensor) -> Tensor:
        """Processed distribution [B, V] after a node [B] (-1: the root) with the path [B, k].

        walking: [B] bool. Processors are called only for live rows that walk.
        """
        return self.sampler.distribution(self.at(node), path, self.active_rows(walking))

    def chances(self, node: Tensor, path: Tensor, walking: Tensor) -> Tensor | LazyDistribution:
        """`p` for a draw, as in `Sampler.chances`."""
        active = self.active_rows(walking)
        return self.sampler.chances(self.sampler.process(self.at(node), path, active), path, active)

    def active_rows(self, walking: Tensor) -> list[bool] | None:
        """Rows with processors to call, on the host; None if no row has any."""
        if not self.sampler.processed:
            return None
        return [live and walks for live, walks in zip(self.live, walking.tolist(), strict=True)]

    def at(self, node: Tensor) -> Tensor:
        """Raw logits [B, V] after a node [B], -1 for the root."""
        if self.logits.shape[1] == 1:
            return self.logits[:, 0]
        index = (node + 1)[:, None, None].expand(-1, 1, self.logits.shape[2])
        return self.logits.gather(1, index).squeeze(1)

    def everywhere(self) -> Tensor | None:
        """p after every node [B, n+1, V], the root first.

        None if rows have processors, which must not see nodes that the walk does not reach. None for many logits on a CPU,
        where one node at a time is cheaper."""
        if self.sampler.processed or (host_transfer.is_on_host(self.logits) and self.logits.numel() > MAX_LOGITS_AT_ONCE):
            return None
        return warp(self.logits, self.sampler.warping)

    @cached_property
    def best(self) -> Tensor:
        """The argmax of the raw logits after every node [B, n+1] int64, the root first; NO_TOKEN if they are not finite."""
        if self._scored is None or "logits" in self.__dict__:
            return greedy_tokens.greedy_token(self.logits)
        return self._scored.greedy_tokens()
