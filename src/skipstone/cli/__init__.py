"""The command line: `skipstone VERB`, one file per verb.

Nothing here imports torch or transformers before a verb needs them, so that help, `--version` and shell completion answer at
once.
"""

import sys
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from skipstone import __version__
from skipstone.cli import bench, check, demo, env, generate, inspect, methods, search, train
from skipstone.cli.terminal import INTERRUPTED, report


class Verbs(TyperGroup):
    """The root command: turns every error into one line and an exit code."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run, then leave with 0, or 2 for a user's mistake, 1 for a defect or a machine's limits, 130 after Ctrl-C."""
        state: dict[str, Any] = {"debug": False}
        extra |= {"standalone_mode": False, "prog_name": "skipstone", "obj": state}
        try:
            code = super().main(*args, **extra)
        except (KeyboardInterrupt, typer.Abort):
            code = INTERRUPTED
        except Exception as error:
            if state["debug"]:
                traceback.print_exception(error)
            code = report(error)
        sys.exit(code or 0)


app = typer.Typer(
    cls=Verbs, pretty_exceptions_enable=False, help="Faster language-model decoding that does not change the text."
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"skipstone {__version__}")
        raise typer.Exit()


@app.callback(invoke_without_command=True)
def root(
    ctx: typer.Context,
    wanted: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


app.command("demo", rich_help_panel="Verbs")(demo.demo)
app.command("generate", rich_help_panel="Verbs")(generate.generate)
app.add_typer(bench.bench, name="bench", rich_help_panel="Verbs")
app.command("check", rich_help_panel="Verbs")(check.check)
app.command("inspect", rich_help_panel="Verbs")(inspect.inspect)
app.command("search", rich_help_panel="Verbs")(search.search)
app.command("methods", rich_help_panel="Verbs")(methods.methods)
app.command("env", rich_help_panel="Verbs")(env.env)
app.add_typer(train.train, name="train", rich_help_panel="Verbs")


def main() -> None:
    """The console script."""
    app()
