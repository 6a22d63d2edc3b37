"""What is said when the model's thread dies: nobody waits for ever, and /health tells."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
from starlette.testclient import TestClient

import skipstone
from skipstone.decoding.batch import Request
from skipstone.decoding.draft import Step
from skipstone.models.layered import LayeredModel
from skipstone.serving import logs
from skipstone.serving.app import make_app
from skipstone.serving.engine import DIED, Engine, Told
from skipstone.serving.jobs import FAILED, Ended, Job, Refused
from skipstone.serving.server import Server, Settings
from tests.helpers import families

LONG = {"prompt": "def add(a, b):", "max_tokens": 900, "temperature": 0, "ignore_eos": True, "speculative": "off"}


class Planted(BaseException):
    """What nobody catches."""


@pytest.fixture
def deadly(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """When it is set, the model's thread dies at its next turn."""
    now, own = threading.Event(), Engine._expire

    def expire(engine: Engine) -> None:
        if now.is_set():
            raise Planted("planted")
        own(engine)

    monkeypatch.setattr(Engine, "_expire", expire)
    return now


def test_a_thread_that_dies_is_told_by_health_and_to_all_who_wait(deadly: threading.Event, caplog: Any) -> None:
    model = skipstone.load(None)
    with TestClient(make_app(Server(lambda: model, Settings(rows=1, drain=5)))) as client:
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
        assert [answer.json()["error"]["message"] for answer in answers] == [DIED] * 2
        health = client.get("/health")
        assert health.status_code == 503
        assert health.json() == {"status": "failed", "reason": DIED}
        late = client.post("/v1/completions", json=LONG)
        assert late.status_code == 503
        assert late.json()["error"]["message"] == DIED
        metrics = client.get("/metrics").text
        assert 'num_requests_running{model_name="skipstone-nano"} 0.0' in metrics
        assert 'request_success_total{finished_reason="error",model_name="skipstone-nano"} 2.0' in metrics
    (record,) = [one for one in caplog.records if one.name == "skipstone.serving.engine"]
    told = json.loads(logs.Json().format(record))
    assert (told["level"], told["error"]) == ("error", "Planted")
    assert "in expire" in told["traceback"]


def test_a_job_that_comes_while_the_thread_dies_is_told_or_refused(deadly: threading.Event) -> None:
    """Whatever the moment: a job that was taken ends."""
    raw = families.build("llama", max_position_embeddings=8192)
    for _ in range(5):
        deadly.clear()
        ended: list[Job] = []

        def heard(told: Told, steps: list[Step], ended: list[Job] = ended) -> None:
            ended += [job for job, event in told if isinstance(event, Ended) and event.reason == FAILED]

        engine = Engine(LayeredModel(raw), 1, 4096, 10_000, heard)
        taken: list[Job] = []
        threading.Timer(0.05, deadly.set).start()
        refused: Refused | None = None
        while refused is None:
            job = Job(Request(families.prompts(1)[0], 4000), skipstone.Autoregressive())
            try:
                engine.submit([job])
                taken.append(job)
                time.sleep(0.001)
            except Refused as error:
                refused = error
        assert (refused.status, str(refused)) == (503, DIED)
        engine._thread.join(10)
        assert set(ended) == set(taken)
        assert len(taken) > 1
        assert (engine.running, engine.waits) == (0, 0)
        assert engine.stop()


def test_a_step_that_fails_leaves_the_server_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    from skipstone.decoding.loop import Decoder

    model, own, broken = skipstone.load(None), Decoder.step, threading.Event()

    def step(decoder: Decoder) -> Step:
        if broken.is_set():
            broken.clear()
            raise RuntimeError("planted")
        return own(decoder)

    monkeypatch.setattr(Decoder, "step", step)
    with TestClient(make_app(Server(lambda: model, Settings(rows=1, drain=5)))) as client:
        while client.get("/health").status_code != 200:
            time.sleep(0.01)
        broken.set()
        assert client.post("/v1/completions", json={**LONG, "max_tokens": 4}).status_code == 500
        assert client.get("/health").json() == {"status": "ready"}
        assert client.post("/v1/completions", json={**LONG, "max_tokens": 4}).status_code == 200
