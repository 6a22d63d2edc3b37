"""Training: LayerSkip's recipe, AdaDecode's exit heads, their data, and what their runs share."""

from collections.abc import Callable
from pathlib import Path

Say = Callable[[str], None]  # shows a line to whoever started the run


def silent(_: str) -> None:
    """Show nothing: every process but the first."""


def resolve_model(name: str, base: Path) -> str:
    """The folder `name` next to a recipe in `base` if there is one; else the name itself, another folder or a hub id."""
    return str(base / name) if (base / name).is_dir() else name


def refuse_used(folder: Path) -> None:
    """ValueError if a folder holds something and the run must not resume."""
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: remove it, or let the run resume from it")
