"""`skipstone bench`: run, report, compare, record, repeat, surrogate."""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer

from skipstone.cli import option_groups, terminal
from skipstone.cli.method_table import known_methods, known_peers
from skipstone.cli.options import OptionGroup, argument, expect_one_of, option, takes_groups
from skipstone.cli.terminal import DEFECT
from skipstone.utils.files import write_whole

bench = typer.Typer(help="Measure methods on your model and machine, and tell the truth about it.", no_args_is_help=True)

FORMATS, LAYOUTS = ("md", "csv", "json", "html"), ("own", "tasks", "layerskip", "swift", "adadecode", "adasd")
"""Those of skipstone.lab.bench.report, which would import torch."""
METHODS = option(None, 'A method, "layerskip exit_layer=3,6"; several values are a choice. Several times.', "--method")
FRESH = option(False, "Begin anew where the file holds a run.")
TUNE_PROMPTS = option(None, "Prompts for choices. Default: 6.", min=1)


def _results(name: str) -> Any:
    return option(Path(name), "The file of results; a killed run goes on with it.")


@dataclass(frozen=True)
class EngineOptions(OptionGroup):
    """How models are computed. None: what the plan says."""

    device: str | None = option(None, "auto is cuda where there is one, else cpu.")
    engine: str | None = option(None, choices=option_groups.ENGINES)
    quantize: str | None = option(None, "the native engine's weights.", choices=option_groups.QUANTIZED)
    threads: int | None = option(None, "CPU threads. Default: torch's choice.", min=1)

    def given(self) -> dict[str, Any]:
        """A plan's keys that the command line sets."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class PlanOptions(EngineOptions):
    """What is measured. The fields have the names of a plan's keys. None: what the plan or the protocol says."""

    models: list[str] | None = argument("Folders or hub ids. Default: the bundled model.", None, metavar="MODEL...")
    methods: list[str] | None = METHODS
    tasks: list[str] | None = option(None, "humaneval, gsm8k, ..., a .jsonl file. Several times. Default: self.", "--task")
    protocol: str | None = option(None, "Ask as a paper does: layerskip, swift, adadecode, adasd or spec-bench.")
    data_dir: Path | None = option(None, "Folder of JSON lines, instead of the hub.")
    num_prompts: int | None = option(None, "Of each task. Default: the protocol's, or 20.", min=1)
    skip_looping: bool | None = option(None, "Leave out prompts on which plain decoding loops.", "--skip-looping")
    prompt_tokens: int | None = option(None, "Longer prompts lose their beginning.", min=1)
    max_new_tokens: int | None = option(None, "Default: the protocol's, or 128.", min=1)
    temperature: float | None = option(None, "0 is greedy.", min=0.0)
    top_p: float | None = option(None, "Default: the protocol's, or 1.", min=0.0, max=1.0)
    samples: int | None = option(None, "Outputs of each prompt, for pass@k.", min=1)
    shots: int | None = option(None, "Solved examples before the question.", min=0)
    chat: bool | None = option(None, "Prompts are turns of a chat.", "--chat/--no-chat")
    tune: bool | None = option(None, "Choose open settings on other prompts.", "--tune")
    tune_prompts: int | None = TUNE_PROMPTS
    tune_tokens: int | None = option(None, "New tokens of their calls. Default: 48.", min=1)
    ignore_eos: bool | None = option(None, "All texts are equally long.", "--ignore-eos")
    perplexity: bool | None = option(None, "How well every exit predicts the tasks' answers, too.", "--perplexity")
    allow_code_execution: bool | None = option(None, "Score programs by running them, in a sandbox.", "--allow-code-execution")
    dtype: str | None = option(None, choices=option_groups.DTYPES)
    device_map: Any = option_groups.DEVICE_MAP
    seed: int | None = option(None, "Of prompts, draws and intervals. Default: 0.", min=0)


@dataclass(frozen=True)
class SurrogatePlanOptions(EngineOptions):
    """What is measured of a synthetic model."""

    methods: list[str] | None = METHODS
    num_prompts: int = option(16, min=1)
    prompt_tokens: int = option(128, min=5)
    max_new_tokens: int = option(96, min=1)
    tune_prompts: int | None = TUNE_PROMPTS
    dtype: str = option("float32", choices=option_groups.DTYPES[1:])
    seed: int = option(0, min=0)


