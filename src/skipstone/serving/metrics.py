"""Prometheus counters under vLLM's names, with `skipstone:` before them."""

from typing import Any

from skipstone.decoding.draft import Step
from skipstone.policy.choose_drafter import PLAIN
from skipstone.serving.answers import Choice
from skipstone.serving.request_record import RequestRecord
from skipstone.utils.extras import installed

FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
REQUEST_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
"""Bucket limits of histograms, in seconds."""
MAX_POSITIONS = 16
"""Positions of a draft with a counter of their own."""


class Metrics:
    """The counters of a server. label: the model's name."""

    def __init__(self, label: str) -> None:
        prometheus = installed("prometheus_client", "a server needs prometheus-client", "serve")
        self._latest = prometheus.generate_latest
        self.content_type = prometheus.CONTENT_TYPE_LATEST
        self.registry = registry = prometheus.CollectorRegistry()
        self._model = {"model_name": label}

        def made(kind: str, name: str, text: str, labels: tuple[str, ...] = (), **more: Any) -> Any:
            make = getattr(prometheus, kind)
            metric = make(f"skipstone:{name}", text, ("model_name", *labels), registry=registry, **more)
            return metric if labels else metric.labels(**self._model)

        self.running = made("Gauge", "num_requests_running", "Requests that have a row.")
        self.waiting = made("Gauge", "num_requests_waiting", "Requests that wait for a row.")
        self._prompt_tokens = made("Counter", "prompt_tokens", "Tokens of prompts.")
        self._cached_tokens = made(
            "Counter", "prefix_cache_hits", "Tokens of prompts whose keys and values were there already."
        )
        self._written_tokens = made("Counter", "generation_tokens", "Tokens that were written.")
        self._queue_seconds = made(
            "Histogram", "request_queue_time_seconds", "Until there was a row.", buckets=FIRST_TOKEN_BUCKETS
        )
        self._first_token_seconds = made(
            "Histogram", "time_to_first_token_seconds", "Until the first token.", buckets=FIRST_TOKEN_BUCKETS
        )
        self._token_seconds = made(
            "Histogram", "time_per_output_token_seconds", "For every further token.", buckets=TOKEN_BUCKETS
        )
        self._request_seconds = made("Histogram", "e2e_request_latency_seconds", "Of whole requests.", buckets=REQUEST_BUCKETS)
        self._ended = made("Counter", "request_success", "Requests that have ended.", ("finished_reason",))
        self._requests = made("Counter", "http_requests", "Requests over HTTP, all of them.", ("route", "status"))
        self.drafts = made("Counter", "spec_decode_num_drafts", "Drafts.")
        self.drafted = made("Counter", "spec_decode_num_draft_tokens", "Tokens that were drafted.")
        self.accepted = made("Counter", "spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.")
        self._places = made("Counter", "spec_decode_num_accepted_tokens_per_pos", "By place in the draft.", ("position",))
        self.draft_seconds = made("Counter", "spec_decode_draft_seconds", "Spent on drafting.")
        self.verify_seconds = made("Counter", "spec_decode_verify_seconds", "Spent on scoring.")
        self._drafters = made("Counter", "spec_decode_steps", "Steps, by what drafted; plain: nothing.", ("method",))

    def step(self, method: str, step: Step) -> None:
        """Count a step. method: name of its method."""
        if step.prefill:
            return
        self.draft_seconds.inc(step.seconds_draft)
        self.verify_seconds.inc(step.seconds_score)
        drafter = step.drafter or (method if any(step.drafted) else PLAIN)
        self._drafters.labels(**self._model, method=drafter).inc()
        for drafted, accepted in zip(step.drafted, step.accepted, strict=True):
            if drafted:
                self.drafts.inc()
                self.drafted.inc(drafted)
                self.accepted.inc(accepted)
                for place in range(min(accepted, MAX_POSITIONS)):
                    self._places.labels(**self._model, position=str(place)).inc()

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
            self._first_token_seconds.observe(choice.first_token_seconds)
            if count > 1:
                self._token_seconds.observe((choice.seconds - choice.first_token_seconds) / (count - 1))

    def request(self, record: RequestRecord) -> None:
        """Count an HTTP request that has ended."""
        self._requests.labels(**self._model, route=record.route, status=str(record.status)).inc()

    def text(self) -> bytes:
        """All counters in Prometheus' format."""
        return self._latest(self.registry)
