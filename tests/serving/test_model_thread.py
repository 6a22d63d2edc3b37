"""Rows that join and leave between steps: texts stay those of `skipstone.generate`."""

import copy
import gc
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import skipstone
from skipstone.decoding.draft import Step
from skipstone.decoding.loop import DecodingLoop, run
from skipstone.decoding.method import Method
from skipstone.decoding.request import Request
from skipstone.engines.model_runner import ModelRunner
from skipstone.serving import model_thread as model_thread_module
from skipstone.serving.admission import AdmissionLimits
from skipstone.serving.batch_group import BatchGroup
from skipstone.serving.errors import RequestError
from skipstone.serving.model_thread import MethodSteps, ModelThread, RequestEvents
from skipstone.serving.pending_request import CANCELLED, FAILED, LENGTH, TIMEOUT, PendingRequest, RequestEnd, StepOutput
from skipstone.serving.request_parser import Penalty
from skipstone.utils.limits import MAX_BATCH_GROUPS
from tests.helpers import families
from tests.helpers.machine import near
from tests.helpers.pairwise import slow_except

METHODS: list[Method] = [
    skipstone.Autoregressive(),
    skipstone.LayerSkip(exit_layer=2, num_speculative_tokens=4),
    skipstone.Auto((skipstone.PromptLookup(), skipstone.LayerSkip(exit_layer=2, num_speculative_tokens=4))),
]


def prompt(length: int, seed: int) -> torch.Tensor:
    return torch.randint(3, 90, (length,), generator=torch.Generator().manual_seed(seed))


def job(length: int, seed: int, new: int, method: Method = METHODS[0], **more: Any) -> PendingRequest:
    return PendingRequest(Request(prompt(length, seed), new), method, **more)


def written(raw: Any, method: Method, ids: torch.Tensor, new: int, engine: str | None = None) -> list[int]:
    output = skipstone.generate(raw, ids[None], method, engine=engine, max_new_tokens=new, do_sample=False)
    assert output.new_tokens is not None
    return output.new_tokens[0]


class Heard:
    def __init__(self) -> None:
        self.tokens: dict[PendingRequest, list[int]] = {}
        self.ended: dict[PendingRequest, RequestEnd] = {}
        self.steps = 0
        self.changed = threading.Condition()

    def __call__(self, told: RequestEvents, steps: MethodSteps) -> None:
        with self.changed:
            self.steps += len(steps)
            for pending, event in told:
                if isinstance(event, StepOutput):
                    self.tokens.setdefault(pending, []).extend(event.tokens)
                else:
                    self.ended[pending] = event
            self.changed.notify_all()

    def until(self, met: Any, seconds: float = 30) -> None:
        with self.changed:
            assert self.changed.wait_for(met, seconds), "it did not happen"

    def all_of(self, requests: list[PendingRequest]) -> None:
        self.until(lambda: all(pending in self.ended for pending in requests))


def write_all(model_thread: ModelThread, heard: Heard, *requests: PendingRequest) -> None:
    model_thread.submit(list(requests))
    heard.all_of(list(requests))
    assert model_thread.stop()


def assert_written(raw: Any, heard: Heard, *requests: PendingRequest) -> None:
    for pending in requests:
        assert heard.ended[pending].reason == LENGTH
        assert heard.tokens[pending] == written(raw, pending.method, pending.request.prompt, pending.request.max_new_tokens)


def measured_thread(measure: Callable[[ModelThread], int], *arguments: Any) -> tuple[ModelThread, list[int]]:
    """A thread, and what is measured of it before every step."""
    values = list[int]()

    class Measured(ModelThread):
        def _receive(self, wait: bool, calls: bool = True) -> None:
            values.append(measure(self))
            super()._receive(wait, calls)

    return Measured(*arguments), values


@pytest.fixture
def raw() -> Any:
    return families.build("llama", max_position_embeddings=8192)


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


