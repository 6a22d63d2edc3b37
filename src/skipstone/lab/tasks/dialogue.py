"""Conversations of users' turns, and the prompts that they become."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from skipstone.hf.api import bos_prefix, token_ids
from skipstone.lab.tasks.data_sets import Record

VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
"""The system prompt of chats with a model that has no template: Vicuna's, as in Spec-Bench."""

Said = tuple[str, str]  # a turn and its answer


def digest(tokens: Sequence[int]) -> str:
    """A short hash of numbers, such as token ids."""
    return hashlib.sha256(" ".join(map(str, tokens)).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class TaskConversation:
    """The user's turns, or token ids for models without a tokenizer."""

    source: str  # name and place in its data set
    turns: tuple[str, ...] = ()  # the user's
    ids: Tensor | None = None  # [T] int64, instead of turns
    record: Record = field(default_factory=dict)  # the data set's, for scores
    place: int = 0  # of the record in the data set

    def __len__(self) -> int:
        return 1 if self.ids is not None else len(self.turns)

    def turn(self, index: int) -> str:
        """The user's words of a turn; nothing for ids."""
        return self.turns[index] if self.ids is None else ""

    @property
    def digest(self) -> str:
        """A short hash, to recognise equal prompts in two runs."""
        return digest(self.ids.tolist() if self.ids is not None else list("\0".join(self.turns).encode()))


@dataclass(frozen=True)
class AnswerTokens:
    """An answer that follows a prompt."""

    ids: Tensor  # [A] int64
    last_word: int  # place of the first token of its last word
    characters: int  # without white space around the answer


class PromptBuilder:
    """Makes prompts of conversations. limit: longer prompts lose their beginning. chat: use the model's chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, chat: bool, limit: int) -> None:
        self.tokenizer, self.chat, self.limit = tokenizer, chat, limit

    def ids(self, one: TaskConversation, said: Sequence[Said] = ()) -> Tensor:
        """[T] int64: the prompt of the next turn. said: earlier turns with answers. ValueError for an empty prompt."""
        if one.ids is not None:
            return one.ids[-self.limit :]
        assert self.tokenizer is not None
        found = self._whole(one, said)
        if not found:
            raise ValueError(f"{one.source}: the prompt is empty")
        if len(found) > self.limit:
            first = bos_prefix(self.tokenizer)
            found = [*first, *found[len(found) - max(1, self.limit - len(first)) :]]
        return torch.tensor(found)

    def cuts(self, one: TaskConversation, said: Sequence[Said] = ()) -> bool:
        """Whether `ids` cuts the beginning."""
        return len(one.ids if one.ids is not None else self._whole(one, said)) > self.limit

    def _whole(self, one: TaskConversation, said: Sequence[Said]) -> list[int]:
        assert self.tokenizer is not None
        return token_ids(self._prompt(one.turns[: len(said) + 1], [answer for _, answer in said]), self.tokenizer)

    def _prompt(self, turns: Sequence[str], answers: Sequence[str]) -> Any:
        pairs = list(zip(turns, answers, strict=False))
        if not self.chat:
            return "".join(f"{turn}{answer}\n\n" for turn, answer in pairs) + turns[-1]
        if getattr(self.tokenizer, "chat_template", None):
            told = [({"role": "user", "content": turn}, {"role": "assistant", "content": answer}) for turn, answer in pairs]
            return [*(part for pair in told for part in pair), {"role": "user", "content": turns[-1]}]
        end = getattr(self.tokenizer, "eos_token", None) or ""
        told = "".join(f" USER: {turn} ASSISTANT: {answer}{end}" for turn, answer in pairs)
        return f"{VICUNA}{told} USER: {turns[-1]} ASSISTANT:"

    def answer(self, text: str) -> AnswerTokens:
        """A text with at least one word, tokenised by itself. As in LAMBADA, white space around the last word belongs to it."""
        ids, words = self._continuation(text), text.rstrip()
        before = self._continuation(words.removesuffix(words.split()[-1]).rstrip())
        shared = takewhile(lambda pair: pair[0] == pair[1], zip(ids, before, strict=False))
        return AnswerTokens(torch.tensor(ids, dtype=torch.int64), len([*shared]), len(text.strip()))

    def _continuation(self, text: str) -> list[int]:
        assert self.tokenizer is not None
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def text(self, tokens: Sequence[int]) -> str:
        """The text of new tokens up to an end of sequence; empty without a tokenizer."""
        if self.tokenizer is None:
            return ""
        end = self.tokenizer.eos_token_id
        return str(self.tokenizer.decode([*takewhile(lambda token: token != end, tokens)], skip_special_tokens=True))
