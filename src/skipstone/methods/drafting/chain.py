"""The loop that drafts a chain token by token, for all methods that draft autoregressively.

Shapes: B rows, k tokens drafted so far, V vocabulary.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from skipstone.decoding.draft import Draft, RowVerdict
from skipstone.decoding.drafter import Drafter, layers_used
from skipstone.decoding.request import Request
from skipstone.decoding.sampling import Sampler
from skipstone.engines import host_transfer
from skipstone.engines.engine import ChainInputs, ChainOutputs, SurvivalThresholds
from skipstone.engines.greedy_tokens import NO_TOKEN
from skipstone.engines.host_transfer import cached_arange, on_device, to_device
from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.partial_forward import PartialForward
from skipstone.methods.drafting.chain_stop_rule import ConfidenceRule, SurvivalRule, Threshold
from skipstone.models.passes import Pass, SkipSet, Tree

CHECK_EVERY = 4
"""Number of drafted tokens between two checks whether every row has stopped. Each check synchronises with an accelerator."""


class DraftChain:
    """A chain under construction.

    max_drafts: maximum number of draft tokens per row. alive: active rows. A row stops at its limit or by `stop`. Its drawn
    tokens are always submitted.
    """

    def __init__(self, max_drafts: list[int], alive: list[bool], device: torch.device) -> None:
        self.max_drafts = [count if live else 0 for count, live in zip(max_drafts, alive, strict=True)]
        self.width = max(self.max_drafts)
        self._all_valid_below = min((count for count, live in zip(max_drafts, alive, strict=True) if live), default=0)
        self._limits = on_device(self.max_drafts, device)  # [B]
        self._going: Tensor | None = None  # [B] bool, rows that have not stopped; None for all
        self._tokens: list[Tensor] = []  # one [B] per place, like the next three
        self._valid: list[Tensor | None] = []
        self._q: list[Tensor | None] = []
        self._confidence: list[Tensor] = []

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def is_full(self) -> bool:
        """Whether every row has reached its limit."""
        return len(self) == self.width

    @property
    def is_ragged(self) -> bool:
        """Whether rows may have different numbers of tokens."""
        return any(column is not None for column in self._valid)

    @property
    def newest(self) -> tuple[Tensor, Tensor | None]:
        """The newest token of every row: (tokens [B, 1], valid [B, 1] bool or None for all)."""
        valid = self._valid[-1]
        return self._tokens[-1][:, None], None if valid is None else valid[:, None]

    def add(self, token: Tensor, q: Tensor | None, confidence: Tensor | None = None) -> None:
        """Add a drawn token [B], the distribution q [B, V] that it was drawn from, and its confidence [B]."""
        place = len(self)
        valid = self._limits > place if place >= self._all_valid_below else None
        if self._going is not None:
            valid = self._going if valid is None else valid & self._going
        self._tokens.append(token)
        self._valid.append(valid)
        self._q.append(q)
        if confidence is not None:
            self._confidence.append(confidence)

    @property
    def going_rows(self) -> Tensor:
        """Rows [B] bool that have neither stopped nor reached their limit."""
        below_limit = self._limits > len(self)
        return below_limit if self._going is None else below_limit & self._going

    def open_rows(self) -> list[bool]:
        """Rows that will draft one more token, on the host."""
        going = [True] * len(self.max_drafts) if self._going is None else self._going.tolist()
        return [len(self) < max_drafts and goes for max_drafts, goes in zip(self.max_drafts, going, strict=True)]

    def stop(self, *may_go_on: Tensor | None, check: bool = False) -> bool:
        """Stop the rows that any of `may_go_on` excludes ([B] bool, None for all rows). Returns True if all are known to stop.

        A check synchronises with an accelerator, so there it happens only with `check`, after every CHECK_EVERY tokens. Until
        then, stopped rows draft invalid tokens.
        """
        conditions = [rows for rows in may_go_on if rows is not None]
        if not conditions:
            return False
        going = functools.reduce(operator.and_, conditions)  # [B]
        readable = host_transfer.is_on_host(going)
        if readable and bool(going.all()):
            return False
        self._going = going if self._going is None else self._going & going
        if readable:
            return not bool((self._going & (self._limits > len(self))).any())
        return check and len(self) % CHECK_EVERY == 0 and not any(self.open_rows())

    def draft(self, forward: PartialForward, exit_layer: int | None = None) -> Draft:
        """The finished chain. exit_layer: the layer that its tokens were drafted at, for reports."""
        if not self._tokens:
            return Draft.empty(forward.rows, forward.device, forward)
        tokens = torch.stack(self._tokens, 1)  # [B, n]
        all_rows = torch.ones_like(self._tokens[0], dtype=torch.bool)
        valid = torch.stack([all_rows if column is None else column for column in self._valid], 1)  # [B, n]
        if forward.valid is not None:
            valid = valid & forward.valid[:, :1]
        drawn_from = [column for column in self._q if column is not None]
        q = torch.stack(drawn_from, 1) if drawn_from else None  # [B, n, V]
        confidence = torch.stack(self._confidence, 1) if self._confidence else None
        return Draft(tokens, valid, forward, q=q, confidence=confidence, exit_layer=exit_layer)


class ChainDrafter(Drafter):
    """Drafts token by token.

    A subclass computes the logits after the newest token (`next_logits`). It may change how a token is drawn (`propose`), how
    confidence is computed (`observe`) and what reads a drafted token (`append`, `finish`).

    max_drafts: maximum number of draft tokens per row and step; `self.max_drafts` has one per row. threshold: confidence below
    which a row stops drafting. exit_layer: number of first layers of the target that draft, None for
    all; `self.layers` is the same as a number.
    """

    checks_for_stops = True  # whether to check on an accelerator, from time to time, if every row has stopped
    transform: Tensor | None = None  # [d', d'], applied to states before the LM head
    shortlist: Tensor | None = None  # [S], the ids that may be drafted; None for all
    drafting_model: ModelRunner | None = None  # the target's layers in fewer bits, if these draft
    reuse_cache = True  # whether scoring goes on from the states that drafting left
    needs_commits = False  # the target's own layers draft, over its own KV cache

    def __init__(
        self,
        model: ModelRunner,
        rows: int,
        *,
        max_drafts: int,
        threshold: Threshold,
        coupled: bool,
        exit_layer: int | None = None,
    ) -> None:
        self.model, self.coupled, self.exit_layer = model, coupled, exit_layer
        self.max_drafts = [max_drafts] * rows
        self.confidence = ConfidenceRule(threshold, rows, model.device, max_drafts)
        self.rule = self.confidence  # of this step

    @property
    def sampler(self) -> Sampler:
        return self.view.sampler

    @property
    def layers(self) -> int:
        return self.exit_layer or self.model.depth

    def add_request(self, row: int, request: Request) -> None:
        self.confidence.reset(row)

    def propose_draft(self, limits: list[int], stop_rule: SurvivalThresholds | None = None) -> Draft:
        """Draft token by token until every row has stopped."""
        view, max_drafts = self.view, list(map(min, self.max_drafts, limits))
        self.rule, check = self.confidence, self.checks_for_stops or stop_rule is not None
        if stop_rule is not None:
            self.rule = SurvivalRule(stop_rule, view.rows, sum(view.alive), self.model.device)
        forward = view.start_forward(max_drafts, self.shortlist, self.drafting_model)
        if (draft := self.draft_in_one_call(max_drafts, forward)) is not None:
            return draft
        chain = DraftChain(max_drafts, view.alive, self.model.device)
        position = forward.positions[:, 0] + 1  # [B]
        path = forward.tokens[:, 1:]  # [B, k], empty here
        for place in range(chain.width):
            logits = self.next_logits(chain, forward)
            active = chain.open_rows() if self.sampler.processed else None
            token, q, scores = self.propose(logits, position + place, path, active)
            confidence, confident = self.observe(scores)
            all_stopped = False
            if not host_transfer.is_on_host(token) or NO_TOKEN in token.tolist():  # a row without a token to choose stops
                all_stopped, token = chain.stop(token != NO_TOKEN), token.clamp_min(0)
                confidence = None if confidence is None else confidence.nan_to_num(0.0)
            chain.add(token, q, confidence)
            path = self.append(chain, forward)
            if all_stopped or chain.is_full or chain.stop(confident, self.sampler.unfinished(token), check=check):
                break
            if self.rule.joint and chain.stop(self.rule.together(chain.going_rows), check=check):
                break
        return self.finish(chain, forward)

    def one_call(self) -> tuple[int, SkipSet | None] | None:
        """(number of first layers, skipped sublayers) to draft a greedy chain in one engine call; None if impossible."""
        return None

    def draft_in_one_call(self, max_drafts: list[int], forward: PartialForward) -> Draft | None:
        """The greedy chain in one engine call; None if it must be drafted token by token."""
        drafter = self.one_call()
        if drafter is None or not self.sampler.greedy or self.sampler.processed:
            return None
        inputs = self.chain_inputs(max_drafts, *drafter)
        inputs.keep_states = self.reuse_cache
        chain = forward.draft_greedily(inputs)
        if chain is None:
            return None
        self.observe_chain(chain)
        valid = torch.ones_like(chain.tokens, dtype=torch.bool) if forward.valid is None else forward.valid[:, 1:]
        exit_layer = drafter[0] if drafter[1] is None else None
        return Draft(chain.tokens, valid, forward, confidence=chain.confidence, exit_layer=exit_layer)

    def chain_inputs(self, max_drafts: list[int], layers: int, skip: SkipSet | None) -> ChainInputs:
        """The inputs of one engine call, with the stop rule of this step."""
        rule = self.rule
        thresholds = rule.thresholds if rule.active else None
        return ChainInputs(max_drafts, thresholds, self.sampler.eos, layers, skip, self.transform, survival=rule.survival)

    def observe_chain(self, chain: ChainOutputs) -> None:
        """See the results of one engine call, as `observe` sees those of each token otherwise."""

    def next_logits(self, chain: DraftChain, forward: PartialForward) -> Tensor:
        """Raw logits [B, V] float32 after the newest token."""
        raise NotImplementedError

    def propose(
        self, logits: Tensor, position: Tensor, path: Tensor, active: Sequence[bool] | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Draw a token. Arguments and results as in `Sampler.propose`."""
        return self.sampler.propose(logits, position, path, active, self.coupled)

    def observe(self, scores: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Processed logits [B, V] -> (confidence [B] or None, rows [B] bool that may draft on, None for all)."""
        confidence = self.rule.of(scores)
        return confidence, self.rule.keep(confidence)

    def append(self, chain: DraftChain, forward: PartialForward) -> Tensor:
        """Append the newest token to the drafting forward (here the target's). Returns all tokens drafted so far, [B, k]."""
        forward.append(*chain.newest)
        return forward.tokens[:, 1:]

    def finish(self, chain: DraftChain, forward: PartialForward) -> Draft:
        """The draft. Its tokens are in the forward that the target scores."""
        return chain.draft(forward, exit_layer=self.exit_layer)

    def observe_commits(self, draft: Draft | None, verdicts: list[RowVerdict]) -> None:
        self.confidence.update(verdicts)

    def replay_tokens(self, row: int, tokens: Sequence[int]) -> Tensor | None:
        """Run the tokens through the layers that draft, in one pass."""
        model, skip = self.drafting_model or self.model, self.choose_replay_skip()
        return self.read_states(replay_hidden_states(self.view.store, row, tokens[:-1], model, self.layers, skip))[0]

    def choose_replay_skip(self) -> SkipSet | None:
        """The skip set of the next replay."""
        return None

    def read_states(self, states: Tensor) -> Tensor:
        """The drafter's logits [B, n, V] of states [B, n, d] after its last layer."""
        return (self.drafting_model or self.model).logits(states, self.shortlist)

    def describe(self, name: str) -> list[dict[str, Any]]:
        return [] if self.exit_layer is None else [layers_used(name, exits=[self.exit_layer])]


class OwnCacheDrafter(ChainDrafter):
    """Drafts with weights and a KV cache of its own. The target's forward gets the draft when it is finished.

    runner: the weights. store: their KV cache. text: all tokens of every row.
    """

    needs_commits = True

    def __init__(self, model: ModelRunner, drafting_runner: ModelRunner, rows: int, capacity: int, **settings: Any) -> None:
        """settings: of `ChainDrafter`."""
        super().__init__(model, rows, **settings)
        self.runner, self.own_threads = drafting_runner, drafting_runner.engine.own_threads
        self.store = KVCache(rows, drafting_runner.depth, capacity, drafting_runner.kv_dtype)
        self.text: list[list[int]] = [[] for _ in range(rows)]
        self._path: Tensor | None = None  # [B, width], draft tokens on the target's device

    @property
    def caches(self) -> list[tuple[ModelRunner, KVCache]]:
        return [(self.runner, self.store)]

    def append(self, chain: DraftChain, forward: PartialForward) -> Tensor:
        if len(chain) == 1 or self._path is None:
            self._path = forward.tokens.new_empty((self.view.rows, chain.width))
        self._path[:, len(chain) - 1 : len(chain)] = chain.newest[0]
        return self._path[:, : len(chain)]

    def finish(self, chain: DraftChain, forward: PartialForward) -> Draft:
        """Append all tokens of the draft to the target's forward."""
        draft = chain.draft(forward)
        if draft.width:
            forward.append(draft.tokens, draft.valid if chain.is_ragged else None)
        return draft

    def finish_call(self, chain: ChainOutputs, forward: PartialForward) -> Draft:
        """The same for the outputs of one engine call."""
        self.observe_chain(chain)
        device = self.model.device
        tokens = to_device(chain.tokens, device)
        even = min(chain.counts) == tokens.shape[1]
        valid = cached_arange(tokens.shape[1], device) < on_device(chain.counts, device)[:, None]
        forward.append(tokens, None if even else valid)
        confidence = None if chain.confidence is None else to_device(chain.confidence, device)
        return Draft(tokens, valid, forward, confidence=confidence)


def replay_hidden_states(
    store: KVCache,
    row: int,
    tokens: Sequence[int],
    model: ModelRunner,
    layers: int,
    skip: SkipSet | None,
    end: int | None = None,
) -> Tensor:
    """Hidden states [1, n, d] after n committed tokens of a row in the cache (SWIFT, Eq. 3).

    One pass of the first `layers` layers of a model, without the sublayers in `skip`. It reads the target's keys and values
    before these tokens, and writes its own after all committed slots. end: the slot after these tokens; None for the row's
    latest tokens."""
    length, width, device = store.length[row], len(tokens), model.device
    begin = (length if end is None else end) - width
    store.reserve(length + width)
    places = torch.arange(width, device=device, dtype=torch.int64)[None]  # [1, n]
    below = torch.ones((1, width, width), dtype=torch.bool, device=device).tril()
    tree = Tree(on_device([length], device), below, begin + places, seen=on_device([begin], device))
    at = Pass(begin + places, length + places, None, slice(row, row + 1), length + width, length, tree)
    hidden = model.embed(on_device([list(tokens)], device), begin + places)
    return model.run(hidden, at, store, range(layers), skip)