FREED: list[Method] = [
    *METHODS,
    skipstone.EarlyExit(exit_layer=2),
    skipstone.SelfSpeculative(skip_attention=(1,), skip_mlp=(1,)),
    skipstone.Swift(),
    skipstone.Speculative(families.build("llama", num_hidden_layers=1, max_position_embeddings=8192)),
    skipstone.PromptLookup(),
    skipstone.Jacobi(),
    skipstone.Lookahead(),
    skipstone.Recycle(),
]


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize("method", FREED, ids=repr)
def test_a_batch_group_is_freed_with_its_last_reference_while_no_garbage_is_collected(raw: Any, method: Method) -> None:
    group = BatchGroup(ModelRunner(raw), method, 2, 256, 64, lambda *_: None)
    for seed, (details, logprobs) in enumerate([(True, 2), (False, None)]):
        group.admit(job(20, seed, 8, method, num_logprobs=logprobs, wants_details=details))
    kept = [weakref.ref(group), weakref.ref(group.loop), weakref.ref(group.loop.session.store)]
    while group.busy:
        group.step()
    kept.append(weakref.ref(group.loop.session.store.keys[0]))
    del group
    assert [one() for one in kept] == [None] * len(kept)


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize("method", FREED, ids=repr)
def test_a_batch_group_keeps_nothing_of_a_request_that_has_ended(raw: Any, method: Method) -> None:
    """A grammar is a logits processor, and its memory counts until it is freed."""
    group, processors = (
        BatchGroup(ModelRunner(raw), method, 2, 256, 64, lambda *_: None),
        [Penalty(20, 0.5, 0.25) for _ in range(2)],
    )
    kept = list(map(weakref.ref, processors))
    for processor in processors:
        request = Request(prompt(20, 0), 8, sampling=skipstone.Sampling(processors=[processor]))
        group.admit(PendingRequest(request, method))
        while group.busy:
            group.step()
    del processors, processor, request
    assert [one() for one in kept] == [None] * 2


@pytest.mark.usefixtures("no_garbage_collection")
def test_an_engine_keeps_no_batch_group_that_it_has_let_go_of(raw: Any) -> None:
    heard, groups = Heard(), weakref.WeakSet[Any]()
    model_thread = ModelThread(ModelRunner(raw), AdmissionLimits(2, 256, 8), heard)
    for count in range(1, 2 * MAX_BATCH_GROUPS):
        pending = job(20, count, 4, skipstone.LayerSkip(exit_layer=2, num_speculative_tokens=count))
        model_thread.submit([pending])
        heard.all_of([pending])
        groups.update(model_thread.scheduler.groups.values())
    assert len(groups) <= MAX_BATCH_GROUPS
    assert model_thread.stop()


def held_bytes(group: BatchGroup) -> int:
    return sum(store.bytes() + store.state_histories.bytes() for _, store in group.loop.session.stores)


@pytest.mark.parametrize("method", FREED, ids=repr)
def test_a_batch_group_takes_no_more_than_it_was_expected_to(raw: Any, method: Method) -> None:
    group = BatchGroup(ModelRunner(raw), method, 2, 512, 64, lambda *_: None)
    pending = job(150, 0, 90, method)
    expected = group.memory_bytes(240)
    group.admit(pending)
    assert group.memory_bytes() == expected
    while group.busy:
        group.step()
        assert held_bytes(group) <= expected
    assert held_bytes(group) == group.memory_bytes() > expected // 4


@pytest.mark.parametrize("name", slow_except(["lfm2"], ["qwen3_next", "lfm2"]))
def test_recurrent_states_count_as_well(name: str) -> None:
    """Every tensor that a group keeps, whoever keeps it, counted by its memory and not by its shape."""
    raw = families.build(name, max_position_embeddings=8192)
    method = skipstone.PromptLookup(num_speculative_tokens=8)
    group = BatchGroup(ModelRunner(raw), method, 3, 512, 64, lambda *_: None)
    expected = group.memory_bytes(240)
    most = 0
    for seed in range(3):
        group.admit(PendingRequest(Request(prompt(50, seed).repeat(3), 90), method))
        while group.loop.session.prefilling:
            group.step()
    while group.busy:
        group.step()
        store = group.loop.session.store
        tensors = [*store.keys, *store.values]
        for trail in store.state_histories._histories.values():
            tensors += [*trail.before.values(), *trail.after.values(), trail.inputs]
        memory = [one.untyped_storage() for one in tensors if one is not None]
        most = max(most, sum({one.data_ptr(): one.nbytes() for one in memory}.values()))
    assert expected // 3 < most <= expected


