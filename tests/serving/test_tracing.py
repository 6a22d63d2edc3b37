"""OpenTelemetry spans: what they have with the SDK, and that nothing is missing without it."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.testclient import TestClient

import skipstone
from skipstone.serving import tracing
from skipstone.serving.app import make_app
from skipstone.serving.server import Server
from skipstone.serving.settings import ServerSettings

SECRET = "zanzibar"
BODY = {"prompt": f"# {SECRET}\ndef add(a, b):\n    return", "max_tokens": 24, "ignore_eos": True, "stop": [SECRET]}
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    model = skipstone.load(None)
    with TestClient(make_app(Server(lambda: model, ServerSettings(max_num_seqs=4, drain_seconds=5)))) as client:
        while client.get("/health").status_code != 200:
            pass
        yield client


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """What was exported by a provider that is the process's for one test."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return exporter


def split(spans: InMemorySpanExporter) -> tuple[ReadableSpan, dict[str, ReadableSpan]]:
    """The span of the one request, and those below it."""
    *below, above = spans.get_finished_spans()
    assert above.context is not None
    assert all(one.parent is not None and one.parent.span_id == above.context.span_id for one in below)
    return above, {one.name: one for one in below}


def times(*spans: ReadableSpan) -> list[int]:
    """When each began and ended, in nanoseconds."""
    found = [moment for one in spans for moment in (one.start_time, one.end_time) if moment is not None]
    assert len(found) == 2 * len(spans)
    return found


def test_a_request_is_a_span_by_the_conventions_with_its_phases_below(client: TestClient, spans: InMemorySpanExporter) -> None:
    body = {
        **BODY,
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 3,
        "speculative": {"method": "layerskip", "exit_layer": 6},
    }
    answer = client.post("/v1/completions", json={**body, "return_metrics": True}).json()
    span, below = split(spans)
    assert (span.name, span.kind) == ("text_completion skipstone-nano", trace.SpanKind.SERVER)
    assert span.parent is None
    told = dict(span.attributes or {})
    assert str(told.pop("skipstone.method")).startswith("layerskip exit_layer=6")
    assert told == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "skipstone",
        "gen_ai.request.model": "skipstone-nano",
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.max_tokens": 24,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
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
    assert list(below) == ["queue", "prefill", "decode"]
    inner, (start, end) = times(*below.values()), times(span)
    assert inner == sorted(inner)
    assert inner[1] == inner[2]
    assert inner[3] == inner[4]
    assert start <= inner[0]
    assert inner[-1] == end
    assert SECRET not in span.to_json()


def test_a_stream_says_when_its_first_chunk_came(client: TestClient, spans: InMemorySpanExporter) -> None:
    client.post("/v1/completions", json={**BODY, "stream": True, "response_format": {"type": "text"}})
    span, below = split(spans)
    told = span.attributes or {}
    first = told["gen_ai.response.time_to_first_chunk"]
    assert isinstance(first, float)
    assert told["gen_ai.request.stream"] is True
    assert told["gen_ai.output.type"] == "text"
    taken, *_, written = times(below["queue"], below["prefill"])
    assert (written - taken) / 1e9 == pytest.approx(first, abs=1e-4)


def test_a_traceparent_is_gone_on_with(client: TestClient, spans: InMemorySpanExporter, caplog: Any) -> None:
    caplog.set_level("INFO", logger="skipstone.serving.requests")
    client.post("/v1/completions", json=BODY, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    span, below = split(spans)
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == PARENT
    assert {f"{one.context.trace_id:032x}" for one in (span, *below.values()) if one.context is not None} == {TRACE}
    (record,) = [one for one in caplog.records if one.name == "skipstone.serving.requests"]
    assert record.fields["trace_id"] == TRACE


def test_what_is_refused_is_a_span_and_other_routes_are_none(client: TestClient, spans: InMemorySpanExporter) -> None:
    client.post("/v1/completions", json={**BODY, "wings": 2})
    client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": SECRET}]})  # nano has no template
    for path in ("/health", "/metrics", "/v1/models"):
        client.get(path)
    one, two = spans.get_finished_spans()
    assert (one.name, two.name) == ("text_completion skipstone-nano", "chat skipstone-nano")
    for span in (one, two):
        assert (span.attributes or {})["error.type"] == "400"
        assert span.status.status_code is trace.StatusCode.UNSET, "the client's mistake is no error of the server's"
        assert SECRET not in span.to_json()


def test_a_text_that_takes_too_long_is_an_error(spans: InMemorySpanExporter) -> None:
    model = skipstone.load(None)
    with TestClient(
        make_app(Server(lambda: model, ServerSettings(max_num_seqs=1, timeout_seconds=0.1, drain_seconds=0)))
    ) as client:
        while client.get("/health").status_code != 200:
            pass
        client.post("/v1/completions", json={**BODY, "max_tokens": 900, "stream": True, "speculative": "off"})
    span, _ = split(spans)
    assert span.status.status_code is trace.StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == "timeout"


def test_without_the_sdk_nothing_is_told_and_nothing_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry.sdk")]:
        monkeypatch.setitem(sys.modules, name, None)
    assert tracing.reporters() == []
    tracing.flush()
    monkeypatch.setenv(tracing.ENDPOINTS[1], "http://127.0.0.1:9")
    assert not tracing.set_up()
    model = skipstone.load(None)
    with TestClient(make_app(Server(lambda: model, ServerSettings(max_num_seqs=1, drain_seconds=5)))) as client:
        while client.get("/health").status_code != 200:
            pass
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        assert client.post("/v1/completions", json={**BODY, "max_tokens": 4}, headers=headers).status_code == 200


class Exporter(SpanExporter):
    """In the place of the one that sends to a collector."""

    sent: list[ReadableSpan] = []  # noqa: RUF012 (of all that are made)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.sent.extend(spans)
        return SpanExportResult.SUCCESS


def test_spans_are_sent_to_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the exporter: that OpenTelemetry's own one sends is not tested here."""
    made: list[Any] = []
    monkeypatch.setattr(trace, "set_tracer_provider", made.append)
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: made[-1] if made else trace.ProxyTracerProvider())
    for name in (*tracing.ENDPOINTS, "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(name, raising=False)
    assert not tracing.set_up(), "nobody asks for it"
    monkeypatch.setenv(tracing.ENDPOINTS[0], "http://127.0.0.1:9")
    stand_in = types.ModuleType(tracing.EXPORTER)
    vars(stand_in)["OTLPSpanExporter"] = Exporter
    monkeypatch.setattr(tracing, "is_installed", lambda module: True)
    monkeypatch.setitem(sys.modules, tracing.EXPORTER, stand_in)
    Exporter.sent.clear()
    assert tracing.set_up()
    made[0].get_tracer("t").start_span("one").end()
    tracing.flush()
    (span,) = Exporter.sent
    assert span.resource.attributes["service.name"] == "skipstone"
    assert span.resource.attributes["service.version"] == skipstone.__version__
    assert not tracing.set_up(), "there is a provider already"
    made[0].shutdown()
