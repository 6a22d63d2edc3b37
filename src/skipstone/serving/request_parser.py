"""Parses bodies: prompts become tokens, settings become a `Request`, so that an answer is the text of `skipstone.generate`.

It runs in a thread of its own, because transformers' preparation of a call changes its model for a moment.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from skipstone.decoding.method import Method
from skipstone.decoding.noise import row_seed
from skipstone.decoding.request import Request, generation_options
from skipstone.decoding.session import NO_PREDICTIONS, refuse_ids
from skipstone.engines.model_runner import ModelRunner
from skipstone.hf.api import chat_text, token_ids
from skipstone.hf.build_request import build_request
from skipstone.hf.generate_call import resolve_for
from skipstone.methods.auto.auto import Auto
from skipstone.serving.api_schemas import ChatBody, CompletionBody, GenerationBody, Message, TokenizeBody, joined
from skipstone.serving.errors import RequestError
from skipstone.serving.grammar import ANY_OBJECT, Grammar, GrammarCompiler, is_too_deep
from skipstone.serving.pending_request import PendingRequest, TokenLogprobs
from skipstone.serving.tool_call_parser import argument_schemas

OFF = "off"
"""The name of plain decoding in a body."""
SERVER_SETTINGS = ("log", "heads", "head", "draft_model", "draft_vocabulary", "profile")
"""Method settings that name files or models. Only the server may choose them."""
LOADING_SETTINGS = ("draft_device", "draft_dtype", "feature_layers", "norm_before_residual", "feedback", "head_quantize")
"""Method settings of draft models and heads. Each of their values loads one more."""
MEMORY_SETTING = "max_extra_memory_bytes"
"""Setting of `auto` that all its requests take from the server's method."""
MAX_CHAT_DEPTH = 100
"""Nesting of what a chat template gets. A recursive template would run out of stack."""
MAX_TOKEN_CHARACTERS = 64
"""No token is longer. A text with more characters per token of the limit is too long in any case."""
MAX_SETTING = 64
"""Maximum of an integer method setting in a body, or its default if that is larger. Many such settings are memory."""
PROBE_ARGUMENTS = {"probed_key": "probed_value"}
"""Arguments of the call that a chat template is tried out with: no template has these words."""
PROBE_CALL_ID = "probe0000"
"""Mistral's templates take ids of nine letters and digits alone."""


