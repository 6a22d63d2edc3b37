"""The plan of a benchmark (models x methods x tasks), from flags or a YAML file, and the methods that it names.

A setting with several values is a choice: `layerskip exit_layer=3,6`. The best value is measured on prompts that are not
reported.
"""

import itertools
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, ValidationInfo, field_validator
from transformers import PreTrainedModel

from skipstone import methods
from skipstone.decoding import method_text
from skipstone.decoding.settings import LAYERS, settings_of
from skipstone.engines.model_runner import ModelRunner
from skipstone.hf.generate_call import resolve_for
from skipstone.lab.bench.peers import PEERS
from skipstone.lab.tasks import data_sets, protocols
from skipstone.lab.tasks.data_sets import Task
from skipstone.lab.tasks.protocols import USUAL, TaskSettings
from skipstone.lab.timing.measure import GenerationBackend, MethodBackend
from skipstone.methods import METHODS
from skipstone.models.generation_config import OWN_FIELD
from skipstone.models.mapped_model import MappedModel
from skipstone.utils.settings_files import SettingsPart, first_fault
from skipstone.utils.setup_times import SetupSeconds, collect_setup_seconds
from skipstone.utils.yaml_files import mapping

MethodSpec = dict[str, Any]  # "method", optionally "label", and settings
KINDS: Mapping[str, type] = ChainMap(PEERS, METHODS)
BASELINE, THEIRS = "autoregressive", "hf-generate"
NAMING = ("method", "label")  # keys of a MethodSpec that are no settings
DEPTH_SHARES = (1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2)  # exit layers to try, as shares of the layers
LENGTHS = (2, 3, 4, 6, 8)  # draft tokens per step to try
THRESHOLDS = (None, 0.2, 0.3, 0.4, 0.5, 0.6)  # confidence thresholds to try for our methods
PEER_THRESHOLDS = (0.0, 0.2, 0.4, 0.6)  # the same for transformers; 0 never stops
LOOKUPS = (3, 5, 10)  # draft tokens per step of prompt lookup to try
USUAL_METHODS = ("hf-generate", "hf-early-exit", "hf-prompt-lookup", "autoregressive", "layerskip")


class TaskOptions(SettingsPart):
    """The fields of `TaskSettings` that a plan sets. None takes the protocol's value, otherwise the default."""

    shots: int | None = Field(default=None, ge=0)
    num_prompts: int | None = Field(default=None, ge=1)
    places: tuple[int, ...] | None = Field(default=None, min_length=1)
    skip_looping: bool | None = None
    prompt_tokens: int | None = Field(default=None, ge=1)
    max_new_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1)
    samples: int | None = Field(default=None, ge=1)
    chat: bool | None = None
    protocol: str | None = None

    def given(self) -> dict[str, Any]:
        """The options that are set."""
        return self.model_dump(include=set(TaskOptions.model_fields), exclude_none=True)


class PlannedTask(TaskOptions):
    """One task of a plan."""

    task: str


class BenchPlan(TaskOptions):
    """A whole benchmark. Its task options hold for all tasks that do not set them."""

    models: tuple[str, ...] = ()  # folders or hub ids; empty for the bundled model
    methods: tuple[MethodSpec, ...] = Field(default=tuple({"method": name} for name in USUAL_METHODS), min_length=1)
    """Names, `name key=value,value` or mappings."""
    tasks: tuple[PlannedTask, ...] = Field(default=(PlannedTask(task="self"),), min_length=1)
    tune: bool = False  # settings that are not given are choices, too
    tune_prompts: int = Field(default=6, ge=1)  # prompts on which choices are measured, never reported
    tune_tokens: int = Field(default=48, ge=1)  # new tokens of each call that measures a choice
    ignore_eos: bool = False  # all texts have max_new_tokens tokens
    copies: tuple[
        Literal["int8", "int4"], ...
    ] = ()  # copies of the weights that are there from the start, as after `skipstone tune`
    stream: bool = False  # the tasks are one stream: methods keep what they have learnt from task to task
    perplexity: bool = False  # measure also how well every exit predicts the tasks' answers
    allow_code_execution: bool = False
    data_dir: Path | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    device_map: str | dict[str, int | str] | None = None  # places layers on several devices, as in `skipstone.load`
    engine: Literal["auto", "eager", "native", "compiled"] = "auto"
    quantize: Literal["none", "int8", "int4"] = "none"  # of the native engine's weights
    threads: int | None = Field(default=None, ge=1)
    seed: int = Field(default=0, ge=0)

    @field_validator("methods", "tasks", mode="before")
    @classmethod
    def _parse_texts(cls, values: Any, info: ValidationInfo) -> Any:
        if not isinstance(values, (list, tuple)):
            raise ValueError(f"expected a list of {info.field_name}, found {values!r}")
        read_text = parse if info.field_name == "methods" else lambda text: {"task": text}
        return tuple(read_text(value) if isinstance(value, str) else value for value in values)

    @field_validator("methods")
    @classmethod
    def _check_methods(cls, specs: tuple[MethodSpec, ...]) -> tuple[MethodSpec, ...]:
        """ValueError for methods and settings that do not exist, and for labels that are given twice."""
        for spec in specs:
            method_text.check_names(spec, methods.known(KINDS), NAMING)
            if label(spec) != spec["method"] and label(spec) in KINDS:
                raise ValueError(f"label={label(spec)} is another method's name")
        labels = [label(spec) for spec in specs]
        if twice := [name for name in labels if labels.count(name) > 1]:
            raise ValueError(f"two methods are called {twice[0]}: give one of them a label=...")
        return specs


