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
from skipstone.cli import (
    batch,
    bench,
    chat,
    check,
    costs,
    demo,
    env,
    export,
    families,
    generate,
    inspect,
    methods,
    push,
    search,
    serve,
    train,
    tune,
)
from skipstone.cli.terminal import INTERRUPTED, forgive_characters, report


class CommandGroup(TyperGroup):
    """The root command: turns every error into one line and an exit code."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run, then leave with 0, or 2 for a user's mistake, 1 for a defect or a machine's limits, 130 after Ctrl-C."""
        state: dict[str, Any] = {"debug": False}
        extra |= {"standalone_mode": False, "prog_name": "skipstone", "obj": state}
        forgive_characters()
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
    cls=CommandGroup, pretty_exceptions_enable=False, help="Faster language-model decoding that does not change the text."
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


VERBS = (demo.demo, generate.generate, chat.chat, check.check, inspect.inspect, costs.costs, search.search, tune.tune)
for verb in (*VERBS, serve.serve, batch.batch, push.push, export.export, methods.methods, families.families, env.env):
    app.command(rich_help_panel="CommandGroup")(verb)
for name, group in (("bench", bench.bench), ("train", train.train)):
    app.add_typer(group, name=name, rich_help_panel="CommandGroup")


main = app  # the console script
