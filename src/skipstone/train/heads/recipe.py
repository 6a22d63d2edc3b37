"""A recipe for AdaDecode's exit heads: which model, which prompts, which heads, how long. Arguments of `skipstone train heads`
take the place of a file where one is enough. Prompts are texts, chats, and conversations of several turns."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator
from transformers import PreTrainedTokenizerBase

from skipstone.hf import api
from skipstone.methods.adadecode.heads import Kind
from skipstone.train.data.sources import HubDataset, JsonLines, RecordSource, ScriptSource, TextFiles, from_folder
from skipstone.utils.settings_files import SettingsPart, first_fault
from skipstone.utils.yaml_files import mapping

PAPER: dict[str, Any] = {"epochs": 100, "batch_size": 128, "learning_rate": 5e-3, "warmup": 0.03, "patience": None}
"""Appendix D: Adam, 100 epochs, batches of 128, 5e-3, cosine, 3 % warm-up. batch_size counts answers."""
QUICK: dict[str, Any] = {"epochs": 40, "batch_size": 16, "learning_rate": 1e-3, "warmup": 0.03, "patience": 3}
"""Ours, the default: smaller batches, smaller steps, and an end where nothing grows better."""
PRESETS = {"quick": QUICK, "paper": PAPER}
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
        """The source that reads its `file` from a folder."""
        return self.model_copy(update={"path": str((folder / str(self.file)).absolute())})

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


class AnswerSettings(SettingsPart):
    """How the model writes what heads learn from: greedily, so many tokens a prompt, batch_size prompts at once, with a
    lossless `method` (None: its own default or plain decoding, whichever is faster). chat: a prompt that is a text is a user's
    turn of the chat template."""

    max_new_tokens: int = Field(default=128, ge=1)
    batch_size: int = Field(default=32, ge=1)
    method: str | dict[str, Any] | None = None
    chat: bool = False


class HeadShape(SettingsPart):
    """Heads after `layers` (None: L/4, L/2, 3L/4), of a `kind`, with a rank where that is low_rank. vocabulary: tokens that
    they predict, the so many that the answers hold most often; None for all."""

    layers: tuple[int, ...] | None = Field(default=None, min_length=1)
    kind: Kind = "square"
    rank: int | None = None
    vocabulary: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _trained(self) -> "HeadShape":
        if self.kind == "original":
            raise ValueError('kind "original" has nothing to train: decode with heads="original"')
        if (self.kind == "low_rank") != (self.rank is not None) or (self.rank is not None and self.rank < 1):
            raise ValueError(f"a rank of at least 1 belongs to kind low_rank alone, found {self.kind} and {self.rank}")
        if self.kind == "full" and self.vocabulary is not None:
            raise ValueError("a vocabulary belongs to heads that share the model's own LM head (square, low_rank), found full")
        return self


class HeadSchedule(SettingsPart):
    """epochs: most passes over the answers. batch_size: answers a step. warmup: share of all steps. patience: epochs without a
    lower divergence on the held-out answers after which a head is done; None trains to the end. held_out: share of answers.
    mixed_precision: of the training, None is bf16 on CUDA and none on the CPU; bf16 where it is asked for also makes the states
    that heads learn from."""

    epochs: int = Field(default=QUICK["epochs"], ge=1)
    batch_size: int = Field(default=QUICK["batch_size"], ge=1)
    learning_rate: float = Field(default=QUICK["learning_rate"], gt=0, allow_inf_nan=False)
    warmup: float = Field(default=QUICK["warmup"], ge=0, lt=1)
    patience: int | None = Field(default=QUICK["patience"], ge=1)
    held_out: float = Field(default=0.05, gt=0, lt=1)
    mixed_precision: Literal["no", "bf16"] | None = None


class HeadsRecipe(SettingsPart):
    """output: the run's folder; the heads stand in its `heads`. model: a folder or hub id, None for the bundled one. prompts:
    sources, of documents or of chats. model_dtype: of the model, "auto" for its checkpoint's; dtype:
    of the heads on the disk, None for the model's."""

    output: str = Field(min_length=1)
    model: str | None = None
    name: str | None = None
    prompts: list[Prompts] = Field(min_length=1)
    answers: AnswerSettings = AnswerSettings()
    heads: HeadShape = HeadShape()
    training: HeadSchedule = HeadSchedule()
    model_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    seed: int = Field(default=0, ge=0)


def read(path: Path, preset: str | None = None, data_dir: Path | None = None, **given: Any) -> HeadsRecipe:
    """A recipe from a file. preset: "paper" or "quick", in the place of what the file says of it. data_dir: of files that stand
    for data sets of the hub. given: fields that count instead of the file's. ValueError names what is unknown, missing or
    impossible."""
    own = mapping(path)
    name = {} if "model" not in given else {"name": None}  # the file's is another model's
    return made({**own, **name, **given}, str(path), preset, data_dir)


def of_prompts(paths: Sequence[Path], output: Path | None, preset: str | None = None, **given: Any) -> HeadsRecipe:
    """A recipe for prompts in files of JSON lines, with nothing else said but `given`. ValueError as `read`."""
    sources = [{"kind": "chats", "path": str(path.absolute())} for path in paths]
    return made({"output": str(output), "prompts": sources, **given}, "--prompts", preset)


def made(values: dict[str, Any], where: str, preset: str | None = None, data_dir: Path | None = None) -> HeadsRecipe:
    """A recipe from its values; see `read`."""
    if preset is not None and preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}: expected one of {', '.join(PRESETS)}")
    training = values.get("training", {})
    if preset is not None and isinstance(training, dict):
        values = {**values, "training": {**training, **PRESETS[preset]}}
    try:
        recipe = HeadsRecipe.model_validate(values)
    except ValidationError as error:
        raise ValueError(f"{where}: {first_fault(error)}") from error
    return recipe.model_copy(update={"prompts": from_folder(recipe.prompts, data_dir)})