class RequestParser:
    """Makes pending requests of bodies.

    default_method: used if a body names none. max_model_len: tokens of a text, its prompt included. timeout: seconds that one
    request may take, None for no limit."""

    def __init__(
        self, model: ModelRunner, tokenizer: Any, default_method: Method, max_model_len: int, timeout: float | None = None
    ) -> None:
        self.model, self.tokenizer, self.default_method = model, tokenizer, default_method
        self.max_model_len, self.timeout_seconds = max_model_len, timeout
        self._max_characters = max_model_len * MAX_TOKEN_CHARACTERS

    def parse(self, body: GenerationBody, grammar: Grammar | None = None) -> list[PendingRequest]:
        """One request per choice, the choices of the first prompt first. ValueError for what cannot be done."""
        if isinstance(body, ChatBody):
            return self._parse_chat(body, grammar)
        assert isinstance(body, CompletionBody)
        prompts = [self._prompt_ids(prompt) for prompt in _prompts(body)]
        requests = self._pending_requests(body, prompts, body.max_tokens, body.logprobs, grammar)
        if body.echo:
            logprobs: dict[int, list[TokenLogprobs]] = {}
            for pending in requests:
                pending.echo, pending.generates = True, body.max_tokens != 0
                pending.prompt_logprobs = None if body.logprobs is None else logprobs.setdefault(id(pending.request.prompt), [])
        return requests

    def _parse_chat(self, body: ChatBody, grammar: Grammar | None) -> list[PendingRequest]:
        if body.top_logprobs is not None and not body.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        prompt = self._chat_ids(body.messages, [one.model_dump(exclude_none=True) for one in body.offered])
        return self._pending_requests(body, [prompt], max_tokens, num_logprobs, grammar)

    @property
    def has_chat_template(self) -> bool:
        return self.tokenizer.chat_template is not None

    def tokenize(self, body: TokenizeBody) -> list[int]:
        """The tokens of a text or a chat."""
        if (body.prompt is None) is (body.messages is None):
            raise ValueError("give either prompt or messages")
        if body.messages is not None:
            return self._chat_ids(body.messages)
        return list(self.tokenizer(body.prompt, add_special_tokens=body.add_special_tokens)["input_ids"])

    def _prompt_ids(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        if len(prompt) > self._max_characters:
            raise self._too_long_error(f"{len(prompt)} characters")
        return token_ids(prompt, self.tokenizer)

    def _too_long_error(self, found: str) -> RequestError:
        """The error for a prompt that does not fit. Clients look for its code."""
        limit = f"the maximum context length is {self.max_model_len} tokens, those that are written included"
        return RequestError(400, f"the prompt has {found}: {limit}", code="context_length_exceeded")

    @cached_property
    def _arguments_as_text(self) -> bool:
        return takes_arguments_as_text(self.tokenizer)

    def _chat_ids(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        template = self.tokenizer.chat_template
        if template is None:
            raise ValueError("this model has no chat template; send the text to /v1/completions")
        if tools and "tools" not in str(template):
            raise ValueError("tools: this model's chat template has none")
        turns = [one.turn(self._arguments_as_text) for one in messages]
        if is_too_deep(turns, MAX_CHAT_DEPTH) or is_too_deep(tools, MAX_CHAT_DEPTH):
            raise ValueError(f"tools, and the arguments of calls, are nested at most {MAX_CHAT_DEPTH} deep")
        if len(json.dumps(turns)) + len(json.dumps(tools)) > self._max_characters:
            raise self._too_long_error("too many characters")
        text = chat_text(turns, self.tokenizer, tools)
        if len(text) > self._max_characters:  # a template may write more than it is given
            raise self._too_long_error(f"{len(text)} characters")
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def parse_method(self, wanted: str | dict[str, Any] | None) -> Method:
        """The method that a body asks for. ValueError if it does not exist or would touch files."""
        if wanted is None:
            return self.default_method
        if wanted == OFF:
            wanted = "autoregressive"
        method = resolve_for(self.model.model, wanted)
        self._check_settings(method)
        if isinstance(method, Auto) and isinstance(self.default_method, Auto):
            method = replace(method, **{MEMORY_SETTING: getattr(self.default_method, MEMORY_SETTING)})
        method.check(self.model)
        return method

    def _check_settings(self, method: Method) -> None:
        """ValueError for settings that a body may not choose."""
        usual = resolve_for(self.model.model, method.name)
        for one in fields(method):
            value = getattr(method, one.name)
            if one.name in (*SERVER_SETTINGS, *LOADING_SETTINGS, MEMORY_SETTING) and value != getattr(usual, one.name):
                what = "settings that name files or models, load models, or limit memory"
                raise ValueError(f"speculative: {what}, are the server's (--method)")
            most = max(MAX_SETTING, one.default if isinstance(one.default, int) else 0)
            if isinstance(value, int) and value > most:
                raise ValueError(f"speculative: {one.name} is at most {most} in a request, found {value}")
        for name in method.of_methods:
            for inner in getattr(method, name) or ():
                self._check_settings(inner)

    def _pending_requests(
        self, body: GenerationBody, prompts: list[list[int]], max_tokens: int | None, num_logprobs: int | None, grammar: Any
    ) -> list[PendingRequest]:
        method, requests = self.parse_method(body.speculative), []
        prediction = self._prediction_ids(body)
        if prediction and not method.takes_predictions(self.model):
            raise ValueError(NO_PREDICTIONS)
        seed = body.seed if body.seed is not None else int(torch.randint(1 << 62, (), dtype=torch.int64, device="cpu").item())
        for prompt in prompts:
            if not prompt:
                raise ValueError("the prompt is empty: there is no token to start from")
            refuse_ids(self.model, min(prompt), max(prompt))
            room = self.max_model_len - len(prompt)
            if room < 1 or (max_tokens is not None and max_tokens > room):
                added = f" + max_tokens={max_tokens}" if max_tokens else ""
                raise self._too_long_error(f"{len(prompt)} tokens{added}")
            new_tokens = self._default_max_tokens(len(prompt), room) if max_tokens is None else max(max_tokens, 1)
            request = build_request(self.model, prompt, self.tokenizer, seed, self._options(body, len(prompt), new_tokens))
            if body.stops and request.stop_strings is not None:
                request = replace(request, stop_strings=request.stop_strings.without_prompt())
            for _ in range(body.n):
                sampling = replace(request.sampling, seed=row_seed(seed, len(requests)))
                of_choice = replace(request, sampling=sampling, prediction=prediction)
                pending = PendingRequest(of_choice, method, num_logprobs, self.timeout_seconds)
                pending.wants_details = body.stream_speculative == "full"
                if grammar is not None:
                    own = grammar.for_new_text(len(prompt))
                    pending.grammar, pending.request = own, _with_grammar(of_choice, own)
                requests.append(pending)
        return requests

    def _default_max_tokens(self, prompt: int, room: int) -> int:
        """`max_new_tokens` if a body does not say: what the generation config allows, at most `room`."""
        config: Any = self.model.model.generation_config
        if config.max_new_tokens is not None:
            return min(config.max_new_tokens, room)
        if config.max_length is None:
            return room
        if config.max_length <= prompt:
            raise ValueError(f"the prompt has {prompt} tokens, the generation config says max_length={config.max_length}")
        return min(config.max_length - prompt, room)

    def _prediction_ids(self, body: GenerationBody) -> list[int]:
        """The tokens of the prediction, [] without one."""
        if body.prediction is None:
            return []
        text = joined(body.prediction.content)
        if len(text) > self._max_characters:
            raise ValueError(f"prediction: at most {self.max_model_len} tokens, found {len(text)} characters")
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])[: self.max_model_len]

    def compile_grammar(self, body: GenerationBody) -> Grammar:
        """The grammar of a body that has one. It may take seconds and shares nothing with others, so it runs in a thread of its
        own. ValueError for a wrong or too large schema; TimeoutError as in `GrammarCompiler.compile_schema`."""
        if body.ignore_eos:
            raise ValueError("response_format, and a call that is demanded, end a text, which ignore_eos forbids")
        choices = body.n * (len(_prompts(body)) if isinstance(body, CompletionBody) else 1)
        wanted = body.wanted_format
        if isinstance(body, ChatBody) and body.demands_a_call:
            if wanted is not None:
                raise ValueError("response_format and a tool_choice that demands a call exclude each other")
            return self._grammar_compiler.compile_calls(argument_schemas(body.offered), choices)
        assert wanted is not None
        schema = ANY_OBJECT if wanted.type == "json_object" else wanted.json_schema and wanted.json_schema.schema_
        if schema is None:
            raise ValueError("response_format: json_schema is missing")
        return self._grammar_compiler.compile_schema(schema, choices=choices)

    @cached_property
    def _grammar_compiler(self) -> GrammarCompiler:
        eos = self.model.model.generation_config.eos_token_id if self.model.model.generation_config else None
        if eos is None:  # as in a base model's configs
            eos = self.tokenizer.eos_token_id
        return GrammarCompiler(self.tokenizer, self.model.embeddings, [eos] if isinstance(eos, int) else eos or [])

    def _options(self, body: GenerationBody, prompt: int, most: int) -> dict[str, Any]:
        """Keyword arguments of `skipstone.generate`."""
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "ignore_eos")
        given = {name: getattr(body, name) for name in names}
        options = generation_options(max_new_tokens=most, stop=body.stops, **given)
        processors: list[Any] = []
        if body.presence_penalty or body.frequency_penalty:
            processors.append(Penalty(prompt, body.presence_penalty, body.frequency_penalty))
        if body.logit_bias:
            biases = {int(token): bias for token, bias in body.logit_bias.items()}
            if (largest := max(biases)) >= self.model.embeddings:
                raise ValueError(f"logit_bias: the vocabulary has {self.model.embeddings} entries, found token {largest}")
            processors.append(Bias(biases))
        if processors:
            options["logits_processor"] = processors
        return options


