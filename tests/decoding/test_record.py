"""Figures of steps by hand, and their records: committed tokens with their probabilities, and rejected drafts."""

import json
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

import skipstone
from skipstone import Autoregressive, Draft, LayerSkip, Method, Request, Sampling, Stats, Step
from skipstone.decoding.draft import TokenRecord
from skipstone.decoding.drafter import Drafter
from skipstone.decoding.loop import DecodingLoop, run
from skipstone.decoding.output_recorder import OutputRecorder
from skipstone.engines.engine import SurvivalThresholds
from skipstone.engines.model_runner import ModelRunner
from skipstone.utils.setup_times import setup_work
from tests.helpers.machine import decode, llama, prompt, start
from tests.helpers.trees import Trees


@pytest.fixture(scope="module")
def model() -> ModelRunner:
    return ModelRunner(llama())


def kept(method: Method, model: ModelRunner, requests: list[Request], keeper: OutputRecorder) -> list[Step]:
    decoder = start(method, model, requests)
    decoder.recorder = keeper
    return list(run(decoder))


def asked(temperature: float) -> list[Request]:
    return [Request(prompt(n, n), 10 + n, sampling=Sampling(temperature, top_k=30, seed=n)) for n in (4, 9, 6)]


def rows(steps: list[Step], row: int) -> list[TokenRecord]:
    return [record for step in steps if step.records is not None for record in step.records[row]]


