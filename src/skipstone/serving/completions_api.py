"""The JSON of /v1/completions and /v1/chat/completions: whole answers, and chunks of a stream."""

import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from skipstone.serving.api_schemas import ChatBody
from skipstone.serving.errors import RequestError, error_body
from skipstone.serving.logprobs import TokenReader
from skipstone.serving.output_text import OutputText
from skipstone.serving.pending_request import STOP, PendingRequest, RequestStats, StepOutput, TokenLogprobs
from skipstone.serving.step_details import StepDetails, TokenDetails
from skipstone.serving.tool_call_parser import ToolCallParser

TOOL_CALLS = "tool_calls"
"""The finish reason of a text that calls tools."""


@dataclass
class Choice:
    """One text while it is written.

    calls: parser of tool calls, None if no tools are offered. finish_reason: None until the end. first_token_seconds: from
    arrival to the first token. text: what the client is shown. logprob_reader, step_reader: read the tokens whose
    log-probabilities, or whose steps, are reported. has_sent_prompt: whether a stream has sent the echoed prompt. is_streamed:
    whether log-probabilities are sent piece by piece and need not be kept."""

    index: int
    pending: PendingRequest
    output_text: OutputText
    calls: ToolCallParser | None = None
    finish_reason: str | None = None
    first_token_seconds: float | None = None
    seconds: float = 0.0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    text: str = ""
    logprob_reader: TokenReader | None = None
    step_reader: TokenReader | None = None
    has_sent_prompt: bool = False
    is_streamed: bool = False

    def add_text(self, text: str) -> str:
        """Add a piece of text. Returns what is certainly not part of a tool call."""
        text = text if self.calls is None else self.calls.add(text)
        self.text += text
        return text

    def end(self, reason: str) -> str:
        """End the text. Returns what was held back and is not part of a tool call."""
        text = "" if self.calls is None else self.calls.rest()
        self.text += text
        self.finish_reason = TOOL_CALLS if reason == STOP and self.calls is not None and self.calls.found else reason
        return text


Update = tuple[Choice, str, StepOutput | None, int]
"""(choice, its new text, the output that brought it, number of tokens before that)."""
Updates = AsyncGenerator[Update, None]


