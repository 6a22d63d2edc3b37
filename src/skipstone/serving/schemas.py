"""The bodies of requests: what is not named here is refused, never ignored."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

MOST_CHOICES, MOST_PROMPTS = 16, 128
MOST_STOPS, LONGEST_STOP = 16, 256
MOST_BIASES = 1024
MOST_LOGPROBS = 20


class Body(BaseModel):
    """A JSON object without unknown fields, whose numbers are numbers."""

    model_config = ConfigDict(extra="forbid", strict=False, allow_inf_nan=False)


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


class Sampled(Body):
    """What texts and chats have in common. The settings are OpenAI's, and vLLM's where OpenAI has none; those that are left
    out are the model's own. speculative: a method, by name or as {"method": ..., setting: ...}; "off" is plain decoding.
    return_metrics, stream_speculative: figures of the answer, and of every step."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(default=1, ge=1, le=MOST_CHOICES)
    stop: str | list[str] | None = None
    seed: int | None = Field(default=None, ge=0, lt=1 << 63)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0, le=10)
    ignore_eos: bool = False
    response_format: Format | None = None
    logit_bias: dict[str, float] | None = Field(default=None, max_length=MOST_BIASES)
    user: str | None = None
    speculative: str | dict[str, Any] | None = None
    return_metrics: bool = False
    stream_speculative: bool = False

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
SEVERAL = Field(min_length=1, max_length=MOST_PROMPTS)


class CompletionBody(Sampled):
    """/v1/completions. prompt: a text, token ids, or a list of these."""

    prompt: str | Ids | Annotated[list[str], SEVERAL] | Annotated[list[Ids], SEVERAL]
    max_tokens: int | None = Field(default=16, ge=1)
    logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: None = None


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(Body):
    """A turn of a chat. content: its text, or its parts."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    @property
    def text(self) -> str:
        """All of it."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(Sampled):
    """/v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)


class TokenizeBody(Body):
    """/tokenize: of a text, or of a chat by the model's template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    add_special_tokens: bool = True


class DetokenizeBody(Body):
    """/detokenize."""

    model: str | None = None
    tokens: list[int] = Field(max_length=1 << 20)
