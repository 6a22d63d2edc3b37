"""OpenTelemetry spans of the requests that write, where its SDK is installed. Where it is not, nothing happens.

A span has the attributes that the semantic conventions for generative AI name, and no text. Below it is one for each phase:
`queue`, `prefill`, `decode`. All are made when the request has ended, with the times at which things happened.
"""

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

from skipstone import __version__
from skipstone.serving.request_record import RequestRecord

OPERATIONS = {"/v1/completions": "text_completion", "/v1/chat/completions": "chat", "/v1/responses": "chat"}
"""What the conventions call the routes that write."""
PROVIDER = "skipstone"
"""gen_ai.provider.name, and the name of the tracer."""
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""Environment variables of OpenTelemetry: one of them says where spans are sent."""
TRACE, SDK, RESOURCES = "opentelemetry.trace", "opentelemetry.sdk.trace", "opentelemetry.sdk.resources"
EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
FLUSH_TIMEOUT_MS = 2000
"""Time to send the last spans when the server ends."""

logger = logging.getLogger(__name__)


def set_up() -> bool:
    """Send spans to where the environment says, unless a provider is set already. Returns whether this has set one."""
    if not any(os.environ.get(name) for name in ENDPOINTS):
        return False
    try:
        exporter, trace, sdk, export, resources = map(import_module, (EXPORTER, TRACE, SDK, f"{SDK}.export", RESOURCES))
    except ImportError:
        logger.warning('no spans are sent, though %s asks for them: pip install "skipstone[telemetry]"', " or ".join(ENDPOINTS))
        return False
    if isinstance(trace.get_tracer_provider(), sdk.TracerProvider):
        return False
    named = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    resource_attributes = {"service.version": __version__} | ({} if named else {"service.name": PROVIDER})
    provider = sdk.TracerProvider(resource=resources.Resource.create(resource_attributes))
    provider.add_span_processor(export.BatchSpanProcessor(exporter.OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    return True


def reporters() -> list[Callable[[RequestRecord], None]]:
    """The reporters of requests; none if the SDK is not installed."""
    try:
        return [Spans()]
    except ImportError:
        return []


def flush() -> None:
    """Send what is not sent yet."""
    with suppress(ImportError, AttributeError):  # a provider that sends nothing has no such method
        import_module(TRACE).get_tracer_provider().force_flush(FLUSH_TIMEOUT_MS)


class Spans:
    """Reports requests as spans of the provider that is set for the process. ImportError without the SDK."""

    def __init__(self) -> None:
        self._trace, self._propagate, _ = map(import_module, (TRACE, "opentelemetry.propagate", SDK))

    def __call__(self, record: RequestRecord) -> None:
        """The span of a request that writes, or was to write. The caller's `traceparent` is its parent, unless this process
        has a span for the request already."""
        if (operation := OPERATIONS.get(record.route)) is None:
            return
        trace = self._trace
        tracer = trace.get_tracer_provider().get_tracer(PROVIDER, __version__)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in record.headers}
        above = None if trace.get_current_span().get_span_context().is_valid else self._propagate.extract(headers)
        given = {"context": above, "kind": trace.SpanKind.SERVER, "start_time": record.nanoseconds(record.start_time)}
        span = tracer.start_span(f"{operation} {record.model}", attributes=attributes(record, operation), **given)
        if (made := span.get_span_context()).is_valid:
            record.trace = f"{made.trace_id:032x}"
        below = trace.set_span_in_context(span)
        for name, (start, end) in record.phases.items():
            phase = tracer.start_span(name, context=below, start_time=record.nanoseconds(start))
            phase.end(end_time=record.nanoseconds(end))
        if record.failure or record.status >= 500:
            span.set_status(trace.Status(trace.StatusCode.ERROR))
        span.end(end_time=record.nanoseconds(record.end_time))


def attributes(record: RequestRecord, operation: str) -> dict[str, Any]:
    """Of a span, by the conventions' names. Those of skipstone: tokens that were drafted and accepted, seconds."""
    found: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": record.model,
        "http.request.method": record.verb,
        "http.route": record.route,
        "http.response.status_code": record.status,
    }
    if record.failure or record.status >= 400:
        found["error.type"] = record.failure or str(record.status)
    names, settings = {"n": "gen_ai.request.choice.count"}, record.settings.items()
    found |= {names.get(name, f"gen_ai.request.{name}"): value for name, value in settings if (name, value) != ("n", 1)}
    if record.as_json is not None:
        found["gen_ai.output.type"] = "json" if record.as_json else "text"
    if record.completion is None:
        return found
    fields = record.fields()
    found |= {
        "gen_ai.request.max_tokens": record.completion.choices[0].pending.request.max_new_tokens,
        "gen_ai.request.stream": record.streamed,
        "gen_ai.response.id": record.id,
        "gen_ai.response.model": record.model,
        "gen_ai.response.finish_reasons": record.finish_reasons,
        "gen_ai.usage.input_tokens": fields["prompt_tokens"],
        "gen_ai.usage.output_tokens": fields["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": fields["cached_tokens"],
        "skipstone.method": fields["method"],
        "skipstone.drafted_tokens": fields["drafted"],
        "skipstone.accepted_tokens": fields["accepted"],
        "skipstone.cancelled": record.is_cancelled,
    }
    if fields["first_token_ms"] is not None and record.streamed:
        found["gen_ai.response.time_to_first_chunk"] = fields["first_token_ms"] / 1000
    return found