def _with_grammar(request: Request, grammar: Grammar) -> Request:
    """The request with a grammar. Its text ends with the document."""
    sampling = replace(request.sampling, processors=[*request.sampling.processors, grammar])
    eos, criteria = request.eos | set(grammar.ends), [*request.criteria, grammar.has_ended]
    return replace(request, sampling=sampling, eos=eos, criteria=criteria)


def _prompts(body: CompletionBody) -> list[Any]:
    """The prompts of a body, each a text or token ids."""
    given: Any = body.prompt
    return [given] if isinstance(given, str) or isinstance(given[0], int) else given


def takes_arguments_as_text(tokenizer: Any) -> bool:
    """Whether a tokenizer's chat template writes a call's arguments only where they are JSON in a text. Most templates take an
    object and write the JSON themselves; some, as DeepSeek's, concatenate a text. It is tried out, as llama.cpp does it."""
    return not _writes(tokenizer, PROBE_ARGUMENTS) and _writes(tokenizer, json.dumps(PROBE_ARGUMENTS))


def _writes(tokenizer: Any, arguments: Any) -> bool:
    """Whether the arguments of a call stand in what the template writes, and not as Python prints an object."""
    parameters = {"type": "object", "properties": {"probed_key": {"type": "string"}}, "required": ["probed_key"]}
    tool = {"type": "function", "function": {"name": "probe", "description": "a tool", "parameters": parameters}}
    calls = [{"id": PROBE_CALL_ID, "type": "function", "function": {"name": "probe", "arguments": arguments}}]
    turns = [
        {"role": "user", "content": "a question"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "an answer", "name": "probe", "tool_call_id": PROBE_CALL_ID},
    ]
    for count in (3, 2):  # some templates know no answers of tools
        with suppress(ValueError):
            written = chat_text(turns[:count], tokenizer, [tool])
            return "probed_value" in written and str(PROBE_ARGUMENTS) not in written
    return False


class Bias:
    """Adds to the logits of tokens. biases: by token."""

    def __init__(self, biases: dict[int, float]) -> None:
        self._tokens = torch.tensor(list(biases), dtype=torch.int64, device="cpu")
        self._values = torch.tensor(list(biases.values()), dtype=torch.float32, device="cpu")

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """ids: [1, T]. scores: [1, V]."""
        tokens, values = self._tokens.to(scores.device), self._values.to(scores.device, scores.dtype)
        return scores.index_add(1, tokens, values[None])


class Penalty:
    """Takes from the logits of tokens that were written already: `presence` once, `frequency` for each time. prompt: tokens
    before the first that was written."""

    def __init__(self, prompt: int, presence: float, frequency: float) -> None:
        self.prompt, self.presence, self.frequency = prompt, presence, frequency

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """ids: [1, T]. scores: [1, V]."""
        counts = torch.bincount(ids[0, self.prompt :], minlength=scores.shape[-1])[None]  # [1, V]
        return scores - self.frequency * counts.to(scores.dtype) - self.presence * (counts > 0).to(scores.dtype)