SKIP = LayerSkip(exit_layer=2, num_speculative_tokens=4)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("method", [SKIP, Trees(nodes=8)], ids=["layerskip", "trees"])
def test_records_of_a_row_do_not_depend_on_its_neighbours(method: Method, temperature: float, model: ModelRunner) -> None:
    requests = asked(temperature)
    texts, _, _ = decode(Autoregressive(), model, requests)
    for index in range(3):
        ends = [replace(r, eos=frozenset({text[5 + index]})) for r, text in zip(requests, texts, strict=True)]
        together = kept(method, model, ends, OutputRecorder(record=True))
        for row, request in enumerate(ends[:1] if method.name == "trees" else ends):  # the dice of trees know the row
            alone = rows(kept(method, model, [request], OutputRecorder(record=True)), 0)
            for a, b in zip(rows(together, row), alone, strict=True):
                assert (a.token, a.accepted, a.exit_layer) == (b.token, b.accepted, b.exit_layer)
                assert (a.p, a.entropy) == pytest.approx((b.p, b.entropy), abs=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_recorder_of_logits_runs_no_processor_again(temperature: float, model: ModelRunner) -> None:
    calls: list[int] = []

    def counting(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        calls.append(len(ids[0]))
        return scores

    request = Request(prompt(4, 4), 10, sampling=Sampling(temperature, processors=(counting,)))
    kept(SKIP, model, [request], OutputRecorder())
    num_calls = len(calls)
    assert any(step.logits for step in kept(SKIP, model, [request], OutputRecorder(logits=True)))
    assert len(calls) == 2 * num_calls


def test_probabilities_and_entropy_are_the_targets_own(model: ModelRunner) -> None:
    """p after warpers, the entropy at temperature 1 before them (in nats), by transformers' forward; q the draft's."""
    request = Request(prompt(5), 16, sampling=Sampling(0.7, top_k=5, seed=2))
    (text,), _, _ = decode(SKIP, model, [request])
    steps = kept(SKIP, model, [request], OutputRecorder(record=True))
    ids = torch.cat([request.prompt, torch.tensor(text)])[None]
    with torch.no_grad():
        output: Any = model.model(input_ids=ids, output_hidden_states=True)
        exits = model.head(model.decoder.norm(output.hidden_states[2][0]))
    done = 0
    rejected = 0
    for step in steps:
        assert step.records is not None
        committed = [r for r, _ in zip(step.records[0], step.tokens[0], strict=False)]
        assert [r.token for r in committed] == step.tokens[0]
        assert [r.accepted for r in committed] == [origin == "draft" for origin in step.origin[0]]
        for place, record in enumerate(committed):
            at = len(request.prompt) + done + place - 1
            scores = output.logits[0, at].double()
            best = (scores / 0.7).topk(5)
            p = dict(zip(best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True))
            full = scores.softmax(-1)
            assert record.p == pytest.approx(p[record.token], abs=1e-4)
            assert record.entropy == pytest.approx(float(-(full * full.log()).sum()), abs=1e-3)
            early = (exits[at].double() / 0.7).topk(5)
            q = dict(zip(early.indices.tolist(), early.values.softmax(-1).tolist(), strict=True))
            assert record.q == (pytest.approx(q[record.token], abs=1e-4) if record.accepted else None)
        for record in step.records[0][len(committed) :]:
            assert not record.accepted
            assert record.q is not None
            assert record.q > 0
            rejected += 1
        assert (len(step.records[0]) > len(committed)) == ("recovered" in step.origin[0])
        done += len(step.tokens[0])
    assert done == 16
    assert rejected > 0


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_logits_and_scores_are_those_that_plain_decoding_keeps(temperature: float, model: ModelRunner) -> None:
    """One row of [k, V] per committed token, from the node that the token followed, in trees too."""
    requests = asked(temperature)

    def whole(method: Method, name: str) -> list[torch.Tensor]:
        steps = kept(method, model, requests, OutputRecorder(logits=True, scores=True))
        return [torch.cat([getattr(step, name)[row] for step in steps]) for row in range(3)]

    for name in ("logits", "scores"):
        expected = whole(Autoregressive(), name)
        assert [len(part) for part in expected] == [request.max_new_tokens for request in requests]
        for found, plain in zip(whole(Trees(nodes=8), name), expected, strict=True):
            torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-3)


def test_what_a_recorder_takes_is_no_cost_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` would think that decoding is slow. The clock stands still but in the recorder."""
    clock = [0.0]
    method, model = Autoregressive(), ModelRunner(llama())
    recorder = lambda *_: clock.append(clock[-1] + 100)  # noqa: E731
    decoder = DecodingLoop(method.start(model, 1, 20), recorder=recorder)
    decoder.admit(0, Request(prompt(5), 4))
    decoder.step()
    monkeypatch.setattr(time, "perf_counter", lambda: clock[-1])
    step = decoder.step()
    assert (len(clock), step.seconds) == (3, 0)


@dataclass(frozen=True)
class Scripted(Method):
    """Proposes given chains to row 0, one a step."""

    name: ClassVar[str] = "scripted"
    chains: tuple[tuple[int, ...], ...] = ()

    def create_drafter(self, model: ModelRunner, rows: int, capacity: int) -> Drafter:
        return ScriptedDrafter(self.chains)


class ScriptedDrafter(Drafter):
    def __init__(self, chains: tuple[tuple[int, ...], ...]) -> None:
        self.chains = deque(chains)

    def propose_draft(self, limits: list[int], stop_rule: SurvivalThresholds | None = None) -> Draft:
        view = self.view
        chain = self.chains.popleft() if self.chains else ()
        forward = view.start_forward([len(chain)] * view.rows)
        if not chain:
            return Draft.empty(view.rows, view.root.device, forward)
        tokens = torch.tensor([chain])
        forward.append(tokens)
        return Draft(tokens, torch.ones_like(tokens, dtype=torch.bool), forward, draft_steps=torch.tensor([len(chain) + 1]))


def test_origins_and_figures_of_a_trace_made_by_hand() -> None:
    """Right drafts of 3 of 4; both of 2; none of 1; no draft; then an end token inside a chain of 3."""
    model = ModelRunner(llama())
    asked = Request(prompt(6, 2), 14, sampling=Sampling(1.0, seed=4))
    text = decode(Autoregressive(), model, [asked])[0][0]
    wrong = next(token for token in range(97) if token not in text)
    chains = ((text[1], text[2], text[3], wrong), (text[5], text[6]), (wrong,), (), (text[10], text[11], text[12]))
    ending = replace(asked, eos=frozenset({text[11]} - set(text[:11])))
    assert ending.eos, "the end token occurs first where the trace ends"
    found, figures, steps = decode(Scripted(chains), model, [ending], check=True)
    assert found == [text[:12]]
    assert [step.tokens[0] for step in steps] == [text[:1], text[1:5], text[5:8], text[8:9], text[9:10], text[10:12]]
    assert [step.origin[0] for step in steps] == [
        ["prefill"],
        ["draft", "draft", "draft", "recovered"],
        ["draft", "draft", "bonus"],
        ["recovered"],
        ["bonus"],
        ["draft", "draft"],
    ]
    assert [step.drafted[0] for step in steps] == [step.verified_nodes for step in steps] == [0, 4, 2, 1, 0, 3]
    assert [step.accepted[0] for step in steps] == [0, 3, 2, 0, 0, 2]
    assert [step.finished for step in steps] == [[], [], [], [], [], [0]]
    assert (figures.prefill_tokens, figures.tokens, figures.steps, figures.turns) == (1, 11, 5, 5)
    assert (figures.drafted, figures.draft_steps, figures.accepted, figures.verified_nodes) == (10, 5 + 3 + 2 + 0 + 4, 7, 10)
    assert figures.acceptance_rate == 7 / 14
    assert figures.mean_acceptance_length == 1 + 7 / 5
    assert dict(figures.histogram) == {3: 1, 2: 2, 0: 2}


def stepped(**given: Any) -> Step:
    base: dict[str, Any] = {
        "tokens": [[1, 2, 3], [4]],
        "origin": [["draft", "draft", "recovered"], ["recovered"]],
        "drafted": [4, 4],
        "draft_steps": [4, 4],
        "accepted": [2, 0],
        "overruled": [1, 0],
        "verified_nodes": 8,
        "seconds_draft": 0.4,
        "seconds_score": 0.5,
        "seconds_other": 0.1,
    }
    return Step(**{**base, **given})


@dataclass(frozen=True)
class Slow(Scripted):
    """Everything takes time: its check 1 s, a copy 10 s, its drafter 100 s, its prompt .1 s, a draft .01 s, learning .001 s."""

    name: ClassVar[str] = "slow"
    clock: Any = None

    def check(self, model: ModelRunner) -> None:
        self.clock(1.0)
        with setup_work("int4 copy"):
            self.clock(10.0)

    def create_drafter(self, model: ModelRunner, rows: int, capacity: int) -> Drafter:
        self.clock(100.0)
        drafter: Any = super().create_drafter(model, rows, capacity)
        propose_empty_draft = drafter.propose_draft

        def propose_draft(limits: list[int]) -> Draft:
            self.clock(0.01)
            with setup_work("graphs"):
                self.clock(0.005)
            return propose_empty_draft(limits)

        drafter.prefill_tokens, drafter.propose_draft = lambda *_: self.clock(0.1), propose_draft
        drafter.observe_step = lambda _: self.clock(0.001)
        return drafter


def test_all_time_from_the_call_to_the_last_token_is_counted(model: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stands still but where the method works."""
    clock = [0.0]

    def work(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    output = skipstone.generate(model.model, prompt(6, 2)[None], Slow(clock=work), max_new_tokens=4)
    stats = output.stats
    assert stats is not None
    assert stats.setup == pytest.approx({"request": 1.0, "int4 copy": 10.0, "drafters": 100.0, "graphs": 3 * 0.005})
    assert stats.seconds_prefill == pytest.approx(0.1 + 0.001)
    assert stats.seconds_draft == pytest.approx(3 * 0.01)
    assert stats.seconds == pytest.approx(3 * 0.011)
    assert stats.seconds_total == pytest.approx(clock[0])
    assert stats.tokens_per_second == pytest.approx(4 / clock[0])
    assert stats.steady_tokens_per_second == pytest.approx(3 / 0.033)
    assert stats.speed_up(plain_seconds=0.02) == pytest.approx((0.001 + 3 * 0.02) / clock[0]), "its drafter read the prompt"
    assert stats.steady_speed_up(plain_seconds=0.02) == pytest.approx(0.02 / 0.011)


def test_stats_are_a_fold_over_steps_pooled_not_averaged() -> None:
    stats, none = Stats(), {"drafted": [0, 0], "draft_steps": [0, 0], "accepted": [0, 0]}
    stats.add(stepped(prefill=True, tokens=[[9], [9]], origin=[["prefill"]] * 2, setup={"drafters": 2.0}, **none))
    stats.add(stepped(setup={"drafters": 0.5, "int4 copy": 1.5}))
    stats.add(stepped(tokens=[[1, 2, 3, 4, 5], []], accepted=[4, 0], drafted=[4, 0], draft_steps=[4, 0], verified_nodes=4))
    stats.add(stepped(probe=True, tokens=[[7], []], verified_nodes=0, **none))
    assert (stats.prefill_tokens, stats.tokens, stats.turns, stats.steps, stats.probes) == (2, 10, 2, 3, 1)
    assert (stats.acceptance_rate, stats.mean_acceptance_length) == (6 / 12, 1 + 6 / 3)
    assert dict(stats.histogram) == {2: 1, 0: 1, 4: 1}
    assert (stats.overruled, stats.verified_nodes) == (2, 12)
    assert (stats.seconds, stats.seconds_prefill) == (pytest.approx(3.0), pytest.approx(1.0))
    assert stats.tokens_per_second == pytest.approx(12 / 8)
    assert stats.setup == {"drafters": 2.5, "int4 copy": 1.5}
    summary = json.loads(json.dumps(stats.summary()))
    assert (summary["new_tokens"], summary["acceptance_histogram"]) == (12, {"0": 1, "2": 1, "4": 1})
    total = Stats.total([stats, stats, Stats()])
    assert (total.tokens, total.accepted, total.turns, dict(total.histogram)) == (20, 12, 4, {2: 2, 0: 2, 4: 2})
    assert total.seconds == pytest.approx(6.0)
    assert Stats.from_summary(total.summary()) == total
    assert (Stats().acceptance_rate, Stats().mean_acceptance_length, Stats().tokens_per_second) == (0, 1, 0)


def test_rows_that_decode_next_to_prompts_count_as_plain_and_first_tokens_as_the_prompts() -> None:
    none = {name: [0, 0, 0] for name in ("drafted", "draft_steps", "accepted", "overruled")}
    origin = [["bonus"], ["prefill"], []]
    step = stepped(prefill=True, tokens=[[7], [8], []], origin=origin, verified_nodes=0, **none)
    assert step.decoding_rows == [0]
    (stats := Stats()).add(step)
    assert (stats.prefill_tokens, stats.tokens, stats.turns, stats.steps, stats.drafting) == (1, 1, 1, 1, 0)
    assert (dict(stats.histogram), stats.seconds, stats.seconds_prefill) == ({0: 1}, pytest.approx(1.0), 0)


def test_the_bound_of_the_speed_up_by_hand() -> None:
    """A step of 1.0 s: four draft passes .4, scoring .5, other .1. Plain decoding costs at most .1 + .5 a token."""
    stats, probe = Stats(), {"probe": True, "seconds_draft": 0.0, "seconds_score": 0.35, "seconds_other": 0.05}
    assert stats.speed_up_bounds is None
    for count, drafts, more in ((3, 4, {}), (1, 4, {}), (1, 0, probe)):
        one = {"tokens": [[1] * count], "drafted": [drafts], "draft_steps": [drafts], "accepted": [count - 1]}
        stats.add(stepped(origin=[[]], overruled=[0], **one, **more))
    assert stats.speed_up_bounds == pytest.approx((1.2, 1.2))
    prompt_run = {"prefill": True, "tokens": [[1]], "origin": [["prefill"]], "setup": {"draft model": 5.0}}
    stats.add(stepped(seconds_draft=1.0, seconds_score=2.0, seconds_other=0.0, **prompt_run))
    assert stats.speed_up_bounds == pytest.approx(((2.0 + 2.4) / (5.0 + 3.0 + 2.0), 1.2)), "plain decoding has no draft model"
