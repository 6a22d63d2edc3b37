"""The loop: rows as slots of a server, chunked prefill, where tokens come from, what stops a row, transfers to the host."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from skipstone import (
    AdaDecode,
    AdaSD,
    Autoregressive,
    Jacobi,
    LayerSkip,
    Lookahead,
    Method,
    PromptLookup,
    Request,
    Sampling,
    SelfSpeculative,
    Speculative,
    Swift,
)
from skipstone.decoding.draft import GreedyVerdict, RowVerdict, Verdict
from skipstone.decoding.loop import DecodingLoop, run
from skipstone.decoding.stopping import RunningRequest
from skipstone.engines import host_transfer
from skipstone.engines.model_runner import ModelRunner
from skipstone.methods.drafting.chain import CHECK_EVERY
from tests.helpers import planted
from tests.helpers.machine import decode, llama, mistral, near, prompt, serve, start
from tests.helpers.pairwise import pairwise
from tests.helpers.trees import Trees

HELPER = near(llama(), 0.1)
METHODS: list[Method] = [
    Autoregressive(),
    LayerSkip(exit_layer=2, num_speculative_tokens=4),
    LayerSkip(exit_layer=2, num_speculative_tokens=5, confidence_threshold="adaptive"),
    LayerSkip(exit_layer=2, num_speculative_tokens=3, confidence_threshold="adaptive", rejection_sample_method="coupled"),
    LayerSkip(exit_layer=1, num_speculative_tokens=2, confidence_threshold=0.3, reuse_cache=False),
    Trees(nodes=7),
    Speculative(HELPER, 3),
    Speculative(HELPER, 2, "heuristic", rejection_sample_method="coupled"),
    AdaSD(HELPER, 6, relaxed=False),
    PromptLookup(),
    Jacobi(4),
    Lookahead(3, 3, 2),
    AdaDecode("original", 0.3, 4, exit_layers=(1, 2, 3)),
    SelfSpeculative((1,), (2,), num_speculative_tokens=4),
    Swift(0.5, 4, context_window=6),
]


@pytest.fixture(scope="module")
def model() -> ModelRunner:
    return ModelRunner(llama())


def queue() -> list[Request]:
    penalty: Any = RepetitionPenaltyLogitsProcessor(1.3)
    cases: list[tuple[int, int, dict[str, Any]]] = [
        (5, 14, {}),
        (11, 3, {"temperature": 1.0, "seed": 7}),
        (1, 9, {"temperature": 0.7, "top_k": 12, "seed": 7}),
        (30, 12, {"processors": [penalty]}),
        (7, 10, {"temperature": 1.2, "top_p": 0.9, "min_p": 0.01, "seed": 1}),
        (4, 17, {"temperature": 1.0, "seed": 3, "processors": [penalty]}),
        (19, 1, {}),
    ]
    return [
        Request(prompt(length, 50 + index), new, eos=frozenset({index, 90}), sampling=Sampling(**settings))
        for index, (length, new, settings) in enumerate(cases)
    ]


SETTINGS = (2, 3, 4, 7, 8, 10)
"""Places in METHODS of rows that differ from an earlier one by their settings, or draft like one: slow."""

SERVED = [
    pytest.param(llama, method, id=f"llama-{number}-{method.name}", marks=pytest.mark.slow if number in SETTINGS else [])
    for number, method in enumerate(METHODS)
]
SERVED += [pytest.param(llama, AdaSD(HELPER, 6), id="llama-adasd-relaxed")]
SERVED += [
    pytest.param(
        lambda: mistral(window=5), METHODS[place], id=f"sliding-{METHODS[place].name}", marks=[pytest.mark.slow] * (place != 5)
    )
    for place in (1, 5, 6, 11, 12, 13, 14)
]


@pytest.mark.parametrize(("build", "method"), SERVED)
def test_a_request_on_a_busy_server_gets_the_text_it_gets_alone(method: Method, build: Any) -> None:
    assert_served_as_alone(method, build, queue()[:5])


def assert_served_as_alone(method: Method, build: Any, requests: list[Request]) -> None:
    runner = ModelRunner(build())
    alone = [serve(method, runner, [request]) for request in requests]
    texts, traces = serve(method, runner, requests)
    backwards, _ = serve(method, runner, requests[::-1], chunk=100)
    assert texts == backwards[::-1] == [text for (text,), _ in alone]
    assert len({len(text) for text in texts}) >= 3
    for request, trace, (_, (own,)) in zip(requests, traces, alone, strict=True):
        # greedy rows may be probed, trees know their row, swift learns
        if request.sampling.temperature > 0 and method.name not in ("trees", "swift"):
            assert trace == own


def test_a_row_released_in_the_middle_disturbs_nobody(model: ModelRunner) -> None:
    method, requests = METHODS[1], [Request(prompt(n, n), 16, sampling=Sampling(1.0, seed=n)) for n in (4, 9, 6, 3)]
    alone = [decode(method, model, [request])[0][0] for request in requests]
    decoder = start(method, model, requests[:3])
    texts: list[list[int]] = [[] for _ in requests]
    for turn in range(100):
        if turn == 4:
            gone: Any = decoder.release(1)
            assert gone.tokens == texts[1] == alone[1][: len(texts[1])]
        if turn == 6:
            decoder.admit(1, requests[3])
        if not decoder.busy:
            break
        for row, tokens in enumerate(decoder.step().tokens):
            texts[3 if row == 1 and turn >= 6 else row] += tokens
    assert [texts[0], texts[2], texts[3]] == [alone[0], alone[2], alone[3]]
    assert 0 < len(texts[1]) < 16


def test_a_request_that_cannot_fit_is_refused_before_anything_changes(model: ModelRunner) -> None:
    decoder = DecodingLoop(Autoregressive().start(model, 2, 20))
    with pytest.raises(ValueError, match=r"prompt of 12 tokens \+ max_new_tokens=9 is more than the 20 tokens"):
        decoder.admit(0, Request(prompt(12), 9))
    assert not decoder.busy
    decoder.admit(0, Request(prompt(12), 8))
    assert sum(len(step.tokens[0]) for step in run(decoder)) == 8


@pytest.mark.parametrize(("chunk", "temperature"), [(1, 0.0), (5, 1.0)])
def test_chunked_prefill_equals_one_chunk(chunk: int, temperature: float) -> None:
    runner = ModelRunner(mistral(window=6))
    requests = [Request(prompt(n, n), 6, sampling=Sampling(temperature, seed=n)) for n in (13, 2, 7)]
    expected, _, whole = decode(METHODS[1], runner, requests)
    texts, _, steps = decode(METHODS[1], runner, requests, chunk=chunk, check=True)
    assert texts == expected
    assert [step.prefill for step in whole].count(True) == 1
    assert all(not any(step.drafted) for step in steps if step.prefill)
    assert -(-13 // chunk) <= sum(step.prefill for step in steps) <= sum(-(-n // chunk) for n in (13, 2, 7))


def test_the_stopping_rules_cut_in_one_place() -> None:
    """Length, end tokens and criteria; a criterion sees the row's own ids after every single token."""
    seen: list[list[int]] = []

    def criterion(ids: Any, _: None) -> torch.Tensor:
        seen.append(ids[0].tolist())
        return torch.tensor([ids[0, -1] == 8])

    for tokens, given, kept, finished in (
        ([5, 6, 7], {}, 3, False),
        ([5, 6, 7], {"max_new_tokens": 2}, 2, True),
        ([5, 6, 7], {"eos": frozenset({5})}, 1, True),
        ([5, 6, 7], {"eos": frozenset({7})}, 3, True),
        ([5, 8, 7], {"criteria": [criterion]}, 2, True),
    ):
        verdict = RowVerdict([0, 1], [*tokens], "bonus", 3, 0)
        RunningRequest(Request(torch.tensor([1, 2]), **{"max_new_tokens": 9, **given})).take(verdict)
        assert (verdict.tokens, verdict.path, verdict.finished) == (tokens[:kept], [0, 1][:kept], finished)
        assert verdict.origin == ["draft", "draft", "bonus"][:kept]
    assert seen == [[1, 2, 5], [1, 2, 5, 8]]


