"""The fastest lossless way: of several drafters the one that pays most here and now, as long as one does, and plain decoding
where none does.

`control/` decides, from what every drafter would have said of the text that is known by now, from measured times, and from a
ledger that bounds the loss against plain decoding. This file measures and obeys. Drafts are coupled to the target's noise, so
that the text, drawn at random or not, is that of plain decoding with the same seed, whatever is decided.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor
from transformers import PreTrainedModel

from skipstone.control import control, costs, learning
from skipstone.control.ledger import Ledger
from skipstone.control.record import Log
from skipstone.control.state import LOOKUP, PLAIN, PROBE, RECYCLE, WARM_AFTER, Done, Plan, Rules, State
from skipstone.decoding.draft import Draft, GreedyVerdict, RowVerdict, Step, Verdict
from skipstone.decoding.drafter import Drafter, Requirements
from skipstone.decoding.method import Method
from skipstone.decoding.request import Request
from skipstone.decoding.sampling import Scores
from skipstone.decoding.session_view import SessionView
from skipstone.decoding.settings import setting
from skipstone.engines.engine import SurvivalThresholds
from skipstone.engines.host_transfer import on_device
from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_runner import ModelRunner
from skipstone.methods.auto import memory
from skipstone.methods.auto.candidates import drafters_of, identities, refuse, usual
from skipstone.methods.auto.drafters import LayersDrafter
from skipstone.methods.auto.mind import REPEATED, Mind, Taken, Tally, first_state
from skipstone.methods.auto.texts import Texts, progress, ranks
from skipstone.methods.drafting import method_states
from skipstone.methods.drafting.draft_model import DraftModelDrafter
from skipstone.methods.prompt_lookup import PromptLookup
from skipstone.methods.recycle import DEPTH, Recycle, RecycleDrafter

LEAST_FOR_LOOKING = 1.0
"""Plain steps that may still be lost, below which nothing is looked up and nothing kept: these take time in every step, and of
what they find little could be drafted."""


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
    slack: float = setting(0.015, "share of plain decoding's time that may be lost.", within=(0, 1))

    log: str | None = setting(None, "a file that all decisions are written to, for `skipstone inspect --replay`.")
    use_profile: bool = setting(True, "begin with what `skipstone tune` has found on this model and machine.")
    profile: str | None = setting(None, "a file of `skipstone tune`, or a hub id, to begin with instead.")

    def methods(self, model: ModelRunner) -> tuple[Method, ...]:
        """The candidates on a model."""
        return usual(model, self.own[0] if self.own else None) if self.candidates is None else self.candidates

    def takes_predictions(self, model: ModelRunner) -> bool:
        return any(isinstance(one, PromptLookup) for one in self.methods(model))

    def check(self, model: ModelRunner) -> None:
        super().check(model)
        for one in (*(self.candidates or ()), *(self.own or ())):  # the usual ones fit by themselves
            refuse(one)
            one.check(model)
        if self.profile is not None:
            memory.named(self.profile, model)

    def report(self, model: PreTrainedModel) -> dict[str, Any]:
        return method_states.method_report(self, None, model)

    def create_drafter(self, model: ModelRunner, rows: int, capacity: int) -> "AutoDrafter":
        return AutoDrafter(self, model, rows, capacity, mind_of(self, model, rows))


def mind_of(method: Auto, model: ModelRunner, rows: int) -> Mind:
    """What a method knows of a model, for a batch of so many rows."""
    return method_states.method_state(method, model, rows, None, Mind)


class AutoDrafter(Drafter):
    """Asks, obeys, measures, tells."""

    def __init__(self, method: Auto, model: ModelRunner, rows: int, capacity: int, mind: Mind) -> None:
        wanted = method.methods(model)
        lookups = next((one for one in wanted if isinstance(one, PromptLookup)), None)
        recycling = next((one for one in wanted if isinstance(one, Recycle)), None)
        rules, candidates = Rules(depth=DEPTH), drafters_of(wanted, model, rows, capacity)
        slots = [one.drafter.requirements.scratch_slots for one in candidates.values()]
        self.requirements = Requirements(max(rules.window, rules.most_nodes, *slots))
        self.model, self.method, self.mind, self.rules, self.candidates = model, method, mind, rules, candidates
        self.texts = Texts(rows, looks_up=lookups is not None)
        self.recycle = None if recycling is None else RecycleDrafter(recycling, model, rows, mind.kept)
        self._reads_logits = self.recycle is not None
        self._taken = [False] * rows  # rows that have a request
        self._listeners = [one for one in self._members if not isinstance(one, LayersDrafter)]  # layers know of no text
        self.plan = Plan(PLAIN, 1.0, None, "")  # of the step that is going on
        self._planned_as: Plan | None = None  # what was decided, before it turned out that there is nothing to draft
        self._matches: list[int] = []  # that the plan was decided with
        self._behind = 0  # plans that nothing was learnt from when it was decided
        self._left = 0  # steps that the plan stands for beside this one
        self._tally = Tally()  # of its steps
        self._plain_in_a_row = 0  # steps since anything else ran
        self._ran_prompt = False  # whether that was a prompt
        self._looks_up = self._keeps = True  # in this step
        self._is_quiet = False  # whether this step and those that are left of the plan do nothing but decode plainly
        self._unread: list[list[RowVerdict]] = []  # of such steps; between the shortest ones there are it would take long
        self._uncounted: list[tuple[float, float]] = []  # their seconds, and those that were spent before them beside decoding
        self.ledger = Ledger(slack=method.slack)
        if not mind.states and (method.use_profile or method.profile is not None):
            known = memory.recalled(model, self._first_state(0.0), identities(wanted, candidates), method.profile)
            mind.states |= {} if known is None else {1: known}
        if method.log is not None and mind.log is None and model.ranks.writes:
            mind.log = Log.at(Path(method.log))
            for live, state in mind.states.items():
                mind.log.state(live, state)
        self.log = mind.log
        self._draft_models = [one.drafter for one in candidates.values() if isinstance(one.drafter, DraftModelDrafter)]
        draft_models = [one.draft_model for one in self._draft_models]
        self._engines = [one.engine for one in (model, *draft_models)]
        self._preparations = 0  # of these, when they were asked last
        self._take_preparations()
        self._room = [0] * rows  # of every row, tokens that it may still draft
        self._judged: list[tuple[float, bool]] = []
        self._ranks: list[int] = []
        self.aside_seconds = self._looking_seconds = self._host_seconds = self._learning_seconds = 0.0

    @property
    def caches(self) -> list[tuple[ModelRunner, KVCache]]:
        return [pair for one in self.candidates.values() for pair in one.drafter.caches]

    @property
    def own_threads(self) -> bool:
        return all(one.drafter.own_threads for one in self.candidates.values())

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

    def prefill_tokens(self, chunk: int) -> None:
        """Draft models read the prompts too: a user has named them."""
        self._catch_up()
        self._plain_in_a_row, self._ran_prompt = 0, True
        for one in self.candidates.values():
            one.drafter.prefill_tokens(chunk)

    @property
    def _members(self) -> list[Drafter]:
        return [self.texts, *([self.recycle] if self.recycle else []), *(one.drafter for one in self.candidates.values())]

    def bind(self, view: SessionView) -> None:
        super().bind(view)
        for one in self._members:
            one.bind(view)

    # ----------------------------------------------------------------------------------------------- the hooks of a drafter

    def add_request(self, row: int, request: Request) -> None:
        for one in self._members:
            one.add_request(row, request)
        self._settle()
        self.mind.learn()
        self.mind.looking.begin(self.mind.steps)
        if self.mind.states and not any(self._taken):
            self.mind.begin()
        self._taken[row] = True

    def remove_request(self, row: int) -> None:
        self._settle()
        self.mind.learn()
        self._taken[row] = False
        for one in self._members:
            one.remove_request(row)

    def run_background_work(self) -> None:
        """A shadow, where one is due: what a drafter would have said of the latest tokens of a row."""
        if self._left:
            return
        self.mind.resize(sum(self.view.alive))
        if self.mind.behind:
            return
        state, rules = self.mind.state, self.rules
        if state is None or self.view.sampler.processed:
            return
        rows = [row for row, alive in enumerate(self.view.alive) if alive and self.texts.uncopied[row] > 1]
        if not rows:
            return
        row = rows[self.mind.steps % len(rows)]
        width = min(rules.window, self.texts.uncopied[row] - 1)
        reading = {name: one.drafter for name, one in self.candidates.items() if one.drafter in self._draft_models}
        lag = {name: one.tokens_to_replay(row, width) for name, one in reading.items()}
        if width < rules.window // 2 or (name := control.due(state, lag)) is None:
            return
        self._take_preparations()
        began, tokens = self.model.ranks.now(), self.texts.text[row][-1 - width :]
        logits = self.candidates[name].drafter.replay_tokens(row, tokens)
        if logits is None:
            self._graded(state, name, (), (), 0.0, 0)
            return
        confidence = logits.softmax(-1).amax(-1).nan_to_num(0.0)  # [n]
        right = self._drawn(row, logits) == on_device(tokens[1:], logits.device)  # [n] bool
        sure, was_right = confidence.tolist(), right.tolist()
        if not self.candidates[name].drafter.observe_replay(was_right):
            sure, was_right = [], []
        seconds = 0.0 if self._take_preparations() else self.shadow_seconds(began)
        self.aside_seconds += seconds
        self._plain_in_a_row, self._ran_prompt = 0, False
        self._graded(state, name, sure, was_right, seconds, lag.get(name, 0))

    def _take_preparations(self) -> bool:
        """Whether an engine has compiled or recorded something since this was called last."""
        count, before = sum(one.preparations for one in self._engines), self._preparations
        self._preparations = count
        return count > before

    def shadow_seconds(self, began: float) -> float:
        """That a shadow took."""
        return self.model.ranks.since(began)

    def learning_seconds(self, began: float) -> float:
        """That learning took."""
        return self.mind.uninterrupted(self.model.ranks.since(began))

    def _graded(self, state: State, name: str, sure: Sequence[float], right: Sequence[bool], seconds: float, read: int) -> None:
        self.mind.state = learning.shadow(state, name, sure, right, seconds, read)
        if self.log is not None:
            self.log.shadow(self.mind.live, name, sure, right, seconds, read)

    def _drawn(self, row: int, logits: Tensor) -> Tensor:
        """The tokens [n] that a drafter with logits [n, V] behind a row's latest tokens but the newest would have drafted."""
        last = self.view.store.length[row]
        positions = on_device(list(range(last - len(logits) + 1, last + 1)), logits.device)
        return self.view.sampler.would_draw(row, logits, positions)

    def propose_draft(self, limits: list[int], stop_rule: SurvivalThresholds | None = None) -> Draft:
        """As planned."""
        if self._left and self._is_quiet:
            self._left -= 1
            return self._plain()
        self._room, self._looking_seconds, self._host_seconds = limits, 0.0, 0.0
        self._wake()
        if self._left and not self._looks_up and self.plan.kind in (PLAIN, PROBE):  # nothing can end it early
            self._left -= 1
            self._is_quiet = not self._keeps
            return self._plain()
        self.texts.forget_matches()
        began, matches = self.model.ranks.now(), []
        if self._looks_up and any(limits):
            matches = self.texts.look_up()
            self._looking_seconds = self.model.ranks.since(began)
        stands = self._left > 0 and any(limits) and control.stands(self._known, self.plan, matches)
        if stands:
            self._left -= 1
        else:
            self._decide(limits, matches)
        if self._looks_up:
            self._host_seconds = self.model.ranks.since(began)
        draft = self._planned(self.plan, limits)
        if not stands and not draft.width and self.plan.kind != PROBE:
            self.plan = replace(self.plan, kind=PLAIN)
        self._is_quiet = self.plan.kind in (PLAIN, PROBE) and not (self._looks_up or self._keeps)
        return draft

    def _decide(self, limit: list[int], matches: list[int]) -> None:
        """What the next steps do."""
        self._settle()
        state, self._planned_as, self._matches, self._behind = self.mind.state, None, matches, self.mind.behind
        if state is None or not any(limit):
            why = "plain decoding is timed" if state is None else "no room for a draft"
            self.plan = Plan(PLAIN, 1.0, None if state is None else state.current, why)
            return
        self.plan = self._planned_as = plan = control.decide(state, matches)
        if plan.kind == PROBE:
            self._keeps = self._reads_logits = False
        self._left = plan.steps - 1

    def _wake(self) -> None:
        """Whether texts are looked up and continuations kept in this step: not where a step is to be plain in every respect."""
        mind, state = self.mind, self.mind.state
        rests = state is None or state.ledger.overdrawn or state.costs.plain.measurements < costs.LEAST_PLAIN
        rests = rests or (self._left > 0 and self.plan.kind == PROBE)
        recycles = state is not None and state.current == RECYCLE
        short = state is not None and state.ledger.room < LEAST_FOR_LOOKING
        looks = self.texts.looks_up and not (rests or short)
        keeps = self.recycle is not None and not (rests or (short and not recycles))
        self._looks_up = looks and mind.looking.goes_on(mind.steps, self.plan.kind == LOOKUP and mind.looking_worth.pays)
        self._keeps = keeps and state is not None and mind.keeping.goes_on(mind.steps, recycles)
        self._reads_logits = self._keeps

    def _plain(self) -> Draft:
        view = self.view
        return Draft.empty(view.rows, view.root.device, view.start_forward([0] * view.rows))

    @property
    def _known(self) -> State:
        """What the plan was decided with."""
        assert self.mind.state is not None
        return self.mind.state

    def _planned(self, plan: Plan, limit: list[int]) -> Draft:
        if plan.kind in (PLAIN, PROBE):
            return self._plain()
        if plan.kind == LOOKUP:
            return self.texts.looked_up(plan.drafts, limit)
        if plan.kind == RECYCLE:
            assert self.recycle is not None
            assert plan.tree is not None
            self.recycle.shape = tuple(zip(plan.tree.parents, plan.tree.ranks, strict=True))
            return self.recycle.propose_draft(limit)
        candidate = self.candidates[plan.kind]
        if candidate.own_rule:
            return candidate.drafter.propose_draft(limit)
        if not plan.thresholds or plan.thresholds[0] > 1:
            return self._plain()
        limit = [min(one, len(plan.thresholds)) for one in limit]
        calibration = self._known.drafters[plan.kind].calibration
        rule = SurvivalThresholds(calibration.slope, calibration.offset, plan.thresholds[1:], plan.beside[1:])
        return candidate.drafter.propose_draft(limit, rule)

    def needs_logits(self, draft: Draft) -> bool:
        return self._reads_logits

    def observe_scores(self, draft: Draft, scores: Scores, verdict: Verdict | GreedyVerdict) -> Tensor | None:
        candidate = self.candidates.get(self.plan.kind)
        if candidate is not None and candidate.own_rule:
            return candidate.drafter.observe_scores(draft, scores, verdict)
        if self.recycle is not None and self._keeps:
            return self.recycle.observe_scores(draft, scores, verdict)
        return None

    def observe_commits(self, draft: Draft | None, verdicts: list[RowVerdict]) -> None:
        """Tell all what was committed, and note what the draft came to."""
        if draft is None:
            self._settle()  # other rows decode from now on
        if self._is_quiet and draft is not None:
            self._unread.append(verdicts)
            return
        began = self.model.ranks.now()
        self._judged, self._ranks = [], []
        if draft is not None:
            self._judge(draft, verdicts)
        if self.recycle is not None and self._keeps:
            row = next((row for row, verdict in enumerate(verdicts) if verdict.tokens), None)
            if row is not None:
                self._ranks = ranks(self.mind.kept, self.texts.text[row][-1], verdicts[row].tokens)
        candidate = self.candidates.get(self.plan.kind)
        chosen = self.recycle if self.plan.kind == RECYCLE else None if candidate is None else candidate.drafter
        self.texts.count(verdicts, self.plan.kind == LOOKUP and draft is not None)
        if self._looks_up:
            self._host_seconds += self.model.ranks.since(began)
        has_own_notes = candidate is not None and candidate.own_rule
        silent = [replace(verdict, notes=[]) for verdict in verdicts] if has_own_notes else verdicts
        for one in self._listeners:
            if one is not chosen:
                one.observe_commits(None, silent)
        if chosen is not None:
            chosen.observe_commits(draft if draft is not None and draft.width else None, verdicts)

    def _judge(self, draft: Draft, verdicts: list[RowVerdict]) -> None:
        """Hold what was looked up, and how sure a drafter was, against what was committed."""
        if self._looks_up:
            self.texts.judge(verdicts)
        if draft.confidence is not None and draft.width and (self.plan.trial or not self._tally.steps):
            for confidences, verdict in zip(draft.confidence.tolist(), verdicts, strict=True):
                judged = min(len(verdict.path) + (not verdict.finished), verdict.drafted)
                self._judged += [(confidences[place], place < len(verdict.path)) for place in range(judged)]

    def observe_step(self, step: Step) -> None:
        """Times, to what they teach."""
        if step.prefill:
            self._take_preparations()
            return
        if self._is_quiet and self._left:
            step.drafter, step.reason, step.probe = self.plan.kind, self.plan.reason, self.plan.kind == PROBE
            aside, self.aside_seconds, self._learning_seconds = self.aside_seconds + self._learning_seconds, 0.0, 0.0
            seconds = self.model.ranks.agreed(step.seconds - step.seconds_search)
            self._uncounted.append((self._known.costs.plain.value if self._take_preparations() else seconds, aside))
            return
        self._catch_up()
        mind, plan, live = self.mind, self.plan, [len(tokens) for tokens in step.tokens if tokens]
        step.drafter, step.reason, step.probe = plan.kind, plan.reason, plan.kind == PROBE
        mind.steps += 1
        mind.kinds[plan.kind] = mind.kinds.get(plan.kind, 0) + 1
        seconds, rows = self.model.ranks.agreed(step.seconds - step.seconds_search), max(len(live), 1)
        prepared = self._take_preparations()
        if mind.state is None:
            if live and not prepared:
                mind.plain_seconds.append(seconds)
                first = mind.state = self._first_state(seconds)
                if self.log is not None:
                    self.log.state(mind.live, first)
            return
        if plan.kind in (PLAIN, PROBE):
            nearer = sum(live) / rows
            seconds = mind.state.costs.plain.value if prepared else seconds  # as it was thought to take
            self._plainly(nearer, seconds, self.aside_seconds + self._learning_seconds)
            urgent = False
        else:
            self._plain_in_a_row, self._ran_prompt = 0, False
            done = self._drafted(step, seconds, sum(live), rows)
            done = replace(done, preparing=True) if prepared else done
            self._tally.add(done, plan.trial)
            further = self._further(mind.state, done)
            nearer, urgent, self.plan = done.nearer, further is None, further or plan
        if self._looks_up and not prepared:
            self._weigh_looking(nearer, seconds)
        self.aside_seconds, began = 0.0, self.model.ranks.now()
        if urgent or not self._left:
            self._settle()
        self._learning_seconds = self.learning_seconds(began)

    def _further(self, state: State, done: Done) -> Plan | None:
        """The plan for its next steps after one that drafted; None where that has to be learnt from first."""
        if not self.plan.trial or not self._left:
            return None if learning.is_urgent(state, done) else self.plan
        tally, price = self._tally, self.plan.price
        time = tally.seconds / state.costs.plain.value
        return control.further(state, self.plan, tally.steps, time - tally.nearer, time - tally.nearer / price)

    def _catch_up(self) -> None:
        """With what quiet steps have committed and taken."""
        mind, kind = self.mind, self.plan.kind
        for verdicts in self._unread:
            self.texts.count(verdicts, looked_up=False)
            for one in self._listeners:
                one.observe_commits(None, verdicts)
        for seconds, aside in self._uncounted:
            self._plainly(1.0, seconds, aside)
        mind.steps += len(self._uncounted)
        mind.kinds[kind] = mind.kinds.get(kind, 0) + len(self._uncounted)
        self._unread.clear()
        self._uncounted.clear()

    def _weigh_looking(self, nearer: float, seconds: float) -> None:
        """What looking up came to in this step. nearer: as in `Done`. seconds: of all of it."""
        plan, plain, spent, gain = self.plan, self._known.costs.plain.value, self._host_seconds, 0.0
        if plan.kind == LOOKUP:
            gain = nearer / plan.price - (seconds - spent) / plain
        self.mind.looking_worth.add(gain, spent / plain)
        if any(one.right >= REPEATED for one in self.texts.judged):
            self.mind.looking.repeats(self.mind.steps)

    def _plainly(self, tokens: float, seconds: float, aside: float) -> None:
        """A plain step was taken. aside: seconds that were spent before it beside decoding."""
        tally, rests = self._tally, self.plan.kind == PROBE or not (self._looks_up or self._keeps)
        self._plain_in_a_row += 1
        warm = rests and self._plain_in_a_row > WARM_AFTER
        if rests:
            seconds -= self._looking_seconds
        elif not self._keeps and (self._ran_prompt or self._plain_in_a_row > WARM_AFTER):
            seconds = self._known.costs.plain.value + self._host_seconds  # all else is as in plain decoding
        if warm:
            self.mind.plain_seconds.append(seconds)
        tally.plain(tokens, seconds, rests, warm, self._ran_prompt)
        tally.aside_seconds += aside
        if self._looks_up:
            tally.matches += self.texts.judged
        if self._keeps:
            tally.ranks += self._ranks

    def _drafted(self, step: Step, seconds: float, tokens: int, rows: int) -> Done:
        """What became of a step that drafted."""
        kind, drafting = self.plan.kind, self.model.ranks.agreed(step.seconds_draft)
        by_model = kind in self.candidates
        whole = by_model and self.candidates[kind].own_rule
        return Done(
            tokens=tokens / rows,
            seconds=seconds + self._learning_seconds,
            confidences=self._judged,
            verified=round(step.verified_nodes / rows),
            passes=max(step.draft_steps, default=0) if by_model and not whole else 0,
            drafting=drafting if by_model and not whole else None,
            scoring=seconds - drafting * by_model if not whole else None,
            matches=self.texts.judged,
            ranks=self._ranks,
            aside_seconds=self.aside_seconds,
            learning_seconds=self._learning_seconds,
            slowest=None if rows == 1 else progress(self._room, [len(one) for one in step.tokens], step.finished),
        )

    def _settle(self) -> None:
        """The plan stands no longer, and what it came to is taken over."""
        self._catch_up()
        tally, self._tally, self._left = self._tally, Tally(), 0
        if tally.steps:
            self.mind.took(Taken(self._matches, self._planned_as, self.plan, tally.done(), self._behind))

    def _first_state(self, seconds: float) -> State:
        recycles = self.recycle is not None
        return first_state(seconds, self.mind.live, self.candidates, self.rules, self.ledger, recycles)
