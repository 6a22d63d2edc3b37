"""`skipstone generate`: continue a prompt. The text goes to stdout as it is made, everything else to stderr."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, get_type_hints

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

    keyword = inspect.Parameter.KEYWORD_ONLY
    hints = get_type_hints(Options, include_extras=True)
    own = [
        inspect.Parameter(
            field.name,
            keyword,
            default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(Options)
    ]
    derived = flags.parameters()
    assert not set(derived) & set(hints), "a method's setting is named like a flag of the command line"

    def verb(**values: Any) -> None:
        context: typer.Context = values.pop("context")
        given = {name: values.pop(name) for name in derived}
        options = Options(**values)
        context.obj["debug"] = options.debug
        with terminal.quiet(options.debug):
            run(options, given)

    context = inspect.Parameter("context", keyword, annotation=typer.Context)
    signature = [context, *own, *derived.values()]
    verb.__signature__ = inspect.Signature(signature)
    verb.__annotations__ = {parameter.name: parameter.annotation for parameter in signature}
    single = typer.Typer(add_completion=False)
    single.command("generate", help=HELP)(verb)
    return typer.main.get_command(single)


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