@bench.command("run")
@takes_groups
def run(
    *,
    plan: Path | None = option(None, "A plan in YAML; flags override it."),
    out: Path = _results("results.jsonl"),
    settings: PlanOptions,
    fresh: bool = FRESH,
) -> None:
    """Measure models x methods x tasks, interleaved prompt by prompt. The file grows line by line; run it again to go on."""
    from skipstone.lab.tasks.data_sets import named
    from skipstone.lab.tasks.protocols import PROTOCOLS
    from skipstone.utils.yaml_files import mapping

    if plan is not None:
        mapping(plan)
    _check_methods(settings.methods)
    for task in settings.tasks or ():
        named(task)
    expect_one_of("--protocol", settings.protocol, tuple(PROTOCOLS))
    option_groups.expect_folder(settings.data_dir)
    option_groups.expect_writable(out)
    for model in settings.models or ():
        option_groups.expect_model(model)
    from skipstone.lab.bench import plan as plans
    from skipstone.lab.bench.report.report import show
    from skipstone.lab.bench.run import run as measure

    measure(plans.read(plan, settings.given()), out, command_line(), lambda text: typer.echo(text, err=True), fresh)
    show([out], terminal.console())


@bench.command("surrogate")
@takes_groups
def surrogate(
    *,
    shape: str = argument("llama-3.2-1b; llama-3-8b,layers=16; a config.json; layers=24,hidden=192."),
    agreement: float | None = option(None, "Share of tokens at which the part is to agree."),
    exit_layer: int | None = option(None, "The exit that is to agree so often.", min=1),
    skip_ratio: float | None = option(None, "Or the share of sublayers without which the model is to agree."),
    sure: float = option(0.0, "Share of the tokens whose successor is nearly certain, as in most of a text."),
    contexts: int = option(128, "Sampled texts of each measurement while calibrating.", min=4),
    out: Path = _results("surrogate.jsonl"),
    settings: SurrogatePlanOptions,
    fresh: bool = FRESH,
) -> None:
    """The speed-up that this machine would give a model of that shape and agreement. Random weights: SYNTHETIC, no download."""
    _check_methods(settings.methods)
    option_groups.expect_writable(out)
    from skipstone.lab.bench import plan as plans
    from skipstone.lab.bench.report.report import show
    from skipstone.lab.synthetic.surrogate import parse, run_surrogate

    target = parse(shape, exit_layer, agreement, skip_ratio, sure)
    default = ["hf-generate", "autoregressive"]
    if target.skip_ratio is not None:
        # a surrogate's confidence does not depend on whether its part is right
        default += ["swift confidence_threshold=none num_speculative_tokens=4,8,12"]
    elif target.agreement is not None:
        early_exit = "hf-early-exit num_assistant_tokens=4,6,8 confidence_threshold=0.0,0.4"
        default = ["hf-generate", early_exit, "autoregressive", "layerskip num_speculative_tokens=4,6,8"]
    own = {"models": [f"surrogate {shape}"], "methods": settings.methods or default, "ignore_eos": True}
    plan = plans.read(None, settings.given() | own)
    run_surrogate(target, plan, out, command_line(), lambda text: typer.echo(text, err=True), fresh, contexts=contexts)
    show([out], terminal.console())


@bench.command("report")
@takes_groups
def report(
    files: list[Path] = argument("Files of results.", metavar="RESULTS..."),
    form: str | None = option(None, "md, csv, json or html. Default: the ending of --out, or a table.", "--format"),
    layout: str = option("own", "own is this project's, the others are papers'.", choices=LAYOUTS),
    out: Path | None = option(None, "Where to write it. Default: stdout."),
    pictures: Path | None = option(None, "A folder: write the page's pictures into it, as SVG, and nothing else."),
) -> None:
    """Tables and pictures of runs."""
    form = form or (out.suffix.lstrip(".") if out is not None else None)
    expect_one_of("--format", form, FORMATS)
    option_groups.expect_writable(out)
    _check_results(files)
    from skipstone.lab.bench.report import report as reports

    if pictures is not None:
        if form is not None or out is not None or layout != "own":
            raise ValueError("--pictures writes pictures and nothing else: leave out --format, --layout and --out")
        for path in reports.pictures(files, pictures):
            typer.echo(path)
    elif form is None:
        reports.show(files, terminal.console(), layout)
    elif out is None:
        sys.stdout.write(reports.report(files, form, layout))
    else:
        write_whole(out, reports.report(files, form, layout))


