"""What every training run has: a folder, names in its recipe that lead somewhere, and something to say."""

from collections.abc import Callable, Sequence
from pathlib import Path

from skipstone.train.data.sources import HubDataset, Source

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


def from_folder(sources: Sequence[Source], data_dir: Path | None) -> list[Source]:
    """Sources with those of the hub that name a `file` replaced by that file in `data_dir`. ValueError where none names one."""
    if data_dir is None:
        return list(sources)
    if not any(isinstance(source, HubDataset) and source.file for source in sources):
        raise ValueError(f"--data-dir {data_dir} has no effect: no source of the hub names a `file` that may lie there")
    return [source.local(data_dir) if isinstance(source, HubDataset) else source for source in sources]