def read(path: Path | None, given: dict[str, Any]) -> BenchPlan:
    """A plan from a file with flags over it. ValueError names what is unknown, missing or impossible."""
    values = {**(mapping(path) if path is not None else {}), **given}
    options = {name: value for name, value in given.items() if name in TaskOptions.model_fields}
    if path is not None and isinstance(values.get("tasks"), list):  # a task's own option would hide the flag
        values["tasks"] = [{**({"task": task} if isinstance(task, str) else task), **options} for task in values["tasks"]]
    try:
        plan = BenchPlan.model_validate(values)
    except ValidationError as error:
        raise ValueError(f"{path}: {first_fault(error)}" if path is not None else first_fault(error)) from error
    resolved(plan)
    if (idle := sorted({"tune_prompts", "tune_tokens"} & given.keys())) and not has_choices(plan):
        raise ValueError(f"{idle[0]} has no effect: no setting is to be chosen (--tune, or several values of a setting)")
    return plan


def task_settings(plan: BenchPlan, task: PlannedTask) -> TaskSettings:
    """A task's own options, else the plan's, else its protocol's, else the defaults. ValueError if they exclude each other."""
    given = plan.given() | task.given()
    protocol = given.get("protocol")
    settings = replace(USUAL if protocol is None else protocols.settings(protocol, task.task), **given)
    if settings.temperature == 0 and given.get("top_p", 1) < 1:
        raise ValueError(f"task {task.task}: top_p={settings.top_p} means nothing at temperature 0")
    if settings.places is not None and (settings.num_prompts is not None or settings.skip_looping):
        raise ValueError(f"task {task.task}: places name the prompts, so num_prompts and skip_looping choose none")
    if settings.temperature == 0 and settings.samples > 1:
        raise ValueError(f"task {task.task}: {settings.samples} samples at temperature 0 would all be the same text")
    return settings


def has_choices(plan: BenchPlan) -> bool:
    """Whether measurements choose settings."""
    settings = [(KINDS[spec["method"]], *one) for spec in plan.methods for one in spec.items() if one[0] != "method"]
    return plan.tune or any(is_choice(*one) for one in settings)


def resolved(plan: BenchPlan) -> list[tuple[Task, TaskSettings]]:
    """Every task of a plan with its settings and its protocol's score."""
    found = []
    for planned in plan.tasks:
        task, settings = data_sets.named(planned.task), task_settings(plan, planned)
        found.append((replace(task, score=data_sets.rouge(task.rouge)) if settings.rouge and task.rouge else task, settings))
    return found


# ------------------------------------------------------------------------------------------ methods of a plan


def parse(text: str) -> MethodSpec:
    """`layerskip exit_layer=3,6 confidence_threshold=none,0.4`, or JSON. ValueError for anything else."""
    spec = method_text.parse(text, methods.known(KINDS), None, ("label",), several=True)
    if "method" not in spec:
        raise ValueError(f'a method as JSON names itself, {{"method": "layerskip", ...}}; found {text!r}')
    return spec


def label(spec: MethodSpec) -> str:
    """The method's name in tables: its `label`, else its `method`."""
    return str(spec.get("label") or spec["method"])


