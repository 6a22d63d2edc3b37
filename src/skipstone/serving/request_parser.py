"""Bodies to requests: prompts to tokens, settings to what `skipstone.generate` takes, so that an answer is the text that it
writes.

It runs in one thread of its own, beside the model's: transformers' preparation of a call changes its model for a moment.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cached_property
from typing import Any

import torch
from transformers.generation.logits_process import LogitsProcessorList

from skipstone.decoding.method import Method
from skipstone.decoding.noise import row_seed
from skipstone.decoding.request import Request
from skipstone.decoding.session import NO_PREDICTIONS, refuse_ids
from skipstone.engines.model_runner import ModelRunner
from skipstone.hf.api import chat_text, token_ids
from skipstone.hf.call import resolve_for
from skipstone.hf.requests import build_request, generation_options
from skipstone.serving.grammar import ANY_OBJECT, Grammar, GrammarCompiler, is_too_deep
from skipstone.serving.logits_processors import Bias, Penalty
from skipstone.serving.pending_request import PendingRequest, RequestError, TokenLogprobs
from skipstone.serving.schemas import ChatBody, CompletionBody, GenerationBody, Message, TokenizeBody
from skipstone.serving.templates import takes_arguments_as_text
from skipstone.serving.tools import argument_schemas

OFF = "off"
"""What a request calls plain decoding."""
SERVER_SETTINGS = ("log", "heads", "draft_model", "draft_vocabulary", "profile")
"""Settings of methods that name files or models."""
DRAFT_MODEL_SETTINGS = ("draft_device", "draft_dtype")
"""Settings of the models that these name. Every value of them loads one more model."""
MAX_CHAT_DEPTH = 100
"""Levels of what a chat template is given: it may call itself for every one, and runs out of stack."""
MAX_SETTING = 64
"""Of a whole number among a method's settings, where its default is no larger: many of them are memory."""


