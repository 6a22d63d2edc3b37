"""Rows that decode next to prompts, and prefixes copied from other rows: texts and reports stay those of a request
alone."""

from typing import Any

import pytest
import torch

import skipstone
from skipstone.decoding.draft import Step
from skipstone.decoding.method import Method
from skipstone.decoding.request import Request
from skipstone.decoding.sampling import Sampling
from skipstone.engines.model_runner import ModelRunner
from skipstone.serving.batch_group import BatchGroup
from skipstone.serving.metrics import Metrics
from skipstone.serving.pending_request import PendingRequest, StepOutput
from skipstone.serving.request_parser import Penalty
from tests.helpers.machine import decode, llama, near, prompt

pytestmark = pytest.mark.filterwarnings("ignore:.*x the speed of plain decoding:RuntimeWarning")
CHUNK = 16


@pytest.fixture(scope="module")
def raw() -> Any:
    return llama()


@pytest.fixture(scope="module")
def draft(raw: Any) -> Any:
    return near(raw, 0.05)


class Group(BatchGroup):
    """A batch group that keeps its outputs. After every step the cache of every row is that of a new forward."""

    def __init__(self, model: ModelRunner, method: Method, checks: bool = True) -> None:
        super().__init__(model, method, 3, 128, CHUNK, self.keep)
        self.outputs: dict[PendingRequest, list[StepOutput]] = {}
        self.checks = checks

    def keep(self, pending: PendingRequest, event: Any) -> None:
        if isinstance(event, StepOutput):
            self.outputs.setdefault(pending, []).append(event)

    def text(self, pending: PendingRequest) -> list[int]:
        return [token for output in self.outputs.get(pending, []) for token in output.tokens]

    def step(self) -> Step:
        step = super().step()
        for row, pending in enumerate(self.requests):
            if self.checks and pending is not None and self.loop.session.alive[row]:
                tokens = [*pending.prompt_ids, *self.text(pending)]
                self.loop.session.check(row, torch.tensor(tokens))
        return step

    def finish(self) -> None:
        while self.busy:
            self.step()


def plain_text(model: ModelRunner, request: Request) -> list[int]:
    return decode(skipstone.Autoregressive(), model, [request])[0][0]


SAMPLED = Sampling(0.9, top_p=0.95, seed=3)
COUPLED: Any = {"rejection_sample_method": "coupled"}
CASES: dict[str, tuple[Any, Sampling, dict[str, Any]]] = {
    "draft model": (lambda draft: skipstone.Speculative(draft, 4), Sampling(), {}),
    "draft model, sampled": (lambda draft: skipstone.Speculative(draft, 4, **COUPLED), SAMPLED, {}),
    "layerskip, sampled": (lambda _: skipstone.LayerSkip(2, 4, **COUPLED), SAMPLED, {}),
    "lookahead": (lambda _: skipstone.Lookahead(), Sampling(), {}),
    "recycle, sampled": (lambda _: skipstone.Recycle(), SAMPLED, {}),
    "swift": (lambda _: skipstone.Swift(0.5, 4, search="uniform"), Sampling(), {}),
    "penalties": (lambda _: skipstone.LayerSkip(2, 4), Sampling(processors=[Penalty(40, 0.5, 0.25)]), {}),
    "bfloat16 cache": (lambda _: skipstone.LayerSkip(2, 4), Sampling(), {"kv_dtype": "bfloat16"}),
    "eager": (lambda _: skipstone.LayerSkip(2, 4), Sampling(), {"engine": "eager"}),
}
"""Name -> (method of a draft model, sampling of both requests, options of the engine)."""


@pytest.mark.parametrize("case", CASES)
def test_a_prefix_that_is_copied_from_a_busy_row_changes_no_text(raw: Any, draft: Any, case: str) -> None:
    make, sampling, options = CASES[case]
    model = ModelRunner(raw, **options)
    group = Group(model, make(draft))
    first = prompt(40, 5)
    requests = [Request(first, 40, sampling=sampling), Request(torch.cat([first[:30], prompt(9, 7)]), 30, sampling=sampling)]
    one, two = (PendingRequest(request, group.method) for request in requests)
    group.admit(one)
    while len(group.text(one)) < 3:
        group.step()
    group.admit(two)
    assert group.requests[0] is one, "it is still running"
    group.finish()
    assert two.stats.cached_tokens == 30
    assert [group.text(one), group.text(two)] == [plain_text(model, request) for request in requests]


