"""Answers as OpenAI's JSON: whole bodies, and chunks of a stream."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from skipstone.serving.logprobs import TokenReader
from skipstone.serving.output_text import OutputText
from skipstone.serving.pending_request import STOP, PendingRequest, RequestStats, StepOutput, TokenLogprobs
from skipstone.serving.step_details import StepDetails, TokenDetails
from skipstone.serving.tools import ToolCallParser

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
        self.finish_reason = TOOL_CALLS if reason == STOP and self.tool_calls else reason
        return text

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The calls, as OpenAI's JSON."""
        return [] if self.calls is None else [one.body() for one in self.calls.found]


class Answer:
    """The answer to one body, with all its choices. chat: whether it has the form of a chat."""

    def __init__(self, model: str, choices: Sequence[Choice], *, chat: bool, tokenizer: Any) -> None:
        self.model, self.choices, self.chat, self.tokenizer = model, choices, chat, tokenizer
        self.id = ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12)
        self.created = int(time.time())

    def _head(self, chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def body(self, metrics: bool) -> dict[str, Any]:
        """The answer in one body, when all texts have ended."""
        choices = []
        for choice in self.choices:
            content: dict[str, Any] = {"index": choice.index, "finish_reason": choice.finish_reason}
            told = choice.pending.num_logprobs is not None
            prompt = self._prompt_text(choice) if choice.pending.echo else ""
            read = self._prompt_logprobs(choice) if told and choice.pending.echo else {}
            written = self._logprobs(choice, choice.logprobs, choice.tokens) if told else None
            content["logprobs"] = {name: read[name] + each for name, each in written.items()} if written and read else written
            content |= {"message": _message(choice)} if self.chat else {"text": prompt + choice.text}
            choices.append(content)
        found = {**self._head(chunk=False), "choices": choices, "usage": self.usage()}
        return found | (self.metrics() if metrics else {})

    def first_chunks(self) -> list[dict[str, Any]]:
        """Chunks before any text."""
        if not self.chat:
            return []
        return [self._chunk(choice, {"role": "assistant", "content": ""}, None) for choice in self.choices]

    def prompt_chunk(self, choice: Choice) -> dict[str, Any] | None:
        """The chunk with the echoed prompt; None if it is not wanted or was sent. Its log-probabilities are known when the
        first output comes."""
        if choice.has_sent_prompt or not choice.pending.echo:
            return None
        choice.has_sent_prompt = True
        found = self._chunk(choice, {}, None, self._prompt_text(choice))
        if choice.pending.num_logprobs is not None:
            found["choices"][0]["logprobs"] = self._prompt_logprobs(choice)
        return found

    def chunk(
        self, choice: Choice, text: str, output: StepOutput | None, start: int, speculative: bool | str
    ) -> dict[str, Any] | None:
        """A chunk with new text; None if there is nothing to report. output: brought the text. start: number of tokens before
        it."""
        told = choice.pending.num_logprobs is not None and output is not None and output.logprobs is not None
        if not (text or choice.finish_reason or told or (speculative and output)):
            return None
        delta: dict[str, Any] = {"content": text} if text or not choice.finish_reason else {}
        if choice.finish_reason and choice.calls is not None and choice.calls.found:
            delta["tool_calls"] = [one.body(index) for index, one in enumerate(choice.calls.found)]
        found = self._chunk(choice, delta, choice.finish_reason, text)
        if told and output is not None and output.logprobs is not None:
            count = choice.output_text.count - start
            found["choices"][0]["logprobs"] = self._logprobs(choice, output.logprobs[:count], output.tokens[:count])
        if speculative and output is not None:
            choice.step_reader = choice.step_reader or self._reader(choice)
            found["speculative"] = self._step(output, choice.step_reader)
        return found

    def _chunk(self, choice: Choice, delta: dict[str, Any], reason: str | None, text: str = "") -> dict[str, Any]:
        content = {"delta": delta} if self.chat else {"text": text}
        head = {"index": choice.index, "finish_reason": reason, "logprobs": None}
        return {**self._head(chunk=True), "choices": [{**head, **content}]}

    def _reader(self, choice: Choice) -> TokenReader:
        """Has read a choice's prompt."""
        return TokenReader(
            self.tokenizer, choice.pending.prompt_ids, choice.output_text.ends, special=choice.output_text.special
        )

    def _step(self, output: StepOutput, reader: TokenReader | None = None) -> dict[str, Any]:
        """The step that committed tokens, with its details if wanted. reader: has read the tokens before."""
        details = output.details
        seen: Sequence[TokenDetails | None] = [None] * len(output.tokens) if details is None else details.tokens
        reader = reader or TokenReader(self.tokenizer)
        refused = [] if details is None else _rejected(details, reader)
        tokens = []
        for token, origin, one in zip(output.tokens, output.origin, seen, strict=True):
            tokens.append(
                {"id": token, "text": reader.text(token), "origin": origin} | ({} if one is None else _token_details(one))
            )
            reader.add(token)
        found: dict[str, Any] = {
            "step": output.step,
            "tokens": tokens,
            "drafted": output.drafted,
            "drafter": output.drafter,
            "reason": output.reason,
            "draft_ms": round(output.milliseconds[0], 3),
            "verify_ms": round(output.milliseconds[1], 3),
        }
        return found if details is None else found | {"refused": refused} | _step_details(details)

    def _prompt_text(self, choice: Choice) -> str:
        """The text of a prompt that the answer echoes."""
        text = str(self.tokenizer.decode(choice.pending.prompt_ids, skip_special_tokens=True))
        return text.removesuffix(choice.output_text.prompt_end)

    def _prompt_logprobs(self, choice: Choice) -> dict[str, Any]:
        """Log-probabilities of a prompt's tokens. The first token has none."""
        first, *rest = choice.pending.prompt_ids
        choice.logprob_reader = TokenReader(self.tokenizer)
        before = {"tokens": choice.logprob_reader.text(first), "token_logprobs": None, "top_logprobs": None, "text_offset": 0}
        choice.logprob_reader.add(first)
        told = self._logprobs(choice, choice.pending.prompt_logprobs or [], rest)
        choice.logprob_reader.ends = choice.output_text.ends
        return {name: [before[name], *each] for name, each in told.items()}

    def _logprobs(self, choice: Choice, logprobs: Sequence[TokenLogprobs], tokens: Sequence[int]) -> dict[str, Any]:
        reader = choice.logprob_reader = choice.logprob_reader or self._reader(choice)
        content: list[dict[str, Any]] = []
        found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, one in zip(tokens, logprobs, strict=True):
            if self.chat:
                top = [reader.entry(other, value) for other, value in one.top]
                content.append({**reader.entry(token, one.logprob), "top_logprobs": top})
                reader.add(token)
            else:
                told = reader.text(token), one.logprob, _top_logprobs(one, reader), reader.add(token)
                for name, value in zip(found, told, strict=True):
                    found[name].append(value)
        return {"content": content, "refusal": None} if self.chat else found

    def usage_chunk(self, metrics: bool) -> dict[str, Any]:
        """The chunk with the usage."""
        return {**self._head(chunk=True), "choices": [], "usage": self.usage()} | (self.metrics() if metrics else {})

    def usage(self) -> dict[str, Any]:
        """Numbers of prompt and written tokens. A prompt counts once for all its choices."""
        prompts = {id(choice.pending.request.prompt): len(choice.pending.request.prompt) for choice in self.choices}
        read, written = sum(prompts.values()), sum(choice.output_text.count for choice in self.choices)
        reused = sum(choice.pending.stats.cached_tokens for choice in self.choices)
        found: dict[str, Any] = {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
            "prompt_tokens_details": {"cached_tokens": min(reused, read)},
        }
        if predicted := sum(len(choice.pending.request.prediction) for choice in self.choices):
            accepted = sum(choice.pending.stats.accepted_prediction_tokens for choice in self.choices)
            found["completion_tokens_details"] = {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": max(predicted - accepted, 0),
            }
        return found

    def metrics(self) -> dict[str, Any]:
        """vLLM's block of figures, and llama.cpp's two numbers."""
        total = RequestStats()
        for choice in self.choices:
            for name in ("tokens", "steps", "draft_steps", "drafted", "accepted"):
                setattr(total, name, getattr(total, name) + getattr(choice.pending.stats, name))
            for length, counts in choice.pending.stats.by_length.items():
                total.by_length.setdefault(length, type(counts)()).update(counts)
            total.drafters.update(choice.pending.stats.drafters)
        seconds = max(choice.seconds for choice in self.choices)
        first = min(
            (choice.first_token_seconds for choice in self.choices if choice.first_token_seconds is not None), default=0.0
        )
        waited = max(choice.pending.queue_seconds for choice in self.choices)
        return {
            "metrics": {
                "time_to_first_token_ms": round(1000 * first, 3),
                "generation_time_ms": round(1000 * (seconds - first), 3),
                "queue_time_ms": round(1000 * waited, 3),
                "tokens_per_second": round(total.tokens / seconds, 3) if seconds else 0.0,
                "speculative_decoding": speculative_metrics(total),
            },
            "timings": {"draft_n": total.drafted, "draft_n_accepted": total.accepted},
        }


def speculative_metrics(stats: RequestStats) -> dict[str, Any]:
    """vLLM's block of figures. Histograms: number of steps by number of accepted drafts."""
    longest = max(stats.by_length, default=0)
    whole = [sum(counts[accepted] for counts in stats.by_length.values()) for accepted in range(longest + 1)]
    return {
        "mean_acceptance_length": 1 + stats.accepted / stats.steps if stats.steps else 0.0,
        "draft_acceptance_rate": stats.accepted / stats.drafted if stats.drafted else 0.0,
        "acceptance_histogram": whole if stats.draft_steps else [],
        "acceptance_histogram_by_draft_length": {
            str(length): [counts[accepted] for accepted in range(length + 1)]
            for length, counts in sorted(stats.by_length.items())
        },
        "num_spec_steps": stats.draft_steps,
        "num_accepted_draft_tokens": stats.accepted,
        "num_draft_tokens": stats.drafted,
        "drafters": dict(stats.drafters),
    }


def _message(choice: Choice) -> dict[str, Any]:
    """The answer of a chat. One that is nothing but calls has no content."""
    calls = choice.tool_calls
    found = {"role": "assistant", "content": choice.text if choice.text or not calls else None, "refusal": None}
    return found | ({"tool_calls": calls} if calls else {})


def _token_details(one: TokenDetails) -> dict[str, Any]:
    """What the playground shows of a token."""
    chances = {"p": one.model, "draft_p": one.drafter, "confidence": one.confidence}
    found: dict[str, Any] = {name: round(chance, 4) for name, chance in chances.items() if chance is not None}
    if one.layer is not None:
        found["layer"] = one.layer
    return found | ({"overruled": True} if one.overruled else {})


def _step_details(details: StepDetails) -> dict[str, Any]:
    """Number of rejected branches left out; layers and time of a plain step if they have changed."""
    found: dict[str, Any] = {"left_out": details.left_out}
    if details.layers is not None:
        found["layers"] = details.layers
    if details.plain_milliseconds is not None:
        found["plain_ms"] = round(details.plain_milliseconds, 4)
    return found


def _rejected(details: StepDetails, reader: TokenReader) -> list[dict[str, Any]]:
    """Rejected drafts with their places."""
    return [
        {
            "at": branch.place,
            "tokens": [{"id": one.token, "text": reader.text(one.token)} | _token_details(one) for one in branch.tokens],
        }
        for branch in details.rejected
    ]


def _top_logprobs(one: TokenLogprobs, reader: TokenReader) -> dict[str, float]:
    """Text -> log-probability. Parts of characters may have the same text; then the likeliest counts."""
    found: dict[str, float] = {}
    for token, value in one.top:
        found.setdefault(reader.text(token), value)
    return found