@bench.command("compare")
@takes_groups
def compare(
    before: Path = argument("The first run."),
    after: Path = argument("The second run."),
    tolerance: float = option(0.05, "A smaller loss counts as none.", min=0.0, max=1.0),
) -> None:
    """Two runs on the same prompts, with intervals. Exit code 1 where a method has become slower, or its texts worse."""
    _check_results([before, after])
    from skipstone.lab.bench.report import report as reports

    changes = reports.compare(before, after)
    print(reports.table(changes, tolerance).markdown())
    if any(change.regressions(tolerance) for change in changes):
        raise typer.Exit(DEFECT)


@bench.command("record")
@takes_groups
def record(
    files: list[Path] = argument("Files of results. Later runs of a row widen its interval.", metavar="RESULTS..."),
    out: Path = option(Path("records.jsonl"), "The file of records."),
) -> None:
    """Store each row of a run as a small record: figures, seconds of every prompt, and all that repeats the row."""
    option_groups.expect_writable(out)
    _check_results(files)
    from skipstone.lab.bench import records

    records.write(out, records.pooled([one for file in files for one in records.records_of(file)]))


@bench.command("repeat")
@takes_groups
def repeat(
    file: Path = argument("The file of records."),
    task: str | None = option(None, "The record's task."),
    method: str | None = option(None, "The record's label."),
    temperature: float = option(0.0, "The record's temperature.", min=0.0),
    model: str | None = option(None, "The record's model, if the file has several."),
    folder: str | None = option(None, "Where the model is, if it is not where the record says."),
    data_dir: Path | None = option(None, "Folder of JSON lines, instead of the hub."),
    threads: int | None = option(None, "CPU threads. Default: the record's.", min=1),
    out: Path = option(Path("repeated.jsonl"), "The file of results. It is overwritten."),
) -> None:
    """Measure a record's row again, on the same prompts. Exit code 1 if the speed-up leaves the stored interval."""
    option_groups.expect_readable(file)
    option_groups.expect_folder(data_dir)
    option_groups.expect_writable(out)
    from skipstone.lab.bench import records
    from skipstone.lab.bench.run import run as measure

    known = records.read(file)
    row = records.select(known, task, method, temperature, model)
    plain = records.baseline(row, known)
    if folder is not None:
        option_groups.expect_model(folder)
    plan = records.repeat_plan(row, plain, folder, data_dir, threads)
    measure(plan, out, command_line(), lambda text: typer.echo(text, err=True), fresh=True)
    found = {one["label"]: one for one in records.records_of(out, every_prompt=True)}
    if missing := [one["label"] for one in (row, plain) if one["label"] not in found]:
        raise ValueError(f"{missing[0]} could not be measured here: skipstone bench report {out} says why")
    again = found[row["label"]], found[plain["label"]]
    print(records.compare((row, plain), again).markdown())
    expected, ratio = records.speedup(row, plain), records.speedup(*again)
    is_inside = expected.low <= ratio.value <= expected.high
    print(f"{ratio.value:.2f} x plain decoding, {'inside' if is_inside else 'OUTSIDE'} the stored interval.")
    if not is_inside:
        raise typer.Exit(DEFECT)


def _check_methods(texts: list[str] | None) -> None:
    for text in texts or ():
        option_groups.check_method_text(text, {**known_methods(), **known_peers()}, labels=("label",), several=True)


def _check_results(files: list[Path]) -> None:
    """OSError or ValueError for anything but files of results."""
    from skipstone.lab.bench import run_file

    option_groups.expect_readable(*files)
    for file in files:
        run_file.check(file, run_file.read(file))


def command_line() -> list[Any]:
    """The command that was typed, for the results' provenance."""
    return [Path(sys.argv[0]).name, *sys.argv[1:]]
