"""What happened to requests, as OpenAI's JSON: whole answers and chunks of a stream."""

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

CALLED = "tool_calls"
"""Why a text has ended that calls tools."""


@dataclass
class Choice:
    """One text while it is written. calls: where tools are offered. reason: why it has ended, None until then. first: seconds
    until its first token. text: that is shown. told: reads the tokens whose log-probabilities are told. steps: reads those of
    the steps that are told. echoed: whether a stream has told its prompt. is_streamed: whether what is told of tokens is
    told piece by piece and need not be kept."""

    index: int
    pending: PendingRequest
    output_text: OutputText
    calls: ToolCallParser | None = None
    reason: str | None = None
    first: float | None = None
    seconds: float = 0.0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    text: str = ""
    told: TokenReader | None = None
    steps: TokenReader | None = None
    echoed: bool = False
    is_streamed: bool = False

    def shown(self, text: str) -> str:
        """The part of a further piece of text that is no call, or may not be one."""
        text = text if self.calls is None else self.calls.add(text)
        self.text += text
        return text

    def end(self, reason: str) -> str:
        """Nothing more is written. Returns what was held back and is no call."""
        text = "" if self.calls is None else self.calls.rest()
        self.text += text
        self.reason = CALLED if reason == STOP and self.called else reason
        return text

    @property
    def called(self) -> list[dict[str, Any]]:
        """The calls, as OpenAI's JSON."""
        return [] if self.calls is None else [one.told() for one in self.calls.found]


