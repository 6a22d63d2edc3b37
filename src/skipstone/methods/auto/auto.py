"""`auto`: drafts with the drafter that is fastest on this text and machine, or decodes plainly if none pays.

`policy/` decides. This file carries decisions out, measures, and tells the policy. Drafts are coupled to the target's noise, so
greedy and sampled texts are those of plain decoding with the same seed, whatever is decided.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from skipstone.decoding import method_states
from skipstone.decoding.draft import Draft, GreedyVerdict, RowVerdict, Step, Verdict
from skipstone.decoding.drafter import Candidate, Drafter, SessionView
from skipstone.decoding.method import Method
from skipstone.decoding.request import Request
from skipstone.decoding.sampling import Scores
from skipstone.decoding.settings import setting
from skipstone.engines import background_copy
from skipstone.engines.choose_engine import copies_of, missing_room_for_copy
from skipstone.engines.engine import SurvivalThresholds
from skipstone.engines.host_transfer import on_device
from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.mtp_head import attached_mtp
from skipstone.engines.native.weights import quantised_bytes
from skipstone.methods.adadecode.adadecode import AdaDecode
from skipstone.methods.adadecode.heads import are_loaded, bundled_name_for, fitting_heads
from skipstone.methods.auto import saved_profile
from skipstone.methods.auto.learned import Learned, first_policy
from skipstone.methods.auto.matches import MatchDrafter
from skipstone.methods.auto.policy_log import PolicyLog
from skipstone.methods.auto.saved_profile import SavedPolicy
from skipstone.methods.autoregressive import Autoregressive
from skipstone.methods.drafting.chain import OwnCacheDrafter
from skipstone.methods.drafting.feature_drafter import FeatureMethod
from skipstone.methods.mtp import Mtp
from skipstone.methods.prompt_lookup import PromptLookup
from skipstone.methods.recycle import Recycle, RecycleDrafter
from skipstone.methods.self_speculative import SelfSpeculative
from skipstone.models.mapped_model import MappedModel
from skipstone.policy.choose_drafter import (
    COLD_STEPS,
    LOOKUP,
    MARGIN,
    PLAIN,
    PROBE,
    PROBE_STEPS,
    RECYCLE,
    WINDOW,
    Decision,
    StepResult,
)
from skipstone.policy.cost_model import TABLE, typical
from skipstone.policy.regret_budget import SLACK
from skipstone.utils.setup_times import setup_work

COPY = "int4"
"""The quantisation of the copy that is a candidate."""
RESERVE_SECONDS = 0.002
"""The rest of the budget that is not spent on looking texts up and keeping continuations."""
HEADS, HEADS_SECONDS, COPY_SECONDS = "heads", 0.010, 0.005
"""Expected times of reading bundled exit heads, and of mapping a copy of the weights from the disk's cache."""
COPY_DRAFTER = f"{SelfSpeculative.name}, {COPY}"
PAYING_STEP_SECONDS = 0.003
"""Time of a plain step above which drafts of a copy pay as a rule. In shorter ones the host's time between passes counts too
much."""
MAX_COPY_SHARE = 0.75
"""Largest share s of the weights' bytes that a copy may have. Each accepted token costs at least s of a plain step for its
draft, so the speed-up is below 1 / s."""


def _shrinks(model: Any) -> bool:
    """Whether a copy of a model's weights has far fewer bytes. It has, if they are not the blocks of a GGUF file."""
    if not isinstance(model, MappedModel) or model.widens_to is not None:
        return True
    return quantised_bytes(model, COPY) <= MAX_COPY_SHARE * quantised_bytes(model, None)


