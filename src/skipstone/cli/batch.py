"""`skipstone batch`: a file of requests answered without a server."""

import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from skipstone.cli import terminal
from skipstone.cli.option_groups import GenerationModelOptions, MethodOptions, check_method_values, expect_model
from skipstone.cli.options import OptionGroup, argument, option
from skipstone.cli.serve import RAY_ADDRESS, TextLimitOptions, expect_packages

if TYPE_CHECKING:
    from skipstone.serving.batch_files.batch import BatchSettings
    from skipstone.serving.batch_files.request_lines import RequestFile

UNLIMITED_WAITING = 1 << 30
"""Requests that may wait for a row. A batch submits only a few at a time."""
SOME_FAILED = 3
"""The exit code if the output is whole and some of its lines hold an error."""


@dataclass(frozen=True)
class BatchModelOptions(GenerationModelOptions):
    """The model as an option, because the arguments are files."""

    model: str | None = option(None, "A folder or a hub id. Default: the bundled model.", "--model")


@dataclass(frozen=True)
class ActorOptions(OptionGroup, panel="Ray"):
    """How many actors answer, and where. ValueError for options that need --ray."""

    ray: bool = option(False, "Answer on Ray, by an actor a device.", "--ray")
    address: str | None = option(None, RAY_ADDRESS)
    actors: int | None = option(None, "Models that answer. Default: one a GPU, else as many as there are CPUs for.", min=1)
    cpus_per_actor: int = option(1, "CPUs that each of them has.", min=1)

    def __post_init__(self) -> None:
        if not self.ray and not self.is_default:
            raise ValueError("--address, --actors and --cpus-per-actor need --ray")


def batch(
    requests: Path = argument("A file of requests, as OpenAI's batch API has it.", metavar="INPUT"),
    output: Path = argument("The file of answers that is written.", metavar="OUTPUT"),
    *,
    model: BatchModelOptions,
    resume: bool = option(False, "Go on with what an interrupted run has begun.", "--resume"),
    method: MethodOptions,
    served_model_name: str | None = option(None, "What requests call the model. Default: what --model says."),
    limits: TextLimitOptions,
    actors: ActorOptions,
) -> None:
    """Answer a file of requests, line by line in its order; a run that was killed goes on where it stopped."""
    chosen_method = method.parse()
    from skipstone.serving.batch_files.journal import count_errors, expect_free
    from skipstone.serving.batch_files.request_lines import RequestFile

    expect_free(output, resume=resume)
    lines = RequestFile(requests)
    if not actors.ray:  # actors may lie on machines that have other folders
        expect_model(model.model)
    check_method_values(chosen_method)
    expect_packages("a batch", "fastapi", "prometheus_client", "sse_starlette")
    began = time.monotonic()
    if (failed := count_errors(output, lines)) is None:
        placed = model.with_absolute_path()
        settings = _settings(placed, chosen_method, served_model_name or model.name, limits)
        with nullcontext() if actors.ray else terminal.watched_processor():
            failed = _answer(settings, output, lines, placed, actors)
    typer.echo(f"{output}: {len(lines)} lines, {failed} of them errors, in {time.monotonic() - began:.1f} s")
    if failed:
        raise typer.Exit(SOME_FAILED)


def _settings(model: BatchModelOptions, method: Any, served_name: str, limits: TextLimitOptions) -> "BatchSettings":
    """How the lines are answered. A value of None is called "usual" in the journal."""
    from skipstone.serving.batch_files.batch import BatchSettings
    from skipstone.serving.settings import ServerSettings

    about = asdict(model) | {"called": served_name, "method": method, "max_model_len": limits.max_model_len}
    del about["device"], about["trust_remote_code"], about["no_cache"], about["no_mtp"]
    server = ServerSettings(
        served_name, method, limits.max_num_seqs, limits.max_model_len, UNLIMITED_WAITING, drain_seconds=0.0
    )
    return BatchSettings(model.load, server, {name: "usual" if value is None else value for name, value in about.items()})


def _answer(
    settings: "BatchSettings", output: Path, lines: "RequestFile", model: BatchModelOptions, actors: ActorOptions
) -> int:
    """Answer all lines. Returns how many answers are errors. If the run ends early, say which file has its answers."""
    from skipstone.serving.batch_files import batch, ray_batch
    from skipstone.serving.batch_files.journal import journal_of
    from skipstone.utils.progress import progress_bar

    try:
        with progress_bar("answers", len(lines)) as update:

            def report(done: int, failed: int) -> None:
                update(done, f"answers, {failed} errors")

            if not actors.ray:
                return batch.run(settings, output, lines, report)
            place = actors.address, actors.actors, actors.cpus_per_actor
            options = ray_batch.RayOptions(*place, model=model.model, may_use_gpu=model.device != "cpu")
            return ray_batch.run(settings, options, output, lines, report)
    except (KeyboardInterrupt, RuntimeError):
        if (journal := journal_of(output)).exists():
            typer.echo(f"{journal} has what was answered: --resume goes on with it", err=True)
        raise
