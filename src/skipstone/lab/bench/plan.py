"""What a benchmark runs: models x methods x tasks, from flags or from one file of YAML; and who takes part: from wishes such as
`layerskip exit_layer=3,6` to engines.

A wish is a method's name with settings. A setting with several values is a choice: which of them is best is measured, on other
prompts than those reported.
"""

import itertools
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, ValidationInfo, field_validator
from transformers import PreTrainedModel

from skipstone import methods
from skipstone.decoding.settings import settings_of
from skipstone.engines.choose_engine import EngineOptions
from skipstone.engines.model_runner import ModelRunner
from skipstone.hf.api import resolve_for
from skipstone.lab.bench.peers import PEERS
from skipstone.lab.tasks import data_sets, protocols
from skipstone.lab.tasks.protocols import USUAL, TaskSettings
from skipstone.lab.tasks.task import Task
from skipstone.lab.timing.measure import GenerationBackend, MethodBackend
from skipstone.methods import METHODS
from skipstone.models.generation_config import OWN_FIELD
from skipstone.utils.settings_files import SettingsPart, first_fault, mapping

Wish = dict[str, Any]
KINDS: Mapping[str, type] = ChainMap(PEERS, METHODS)
BASELINE, THEIRS = "autoregressive", "hf-generate"
NAMING = ("method", "label")  # keys of a wish that are no settings
DTYPES = ("auto", "float32", "bfloat16", "float16")
DEPTHS = (1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2)  # exit layers, as shares of the layers
LENGTHS = (2, 3, 4, 6, 8)  # draft tokens a step
THRESHOLDS = (None, 0.2, 0.3, 0.4, 0.5, 0.6)  # confidence below which our drafting stops
PEER_THRESHOLDS = (0.0, 0.2, 0.4, 0.6)  # the same for transformers, 0 never stops
LOOKUPS = (3, 5, 10)  # draft tokens a step of prompt lookup
USUAL_METHODS = ("hf-generate", "hf-early-exit", "hf-prompt-lookup", "autoregressive", "layerskip")


class TaskOptions(SettingsPart):
    """How a task is to be asked, as in `TaskSettings`. None leaves it to the task's protocol, and where it has none to the
    usual."""

    shots: int | None = Field(default=None, ge=0)
    num_prompts: int | None = Field(default=None, ge=1)
    skip_looping: bool | None = None
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


class BenchPlan(TaskOptions):
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
    engine: str = "auto"  # what runs our methods: auto, eager, native or compiled
    quantize: str = "none"  # what the native engine quantises the weights to: none, int8 or int4
    threads: int | None = Field(default=None, ge=1)
    seed: int = Field(default=0, ge=0)

    @field_validator("methods", "tasks", mode="before")
    @classmethod
    def _listed(cls, values: Any, info: ValidationInfo) -> Any:
        tasks = info.field_name == "tasks"
        if not isinstance(values, (list, tuple)) or (tasks and not values):
            raise ValueError(f"expected a list of {info.field_name}, found {values!r}")
        return tuple(one if not isinstance(one, str) else {"task": one} if tasks else parse(one) for one in values)

    @field_validator("methods")
    @classmethod
    def _exist(cls, wishes: tuple[Wish, ...]) -> tuple[Wish, ...]:
        """ValueError for methods and settings that do not exist and labels that are given twice."""
        for wish in wishes:
            kind = methods.find(wish.get("method"), KINDS)
            for key in (key for key in wish if key not in NAMING):
                methods.find_setting(kind, key)
            if label(wish) != wish["method"] and label(wish) in KINDS:
                raise ValueError(f"label={label(wish)} is another method's name")
        labels = [label(wish) for wish in wishes]
        if twice := [name for name in labels if labels.count(name) > 1]:
            raise ValueError(f"two methods are called {twice[0]}: give one of them a label=...")
        return wishes

    @field_validator("dtype")
    @classmethod
    def _dtype(cls, value: str) -> str:
        if value not in DTYPES:
            raise ValueError(f"expected one of {', '.join(DTYPES)}, found {value!r}")
        return value

    @field_validator("engine")
    @classmethod
    def _engine(cls, value: str) -> str:
        EngineOptions(engine=value)
        return value

    @field_validator("quantize")
    @classmethod
    def _quantize(cls, value: str) -> str:
        EngineOptions(quantize=value)
        return value


def read(path: Path | None, given: dict[str, Any]) -> BenchPlan:
    """A plan from a file, with what flags say on top. ValueError names what is unknown, missing or impossible."""
    values = {**(mapping(path) if path is not None else {}), **given}
    over = {name: value for name, value in given.items() if name in TaskOptions.model_fields}
    if path is not None and over and isinstance(values.get("tasks"), list):  # a task's own say would hide the flag's
        values["tasks"] = [{**({"task": one} if isinstance(one, str) else one), **over} for one in values["tasks"]]
    try:
        plan = BenchPlan.model_validate(values)
    except ValidationError as error:
        raise ValueError(f"{path}: {first_fault(error)}" if path is not None else first_fault(error)) from error
    resolved(plan)
    if (idle := sorted({"tune_prompts", "tune_tokens"} & given.keys())) and not chooses(plan):
        raise ValueError(f"{idle[0]} has no effect: no setting is to be chosen (--tune, or several values of a setting)")
    return plan


def settings(plan: BenchPlan, asked: PlannedTask) -> TaskSettings:
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


