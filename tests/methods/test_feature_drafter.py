"""What a drafter that reads hidden states knows of its rows: nothing stale, nothing left out, whatever ran before."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from skipstone import Autoregressive, Eagle3, Method, Mtp
from skipstone.decoding.draft import Draft
from skipstone.decoding.drafter import Drafter
from skipstone.decoding.loop import DecodingLoop
from skipstone.decoding.request import Request
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.native import library
from skipstone.methods.drafting.feature_drafter import MAX_UNREAD, FeatureDrafter
from skipstone.serving.batch_group import BatchGroup
from skipstone.serving.pending_request import PendingRequest
from tests.helpers import families
from tests.helpers.feature_heads import eagle3_folder
from tests.helpers.feature_loop import DraftRecorder, Expected, Run, finish, of_eagle3, prompts, record, requests, start
from tests.helpers.feature_references import MtpReference
from tests.helpers.mtp_checkpoints import MtpOptions, add_mtp_layers, tiny_target
from tests.helpers.pairwise import slow_except

LATE = 20
LAYERS, DRAFTS, DEPTHS = 8, 3, (2, 4, 5)
ENGINES = [
    "eager",
    pytest.param("native", marks=pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))),
]


@dataclass
class Case:
    """A target with a head, its greedy texts of `requests()`, and the reference of the head's logits."""

    runner: ModelRunner
    method: Any
    plain: list[list[int]]
    expected: Expected

    def record(self, **settings: Any) -> Run:
        return record(self.method, self.runner, requests(), self.plain, **settings)

    def loop(self, rows: int, capacity: int, chunk: int = 16, **settings: Any) -> tuple[DecodingLoop, FeatureDrafter]:
        """A loop without requests. settings: of `DecodingLoop`."""
        loop = DecodingLoop(self.method.start(self.runner, rows, capacity), chunk=chunk, **settings)
        drafter: Any = loop.session.drafter
        return loop, drafter


def texts_of(runner: ModelRunner, asked: list[Request]) -> list[list[int]]:
    return finish(start(Autoregressive(), runner, asked), asked).texts