class Transfers(TorchDispatchMode):
    """Counts the operations that an accelerator would have to wait for."""

    waits = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in self.waits:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


WAITING = [
    METHODS[0],
    METHODS[1],
    replace(METHODS[1], rejection_sample_method="coupled"),
    replace(METHODS[1], confidence_threshold=0.3),
    replace(METHODS[1], confidence_threshold="adaptive"),
    *METHODS[-9:],
    AdaSD(HELPER, 6),
]


@pytest.mark.parametrize(
    ("method", "temperature"),
    [
        pytest.param(method, warm, id=f"{index}-{method.name}-{warm}", marks=[] if index % 2 == place else pytest.mark.slow)
        for index, method in enumerate(WAITING)
        for place, warm in enumerate((0.0, 1.0))
    ],
)
def test_a_decoding_step_makes_one_transfer_to_the_host(
    method: Method, temperature: float, model: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The `tolist` of the verdict, once. AdaDecode makes another for every test of an exit, because the next layers depend on
    it. A chain that ends with an unsure token makes another for every four drafts but the last. Reads on the CPU are off."""
    monkeypatch.setattr(host_transfer, "is_on_host", lambda tensor: False)
    listed: list[str] = []
    own = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: listed.append("tensor") or own(self))
    for kind in (Verdict, GreedyVerdict):
        theirs = kind.tolist
        monkeypatch.setattr(kind, "tolist", lambda self, draft, theirs=theirs: listed.append("verdict") or theirs(self, draft))
    decoder = start(method, model, ending_requests(frozenset({0, 1}), temperature))
    session: Any = decoder.session
    has_exits = isinstance(method, AdaDecode)
    decoder.step()
    for _ in range(4):
        listed.clear()
        tested = session.drafter.tallies.tests if has_exits else 0
        with Transfers() as counted:
            decoder.step()
        tested = session.drafter.tallies.tests - tested if has_exits else 0
        assert counted.found == []
        assert listed.count("verdict") == 1
        assert (tested > 0) == has_exits
        one_by_one = isinstance(method, AdaSD) and (temperature > 0 or not model.engine.supports_chains)
        checks = (method.window - 1) // CHECK_EVERY if one_by_one else 0
        assert listed.count("tensor") == 1 + tested + checks


@pairwise(rule=["standard", "coupled"], threshold=[None, 0.3, "adaptive"], temperature=[0.0, 1.2])
def test_reads_on_the_cpu_change_no_text(
    rule: Any, threshold: Any, temperature: float, model: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU drafts end sooner, or nodes are decided one by one; the tokens are those of an accelerator."""
    method, requests = LayerSkip(2, 5, threshold, True, rule), ending_requests(frozenset({5, 60}), temperature)
    texts, stats, _ = decode(method, model, requests)
    assert stats.drafted > stats.accepted > 0
    monkeypatch.setattr(host_transfer, "is_on_host", lambda tensor: False)
    assert decode(method, model, requests)[0] == texts


def ending_requests(eos: frozenset[int], temperature: float) -> list[Request]:
    return [Request(prompt(n, n), 24, eos=eos, sampling=Sampling(temperature, seed=n)) for n in (4, 9, 6)]


@planted.found_by((planted.threshold_left_by_the_last_request, lambda: assert_served_as_alone(METHODS[2], llama, queue())))
def test_planted_bugs_are_found(plant: Any, proof: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.assert_found(plant, proof, monkeypatch)
