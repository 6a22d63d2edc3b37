"""How options are declared, and how a verb takes a group of them as one object of a frozen dataclass."""

from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import wraps
from inspect import Parameter, signature
from typing import Annotated, Any

import typer

from skipstone.cli import terminal
from skipstone.utils.settings_files import did_you_mean


def option(text: str, *names: str, panel: str | None = None, **more: Any) -> Any:
    """An option with its help. Its default is shown only if the help names it."""
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False, **more)


def flag(default: Any, text: str, *names: str, **more: Any) -> Any:
    """A field of an option group: its default and its help."""
    return field(default=default, metadata={"option": typer.Option(*names, help=text, **more)})


@dataclass(frozen=True)
class OptionGroup:
    """Base class of frozen dataclasses. Each field is an option. panel: the heading of the options in the help.

    A group checks its own values when it is made.
    """

    def __init_subclass__(cls, panel: str | None = None) -> None:
        for value in vars(cls).values():
            if isinstance(value, Field) and panel is not None:
                value.metadata["option"].rich_help_panel = panel

    @property
    def is_default(self) -> bool:
        """Whether no option was given another value than its default."""
        return all(getattr(self, one.name) == one.default for one in fields(self))


def expect_one_of(name: str, value: str | None, values: tuple[str, ...]) -> None:
    """ValueError for a value of an option that is not among the known ones."""
    if value is not None and value not in values:
        raise ValueError(f"{name} must be one of {', '.join(values)}, found {value!r}{did_you_mean(value, values)}")


def one_of(name: str, values: tuple[str, ...]) -> Callable[[str | None], str | None]:
    """A callback for an option that takes one of several words."""

    def check(value: str | None) -> str | None:
        expect_one_of(name, value, values)
        return value

    return check


def _set_up(ctx: typer.Context, debug: bool) -> bool:
    """Before a verb runs: keep libraries quiet until it ends, or show tracebacks."""
    ctx.obj["debug"] = debug
    if not debug:
        ctx.with_resource(terminal.quiet())
    return debug


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]
Debug = Annotated[bool, typer.Option("--debug", callback=_set_up, help="Show tracebacks.", hidden=True)]


def takes_groups(verb: Callable[..., None]) -> Callable[..., None]:
    """The command of a verb. A parameter with an option group as its type becomes one option per field. --debug is added."""
    groups, parameters = {}, []
    for name, parameter in signature(verb).parameters.items():
        kind = parameter.annotation
        if not (isinstance(kind, type) and issubclass(kind, OptionGroup)):
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))
            continue
        groups[name] = kind
        for one in fields(kind):
            default = Parameter.empty if one.default is MISSING else one.default
            annotation = Annotated[one.type, one.metadata["option"]] if one.metadata else one.type
            parameters.append(Parameter(one.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation))
    parameters.append(Parameter("debug", Parameter.KEYWORD_ONLY, default=False, annotation=Debug))

    @wraps(verb)
    def command(debug: bool = False, **given: Any) -> None:
        objects = {name: kind(**{one.name: given.pop(one.name) for one in fields(kind)}) for name, kind in groups.items()}
        verb(**objects, **given)

    command.__signature__ = signature(verb).replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command
