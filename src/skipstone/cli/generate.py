"""`skipstone generate`: continue a prompt. The text goes to stdout as it is made, everything else to stderr."""

from __future__ import annotations

from typing import Any

import typer

from skipstone.cli import terminal
from skipstone.cli.options import Options

HELP = "Continue a prompt: --prompt, --prompt-file or standard input. The text goes to stdout, all else to stderr."


def described() -> None:
    """Stands for the verb in the list of verbs, where its flags are not needed; `command` makes the real one."""
    raise AssertionError("resolved in skipstone.cli.Verbs")


def command() -> Any:
    """The verb as a typer command, with the flags of `Options` and of every method."""
    from skipstone.cli import flags

    return flags.command("generate", HELP, Options, run)


def run(options: Options, given: dict[str, str | None]) -> None:
    """Read, load, decode, show."""
    from skipstone.cli.compare import compare
    from skipstone.cli.decoding import decode
    from skipstone.cli.inputs import prepare
    from skipstone.cli.showing import Painter, tell

    job, method = prepare(options, given)
    painter = None if options.json else Painter(job, options.color)
    show = painter.show if painter is not None else None
    comparison = None
    if options.compare:
        done, comparison = compare(job, method, options.repeat, show)
    else:
        done = decode(job, method, show)
    if painter is not None:
        painter.end()
    tell(options, job, method, done, comparison)
    if done.interrupted:
        raise typer.Exit(terminal.INTERRUPTED)