class Answer:
    """A whole response. chat: whether it is a chat's."""

    def __init__(self, model: str, choices: Sequence[Choice], *, chat: bool, tokenizer: Any) -> None:
        self.model, self.choices, self.chat, self.tokenizer = model, choices, chat, tokenizer
        self.id = ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12)
        self.created = int(time.time())

    def _head(self, chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def whole(self, metrics: bool) -> dict[str, Any]:
        """The answer that is sent at once."""
        choices = []
        for choice in self.choices:
            content: dict[str, Any] = {"index": choice.index, "finish_reason": choice.reason}
            told = choice.pending.num_logprobs is not None
            prompt = self._prompt(choice) if choice.pending.echo else ""
            read = self._read(choice) if told and choice.pending.echo else {}
            written = self._logprobs(choice, choice.logprobs, choice.tokens) if told else None
            content["logprobs"] = {name: read[name] + each for name, each in written.items()} if written and read else written
            content |= {"message": _message(choice)} if self.chat else {"text": prompt + choice.text}
            choices.append(content)
        found = {**self._head(chunk=False), "choices": choices, "usage": self.usage()}
        return found | (self.metrics() if metrics else {})

    def beginning(self) -> list[dict[str, Any]]:
        """Chunks before any text."""
        if not self.chat:
            return []
        return [self._chunk(choice, {"role": "assistant", "content": ""}, None) for choice in self.choices]

    def prompt(self, choice: Choice) -> dict[str, Any] | None:
        """The chunk that tells a prompt, before any other of its text; None where nobody asks, or it was told. What the model
        thinks of the prompt is known when there is a first piece."""
        if choice.echoed or not choice.pending.echo:
            return None
        choice.echoed = True
        found = self._chunk(choice, {}, None, self._prompt(choice))
        if choice.pending.num_logprobs is not None:
            found["choices"][0]["logprobs"] = self._read(choice)
        return found

    def chunk(
        self, choice: Choice, text: str, output: StepOutput | None, start: int, speculative: bool | str
    ) -> dict[str, Any] | None:
        """One more piece of a text; None where it has nothing to say. piece: that brought it. start: tokens before it."""
        told = choice.pending.num_logprobs is not None and output is not None and output.logprobs is not None
        if not (text or choice.reason or told or (speculative and output)):
            return None
        delta: dict[str, Any] = {"content": text} if text or not choice.reason else {}
        if choice.reason and choice.calls is not None and choice.calls.found:
            delta["tool_calls"] = [one.told(index) for index, one in enumerate(choice.calls.found)]
        found = self._chunk(choice, delta, choice.reason, text)
        if told and output is not None and output.logprobs is not None:
            count = choice.output_text.count - start
            found["choices"][0]["logprobs"] = self._logprobs(choice, output.logprobs[:count], output.tokens[:count])
        if speculative and output is not None:
            choice.steps = choice.steps or self._reader(choice)
            found["speculative"] = self._step(output, choice.steps)
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
        """What a page colours tokens by, and its details where it asks for them. reader: has read the tokens before."""
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

    def _prompt(self, choice: Choice) -> str:
        """The text of a prompt, which an answer begins with that echoes it."""
        text = str(self.tokenizer.decode(choice.pending.prompt_ids, skip_special_tokens=True))
        return text.removesuffix(choice.output_text.prompt_end)

    def _read(self, choice: Choice) -> dict[str, Any]:
        """Log-probabilities of a prompt's tokens. Nothing comes before the first, which has none."""
        first, *rest = choice.pending.prompt_ids
        choice.told = TokenReader(self.tokenizer)
        before = {"tokens": choice.told.text(first), "token_logprobs": None, "top_logprobs": None, "text_offset": 0}
        choice.told.add(first)
        told = self._logprobs(choice, choice.pending.prompt_logprobs or [], rest)
        choice.told.ends = choice.output_text.ends
        return {name: [before[name], *each] for name, each in told.items()}

    def _logprobs(self, choice: Choice, logprobs: Sequence[TokenLogprobs], tokens: Sequence[int]) -> dict[str, Any]:
        reader = choice.told = choice.told or self._reader(choice)
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

    def ending(self, metrics: bool) -> dict[str, Any]:
        """The chunk with the usage."""
        return {**self._head(chunk=True), "choices": [], "usage": self.usage()} | (self.metrics() if metrics else {})

    def usage(self) -> dict[str, Any]:
        """Tokens that were read and written; a prompt counts once for all its choices."""
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
        first = min((choice.first for choice in self.choices if choice.first is not None), default=0.0)
        waited = max(choice.pending.queue_seconds for choice in self.choices)
        return {
            "metrics": {
                "time_to_first_token_ms": round(1000 * first, 3),
                "generation_time_ms": round(1000 * (seconds - first), 3),
                "queue_time_ms": round(1000 * waited, 3),
                "tokens_per_second": round(total.tokens / seconds, 3) if seconds else 0.0,
                "speculative_decoding": speculative(total),
            },
            "timings": {"draft_n": total.drafted, "draft_n_accepted": total.accepted},
        }


def speculative(stats: RequestStats) -> dict[str, Any]:
    """As vLLM tells it. Histograms: steps by how many drafts they accepted."""
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
    called = choice.called
    found = {"role": "assistant", "content": choice.text if choice.text or not called else None, "refusal": None}
    return found | ({"tool_calls": called} if called else {})


def _token_details(one: TokenDetails) -> dict[str, Any]:
    """What is known of a token."""
    chances = {"p": one.model, "draft_p": one.drafter, "confidence": one.confidence}
    found: dict[str, Any] = {name: round(chance, 4) for name, chance in chances.items() if chance is not None}
    if one.layer is not None:
        found["layer"] = one.layer
    return found | ({"overruled": True} if one.overruled else {})


def _step_details(details: StepDetails) -> dict[str, Any]:
    """How many refused drafts are left out; layers and a plain step's time, where there is something new."""
    found: dict[str, Any] = {"left_out": details.left_out}
    if details.layers is not None:
        found["layers"] = details.layers
    if details.plain_milliseconds is not None:
        found["plain_ms"] = round(details.plain_milliseconds, 4)
    return found


def _rejected(details: StepDetails, reader: TokenReader) -> list[dict[str, Any]]:
    """Refused drafts by the place at which they were."""
    return [
        {
            "at": branch.place,
            "tokens": [{"id": one.token, "text": reader.text(one.token)} | _token_details(one) for one in branch.tokens],
        }
        for branch in details.refused
    ]


def _top_logprobs(one: TokenLogprobs, reader: TokenReader) -> dict[str, float]:
    """By text: tokens that are parts of characters may have the same, which then is that of the likeliest."""
    found: dict[str, float] = {}
    for token, value in one.top:
        found.setdefault(reader.text(token), value)
    return found