@dataclass(frozen=True)
class Auto(Method):
    """Chooses among other methods while it decodes."""

    name: ClassVar[str] = "auto"
    of_methods: ClassVar[tuple[str, ...]] = ("candidates", "own")
    aliases: ClassVar[dict[str, str]] = {"remembers": "use_profile"}

    candidates: tuple[Method, ...] | None = setting(
        None, "methods to choose from, separated by semicolons; none: those that need nothing, and those that the model brings."
    )
    own: tuple[Method, ...] | None = setting(None, "one candidate more: the model's own method, where it names one.")
    slack: float = setting(SLACK, "share of plain decoding's time that may be lost.", within=(0, 1))
    log: str | None = setting(None, "a file that all decisions are written to, for `skipstone inspect --replay`.")
    use_profile: bool = setting(True, "begin with what was saved for this model and machine, as by `skipstone tune`.")
    profile: str | None = setting(None, "a file of `skipstone tune`, or a hub id, to begin with instead.")
    max_extra_memory_bytes: int | None = setting(
        None, "for copies of the weights that draft; none: half of the free memory.", min_value=0
    )

    def methods(self, model: ModelRunner, *, sets_up: Container[str] = (HEADS, COPY)) -> tuple[Method, ...]:
        """The candidates. By default lookups, recycled tokens, the checkpoint's MTP layer, bundled exit heads, the model in
        int4 if there is such a copy, and the model's own method if it is lossless. sets_up: what is read from the disk now if
        it was not before, HEADS and COPY; the rest is left out."""
        if self.candidates is not None:
            return self.candidates
        methods: list[Method] = [PromptLookup()]
        if attached_mtp(model) is not None:
            methods.append(Mtp())
        if not model.family.recurrent:
            methods.append(Recycle())
            if (HEADS in sets_up or are_loaded(model)) and bundled_name_for(model) is not None:
                methods.append(AdaDecode())
            if self.takes_copy(model) and (model.has_copy(COPY) or (COPY in sets_up and self._map_copy(model))):
                methods.append(SelfSpeculative(draft_quantize=COPY))
        known = (Autoregressive, *map(type, methods))
        return (*methods, *(own for own in self.own or () if own.lossless and type(own) not in known))

    def waiting(self, model: ModelRunner, saved: SavedPolicy | None) -> dict[str, float]:
        """What `methods` would read from the disk first, with the expected seconds. A copy of the weights that did not pay in
        earlier processes is left out."""
        if self.candidates is not None or model.family.recurrent:
            return {}
        needed = {}
        rate = None if saved is None else saved.rate(COPY_DRAFTER)
        may_pay = rate is None or rate > 1 + MARGIN
        if may_pay and self.takes_copy(model) and not model.has_copy(COPY) and model.has_cached_copy(COPY):
            needed[COPY] = COPY_SECONDS
        if not are_loaded(model) and fitting_heads(model):
            needed[HEADS] = HEADS_SECONDS
        return needed

    def takes_copy(self, model: ModelRunner) -> bool:
        """Whether a copy of the weights in fewer bits is or would be a candidate."""
        can_draft = model.engine.name == "native" and model.engine.quantize is None and not model.family.recurrent
        return self.candidates is None and can_draft and _shrinks(model.model)

    def _map_copy(self, model: ModelRunner) -> bool:
        has_room = missing_room_for_copy(model.model, COPY, self.max_extra_memory_bytes) is None
        return has_room and model.map_copy(COPY)

    def make_copy(self, model: ModelRunner) -> str | None:
        """Make the copy of the weights now, and write it to the disk's cache. Returns why later processes will have none; None
        if they will. ValueError if the checkpoint has changed since it was opened."""
        if not self.takes_copy(model):
            return (
                "only models on the native engine whose weights are not quantised, and that have no recurrent states, take one"
            )
        if (reason := missing_room_for_copy(model.model, COPY, self.max_extra_memory_bytes)) is not None:
            return reason
        if not model.copy_in(COPY).cache_panels(model.model):
            return "the disk's cache does not take it"
        return None

    def save_learned(self, model: ModelRunner) -> None:
        learned: Learned | None = method_states.known_state(self, None, model.model)
        if not self.use_profile or self.profile is not None or learned is None or not learned.is_worth_saving:
            return
        learned.saved_steps = learned.steps
        before = saved_profile.load_profile(model)  # other methods and processes may have written it meanwhile
        own = SavedPolicy(learned.policies[1], {}, {}, saved_profile.local_key_of(model))
        saved_profile.save_profile(model, learned.merged_with(before or own))

    def notes(self, model: ModelRunner) -> list[str]:
        if not self.takes_copy(model):
            return []
        if copies := copies_of(model.model):
            sizes = " and ".join(f"{name} {nbytes / 1e6:.0f} MB" for name, nbytes in copies.items())
            return [f"copies of the weights for drafting, extra memory: {sizes}"]
        is_long = self.report(model.model).get("plain_seconds", 0.0) >= PAYING_STEP_SECONDS
        is_missing = model.caches_copies and not model.has_cached_copy(COPY)
        if not (is_long and is_missing) or missing_room_for_copy(model.model, COPY, self.max_extra_memory_bytes) is not None:
            return []
        name = getattr(model.config, "name_or_path", "")
        return [f"a copy of the weights in {COPY} would draft faster, and is missing: `skipstone tune {name}` makes it"]

    def prepare_in_background(self, model: ModelRunner) -> None:
        if self.takes_copy(model) and not model.has_copy(COPY):
            background_copy.make_in_background(model, COPY, self.max_extra_memory_bytes)

    def takes_predictions(self, model: ModelRunner) -> bool:
        return any(isinstance(one, PromptLookup) for one in self.methods(model, sets_up=()))

    def check(self, model: ModelRunner) -> None:
        super().check(model)
        for one in (*(self.candidates or ()), *(self.own or ())):
            if one.name in ("auto", "autoregressive"):
                raise ValueError(f"{one.name} drafts nothing that could be chosen or left out")
            if not one.lossless:
                raise ValueError(f"{one.name} with these settings changes texts, so it cannot be left out here and there")
            one.check(model)
        if self.profile is not None:
            saved_profile.read_named(self.profile, model)

    def create_drafter(self, model: ModelRunner, rows: int, capacity: int) -> "AutoDrafter":
        if background_copy.is_interactive():
            self.prepare_in_background(model)
        return AutoDrafter(self, model, rows, capacity)