def test_a_prompt_whose_own_probabilities_are_told_counts_with_the_groups(raw: Any) -> None:
    model, heard, method = ModelRunner(raw), Heard(), skipstone.Autoregressive()
    limit = BatchGroup(model, method, 2, 256, 64, lambda *_: None).memory_bytes(256)

    def held(thread: ModelThread) -> int:
        scorer = thread.scheduler._scorer
        scored = 0 if scorer is None or scorer._store is None else scorer._store.bytes()
        return scored + sum(map(held_bytes, thread.scheduler.groups.values()))

    limits = AdmissionLimits(2, 256, 32, prefill_chunk_size=32, kv_cache_bytes=limit)
    model_thread, values = measured_thread(held, model, limits, heard)
    scored: dict[str, Any] = {"num_logprobs": 20, "prompt_logprobs": [], "echo": True}
    requests = [job(140, seed, 100, method, **(scored if seed % 2 else {})) for seed in range(6)]
    write_all(model_thread, heard, *requests)
    assert limit // 2 < max(values) <= limit
    assert_written(raw, heard, *requests)


def test_what_was_read_of_prompts_waits_for_rows_once(raw: Any) -> None:
    """Twenty likeliest tokens in every place of a prompt take more memory than its request: few prompts have them at a time."""
    heard, method = Heard(), skipstone.Autoregressive()

    def scored(thread: ModelThread) -> int:
        return sum(bool(pending.prompt_logprobs) for pending in thread.scheduler.waiting)

    model_thread, values = measured_thread(scored, ModelRunner(raw), AdmissionLimits(1, 256, 32), heard)
    requests = [job(40, seed, 20, method, num_logprobs=20, prompt_logprobs=[], echo=True) for seed in range(8)]
    write_all(model_thread, heard, *requests)
    assert max(values) == 1
    assert all(len(pending.prompt_logprobs or []) == 39 for pending in requests)


def test_groups_of_many_settings_take_no_more_bytes_than_allowed_and_every_text_is_right(raw: Any) -> None:
    model, heard = ModelRunner(raw), Heard()
    methods = [skipstone.LayerSkip(exit_layer=2, num_speculative_tokens=count) for count in range(1, 9)]
    limit = BatchGroup(model, methods[0], 2, 256, 64, lambda *_: None).memory_bytes(64) * 5 // 2  # two groups, and not three

    def held(thread: ModelThread) -> int:
        return sum(map(held_bytes, thread.scheduler.groups.values()))

    limits = AdmissionLimits(2, 256, 32, kv_cache_bytes=limit)
    model_thread, values = measured_thread(held, model, limits, heard)
    requests = [job(20, seed, 24, method) for seed in range(3) for method in methods]
    write_all(model_thread, heard, *requests)
    assert 0 < max(values) <= limit
    assert_written(raw, heard, *requests)


