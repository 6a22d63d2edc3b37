"""What is said when the model's thread dies: nobody waits for ever, and /health tells. And of what it dies."""

import json
import os
import shutil
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import skipstone
from skipstone.assets import NANO
from skipstone.decoding.draft import Step
from skipstone.decoding.loop import DecodingLoop
from skipstone.decoding.request import Request
from skipstone.engines.choose_engine import copies_of
from skipstone.engines.mapped_loading import load_for_decoding
from skipstone.engines.model_runner import ModelRunner
from skipstone.serving import logs
from skipstone.serving.admission import AdmissionLimits
from skipstone.serving.errors import RequestError
from skipstone.serving.model_thread import THREAD_FAILED, MethodSteps, ModelThread, RequestEvents
from skipstone.serving.pending_request import FAILED, LENGTH, PendingRequest, RequestEnd
from skipstone.serving.scheduler import Scheduler
from skipstone.serving.server import Server
from skipstone.serving.settings import ServerSettings
from tests.helpers import dying, families
from tests.helpers.served import HOST, SLOW, Process, request_bytes, without_socket

LONG = {"prompt": "def add(a, b):", "max_tokens": 900, "temperature": 0, "ignore_eos": True, "speculative": "off"}
ENOUGH = 30


@pytest.fixture
def deadly(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    now = threading.Event()
    monkeypatch.setattr(Scheduler, "expire_requests", Scheduler.expire_requests)  # which is set back afterwards
    dying.plant(now)
    return now


def test_a_thread_that_dies_is_told_by_health_and_to_all_who_wait(
    loaded: Any, deadly: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    calls = list[str]()
    server = Server(lambda: loaded, ServerSettings(max_num_seqs=1, drain_seconds=5))
    server.failed = lambda: calls.append(server.health[0])
    with without_socket(server) as client, ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(client.post, "/v1/completions", json=LONG) for _ in range(2)]
        while '_waiting{model_name="skipstone-nano"} 1.0' not in client.get("/metrics").text:
            time.sleep(0.01)  # one has the row, the other waits for it
        deadly.set()
        for answer in (one.result(ENOUGH) for one in asking):
            assert (answer.status_code, answer.json()["error"]["message"]) == (500, THREAD_FAILED)
        health, late = client.get("/health"), client.post("/v1/completions", json=LONG)
        assert (health.status_code, health.json()) == (503, {"status": "failed", "reason": THREAD_FAILED})
        assert (late.status_code, late.json()["error"]["message"]) == (503, THREAD_FAILED)
        assert "Retry-After" not in late.headers | health.headers, "nothing comes back here"
        assert calls == ["failed"]
        metrics = client.get("/metrics").text
        assert 'num_requests_running{model_name="skipstone-nano"} 0.0' in metrics
        assert 'request_success_total{finished_reason="error",model_name="skipstone-nano"} 2.0' in metrics
    (record,) = [one for one in caplog.records if one.name == "skipstone.serving.model_thread"]
    info = json.loads(logs.JsonFormatter().format(record))
    assert (info["level"], info["error"], "in expire" in info["traceback"]) == ("error", "Planted", True)


def test_a_job_that_comes_while_the_thread_dies_is_told_or_refused(deadly: threading.Event) -> None:
    raw = families.build("llama", max_position_embeddings=8192)
    for count in (1, 2, 5, 20, 60):
        deadly.clear()
        ended: list[PendingRequest] = []

        def heard(told: RequestEvents, steps: MethodSteps, ended: list[PendingRequest] = ended) -> None:
            ended += [pending for pending, event in told if isinstance(event, RequestEnd) and event.reason == FAILED]

        model_thread = ModelThread(ModelRunner(raw), AdmissionLimits(1, 4096, 10_000_000), heard)
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


def test_a_server_whose_checkpoint_is_overwritten_needs_a_new_process(tmp_path: Path) -> None:
    """Until then, it makes a copy while no request runs, and its gauge counts it."""
    shutil.copytree(NANO, tmp_path / "model", dirs_exist_ok=True)
    model, tokenizer = load_for_decoding(tmp_path / "model")
    settings = ServerSettings(method="auto", max_num_seqs=1, drain_seconds=5)
    server, calls = Server(lambda: (model, tokenizer), settings), list[str]()
    server.failed = lambda: calls.append(server.health[0])
    with without_socket(server) as client:
        server.prepare_in_background()
        end = time.monotonic() + ENOUGH
        while not (copies := copies_of(model)) and time.monotonic() < end:
            time.sleep(0.01)
        (line,) = [one for one in client.get("/metrics").text.splitlines() if one.startswith("skipstone:extra_memory_bytes")]
        assert float(line.split()[-1]) == copies["int4"]
        os.utime(tmp_path / "model" / "model.safetensors", (1, 1))
        for _ in range(2):
            answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
            assert (answer.status_code, "was overwritten" in answer.json()["error"]["message"]) == (503, True)
        health = client.get("/health")
        assert (health.status_code, "was overwritten" in health.json()["reason"], calls) == (503, True, ["failed"])


CUDA = "CUDA error: an illegal memory access was encountered"


def jobs_of_a_failing_device(
    monkeypatch: pytest.MonkeyPatch, *errors: Exception | None
) -> tuple[ModelThread, list[RequestEnd]]:
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


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (RuntimeError(CUDA), True),
        (torch.AcceleratorError("device-side assert"), True),
        (RuntimeError("planted"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (ValueError(CUDA), False),
    ],
    ids=repr,
)
def test_a_device_that_fails_twice_in_a_row_ends_the_thread_and_no_other_error(
    monkeypatch: pytest.MonkeyPatch, error: Exception, ends: bool
) -> None:
    model_thread, ended = jobs_of_a_failing_device(monkeypatch, error, None, error, error)
    assert [one.reason for one in ended] == [FAILED, LENGTH, FAILED, FAILED]
    if ends:
        assert "see the server's log" in ended[-1].message
        model_thread._thread.join(ENOUGH)
    assert model_thread.is_alive is not ends
    assert model_thread.stop()


@pytest.mark.slow
def test_when_the_model_s_thread_dies_streams_are_told_and_the_process_ends() -> None:
    served, body = Process("--drain-timeout", "600", module="tests.helpers.dying"), {**LONG, "stream": True}
    try:
        served.start()
        assert served.process is not None
        with (
            socket.create_connection((HOST, served.port)) as half,
            served.http.stream("POST", "/v1/completions", json=body) as response,
        ):
            half.sendall(request_bytes(body)[:-1])
            lines = response.iter_lines()
            assert "choices" in next(lines)
            served.process.send_signal(signal.SIGUSR1)
            info = [line for line in lines if line.startswith("data:")]
            assert json.loads(info[-2][5:])["error"]["message"] == THREAD_FAILED
            assert info[-1] == "data: [DONE]"
            assert served.process.wait(SLOW) == 1, "a supervisor starts another one"
    finally:
        served.stop()
