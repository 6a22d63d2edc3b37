"""`skipstone batch`: a file of requests answered without a server."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from skipstone.cli.method_options import MethodOptions, check_method_values
from skipstone.cli.model_options import GenerationModelOptions, expect_model
from skipstone.cli.options import OptionGroup, argument, option
from skipstone.cli.serve import RAY_ADDRESS, TextLimitOptions, expect_packages

if TYPE_CHECKING:
    from skipstone.serving.batch_files.batch import ModelSettings
    from skipstone.serving.batch_files.request_lines import RequestFile

SOME_FAILED = 3
"""The exit code if the output is whole and some of its lines hold an error."""


@dataclass(frozen=True)
class BatchModelOptions(GenerationModelOptions):
    """The model as an option, because the arguments are files."""

    model: str | None = option(None, "A folder or a hub id. Default: the bundled model.", "--model")


@dataclass(frozen=True)
class ActorOptions(OptionGroup, panel="Ray"):
    """How many actors answer, and where. ValueError for options that need --ray."""

    ray: bool = option(False, "Answer on Ray Data, by an actor a device.", "--ray")
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
    from skipstone.serving.batch_files.batch import ModelSettings

    began = time.monotonic()
    if (failed := count_errors(output, lines)) is None:
        setup = model.dtype, model.device, model.engine, model.quantize, model.kv_dtype, model.trust_remote_code
        replacement = model.generation_config, model.override_generation_config or {}
        limit = limits.max_num_seqs, limits.max_model_len
        chosen = ModelSettings(model.model, *setup, chosen_method, served_model_name, *limit, *replacement)
        failed = _answer(chosen, output, lines, actors)
    typer.echo(f"{output}: {len(lines)} lines, {failed} of them errors, in {time.monotonic() - began:.1f} s")
    if failed:
        raise typer.Exit(SOME_FAILED)


def _answer(chosen: "ModelSettings", output: Path, lines: "RequestFile", actors: ActorOptions) -> int:
    """Answer all lines. Returns how many answers are errors. If the run ends early, say which file has its answers."""
    from skipstone.serving.batch_files import batch, ray_batch
    from skipstone.serving.batch_files.journal import journal_of
    from skipstone.utils.progress import progress_bar

    try:
        loaded = None if actors.ray else chosen.load()
        with progress_bar("answers", len(lines)) as update:

            def report(done: int, failed: int) -> None:
                update(done, f"answers, {failed} errors")

            if loaded is not None:
                return batch.run(loaded, output, lines, report)
            ray_options = ray_batch.RayOptions(actors.address, actors.actors, actors.cpus_per_actor)
            return ray_batch.run(chosen, ray_options, output, lines, report)
    except (KeyboardInterrupt, RuntimeError):
        if (journal := journal_of(output)).exists():
            typer.echo(f"{journal} has what was answered: --resume goes on with it", err=True)
        raise
