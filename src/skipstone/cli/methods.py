"""`skipstone methods`: what there is to choose from, derived from the methods' own classes and module docstrings."""

import inspect
import json
import re
import sys
from typing import Annotated, Any

import typer

from skipstone.cli import method_table, terminal
from skipstone.decoding.method_text import expect_method

TEXT = {True: "exact", False: "lossy"}  # whether a method keeps it


def methods(
    name: Annotated[str | None, typer.Argument(help="The method whose settings are to be explained.", metavar="NAME")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """The decoding methods: their papers, whether they keep the text, and their settings with defaults."""
    if name is not None:
        expect_method(name, method_table.known_methods())
    from skipstone.methods import METHODS, find

    found = [described(kind) for kind in (METHODS.values() if name is None else [find(name)])]
    if as_json:
        typer.echo(json.dumps(found if name is None else found[0], indent=2))
    elif name is None:
        from rich.table import Table

        table = Table("method", "text", "paper", "settings")
        for method in found:
            shown = "\n".join(f"{setting['name']} = {json.dumps(setting['default'])}" for setting in method["settings"])
            table.add_row(method["name"], TEXT[method["lossless"]], method["paper"] or "-", shown or "-")
        terminal.console().print(table)
    else:
        _explain(found[0])


def described(kind: Any) -> dict[str, Any]:
    """A method as plain JSON values. paper: the first that its module's docstring names. from: whose default a setting has: the
    class's, or the model's own."""
    from skipstone.decoding.settings import settings_of
    from skipstone.models.generation_config import OWN_FIELD

    cited = re.search(r"\(([^()]*arXiv \d{4}\.\d{5})\)", sys.modules[kind.__module__].__doc__ or "")
    return {
        "name": kind.name,
        "about": (inspect.getdoc(kind) or "").partition("\n")[0],
        "lossless": kind().lossless,
        "paper": " ".join(cited[1].split()) if cited else None,  # authors, venue, arXiv id
        "settings": [
            {
                "name": setting.name,
                "type": setting.type,
                "default": setting.default,
                "from": f"generation_config.{OWN_FIELD}" if setting.name in kind.by_model else f"skipstone.{kind.__name__}",
                "help": setting.help,
            }
            for setting in settings_of(kind).values()
        ],
        "aliases": dict(kind.aliases),
    }


def _explain(method: dict[str, Any]) -> None:
    """One method: what it is, and two lines for each of its settings."""
    from skipstone.decoding.settings import spell_value

    typer.echo(f"{method['name']}: {method['about']}")
    typer.echo(f"text: {TEXT[method['lossless']]}; paper: {method['paper'] or 'none'}")
    for one in method["settings"]:
        typer.echo(f"\n  {one['name']}={spell_value(one['default'])}   {one['type']}; default of {one['from']}")
        typer.echo(f"      {one['help']}")
    if method["settings"]:
        first = method["settings"][0]
        typer.echo(f'\n--method "{method["name"]} {first["name"]}={first["type"].partition("|")[0].upper()}"')
    for alias, name in method["aliases"].items():
        typer.echo(f"{alias} is accepted for {name}, with a warning")