class Completion:
    """The answer to one body, with all its choices. body: of the request."""

    def __init__(self, model: str, choices: Sequence[Choice], body: Any, tokenizer: Any) -> None:
        self.model, self.choices, self.body, self.tokenizer = model, choices, body, tokenizer
        self.is_chat = isinstance(body, ChatBody)
        self.created = int(time.time())
        self.set_id(secrets.token_hex(12))

    def set_id(self, digits: str) -> None:
        """Make the id of hexadecimal digits."""
        self.id = ("chatcmpl-" if self.is_chat else "cmpl-") + digits

    def json_body(self) -> dict[str, Any]:
        """The whole answer, when all texts have ended."""
        choices = []
        for choice in self.choices:
            content: dict[str, Any] = {"index": choice.index, "finish_reason": choice.finish_reason, "logprobs": None}
            prompt = self._prompt_text(choice) if choice.pending.echo else ""
            if choice.pending.num_logprobs is not None:
                of_prompt = self._prompt_logprobs(choice) if choice.pending.echo else {}
                written = self._logprobs(choice, choice.logprobs, choice.tokens)
                content["logprobs"] = written | {name: each + written[name] for name, each in of_prompt.items()}
            content |= {"message": _message(choice)} if self.is_chat else {"text": prompt + choice.text}
            choices.append(content)
        return self._whole(choices, is_chunk=False)

    def _whole(self, choices: list[Any], is_chunk: bool) -> dict[str, Any]:
        """A body, or the last chunk, with the figures of all texts."""
        return {**self._head(is_chunk), "choices": choices, "usage": self.usage()} | self._requested_metrics()

    async def events(self, updates: Updates) -> AsyncIterator[Any]:
        """The chunks of a stream, as server-sent events."""
        async with aclosing(updates):
            try:
                if self.is_chat:
                    for choice in self.choices:
                        yield event_json(self._chunk(choice, {"role": "assistant", "content": ""}, None))
                async for choice, text, output, start in updates:
                    if choice.pending.echo and not choice.has_sent_prompt:
                        yield event_json(self._prompt_chunk(choice))
                    if (chunk := self.chunk(choice, text, output, start)) is not None:
                        yield event_json(chunk)
                if self.body.wants_usage:
                    yield event_json(self._whole([], is_chunk=True))
            except RequestError as error:
                yield event_json(error_body(error))
        yield "[DONE]"

    def _head(self, is_chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if is_chunk else "chat.completion") if self.is_chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _prompt_chunk(self, choice: Choice) -> dict[str, Any]:
        """The chunk with the echoed prompt. Its log-probabilities are known when the first output comes."""
        choice.has_sent_prompt = True
        found = self._chunk(choice, {}, None, self._prompt_text(choice))
        if choice.pending.num_logprobs is not None:
            found["choices"][0]["logprobs"] = self._prompt_logprobs(choice)
        return found

    def chunk(self, choice: Choice, text: str, output: StepOutput | None, start: int) -> dict[str, Any] | None:
        """A chunk with new text; None if there is nothing to report. output: brought the text. start: number of tokens before
        it."""
        speculative = self.body.stream_speculative
        logprobs = output.logprobs if output is not None and choice.pending.num_logprobs is not None else None
        if not (text or choice.finish_reason or logprobs is not None or (speculative and output)):
            return None
        delta: dict[str, Any] = {"content": text} if text or not choice.finish_reason else {}
        if choice.finish_reason and choice.calls is not None and choice.calls.found:
            delta["tool_calls"] = [one.body(index) for index, one in enumerate(choice.calls.found)]
        found = self._chunk(choice, delta, choice.finish_reason, text)
        if output is not None and logprobs is not None:
            count = choice.output_text.count - start
            found["choices"][0]["logprobs"] = self._logprobs(choice, logprobs[:count], output.tokens[:count])
        if speculative and output is not None:
            choice.step_reader = choice.step_reader or self._reader(choice)
            found["speculative"] = step_json(output, choice.step_reader)
        return found

    def _chunk(self, choice: Choice, delta: dict[str, Any], reason: str | None, text: str = "") -> dict[str, Any]:
        content = {"delta": delta} if self.is_chat else {"text": text}
        head = {"index": choice.index, "finish_reason": reason, "logprobs": None}
        return {**self._head(is_chunk=True), "choices": [{**head, **content}]}

    def _reader(self, choice: Choice) -> TokenReader:
        """A reader that has read a choice's prompt."""
        output_text = choice.output_text
        return TokenReader(self.tokenizer, choice.pending.prompt_ids, output_text.ends, special=output_text.special)

    def _prompt_text(self, choice: Choice) -> str:
        """The text of a prompt that the answer echoes."""
        text = str(self.tokenizer.decode(choice.pending.prompt_ids, skip_special_tokens=True))
        return text.removesuffix(choice.output_text.prompt_end)

    def _prompt_logprobs(self, choice: Choice) -> dict[str, Any]:
        """Log-probabilities of a prompt's tokens. The first token has none."""
        first, *rest = choice.pending.prompt_ids
        reader = choice.logprob_reader = TokenReader(self.tokenizer)
        before = {"tokens": reader.text(first), "token_logprobs": None, "top_logprobs": None, "text_offset": 0}
        reader.add(first)
        others = self._logprobs(choice, choice.pending.prompt_logprobs or [], rest)
        reader.ends = choice.output_text.ends
        return {name: [before[name], *each] for name, each in others.items()}

    def _logprobs(self, choice: Choice, logprobs: Sequence[TokenLogprobs], tokens: Sequence[int]) -> dict[str, Any]:
        reader = choice.logprob_reader = choice.logprob_reader or self._reader(choice)
        content: list[dict[str, Any]] = []
        found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, one in zip(tokens, logprobs, strict=True):
            if self.is_chat:
                top = [reader.entry(other, value) for other, value in one.top]
                content.append({**reader.entry(token, one.logprob), "top_logprobs": top})
                reader.add(token)
            else:
                likeliest: dict[str, float] = {}
                for other, value in one.top:  # parts of characters may have the same text; then the likeliest counts
                    likeliest.setdefault(reader.text(other), value)
                entry = reader.text(token), one.logprob, likeliest, reader.add(token)
                for name, value in zip(found, entry, strict=True):
                    found[name].append(value)
        return {"content": content, "refusal": None} if self.is_chat else found

    @property
    def first_token_seconds(self) -> float | None:
        """From arrival to the first token of any text; None before it."""
        return min((one.first_token_seconds for one in self.choices if one.first_token_seconds is not None), default=None)

    @property
    def stats(self) -> RequestStats:
        """Of all texts."""
        return RequestStats.total(choice.pending.stats for choice in self.choices)

    def usage(self) -> dict[str, Any]:
        """Numbers of prompt and written tokens. A prompt counts once for all its choices."""
        prompts = {id(choice.pending.request.prompt): len(choice.pending.request.prompt) for choice in self.choices}
        read, written = sum(prompts.values()), sum(choice.output_text.count for choice in self.choices)
        stats = [choice.pending.stats for choice in self.choices]  # not their total: a row that is left may still be writing
        found: dict[str, Any] = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
        found["prompt_tokens_details"] = {"cached_tokens": min(sum(one.cached_tokens for one in stats), read)}
        if predicted := sum(len(choice.pending.request.prediction) for choice in self.choices):
            accepted = sum(one.accepted_prediction_tokens for one in stats)
            details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": max(predicted - accepted, 0)}
            found["completion_tokens_details"] = details
        return found

    def _requested_metrics(self) -> dict[str, Any]:
        """vLLM's block of figures and llama.cpp's two numbers, if the body asks for them."""
        if not self.body.return_metrics:
            return {}
        stats, first = self.stats, self.first_token_seconds or 0.0
        seconds = max(choice.seconds for choice in self.choices)
        waited, further = max(choice.pending.queue_seconds for choice in self.choices), max(stats.tokens - len(self.choices), 0)
        return {
            "metrics": {
                "time_to_first_token_ms": round(1000 * first, 3),
                "generation_time_ms": round(1000 * (seconds - first), 3),
                "queue_time_ms": round(1000 * waited, 3),
                "setup_time_ms": round(1000 * max(choice.pending.stats.setup_seconds for choice in self.choices), 3),
                "tokens_per_second": round(stats.tokens / seconds, 3) if seconds else 0.0,
                "steady_tokens_per_second": round(further / (seconds - first), 3) if seconds > first else 0.0,
                "speculative_decoding": speculative_metrics(stats),
            },
            "timings": {"draft_n": stats.drafted, "draft_n_accepted": stats.accepted},
        }


