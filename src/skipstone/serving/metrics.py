"""Prometheus counters under vLLM's names, with the prefix `skipstone:`."""

from typing import Any

from skipstone.decoding.draft import Step
from skipstone.policy.choose_drafter import PLAIN
from skipstone.serving.completions_api import Choice
from skipstone.serving.request_record import RequestRecord
from skipstone.utils.extras import installed

FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
REQUEST_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
"""Bucket limits of histograms, in seconds."""
MAX_POSITIONS = 16
"""Positions of a draft with a counter of their own."""


class Metrics:
    """The counters of a server. model: its name, the label of all counters."""

    def __init__(self, model: str) -> None:
        prometheus = installed("prometheus_client", "a server needs prometheus-client", "serve")
        self._latest = prometheus.generate_latest
        self.content_type = prometheus.CONTENT_TYPE_LATEST
        self.registry = registry = prometheus.CollectorRegistry()
        self._model = {"model_name": model}

        def create(kind: str, name: str, text: str, labels: tuple[str, ...] = (), **more: Any) -> Any:
            metric = getattr(prometheus, kind)(f"skipstone:{name}", text, ("model_name", *labels), registry=registry, **more)
            return metric if labels else metric.labels(**self._model)

        self.running = create("Gauge", "num_requests_running", "Requests that have a row.")
        self.waiting = create("Gauge", "num_requests_waiting", "Requests that wait for a row.")
        self.copies = create("Gauge", "extra_memory_bytes", "Copies of the weights that draft.")
        self._prompt_tokens = create("Counter", "prompt_tokens", "Tokens of prompts.")
        self._cached_tokens = create("Counter", "prefix_cache_hits", "Tokens of prompts with reused keys and values.")
        self._written_tokens = create("Counter", "generation_tokens", "Generated tokens.")
        self._queue_seconds = create("Histogram", "request_queue_time_seconds", "Wait for a row.", buckets=FIRST_TOKEN_BUCKETS)
        self._first_seconds = create("Histogram", "time_to_first_token_seconds", "First token.", buckets=FIRST_TOKEN_BUCKETS)
        self._token_seconds = create("Histogram", "time_per_output_token_seconds", "Further tokens.", buckets=TOKEN_BUCKETS)
        self._request_seconds = create("Histogram", "e2e_request_latency_seconds", "Whole requests.", buckets=REQUEST_BUCKETS)
        self._ended = create("Counter", "request_success", "Requests that have ended.", ("finished_reason",))
        self._requests = create("Counter", "http_requests", "All requests over HTTP.", ("route", "status"))
        self.drafts = create("Counter", "spec_decode_num_drafts", "Drafts.")
        self.drafted = create("Counter", "spec_decode_num_draft_tokens", "Drafted tokens.")
        self.accepted = create("Counter", "spec_decode_num_accepted_tokens", "Accepted draft tokens.")
        self._positions = create("Counter", "spec_decode_num_accepted_tokens_per_pos", "By place in the draft.", ("position",))
        self.draft_seconds = create("Counter", "spec_decode_draft_seconds", "Seconds of drafting.")
        self.verify_seconds = create(
            "Counter", "spec_decode_verify_seconds", "Seconds of scoring, with prompts in the same pass."
        )
        self.setup_seconds = create("Counter", "setup_seconds", "Seconds of set-up work, such as copies of the weights.")
        self._drafters = create("Counter", "spec_decode_steps", "Steps by drafter; plain: no draft.", ("method",))

    def step(self, method: str, step: Step) -> None:
        """Count a step. method: name of its method."""
        self.setup_seconds.inc(sum(step.setup.values()))
        if not step.decoding_rows:
            return
        self.draft_seconds.inc(0.0 if step.prefill else step.seconds_draft)
        self.verify_seconds.inc(step.seconds_score)
        drafter = step.drafter or (method if any(step.drafted) else PLAIN)
        self._drafters.labels(**self._model, method=drafter).inc()
        for drafted, accepted in zip(step.drafted, step.accepted, strict=True):
            if drafted:
                self.drafts.inc()
                self.drafted.inc(drafted)
                self.accepted.inc(accepted)
                for position in range(min(accepted, MAX_POSITIONS)):
                    self._positions.labels(**self._model, position=str(position)).inc()

    def ended(self, choice: Choice) -> None:
        """Count a text that has ended."""
        pending, count = choice.pending, choice.output_text.count
        self._ended.labels(**self._model, finished_reason=choice.finish_reason).inc()
        self._prompt_tokens.inc(len(pending.request.prompt))
        self._cached_tokens.inc(pending.stats.cached_tokens)
        self._written_tokens.inc(count)
        self._request_seconds.observe(choice.seconds)
        if pending.queue_seconds:
            self._queue_seconds.observe(pending.queue_seconds)
        if choice.first_token_seconds is not None:
            self._first_seconds.observe(choice.first_token_seconds)
            if count > 1:
                self._token_seconds.observe((choice.seconds - choice.first_token_seconds) / (count - 1))

    def request(self, record: RequestRecord) -> None:
        """Count an HTTP request that has ended."""
        self._requests.labels(**self._model, route=record.route, status=str(record.status)).inc()

    def text(self) -> bytes:
        """All counters in Prometheus' format."""
        return self._latest(self.registry)