@dataclass(frozen=True)
class MethodEntry:
    """One method in the table. setup: seconds of set-up work of its checks."""

    label: str
    method: str
    candidates: tuple[GenerationBackend, ...]  # one engine, or several to choose from
    sampled: bool = True  # it can sample
    lossless: bool = True  # its text is the model's own
    setup: SetupSeconds = field(default_factory=SetupSeconds)

    def about(self) -> dict[str, Any]:
        """The entry in the file of results. settings: None if they are chosen by measurement."""
        settings = self.candidates[0].settings if len(self.candidates) == 1 else None
        return {"method": self.method, "settings": settings, "lossless": self.lossless}


def create_entries(specs: Sequence[MethodSpec], model: PreTrainedModel, tune: bool) -> tuple[list[MethodEntry], dict[str, str]]:
    """(entries, label -> reason why a peer cannot run). tune: settings that are not given are choices among the usual values.

    ValueError for settings that do not fit the model.
    """
    entries, refused, depth = [], {}, ModelRunner(model).depth
    for spec in specs:
        name = spec["method"]
        if name in PEERS and PEERS[name].needs_transformers and isinstance(model, MappedModel):
            refused[label(spec)] = "transformers cannot compute the blocks of a GGUF file"
            continue
        given = {key: value for key, value in spec.items() if key not in NAMING}
        every = choices({**(usual(name, depth) if tune else {}), **given}, KINDS[name])
        engines: list[GenerationBackend]
        if name in PEERS:
            engines = [_create_peer(PEERS[name], settings, model) for settings in every]
        else:
            engines = [MethodBackend(resolve_for(model, {"method": name, **settings})) for settings in every]
        if (reason := engines[0].refusal(model)) is not None:
            refused[label(spec)] = reason
            continue
        with collect_setup_seconds() as setup:
            for engine in engines:
                engine.check(model)
        reads_own_file = given.get("file") == model.config.name_or_path  # a peer, which computes with the model's very weights
        lossless = reads_own_file or all(engine.lossless for engine in engines)
        if name not in PEERS and len(engines) > 1 and not lossless:
            how = "name every setting as a method of its own with a label=..."
            raise ValueError(f"{name} may change the text, so a choice by speed would be none: {how}")
        entries.append(MethodEntry(label(spec), name, tuple(engines), engines[0].sampled, lossless, setup))
    return entries, refused


def usual(method: str, depth: int) -> dict[str, Sequence[Any]]:
    """The values worth trying for a method. depth: layers of the model.

    Our method and the peer get the same exit layers and draft lengths, each with its own thresholds.
    """
    exits = {"exit_layer": sorted({min(depth - 1, max(1, round(depth * share))) for share in DEPTH_SHARES})}
    return {
        "layerskip": {**exits, "num_speculative_tokens": LENGTHS, "confidence_threshold": THRESHOLDS},
        "hf-early-exit": {**exits, "num_assistant_tokens": LENGTHS, "confidence_threshold": PEER_THRESHOLDS},
        "hf-prompt-lookup": {"prompt_lookup_num_tokens": LOOKUPS},
    }.get(method, {})


def is_choice(kind: Any, key: str, value: Any) -> bool:
    """Whether a value is a choice: a list, or a list of lists for settings that are lists themselves."""
    if key in settings_of(kind) and LAYERS in settings_of(kind)[key].type:
        value = value[0] if isinstance(value, (list, tuple)) and value else None
    return isinstance(value, (list, tuple))


def choices(settings: Mapping[str, Any], kind: Any) -> list[dict[str, Any]]:
    """Every combination of the values that are choices."""
    values = [value if is_choice(kind, key, value) else [value] for key, value in settings.items()]
    if empty := [key for key, options in zip(settings, values, strict=True) if not options]:
        raise ValueError(f"{empty[0]} has no values to choose from")
    return [dict(zip(settings, one, strict=True)) for one in itertools.product(*values)]


def _create_peer(kind: Any, settings: dict[str, Any], model: PreTrainedModel) -> Any:
    """A peer. Required settings that are not given come from the model. ValueError if one is missing."""
    own = getattr(model.generation_config, OWN_FIELD, None) or {}
    needed = [field.name for field in fields(kind) if field.default is MISSING]
    settings = {**{name: own[name] for name in needed if name in own}, **settings}
    if missing := [name for name in needed if settings.get(name) is None]:
        raise ValueError(f"{kind.name} needs {missing[0]}=..., and this model carries no default for it")
    return kind(**settings)
