"""What a model is asked when it writes the answers that heads learn from: texts, chats, and conversations of several turns."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from transformers import PreTrainedTokenizerBase

from skipstone.hf import api
from skipstone.train.data.sources import HubDataset, JsonLines, RecordSource, ScriptSource, TextFiles, resolve
from skipstone.utils.records import json_lines

USER = "user"  # the role whose turns are answered
KEYS = ("messages", "prompt", "turns")  # of a record of Chats, the first that it has counts


@dataclass(frozen=True)
class HeadPrompt:
    """One prompt. text: asked as it is, where there are no turns. said: messages (role, content) that stand before the turns.
    turns: what the user says, of which the model answers each before the next. place: where it was read, for messages."""

    text: str = ""
    said: tuple[tuple[str, str], ...] = ()
    turns: tuple[str, ...] = ()
    place: str = field(default="", compare=False)

    def __len__(self) -> int:
        """How many answers it has."""
        return max(1, len(self.turns))

    def ids(self, answers: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """The next prompt after the answers that the model gave so far. ValueError for a chat without a chat template, and for
        one that the template refuses."""
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
    """Conversations, one a line of a file of JSON lines.

    `messages`, or a `prompt` that is a list of {"role", "content"}: asked up to the last message that is the user's.
    `turns`, or a `prompt` that is a list of texts: what the user says, and the model answers turn by turn. A `prompt` that is a
    text is asked as any other text is. file: its name in a data folder, where that is given.
    """

    kind: Literal["chats"] = "chats"
    file: str | None = None

    def local(self, folder: Path) -> "ChatPrompts":
        """The source that reads from `folder`; itself where it names no file."""
        return self if self.file is None else self.model_copy(update={"path": str((folder / self.file).absolute())})

    def read(self, base: Path) -> Iterator[HeadPrompt]:
        """Prompts in the file's order. ValueError with the number of a line that holds none."""
        path = resolve(self.path, base)
        if not path.is_file():
            raise FileNotFoundError(f"source {self.name!r}: expected a file of JSON lines, found the folder {path}")
        return (_asked(record, place) for place, record in self.taken(json_lines(path)))

    def _expected(self) -> str:
        return f"one of the keys {', '.join(KEYS)}"


Prompts = Annotated[TextFiles | JsonLines | HubDataset | ScriptSource | ChatPrompts, Field(discriminator="kind")]
"""A source of prompts, told apart by `kind`. Of documents, what stands before a text and the text are one prompt."""


def asked_of(sources: Sequence[Any], base: Path, chat: bool) -> list[HeadPrompt]:
    """Every prompt of the sources once, in their order. chat: a text is the only turn of a chat."""
    found: dict[HeadPrompt, None] = {}
    for source in sources:
        for one in source.read(base):
            asked = one if isinstance(one, HeadPrompt) else HeadPrompt(one.prompt + one.text)
            found[HeadPrompt(turns=(asked.text,), place=asked.place) if chat and not asked.turns else asked] = None
    return list(found)


def _asked(record: dict[str, Any], place: str) -> HeadPrompt:
    """What a record asks. ValueError that names the place."""
    key = next((key for key in KEYS if record.get(key) is not None), None)
    if key is None:
        raise ValueError(f"{place}: expected one of the keys {', '.join(KEYS)}, found {', '.join(map(str, record)) or 'none'}")
    found = record[key]
    if isinstance(found, str) and key == "prompt":
        return HeadPrompt(found, place=place)
    if isinstance(found, list) and found:
        if all(isinstance(one, str) for one in found) and key != "messages":
            return HeadPrompt(turns=tuple(found), place=place)
        if all(map(_is_message, found)) and key != "turns":
            return _chat([(one["role"], one["content"]) for one in found], key, place)
    message = '{"role": text, "content": text}'
    wanted = {"messages": f"a list of {message}", "turns": "a list of texts"}.get(
        key, f"a text, a list of texts or of {message}"
    )
    raise ValueError(f"{place}: expected {wanted} under {key!r}, found {found!r:.80}")


def _chat(messages: list[tuple[str, str]], key: str, place: str) -> HeadPrompt:
    """A chat up to the last message of the user, whose answer is the model's to write."""
    while messages and messages[-1][0] != USER:
        messages = messages[:-1]
    if not messages:
        raise ValueError(f"{place}: expected a message of the role {USER!r} under {key!r}, found none")
    return HeadPrompt(said=tuple(messages[:-1]), turns=(messages[-1][1],), place=place)


def _is_message(one: Any) -> bool:
    return isinstance(one, Mapping) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str)
