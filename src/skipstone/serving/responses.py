"""/v1/responses, text only: OpenAI's newer form of a chat, made of the same requests."""

import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any, Literal

from pydantic import Field

from skipstone.serving import errors
from skipstone.serving.answers import Answer
from skipstone.serving.pending_request import LENGTH, RequestError
from skipstone.serving.schemas import (
    Body,
    ChatBody,
    CompletionBody,
    Format,
    GenerationBody,
    Message,
    RequestBody,
    Schema,
    TextPart,
)
from skipstone.serving.server import Updates


class InputPart(Body):
    """A part of an item. An assistant's has annotations, which say nothing to a model."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class Item(Body):
    """A turn of the conversation, as it is sent or as an earlier response had it."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputPart]
    id: str | None = None
    status: str | None = None
    phase: str | None = None

    def message(self) -> Message:
        """As a chat has it."""
        if isinstance(self.content, str):
            return Message(role=self.role, content=self.content)
        return Message(role=self.role, content=[TextPart(type="text", text=part.text) for part in self.content])


class TextFormat(Body):
    """text.format: response_format of a chat, one level flatter."""

    type: Literal["text", "json_object", "json_schema"]
    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    def format(self) -> Format:
        """As a chat has it."""
        if self.schema_ is None:
            return Format(type=self.type)
        return Format(type=self.type, json_schema=Schema(name=self.name, schema=self.schema_))


class TextSettings(Body):
    """text: of what form it is."""

    format: TextFormat | None = None


class ResponseBody(RequestBody):
    """/v1/responses. input: a text, or the turns of a conversation. What would need a store of earlier responses, tools or
    anything but text is refused."""

    model: str | None = None
    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    stream: bool = False
    text: TextSettings | None = None
    store: bool | None = None
    truncation: Literal["disabled"] | None = None
    metadata: dict[str, str] | None = Field(default=None, max_length=16)
    user: str | None = None
    prompt_cache_key: str | None = None
    speculative: str | dict[str, Any] | None = None
    return_metrics: bool = False

    def generation_body(self, chats: bool) -> GenerationBody:
        """The same request as a chat, or as a completion if the model has no chats. ValueError if that is impossible."""
        wanted = None if self.text is None or self.text.format is None else self.text.format.format()
        common: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "response_format": wanted,
            "speculative": self.speculative,
        }
        if not chats:
            if not isinstance(self.input, str) or self.instructions is not None:
                raise ValueError("this model has no chat template: input is the text that it goes on with, and nothing else")
            text = CompletionBody(prompt=self.input, **common)
            return text.model_copy(update={"max_tokens": self.max_output_tokens})  # None: as many as fit
        turns = (
            [Message(role="user", content=self.input)] if isinstance(self.input, str) else [one.message() for one in self.input]
        )
        if self.instructions is not None:
            turns.insert(0, Message(role="system", content=self.instructions))
        return ChatBody(messages=turns, max_completion_tokens=self.max_output_tokens, **common)


class ResponseFormatter:
    """A response as a whole body, and as events."""

    def __init__(self, answer: Answer, body: ResponseBody) -> None:
        self.answer, self.body, (self.choice,) = answer, body, answer.choices
        self.id, self.item = f"resp_{secrets.token_hex(12)}", f"msg_{secrets.token_hex(12)}"
        answer.id = self.id  # for the log
        self._number = 0  # of the next event

    def complete_body(self) -> dict[str, Any]:
        """The response when all is written."""
        cut = self.choice.finish_reason == LENGTH
        status = "incomplete" if cut else "completed"
        usage = self.answer.usage()
        found = self._response(status, [self._item(status)])
        found["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        found["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        return found | (self.answer.metrics() if self.body.return_metrics else {})

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body = self.body
        wanted = {"type": "text"} if body.text is None or body.text.format is None else _format(body.text.format)
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.answer.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.answer.model,
            "output": output,
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": body.temperature,
            "text": {"format": wanted},
            "tool_choice": "none",
            "tools": [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def _item(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self._part(self.choice.text)]
        return {"type": "message", "id": self.item, "status": status, "role": "assistant", "content": content}

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    async def events(self, updates: Updates) -> AsyncIterator[dict[str, Any]]:
        """The response while it is written, event by event."""
        async with aclosing(updates):
            for event in self._beginning():
                yield event
            try:
                async for _, text, _, _ in updates:
                    if text:
                        yield self._event("response.output_text.delta", **self._place(), delta=text, logprobs=[])
            except RequestError as error:
                said = errors.request_error_body(error)["error"]
                yield self._event("error", code=str(said["code"]), message=said["message"], param=None)
                return
            for event in self._ending():
                yield event

    def _event(self, kind: str, **given: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **given}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.item, "output_index": 0, "content_index": 0}

    def _beginning(self) -> list[dict[str, Any]]:
        response = self._response("in_progress", [])
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
            self._event("response.output_item.added", output_index=0, item=self._item("in_progress")),
            self._event("response.content_part.added", **self._place(), part=self._part("")),
        ]

    def _ending(self) -> list[dict[str, Any]]:
        response, text = self.complete_body(), self.choice.text
        return [
            self._event("response.output_text.done", **self._place(), text=text, logprobs=[]),
            self._event("response.content_part.done", **self._place(), part=self._part(text)),
            self._event("response.output_item.done", output_index=0, item=self._item(response["status"])),
            self._event(f"response.{response['status']}", response=response),
        ]


def _format(wanted: TextFormat) -> dict[str, Any]:
    return wanted.model_dump(by_alias=True, exclude_none=True)
