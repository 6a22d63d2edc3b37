"""What the server keeps of every request: the figures that the client gets, and no word of what was said."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

import skipstone
from skipstone.serving import logs
from skipstone.serving.app import make_app
from skipstone.serving.completions_api import Choice
from skipstone.serving.pending_request import StepOutput
from skipstone.serving.request_record import UNKNOWN_ROUTE, RecordMiddleware, RequestRecord
from skipstone.serving.server import Server
from skipstone.serving.settings import ServerSettings

SECRET = "zanzibar"
"""A word that only prompts and keys here have."""
BODY = {"prompt": f"# {SECRET}\ndef add(a, b):\n    return", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
LAYERSKIP = {"method": "layerskip", "exit_layer": 6}
KEY = {"Authorization": f"Bearer {SECRET}"}
Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def loaded() -> Any:
    return skipstone.load(None)


@pytest.fixture(scope="module")
def client(loaded: Any) -> Iterator[TestClient]:
    with TestClient(make_app(Server(lambda: loaded, ServerSettings(max_num_seqs=4, drain_seconds=5)), SECRET)) as client:
        while client.get("/health").status_code != 200:
            pass
        yield client


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    """Gives the requests' lines that were written up to now, as JSON tells them."""
    caplog.set_level(logging.INFO, logger="skipstone.serving.requests")

    def written() -> list[dict[str, Any]]:
        records = [record for record in caplog.records if record.name == "skipstone.serving.requests"]
        assert not any(SECRET in form().format(record) for record in records for form in logs.FORMS.values())
        return [json.loads(logs.JsonFormatter().format(record)) for record in records]

    return written


