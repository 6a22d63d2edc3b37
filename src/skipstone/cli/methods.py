"""`skipstone methods`: all methods and their settings, read from the classes and module docstrings of the methods."""

import inspect
import json
import re
import sys
from typing import Any

import typer

from skipstone.cli import terminal
from skipstone.cli.method_table import known_methods
from skipstone.cli.options import AS_JSON, argument
from skipstone.decoding.method_text import expect_method

TEXT = {True: "exact", False: "lossy"}  # whether a method keeps it


def methods(name: str | None = argument("The method to explain.", None, metavar="NAME"), as_json: bool = AS_JSON) -> None:
    """The decoding methods: their papers, whether they keep the text, and their settings with defaults."""
    if name is not None:
        expect_method(name, known_methods())
    from skipstone.methods import METHODS

    rows = [described(kind) for kind in (METHODS.values() if name is None else [METHODS[name]])]
    if as_json:
        terminal.print_json(rows if name is None else rows[0], indent=2)
    elif name is None:
        cells = []
        for method in rows:
            shown = "\n".join(f"{setting['name']} = {json.dumps(setting['default'])}" for setting in method["settings"])
            cells.append((method["name"], TEXT[method["lossless"]], method["paper"] or "-", shown or "-"))
        terminal.print_table(("method", "text", "paper", "settings"), cells, has_rules=True)
    else:
        _explain(rows[0])


def described(kind: Any) -> dict[str, Any]:
    """A method as plain JSON values.

    paper: the first one that its module's docstring names. from: where a setting's default comes from, the class or the model.
    """
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
                **{key: getattr(setting, key) for key in ("name", "type", "default")},
                "from": f"generation_config.{OWN_FIELD}" if setting.name in kind.by_model else f"skipstone.{kind.__name__}",
                "help": setting.help,
            }
            for setting in settings_of(kind).values()
        ],
        "presets": {name: {"source": preset.source, "settings": preset.settings} for name, preset in kind.presets.items()},
        "aliases": dict(kind.aliases),
    }


def _explain(method: dict[str, Any]) -> None:
    """One method: what it is, two lines for each of its settings, and its presets."""
    from skipstone.decoding.settings import spell_value

    typer.echo(f"{method['name']}: {method['about']}")
    typer.echo(f"text: {TEXT[method['lossless']]}; paper: {method['paper'] or 'none'}")
    for setting in method["settings"]:
        default = spell_value(setting["default"])
        typer.echo(f"\n  {setting['name']}={default}   {setting['type']}; default of {setting['from']}")
        typer.echo(f"      {setting['help']}")
    if method["settings"]:
        first = method["settings"][0]
        typer.echo(f'\n--method "{method["name"]} {first["name"]}={first["type"].partition("|")[0].upper()}"')
    for name, preset in method["presets"].items():
        typer.echo(f"\n  preset={name}   {preset['source']}")
        typer.echo("      " + " ".join(f"{key}={spell_value(value)}" for key, value in preset["settings"].items()))
    for alias, name in method["aliases"].items():
        typer.echo(f"{alias} is accepted for {name}, with a warning")
