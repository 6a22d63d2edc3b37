"""What a method has while it decodes: a store, a sampler, the last committed token of every row.

`Session` does everything but drafting; a method's session overrides `draft` (and what else it must). A batch row is a slot:
`admit` a request, `prefill` its prompt, take part in steps, `release`.
"""

from functools import partial

import torch
from torch import Tensor

from skipstone.decoding import verify
from skipstone.decoding.batch import Batch, Request
from skipstone.decoding.draft import Draft, Picked, RowVerdict, Step, Verdict
from skipstone.decoding.sampling import Sampler, Scores
from skipstone.models.frontier import Frontier
from skipstone.models.host import on_device
from skipstone.models.kvstore import KVStore
from skipstone.models.layered import LayeredModel
from skipstone.models.passes import Pass

PREFILL_CHUNK = 512  # prompt tokens that a row runs in one pass, unless told
CPU_PREFILLED_TOGETHER = 64
"""Prompt tokens that keep a CPU busy: further rows make a pass longer by as much as they are, and all wait for its end."""
Stores = list[tuple[LayeredModel, KVStore]]
"""Keys and values, each with the model that they are of."""
NO_PREDICTIONS = "a prediction is drafted by methods that look drafts up: auto or prompt_lookup"


def refuse_ids(model: LayeredModel, low: int, high: int) -> None:
    """ValueError where the lowest or the highest of some token ids has no embedding."""
    size = model.embeddings
    if low < 0 or high >= size:
        wrong = low if low < 0 else high
        raise ValueError(f"token id {wrong} is out of range: the model's vocabulary has {size} entries, 0 to {size - 1}")