@pytest.mark.parametrize("num_steps", [0, 1, 2])
@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_prefix_ends_at_the_tokens_that_a_row_has_run(raw: Any, draft: Any, num_steps: int, is_cancelled: bool) -> None:
    model = ModelRunner(raw)
    group = Group(model, skipstone.Speculative(draft, 4))
    requests = [Request(prompt(60, 5), 20), Request(torch.cat([prompt(60, 5)[:50], prompt(9, 7)]), 20)]
    one, two = (PendingRequest(request, group.method) for request in requests)
    group.admit(one)
    for _ in range(num_steps):
        group.step()
    if is_cancelled:
        group.drop(one)
    group.admit(two)
    assert two.stats.cached_tokens == num_steps * CHUNK
    group.finish()
    assert group.text(two) == plain_text(model, requests[1])
    assert group.text(one) == ([] if is_cancelled else plain_text(model, requests[0]))


@pytest.mark.parametrize(
    "sampling", [Sampling(), SAMPLED, Sampling(processors=[Penalty(5, 0.5, 0.25)])], ids=["greedy", "sampled", "penalty"]
)
@pytest.mark.parametrize("kind", ["plain", "layerskip", "auto"])
def test_probabilities_and_details_next_to_prompts_are_those_of_a_request_alone(
    raw: Any, kind: str, sampling: Sampling
) -> None:
    layerskip = skipstone.LayerSkip(2, 4, **COUPLED)
    methods: dict[str, Method] = {
        "plain": skipstone.Autoregressive(),
        "layerskip": layerskip,
        "auto": skipstone.Auto((skipstone.PromptLookup(), layerskip)),
    }
    model, method = ModelRunner(raw), methods[kind]
    extras: Any = {"num_logprobs": 2, "wants_details": True}

    def reports(*others: PendingRequest) -> list[tuple[int, float, list[int], float]]:
        group, pending = Group(model, method), PendingRequest(Request(prompt(5), 30, sampling=sampling), method, **extras)
        group.admit(pending)
        for other in others:
            group.step()
            group.admit(other)
        group.finish()
        if others and model.engine.skips_padding:
            assert [output.drafted for output in group.outputs[pending][1:5]] == [0] * 4, "60 + 50 tokens of prompts, 16 a row"
        found = []
        for output in group.outputs[pending]:
            assert output.logprobs is not None
            assert output.details is not None
            for token, logprob, details in zip(output.tokens, output.logprobs, output.details.tokens, strict=True):
                assert (details.token, details.model) == (
                    token,
                    pytest.approx(torch.tensor(logprob.logprob).exp().item(), rel=1e-4),
                )
                found.append((token, pytest.approx(logprob.logprob, rel=1e-4), [one for one, _ in logprob.top]))
        assert pending.stats.steps == len(group.outputs[pending]) - 1
        if kind == "auto":
            assert sum(pending.stats.drafters.values()) == pending.stats.steps, "steps next to prompts are plain ones"
        return found

    others = [PendingRequest(Request(prompt(60, 1), 5), method), PendingRequest(Request(prompt(50, 2), 5), method, **extras)]
    assert reports(*others) == reports()


def test_a_row_that_decodes_next_to_prompts_is_a_plain_step_without_the_drafters_time(raw: Any, draft: Any) -> None:
    model, method = ModelRunner(raw, "native"), skipstone.Speculative(draft, 4)
    group, metrics = Group(model, method), Metrics("a model")
    one, two = PendingRequest(Request(prompt(5), 30), method), PendingRequest(Request(prompt(60, 1), 3), method)
    group.admit(one)
    group.step()
    group.admit(two)
    steps = [group.step() for _ in range(4)]
    assert [step.decoding_rows for step in steps] == [[0]] * 4, "the last one also has the other row's first token"
    assert steps[-1].origin[1] == ["prefill"]
    assert all(step.seconds_draft > 0 for step in steps), "the draft model read the other prompt"
    for step in steps:
        metrics.step("speculative", step)
    counters = metrics.text().decode()
    assert 'spec_decode_steps_total{method="plain",model_name="a model"} 4.0' in counters
    assert 'spec_decode_draft_seconds_total{model_name="a model"} 0.0' in counters
    assert [output.milliseconds[0] for output in group.outputs[one][1:]] == [0.0] * 4
    assert group.outputs[two][0].milliseconds[0] > 0
