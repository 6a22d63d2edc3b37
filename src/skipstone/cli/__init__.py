"""The command line: `skipstone VERB`, one file per verb.

Nothing here imports torch or transformers before a verb needs them, so that help, `--version` and shell completion answer at
once.
"""

import atexit
import gc
import sys
import traceback
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from skipstone import __version__
from skipstone.cli.options import takes_groups
from skipstone.cli.terminal import INTERRUPTED, replace_unprintable_characters, report_error

VERBS = (
    *("demo", "generate", "chat", "check", "inspect", "costs", "search", "tune", "serve", "batch", "push", "export"),
    *("methods", "families", "env", "cache", "bench", "train"),
)
"""Each verb is the function, or the group of verbs, that the file of its name defines. Help lists them in this order."""


class CommandGroup(TyperGroup):
    """The root command: turns every error into one line and an exit code."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run, then exit with 0, 2 for a user's mistake, 1 for a defect or a machine's limits, or 130 after Ctrl-C."""
        state = {"debug": False}
        extra |= {"standalone_mode": False, "prog_name": "skipstone", "obj": state}
        replace_unprintable_characters()
        try:
            code = super().main(*args, **extra)
        except (KeyboardInterrupt, typer.Abort):
            code = INTERRUPTED
        except Exception as error:
            if state["debug"]:
                traceback.print_exception(error)
            code = report_error(error)
        sys.exit(code or 0)


HELP = "Faster language-model decoding that does not change the text."
app = typer.Typer(cls=CommandGroup, pretty_exceptions_enable=False, help=HELP)


def _print_version(is_given: bool) -> None:
    if is_given:
        typer.echo(f"skipstone {__version__}")
        raise typer.Exit()


VERSION = typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")


@app.callback(invoke_without_command=True)
def root(ctx: typer.Context, version: Annotated[bool, VERSION] = False) -> None:
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


for name in VERBS:
    verb = getattr(import_module(f"{__name__}.{name}"), name)
    if isinstance(verb, typer.Typer):
        app.add_typer(verb, name=name, rich_help_panel="Commands")
    else:
        app.command(rich_help_panel="Commands")(takes_groups(verb))


atexit.register(gc.freeze)  # else Python visits all objects of torch before it exits
main = app  # the console script
