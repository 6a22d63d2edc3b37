"""The interface of drafters, and their view of a session. A session holds one drafter and never asks which."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from skipstone.decoding.draft import Draft, GreedyVerdict, RowVerdict, Step, Verdict
from skipstone.decoding.request import Request
from skipstone.decoding.sampling import Sampler, Scores
from skipstone.engines.engine import SurvivalThresholds
from skipstone.engines.host_transfer import on_device
from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.partial_forward import PartialForward
from skipstone.models.passes import SkipSet


class SessionView:
    """The rows of a session: their KV cache, their sampler and their last committed tokens.

    model: the target. slots: number per row, for committed tokens and scratch. depth: number of target layers to run. last:
    last committed token per row, which is not in the store yet; on the device as `root` [B] int64. alive: rows that decode.
    feature_depths: the drafter's.
    """

    feature_depths: tuple[int, ...] = ()

    def __init__(self, model: ModelRunner, rows: int, slots: int, depth: int) -> None:
        self.model, self.rows = model, rows
        self.store = KVCache(rows, depth, slots, model.kv_dtype)
        engine = model.engine
        self.sampler = Sampler(rows, model.device, engine_draw=engine.draw if engine.supports_draws else None)
        self.last = [0] * rows
        self.root = on_device(self.last, model.device)
        self.alive = [False] * rows

    def start_forward(
        self, max_drafts: list[int], shortlist: Tensor | None = None, drafting_model: ModelRunner | None = None
    ) -> PartialForward:
        """A new forward with the last committed token of every live row.

        max_drafts: maximum number of draft tokens per row. shortlist: [S] int64, the ids that may be drafted; None for all.
        drafting_model: the target's layers in fewer bits; None for the target itself.
        """
        rows = self.root, self.alive, max_drafts
        return PartialForward(self.model, self.store, *rows, shortlist, drafting_model, self.feature_depths)


class Drafter:
    """Proposes tokens for the rows of a session, and keeps the method's own state of each row.

    Only `propose_draft` is required; everything else does nothing by default. view: the session's rows. scratch_slots: number
    of slots that it needs per row after the row's tokens, for nodes of trees and for evaluations. own_threads: its torch
    operations are too short for several threads. needs_verification: if False, every draft token is accepted (lossy). coupled:
    drafts are deterministic or drawn with the target's noise; False if they are drawn at random. feature_depths: numbers of
    target layers, ascending or not; it observes the states after each of them (`observe_features`). needs_commits: it must see
    the commits of other drafters' steps.
    """

    feature_depths: tuple[int, ...] = ()
    needs_commits = True
    scratch_slots = 0
    own_threads = True
    needs_verification = True
    coupled = True
    view: SessionView

    def bind(self, view: SessionView) -> None:
        """Draft for the rows of a session."""
        self.view = view

    # ------------------------------------------------------------------------------------------------ requests and rows

    def validate_request(self, request: Request) -> None:
        """ValueError for a request that this drafter cannot draft for."""

    @property
    def takes_predictions(self) -> bool:
        """Whether it drafts from a request's prediction."""
        return False

    def accepted_predictions(self, row: int) -> int:
        """Number of accepted draft tokens from a row's prediction."""
        return 0

    def reusable_tokens(self, row: int, count: int) -> int:
        """How many of the first `count` tokens of a row's text another request can reuse."""
        return count

    def reuse_tokens(self, row: int, source_row: int, count: int) -> None:
        """Keep the first `count` tokens of a row's text for the next request of another row or the same one; 0 for none."""

    def add_request(self, row: int, request: Request) -> None:
        """Begin a request in a row."""

    def remove_request(self, row: int) -> None:
        """Free a row. This may happen at any time, also during its prefill."""

    def prefill_tokens(self, chunk: int, max_prompt_tokens_per_pass: int | None = None) -> None:
        """Read prompts, like the session, if the drafter reads them itself. Arguments as in `Prefill.run`."""

    # ------------------------------------------------------------------------------------------------ one step

    def run_background_work(self) -> None:
        """Work for later steps, such as SWIFT's search. Its time does not count as drafting."""

    def propose_draft(self, limits: list[int], stop_rule: SurvivalThresholds | None = None) -> Draft:
        """Propose tokens. limits: maximum number of draft tokens per row; 0 decodes the row plainly. stop_rule: replaces the
        drafter's own rule for chains."""
        raise NotImplementedError

    @property
    def text_depends_on_drafts(self) -> bool:
        """Whether a step without a draft may change a text. It may if the method is lossy, or if drafts are drawn at random."""
        return not self.needs_verification or not (self.coupled or self.view.sampler.greedy)

    def needs_logits(self, draft: Draft) -> bool:
        """Whether it needs the target's logits in greedy steps, where the engine would otherwise return only the argmax."""
        return False

    def waive_tokens(self, draft: Draft, scores: Scores) -> Tensor | None:
        """Draft tokens [B, n] bool to accept against the acceptance rule. A lossless method always returns None."""
        return None

    def observe_scores(self, draft: Draft, scores: Scores, verdict: Verdict | GreedyVerdict) -> Tensor | None:
        """Observe scores and verdict of its draft on the device, before the step's one transfer to the host.

        Returns figures to include in that transfer, [B, k] int64. `observe_commits` gets them as `RowVerdict.notes`.
        """
        return None

    def observe_features(self, features: dict[int, Tensor]) -> None:
        """Observe the target's states after all `feature_depths`, next to each other. features: row -> [n, E * D] of the next n
        committed tokens of its text. The tokens that a step commits are observed afterwards."""

    def observe_commits(self, draft: Draft | None, verdicts: list[RowVerdict]) -> None:
        """Observe committed tokens. verdicts: one per row. draft: this drafter's own; None for a step that ran prompts and for
        another drafter's draft."""

    def observe_step(self, step: Step) -> None:
        """Observe a step with its times."""

    # ------------------------------------------------------------------------------------------------ about itself

    def replay_tokens(self, row: int, tokens: Sequence[int]) -> Tensor | None:
        """Its predictions on committed text (offline evaluation).

        tokens: the last n + 1 tokens of a row. Returns logits [n, V] after each of the first n, or None if it cannot replay.
        """
        return None

    def tokens_to_replay(self, row: int, count: int) -> int:
        """Number of tokens that it must read to replay the last `count` tokens."""
        return count

    def observe_replay(self, right: Sequence[bool]) -> bool:
        """Observe which replayed tokens were right. Returns False if the replay was of a set that it does not draft with."""
        return True

    @property
    def caches(self) -> list[tuple[ModelRunner, KVCache]]:
        """Its own KV caches, each with its model."""
        return []

    def describe(self, name: str) -> list[dict[str, Any]]:
        """`layers_used` for each of its ways to draft, for `inspect` and the playground. name: of the drafter."""
        return []


