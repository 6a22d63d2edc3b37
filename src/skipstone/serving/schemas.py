"""The bodies of requests: what is not named here is refused, never ignored."""

import json
import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

MOST_CHOICES, MAX_PROMPTS = 16, 128
MOST_STOPS, LONGEST_STOP = 16, 256
MAX_BIASES = 1024
MAX_LOGPROBS = 20
MAX_TEXT_CHARACTERS = 4 << 20
MAX_TOOLS = 128
MAX_MESSAGES = 4096


def refuse_surrogates(value: Any) -> None:
    """ValueError if a text or a key of a JSON value has an unpaired surrogate, which no tokenizer and no answer can hold."""
    try:
        json.dumps(value, ensure_ascii=False, default=lambda _: None).encode()  # a Body inside was checked when it was made
    except UnicodeEncodeError as error:
        found = ord(error.object[error.start])
        raise ValueError(f"a text is no valid Unicode: it has the unpaired surrogate \\u{found:04x}; leave it out") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


class Body(BaseModel):
    """A JSON object without unknown fields. null is the same as leaving a field out."""

    model_config = ConfigDict(extra="forbid", strict=False, allow_inf_nan=False, str_max_length=MAX_TEXT_CHARACTERS)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given


class RequestBody(Body):
    """The whole body of a request, over HTTP or in a batch file."""

    @model_validator(mode="before")
    @classmethod
    def _valid_unicode(cls, given: Any) -> Any:
        refuse_surrogates(given)
        return given


class StreamOptions(Body):
    """include_usage: one more chunk at the end, with the usage and no choice."""

    include_usage: bool = False


class Schema(Body):
    """Of response_format: a JSON schema, with a name that changes nothing."""

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class Format(Body):
    """response_format: free text, any JSON object, or one of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


def joined(content: str | list[TextPart]) -> str:
    """The text of parts."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


