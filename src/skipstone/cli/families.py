"""`skipstone families`: every model type of transformers that writes text, whether skipstone decodes it, and why not."""

import typer

from skipstone.cli import terminal
from skipstone.cli.options import AS_JSON, argument, option
from skipstone.utils.spelling import did_you_mean

COLUMNS = ("type", "support", "engines", "why not")
SUPPORT = ("tested", "derived", "refused")
OTHER_NAMES = {"gpt-sw3": "gpt2"}
"""Second names that transformers has for a type."""


def families(
    name: str | None = argument("The model type, as a config's model_type has it.", None, metavar="TYPE"),
    as_json: bool = AS_JSON,
    markdown: bool = option(False, "Print the table of docs/models.md.", "--markdown"),
) -> None:
    """The model types: tested, derived (verified when one is first loaded) or refused, and why."""
    rows = described()
    if name is not None:
        meant = did_you_mean(name, [row["type"] for row in rows])
        rows = [row for row in rows if row["type"] == name]
        if not rows:
            raise ValueError(f"no model type {name!r}{meant} of transformers decodes text: `skipstone families` lists them")
    if as_json:
        terminal.print_json(rows, indent=2)
    elif markdown:
        typer.echo(markdown_table(rows))
    else:
        terminal.print_table(COLUMNS, ([row[column] for column in COLUMNS] for row in rows), has_rules=True)


def markdown_table(rows: list[dict[str, str]]) -> str:
    """One Markdown row for all types that have the same support, engines and reason; tested types first, large groups first."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        groups.setdefault(tuple(row[column] for column in COLUMNS[1:]), []).append(row["type"])
    in_order = sorted(groups.items(), key=lambda group: (SUPPORT.index(group[0][0]), -len(group[1])))
    cells = [(*COLUMNS[1:], "types"), ("---",) * len(COLUMNS), *((*shared, ", ".join(types)) for shared, types in in_order)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def described() -> list[dict[str, str]]:
    """A row for every causal and every multimodal model type of the installed transformers, as COLUMNS say."""
    from transformers.models.auto import modeling_auto as auto

    from skipstone.models.known_types import REFUSED, TESTED, TESTED_AROUND_TEXT, UNCOMPILED
    from skipstone.models.layer_variants import LAYER_VARIANTS

    rows: list[dict[str, str]] = []
    tested = TESTED | TESTED_AROUND_TEXT
    kinds = (*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    for kind in sorted({OTHER_NAMES.get(kind, kind) for kind in map(str, kinds)}):
        support = "refused" if kind in REFUSED else "tested" if kind in tested else "derived"
        known = {"native": kind in LAYER_VARIANTS, "eager": True, "compiled": kind in tested - UNCOMPILED}
        engines = "" if support == "refused" else ", ".join(engine for engine, runs in known.items() if runs)
        rows.append({"type": kind, "support": support, "engines": engines, "why not": REFUSED.get(kind, "")})
    return rows