@dataclass(frozen=True)
class Candidate:
    """A drafter that `auto` may choose.

    identify: returns a key that distinguishes it from others of its name. draft_step: assumed cost of a draft step in plain
    steps; None if it has its own schedule. replay: assumed cost of a replay, in passes of the target over as many tokens; None
    if it cannot be replayed. searches: replays evaluate its search.
    """

    drafter: Drafter
    identify: Callable[[], str]
    draft_step: float | None = None
    replay: float | None = None
    searches: bool = False


class NoDrafter(Drafter):
    """Proposes nothing: every step is plain decoding."""

    def propose_draft(self, limits: list[int], stop_rule: SurvivalThresholds | None = None) -> Draft:
        view = self.view
        return Draft.empty(view.rows, view.root.device, view.start_forward([0] * view.rows))


def layers_used(
    name: str, exits: Sequence[int] = (), skip: SkipSet | None = None, drafting_model: ModelRunner | None = None
) -> dict[str, Any]:
    """One way to draft with layers of the target, as plain JSON values.

    exits: numbers of layers before its exits. skip: skipped sublayers. drafting_model: the target in fewer bits."""
    skip = skip or SkipSet()
    return {
        "name": name,
        "exits": list(exits),
        "skip_attention": sorted(skip.attention),
        "skip_mlp": sorted(skip.mlp),
        "quantize": None if drafting_model is None else drafting_model.engine.quantize,
    }
