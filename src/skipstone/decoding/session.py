"""The rows of a batch while they decode: KV cache, sampler, last tokens and one drafter.

A row is a slot for one request at a time: `admit`, `prefill`, steps, `release`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from skipstone.decoding import verify
from skipstone.decoding.draft import Draft, GreedyVerdict, RowVerdict, UnverifiedDraft, Verdict
from skipstone.decoding.drafter import Drafter, NoDrafter, SessionView
from skipstone.decoding.prefill import Prefill
from skipstone.decoding.request import Request
from skipstone.decoding.sampling import Scores
from skipstone.engines.host_transfer import on_device
from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_runner import ModelRunner

Stores = list[tuple[ModelRunner, KVCache]]
"""KV caches with their models."""
NO_PREDICTIONS = "a prediction is drafted by methods that look drafts up: auto or prompt_lookup"


def _picked(states: Tensor, columns: list[int]) -> Tensor:
    """Some of the states [n, d] of a row."""
    if columns == list(range(len(columns))):
        return states[: len(columns)]
    return states[on_device(columns, states.device)]


def refuse_ids(model: ModelRunner, low: int, high: int) -> None:
    """ValueError if a token id has no embedding. low, high: the lowest and the highest id."""
    size = model.embeddings
    if low < 0 or high >= size:
        wrong = low if low < 0 else high
        raise ValueError(f"token id {wrong} is out of range: the model's vocabulary has {size} entries, 0 to {size - 1}")


class Session:
    """Scores, verifies and commits the drafts of its drafter.

    model: the target. rows: batch size. capacity: maximum number of tokens in a row. depth: number of target layers to run,
    None for all (early_exit runs fewer).
    """

    def __init__(
        self, model: ModelRunner, rows: int, capacity: int, drafter: Drafter | None = None, *, depth: int | None = None
    ) -> None:
        self.model, self.capacity = model, capacity
        self.drafter = NoDrafter() if drafter is None else drafter
        slots = capacity + self.drafter.scratch_slots
        self.view = SessionView(model, rows, slots, model.depth if depth is None else depth)
        self.rows, self.store, self.sampler, self.alive = rows, self.view.store, self.view.sampler, self.view.alive
        self.view.feature_depths = self.drafter.feature_depths
        self.prompts = Prefill(model, self.store, self.drafter.feature_depths)
        self.drafter.bind(self.view)

    @property
    def stores(self) -> Stores:
        """All KV caches, the drafter's included, with their models."""
        return [(self.model, self.store), *self.drafter.caches]

    @property
    def prefilling(self) -> bool:
        """Whether a row still has prompt tokens to run."""
        return bool(self.prompts.waiting)

    def admit(self, row: int, request: Request, num_cached_tokens: int = 0, source_row: int | None = None) -> int:
        """Give a free row to a request. ValueError, before anything changes, for a request that cannot be decoded.

        num_cached_tokens: number of first prompt tokens that are in the cache already; not all of them. source_row: the row
        that has them, with or without a request; None for `row` itself. Returns how many of them are reused: the drafter may
        need to see the last ones again."""
        assert not self.alive[row], f"row {row} is taken"
        assert row not in self.prompts.waiting, f"row {row} is taken"
        assert 0 <= num_cached_tokens < max(len(request.prompt), 1), "the last token of a prompt must run"
        self.validate_request(request)
        source_row = row if source_row is None else source_row
        num_cached_tokens = self.drafter.reusable_tokens(source_row, num_cached_tokens)
        if source_row != row:
            self.store.copy(source_row, row, num_cached_tokens)
        self.store.length[row] = num_cached_tokens
        self.drafter.reuse_tokens(row, source_row, num_cached_tokens)
        self.sampler.admit(row, request.sampling, request.prompt, request.eos)
        self.prompts.add(row, request.prompt[num_cached_tokens:])
        self.drafter.add_request(row, request)
        return num_cached_tokens

    def validate_request(self, request: Request) -> None:
        """ValueError for a request that cannot be decoded."""
        length, max_new_tokens = len(request.prompt), request.max_new_tokens
        if length < 1:
            raise ValueError("the prompt is empty: there is no token to start from")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, found {max_new_tokens}")
        total = length + max_new_tokens
        too_long = f"prompt of {length} tokens + max_new_tokens={max_new_tokens} is more than the"
        if total > self.model.max_positions:
            raise ValueError(f"{too_long} model's {self.model.max_positions} positions ({self.model.max_positions_source})")
        if total > self.capacity:
            raise ValueError(f"{too_long} {self.capacity} tokens of a row of this session; start it with a larger capacity")
        if request.prediction and not self.drafter.takes_predictions:
            raise ValueError(NO_PREDICTIONS)
        refuse_ids(self.model, int(request.prompt.min()), int(request.prompt.max()))
        self.drafter.validate_request(request)

    def release(self, row: int) -> None:
        """Free a row. Its keys and values stay until the next request overwrites them."""
        self.alive[row] = False
        self.prompts.remove(row)
        self.store.length[row] = 0
        self.sampler.release(row)
        self.drafter.remove_request(row)

    def prefill(
        self, chunk: int, max_prompt_tokens_per_pass: int | None = None, decoding: Sequence[int] = ()
    ) -> tuple[Scores | None, list[int]]:
        """Run one pass of the waiting prompts, and the last token of rows that decode. The drafter reads the prompts by itself.

        chunk, max_prompt_tokens_per_pass: as in `Prefill.run`.

        Returns (scores [B, 1, V], rows that decode or have finished their prompt), or (None, []) if there are none.
        """
        next_tokens = {row: self.view.root[row : row + 1] for row in decoding}
        states = self.prompts.run(chunk, max_prompt_tokens_per_pass, next_tokens)
        if self.view.feature_depths:
            features, self.prompts.features = self.prompts.features, {}  # they take much memory
            self.drafter.observe_features(features)
        if not states:
            return None, []
        rows = list(states)
        for row in rows:
            self.alive[row] = True
        logits = self.model.logits(torch.stack([*states.values()])[:, None])
        full = logits.new_zeros((self.rows, *logits.shape[1:]))
        full.index_copy_(0, on_device(rows, full.device), logits)
        return Scores(self.sampler, list(self.store.length), [row in states for row in range(self.rows)], logits=full), rows

    def score(self, draft: Draft) -> Scores:
        """Run a draft through the target. The pass is the same for every method. Without verification only the last place of a
        draft is scored."""
        assert draft.forward is not None, "a draft needs its forward to be scored"
        draft.forward.advance(draft.forward.top)
        scores = Scores(self.sampler, [length + 1 for length in self.store.length], list(self.alive), scored=draft.forward)
        if draft.width and not self.drafter.needs_verification:
            scores.choose_after_draft(draft.tokens, draft.valid)
            return scores
        uses_argmax_only = self.sampler.uses_argmax_only and not self.drafter.needs_logits(draft)
        _ = scores.best if uses_argmax_only else scores.logits  # computed now, so that its time counts as scoring
        return scores

    def verify(self, draft: Draft, scores: Scores) -> Verdict | GreedyVerdict | UnverifiedDraft:
        """Apply `leviathan` or `recursive_rejection` to drafts drawn at random and `match` to all others, and show the drafter
        the result. A draft that needs no verification is accepted."""
        if scores.after_draft is not None:
            return UnverifiedDraft(scores.after_draft)
        verdict = self._verdict(draft, scores)
        verdict.notes = self.drafter.observe_scores(draft, scores, verdict)
        return verdict

    def _verdict(self, draft: Draft, scores: Scores) -> Verdict | GreedyVerdict:
        waived = self.drafter.waive_tokens(draft, scores)
        if draft.q is not None and draft.parents is not None:
            return verify.recursive_rejection(draft, scores.p, scores.position, self.sampler.noise)
        if draft.q is not None:
            everywhere = scores.everywhere()
            p = scores.p if everywhere is None else everywhere
            return verify.leviathan(draft, p, scores.position, self.sampler.noise, waived)
        if self.sampler.uses_argmax_only:
            return verify.match_greedy(draft, scores.best, waived)
        return verify.match(draft, scores.chances, scores.position, self.sampler.noise, waived)

    def commit(self, draft: Draft | None, verdicts: list[RowVerdict]) -> None:
        """Commit the accepted tokens: move lengths, compact tree paths, set the last tokens. Nothing is cloned.

        draft: None for a step that ran prompts. verdicts: one per row, cut by the stopping rules; empty for inactive
        rows.
        """
        view = self.view
        if view.feature_depths and draft is not None and draft.forward is not None:
            states = draft.forward.features
            columns = {row: [0, *(1 + node for node in one.path)] for row, one in enumerate(verdicts) if one.tokens}
            self.drafter.observe_features(
                {row: _picked(states[row], some[: len(verdicts[row].tokens)]) for row, some in columns.items()}
            )
        for row, verdict in enumerate(verdicts):
            if not verdict.tokens:
                continue
            view.last[row] = verdict.tokens[-1]
            view.sampler.extend(row, verdict.tokens)
            if draft is None:
                continue
            root, nodes = view.store.length[row], verdict.path
            if draft.parents is not None:
                view.store.move(row, [root + 1 + node for node in nodes], range(root + 1, root + 1 + len(nodes)))
            view.store.length[row] = root + len(verdict.tokens)
        view.root = on_device(view.last, self.model.device)
        self.drafter.observe_commits(draft, verdicts)

    def check(self, row: int, tokens: Tensor, tolerance: float = 1e-4) -> None:
        """Assert that a row's cache equals that of a new forward over its committed tokens [T] (for tests)."""
        assert self.store.length[row] == len(tokens) - 1, "the last committed token is not in the store yet"
        fresh = Session(self.model, 1, len(tokens) + 1, depth=self.store.layers)
        fresh.admit(0, Request(tokens, 1))
        fresh.prefill(len(tokens))
        self.store.check(fresh.store, row, 0, tolerance)