def test_a_text_for_which_there_is_never_memory_is_refused_with_the_setting_s_name(raw: Any) -> None:
    model, heard, method = ModelRunner(raw), Heard(), skipstone.Autoregressive()
    limit = BatchGroup(model, method, 2, 1024, 64, lambda *_: None).memory_bytes(64)
    model_thread = ModelThread(model, AdmissionLimits(2, 1024, 8, kv_cache_bytes=limit), heard)
    short, long = job(20, 0, 8, method), job(500, 1, 8, method)
    read = job(500, 1, 1, method, num_logprobs=2, prompt_logprobs=[], echo=True, generates=False)
    write_all(model_thread, heard, long, read, short)
    assert heard.ended[short].reason == LENGTH
    for refused in (long, read):
        assert heard.ended[refused].status == 400
        assert "--kv-cache-memory-bytes" in heard.ended[refused].message


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_row_that_runs_its_prompt_next_to_others_changes_no_text(raw: Any, method: Method) -> None:
    model, long, short = ModelRunner(raw), prompt(60, 1), prompt(5, 2)
    decoder = DecodingLoop(method.start(model, 2, 128), chunk=8, decodes_during_prefill=True)
    decoder.admit(0, Request(short, 40))
    texts: dict[int, list[int]] = {0: [], 1: []}
    for _ in range(4):
        texts[0] += decoder.step().tokens[0]
    decoder.admit(1, Request(long, 20))
    during = 0
    for step in run(decoder):
        for row in texts:
            texts[row] += step.tokens[row]
        during += bool(step.tokens[0]) and decoder.session.prefilling
    assert texts[0] == written(raw, method, short, 40)
    assert texts[1] == written(raw, method, long, 20)
    assert during >= 3, "the short text went on while the long prompt was read"


@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize(("family", "engine"), [("llama", "native"), ("llama", "eager"), ("lfm2", "eager")])
def test_prompts_that_arrive_together_change_no_text_and_share_passes_where_padding_costs_nothing(
    family: str, engine: str, method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = families.build(family, max_position_embeddings=8192)
    model, first, others = ModelRunner(raw, engine), prompt(5, 2), {1: prompt(30, 3), 2: prompt(20, 5), 4: prompt(50, 4)}
    shape: Any = {"chunk": 64, "max_prompt_tokens_per_pass": 40, "decodes_during_prefill": True}
    decoder = DecodingLoop(method.start(model, 5, 128), **shape)
    decoder.admit(0, Request(first, 40))
    texts: dict[int, list[int]] = {0: decoder.step().tokens[0], 1: [], 2: [], 4: []}
    for row, ids in others.items():
        decoder.admit(row, Request(ids, 20))
    passes: list[tuple[int, int]] = []  # (rows, tokens per row)
    run_layers = ModelRunner.run

    def counted(runner: ModelRunner, hidden: torch.Tensor, *args: Any) -> torch.Tensor:
        passes.append((hidden.shape[0], hidden.shape[1]))
        return run_layers(runner, hidden, *args)

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "run", counted)
        steps: list[Step] = []
        while decoder.session.prefilling:
            steps.append(decoder.step())
    prompts = [step for step in steps if step.prefill]
    if engine == "native":
        assert [list(map(len, step.tokens)) for step in steps] == [[1, 0, 1, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 0, 1]]
        assert len(passes) == len(steps), "20 + 20 tokens, 10 + 30, 20"
    else:
        assert [sorted(row for row in others if step.tokens[row]) for step in prompts] == [[2], [1], [], [4]]
        assert [step.prefill for step in steps] == [False, True] * 4, "the first row decodes in every second step"
        assert all(rows * width <= 40 for rows, width in passes if width > 5), "padding counts"
    for step in [*steps, *run(decoder)]:
        for row in texts:
            texts[row] += step.tokens[row]
    assert texts == {
        row: written(raw, method, ids, 40 if row == 0 else 20, engine) for row, ids in {0: first, **others}.items()
    }


def test_of_several_prompts_short_ones_overtake_a_long_one(raw: Any) -> None:
    method = skipstone.Autoregressive()
    decoder = DecodingLoop(
        method.start(ModelRunner(raw), 4, 512), chunk=80, max_prompt_tokens_per_pass=64, decodes_during_prefill=True
    )
    prompts = {3: prompt(70, 3), 1: prompt(400, 1), 2: prompt(70, 2), 0: prompt(70, 0)}
    for row, one in prompts.items():
        decoder.admit(row, Request(one, 4))
    first: list[int] = []
    texts: dict[int, list[int]] = {row: [] for row in prompts}
    for step in run(decoder):
        first += [row for row in prompts if step.tokens[row] and not texts[row]]
        for row in prompts:
            texts[row] += step.tokens[row]
    assert first == [3, 2, 0, 1]
    for row, one in prompts.items():
        assert texts[row] == written(raw, method, one, 4)
    for limit, size, together in ((64, 30, 2), (None, 70, 4)):  # short ones run together, up to the limit
        decoder = DecodingLoop(method.start(ModelRunner(raw), 4, 256), max_prompt_tokens_per_pass=limit)
        for row in range(4):
            decoder.admit(row, Request(prompt(size, row), 4))
        assert sum(map(bool, decoder.step().tokens)) == together