class Session:
    """What a method has of one batch. model: the target. rows: batch size. capacity: most tokens a row may hold.

    depth: layers of the target that count (early_exit stops sooner). coupled: draw drafts from the target's noise.
    scratch: slots beyond the capacity that a step may use for tree nodes.

    A method's session overrides `draft`, and of the hooks `begin`, `learn` and `end` those that it needs: they keep what the
    method itself knows of a row, and several sessions may have them over one batch (`join`).
    """

    reads_logits: bool = False  # whether the method itself wants the target's logits where all rows are greedy

    def __init__(
        self,
        model: LayeredModel,
        rows: int,
        capacity: int,
        *,
        depth: int | None = None,
        coupled: bool = False,
        scratch: int = 0,
    ) -> None:
        self.model, self.capacity, self.scratch, self.coupled = model, capacity, scratch, coupled
        self._batch: Batch | None = None
        self._make_batch = partial(Batch, model, rows, capacity + scratch, depth or model.depth)
        self.shortlist: Tensor | None = None  # [S], the ids that drafts are picked from
        self.drafter: LayeredModel | None = None  # the target's layers in fewer bits, where these draft
        self.prefilled_together: int | None = None  # prompt tokens from which on a pass takes no further row

    @property
    def batch(self) -> Batch:
        """Its rows: its own, made when first asked for, or those of the batch that it has joined."""
        if self._batch is None:
            self._batch = self._make_batch()
        return self._batch

    def join(self, batch: Batch) -> None:
        """Draft for the rows of a batch that another session keeps, which has as much scratch at least."""
        self._batch = batch

    @property
    def rows(self) -> int:
        return self.batch.store.rows

    @property
    def store(self) -> KVStore:
        return self.batch.store

    @property
    def stores(self) -> Stores:
        """All keys and values that it keeps, with their models."""
        return [(self.model, self.store)]

    @property
    def sampler(self) -> Sampler:
        return self.batch.sampler

    @property
    def alive(self) -> list[bool]:
        return self.batch.alive

    @property
    def root(self) -> Tensor:
        return self.batch.root

    @property
    def takes_predictions(self) -> bool:
        """Whether a request's prediction is drafted from."""
        return False

    @property
    def own_threads(self) -> bool:
        """Whether nothing that a step computes is long enough for several of torch's threads."""
        return self.model.own_threads

    def predicted(self, row: int) -> int:
        """Tokens of a row's prediction that were drafted and accepted."""
        return 0

    @property
    def prefilling(self) -> bool:
        """Whether a row still has prompt tokens to run."""
        return any(prompt is not None for prompt in self.batch.waiting)

    def admit(self, row: int, request: Request, known: int = 0) -> None:
        """Give a free row to a request. known: as in `Batch.admit`. ValueError, before anything changed, for a request that
        cannot be decoded."""
        assert self.batch.is_free(row), f"row {row} is taken"
        assert 0 <= known < max(len(request.prompt), 1), "the last token of a prompt is run in any case"
        self.refuse(request)
        self.batch.admit(row, request, known)
        self.begin(row, request)

    def refuse(self, request: Request) -> None:
        """ValueError for a request that cannot be decoded."""
        length, most = len(request.prompt), request.max_new_tokens
        if length < 1:
            raise ValueError("the prompt is empty: there is no token to start from")
        if most < 1:
            raise ValueError(f"max_new_tokens must be at least 1, found {most}")
        needed = f"prompt of {length} tokens + max_new_tokens={most} is more than the"
        if length + most > self.model.max_positions:
            raise ValueError(f"{needed} model's {self.model.max_positions} positions ({self.model.max_positions_source})")
        if length + most > self.capacity:
            raise ValueError(
                f"{needed} {self.capacity} tokens a row of this session was made for; start it with a larger capacity"
            )
        if request.prediction and not self.takes_predictions:
            raise ValueError(NO_PREDICTIONS)
        refuse_ids(self.model, int(request.prompt.min()), int(request.prompt.max()))

    def release(self, row: int) -> None:
        """Free a row. Its slots are overwritten by the next request."""
        self.batch.release(row)
        self.end(row)

    def begin(self, row: int, request: Request) -> None:
        """Hook: a request begins on a row."""

    def end(self, row: int) -> None:
        """Hook: a row is free again."""

    def learn(self, draft: Draft | None, verdicts: list[RowVerdict]) -> None:
        """Hook: tokens were committed, `verdicts` has those of every row. draft: what this session drafted for them; None for
        the token that ends a prefill."""

    def clocked(self, step: Step) -> None:
        """Hook: a decoding step has been taken, and its times are known."""

    def resume(self, row: int, tokens: Tensor) -> None:
        """Run further committed tokens [T] of a row, T >= 1, in the prefills that follow: its store had fallen behind."""
        self.batch.waiting[row] = tokens

    def prefill(self, chunk: int) -> tuple[Scores | None, list[int]]:
        """Run up to `chunk` prompt tokens of the row that has waited longest, and of waiting rows behind it.

        Returns (scores [B, 1, V], rows whose prompt is done), (None, []) while no prompt is.
        """
        rows = self._prefilled_rows(chunk)
        parts = [prompt[:chunk] for row in rows if (prompt := self.batch.waiting[row]) is not None]
        counts = [len(part) for part in parts]
        tokens = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
        at = self._prefill_pass(rows, counts)
        hidden = self.model.embed(tokens, at.positions)
        hidden = self.model.run(hidden, at, self.store, range(self.store.layers))
        done = []
        for row, count in zip(rows, counts, strict=True):
            self.store.length[row] += count
            rest = self.batch.waiting[row]
            assert rest is not None
            self.batch.waiting[row] = rest[count:] if len(rest) > count else None
            self.batch.take_turn(row)
            if self.batch.waiting[row] is None:
                done.append(row)
                self.alive[row] = True
        if not done:
            return None, []
        last = on_device(counts, hidden.device) - 1
        logits = self.model.logits(hidden[torch.arange(len(rows), device=hidden.device, dtype=torch.int64), last][:, None])
        return self._prefill_scores(logits, rows, done), done

    def _prefilled_rows(self, chunk: int) -> range:
        waiting, most = self.batch.waiting, self.prefilled_together
        first = min((row for row in range(self.rows) if waiting[row] is not None), key=lambda row: self.batch.turn[row])
        tokens, stop = 0, first
        while stop < self.rows and (prompt := waiting[stop]) is not None and (most is None or tokens < most):
            tokens, stop = tokens + min(len(prompt), chunk), stop + 1
        return range(first, stop)

    def _prefill_pass(self, rows: range, counts: list[int]) -> Pass:
        bases = [self.store.length[row] for row in rows]
        end = max(base + count for base, count in zip(bases, counts, strict=True))
        self.store.reserve(end)
        width = max(counts)
        device = self.model.device
        positions = on_device(bases, device)[:, None] + torch.arange(width, device=device, dtype=torch.int64)
        even = len(set(counts)) == 1
        valid = None if even else torch.arange(width, device=device, dtype=torch.int64) < on_device(counts, device)[:, None]
        if valid is not None:  # padding repeats a real position, so that position tables are never overrun
            positions = torch.where(valid, positions, 0)
        start = bases[0] if even and len(set(bases)) == 1 else None
        return Pass(positions, positions, valid, slice(rows.start, rows.stop), end, start)

    def _prefill_scores(self, logits: Tensor, rows: range, done: list[int]) -> Scores:
        full = logits
        if len(rows) < self.rows:
            full = logits.new_zeros((self.rows, *logits.shape[1:]))
            full[rows.start : rows.stop] = logits
        live = [False] * self.rows
        for row in done:
            live[row] = True
        return Scores(self.sampler, list(self.store.length), live, logits=full)

    def frontier(self, most: list[int]) -> Frontier:
        """A new frontier that holds the last committed token of every live row, with room for `most` draft tokens a row."""
        return Frontier(self.model, self.store, self.root, self.alive, most, self.shortlist, self.drafter)

    def optimise(self) -> None:
        """What a method does now and then for its later steps (SWIFT's search); timed apart from drafting."""

    def draft(self, limit: list[int]) -> Draft:
        """Propose tokens. limit: most draft tokens per row, 0 for plain decoding of that row."""
        raise NotImplementedError

    def score(self, draft: Draft) -> Scores:
        """The one scoring pass, the same for every method."""
        assert draft.frontier is not None, "a draft to be scored carries its frontier"
        draft.frontier.advance(draft.frontier.top)
        scores = Scores(self.sampler, [length + 1 for length in self.store.length], list(self.alive), scored=draft.frontier)
        _ = scores.best if self.sampler.picks_only and not self.reads_logits else scores.logits  # in the time of scoring
        return scores

    def waived(self, draft: Draft, scores: Scores) -> Tensor | None:
        """Draft tokens [B, n] bool that are accepted whatever the acceptance rule says; None, always, of a lossless method."""
        return None

    def verify(self, draft: Draft, scores: Scores) -> Verdict | Picked:
        """Apply the acceptance rule: `leviathan` for drafts drawn at random, `match` for all others."""
        waived = self.waived(draft, scores)
        picks = scores.picks() if draft.q is None else None
        if picks is not None:
            return verify.match_greedy(draft, picks, waived)
        noise = self.sampler.noise
        if draft.q is None:
            return verify.match(draft, scores.chances, scores.position, noise, waived)
        everywhere = scores.everywhere()
        p = scores.p if everywhere is None else everywhere
        return verify.leviathan(draft, p, scores.position, noise, waived)

    def commit(self, draft: Draft | None, verdicts: list[RowVerdict]) -> None:
        """Take over what was decided: move lengths, compact tree paths, remember the last token. Nothing is cloned.

        draft: None for the token that ends a prefill. verdicts: per row, cut by the stopping rules; without tokens for rows
        that took no part.
        """
        self.batch.commit(draft, verdicts)
        self.learn(draft, verdicts)

    def check(self, row: int, tokens: Tensor, tolerance: float = 1e-4) -> None:
        """Assert the invariant of a row against a forward over its committed tokens [T] from scratch (for tests)."""
        assert self.store.length[row] == len(tokens) - 1, "the last committed token is not in the store yet"
        fresh = Session(self.model, 1, len(tokens) + 1, depth=self.store.layers)
        fresh.admit(0, Request(tokens, 1))
        fresh.prefill(len(tokens))
        self.store.check(fresh.store, row, 0, tolerance)
