"""`skipstone cache`: the quantised weights that are kept on the disk, so that later starts need not quantise them again."""

import time
from pathlib import Path

import typer

from skipstone.cli import terminal
from skipstone.cli.options import AS_JSON, takes_groups

DAMAGED = 1
"""Exit code of `verify` if it finds damage."""
COLUMNS = ("model", "quantize", "MB", "last used", "file")

cache = typer.Typer(no_args_is_help=True, help="The quantised weights that are kept on the disk: list, verify or remove them.")


@cache.command("list")
@takes_groups
def list_entries(as_json: bool = AS_JSON) -> None:
    """Every file, with the model it was made of."""
    from skipstone.engines.native.packed_cache import entries

    rows = []
    for one in entries():
        files = one.about.get("identity") or [["(not whole)"]]
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.used))
        rows.append((str(Path(files[0][0]).parent), one.about.get("quantize", ""), round(one.size / 1e6), used, one.path.name))
    if as_json:
        terminal.print_json([dict(zip(COLUMNS, row, strict=True)) for row in rows], indent=2)
    elif rows:
        terminal.print_table(COLUMNS, rows)
    else:
        typer.echo("nothing is cached")


@cache.command()
@takes_groups
def clear() -> None:
    """Remove all files."""
    from skipstone.engines.native.packed_cache import entries

    removed = list(entries())
    for one in removed:
        one.path.unlink(missing_ok=True)
    typer.echo(f"removed {len(removed)} files, {sum(one.size for one in removed) / 1e6:.0f} MB")


@cache.command()
@takes_groups
def verify() -> None:
    """Read all files whole and compare the checksums. Starts do not: they check only that a file is whole."""
    from skipstone.engines.native.packed_cache import damaged, entries

    bad = 0
    for one in entries():
        wrong = damaged(one)
        bad += bool(wrong)
        typer.echo(f"{one.path}: {'damaged, remove it' if wrong else 'good'}")
    if bad:
        raise typer.Exit(DAMAGED)
