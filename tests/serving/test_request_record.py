"""Records, log lines and OpenTelemetry spans of requests: the client's figures, and no word of what was said."""

import asyncio
import json
import logging
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.testclient import TestClient

import skipstone
from skipstone.decoding.loop import DecodingLoop
from skipstone.serving import logs, tracing
from skipstone.serving.app import make_app
from skipstone.serving.completions_api import Choice
from skipstone.serving.pending_request import StepOutput
from skipstone.serving.request_record import UNKNOWN_ROUTE, RecordMiddleware, RequestRecord
from skipstone.serving.server import Server
from skipstone.serving.settings import ServerSettings
from tests.helpers.served import without_socket

SECRET = "zanzibar"
BODY = {"prompt": f"# {SECRET}\ndef add(a, b):\n    return", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
LAYERSKIP = {"method": "layerskip", "exit_layer": 6}
KEY = {"Authorization": f"Bearer {SECRET}"}
Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def client(loaded: Any) -> Iterator[TestClient]:
    with without_socket(Server(lambda: loaded, ServerSettings(max_num_seqs=4, drain_seconds=5)), SECRET) as client:
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
    response = client.post("/v1/responses", json={"input": SECRET, "max_output_tokens": 8}, headers=KEY).json()
    text = client.post("/v1/completions", json={**BODY, "stream": True}, headers=KEY).text
    line, other, stream = lines()
    assert (stream["id"] in text, stream["streamed"], stream["completion_tokens"]) == (True, True, 24)
    usage, metrics, timings = answer["usage"], answer["metrics"], answer["timings"]
    expected = {"level": "info", "message": "request", "id": answer["id"], "verb": "POST", "route": "/v1/completions"}
    expected |= {"model": "skipstone-nano", "status": 200, "streamed": False, "cancelled": False}
    expected |= {"finish_reasons": ["length", "length"], "prompt_tokens": usage["prompt_tokens"], "completion_tokens": 48}
    expected |= {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"], "drafted": timings["draft_n"]}
    expected |= {"accepted": timings["draft_n_accepted"], "queue_ms": metrics["queue_time_ms"]}
    expected |= {"first_token_ms": metrics["time_to_first_token_ms"], "setup_ms": metrics["setup_time_ms"]}
    assert line | expected == line
    assert usage["completion_tokens"] == 48
    assert line["drafted"] > line["accepted"] > 0
    assert line["total_ms"] > line["first_token_ms"] > line["setup_ms"] > 0, "the first request of a method makes its drafter"
    seconds = (metrics["time_to_first_token_ms"] + metrics["generation_time_ms"]) / 1000
    assert metrics["tokens_per_second"] == pytest.approx(48 / seconds, rel=0.01)
    assert metrics["steady_tokens_per_second"] == pytest.approx(46 / (metrics["generation_time_ms"] / 1000), rel=0.01)
    assert line["method"].startswith("layerskip exit_layer=6")
    assert (other["id"], other["route"], other["status"]) == (response["id"], "/v1/responses", 200)
    assert other["completion_tokens"] == response["usage"]["output_tokens"]


def test_what_is_refused_has_a_line_without_figures(client: TestClient, lines: Lines) -> None:
    client.post("/v1/completions", json={**BODY, "wings": SECRET}, headers=KEY)
    client.post("/v1/completions", json=BODY)
    client.get(f"/v1/{SECRET}", headers=KEY)
    client.post("/tokenize", json={"prompt": SECRET}, headers=KEY)
    info = [(line["route"], line["status"]) for line in lines()]
    assert info == [("/v1/completions", 400), ("/v1/completions", 401), (UNKNOWN_ROUTE, 404), ("/tokenize", 200)]
    assert all(line["id"].startswith("req-") and "prompt_tokens" not in line for line in lines())


def test_what_machines_ask_all_the_time_is_counted_and_not_told(client: TestClient, lines: Lines) -> None:
    client.get("/health")
    texts = [client.get("/metrics", headers=KEY).text for _ in range(3)]
    assert lines() == []
    counted = 'skipstone:http_requests_total{model_name="skipstone-nano",route="/metrics",status="200"}'
    before, after = (float(re.search(rf"{re.escape(counted)} (.*)", text)[1]) for text in texts[1:])  # pyright: ignore
    assert after == before + 1
    assert SECRET not in texts[-1]


def test_a_text_that_takes_too_long_is_told_and_counted_as_that(loaded: Any, lines: Lines) -> None:
    server = Server(lambda: loaded, ServerSettings(max_num_seqs=1, timeout_seconds=0.1, drain_seconds=0))
    with without_socket(server) as client:
        answer = client.post("/v1/completions", json={**BODY, "max_tokens": 900, "speculative": "off"})
        metrics = client.get("/metrics").text
    (line,) = lines()
    assert answer.status_code == line["status"] == 504
    assert (line["level"], line["finish_reasons"], line["cancelled"]) == ("warning", ["timeout"], False)
    counted = 'skipstone:request_success_total{finished_reason="timeout",model_name="skipstone-nano"} 1.0'
    assert counted in metrics
    assert 'finished_reason="cancelled"' not in metrics


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_is_told_as_that(loaded: Any, lines: Lines, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    own, first_token = Server._add_output, asyncio.Event()

    def more(server: Server, choice: Choice, piece: StepOutput) -> Any:
        first_token.set()
        return own(server, choice, piece)

    monkeypatch.setattr(Server, "_add_output", more)
    content = json.dumps({**BODY, "max_tokens": 900, "stream": stream, "speculative": "off"}).encode()
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "http_version": "1.1"}
    scope |= {"headers": [(b"content-type", b"application/json")], "asgi": {"version": "3.0"}}
    scope |= {"scheme": "http", "root_path": ""}
    events = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if events:
            return events.pop()
        await first_token.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    async def scenario() -> None:
        server = Server(lambda: loaded, ServerSettings(max_num_seqs=1, drain_seconds=0))
        await server.start()
        await make_app(server)(scope, receive, send)
        await server.stop()

    asyncio.run(scenario())
    (line,) = lines()
    assert (line["status"], line["finish_reasons"], line["cancelled"]) == (200 if stream else 499, ["cancelled"], True)
    assert 0 < line["completion_tokens"] < 900


def test_a_reporter_that_raises_and_a_route_that_fails_hurt_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    records: list[RequestRecord] = []

    def raises(*_: Any) -> Any:
        raise RuntimeError("planted")

    app = FastAPI()
    app.add_middleware(RecordMiddleware, model="m", reporters=[raises, records.append])
    app.get("/right")(lambda: "well")
    app.get("/broken")(lambda: raises())
    client = TestClient(app, raise_server_exceptions=False)
    assert client.get("/right").json() == "well"
    assert client.get("/broken").status_code == 500
    assert [(one.route, one.status, one.completion) for one in records] == [("/right", 200, None), ("/broken", 500, None)]
    assert [record.message for record in caplog.records].count("a reporter of requests failed") == 2


TRACED = {**BODY, "stop": [SECRET]}
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def traced(loaded: Any) -> Iterator[TestClient]:
    with without_socket(Server(lambda: loaded, ServerSettings(max_num_seqs=4, drain_seconds=5))) as client:
        yield client


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return exporter


def split(spans: InMemorySpanExporter) -> tuple[Any, dict[str, Any]]:
    *below, above = spans.get_finished_spans()
    assert all(one.parent.span_id == above.context.span_id for one in below)
    return above, {one.name: one for one in below}


def test_a_request_is_a_span_by_the_conventions_with_its_phases_below(traced: TestClient, spans: InMemorySpanExporter) -> None:
    sampling = {"n": 2, "temperature": 0.5, "seed": 3, "speculative": {"method": "layerskip", "exit_layer": 6}}
    answer = traced.post("/v1/completions", json={**TRACED, **sampling, "return_metrics": True}).json()
    span, below = split(spans)
    assert (span.name, span.kind, span.parent) == ("text_completion skipstone-nano", trace.SpanKind.SERVER, None)
    info = dict(span.attributes or {})
    assert str(info.pop("skipstone.method")).startswith("layerskip exit_layer=6")
    assert info == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "skipstone",
        "gen_ai.request.model": "skipstone-nano",
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.max_tokens": 24,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 3,
        "gen_ai.request.stream": False,
        "gen_ai.response.id": answer["id"],
        "gen_ai.response.model": "skipstone-nano",
        "gen_ai.response.finish_reasons": ("length", "length"),
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": 48,
        "gen_ai.usage.cache_read.input_tokens": answer["usage"]["prompt_tokens_details"]["cached_tokens"],
        "skipstone.drafted_tokens": answer["timings"]["draft_n"],
        "skipstone.accepted_tokens": answer["timings"]["draft_n_accepted"],
        "skipstone.cancelled": False,
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
    }
    queue, prefill, decode = (below[name] for name in ("queue", "prefill", "decode"))
    assert span.start_time <= queue.start_time <= queue.end_time == prefill.start_time
    assert prefill.end_time == decode.start_time <= decode.end_time == span.end_time
    assert SECRET not in span.to_json()


def test_a_stream_says_when_its_first_chunk_came_and_goes_on_with_a_traceparent(
    traced: TestClient, spans: InMemorySpanExporter, caplog: Any
) -> None:
    caplog.set_level("INFO", logger="skipstone.serving.requests")
    body = {**TRACED, "stream": True, "response_format": {"type": "text"}}
    traced.post("/v1/completions", json=body, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    span, below = split(spans)
    info = span.attributes or {}
    assert (info["gen_ai.request.stream"], info["gen_ai.output.type"]) == (True, "text")
    first = (below["prefill"].end_time - below["queue"].start_time) / 1e9
    assert info["gen_ai.response.time_to_first_chunk"] == pytest.approx(first, abs=1e-4)
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == PARENT
    assert {f"{one.context.trace_id:032x}" for one in (span, *below.values())} == {TRACE}
    (record,) = [one for one in caplog.records if one.name == "skipstone.serving.requests"]
    assert record.fields["trace_id"] == TRACE


def test_what_fails_is_a_span_and_other_routes_are_none(
    traced: TestClient, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced.post("/v1/completions", json={**TRACED, "wings": 2})
    traced.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": SECRET}]})  # nano has no template
    for path in ("/health", "/metrics", "/v1/models"):
        traced.get(path)
    monkeypatch.setattr(DecodingLoop, "step", None)  # a defect
    traced.post("/v1/completions", json=TRACED)
    one, two, *_, defect = spans.get_finished_spans()
    assert (one.name, two.name) == ("text_completion skipstone-nano", "chat skipstone-nano")
    for span in (one, two):
        assert (span.attributes or {})["error.type"] == "400"
        assert span.status.status_code is trace.StatusCode.UNSET, "the client's mistake is no error of the server's"
        assert SECRET not in span.to_json()
    assert defect.name == one.name
    assert defect.status.status_code is trace.StatusCode.ERROR


def test_without_the_sdk_nothing_is_told_and_nothing_is_missing(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry.sdk")]:
        monkeypatch.setitem(sys.modules, name, None)
    assert tracing.reporters() == []
    tracing.flush()
    monkeypatch.setenv(tracing.ENDPOINTS[1], "http://127.0.0.1:9")
    assert not tracing.set_up()
    with without_socket(Server(lambda: loaded, ServerSettings(max_num_seqs=1, drain_seconds=5))) as untraced:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        assert untraced.post("/v1/completions", json={**TRACED, "max_tokens": 4}, headers=headers).status_code == 200


def test_spans_are_sent_to_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the exporter: that OpenTelemetry's own one sends is not tested here."""
    made: list[Any] = []
    exporter, stand_in = InMemorySpanExporter(), types.ModuleType(tracing.EXPORTER)
    vars(stand_in)["OTLPSpanExporter"] = lambda *_, **__: exporter
    monkeypatch.setattr(trace, "set_tracer_provider", made.append)
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: made[-1] if made else trace.ProxyTracerProvider())
    for name in (*tracing.ENDPOINTS, "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(name, raising=False)
    assert not tracing.set_up(), "nobody asks for it"
    monkeypatch.setenv(tracing.ENDPOINTS[0], "http://127.0.0.1:9")
    monkeypatch.setitem(sys.modules, tracing.EXPORTER, stand_in)
    assert tracing.set_up()
    made[0].get_tracer("t").start_span("one").end()
    tracing.flush()
    (span,) = exporter.get_finished_spans()
    assert span.resource.attributes["service.name"] == "skipstone"
    assert span.resource.attributes["service.version"] == skipstone.__version__
    assert not tracing.set_up(), "there is a provider already"
    made[0].shutdown()