def event_json(value: Any) -> str:
    """A value as the data of a server-sent event."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def speculative_metrics(stats: RequestStats) -> dict[str, Any]:
    """vLLM's block of figures. Histograms: number of steps by number of accepted drafts."""
    drafts, steps, drafted, accepted = stats.drafts, stats.steps, stats.drafted, stats.accepted
    lengths = sorted({length for length, _ in drafts})

    def histogram(*of_lengths: int) -> list[int]:
        return [sum(drafts[length, count] for length in of_lengths) for count in range(max(of_lengths, default=-1) + 1)]

    return {
        "mean_acceptance_length": 1 + accepted / steps if steps else 0.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": histogram(*lengths),
        "acceptance_histogram_by_draft_length": {str(length): histogram(length) for length in lengths},
        "num_spec_steps": drafts.total(),
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "drafters": dict(stats.drafters),
    }


def _message(choice: Choice) -> dict[str, Any]:
    """The answer of a chat. One that is nothing but calls has no content."""
    calls = [] if choice.calls is None else [one.body() for one in choice.calls.found]
    found = {"role": "assistant", "content": choice.text if choice.text or not calls else None, "refusal": None}
    return found | ({"tool_calls": calls} if calls else {})


def step_json(output: StepOutput, reader: TokenReader) -> dict[str, Any]:
    """The step that committed tokens, with its details if it has them. reader: has read the tokens before."""
    details = output.details or StepDetails([TokenDetails(token) for token in output.tokens])
    found: dict[str, Any] = {
        "step": output.step,
        "tokens": [],
        "drafted": output.drafted,
        "drafter": output.drafter,
        "reason": output.reason,
        "draft_ms": round(output.milliseconds[0], 3),
        "verify_ms": round(output.milliseconds[1], 3),
    }
    if output.details is not None:
        rejected = [(one.place, [_token_json(token, reader) for token in one.tokens]) for one in details.rejected]
        found["refused"] = [{"at": place, "tokens": tokens} for place, tokens in rejected]
        found["left_out"] = details.left_out
    if details.layers is not None:
        found["layers"] = details.layers
    if details.plain_milliseconds is not None:
        found["plain_ms"] = round(details.plain_milliseconds, 4)
    for one, origin in zip(details.tokens, output.origin, strict=True):
        found["tokens"].append(_token_json(one, reader) | {"origin": origin})
        reader.add(one.token)
    return found


def _token_json(details: TokenDetails, reader: TokenReader) -> dict[str, Any]:
    numbers = {"p": details.model, "draft_p": details.drafter, "confidence": details.confidence, "layer": details.layer}
    known = {name: round(value, 4) for name, value in numbers.items() if value is not None}
    overruled = {"overruled": True} if details.overruled else {}
    return {"id": details.token, "text": reader.text(details.token), **known, **overruled}
