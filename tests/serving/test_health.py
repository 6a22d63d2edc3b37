"""What is said when the model's thread dies: nobody waits for ever, and /health tells. And of what it dies."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

import skipstone
from skipstone.decoding.draft import Step
from skipstone.decoding.loop import DecodingLoop
from skipstone.decoding.request import Request
from skipstone.engines.model_runner import ModelRunner
from skipstone.serving import logs
from skipstone.serving.app import make_app
from skipstone.serving.errors import RequestError
from skipstone.serving.model_thread import THREAD_FAILED, MethodSteps, ModelThread, RequestEvents
from skipstone.serving.pending_request import FAILED, LENGTH, PendingRequest, RequestEnd
from skipstone.serving.scheduler import AdmissionLimits, Scheduler
from skipstone.serving.server import Server
from skipstone.serving.settings import ServerSettings
from tests.helpers import dying, families

LONG = {"prompt": "def add(a, b):", "max_tokens": 900, "temperature": 0, "ignore_eos": True, "speculative": "off"}


ENOUGH = 30
"""Seconds that nothing takes here."""


@pytest.fixture
def deadly(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """When it is set, the model's thread dies at its next turn."""
    now = threading.Event()
    monkeypatch.setattr(Scheduler, "expire_requests", Scheduler.expire_requests)  # which is set back afterwards
    dying.plant(now)
    return now


def test_a_thread_that_dies_is_told_by_health_and_to_all_who_wait(deadly: threading.Event, caplog: Any) -> None:
    model, calls = skipstone.load(None), list[str]()
    server = Server(lambda: model, ServerSettings(max_num_seqs=1, drain_seconds=5))
    server.failed = lambda: calls.append(server.health[0])
    with TestClient(make_app(server)) as client:
        while client.get("/health").status_code != 200:
            time.sleep(0.01)
        answers: list[Any] = []
        asking = [threading.Thread(target=lambda: answers.append(client.post("/v1/completions", json=LONG))) for _ in range(2)]
        for one in asking:  # one has the row, the other waits for it
            one.start()
        while '_waiting{model_name="skipstone-nano"} 1.0' not in client.get("/metrics").text:
            time.sleep(0.01)
        deadly.set()
        for one in asking:
            one.join(30)
        assert [answer.status_code for answer in answers] == [500, 500]
        assert [answer.json()["error"]["message"] for answer in answers] == [THREAD_FAILED] * 2
        health = client.get("/health")
        assert health.status_code == 503
        assert health.json() == {"status": "failed", "reason": THREAD_FAILED}
        late = client.post("/v1/completions", json=LONG)
        assert late.status_code == 503
        assert late.json()["error"]["message"] == THREAD_FAILED
        assert "Retry-After" not in late.headers | health.headers, "nothing comes back here"
        assert calls == ["failed"]
        metrics = client.get("/metrics").text
        assert 'num_requests_running{model_name="skipstone-nano"} 0.0' in metrics
        assert 'request_success_total{finished_reason="error",model_name="skipstone-nano"} 2.0' in metrics
    (record,) = [one for one in caplog.records if one.name == "skipstone.serving.model_thread"]
    told = json.loads(logs.JsonFormatter().format(record))
    assert (told["level"], told["error"]) == ("error", "Planted")
    assert "in expire" in told["traceback"]


