"""A conversation in a batch group of one row. Keys and values of earlier turns stay, so only new tokens of a prompt run."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from skipstone.decoding.draft import Step
from skipstone.decoding.loop import PREFILL_CHUNK
from skipstone.decoding.method import Method
from skipstone.engines.model_runner import ModelRunner
from skipstone.hf.api import token_ids
from skipstone.hf.build_request import build_request
from skipstone.hf.detokenizer import detokenize
from skipstone.serving.batch_group import BatchGroup
from skipstone.serving.pending_request import PendingRequest
from skipstone.utils.setup_times import REQUEST, SetupSeconds, collect_setup_seconds, setup_work

Message = dict[str, str]
"""{"role": "system", "user" or "assistant", "content": text}."""


class ContextFull(ValueError):
    """The conversation leaves no room for an answer."""


@dataclass(frozen=True)
class PendingAnswer:
    """An answer that is not written yet.

    messages: the conversation before it. options: keyword arguments of `skipstone.generate`. is_cut: whether the context has
    room for fewer tokens than are wanted. setup: seconds of set-up work so far."""

    messages: list[Message]
    pending: PendingRequest
    options: dict[str, Any]
    seed: int
    is_cut: bool
    setup: SetupSeconds


@dataclass(eq=False)
class Conversation:
    """Messages, and the row with the keys and values of their tokens.

    method: writes the answers. options: keyword arguments of `skipstone.generate`. max_new_tokens: of one answer. system: the
    first message, None for none. An answer is the text that `skipstone.generate` writes for the messages before it; without a
    chat template, for `plain_text` of them."""

    model: ModelRunner
    tokenizer: Any
    method: Method
    options: dict[str, Any]
    max_new_tokens: int
    system: str | None = None

    def __post_init__(self) -> None:
        self.reset()
        self._group: BatchGroup | None = self._create_group(self.method)

    @property
    def has_template(self) -> bool:
        """Whether the model has a chat template."""
        return self.tokenizer.chat_template is not None

    def use(self, method: Method) -> None:
        """Write with another method from now on. It has no keys and values, so the next answer reads the whole conversation.
        ValueError, before anything changed, if the method does not fit the model."""
        self._group, self.method = self._create_group(method), method

    def _create_group(self, method: Method) -> BatchGroup:
        group = BatchGroup(self.model, method, 1, self.model.max_positions, PREFILL_CHUNK, lambda *_: None)
        method.prepare_in_background(self.model)
        return group

    def reset(self) -> None:
        """Forget all messages except the system's."""
        self.messages: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]

    def ask(self, text: str, seed: int) -> PendingAnswer:
        """Prepare the answer to a user's text. Nothing is remembered before `keep`. ContextFull if there is no room for one
        token; ValueError if the chat template refuses the messages."""
        with collect_setup_seconds() as setup, setup_work(REQUEST):
            return self._prepare([*self.messages, {"role": "user", "content": text}], seed, setup)

    def _prepare(self, messages: list[Message], seed: int, setup: SetupSeconds) -> PendingAnswer:
        prompt = token_ids(messages if self.has_template else plain_text(messages), self.tokenizer)
        room = self.model.max_positions - len(prompt)
        if room < 1:
            raise ContextFull(f"the context is full: it has {len(prompt)} tokens, and the model takes {len(prompt) + room}")
        options = {**self.options, "max_new_tokens": min(self.max_new_tokens, room)}
        request = build_request(self.model, prompt, self.tokenizer, seed, options)
        return PendingAnswer(messages, PendingRequest(request, self.method), options, seed, room < self.max_new_tokens, setup)

    def answer(self, asked: PendingAnswer) -> Generator[Step, None, None]:
        """Write an answer step by step. ValueError, at the call, if it cannot begin. If the generator is closed between two
        steps, the row keeps what it has read; if a step fails, the next answer reads the whole conversation."""
        with collect_setup_seconds(asked.setup):
            group = self._group or self._create_group(self.method)
        group.loop.setup = asked.setup
        group.admit(asked.pending)
        self._group = None
        return self._steps(group, asked.pending)

    def _steps(self, group: BatchGroup, pending: PendingRequest) -> Generator[Step, None, None]:
        try:
            while pending in group.requests:
                yield group.step()
        except GeneratorExit:
            group.drop(pending)
        self._group = group

    def keep(self, asked: PendingAnswer, tokens: list[int]) -> None:
        """Remember the user's text and the tokens of its answer."""
        text = detokenize(self.tokenizer, tokens, asked.pending.prompt_ids)
        self.messages = [*asked.messages, {"role": "assistant", "content": text}]


def plain_text(messages: list[Message]) -> str:
    """Messages one after the other, each on lines of its own, for a model without a chat template."""
    return "".join(one["content"] if one["content"].endswith("\n") else one["content"] + "\n" for one in messages)