@pytest.fixture(scope="module", params=["eagle3", "eagle3 on the native engine", "mtp", "mtp of a recurrent target"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder, name = tmp_path_factory.mktemp("head"), request.param
    if name.startswith("eagle3"):
        native = name.endswith("native engine")
        if native and library.missing() is not None:
            pytest.skip(str(library.missing()))
        model = families.build("llama", layers=LAYERS)
        eagle3_folder(folder, model.config)
        runner, expected = ModelRunner(model, "native" if native else "eager"), of_eagle3(model, folder, DEPTHS)
        method: Any = Eagle3(str(folder), num_speculative_tokens=DRAFTS)
    else:
        model = tiny_target("qwen3_5_text" if name.endswith("target") else "glm4_moe")
        model.config.name_or_path = str(add_mtp_layers(folder, model, MtpOptions()))
        runner, expected = ModelRunner(model, "eager"), Expected(model, MtpReference(folder))
        method = Mtp(num_speculative_tokens=DRAFTS)
    return Case(runner, method, texts_of(runner, requests()), expected)


def head_buffers(drafter: FeatureDrafter) -> list[Tensor]:
    return [one for one in (*drafter.store.keys, *drafter.store.values) if one is not None]


# ---------------------------------------------------------------------------------------------------- nothing stale


def test_nothing_of_rejected_columns_is_read_again(case: Case) -> None:
    """Features of columns that were not accepted, and all slots behind the columns that were read, are overwritten."""
    overwritten = 0
    # attention multiplies masked values by zero, so on the eager engine NaN would be seen through a mask
    wrong = float("nan") if case.runner.engine.name == "native" else 1e4

    def overwrite(loop: DecodingLoop) -> None:
        nonlocal overwritten
        drafter: Any = loop.session.drafter
        for row in range(3):
            for buffer in head_buffers(drafter):
                buffer[row, :, drafter.store.length[row] :] = wrong
                overwritten += buffer.shape[2] - drafter.store.length[row]

    run = case.record(after=overwrite)
    assert run.texts == case.plain
    assert 0 < run.accepted < run.drafted
    assert overwritten > 1000
    assert min(case.expected.assert_logits(run.records)) > 10


def test_states_of_rejected_columns_are_never_observed(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are NaN behind the accepted path of every row."""
    asked, poisoned = requests(), 0
    loop = start(case.method, case.runner, asked)
    session, drafter = loop.session, loop.session.drafter
    recorder, own = DraftRecorder(drafter, case.plain), session.commit  # type: ignore[arg-type]

    def commit(draft: Draft | None, verdicts: Any) -> None:
        nonlocal poisoned
        if draft is not None and draft.forward is not None:
            for states in draft.forward._recorded.values():
                for row, verdict in enumerate(verdicts):
                    kept = len(verdict.tokens)
                    poisoned += states.shape[1] - kept
                    states[row, kept:] = float("nan")
        own(draft, verdicts)

    monkeypatch.setattr(session, "commit", commit)
    run = finish(loop, asked)
    assert run.texts == case.plain
    assert poisoned > 50
    assert min(case.expected.assert_logits(recorder.records)) > 10


# ---------------------------------------------------------------------------------------------------- catching up


@dataclass(frozen=True)
class Pausing(Method):
    """Lets another method draft only in some steps, and reports commits of LATE quiet steps at once, as `auto` does."""

    name: ClassVar[str] = "pausing"

    method: Any
    quiet_steps: int

    def create_drafter(self, model: ModelRunner, rows: int, capacity: int) -> Drafter:
        drafter: Any = self.method.create_drafter(model, rows, capacity)
        own_propose, own_commits, own_remove = drafter.propose_draft, drafter.observe_commits, drafter.remove_request
        step, late = 0, list[Any]()

        def propose(limits: list[int], stop_rule: Any = None) -> Draft:
            nonlocal step
            step += 1
            if step % (self.quiet_steps + 1):
                return own_propose([0] * rows, stop_rule)
            flush()
            return own_propose(limits, stop_rule)

        def observe(draft: Draft | None, verdicts: Any) -> None:
            if draft is not None and not draft.width:
                late.append(verdicts)
                if len(late) == LATE:
                    flush()
            else:
                flush()
                own_commits(draft, verdicts)

        def flush() -> None:
            while late:
                own_commits(None, late.pop(0))

        def remove(row: int) -> None:
            flush()
            own_remove(row)

        drafter.propose_draft, drafter.observe_commits, drafter.remove_request = propose, observe, remove
        return drafter


@pytest.mark.parametrize("quiet_steps", slow_except([1, 7], [1, 7, MAX_UNREAD - 1, MAX_UNREAD + 20]))
def test_a_head_catches_up_before_it_drafts(case: Case, quiet_steps: int) -> None:
    asked = requests((9, 30, 3), (2 * quiet_steps + 20, 2 * quiet_steps + 12, quiet_steps + 9))
    plain = texts_of(case.runner, asked)
    run = record(Pausing(case.method, quiet_steps), case.runner, asked, plain)
    assert run.texts == plain
    counts = case.expected.assert_logits(run.records)
    assert counts[0] > 2
    assert len(counts) == DRAFTS


def test_few_states_wait_while_a_head_does_not_draft(case: Case) -> None:
    asked = requests((70, 200, 3), (150, 100, 120))
    loop = start(Pausing(case.method, 1000), case.runner, asked)
    drafter: Any = loop.session.drafter
    most, read = 0, 0

    def watch(loop: DecodingLoop) -> None:
        nonlocal most, read
        most = max(most, *(drafter._num_unread(row) for row in range(3)))
        read = max(read, *drafter.store.length)

    finish(loop, asked, watch)
    assert most <= MAX_UNREAD + LATE
    assert read > 200


@pytest.mark.parametrize("count", slow_except([5], [1, 5, 20]))
def test_replayed_logits_are_those_of_the_reference_and_leave_the_row_right(case: Case, count: int) -> None:
    asked = requests((9, 30, 3), (60, 50, 40))
    plain, replayed, steps = texts_of(case.runner, asked), 0, 0
    loop = start(Pausing(case.method, 30), case.runner, asked)
    drafter: Any = loop.session.drafter
    recorder = DraftRecorder(drafter, plain)

    def replay(loop: DecodingLoop) -> None:
        nonlocal replayed, steps
        steps, row, alive = steps + 1, steps % 3, loop.session.alive
        text, unread = drafter.text[row], drafter._num_unread(row) if alive[row] else 0
        if unread <= count:
            return
        assert drafter.tokens_to_replay(row, count) == unread - 1
        logits = drafter.replay_tokens(row, text[-1 - count :])
        for place in range(count):
            known = text[: len(text) - count + place]
            states, tokens = case.expected.states(text)[: len(known) - 1], torch.tensor(known)
            right = case.expected.reference.chain(states, tokens, 1)[0][0]
            finite = right.isfinite()
            torch.testing.assert_close(logits[place][finite].double(), right[finite], rtol=0, atol=1e-3)
        assert drafter._num_unread(row) == 1
        assert drafter.replay_tokens(row, text[-1 - count :]) is None
        replayed += 1

    run = finish(loop, asked, replay)
    assert run.texts == plain
    assert replayed > 1
    case.expected.assert_logits(recorder.records)


# ---------------------------------------------------------------------------------------------------- rows and requests


class Rows:
    """A loop that admits requests one by one. It knows the target's texts, and records all drafts."""

    def __init__(self, case: Case, rows: int = 3, chunk: int = 16, **settings: Any) -> None:
        self.case = case
        self.loop, self.drafter = case.loop(rows, 260, chunk, **settings)
        self.recorder, self.texts = DraftRecorder(self.drafter, [[0]]), dict[int, list[int]]()
        self.wanted = dict[int, list[int]]()

    def admit(self, row: int, prompt: Tensor, new: int, cached: int = 0, source: int | None = None) -> int:
        """Returns how many tokens are reused."""
        request = Request(prompt, new)
        self.wanted[row], self.texts[row] = texts_of(self.case.runner, [request])[0], prompt.tolist()
        self.recorder.texts = [*self.wanted.values()]
        return self.loop.admit(row, request, cached, source)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for row, tokens in enumerate(self.loop.step().tokens):
                if tokens:
                    self.texts[row] += tokens

    def finish(self) -> None:
        """Run to the end, and check all texts and all logits."""
        while self.loop.busy:
            self.step()
        assert self.texts == self.wanted
        if self.recorder.records:
            self.case.expected.assert_logits(self.recorder.records)

    def records_of(self, row: int) -> list[Any]:
        return [one for one in self.recorder.records if one.row == row]


KINDS = ["eagle3", "eagle3 on the native engine", "mtp"]
"""Recurrent targets reuse no prefixes."""
OTHER = torch.tensor([5, 6, 7, 5, 9])


@pytest.mark.parametrize("length", slow_except([2, 60], [1, 2, 16, 17, 60, 79]))
@pytest.mark.parametrize("source", ["its own row", "a free row", "a row that decodes"])
@pytest.mark.parametrize("case", KINDS, indirect=True)
def test_a_reused_prefix_has_the_columns_of_a_fresh_one(case: Case, source: str, length: int) -> None:
    """The target runs its last token again, because the head needs its state."""
    rows, prompt = Rows(case), prompts((60,), seed=4)[0]
    rows.admit(0, prompt, 40)
    if source == "a row that decodes":
        while len(rows.texts[0]) < 86:
            rows.step()
    else:
        rows.finish()
    text = torch.tensor(rows.texts[0])
    row = 0 if source == "its own row" else 2
    assert rows.drafter.store.length[0] >= 79
    before = len(rows.recorder.records)
    assert rows.admit(row, torch.cat([text[:length], OTHER]), 20, length, 0) == length - 1
    rows.finish()
    assert len(rows.recorder.records) > before + 3


@pytest.mark.parametrize("case", KINDS, indirect=True)
def test_a_prefix_that_the_head_has_not_read_is_read_for_the_next_request(case: Case) -> None:
    rows, prompt = Rows(case, chunk=32), prompts((100,), seed=4)[0]
    rows.admit(0, prompt, 1)
    rows.finish()
    assert 0 < rows.drafter.store.length[0] < 98
    assert rows.admit(1, torch.cat([prompt[:99], OTHER]), 20, 99, 0) == 98
    assert rows.admit(0, torch.cat([prompt[:99], OTHER + 1]), 20, 99) == 98
    assert rows.admit(2, torch.cat([prompt[:99], OTHER + 2]), 20, 40, 0) == 39
    rows.finish()
    assert all(len(rows.records_of(row)) > 3 for row in range(3))


@pytest.mark.parametrize("case", KINDS, indirect=True)
def test_a_prefix_is_reused_while_its_row_has_another_request(case: Case) -> None:
    """The third request reuses what the second has reused, and its row has drafted meanwhile."""
    rows, prompt = Rows(case), prompts((60,), seed=4)[0]
    rows.admit(0, prompt, 30)
    rows.step(12)
    first = torch.tensor(rows.texts[0])
    rows.admit(1, torch.cat([first[:50], OTHER]), 30, 50, 0)
    rows.step(5)
    assert rows.admit(2, torch.cat([first[:50], OTHER[:3], OTHER]), 30, 53, 1) == 52
    rows.finish()


def test_the_server_reports_the_tokens_that_were_reused(case: Case) -> None:
    group = BatchGroup(case.runner, case.method, 2, 260, 16, lambda *_: None)
    prompt = prompts((60,), seed=4)[0]
    recorder = DraftRecorder(group.loop.session.drafter, texts_of(case.runner, [Request(prompt, 30)]))  # type: ignore[arg-type]
    reused, texts = list[int](), list[list[int]]()
    for asked in (prompt, torch.cat([prompt[:50], OTHER]), torch.cat([prompt[:50], OTHER, OTHER])):
        pending = PendingRequest(Request(asked, 30), case.method)
        recorder.texts = texts_of(case.runner, [pending.request])
        group.admit(pending)
        running = group.loop.rows[group.requests.index(pending)]
        assert running is not None
        while group.busy:
            group.step()
        texts.append([*asked.tolist(), *running.tokens])
        assert texts[-1] == recorder.texts[0]
        reused.append(pending.stats.cached_tokens)
    assert reused == ([0, 0, 0] if case.runner.family.recurrent else [0, 49, 54])
    case.expected.assert_logits(recorder.records)


@pytest.mark.parametrize("decodes_during_prefill", slow_except([True], [False, True]))
def test_rows_that_are_cancelled_and_used_again(case: Case, decodes_during_prefill: bool) -> None:
    """In their prompt, right after it, and while they decode, next to rows that go on."""
    rows = Rows(case, chunk=8, decodes_during_prefill=decodes_during_prefill)
    long, longer, short = prompts((90, 130, 5), seed=4)
    rows.admit(0, short, 90)
    rows.admit(1, longer, 20)
    rows.admit(2, long, 20)
    rows.step(11)
    assert rows.loop.session.prefilling
    assert any(map(len, rows.drafter.unread[1]))
    rows.loop.release(1)
    rows.admit(1, prompts((17,), seed=8)[0], 25)
    rows.step(9)
    for _ in range(3):
        for row in (2, 1):
            rows.loop.release(row)
            rows.admit(row, prompts((3 + 20 * row,), seed=9)[0], 25)
            assert not any(map(len, rows.drafter.unread[row]))
            rows.step(4)
    rows.finish()
    assert len(rows.records_of(0)) > 5


@pytest.mark.parametrize("case", ["eagle3", "mtp", "mtp of a recurrent target"], indirect=True)
def test_a_row_without_a_token_to_choose_is_used_again(case: Case) -> None:
    """NaN in the target's states reaches the head, and nothing of it stays in the row or in others."""
    embedding: Any = case.runner.model.get_input_embeddings()
    rows = Rows(case)
    rows.admit(1, prompts((30,), seed=3)[0], 60)
    rows.step(4)
    bad = 96
    kept = embedding.weight[bad].clone()
    rows.wanted[0], rows.texts[0] = [1, 2, bad, 4], [1, 2, bad, 4]
    rows.loop.admit(0, Request(torch.tensor([1, 2, bad, 4]), 9))
    with torch.no_grad():
        try:
            embedding.weight[bad] = float("nan")
            while 0 not in (step := rows.loop.step()).finished:
                rows.texts[1] += step.tokens[1]
            rows.texts[1] += step.tokens[1]
        finally:
            embedding.weight[bad] = kept
    assert 0 in step.errors
    assert not any(bool(buffer.isnan().any()) for buffer in head_buffers(rows.drafter))
    rows.admit(0, prompts((12,), seed=6)[0], 30)
    rows.finish()
    assert len(rows.records_of(0)) > 3
