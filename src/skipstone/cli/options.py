"""How options are declared, and how a verb takes a group of them as one object of a frozen dataclass."""

from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import wraps
from inspect import Parameter, signature
from typing import Annotated, Any

import typer

from skipstone.cli import terminal
from skipstone.utils.spelling import did_you_mean


def option(default: Any, text: str = "", *names: str, choices: tuple[str, ...] = (), read: Any = None, **more: Any) -> Any:
    """A parameter of a verb or a field of an option group: its default and its help.

    choices: the words that it may be. read: a function that makes a value of the text. more: arguments of `typer.Option`.
    """
    if choices:
        text = f"One of {', '.join(choices)}{'; ' if text else '.'}{text}"
        more["callback"] = _choice_check(choices)
    if read is not None:
        more |= {"parser": str, "callback": read, "metavar": "TEXT"}
    return field(default=default, metadata={"option": typer.Option(*names, help=text, **more)})


def argument(text: str, default: Any = MISSING, *, metavar: str | None = None) -> Any:
    """As `option`, for an argument. Without a default it must be given."""
    return field(default=default, metadata={"option": typer.Argument(help=text, metavar=metavar)})


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


def _choice_check(choices: tuple[str, ...]) -> Callable[..., str | None]:
    def check(param: typer.CallbackParam, value: str | None) -> str | None:
        expect_one_of(param.opts[0], value, choices)
        return value

    return check


def _set_up(ctx: typer.Context, debug: bool) -> bool:
    """Before a verb runs: keep libraries quiet until it ends, or show tracebacks."""
    ctx.obj["debug"] = debug
    if not debug:
        ctx.with_resource(terminal.quiet())
    return debug


AS_JSON = option(False, "Print one JSON document instead.", "--json")
DEBUG = option(False, "Show tracebacks.", "--debug", callback=_set_up, hidden=True)


def takes_groups(verb: Callable[..., None]) -> Callable[..., None]:
    """The command of a verb. A parameter with an option group as its type becomes one option per field. --debug is added."""
    groups, declared = {}, []
    for name, parameter in signature(verb).parameters.items():
        kind = parameter.annotation
        if isinstance(kind, type) and issubclass(kind, OptionGroup):
            groups[name] = kind
            declared += [(one.name, one.type, one) for one in fields(kind)]
        else:
            declared.append((name, kind, parameter.default))
    parameters = []
    for name, kind, one in [*declared, ("debug", bool, DEBUG)]:
        default = Parameter.empty if one.default is MISSING else one.default
        annotation = Annotated[kind, one.metadata["option"]]
        parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation))

    @wraps(verb)
    def command(debug: bool = False, **given: Any) -> None:
        objects = {name: kind(**{one.name: given.pop(one.name) for one in fields(kind)}) for name, kind in groups.items()}
        verb(**objects, **given)

    command.__signature__ = signature(verb).replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command