class Prediction(Body):
    """prediction: a text that the answer will be much like."""

    type: Literal["content"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        """All of it."""
        return joined(self.content)


class GenerationBody(RequestBody):
    """What texts and chats have in common. The settings are OpenAI's, and vLLM's where OpenAI has none; those that are left
    out are the model's own. speculative: a method, by name or as {"method": ..., setting: ...}; "off" is plain decoding.
    user, prompt_cache_key: names of a conversation, by which replicas are chosen where there are several (`sessions`).
    return_metrics, stream_speculative: figures of the answer, and of every step; "full": with probabilities, refused drafts."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(default=1, ge=1, le=MOST_CHOICES)
    stop: str | list[str] | None = None
    seed: int | None = Field(default=None, ge=0, lt=1 << 63)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0, lt=1 << 63)
    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0, le=10)
    ignore_eos: bool = False
    response_format: Format | None = None
    logit_bias: dict[str, float] | None = Field(default=None, max_length=MAX_BIASES)
    prediction: Prediction | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    speculative: str | dict[str, Any] | None = None
    return_metrics: bool = False
    stream_speculative: bool | Literal["full"] = False

    @field_validator("stop")
    @classmethod
    def _few_stops(cls, stop: str | list[str] | None) -> str | list[str] | None:
        stops = [stop] if isinstance(stop, str) else stop or []
        if len(stops) > MOST_STOPS:
            raise ValueError(f"at most {MOST_STOPS} stop strings, found {len(stops)}")
        if any(not one or len(one) > LONGEST_STOP for one in stops):
            raise ValueError(f"a stop string has 1 to {LONGEST_STOP} characters")
        return stop

    @field_validator("logit_bias")
    @classmethod
    def _biases(cls, biases: dict[str, float] | None) -> dict[str, float] | None:
        for token, bias in (biases or {}).items():
            if not token.isascii() or not token.isdigit():
                raise ValueError(f"a key is a token id in digits, found {token[:40]!r}")
            if not -100 <= bias <= 100:
                raise ValueError(f"a bias lies between -100 and 100, found {bias:g}")
        return biases

    @property
    def tells_usage(self) -> bool:
        """Whether a stream ends with a chunk of figures."""
        return self.return_metrics or (self.stream_options is not None and self.stream_options.include_usage)

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


Ids = Annotated[list[int], Field(min_length=1)]
SEVERAL = Field(min_length=1, max_length=MAX_PROMPTS)


class CompletionBody(GenerationBody):
    """/v1/completions. prompt: a text, token ids, or a list of these. max_tokens: 0, with echo, for the prompt alone."""

    prompt: str | Ids | Annotated[list[str], SEVERAL] | Annotated[list[Ids], SEVERAL]
    max_tokens: int | None = Field(default=16, ge=0)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    best_of: Literal[1] | None = None
    suffix: None = None

    @model_validator(mode="after")
    def _answers_something(self) -> "CompletionBody":
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens=0 needs echo=true: there is nothing else to answer")
        return self


class Function(Body):
    """A tool. parameters: the JSON schema of its arguments."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool that may be called."""

    type: Literal["function"]
    function: Function


class CalledFunction(Body):
    """The name and the arguments of a call, these as JSON in a text. parsed_arguments: added by openai-python, not used."""

    name: str
    arguments: str
    parsed_arguments: Any = None


class ToolCall(Body):
    """A call of an earlier turn. index: its place in a stream, which openai-python keeps; not used."""

    id: str
    type: Literal["function"]
    function: CalledFunction
    index: int | None = None


class NamedFunction(Body):
    """The name of a tool."""

    name: str


class Choice(Body):
    """tool_choice: the tool that has to be called."""

    type: Literal["function"]
    function: NamedFunction


class Message(Body):
    """A turn of a chat. content: its text, or its parts; none of an assistant that called tools. tool_call_id: of a tool's
    answer. annotations, parsed: of an earlier answer, as openai-python has it; a model is not told of them."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_call_id: str | None = None
    refusal: None = None
    annotations: list[Any] | None = None
    parsed: Any = None

    @model_validator(mode="after")
    def _says_something(self) -> "Message":
        if self.content is None and not self.tool_calls:
            raise ValueError("a message has content, or the calls of an assistant")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only an assistant calls tools")
        return self

    @property
    def text(self) -> str:
        """All of it."""
        return "" if self.content is None else joined(self.content)

    def turn(self, arguments_as_text: bool = False) -> dict[str, Any]:
        """As a chat template takes it: of developers most templates know nothing. arguments_as_text: of calls, else they are
        objects."""
        found: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.text}
        if self.name is not None:
            found["name"] = self.name
        if self.tool_call_id is not None:
            found["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            found["tool_calls"] = [
                {"id": one.id, "type": "function", "function": function_of(one, arguments_as_text)} for one in self.tool_calls
            ]
        return found


def _finite(number: str) -> float:
    """A number of JSON. ValueError for NaN and for one that is infinite as a float: a template would write it as no JSON."""
    if not math.isfinite(found := float(number)):
        raise ValueError(number)
    return found


def function_of(call: ToolCall, arguments_as_text: bool) -> dict[str, Any]:
    """The function of a call as a chat template takes it. ValueError where its arguments are no JSON object."""
    try:
        found = json.loads(call.function.arguments, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"messages: the arguments of {call.function.name} must be a JSON object, its numbers finite")
    refuse_surrogates(found)
    return {"name": call.function.name, "arguments": call.function.arguments if arguments_as_text else found}


class ChatBody(GenerationBody):
    """/v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tools: list[Tool] | None = Field(default=None, min_length=1, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | Choice | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _chooses_among_tools(self) -> "ChatBody":
        if self.tool_choice not in (None, "none") and not self.tools:
            raise ValueError("tool_choice needs tools")
        if isinstance(self.tool_choice, Choice) and not self.offered:
            raise ValueError(f"tool_choice: there is no tool {self.tool_choice.function.name!r}")
        if not self.demands_a_call and any(one.function.strict for one in self.offered):
            raise ValueError("tools: strict is kept where tool_choice demands a call; leave it out, or demand one")
        return self

    @property
    def offered(self) -> list[Tool]:
        """The tools that may be called."""
        if self.tool_choice == "none":
            return []
        if isinstance(self.tool_choice, Choice):
            return [one for one in self.tools or [] if one.function.name == self.tool_choice.function.name]
        return self.tools or []

    @property
    def demands_a_call(self) -> bool:
        """Whether nothing else may be written."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, Choice)


class TokenizeBody(RequestBody):
    """/tokenize: of a text, or of a chat by the model's template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool = True


class DetokenizeBody(RequestBody):
    """/detokenize."""

    model: str | None = None
    tokens: list[int] = Field(max_length=1 << 20)
