"""`skipstone cache`: the quantised weights that are kept on the disk, so that later starts need not quantise them again."""

import time

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
    from skipstone.engines.native.packed_cache import entries, unfinished

    rows = []
    for one in entries():
        model = one.about.get("model", "") if one.about else "(not whole)"
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.used))
        rows.append((model, one.about.get("quantize", ""), round(one.size / 1e6), used, one.path.name))
    if as_json:
        terminal.print_json([dict(zip(COLUMNS, row, strict=True)) for row in rows], indent=2)
    elif rows:
        terminal.print_table(COLUMNS, rows)
    else:
        typer.echo("nothing is cached")
    if number := len(unfinished()):
        typer.echo(f"{number} unfinished files: processes are writing them, or were killed (clear removes them)", err=True)


@cache.command()
@takes_groups
def clear() -> None:
    """Remove all files, unfinished ones included."""
    from skipstone.engines.native.packed_cache import entries, unfinished

    removed = list(entries())
    paths = [*(one.path for one in removed), *unfinished()]
    for path in paths:
        path.unlink(missing_ok=True)
    typer.echo(f"removed {len(paths)} files, {sum(one.size for one in removed) / 1e6:.0f} MB")


@cache.command()
@takes_groups
def verify() -> None:
    """Read all files, compare the checksums and remove damaged files. Starts check only that a file is whole."""
    from skipstone.engines.native.packed_cache import VERSION, damaged, entries

    num_damaged = 0
    for one in entries():
        if one.about and one.about["version"] != VERSION:
            found = "of an older format, which is not read"
        elif damaged(one):
            one.path.unlink(missing_ok=True)
            num_damaged += 1
            found = "damaged, removed"
        else:
            found = "good"
        typer.echo(f"{one.path}: {found}")
    if num_damaged:
        raise typer.Exit(DAMAGED)
