"""Training: LayerSkip's recipe, AdaDecode's exit heads, their data, and what every run has: a folder, names in its recipe that
lead somewhere, and something to say."""

from collections.abc import Callable
from pathlib import Path

Say = Callable[[str], None]  # shows a line to whoever started the run


def silent(_: str) -> None:
    """What processes say but the first."""


def beside(name: str, base: Path) -> str:
    """A folder beside the recipe, which stands in `base`, or the name as it is: of another folder or on the hub."""
    return str(base / name) if (base / name).is_dir() else name


def refuse_used(folder: Path) -> None:
    """ValueError where a folder holds something, for a run that is not to go on with another."""
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: remove it, or let the run resume from it")
