"""`skipstone bench`: run, report, compare, surrogate."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from skipstone.cli import options, terminal
from skipstone.cli.options import option
from skipstone.utils.files import write_whole

bench = typer.Typer(help="Measure methods on your model and machine, and tell the truth about it.", no_args_is_help=True)


FORMATS, LAYOUTS = ("md", "csv", "json", "html"), ("own", "tasks", "layerskip", "swift", "adadecode", "adasd")
"""Those of skipstone.lab.bench.report, which would import torch."""
OURS = ("plan", "out", "fresh", "debug")  # what `run` is told that is no part of a plan
Models = Annotated[list[str] | None, typer.Argument(help="Folders or hub ids. Default: the bundled model.", metavar="MODEL...")]
Methods = Annotated[
    list[str] | None,
    option('A method with settings, "layerskip exit_layer=3,6"; several values are a choice. Several times.', "--method"),
]
Tasks = Annotated[list[str] | None, option("humaneval, gsm8k, ..., a .jsonl file. Several times. Default: self.", "--task")]
Running = Annotated[bool | None, option("Score programs by running them, in a sandbox.", "--allow-code-execution")]
Fresh = Annotated[bool, typer.Option(help="Begin anew where the file holds a run.")]
Device = Annotated[str | None, option("auto is cuda where there is one, else cpu.")]
Threads = Annotated[int | None, option("CPU threads. Default: torch's choice.", min=1)]


@bench.command("run")
def run(
    models: Models = None,
    plan: Annotated[Path | None, option("A plan in YAML; flags go over it.")] = None,
    methods: Methods = None,
    tasks: Tasks = None,
    protocol: Annotated[str | None, option("Ask as a paper does: layerskip, swift, adadecode, adasd or spec-bench.")] = None,
    data_dir: Annotated[Path | None, option("Folder of JSON lines, instead of the hub.")] = None,
    out: Annotated[Path, typer.Option(help="The file of results; a killed run goes on with it.")] = Path("results.jsonl"),
    num_prompts: Annotated[int | None, option("Of each task. Default: the protocol's, or 20.", min=1)] = None,
    skip_looping: Annotated[bool | None, option("Leave out prompts on which plain decoding loops.", "--skip-looping")] = None,
    prompt_tokens: Annotated[int | None, option("Longer prompts lose their beginning.", min=1)] = None,
    max_new_tokens: Annotated[int | None, option("Default: the protocol's, or 128.", min=1)] = None,
    temperature: Annotated[float | None, option("0 is greedy.", min=0.0)] = None,
    top_p: Annotated[float | None, option("Default: the protocol's, or 1.", min=0.0, max=1.0)] = None,
    samples: Annotated[int | None, option("Outputs of each prompt, for pass@k.", min=1)] = None,
    shots: Annotated[int | None, option("Solved examples before the question.", min=0)] = None,
    chat: Annotated[bool | None, option("Prompts are turns of a chat.", "--chat/--no-chat")] = None,
    tune: Annotated[bool | None, option("Choose on other prompts what is left open.", "--tune")] = None,
    tune_prompts: Annotated[int | None, option("Prompts for choices. Default: 6.", min=1)] = None,
    tune_tokens: Annotated[int | None, option("New tokens of their calls. Default: 48.", min=1)] = None,
    ignore_eos: Annotated[bool | None, option("All texts are equally long.", "--ignore-eos")] = None,
    perplexity: Annotated[bool | None, option("How well every exit predicts the tasks' answers, too.", "--perplexity")] = None,
    allow_code_execution: Running = None,
    dtype: Annotated[str | None, option("auto, float32, bfloat16 or float16.")] = None,
    device: Device = None,
    engine: Annotated[str | None, option("auto, eager, native or compiled.")] = None,
    quantize: Annotated[str | None, option("none, int8 or int4: the native engine's weights.")] = None,
    threads: Threads = None,
    seed: Annotated[int | None, option("Of prompts, draws and intervals. Default: 0.", min=0)] = None,
    fresh: Fresh = False,
    debug: options.Debug = False,
) -> None:
    """Measure models x methods x tasks, interleaved prompt by prompt. The file grows line by line; run it again to go on."""
    given = {name: value for name, value in locals().items() if value is not None and name not in OURS}
    _check_plan(plan, methods, tasks, protocol)
    if data_dir is not None and not data_dir.is_dir():
        raise FileNotFoundError(2, "no such folder", str(data_dir))
    options.check_writable(out)
    for name, value, values in (("--dtype", dtype, options.DTYPES), ("--engine", engine, options.ENGINES)):
        options.one_of(name, value, values)
    options.one_of("--quantize", quantize, options.QUANTIZED)
    for model in models or ():
        options.check_model(model)
    from skipstone.lab.bench import plan as plans
    from skipstone.lab.bench.report.report import show
    from skipstone.lab.bench.run import run as measure

    chosen = plans.read(plan, {**given, **({"data_dir": str(data_dir)} if data_dir is not None else {})})
    measure(chosen, out, command_line(), lambda text: typer.echo(text, err=True), fresh)
    show([out], terminal.console())


@bench.command("surrogate")
def surrogate(
    shape: Annotated[str, typer.Argument(help="llama-3.2-1b; llama-3-8b,layers=16; a config.json; layers=24,hidden=192.")],
    agreement: Annotated[float | None, typer.Option(help="Share of tokens at which the part is to agree.")] = None,
    exit_layer: Annotated[int | None, typer.Option(help="The exit that is to agree so often.", min=1)] = None,
    skip_ratio: Annotated[float | None, option("Or the share of sublayers without which the model is to agree.")] = None,
    sure: Annotated[float, option("Share of the tokens whose successor is nearly certain, as in most of a text.")] = 0.0,
    contexts: Annotated[int, option("Sampled texts of each measurement while calibrating.", min=4)] = 128,
    methods: Methods = None,
    out: Annotated[Path, typer.Option(help="The file of results; a killed run goes on with it.")] = Path("surrogate.jsonl"),
    num_prompts: Annotated[int, typer.Option(min=1)] = 16,
    prompt_tokens: Annotated[int, typer.Option(min=5)] = 128,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 96,
    tune_prompts: Annotated[int | None, option("Prompts for choices. Default: 6.", min=1)] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Device = None,
    engine: Annotated[str | None, option("auto, eager, native or compiled.")] = None,
    quantize: Annotated[str | None, option("none, int8 or int4: the native engine's weights.")] = None,
    threads: Threads = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    fresh: Fresh = False,
    debug: options.Debug = False,
) -> None:
    """What speed-up this machine would give a model of that shape and agreement. Random weights: SYNTHETIC, no download."""
    _check_plan(None, methods, None, None)
    options.check_writable(out)
    for name, value, values in (("--dtype", dtype, options.DTYPES[1:]), ("--engine", engine, options.ENGINES)):
        options.one_of(name, value, values)
    options.one_of("--quantize", quantize, options.QUANTIZED)
    from skipstone.lab.bench import plan as plans
    from skipstone.lab.bench.report.report import show
    from skipstone.lab.synthetic.surrogate import parse, run_surrogate

    wanted = parse(shape, exit_layer, agreement, skip_ratio, sure)
    default = ["hf-generate", "autoregressive"]
    if wanted.skip_ratio is not None:
        # how sure a surrogate is says little of whether its part is right
        default += ["swift confidence_threshold=none num_speculative_tokens=4,8,12"]
    elif wanted.agreement is not None:
        default = [
            "hf-generate",
            "hf-early-exit num_assistant_tokens=4,6,8 confidence_threshold=0.0,0.4",
            "autoregressive",
            "layerskip num_speculative_tokens=4,6,8",
        ]
    given = {"num_prompts": num_prompts, "prompt_tokens": prompt_tokens, "max_new_tokens": max_new_tokens, "threads": threads}
    given |= {"tune_prompts": tune_prompts, "ignore_eos": True, "dtype": dtype, "device": device, "seed": seed}
    given |= {"models": [f"surrogate {shape}"], "methods": methods or default, "engine": engine, "quantize": quantize}
    chosen = plans.read(None, {name: value for name, value in given.items() if value is not None})
    run_surrogate(wanted, chosen, out, command_line(), lambda text: typer.echo(text, err=True), fresh, contexts)
    show([out], terminal.console())


@bench.command("report")
def report(
    files: Annotated[list[Path], typer.Argument(help="Files of results.", metavar="RESULTS...")],
    form: Annotated[
        str | None, typer.Option("--format", help="md, csv, json or html. Default: the ending of --out, or a table.")
    ] = None,
    layout: Annotated[str, typer.Option(help="own, tasks, or a paper's: layerskip, swift, adadecode, adasd.")] = "own",
    out: Annotated[Path | None, typer.Option(help="Where to write it. Default: stdout.", show_default=False)] = None,
    pictures: Annotated[Path | None, option("A folder: write the page's pictures into it, as SVG, and nothing else.")] = None,
    debug: options.Debug = False,
) -> None:
    """Tables and pictures of runs."""
    form = form or (out.suffix.lstrip(".") if out is not None else None)
    options.one_of("--format", form, FORMATS)
    options.one_of("--layout", layout, LAYOUTS)
    options.check_writable(out)
    _check_results(files)
    from skipstone.lab.bench.report import report as reports

    if pictures is not None:
        if form is not None or out is not None or layout != "own":
            raise ValueError("--pictures writes pictures and nothing else: leave out --format, --layout and --out")
        for path in reports.pictures(files, pictures):
            typer.echo(path)
        return
    if form is None:
        reports.show(files, terminal.console(), layout)
    elif out is None:
        sys.stdout.write(reports.report(files, form, layout))
    else:
        write_whole(out, reports.report(files, form, layout))


@bench.command("compare")
def compare(
    before: Annotated[Path, typer.Argument(help="The first run.")],
    after: Annotated[Path, typer.Argument(help="The second run.")],
    tolerance: Annotated[float, typer.Option(help="A loss of less than this is none.", min=0.0, max=1.0)] = 0.05,
    debug: options.Debug = False,
) -> None:
    """Two runs on the same prompts, with intervals. Exit code 1 where a method has become slower, or its texts worse."""
    _check_results([before, after])
    from skipstone.lab.bench.report import compare as comparing

    changes = comparing.compare(before, after)
    print(comparing.table(changes, tolerance).markdown())
    if any(change.regressions(tolerance) for change in changes):
        raise typer.Exit(terminal.DEFECT)


def _check_plan(plan: Path | None, methods: list[str] | None, tasks: list[str] | None, protocol: str | None) -> None:
    """ValueError or OSError for what is wrong with a plan whatever the model is."""
    from skipstone.cli import method_table
    from skipstone.lab.tasks.data_sets import named
    from skipstone.lab.tasks.protocols import PROTOCOLS
    from skipstone.utils.settings_files import mapping

    if plan is not None:
        mapping(plan)
    for text in methods or ():
        options.check_method(text, {**method_table.known_methods(), **method_table.PEERS}, labels=("label",), several=True)
    for task in tasks or ():
        named(task)
    options.one_of("--protocol", protocol, tuple(PROTOCOLS))


def _check_results(files: list[Path]) -> None:
    """OSError or ValueError for what is no file of results."""
    from skipstone.lab.bench import run_file

    options.check_readable(*files)
    for file in files:
        run_file.check(file, run_file.read(file))


def command_line() -> list[Any]:
    """The command that was typed, as provenance keeps it."""
    return [Path(sys.argv[0]).name, *sys.argv[1:]]
