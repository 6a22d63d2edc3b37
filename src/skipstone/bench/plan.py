"""What a benchmark runs: models x methods x tasks, from flags or from one file of YAML."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator

from skipstone.bench import lineup
from skipstone.forms import Part, first_fault, mapping
from skipstone.tasks import protocols, sets
from skipstone.tasks.protocols import USUAL, TaskSettings
from skipstone.tasks.task import Task

DTYPES = ("auto", "float32", "bfloat16", "float16")
USUAL_METHODS = ("hf-generate", "hf-early-exit", "hf-prompt-lookup", "autoregressive", "layerskip")


class TaskOptions(Part):
    """How a task is to be asked, as in `TaskSettings`. None leaves it to the task's protocol, and where it has none to the
    usual."""

    shots: int | None = Field(default=None, ge=0)
    num_prompts: int | None = Field(default=None, ge=1)
    prompt_tokens: int | None = Field(default=None, ge=1)
    max_new_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1)
    samples: int | None = Field(default=None, ge=1)
    chat: bool | None = None
    protocol: str | None = None


class PlannedTask(TaskOptions):
    """One task of a plan."""

    task: str


class Plan(TaskOptions):
    """A whole benchmark; its own options hold for all tasks that say nothing else."""

    models: tuple[str, ...] = ()  # folders or hub ids, none for the bundled model
    methods: tuple[dict[str, Any], ...] = Field(default=tuple({"method": name} for name in USUAL_METHODS), min_length=1)
    """Names, `name key=value,value` or mappings; several values of a setting are a choice."""
    tasks: tuple[PlannedTask, ...] = (PlannedTask(task="self"),)
    tune: bool = False  # choose what is left open, too
    tune_prompts: int = Field(default=6, ge=1)  # prompts on which choices are made, never reported
    tune_tokens: int = Field(default=48, ge=1)  # new tokens of a call of theirs
    ignore_eos: bool = False  # all texts have max_new_tokens tokens
    perplexity: bool = False  # how well every exit predicts the tasks' answers, too
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


def read(path: Path | None, given: dict[str, Any]) -> Plan:
    """A plan from a file, with what flags say on top. ValueError names what is unknown, missing or impossible."""
    values = {**(mapping(path) if path is not None else {}), **given}
    over = {name: value for name, value in given.items() if name in TaskOptions.model_fields}
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


def settings(plan: Plan, asked: PlannedTask) -> TaskSettings:
    """How a task is asked: by its own options, else the plan's, else its protocol, else as usual. ValueError where that is
    impossible."""
    own, shared = (one.model_dump(include=set(TaskOptions.model_fields), exclude_none=True) for one in (asked, plan))
    given = {**shared, **own}
    protocol = given.get("protocol")
    found = replace(USUAL if protocol is None else protocols.settings(protocol, asked.task), **given)
    if found.temperature == 0 and given.get("top_p", 1) < 1:
        raise ValueError(f"task {asked.task}: top_p={found.top_p} means nothing at temperature 0")
    if found.temperature == 0 and found.samples > 1:
        raise ValueError(f"task {asked.task}: {found.samples} samples at temperature 0 would all be the same text")
    return found


def chooses(plan: Plan) -> bool:
    """Whether settings are to be found by measurement."""
    return plan.tune or any(
        lineup.offered(lineup.KINDS[wish["method"]], key, value)
        for wish in plan.methods
        for key, value in wish.items()
        if key != "method"
    )


def resolved(plan: Plan) -> list[tuple[Task, TaskSettings]]:
    """Every task of a plan with how it is asked, and scored as its protocol wants."""
    found = []
    for asked in plan.tasks:
        task, how = sets.named(asked.task), settings(plan, asked)
        found.append((replace(task, score=sets.rouge(task.rouge)) if how.rouge and task.rouge else task, how))
    return found