class AutoDrafter(Drafter):
    """Owns the drafters of all candidates. Lets one of them draft as the policy decides, and measures its steps."""

    def __init__(self, method: Auto, model: ModelRunner, rows: int, capacity: int) -> None:
        began, methods = model.ranks.now(), method.methods(model, sets_up=())
        self.method, self.model, self._size = method, model, (rows, capacity)
        recycle = next((one for one in methods if isinstance(one, Recycle)), None)
        self.learned = method_states.method_state(method, model, rows, None, lambda: self._first_learned(recycle is not None))
        self.texts = MatchDrafter(rows, looks_up=any(isinstance(one, PromptLookup) for one in methods))
        self.recycle = None if recycle is None else RecycleDrafter(recycle, model, rows, self.learned.kept)
        self._members: list[Drafter] = [self.texts, *([self.recycle] if self.recycle else [])]
        self._listeners = [*self._members]  # those that need commits
        self.candidates, self._methods = dict[str, Candidate](), list[Method]()
        self._own_caches = dict[str, OwnCacheDrafter]()
        self._requests: list[Request | None] = [None] * rows
        self._is_bound = False
        self._engines, self._prepared = [model.engine], 0
        self._add_candidates(methods)
        self.feature_depths = tuple(dict.fromkeys(depth for one in self._members for depth in one.feature_depths))
        self.scratch_slots = max([WINDOW, TABLE, *(one.scratch_slots for one in self._members)])
        # the decision that is carried out, the policy's decision (it becomes PLAIN if there is nothing to draft), its arguments
        self._decision, self._decided, self._arguments = Decision(PLAIN), None, (list[int](), True)
        self._steps_left, self._is_quiet = 0, False  # of the decision, and whether its steps only decode plainly
        self._results: list[StepResult] = []  # of its steps; plain ones are added up in one
        self._warm: list[float] = []  # seconds of plain steps that follow others and do no other work
        self._unread: list[list[RowVerdict]] = []  # verdicts of quiet steps, read later because short steps are disturbed by it
        self._looks_up = self._keeps = False  # whether this step looks texts up and keeps continuations
        self._host_seconds = self._fixed_seconds = 0.0  # of that, and of the policy
        self._judged, self._judged_matches, self._ranks = list[tuple[float, bool]](), list[tuple[int, int, int]](), list[int]()
        self._plain_in_a_row, self._ran_prompt = 0, False
        self._setup_seconds = self.setup_seconds(began)  # not charged yet

    def _first_learned(self, recycles: bool) -> Learned:
        """The state before the first request: a saved profile, or guesses."""
        method, model = self.method, self.model
        is_read = method.use_profile or method.profile is not None
        saved = saved_profile.load_profile(model, method.profile) if is_read else None
        learned = Learned({1: first_policy(method.slack, recycles, saved)}, saved, waiting=method.waiting(model, saved))
        learned.expects_gain = COPY in learned.waiting and saved is not None and saved.rate(COPY_DRAFTER) is not None
        if method.log is not None and model.ranks.writes:
            learned.log = PolicyLog(Path(method.log))
        return learned

    def _add_candidates(self, methods: Sequence[Method]) -> None:
        """Take the drafters of methods that it does not have yet. It does so also while texts are written."""
        added = [method for method in methods if method not in self._methods]
        for method in added:
            self._methods.append(method)
            if self._is_bound and isinstance(method, FeatureMethod):
                continue  # the session has recorded no states for it
            for name, candidate in method.auto_candidates(self.model, *self._size).items():
                unique = name if name not in self.candidates else f"{name} ({len(self.candidates)})"
                self.candidates[unique] = candidate
                self.learned.add_candidate(unique, candidate)
                self._add_member(unique, candidate.drafter)
        if added:
            self._take_preparations()
            self.learned.write_state()

    def _add_member(self, name: str, drafter: Drafter) -> None:
        self._members.append(drafter)
        if isinstance(drafter, OwnCacheDrafter):
            self._own_caches[name] = drafter
            self._engines.append(drafter.runner.engine)
        if drafter.needs_commits:
            self._listeners.append(drafter)
        if self._is_bound:
            assert drafter.scratch_slots <= self.scratch_slots, f"{name} comes too late for its slots"
            drafter.bind(self.view)
            for row, request in enumerate(self._requests):
                if request is not None:
                    drafter.add_request(row, request)

    @property
    def own_threads(self) -> bool:  # type: ignore[override]
        return all(one.drafter.own_threads for one in self.candidates.values())

    @property
    def caches(self) -> list[tuple[ModelRunner, KVCache]]:
        return [pair for one in self.candidates.values() for pair in one.drafter.caches]

    def describe(self, name: str) -> list[dict[str, Any]]:
        return [found for own, one in self.candidates.items() for found in one.drafter.describe(own)]

    @property
    def takes_predictions(self) -> bool:
        return self.texts.takes_predictions

    def accepted_predictions(self, row: int) -> int:
        return self.texts.accepted_predictions(row)

    def validate_request(self, request: Request) -> None:
        for one in self.candidates.values():
            one.drafter.validate_request(request)

    def bind(self, view: SessionView) -> None:
        super().bind(view)
        self._is_bound = True
        for one in self._members:
            one.bind(view)

    def reusable_tokens(self, row: int, count: int) -> int:
        self._read_quiet_steps()
        return min(one.reusable_tokens(row, count) for one in self._members)

    def reuse_tokens(self, row: int, source_row: int, count: int) -> None:
        for one in self._members:
            one.reuse_tokens(row, source_row, count)

    def add_request(self, row: int, request: Request) -> None:
        """A copy of the weights that was made since the last request is a candidate from now on."""
        self._settle()
        self._add_candidates(self.method.methods(self.model, sets_up=()))
        for one in self._members:
            one.add_request(row, request)
        self.learned.lookups.begin_text(self.learned.steps)
        if not any(self._requests):
            self.learned.begin_request()
        self._requests[row] = request

    def remove_request(self, row: int) -> None:
        self._settle()
        self._requests[row] = None
        for one in self._members:
            one.remove_request(row)

    def prefill_tokens(self, chunk: int, max_prompt_tokens_per_pass: int | None = None) -> None:
        """Draft models read the prompts as well, because a user has named them."""
        self._read_quiet_steps()
        self._plain_in_a_row, self._ran_prompt, self._looks_up, self._keeps = 0, True, False, False
        for one in self.candidates.values():
            one.drafter.prefill_tokens(chunk, max_prompt_tokens_per_pass)

    def run_background_work(self) -> None:
        if self._steps_left:
            return
        self._settle()
        self.learned.resize(sum(self.view.alive))
        if self.learned.policy.is_timed and self.learned.policy.costs.plain.value < PAYING_STEP_SECONDS:
            self.learned.waiting.pop(COPY, None)
        if (name := self.learned.affordable_setup()) is not None:
            self._set_up(name)
        rows = [row for row, alive in enumerate(self.view.alive) if alive and self.texts.uncopied[row] > 1]
        if not rows or not self._can_replay or not self.learned.policy.is_timed:
            return
        row = rows[self.learned.steps % len(rows)]
        width = min(WINDOW, self.texts.uncopied[row] - 1)
        lag = {name: one.tokens_to_replay(row, width) for name, one in self._own_caches.items()}
        name = self.learned.policy.next_replay(lag) if 2 * width >= WINDOW else None
        if name in self.candidates:  # the model's other sessions may have more candidates
            self._replay(name, row, width, lag.get(name, 0))

    def _set_up(self, name: str) -> None:
        """Read exit heads or a copy of the weights from the disk. The budget pays for it."""
        began = self.model.ranks.now()
        del self.learned.waiting[name]
        with setup_work("drafters"):
            self._add_candidates(self.method.methods(self.model, sets_up=(name,)))
        self._setup_seconds += self.setup_seconds(began)
        self._plain_in_a_row, self._ran_prompt = 0, False
        self._charge_setup()

    def _charge_setup(self) -> None:
        self.learned.charge_setup(self._setup_seconds)
        self._setup_seconds = 0.0

    @property
    def _can_replay(self) -> bool:
        """Logits processors may depend on the text so far, so a replay with them would score other distributions."""
        return not self.view.sampler.processed

    def _replay(self, name: str, row: int, width: int, read: int) -> None:
        """Compares what a drafter would have drafted with a row's latest tokens. read: tokens that it has to read first."""
        self._take_preparations()
        began, drafter, tokens = self.model.ranks.now(), self.candidates[name].drafter, self.texts.text[row][-1 - width :]
        logits = drafter.replay_tokens(row, tokens)  # [n, V]
        sure, right = list[float](), list[bool]()
        if logits is not None:
            last = self.view.store.length[row]
            positions = on_device(list(range(last - len(logits) + 1, last + 1)), logits.device)
            drawn = self.view.sampler.would_draw(row, logits, positions)  # [n], with the noise of these positions
            sure = logits.softmax(-1).amax(-1).nan_to_num(0.0).tolist()
            right = (drawn == on_device(tokens[1:], logits.device)).tolist()
            if not drafter.observe_replay(right):
                sure, right = [], []
        seconds = 0.0 if self._take_preparations() or logits is None else self.replay_seconds(began)
        self._plain_in_a_row, self._ran_prompt = 0, False
        self.learned.policy.observe_replay(name, sure, right, seconds, read)
        if self.learned.log is not None:
            self.learned.log.write("replay", self.learned.live, (name, sure, right, seconds, read))

    def replay_seconds(self, began: float) -> float:
        return self.model.ranks.since(began)

    def setup_seconds(self, began: float) -> float:
        return self.model.ranks.since(began)

    def policy_seconds(self, began: float) -> float:
        """The time of learning or deciding, at most a plain step: a garbage collection may interrupt it."""
        return min(self.model.ranks.since(began), self.learned.policy.costs.plain.value)

    def _take_preparations(self) -> bool:
        """Whether an engine has compiled or recorded something since the last call."""
        before, self._prepared = self._prepared, sum(one.preparations for one in self._engines)
        return self._prepared > before

    def propose_draft(self, limits: list[int], stop_rule: SurvivalThresholds | None = None) -> Draft:
        if self._steps_left and self._is_quiet:
            self._steps_left -= 1
            return self._empty_draft()
        began, has_room = self.model.ranks.now(), any(limits)
        self._plan_host_work(has_room)
        matches = self.texts.look_up() if self._looks_up else []
        if self._steps_left and has_room and self.learned.policy.stands(self._decision, matches):
            self._steps_left -= 1
        else:
            self._decide(matches, has_room)
        self._host_seconds = self.model.ranks.since(began) if self._works_on_host else 0.0
        draft = self._draft(self._decision, limits)
        if not draft.width and self._decision.kind != PROBE and not self._results:
            self._decision = self._decision._replace(kind=PLAIN)
        self._is_quiet = self._decision.kind in (PLAIN, PROBE) and not self._works_on_host
        return draft

    def _plan_host_work(self, has_room: bool) -> None:
        """Whether texts are looked up and continuations kept now. A part of the budget is left to trials, to a copy of the
        weights that waits, or to the current drafter."""
        learned, policy, remaining = self.learned, self.learned.policy, self.learned.policy.budget.remaining
        reserve = max(learned.waiting.get(COPY, 0.0), RESERVE_SECONDS)
        has_reserve = learned.seconds_left >= reserve and remaining >= policy.awaited
        recycles, lookups = policy.current == RECYCLE, learned.lookups
        self._looks_up = self._keeps = False
        if remaining >= 0 and policy.is_timed and not (self._steps_left and self._decision.kind == PROBE):
            pays = self._decision.kind == LOOKUP and lookups.gain > lookups.spent
            can_look_up = self.texts.looks_up and has_room and has_reserve
            self._looks_up = can_look_up and lookups.is_wanted(learned.steps, pays)
            keeps = self.recycle is not None and (has_reserve or recycles)
            self._keeps = keeps and learned.keeping.is_wanted(learned.steps, recycles)

    def _decide(self, matches: list[int], has_room: bool) -> None:
        self._settle()
        began, policy, self._arguments = self.model.ranks.now(), self.learned.policy, (matches, self._can_replay)
        self._decided = policy.decide(*self._arguments) if has_room and policy.is_timed else None
        reason = "no room for a draft" if policy.is_timed else "plain decoding is timed"
        self._decision = self._decided or Decision(PLAIN, current=policy.current, reason=reason)
        self._keeps = self._keeps and self._decision.kind != PROBE
        self._steps_left = self._decision.steps - 1
        if self._decision.kind == PLAIN and self._works_on_host:  # which may lose time
            self._steps_left = min(self._steps_left, PROBE_STEPS - 1)
        self._fixed_seconds += self.policy_seconds(began)

    @property
    def _works_on_host(self) -> bool:
        return self._looks_up or self._keeps

    def _empty_draft(self) -> Draft:
        return Draft.empty(self.view.rows, self.view.root.device, self.view.start_forward([0] * self.view.rows))

    def _draft(self, decision: Decision, limits: list[int]) -> Draft:
        kind, thresholds, drafter = decision.kind, decision.thresholds, self._producer
        if kind == LOOKUP:
            return self.texts.draft_matches(decision.drafts, limits)
        if kind == RECYCLE:
            assert self.recycle is not None
            assert decision.tree is not None
            self.recycle.shape = tuple(zip(decision.tree.parents, decision.tree.ranks, strict=True))
            return self.recycle.propose_draft(limits)
        if drafter is not None and self._has_schedule:
            return drafter.propose_draft(limits)
        if drafter is None or not thresholds or thresholds[0] > 1:
            return self._empty_draft()
        acceptance = self.learned.policy.drafters[kind].acceptance
        rule = SurvivalThresholds(acceptance.slope, acceptance.offset, thresholds[1:], decision.shared[1:])
        return drafter.propose_draft([min(one, len(thresholds)) for one in limits], rule)

    @property
    def _producer(self) -> Drafter | None:
        """The drafter of this step; None for plain steps and lookups."""
        kind = self._decision.kind
        return self.recycle if kind == RECYCLE else self.candidates[kind].drafter if kind in self.candidates else None

    @property
    def _has_schedule(self) -> bool:
        return self._decision.kind in self.learned.policy.costs.schedules

    def needs_logits(self, draft: Draft) -> bool:
        return self._keeps

    def observe_scores(self, draft: Draft, scores: Scores, verdict: Verdict | GreedyVerdict) -> Tensor | None:
        if self._has_schedule:
            return self.candidates[self._decision.kind].drafter.observe_scores(draft, scores, verdict)
        if self.recycle is None or not self._keeps:
            return None
        began = self.model.ranks.now()
        notes = self.recycle.observe_scores(draft, scores, verdict)
        self._host_seconds += self.model.ranks.since(began)
        return notes

    def observe_features(self, features: dict[int, Tensor]) -> None:
        """Passes on to every head the states that it reads."""
        for one in self._members:
            if one.feature_depths == self.feature_depths:
                one.observe_features(features)
            elif one.feature_depths:
                places = [self.feature_depths.index(depth) for depth in one.feature_depths]
                count = len(self.feature_depths)
                parts = {row: states.chunk(count, -1) for row, states in features.items()}
                one.observe_features({row: torch.cat([own[i] for i in places], -1) for row, own in parts.items()})

    def observe_commits(self, draft: Draft | None, verdicts: list[RowVerdict]) -> None:
        """Passes commits on to the drafters, and notes how the draft was judged."""
        if draft is None:
            self._settle()  # other rows decode from now on
        elif self._is_quiet:
            self._unread.append(verdicts)
            return
        began, self._judged, self._ranks = self.model.ranks.now(), [], []
        self._judged_matches = self.texts.judge(verdicts) if draft is not None and self._looks_up else []
        if draft is not None and draft.confidence is not None and (self._decision.explores or not self._results):
            for confidences, verdict in zip(draft.confidence.tolist(), verdicts, strict=True):
                judged = min(len(verdict.path) + (not verdict.finished), verdict.drafted)
                self._judged += [(confidences[place], place < len(verdict.path)) for place in range(judged)]
        row = next((row for row, verdict in enumerate(verdicts) if verdict.tokens), None)
        if self._keeps and row is not None:
            self._ranks = self.learned.kept.ranks(self.texts.text[row][-1], verdicts[row].tokens)
        self.texts.count(verdicts, self._decision.kind == LOOKUP and draft is not None)
        self._host_seconds += self.model.ranks.since(began) if self._works_on_host else 0.0
        producer = self._producer
        without_notes = [replace(verdict, notes=[]) for verdict in verdicts] if self._has_schedule else verdicts
        for one in self._listeners:
            if one is not producer:
                one.observe_commits(None, without_notes)
        if producer is not None:
            producer.observe_commits(draft if draft is not None and draft.width else None, verdicts)

    def observe_step(self, step: Step) -> None:
        if step.prefill:
            self._take_preparations()
            if step.decoding_rows:
                step.drafter, step.reason = PLAIN, "prompts ran in the same pass"
            return
        decision, learned, live = self._decision, self.learned, [len(tokens) for tokens in step.tokens if tokens]
        step.drafter, step.reason, step.probe = decision.kind, decision.reason, decision.kind == PROBE
        learned.steps += 1
        learned.kinds[decision.kind] = learned.kinds.get(decision.kind, 0) + 1
        seconds, rows = self.model.ranks.agreed(step.seconds - step.seconds_search), max(len(live), 1)
        preparing, tokens, plain = self._take_preparations(), sum(live) / rows, learned.policy.costs.plain.value
        if decision.kind in (PLAIN, PROBE):
            self._add_plain(tokens, plain if preparing else seconds)
        else:
            self._add_drafted(step, seconds, tokens, rows, preparing)
        if self._looks_up and not preparing:
            gain = tokens / decision.price - (seconds - self._host_seconds) / plain if decision.kind == LOOKUP else 0.0
            learned.lookups.observe(gain, self._host_seconds / plain)
        if not self._steps_left:
            self._settle()

    def _add_plain(self, tokens: float, seconds: float) -> None:
        """After a plain step. It times plain decoding if it is warm, behind other plain steps, and does no other work."""
        self._plain_in_a_row += 1
        is_warm, policy = self._plain_in_a_row > COLD_STEPS, self.learned.policy
        if is_warm and seconds and not self._works_on_host:
            self._warm.append(seconds)
            self.learned.plain_seconds.append(seconds)
        elif policy.is_timed and (self._ran_prompt or is_warm):
            seconds = policy.costs.plain.value + self._host_seconds  # other noise would slow plain decoding as well
        if not self._results:
            self._results.append(StepResult(0.0, 0.0, 0))
        (added,) = self._results
        added.tokens, added.seconds, added.steps = added.tokens + tokens, added.seconds + seconds, added.steps + 1
        added.fixed, self._fixed_seconds = added.fixed + self._fixed_seconds, 0.0
        if not self._is_quiet:
            added.matches, added.ranks = [*added.matches, *self._judged_matches], [*added.ranks, *self._ranks]

    def _add_drafted(self, step: Step, seconds: float, tokens: float, rows: int, preparing: bool) -> None:
        fixed, self._plain_in_a_row, self._ran_prompt, self._fixed_seconds = self._fixed_seconds, 0, False, 0.0
        result = StepResult(tokens, seconds + fixed, drafts=step.verified_nodes / rows, fixed=fixed, preparing=preparing)
        result.confidences, result.matches, result.ranks = self._judged, self._judged_matches, self._ranks
        if self._decision.kind in self.candidates:
            result.passes, result.drafting = max(step.draft_steps), self.model.ranks.agreed(step.seconds_draft)
        result.scoring = seconds - result.drafting
        self._results.append(result)

    def _read_quiet_steps(self) -> None:
        for verdicts in self._unread:
            self.texts.count(verdicts, is_lookup=False)
            for one in self._listeners:
                one.observe_commits(None, verdicts)
        self._unread.clear()

    def _settle(self) -> None:
        """Ends the decision: the policy learns the results of its steps."""
        self._read_quiet_steps()
        results, warm, self._results, self._warm, self._steps_left = self._results, self._warm, [], [], 0
        if not results or not results[0].seconds:  # an engine compiled in the very first step
            return
        began, decision, learned = self.model.ranks.now(), self._decision, self.learned
        results[0].warm_steps, results[0].warm_seconds = len(warm), typical(warm)
        results[0].seconds += len(warm) * typical(warm) - sum(warm)  # a stall in a plain step is not charged
        learned.policy.observe(decision, results)
        self._fixed_seconds += self.policy_seconds(began)
        if learned.log is not None:
            learned.log.write("steps", learned.live, (self._arguments, self._decided, decision, results))
        if learned.policy.is_timed and self._setup_seconds:
            self._charge_setup()
