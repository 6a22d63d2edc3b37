"""`skipstone methods`: what there is to choose from, derived from the methods' own classes and module docstrings."""

from __future__ import annotations

import json
import re
import sys
from typing import Annotated, Any

import typer

from skipstone.cli import terminal


def methods(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """The decoding methods: their papers, whether they keep the text, and their settings with defaults."""
    listed = collect()
    if as_json:
        typer.echo(json.dumps(listed, indent=2))
        return
    from rich.table import Table

    table = Table("method", "text", "paper", "settings")
    for method in listed:
        shown = "\n".join(f"{setting['name']} = {json.dumps(setting['default'])}" for setting in method["settings"])
        table.add_row(method["name"], "exact" if method["lossless"] else "lossy", method["paper"] or "-", shown or "-")
    terminal.console().print(table)


def collect() -> list[dict[str, Any]]:
    """Every method as plain JSON values."""
    from skipstone.cli import flags
    from skipstone.methods import METHODS

    return [
        {
            "name": name,
            "lossless": kind().lossless,
            "paper": citation(sys.modules[kind.__module__].__doc__ or ""),
            "settings": [
                {"name": s.name, "flag": flags.flag(s.name), "type": s.type, "default": s.default, "help": s.help}
                for s in flags.settings(kind)
            ],
            "aliases": dict(kind.aliases),
        }
        for name, kind in METHODS.items()
    ]


def citation(text: str) -> str | None:
    """The first paper a module docstring names: "Authors, venue, arXiv id"."""
    found = re.search(r"\(([^()]*arXiv \d{4}\.\d{5})\)", text)
    return " ".join(found[1].split()) if found else None
