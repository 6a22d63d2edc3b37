"""`skipstone train layerskip RECIPE`: a training run from one file."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from skipstone.cli.terminal import quiet

train = typer.Typer(help="Train what a method needs.", no_args_is_help=True)
PACKAGES = ("accelerate", "yaml", "tqdm")


@train.command("layerskip")
def layerskip(
    ctx: typer.Context,
    recipe: Annotated[Path, typer.Argument(help="The recipe, a YAML file (see recipes/).", show_default=False)],
    output: Annotated[Path | None, typer.Option(help="Folder of the run, instead of the recipe's.", show_default=False)] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Folder with JSON lines for the data sets of the hub that the recipe names.", show_default=False),
    ] = None,
    fresh: Annotated[bool, typer.Option(help="Refuse to resume: the folder must be empty.")] = False,
    debug: Annotated[bool, typer.Option(help="Show tracebacks.", hidden=True)] = False,
) -> None:
    """Train with layer dropout and early exits; an interrupted run resumes where it stopped."""
    state: dict[str, Any] = ctx.obj
    state["debug"] = debug
    if not recipe.is_file():
        raise FileNotFoundError(2, "no such recipe", str(recipe))
    if data_dir is not None and not data_dir.is_dir():
        raise FileNotFoundError(2, "no such folder", str(data_dir))
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise ValueError(f'training needs more packages ({", ".join(missing)}): pip install "skipstone[train]"')
    with quiet(debug):
        from skipstone.train.run import run

        try:
            folder = run(recipe, output, fresh, data_dir, say=lambda text: typer.echo(text, err=True))
        except ImportError as error:  # an optional package of a setting: peft, or what an optimiser needs
            raise ValueError(str(error)) from error
    typer.echo(str(folder))