class RequestParser:
    """What a body means for a model. default: the method where a body names none. capacity: most tokens of a text, its prompt
    included. seconds: that a request may take, None for any time."""

    def __init__(
        self, model: ModelRunner, tokenizer: Any, default: Method, capacity: int, seconds: float | None = None
    ) -> None:
        self.model, self.tokenizer, self.default = model, tokenizer, default
        self.capacity, self.seconds = capacity, seconds
        self._grammars: GrammarCompiler | None = None  # made when one is asked for first

    def completion(self, body: CompletionBody, grammar: Grammar | None = None) -> list[PendingRequest]:
        """One request for every choice, those of the first prompt first. grammar: of the body. ValueError for what cannot be
        done."""
        given: Any = body.prompt
        one = isinstance(given, str) or isinstance(given[0], int)
        prompts = [self._prompt_ids(each) for each in ([given] if one else given)]
        requests = self._pending_requests(body, prompts, body.max_tokens, body.logprobs, grammar)
        if body.echo:
            read: dict[int, list[TokenLogprobs]] = {}
            for pending in requests:
                pending.echo, pending.generates = True, body.max_tokens != 0
                pending.prompt_logprobs = None if body.logprobs is None else read.setdefault(id(pending.request.prompt), [])
        return requests

    def chat(self, body: ChatBody, grammar: Grammar | None = None) -> list[PendingRequest]:
        """The same of a chat."""
        if body.top_logprobs is not None and not body.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        told = (body.top_logprobs or 0) if body.logprobs else None
        most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        prompt = self._chat_ids(body.messages, [one.model_dump(exclude_none=True) for one in body.offered])
        return self._pending_requests(body, [prompt], most, told, grammar)

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template."""
        return self.tokenizer.chat_template is not None

    def of(self, chat: bool) -> Callable[..., list[PendingRequest]]:
        """What makes requests of a chat's body, or of a text's, and of its grammar."""
        return self.chat if chat else self.completion

    def tokens(self, body: TokenizeBody) -> list[int]:
        """Of a text or a chat."""
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

    @property
    def _max_characters(self) -> int:
        """Characters beyond which a text has too many tokens in any case: no token is longer."""
        return self.capacity * 64

    def _too_long_error(self, found: str) -> RequestError:
        """What is raised for a prompt, or for more tokens than there is room for. Clients look for the code."""
        limit = f"the maximum context length is {self.capacity} tokens, those that are written included"
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

    def method(self, wanted: str | dict[str, Any] | None) -> Method:
        """The method that a body asks for. ValueError for one that does not exist, or that would touch files."""
        if wanted is None:
            return self.default
        if wanted == OFF:
            wanted = "autoregressive"
        method = resolve_for(self.model.model, wanted)
        self._check_settings(method)
        method.check(self.model)
        return method

    def _check_settings(self, method: Method) -> None:
        """ValueError for a method that a request may not ask for, before anything of it is looked at."""
        usual = resolve_for(self.model.model, method.name)
        for one in fields(method):
            value = getattr(method, one.name)
            if one.name in (*SERVER_SETTINGS, *DRAFT_MODEL_SETTINGS) and value != getattr(usual, one.name):
                raise ValueError("speculative: settings that name files or models, or load models, are the server's (--method)")
            most = max(MAX_SETTING, one.default if isinstance(one.default, int) else 0)
            if isinstance(value, int) and value > most:
                raise ValueError(f"speculative: {one.name} is at most {most} in a request, found {value}")
        for name in method.of_methods:
            for inner in getattr(method, name) or ():
                self._check_settings(inner)

    def _pending_requests(
        self, body: GenerationBody, prompts: list[list[int]], most: int | None, logprobs: int | None, grammar: Grammar | None
    ) -> list[PendingRequest]:
        method, found = self.method(body.speculative), []
        prediction = self._prediction_ids(body)
        if prediction and not method.takes_predictions(self.model):
            raise ValueError(NO_PREDICTIONS)
        seed = body.seed if body.seed is not None else int(torch.randint(1 << 62, (), dtype=torch.int64, device="cpu").item())
        for prompt in prompts:
            if not prompt:
                raise ValueError("the prompt is empty: there is no token to start from")
            refuse_ids(self.model, min(prompt), max(prompt))
            room = self.capacity - len(prompt)
            if room < 1 or (most is not None and most > room):
                asked = f" + max_tokens={most}" if most else ""
                raise self._too_long_error(f"{len(prompt)} tokens{asked}")
            allowed = self._most_tokens(len(prompt), room) if most is None else max(most, 1)
            options = self._options(body, len(prompt), allowed)
            request = build_request(self.model, prompt, self.tokenizer, seed, options)
            if body.stops and request.stop_strings is not None:
                request = replace(request, stop_strings=request.stop_strings.without_prompt())
            for _ in range(body.n):
                sampling = replace(request.sampling, seed=row_seed(seed, len(found)))
                one = replace(request, sampling=sampling, prediction=prediction)
                own_grammar = None if grammar is None else grammar.for_new_text(len(prompt))
                if own_grammar is not None:
                    one = _with_grammar(one, own_grammar)
                pending = PendingRequest(
                    one, method, logprobs, self.seconds, wants_details=body.stream_speculative == "full", grammar=own_grammar
                )
                found.append(pending)
        return found

    def _most_tokens(self, prompt: int, room: int) -> int:
        """Most new tokens where a request does not say: what the model's own generation config allows, `room` at most."""
        own: Any = self.model.model.generation_config
        if own.max_new_tokens is not None:
            return min(own.max_new_tokens, room)
        if own.max_length is None:
            return room
        if own.max_length <= prompt:
            raise ValueError(f"the prompt has {prompt} tokens, the model's generation config says max_length={own.max_length}")
        return min(own.max_length - prompt, room)

    def _prediction_ids(self, body: GenerationBody) -> list[int]:
        """The tokens of the prediction; none where there is none."""
        if body.prediction is None:
            return []
        text = body.prediction.text
        if len(text) > self._max_characters:
            raise ValueError(f"prediction: at most {self.capacity} tokens, found {len(text)} characters")
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])[: self.capacity]

    def has_grammar(self, body: GenerationBody) -> bool:
        """Whether a body has a grammar."""
        wanted = body.response_format
        return (wanted is not None and wanted.type != "text") or (isinstance(body, ChatBody) and body.demands_a_call)

    def grammar(self, body: GenerationBody) -> Grammar | None:
        """Of all that may be written; None for anything. It may take seconds, and touches nothing that others use: it has a
        thread of its own. ValueError for a schema that is none, or too much; TimeoutError as of
        `GrammarCompiler.compile_schema`."""
        wanted, choices = self._schema_of(body), body.n * _num_prompts(body)
        if isinstance(body, ChatBody) and body.demands_a_call:
            if wanted is not None:
                raise ValueError("response_format and a tool_choice that demands a call exclude each other")
            if body.ignore_eos:
                raise ValueError("a call that is demanded ends a text, which ignore_eos forbids")
            return self._compiler.compile_calls(argument_schemas(body.offered), choices)
        return None if wanted is None else self._compiler.compile_schema(wanted, choices=choices)

    def _schema_of(self, body: GenerationBody) -> dict[str, Any] | None:
        """The schema of response_format; None for any text."""
        wanted = body.response_format
        if wanted is None or wanted.type == "text":
            return None
        if body.ignore_eos:
            raise ValueError("response_format ends a text, which ignore_eos forbids")
        if wanted.type == "json_object":
            return ANY_OBJECT
        if wanted.json_schema is None:
            raise ValueError("response_format: json_schema is missing")
        return wanted.json_schema.schema_

    @property
    def _compiler(self) -> GrammarCompiler:
        if self._grammars is None:
            eos = self.model.model.generation_config.eos_token_id if self.model.model.generation_config else None
            if eos is None:  # as in a base model's configs
                eos = self.tokenizer.eos_token_id
            ends = [eos] if isinstance(eos, int) else list(eos or [])
            self._grammars = GrammarCompiler(self.tokenizer, self.model.embeddings, ends)
        return self._grammars

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
            options["logits_processor"] = LogitsProcessorList(processors)
        return options


def _with_grammar(request: Request, grammar: Grammar) -> Request:
    """A request that obeys a grammar: its text ends with the document."""
    sampling = replace(request.sampling, processors=[*request.sampling.processors, grammar])
    eos, criteria = request.eos | set(grammar.ends), [*request.criteria, grammar.has_ended]
    return replace(request, sampling=sampling, eos=eos, criteria=criteria)


def _num_prompts(body: GenerationBody) -> int:
    """How many prompts a body has."""
    given: Any = body.prompt if isinstance(body, CompletionBody) else ""
    return len(given) if isinstance(given, list) and not isinstance(given[0], int) else 1
