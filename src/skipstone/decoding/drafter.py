"""What proposes tokens, and what it sees of its session. A session holds one drafter and never asks which."""

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


@dataclass(frozen=True)
class Requirements:
    """What a drafter needs of its session.

    scratch_slots: slots of every row behind its tokens, for the nodes of trees and for evaluations.
    """

    scratch_slots: int = 0


class SessionView:
    """The rows of a session: their keys and values, their sampler, and the last committed token of each.

    model: the target. slots: of every row, for committed tokens and scratch. depth: layers of the target that count. last: the
    last committed token of every row, on the device as `root` [B] int64. It is not in the store yet. alive: rows that decode.
    """

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
        """A new forward that holds the last committed token of every live row.

        max_drafts: draft tokens of every row that it has room for. shortlist: [S] int64, the ids that drafts are picked from;
        None for all. drafting_model: the target's layers in fewer bits; None for the target itself.
        """
        return PartialForward(self.model, self.store, self.root, self.alive, max_drafts, shortlist, drafting_model)


class Drafter:
    """Proposes tokens for the rows of a session. Keeps only what the method itself knows of each row.

    Only `propose_draft` has to be there; everything else does nothing by default. view: the session's rows. own_threads:
    nothing that it computes is long enough for several of torch's threads.
    """

    requirements = Requirements()
    own_threads = True
    view: SessionView

    def bind(self, view: SessionView) -> None:
        """Draft for the rows of a session from now on."""
        self.view = view

    # ------------------------------------------------------------------------------------------------ requests and rows

    def validate_request(self, request: Request) -> None:
        """ValueError for a request that this drafter cannot draft for."""

    @property
    def takes_predictions(self) -> bool:
        """Whether it drafts from what a request predicts."""
        return False

    def accepted_predictions(self, row: int) -> int:
        """Tokens of a row's prediction that were drafted and accepted."""
        return 0

    def add_request(self, row: int, request: Request) -> None:
        """A request begins on a row."""

    def remove_request(self, row: int) -> None:
        """A row is free again. This may come at any time, also while its prompt is read."""

    def prefill_tokens(self, chunk: int) -> None:
        """The session runs the next part of its prompts. A drafter that reads prompts itself reads up to `chunk` tokens."""

    # ------------------------------------------------------------------------------------------------ one step

    def run_background_work(self) -> None:
        """Work for later steps, such as SWIFT's search. It is timed apart from drafting."""

    def propose_draft(self, limits: list[int], stop_rule: SurvivalThresholds | None = None) -> Draft:
        """Propose tokens. limits: most draft tokens of every row, 0 for plain decoding of that row. stop_rule: when to stop a
        chain, in place of the drafter's own rule."""
        raise NotImplementedError

    def needs_logits(self, draft: Draft) -> bool:
        """Whether it wants the target's logits in a step whose rows are all greedy. Otherwise the engine picks the tokens."""
        return False

    def waive_tokens(self, draft: Draft, scores: Scores) -> Tensor | None:
        """Draft tokens [B, n] bool that are accepted whatever the acceptance rule says. None, always, of a lossless method."""
        return None

    def observe_scores(self, draft: Draft, scores: Scores, verdict: Verdict | GreedyVerdict) -> Tensor | None:
        """See what the target says of its draft, on the device, before the step's one transfer to the host.

        Returns what it wants to read on the host, [B, k] int64: `RowVerdict.notes` has it in `observe_commits`.
        """
        return None

    def observe_commits(self, draft: Draft | None, verdicts: list[RowVerdict]) -> None:
        """Tokens were committed. verdicts: of every row. draft: what this drafter proposed for them, None for the token that
        ends a prefill and for what another drafter proposed."""

    def observe_step(self, step: Step) -> None:
        """A step has been taken, and its times are known."""

    # ------------------------------------------------------------------------------------------------ about itself

    def replay_tokens(self, row: int, tokens: Sequence[int]) -> Tensor | None:
        """What it would have said of text that is known by now.

        tokens: the n + 1 latest ones of a row. Returns the logits [n, V] behind each of them but the newest, or None where it
        cannot tell.
        """
        return None

    def tokens_to_replay(self, row: int, wanted: int) -> int:
        """How many tokens it has to read to replay the latest `wanted` ones."""
        return wanted

    def observe_replay(self, right: Sequence[bool]) -> bool:
        """See which of the replayed tokens were right. Returns whether they are what it would draft now; otherwise a candidate
        of its search was replayed."""
        return True

    @property
    def caches(self) -> list[tuple[ModelRunner, KVCache]]:
        """Keys and values that it keeps, each with their model."""
        return []

    def describe(self, name: str) -> list[dict[str, Any]]:
        """The layers of the target that draft, for `inspect` and the playground: `layers_used` of every way that it drafts.
        name: what this drafter is called."""
        return []


@dataclass(frozen=True)
class Candidate:
    """A drafter that `auto` may choose.

    identify: returns a text that tells it from others of its name. draft_step: first guess of a draft step in plain steps; None
    if it drafts by its own schedule. replay: first guess of a replay, in passes of the target over as many tokens; None if it
    cannot be replayed. searches: replays are evaluations of its search.
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

    exits: after how many layers it predicts. skip: sublayers that it leaves out. drafting_model: the target in fewer bits."""
    skip = skip or SkipSet()
    return {
        "name": name,
        "exits": list(exits),
        "skip_attention": sorted(skip.attention),
        "skip_mlp": sorted(skip.mlp),
        "quantize": None if drafting_model is None else drafting_model.engine.quantize,
    }