def test_a_job_that_comes_while_the_thread_dies_is_told_or_refused(deadly: threading.Event) -> None:
    """Whatever the moment: a request that was taken ends."""
    raw = families.build("llama", max_position_embeddings=8192)
    for count in (1, 2, 5, 20, 60):
        deadly.clear()
        ended: list[PendingRequest] = []

        def heard(told: RequestEvents, steps: MethodSteps, ended: list[PendingRequest] = ended) -> None:
            ended += [pending for pending, event in told if isinstance(event, RequestEnd) and event.reason == FAILED]

        model_thread = ModelThread(ModelRunner(raw), AdmissionLimits(1, 4096, 10_000), heard)
        taken: list[PendingRequest] = []
        refused: RequestError | None = None
        while refused is None:
            pending = PendingRequest(Request(families.prompts(1)[0], 4000), skipstone.Autoregressive())
            try:
                model_thread.submit([pending])
                taken.append(pending)
                if len(taken) == count:
                    deadly.set()
            except RequestError as error:
                refused = error
        assert (refused.status, str(refused)) == (503, THREAD_FAILED)
        model_thread._thread.join(ENOUGH)
        assert set(ended) == set(taken)
        assert len(taken) >= count
        assert (model_thread.scheduler.num_running, model_thread.scheduler.num_waiting) == (0, 0)
        assert model_thread.stop()


CUDA = "CUDA error: an illegal memory access was encountered"


def jobs_of_a_failing_device(
    monkeypatch: pytest.MonkeyPatch, *errors: Exception | None
) -> tuple[ModelThread, list[RequestEnd]]:
    """What requests of one token each come to, asked for one after the other, where the step of each raises an error, or
    none."""
    own, left, over, ended = DecodingLoop.step, list(errors), threading.Semaphore(0), list[RequestEnd]()

    def step(decoder: DecodingLoop) -> Step:
        if (error := left.pop(0)) is not None:
            raise error
        return own(decoder)

    def heard(told: RequestEvents, steps: MethodSteps) -> None:
        for _, event in told:
            if isinstance(event, RequestEnd):
                ended.append(event)
                over.release()

    monkeypatch.setattr(DecodingLoop, "step", step)
    model_thread = ModelThread(ModelRunner(families.build("llama")), AdmissionLimits(1, 64, 8), heard)
    for _ in errors:
        model_thread.submit([PendingRequest(Request(families.prompts(1)[0], 1), skipstone.Autoregressive())])
        assert over.acquire(timeout=ENOUGH)
    return model_thread, ended


@pytest.mark.parametrize("error", [RuntimeError(CUDA), torch.AcceleratorError("device-side assert")], ids=["message", "type"])
def test_a_device_that_fails_twice_in_a_row_ends_the_thread(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    model_thread, ended = jobs_of_a_failing_device(monkeypatch, error, None, error, error)
    assert [one.reason for one in ended] == [FAILED, LENGTH, FAILED, FAILED]
    assert "see the server's log" in ended[-1].message
    model_thread._thread.join(ENOUGH)
    assert not model_thread.is_alive
    with pytest.raises(RequestError, match="has ended by an error"):
        model_thread.submit([PendingRequest(Request(families.prompts(1)[0], 1), skipstone.Autoregressive())])


@pytest.mark.parametrize("error", [RuntimeError("planted"), torch.OutOfMemoryError("CUDA out of memory"), ValueError(CUDA)])
def test_errors_that_do_not_stay_end_no_thread(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    model_thread, ended = jobs_of_a_failing_device(monkeypatch, error, error, error, None)
    assert [one.reason for one in ended] == [FAILED, FAILED, FAILED, LENGTH]
    assert model_thread.is_alive
    assert model_thread.stop()


def test_a_step_that_fails_leaves_the_server_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    model, own, broken = skipstone.load(None), DecodingLoop.step, threading.Event()

    def step(decoder: DecodingLoop) -> Step:
        if broken.is_set():
            broken.clear()
            raise RuntimeError("planted")
        return own(decoder)

    monkeypatch.setattr(DecodingLoop, "step", step)
    with TestClient(make_app(Server(lambda: model, ServerSettings(max_num_seqs=1, drain_seconds=5)))) as client:
        while client.get("/health").status_code != 200:
            time.sleep(0.01)
        broken.set()
        assert client.post("/v1/completions", json={**LONG, "max_tokens": 4}).status_code == 500
        assert client.get("/health").json() == {"status": "ready"}
        assert client.post("/v1/completions", json={**LONG, "max_tokens": 4}).status_code == 200
