"""What a benchmark runs: models x methods x tasks, from flags or from one file of YAML."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator

from skipstone.bench import lineup
from skipstone.forms import Part, first_fault, mapping
from skipstone.tasks import protocols
from skipstone.tasks import sets as tasks
from skipstone.tasks.task import Task

DTYPES = ("auto", "float32", "bfloat16", "float16")
METHODS = ("hf-generate", "hf-early-exit", "hf-prompt-lookup", "autoregressive", "layerskip")


class Asking(Part):
    """How a task is asked. None leaves it to the task's protocol, and where it has none to the usual.

    shots: solved examples before the question. num_prompts: how many are reported. prompt_tokens: longer prompts lose their
    beginning. max_new_tokens: of every turn. temperature: 0 is greedy. samples: outputs of each prompt, for pass@k. chat:
    prompts are turns in the model's chat template.
    """

    shots: int | None = Field(default=None, ge=0)
    num_prompts: int | None = Field(default=None, ge=1)
    prompt_tokens: int | None = Field(default=None, ge=1)
    max_new_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1)
    samples: int | None = Field(default=None, ge=1)
    chat: bool | None = None
    protocol: str | None = None


class Asked(Asking):
    """One task of a plan."""

    task: str


class Plan(Asking):
    """A whole benchmark; its own `Asking` holds for all tasks that say nothing else.

    models: folders or hub ids, none for the bundled model. methods: names, `name key=value,value` or mappings; several values
    of a setting are a choice. tune: choose what is left open, too. tune_prompts, tune_tokens: what choices are made on, never
    reported. ignore_eos: all texts have max_new_tokens tokens. perplexity: how well every exit predicts
    the tasks' answers, too.
    """

    models: tuple[str, ...] = ()
    methods: tuple[dict[str, Any], ...] = Field(default=tuple({"method": name} for name in METHODS), min_length=1)
    tasks: tuple[Asked, ...] = (Asked(task="self"),)
    tune: bool = False
    tune_prompts: int = Field(default=6, ge=1)
    tune_tokens: int = Field(default=48, ge=1)
    ignore_eos: bool = False
    perplexity: bool = False
    allow_code_execution: bool = False
    data_dir: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = Field(default=None, ge=1)
    seed: int = Field(default=0, ge=0)

    @field_validator("methods", mode="before")
    @classmethod
    def _wishes(cls, values: Any) -> Any:
        if not isinstance(values, (list, tuple)):
            raise ValueError(f"expected a list of methods, found {values!r}")
        return tuple(lineup.parse(one) if isinstance(one, str) else one for one in values)

    @field_validator("methods")
    @classmethod
    def _exist(cls, wishes: tuple[dict[str, Any], ...]) -> Any:
        lineup.check(wishes)
        return wishes

    @field_validator("tasks", mode="before")
    @classmethod
    def _named(cls, values: Any) -> Any:
        if not isinstance(values, (list, tuple)) or not values:
            raise ValueError(f"expected a list of tasks, found {values!r}")
        return tuple({"task": one} if isinstance(one, str) else one for one in values)

    @field_validator("dtype")
    @classmethod
    def _dtype(cls, value: str) -> str:
        if value not in DTYPES:
            raise ValueError(f"expected one of {', '.join(DTYPES)}, found {value!r}")
        return value


class Question(Part):
    """How a task is asked, everything decided."""

    shots: int = 0
    num_prompts: int | None = None
    prompt_tokens: int | None = None
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    samples: int = 1
    chat: bool = False
    tabs: bool = False
    rouge: bool = False
    protocol: str | None = None


def read(path: Path | None, given: dict[str, Any]) -> Plan:
    """A plan from a file, with what flags say on top. ValueError names what is unknown, missing or impossible."""
    values = {**(mapping(path) if path is not None else {}), **given}
    over = {name: value for name, value in given.items() if name in Asking.model_fields}
    if path is not None and over and isinstance(values.get("tasks"), list):  # a task's own say would hide the flag's
        values["tasks"] = [{**({"task": one} if isinstance(one, str) else one), **over} for one in values["tasks"]]
    try:
        plan = Plan.model_validate(values)
    except ValidationError as error:
        raise ValueError(f"{path}: {first_fault(error)}" if path is not None else first_fault(error)) from error
    resolved(plan)
    if (idle := sorted({"tune_prompts", "tune_tokens"} & given.keys())) and not chooses(plan):
        raise ValueError(f"{idle[0]} has no effect: no setting is to be chosen (--tune, or several values of a setting)")
    return plan


def question(plan: Plan, asked: Asked) -> Question:
    """A task's settings: its own, else the plan's, else its protocol's, else the usual. ValueError where that is impossible."""
    own, shared = (one.model_dump(include=set(Asking.model_fields), exclude_none=True) for one in (asked, plan))
    protocol = own.get("protocol", shared.get("protocol"))
    below: dict[str, Any] = {}
    if protocol is not None:
        preset = protocols.preset(protocol, asked.task)
        below = {name: value for name, value in vars(preset).items() if name != "ours"}
    merged = {**below, **shared, **own}
    if merged.get("temperature", 0.0) == 0 and "top_p" in {**shared, **own} and merged["top_p"] < 1:
        raise ValueError(f"task {asked.task}: top_p={merged['top_p']} means nothing at temperature 0")
    if merged.get("temperature", 0.0) == 0 and merged.get("samples", 1) > 1:
        raise ValueError(f"task {asked.task}: {merged['samples']} samples at temperature 0 would all be the same text")
    return Question.model_validate(merged)


def chooses(plan: Plan) -> bool:
    """Whether settings are to be found by measurement."""
    return plan.tune or any(
        lineup.offered(lineup.KINDS[wish["method"]], key, value)
        for wish in plan.methods
        for key, value in wish.items()
        if key != "method"
    )


def resolved(plan: Plan) -> list[tuple[Task, Question]]:
    """Every task of a plan with how it is asked, and scored as its protocol wants."""
    found = []
    for asked in plan.tasks:
        task, how = tasks.named(asked.task), question(plan, asked)
        found.append((replace(task, score=tasks.rouge(task.rouge)) if how.rouge and task.rouge else task, how))
    return found