def test_a_line_has_the_figures_that_the_client_gets(client: TestClient, lines: Lines) -> None:
    body = {**BODY, "n": 2, "speculative": LAYERSKIP, "return_metrics": True}
    answer = client.post("/v1/completions", json=body, headers=KEY).json()
    (line,) = lines()
    assert (line["level"], line["message"], line["id"]) == ("info", "request", answer["id"])
    assert (line["verb"], line["route"], line["model"], line["status"]) == ("POST", "/v1/completions", "skipstone-nano", 200)
    assert (line["streamed"], line["cancelled"], line["finish_reasons"]) == (False, False, ["length", "length"])
    assert line["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert line["completion_tokens"] == answer["usage"]["completion_tokens"] == 48
    assert line["cached_tokens"] == answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert line["drafted"] == answer["timings"]["draft_n"] > 0
    assert line["accepted"] == answer["timings"]["draft_n_accepted"] > 0
    assert line["queue_ms"] == answer["metrics"]["queue_time_ms"]
    assert line["first_token_ms"] == answer["metrics"]["time_to_first_token_ms"]
    assert line["total_ms"] > line["first_token_ms"] > 0
    assert line["method"].startswith("layerskip exit_layer=6")


def test_a_stream_is_one_line_when_it_ends(client: TestClient, lines: Lines) -> None:
    with client.stream("POST", "/v1/completions", json={**BODY, "stream": True}, headers=KEY) as response:
        chunks = [json.loads(one[5:]) for one in response.iter_lines() if one.startswith("data:") and "DONE" not in one]
    (line,) = lines()
    assert (line["id"], line["streamed"], line["completion_tokens"]) == (chunks[0]["id"], True, 24)
    assert not line["cancelled"]


def test_a_response_is_called_what_its_client_calls_it(client: TestClient, lines: Lines) -> None:
    answer = client.post("/v1/responses", json={"input": SECRET, "max_output_tokens": 8}, headers=KEY).json()
    (line,) = lines()
    assert (line["id"], line["route"], line["status"]) == (answer["id"], "/v1/responses", 200)
    assert line["completion_tokens"] == answer["usage"]["output_tokens"]


def test_what_is_refused_has_a_line_without_figures(client: TestClient, lines: Lines) -> None:
    client.post("/v1/completions", json={**BODY, "wings": SECRET}, headers=KEY)
    client.post("/v1/completions", json=BODY)
    client.get(f"/v1/{SECRET}", headers=KEY)
    client.post("/tokenize", json={"prompt": SECRET}, headers=KEY)
    told = [(line["route"], line["status"]) for line in lines()]
    assert told == [("/v1/completions", 400), ("/v1/completions", 401), (UNKNOWN_ROUTE, 404), ("/tokenize", 200)]
    assert all(line["id"].startswith("req-") and "prompt_tokens" not in line for line in lines())


def test_what_machines_ask_all_the_time_is_counted_and_not_told(client: TestClient, lines: Lines) -> None:
    client.get("/health")
    before, after = (client.get("/metrics", headers=KEY).text for _ in range(2))
    assert lines() == []
    counted = 'skipstone:http_requests_total{model_name="skipstone-nano",route="/metrics",status="200"}'
    values = [float(line.rsplit(" ", 1)[1]) for text in (before, after) for line in text.splitlines() if counted in line]
    assert values[-1] - (values[0] if len(values) == 2 else 0) == 1
    assert SECRET not in after


def test_a_text_that_takes_too_long_is_told_and_counted_as_that(loaded: Any, lines: Lines) -> None:
    server = Server(lambda: loaded, ServerSettings(max_num_seqs=1, timeout_seconds=0.1, drain_seconds=0))
    with TestClient(make_app(server)) as client:
        while client.get("/health").status_code != 200:
            pass
        answer = client.post("/v1/completions", json={**BODY, "max_tokens": 900, "speculative": "off"})
        metrics = client.get("/metrics").text
    (line,) = lines()
    assert answer.status_code == line["status"] == 504
    assert (line["level"], line["finish_reasons"], line["cancelled"]) == ("warning", ["timeout"], False)
    counted = 'skipstone:request_success_total{finished_reason="timeout",model_name="skipstone-nano"} 1.0'
    assert counted in metrics
    assert 'finished_reason="cancelled"' not in metrics


def request_of(body: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """An ASGI scope and its body."""
    content = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
    return scope | {"http_version": "1.1", "scheme": "http", "root_path": "", "asgi": {"version": "3.0"}}, content


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_is_told_as_that(loaded: Any, lines: Lines, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    """It goes when the first token is written."""
    own, first_token = Server._add_output, asyncio.Event()

    def more(server: Server, choice: Choice, piece: StepOutput) -> Any:
        first_token.set()
        return own(server, choice, piece)

    monkeypatch.setattr(Server, "_add_output", more)

    async def scenario() -> None:
        server = Server(lambda: loaded, ServerSettings(max_num_seqs=1, drain_seconds=0))
        await server.start()
        scope, content = request_of({**BODY, "max_tokens": 900, "stream": stream, "speculative": "off"})
        events = [{"type": "http.request", "body": content, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if events:
                return events.pop()
            await first_token.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            pass

        await make_app(server)(scope, receive, send)
        await server.stop()

    asyncio.run(scenario())
    (line,) = lines()
    assert (line["status"], line["finish_reasons"], line["cancelled"]) == (200 if stream else 499, ["cancelled"], True)
    assert 0 < line["completion_tokens"] < 900


def test_a_teller_that_raises_and_a_route_that_fails_hurt_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    told: list[RequestRecord] = []

    def wrong(record: RequestRecord) -> None:
        raise RuntimeError("planted in a teller")

    app = FastAPI()
    app.add_middleware(RecordMiddleware, model="m", reporters=[wrong, told.append])

    @app.get("/right")
    async def right() -> str:
        return "well"

    @app.get("/broken")
    async def broken() -> str:
        raise RuntimeError("planted in a route")

    client = TestClient(app, raise_server_exceptions=False)
    assert client.get("/right").json() == "well"
    assert client.get("/broken").status_code == 500
    assert [(record.route, record.status, record.completion) for record in told] == [
        ("/right", 200, None),
        ("/broken", 500, None),
    ]
    assert [record.message for record in caplog.records].count("a reporter of requests failed") == 2