def test_a_long_prompt_waits_for_no_more_tokens_of_other_prompts_than_it_has(raw: Any) -> None:
    """Two short prompts, which fill a pass, arrive before every step."""
    method, limit = skipstone.Autoregressive(), 64
    decoder = DecodingLoop(method.start(ModelRunner(raw), 3, 512), chunk=limit, max_prompt_tokens_per_pass=limit)
    decoder.admit(0, Request(prompt(400, 1), 1))
    num_steps, is_finished = 0, False
    while not is_finished:
        for row in (1, 2):
            if decoder.rows[row] is None:
                decoder.admit(row, Request(prompt(limit // 2, row), 1))
        step = decoder.step()
        num_steps, is_finished = num_steps + 1, 0 in step.finished
        for row in step.finished:
            decoder.release(row)
        assert num_steps * limit <= 400 + 400 + limit, "as many of its own, and what a pass holds"
    assert num_steps > 8, "the short ones came first at first"


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_more_jobs_than_rows_are_all_written_as_alone(raw: Any, method: Method) -> None:
    heard = Heard()
    model_thread = ModelThread(ModelRunner(raw), AdmissionLimits(3, 128, 64, prefill_chunk_size=8), heard)
    requests = [job(4 + 7 * seed, seed, 12 + seed, method) for seed in range(9)]
    long = job(125, 1, 10, method)
    write_all(model_thread, heard, *requests, long)
    assert heard.ended[long].status == 400
    assert "128 tokens" in heard.ended[long].message
    assert_written(raw, heard, *requests)


@pytest.mark.parametrize(
    "kind", ["layerskip", "speculative", "adasd", "adasd, exact", "adadecode", "adadecode, lossy", "swift"]
)
def test_texts_that_depend_on_which_steps_draft_do_not_depend_on_prompts_of_others(raw: Any, kind: str) -> None:
    draft = near(raw, 0.05)
    methods: dict[str, Method] = {
        "layerskip": skipstone.LayerSkip(exit_layer=2, num_speculative_tokens=4),
        "speculative": skipstone.Speculative(draft, rejection_sample_method="standard"),
        "adasd": skipstone.AdaSD(draft, rejection_sample_method="coupled"),
        "adasd, exact": skipstone.AdaSD(draft, relaxed=False),
        "adadecode": skipstone.AdaDecode("original", 0.3, exit_layers=(1, 2)),
        "adadecode, lossy": skipstone.AdaDecode(
            "original", 0.3, exit_layers=(1, 2), verification=False, rejection_sample_method="coupled"
        ),
        "swift": skipstone.Swift(search="uniform", num_speculative_tokens=4, rejection_sample_method="standard"),
    }

    def texts(others: int) -> list[list[int]]:
        decoder = DecodingLoop(
            methods[kind].start(ModelRunner(raw), 5, 128), chunk=8, max_prompt_tokens_per_pass=8, decodes_during_prefill=True
        )
        for row in range(4):
            decoder.admit(row, Request(prompt(5, row), 40, sampling=skipstone.Sampling(1.0, seed=row)))
        written: list[list[int]] = [[] for _ in range(5)]
        for number, step in enumerate(run(decoder)):
            if number == 4 and others:
                decoder.admit(4, Request(prompt(60, 1), 5))
            for row, tokens in enumerate(step.tokens):
                written[row] += tokens
        return written[:4]

    assert texts(others=1) == texts(others=0)


def group_texts(group: BatchGroup, *requests: PendingRequest) -> list[list[int]]:
    texts: dict[PendingRequest, list[int]] = {pending: [] for pending in requests}
    group.send = lambda pending, event: texts[pending].extend(event.tokens) if isinstance(event, StepOutput) else None
    for pending in requests:
        group.admit(pending)
    while group.busy:
        group.step()
    return [*texts.values()]


def test_a_draft_model_that_catches_up_while_another_prompt_is_read(raw: Any) -> None:
    """Its store knows nothing of a prompt whose beginning the target's row has; to catch up it reads what all rows lack."""
    method = skipstone.Speculative(near(raw, 0.05))
    group = BatchGroup(ModelRunner(raw), method, 2, 256, 8, lambda *_: None)
    known, long = prompt(40, 1), prompt(100, 2)
    group_texts(group, PendingRequest(Request(known, 4), method))
    again = PendingRequest(Request(torch.cat([known, prompt(3, 3)]), 30), method)
    texts = group_texts(group, again, PendingRequest(Request(long, 20), method))
    assert again.stats.cached_tokens >= 40
    assert texts == [written(raw, method, again.request.prompt, 30), written(raw, method, long, 20)]


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_row_that_knows_the_beginning_of_a_prompt_runs_the_rest_alone(raw: Any, method: Method) -> None:
    group = BatchGroup(ModelRunner(raw), method, 2, 128, 16, lambda *_: None)
    first = prompt(40, 5)
    (answer,) = group_texts(group, PendingRequest(Request(first, 10), method))
    more = torch.cat([first, torch.tensor(answer), prompt(6, 6)])
    for ids, reused in ((more, 49), (first, 39), (torch.cat([first[:20], prompt(9, 7)]), 20), (prompt(30, 8), 0)):
        pending = PendingRequest(Request(ids, 12), method)
        assert group_texts(group, pending) == [written(raw, method, ids, 12)]
        assert pending.stats.cached_tokens == reused


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_the_beginning_of_a_prompt_is_copied_from_a_row_that_decodes(raw: Any, method: Method) -> None:
    group = BatchGroup(ModelRunner(raw), method, 2, 128, 16, lambda *_: None)
    one = PendingRequest(Request(prompt(40, 5), 30), method)
    two = PendingRequest(Request(torch.cat([prompt(40, 5)[:30], prompt(9, 7)]), 20), method)
    texts: dict[PendingRequest, list[int]] = {one: [], two: []}
    group.send = lambda pending, event: texts[pending].extend(event.tokens) if isinstance(event, StepOutput) else None
    group.admit(one)
    while not texts[one]:
        group.step()
    group.admit(two)
    while group.busy:
        group.step()
    assert two.stats.cached_tokens == 30
    assert texts == {pending: written(raw, method, pending.request.prompt, len(texts[pending])) for pending in texts}
    assert [*map(len, texts.values())] == [30, 20]


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_job_whose_logits_are_nan_fails_alone_and_leaves_a_clean_row(raw: Any, method: Method) -> None:
    ids, broken = [prompt(20, seed) for seed in range(4)], copy.deepcopy(raw)
    seen = {token for one in ids for token in [*one.tolist(), *written(raw, method, one, 8)]}
    bad = min(set(range(3, 90)) - seen)
    with torch.no_grad():
        broken.get_input_embeddings().weight[bad] = float("nan")
    heard = Heard()
    model_thread = ModelThread(ModelRunner(broken), AdmissionLimits(2, 128, 64, prefill_chunk_size=8), heard)
    spoiled = [PendingRequest(Request(torch.cat([one, torch.tensor([bad])]), 8), method) for one in ids]
    good = [PendingRequest(Request(one, 8), method) for one in ids]
    # a row is a good request's, then a spoiled one's, then a good one's again
    write_all(model_thread, heard, *(pending for pair in zip(spoiled, good, strict=True) for pending in pair))
    for pending in spoiled:
        assert (heard.ended[pending].reason, heard.ended[pending].status) == (FAILED, 500)
        assert "not finite" in heard.ended[pending].message
        assert pending not in heard.tokens
    assert_written(raw, heard, *good)


def test_a_job_that_is_cancelled_leaves_its_row_before_the_next_step_and_holds_up_no_other_method(raw: Any) -> None:
    heard = Heard()
    model_thread = ModelThread(ModelRunner(raw), AdmissionLimits(1, 4096, 8), heard)
    endless = job(5, 1, 4000)
    behind, other = (job(5, 2, 3, method) for method in METHODS[:2])
    model_thread.submit([endless])
    heard.until(lambda: endless in heard.tokens)
    for pending in (behind, other):
        model_thread.submit([pending])
    heard.all_of([other])
    assert behind not in heard.ended
    model_thread.cancel(endless)
    heard.all_of([endless, behind])
    assert heard.ended[endless].reason == CANCELLED
    assert len(heard.tokens[endless]) < 4000
    assert_written(raw, heard, behind)
    model_thread.cancel(endless)  # nothing happens
    assert model_thread.stop()
    assert (model_thread.scheduler.num_running, model_thread.scheduler.num_waiting) == (0, 0)


def test_what_was_learnt_is_saved_once_when_no_request_runs_and_at_the_end(raw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = queue.SimpleQueue[ModelRunner]()
    monkeypatch.setattr(model_thread_module, "IDLE_SECONDS", 0.01)
    monkeypatch.setattr(model_thread_module, "save_learned", saved.put)
    model_thread = ModelThread(runner := ModelRunner(raw), AdmissionLimits(1, 128, 8), Heard())
    time.sleep(0.05)
    assert saved.empty(), "there was no request"
    model_thread.submit([job(5, 1, 4)])
    assert saved.get(timeout=30) is runner
    time.sleep(0.05)
    assert saved.empty(), "nothing was learnt since"
    assert model_thread.stop()
    assert saved.get(timeout=30) is runner


def test_a_full_queue_refuses_and_a_job_that_takes_too_long_is_given_up(raw: Any) -> None:
    heard = Heard()
    model_thread = ModelThread(ModelRunner(raw), AdmissionLimits(1, 4096, 1), heard)
    slow = job(5, 1, 4000, timeout_seconds=0.3)
    model_thread.submit([slow])
    heard.until(lambda: slow in heard.tokens)
    waiting, third = (job(5, seed, 2) for seed in (2, 3))
    model_thread.submit([waiting])
    with pytest.raises(RequestError, match="waiting") as refused:
        model_thread.submit([third])
    assert (refused.value.status, refused.value.retry_after) == (429, 1)
    heard.all_of([slow, waiting])
    assert (heard.ended[slow].reason, heard.ended[waiting].reason) == (TIMEOUT, LENGTH)
    assert model_thread.stop()
    with pytest.raises(RequestError, match="shutting down"):
        model_thread.submit([waiting])


def test_biases_and_penalties_by_hand() -> None:
    """The prompt is 1, 2. Generated are 3 twice, and 4 and 5 once."""
    ids, scores = torch.tensor([[1, 2, 5, 3, 3, 4]]), torch.zeros(1, 6)
    assert Penalty(2, 0.5, 0.25)(ids, scores).tolist() == [[0.0, 0.0, 0.0, -1.0, -0.75, -0.75]]
    assert scores.sum() == 0


def test_a_step_that_fails_ends_its_jobs_and_no_others(raw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    heard, own = Heard(), DecodingLoop.step
    model_thread = ModelThread(ModelRunner(raw), AdmissionLimits(2, 256, 8), heard)
    broken = job(5, 1, 100, METHODS[1])
    whole = job(5, 2, 20)

    def step(decoder: DecodingLoop) -> Step:
        if any(state is not None and state.request is broken.request for state in decoder.rows):
            raise RuntimeError("planted")
        return own(decoder)

    monkeypatch.setattr(DecodingLoop, "step", step)
    model_thread.submit([broken])
    model_thread.submit([whole])
    heard.all_of([broken, whole])
    assert heard.ended[broken].reason == FAILED
    assert "planted" not in heard.ended[broken].message
    assert_written(raw, heard, whole)
    again = job(5, 3, 4, METHODS[1])
    write_all(model_thread, heard, again)
    assert heard.ended[again].reason == LENGTH