def chooses(plan: BenchPlan) -> bool:
    """Whether settings are to be found by measurement."""
    return plan.tune or any(
        offered(KINDS[wish["method"]], key, value) for wish in plan.methods for key, value in wish.items() if key != "method"
    )


def resolved(plan: BenchPlan) -> list[tuple[Task, TaskSettings]]:
    """Every task of a plan with how it is asked, and scored as its protocol wants."""
    found = []
    for asked in plan.tasks:
        task, how = data_sets.named(asked.task), settings(plan, asked)
        found.append((replace(task, score=data_sets.rouge(task.rouge)) if how.rouge and task.rouge else task, how))
    return found


# ------------------------------------------------------------------------------------------ who takes part


def parse(text: str) -> Wish:
    """`layerskip exit_layer=3,6 confidence_threshold=none,0.4`, or JSON. ValueError for anything else."""
    wish = methods.parse(text, KINDS, labels=("label",), several=True)
    if "method" not in wish:
        raise ValueError(f'a method as JSON names itself, {{"method": "layerskip", ...}}; found {text!r}')
    return wish


def label(wish: Wish) -> str:
    """What the table calls it: its own `label`, else the method's name."""
    return str(wish.get("label") or wish["method"])


@dataclass(frozen=True)
class MethodEntry:
    """One method in the table."""

    label: str  # what the table calls it
    method: str
    candidates: tuple[GenerationBackend, ...]  # its engine, or those that are to be chosen from
    sampled: bool = True  # it takes part at a temperature too
    lossless: bool = True  # its text is the model's own

    def about(self) -> dict[str, Any]:
        """What the file of results says of it. settings: None where they are chosen."""
        settings = self.candidates[0].settings if len(self.candidates) == 1 else None
        return {"method": self.method, "settings": settings, "lossless": self.lossless}


def line_up(wishes: Sequence[Wish], model: PreTrainedModel, tune: bool) -> tuple[list[MethodEntry], dict[str, str]]:
    """(who takes part, label -> why a peer cannot). tune: what a wish leaves open is a choice among the usual values.

    ValueError for settings that do not fit the model.
    """
    found, refused, runner = [], {}, ModelRunner(model)
    for wish in wishes:
        name = wish["method"]
        given = {key: value for key, value in wish.items() if key not in NAMING}
        if tune:
            given = {**usual(name, runner.depth), **given}
        every = choices(given, KINDS[name])
        if name in PEERS:
            engines: list[Any] = [_peer(PEERS[name], one, model) for one in every]
            if (reason := engines[0].refusal(model)) is not None:
                refused[label(wish)] = reason
                continue
            for engine in engines:
                engine.check(model)
        else:
            engines = [MethodBackend(resolve_for(model, {"method": name, **one})) for one in every]
            for engine in engines:
                engine.method.check(runner)
            if len(engines) > 1 and not all(engine.lossless for engine in engines):
                raise ValueError(
                    f"{name} may change the text, so a choice by speed would be none: name every setting as a method of its "
                    "own with a label=..."
                )
        sampled, lossless = all(getattr(one, "sampled", True) for one in engines), all(one.lossless for one in engines)
        found.append(MethodEntry(label(wish), name, tuple(engines), sampled, lossless))
    return found, refused


def usual(method: str, depth: int) -> dict[str, Sequence[Any]]:
    """The values worth trying for a method on a model of `depth` layers: the same exit layers and draft lengths for our method
    and for the peer, each with its own thresholds."""
    shared = {"exit_layer": sorted({min(depth - 1, max(1, round(depth * share))) for share in DEPTHS})}
    return {
        "layerskip": {**shared, "num_speculative_tokens": LENGTHS, "confidence_threshold": THRESHOLDS},
        "hf-early-exit": {**shared, "num_assistant_tokens": LENGTHS, "confidence_threshold": PEER_THRESHOLDS},
        "hf-prompt-lookup": {"prompt_lookup_num_tokens": LOOKUPS},
    }.get(method, {})


def offered(kind: Any, key: str, value: Any) -> bool:
    """Whether a value is a choice: a list, but for settings that are lists themselves, of which a choice is a list of lists."""
    if key in settings_of(kind) and settings_of(kind)[key].is_list:
        value = value[0] if isinstance(value, (list, tuple)) and value else None
    return isinstance(value, (list, tuple))


def choices(settings: Mapping[str, Any], kind: Any) -> list[Wish]:
    """Every combination of the values that are choices."""
    values = [value if offered(kind, key, value) else [value] for key, value in settings.items()]
    if empty := [key for key, options in zip(settings, values, strict=True) if not options]:
        raise ValueError(f"{empty[0]} has no values to choose from")
    return [dict(zip(settings, one, strict=True)) for one in itertools.product(*values)]


def _peer(kind: Any, settings: Wish, model: PreTrainedModel) -> Any:
    """A peer, with what it takes from the model where nothing is said. ValueError for what is missing."""
    own = getattr(model.generation_config, OWN_FIELD, None) or {}
    needed = [field.name for field in fields(kind) if field.default is MISSING]
    settings = {**{name: own[name] for name in needed if name in own}, **settings}
    if missing := [name for name in needed if settings.get(name) is None]:
        raise ValueError(f"{kind.name} needs {missing[0]}=..., and this model carries no default for it")
    return kind(**settings)
