"""What is kept of a step: every committed token with its probabilities, and the drafts that were rejected beside it."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from skipstone import Autoregressive, LayerSkip, Method, Request, Sampling, Step
from skipstone.decoding.draft import TokenRecord
from skipstone.decoding.loop import DecodingLoop, run
from skipstone.decoding.output_recorder import OutputRecorder
from skipstone.engines.model_runner import ModelRunner
from tests.helpers.machine import decode, llama, prompt, start
from tests.helpers.trees import Trees

LENGTHS = (4, 9, 6)


@pytest.fixture(scope="module")
def model() -> ModelRunner:
    return ModelRunner(llama())


def kept(method: Method, model: ModelRunner, requests: list[Request], keeper: OutputRecorder) -> list[Step]:
    decoder = start(method, model, requests)
    decoder.recorder = keeper
    return list(run(decoder))


def asked(temperature: float) -> list[Request]:
    return [Request(prompt(n, n), 10 + n, sampling=Sampling(temperature, top_k=30, seed=n)) for n in LENGTHS]


def rows(steps: list[Step], row: int) -> list[TokenRecord]:
    return [record for step in steps if step.records is not None for record in step.records[row]]


SKIP = LayerSkip(exit_layer=2, num_speculative_tokens=4)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("method", [SKIP, Trees(nodes=8)], ids=["layerskip", "trees"])
def test_records_of_a_row_do_not_depend_on_its_neighbours(method: Method, temperature: float, model: ModelRunner) -> None:
    """The rows end at different steps, some of them on an end token inside a draft."""
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
