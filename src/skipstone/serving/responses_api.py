"""/v1/responses, text only: OpenAI's newer form of a chat. It becomes the body of a chat or a completion."""

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Literal

from pydantic import Field

from skipstone.serving.api_schemas import (
    AnyGenerationBody,
    Body,
    ChatBody,
    CompletionBody,
    Format,
    GenerationBody,
    Message,
    Schema,
)
from skipstone.serving.completions_api import Choice, Completion, Updates, event_json
from skipstone.serving.errors import RequestError, error_body
from skipstone.serving.pending_request import LENGTH


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
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return Message(role=self.role, content=content)


class TextFormat(Body):
    """text.format: response_format of a chat, one level flatter."""

    type: Literal["text", "json_object", "json_schema"]
    name: str = ""
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")

    def format(self) -> Format:
        """As a chat has it."""
        return Format(type=self.type, json_schema=None if self.schema_ is None else Schema(schema=self.schema_))


class TextSettings(Body):
    """text: of what form it is."""

    format: TextFormat | None = None


class ResponseBody(AnyGenerationBody):
    """/v1/responses. input: a text, or the turns of a conversation. What would need a store of earlier responses, tools or
    anything but text is refused."""

    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    text: TextSettings | None = None
    store: bool | None = None
    truncation: Literal["disabled"] | None = None
    metadata: dict[str, str] | None = Field(default=None, max_length=16)

    @property
    def response_format(self) -> Format | None:
        """As a chat has it."""
        return None if self.text is None or self.text.format is None else self.text.format.format()

    def generation_body(self, chats: bool) -> GenerationBody:
        """The same request as a chat, or as a completion if the model has no chats. ValueError if that is impossible."""
        names = ("temperature", "top_p", "speculative", "response_format")
        common: dict[str, Any] = {name: getattr(self, name) for name in names}
        if not chats:
            if not isinstance(self.input, str) or self.instructions is not None:
                raise ValueError("this model has no chat template: input is the text that it goes on with, and nothing else")
            body = CompletionBody(prompt=self.input, **common)
            return body.model_copy(update={"max_tokens": self.max_output_tokens})  # None: as many as fit
        items = [Item(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        if self.instructions is not None:
            items = [Item(role="system", content=self.instructions), *items]
        return ChatBody(messages=[one.message() for one in items], max_completion_tokens=self.max_output_tokens, **common)


class Response(Completion):
    """The answer to a body of /v1/responses."""

    def __init__(self, model: str, choices: Sequence[Choice], body: Any, tokenizer: Any) -> None:
        super().__init__(model, choices, body, tokenizer)
        (self.choice,) = choices
        self._num_events = 0

    def set_id(self, digits: str) -> None:
        """Make the ids of the response and of its only item."""
        self.id, self.item_id = f"resp_{digits}", f"msg_{digits}"

    def json_body(self) -> dict[str, Any]:
        """The whole response, when all is written."""
        is_cut = self.choice.finish_reason == LENGTH
        status = "incomplete" if is_cut else "completed"
        usage = self.usage()
        found = self._response(status, [self._item(status)])
        found["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
        found["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        return found | self._requested_metrics()

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body = self.body
        text_format = None if body.text is None else body.text.format
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.model,
            "output": output,
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": body.temperature,
            "text": {"format": (text_format or TextFormat(type="text")).model_dump(by_alias=True, exclude_unset=True)},
            "tool_choice": "none",
            "tools": [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def _item(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self._part(self.choice.text)]
        return {"type": "message", "id": self.item_id, "status": status, "role": "assistant", "content": content}

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    async def events(self, updates: Updates) -> AsyncIterator[Any]:
        """The response while it is written, as server-sent events."""
        async with aclosing(updates):
            response = self._response("in_progress", [])
            yield self._event("response.created", response=response)
            yield self._event("response.in_progress", response=response)
            yield self._event("response.output_item.added", output_index=0, item=self._item("in_progress"))
            yield self._part_event("response.content_part.added", part=self._part(""))
            try:
                async for _, text, _, _ in updates:
                    if text:
                        yield self._part_event("response.output_text.delta", delta=text, logprobs=[])
            except RequestError as error:
                found = error_body(error)["error"]
                yield self._event("error", code=str(found["code"]), message=found["message"], param=None)
                return
        response, text = self.json_body(), self.choice.text
        yield self._part_event("response.output_text.done", text=text, logprobs=[])
        yield self._part_event("response.content_part.done", part=self._part(text))
        yield self._event("response.output_item.done", output_index=0, item=response["output"][0])
        yield self._event(f"response.{response['status']}", response=response)

    def _event(self, kind: str, **fields: Any) -> dict[str, str]:
        event = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return {"event": kind, "data": event_json(event)}

    def _part_event(self, kind: str, **fields: Any) -> dict[str, str]:
        return self._event(kind, item_id=self.item_id, output_index=0, content_index=0, **fields)
