"""Files that users name, checked before torch is imported."""

import os
from pathlib import Path


def expect_parent_folder(*files: Path | None) -> None:
    """FileNotFoundError if the folder of an output file does not exist."""
    for file in files:
        if file is not None and not file.absolute().parent.is_dir():
            raise FileNotFoundError(2, "no such folder", str(file.parent))


def expect_folder(folder: Path | None) -> None:
    """FileNotFoundError for a folder that does not exist."""
    if folder is not None and not folder.is_dir():
        raise FileNotFoundError(2, "no such folder", str(folder))


def expect_readable(*files: Path | None) -> None:
    """OSError for a file that cannot be read."""
    for file in files:
        if file is not None:
            file.open("rb").close()


def expect_writable(*files: Path | None) -> None:
    """OSError for a file that cannot be written."""
    expect_parent_folder(*files)
    for file in files:
        if file is not None and file.is_dir():
            raise IsADirectoryError(21, "a folder; name a file", str(file))
        if file is not None and not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
            raise PermissionError(13, "no permission to write it", str(file))
