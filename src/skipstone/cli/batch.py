"""`skipstone batch`: a file of requests answered without a server."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skipstone.cli import options, terminal
from skipstone.cli.options import grouped, option

if TYPE_CHECKING:
    from skipstone.serving.batch_files.batch import Chosen
    from skipstone.serving.batch_files.lines import Lines

SOME_FAILED = 3
"""The exit code where the output is whole, and some of its lines tell of an error."""
Tell = Callable[[int, int], None]


def batch(
    requests: Annotated[Path, typer.Argument(help="A file of requests, as OpenAI's batch API has it.", metavar="INPUT")],
    output: Annotated[Path, typer.Argument(help="The file of answers that is written.", metavar="OUTPUT")],
    model: Annotated[str | None, option("A folder or a hub id. Default: the bundled model.", "--model")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what an interrupted run has begun.")] = False,
    method: options.MethodText = None,
    speculative_config: options.MethodConfig = None,
    served_model_name: Annotated[str | None, option("What requests call the model. Default: what --model says.")] = None,
    generation_config: options.GenerationConfig = "auto",
    override_generation_config: options.OverrideGenerationConfig = None,
    max_num_seqs: options.MaxNumSeqs = 8,
    max_model_len: options.MaxModelLen = None,
    ray: Annotated[bool, grouped("Ray", "Answer on Ray Data, by an actor a device.", "--ray")] = False,
    address: options.RayAddress = None,
    actors: Annotated[
        int | None, grouped("Ray", "Models that answer. Default: one a GPU, else as many as there are CPUs for.", min=1)
    ] = None,
    cpus_per_actor: Annotated[int, grouped("Ray", "CPUs that each of them has.", min=1)] = 1,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    engine: options.Engine = "auto",
    quantize: options.Quantize = "none",
    kv_dtype: options.KvDtype = None,
    trust_remote_code: options.TrustRemoteCode = False,
    debug: options.Debug = False,
) -> None:
    """Answer a file of requests, line by line in its order; a run that was killed goes on where it stopped."""
    if not ray and (address is not None or actors is not None or cpus_per_actor != 1):
        raise ValueError("--address, --actors and --cpus-per-actor need --ray")
    asked = options.asked_method(method, speculative_config)
    from skipstone.serving.batch_files.journal import expect_free, whole
    from skipstone.serving.batch_files.lines import Lines

    expect_free(output, resume=resume)
    lines = Lines(requests)
    if not ray:  # actors may lie on machines that have other folders
        options.check_model(model)
    options.check_values(asked)
    _expect_packages()
    from skipstone.serving.batch_files.batch import Chosen

    began = time.monotonic()
    if (failed := whole(output, lines)) is None:
        setup = dtype, device, engine, quantize, kv_dtype, trust_remote_code, asked, served_model_name
        chosen = Chosen(model, *setup, max_num_seqs, max_model_len, generation_config, override_generation_config)
        with _said_where_answers_are(output):
            failed = _answer(chosen, output, lines, (address, actors, cpus_per_actor) if ray else None)
    typer.echo(f"{output}: {len(lines)} lines, {failed} of them errors, in {time.monotonic() - began:.1f} s")
    if failed:
        raise typer.Exit(SOME_FAILED)


def _expect_packages() -> None:
    """ImportError without what a server is made of, which answers here as well."""
    from skipstone.utils.extras import installed

    for module in ("fastapi", "prometheus_client", "sse_starlette"):
        installed(module, f"a batch needs {module.replace('_', '-')}", "serve")


@contextmanager
def _said_where_answers_are(output: Path) -> Iterator[None]:
    """Where a run is ended in its middle, where its answers are."""
    from skipstone.serving.batch_files.journal import journal_of

    try:
        yield
    except (KeyboardInterrupt, RuntimeError):
        if (journal := journal_of(output)).exists():
            typer.echo(f"{journal} has what was answered: --resume goes on with it", err=True)
        raise


def _answer(chosen: "Chosen", output: Path, lines: "Lines", ray: tuple[str | None, int | None, int] | None) -> int:
    """Returns how many answers are errors. ray: the address, the actors and the CPUs of each; None for this process."""
    from skipstone.serving.batch_files import batch, cluster

    if ray is not None:
        placing = cluster.Placing(*ray)
        with _progress(len(lines)) as tell:
            return cluster.run(chosen, placing, output, lines, tell)
    loaded = chosen.load()
    with _progress(len(lines)) as tell:
        return batch.run(loaded, output, lines, tell)


@contextmanager
def _progress(total: int) -> Iterator[Tell]:
    """What shows how far a run is and when it will have ended; nothing where stderr is no terminal."""
    console = terminal.console(stderr=True)
    if not console.is_terminal:
        yield lambda done, failed: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    said = TextColumn("{task.fields[failed]} errors,"), TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn()
    with Progress(BarColumn(), MofNCompleteColumn(), TextColumn("lines,"), *said, console=console) as progress:
        task = None

        def tell(done: int, failed: int) -> None:
            nonlocal task
            if task is None:  # what an earlier run has done says nothing of the speed
                task = progress.add_task("", total=total, completed=done, failed=failed)
            progress.update(task, completed=done, failed=failed)

        yield tell
