"""The bodies of requests. Unknown fields are refused, never ignored."""

import json
import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_CHOICES, MAX_PROMPTS = 16, 128
MAX_STOPS, MAX_STOP_CHARACTERS = 16, 256
MAX_BIASES = 1024
MAX_LOGPROBS = 20
MAX_TEXT_CHARACTERS = 4 << 20
MAX_TOOLS = 128
MAX_MESSAGES = 4096

StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
TokenDigits = Annotated[str, Field(pattern=r"^[0-9]+$")]
Bias = Annotated[float, Field(ge=-100, le=100)]


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
    """include_usage: whether a last chunk has the usage and no choice."""

    include_usage: bool = False


class Schema(Body):
    """json_schema of response_format. Its name changes nothing."""

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


def joined(content: str | list[TextPart] | None) -> str:
    """The text of parts."""
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


class Prediction(Body):
    """prediction: a text that the answer will resemble."""

    type: Literal["content"]
    content: str | list[TextPart]


class AnyGenerationBody(RequestBody):
    """The common fields of everything that is answered with a text. A field that is left out has the model's own value.

    speculative: a method, by name or as {"method": ..., setting: ...}; "off" is plain decoding. user, prompt_cache_key: name
    the conversation (`ray.session_affinity`). return_metrics: figures of the answer."""

    model: str | None = None
    stream: bool = False
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    user: str | None = None
    prompt_cache_key: str | None = None
    speculative: str | dict[str, Any] | None = None
    return_metrics: bool = False


class GenerationBody(AnyGenerationBody):
    """The common fields of completions and chats: OpenAI's, and vLLM's where OpenAI has none.

    stream_speculative: figures of every step; "full" adds probabilities and rejected drafts."""

    stream_options: StreamOptions | None = None
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    seed: int | None = Field(default=None, ge=0, lt=1 << 63)
    top_k: int | None = Field(default=None, ge=0, lt=1 << 63)
    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0, le=10)
    ignore_eos: bool = False
    response_format: Format | None = None
    logit_bias: dict[TokenDigits, Bias] | None = Field(default=None, max_length=MAX_BIASES)
    prediction: Prediction | None = None
    stream_speculative: bool | Literal["full"] = False

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a chunk of figures."""
        return self.return_metrics or (self.stream_options is not None and self.stream_options.include_usage)

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def wanted_format(self) -> Format | None:
        """response_format if it restricts the text."""
        return None if self.response_format is None or self.response_format.type == "text" else self.response_format

    @property
    def demands_a_call(self) -> bool:
        """Whether nothing but a call of a tool may be written."""
        return False


Ids = Annotated[list[int], Field(min_length=1)]
SEVERAL = Field(min_length=1, max_length=MAX_PROMPTS)


class CompletionBody(GenerationBody):
    """/v1/completions. prompt: a text, token ids, or a list of these. max_tokens: 0 with echo returns only the prompt."""

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
    """The name and the arguments of a call. arguments: JSON in a text. parsed_arguments: added by openai-python, not used."""

    name: str
    arguments: str
    parsed_arguments: Any = None


def finite(number: str) -> float:
    """A number of JSON. ValueError for NaN and infinity, which a template could not write as JSON."""
    if not math.isfinite(found := float(number)):
        raise ValueError(number)
    return found


class ToolCall(Body):
    """A call of an earlier turn. index: its place in a stream, which openai-python keeps; not used."""

    id: str
    type: Literal["function"]
    function: CalledFunction
    index: int | None = None

    def turn(self, arguments_as_text: bool) -> dict[str, Any]:
        """The call for a chat template. ValueError if its arguments are no JSON object."""
        name, arguments = self.function.name, self.function.arguments
        try:
            found = json.loads(arguments, parse_float=finite, parse_constant=finite)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise ValueError(f"messages: the arguments of {name} must be a JSON object, its numbers finite")
        refuse_surrogates(found)
        function = {"name": name, "arguments": arguments if arguments_as_text else found}
        return {"id": self.id, "type": "function", "function": function}


class NamedFunction(Body):
    """The name of a tool."""

    name: str


class NamedToolChoice(Body):
    """tool_choice: the tool that has to be called."""

    type: Literal["function"]
    function: NamedFunction


class Message(Body):
    """A turn of a chat. content: text or parts; None for an assistant that called tools. tool_call_id: of a tool's answer.
    annotations, parsed: added by openai-python, not used."""

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

    def turn(self, arguments_as_text: bool = False) -> dict[str, Any]:
        """The message for a chat template. arguments_as_text: whether the arguments of calls are text, or objects."""
        role = "system" if self.role == "developer" else self.role  # most templates do not know developers
        calls = [one.turn(arguments_as_text) for one in self.tool_calls or ()]
        found = self.model_dump(include={"name", "tool_call_id"}, exclude_none=True)
        return {"role": role, "content": joined(self.content), **found} | ({"tool_calls": calls} if calls else {})


class ChatBody(GenerationBody):
    """/v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tools: list[Tool] | None = Field(default=None, min_length=1, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _chooses_among_tools(self) -> "ChatBody":
        if self.tool_choice not in (None, "none") and not self.tools:
            raise ValueError("tool_choice needs tools")
        if isinstance(self.tool_choice, NamedToolChoice) and not self.offered:
            raise ValueError(f"tool_choice: there is no tool {self.tool_choice.function.name!r}")
        if not self.demands_a_call and any(one.function.strict for one in self.offered):
            raise ValueError("tools: strict is kept where tool_choice demands a call; leave it out, or demand one")
        return self

    @property
    def offered(self) -> list[Tool]:
        """The tools that may be called."""
        if self.tool_choice == "none":
            return []
        if isinstance(self.tool_choice, NamedToolChoice):
            return [one for one in self.tools or [] if one.function.name == self.tool_choice.function.name]
        return self.tools or []

    @property
    def demands_a_call(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedToolChoice)


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
