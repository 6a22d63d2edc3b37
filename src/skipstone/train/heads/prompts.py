"""Prompts for the answers that heads learn from: texts, chats, and conversations of several turns."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from transformers import PreTrainedTokenizerBase

from skipstone.hf import api
from skipstone.train.data.sources import HubDataset, JsonLines, RecordSource, ScriptSource, TextFiles

USER = "user"  # the role whose turns are answered
MESSAGE = '{"role": text, "content": text}'
KEYS = {"messages": f"a list of {MESSAGE}", "prompt": f"a text, a list of texts or of {MESSAGE}", "turns": "a list of texts"}
"""Keys of a chat's record and what each holds. The first that a record has counts."""


@dataclass(frozen=True)
class HeadPrompt:
    """One prompt. turns: messages of the user; the model answers each before the next. text: the prompt if there are no turns.
    said: messages (role, content) before the turns. place: where it was read, for error messages."""

    text: str = ""
    said: tuple[tuple[str, str], ...] = ()
    turns: tuple[str, ...] = ()
    place: str = field(default="", compare=False)

    def __len__(self) -> int:
        """How many answers it has."""
        return max(1, len(self.turns))

    def ids(self, answers: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Token ids of the next prompt after the model's answers so far. ValueError for a chat without a chat template, or
        if it refuses the messages."""
        if not self.turns:
            return api.token_ids(self.text, tokenizer)
        chat = list(self.said)
        for turn, answer in zip(self.turns, answers, strict=False):
            chat += [(USER, turn), ("assistant", answer)]
        chat.append((USER, self.turns[len(answers)]))
        try:
            return api.token_ids([{"role": role, "content": content} for role, content in chat], tokenizer)
        except ValueError as error:
            raise ValueError(f"{self.place or 'a prompt'} cannot be asked as a chat: {error}") from error


class ChatPrompts(RecordSource):
    """Conversations, one per line of a file of JSON lines.

    `messages`, or a `prompt` that is a list of {"role", "content"}: a chat up to the user's last message.
    `turns`, or a `prompt` that is a list of texts: messages of the user, which the model answers turn by turn. A `prompt` that
    is a text is a text as any other. file: the source's name in a data folder, if one is given.
    """

    kind: Literal["chats"] = "chats"
    file: str | None = None

    def local(self, folder: Path) -> "ChatPrompts":
        """The source that reads from `folder`; itself where it names no file."""
        return self if self.file is None else self.model_copy(update={"path": str((folder / self.file).absolute())})

    def read(self, base: Path) -> Iterator[HeadPrompt]:
        """Prompts in the file's order. ValueError with the number of a line that holds none."""
        records = self.select(self.lines(base), f"one of the keys {', '.join(KEYS)}")
        return (_prompt_of(record, place) for place, record in records)


Prompts = Annotated[TextFiles | JsonLines | HubDataset | ScriptSource | ChatPrompts, Field(discriminator="kind")]
"""A source of prompts, distinguished by `kind`. A document's prompt and its text are one prompt."""


def read_prompts(sources: Sequence[Any], base: Path, chat: bool) -> list[HeadPrompt]:
    """Every prompt of the sources once, in their order. chat: a text becomes the only turn of a chat."""
    prompts: dict[HeadPrompt, None] = {}
    for source in sources:
        for item in source.read(base):
            prompt = item if isinstance(item, HeadPrompt) else HeadPrompt(item.prompt + item.text)
            prompts[HeadPrompt(turns=(prompt.text,), place=prompt.place) if chat and not prompt.turns else prompt] = None
    return list(prompts)


def _prompt_of(record: dict[str, Any], place: str) -> HeadPrompt:
    """The prompt of a record. ValueError that names the place."""
    key = next((key for key in KEYS if record.get(key) is not None), None)
    if key is None:
        raise ValueError(f"{place}: expected one of the keys {', '.join(KEYS)}, found {', '.join(map(str, record)) or 'none'}")
    content = record[key]
    if isinstance(content, str) and key == "prompt":
        return HeadPrompt(content, place=place)
    if isinstance(content, list) and content:
        if all(isinstance(turn, str) for turn in content) and key != "messages":
            return HeadPrompt(turns=tuple(content), place=place)
        if all(map(_is_message, content)) and key != "turns":
            return _chat([(message["role"], message["content"]) for message in content], key, place)
    raise ValueError(f"{place}: expected {KEYS[key]} under {key!r}, found {content!r:.80}")


def _chat(messages: list[tuple[str, str]], key: str, place: str) -> HeadPrompt:
    """A chat up to the user's last message, which the model answers."""
    while messages and messages[-1][0] != USER:
        messages = messages[:-1]
    if not messages:
        raise ValueError(f"{place}: expected a message of the role {USER!r} under {key!r}, found none")
    return HeadPrompt(said=tuple(messages[:-1]), turns=(messages[-1][1],), place=place)


def _is_message(item: Any) -> bool:
    return isinstance(item, Mapping) and isinstance(item.get("role"), str) and isinstance(item.get("content"), str)
