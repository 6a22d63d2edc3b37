"""Bodies to jobs: prompts to tokens, settings to what `skipstone.generate` takes, so that an answer is the text that it writes.

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
from skipstone.hf.generate_call import resolve_for
from skipstone.hf.requests import build_request, generation_options
from skipstone.serving.grammar import ANY_OBJECT, Grammar, Grammars, too_deep
from skipstone.serving.jobs import Job, Likely, Refused
from skipstone.serving.processors import Bias, Penalty
from skipstone.serving.schemas import ChatBody, CompletionBody, Message, Sampled, TokenizeBody
from skipstone.serving.templates import takes_arguments_as_text
from skipstone.serving.tools import argument_schemas

OFF = "off"
"""What a request calls plain decoding."""
THE_SERVERS = ("log", "heads", "draft_model", "draft_vocabulary", "profile")
"""Settings of methods that name files or models."""
OF_THEIR_MODELS = ("draft_device", "draft_dtype")
"""Settings of the models that these name. Every value of them loads one more model."""
DEEPEST_CHAT = 100
"""Levels of what a chat template is given: it may call itself for every one, and runs out of stack."""
MOST_SETTING = 64
"""Of a whole number among a method's settings, where its default is no larger: many of them are memory."""


class Asking:
    """What a body means for a model. default: the method where a body names none. capacity: most tokens of a text, its prompt
    included. seconds: that a job may take, None for any time."""

    def __init__(
        self, model: ModelRunner, tokenizer: Any, default: Method, capacity: int, seconds: float | None = None
    ) -> None:
        self.model, self.tokenizer, self.default = model, tokenizer, default
        self.capacity, self.seconds = capacity, seconds
        self._grammars: Grammars | None = None  # made when one is asked for first

    def completion(self, body: CompletionBody, grammar: Grammar | None = None) -> list[Job]:
        """One job for every choice, those of the first prompt first. grammar: of the body. ValueError for what cannot be
        done."""
        given: Any = body.prompt
        one = isinstance(given, str) or isinstance(given[0], int)
        prompts = [self._read(each) for each in ([given] if one else given)]
        jobs = self._jobs(body, prompts, body.max_tokens, body.logprobs, grammar)
        if body.echo:
            read: dict[int, list[Likely]] = {}
            for job in jobs:
                job.echo, job.writes = True, body.max_tokens != 0
                job.read = None if body.logprobs is None else read.setdefault(id(job.request.prompt), [])
        return jobs

    def chat(self, body: ChatBody, grammar: Grammar | None = None) -> list[Job]:
        """The same of a chat."""
        if body.top_logprobs is not None and not body.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        told = (body.top_logprobs or 0) if body.logprobs else None
        most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        prompt = self._chat(body.messages, [one.model_dump(exclude_none=True) for one in body.offered])
        return self._jobs(body, [prompt], most, told, grammar)

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template."""
        return self.tokenizer.chat_template is not None

    def of(self, chat: bool) -> Callable[..., list[Job]]:
        """What makes jobs of a chat's body, or of a text's, and of its grammar."""
        return self.chat if chat else self.completion

    def tokens(self, body: TokenizeBody) -> list[int]:
        """Of a text or a chat."""
        if (body.prompt is None) is (body.messages is None):
            raise ValueError("give either prompt or messages")
        if body.messages is not None:
            return self._chat(body.messages)
        return list(self.tokenizer(body.prompt, add_special_tokens=body.add_special_tokens)["input_ids"])

    def _read(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        if len(prompt) > self._longest:
            raise self._too_long(f"{len(prompt)} characters")
        return token_ids(prompt, self.tokenizer)

    @property
    def _longest(self) -> int:
        """Characters beyond which a text has too many tokens in any case: no token is longer."""
        return self.capacity * 64

    def _too_long(self, found: str) -> Refused:
        """What is raised for a prompt, or for more tokens than there is room for. Clients look for the code."""
        limit = f"the maximum context length is {self.capacity} tokens, those that are written included"
        return Refused(400, f"the prompt has {found}: {limit}", code="context_length_exceeded")

    @cached_property
    def _arguments_as_text(self) -> bool:
        return takes_arguments_as_text(self.tokenizer)

    def _chat(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        template = self.tokenizer.chat_template
        if template is None:
            raise ValueError("this model has no chat template; send the text to /v1/completions")
        if tools and "tools" not in str(template):
            raise ValueError("tools: this model's chat template has none")
        turns = [one.turn(self._arguments_as_text) for one in messages]
        if too_deep(turns, DEEPEST_CHAT) or too_deep(tools, DEEPEST_CHAT):
            raise ValueError(f"tools, and the arguments of calls, are nested at most {DEEPEST_CHAT} deep")
        if len(json.dumps(turns)) + len(json.dumps(tools)) > self._longest:
            raise self._too_long("too many characters")
        text = chat_text(turns, self.tokenizer, tools)
        if len(text) > self._longest:  # a template may write more than it is given
            raise self._too_long(f"{len(text)} characters")
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def method(self, wanted: str | dict[str, Any] | None) -> Method:
        """The method that a body asks for. ValueError for one that does not exist, or that would touch files."""
        if wanted is None:
            return self.default
        if wanted == OFF:
            wanted = "autoregressive"
        method = resolve_for(self.model.model, wanted)
        self._refuse(method)
        method.check(self.model)
        return method

    def _refuse(self, method: Method) -> None:
        """ValueError for a method that a request may not ask for, before anything of it is looked at."""
        usual = resolve_for(self.model.model, method.name)
        for one in fields(method):
            value = getattr(method, one.name)
            if one.name in (*THE_SERVERS, *OF_THEIR_MODELS) and value != getattr(usual, one.name):
                raise ValueError("speculative: settings that name files or models, or load models, are the server's (--method)")
            most = max(MOST_SETTING, one.default if isinstance(one.default, int) else 0)
            if isinstance(value, int) and value > most:
                raise ValueError(f"speculative: {one.name} is at most {most} in a request, found {value}")
        for name in method.of_methods:
            for inner in getattr(method, name) or ():
                self._refuse(inner)

    def _jobs(
        self, body: Sampled, prompts: list[list[int]], most: int | None, logprobs: int | None, grammar: Grammar | None
    ) -> list[Job]:
        method, found = self.method(body.speculative), []
        prediction = self._predicted(body)
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
                raise self._too_long(f"{len(prompt)} tokens{asked}")
            allowed = self._most_tokens(len(prompt), room) if most is None else max(most, 1)
            options = self._options(body, len(prompt), allowed)
            request = build_request(self.model, prompt, self.tokenizer, seed, options)
            if body.stops and request.stop_strings is not None:
                request = replace(request, stop_strings=request.stop_strings.without_prompt())
            for _ in range(body.n):
                sampling = replace(request.sampling, seed=row_seed(seed, len(found)))
                one = replace(request, sampling=sampling, prediction=prediction)
                own_grammar = None if grammar is None else grammar.fresh(len(prompt))
                if own_grammar is not None:
                    one = _obeying(one, own_grammar)
                job = Job(one, method, logprobs, self.seconds, details=body.stream_speculative == "full", grammar=own_grammar)
                found.append(job)
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

    def _predicted(self, body: Sampled) -> list[int]:
        """The tokens of the prediction; none where there is none."""
        if body.prediction is None:
            return []
        text = body.prediction.text
        if len(text) > self._longest:
            raise ValueError(f"prediction: at most {self.capacity} tokens, found {len(text)} characters")
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])[: self.capacity]

    def restricts(self, body: Sampled) -> bool:
        """Whether a body has a grammar."""
        wanted = body.response_format
        return (wanted is not None and wanted.type != "text") or (isinstance(body, ChatBody) and body.demands_a_call)

    def grammar(self, body: Sampled) -> Grammar | None:
        """Of all that may be written; None for anything. It may take seconds, and touches nothing that others use: it has a
        thread of its own. ValueError for a schema that is none, or too much; TimeoutError as of `Grammars.of_schema`."""
        wanted, choices = self._wanted(body), body.n * _prompts(body)
        if isinstance(body, ChatBody) and body.demands_a_call:
            if wanted is not None:
                raise ValueError("response_format and a tool_choice that demands a call exclude each other")
            if body.ignore_eos:
                raise ValueError("a call that is demanded ends a text, which ignore_eos forbids")
            return self._made_grammars.of_calls(argument_schemas(body.offered), choices)
        return None if wanted is None else self._made_grammars.of_schema(wanted, choices=choices)

    def _wanted(self, body: Sampled) -> dict[str, Any] | None:
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
    def _made_grammars(self) -> Grammars:
        if self._grammars is None:
            eos = self.model.model.generation_config.eos_token_id if self.model.model.generation_config else None
            if eos is None:  # as in a base model's configs
                eos = self.tokenizer.eos_token_id
            ends = [eos] if isinstance(eos, int) else list(eos or [])
            self._grammars = Grammars(self.tokenizer, self.model.embeddings, ends)
        return self._grammars

    def _options(self, body: Sampled, prompt: int, most: int) -> dict[str, Any]:
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


def _obeying(request: Request, grammar: Grammar) -> Request:
    """A request that obeys a grammar: its text ends with the document."""
    sampling = replace(request.sampling, processors=[*request.sampling.processors, grammar])
    eos, criteria = request.eos | set(grammar.ends), [*request.criteria, grammar.has_ended]
    return replace(request, sampling=sampling, eos=eos, criteria=criteria)


def _prompts(body: Sampled) -> int:
    """How many prompts a body has."""
    given: Any = body.prompt if isinstance(body, CompletionBody) else ""
    return len(given) if isinstance(given, list) and not isinstance(given[0], int) else 1
