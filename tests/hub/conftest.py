"""A hub that the tests of this room push to and load from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.helpers.hub import Hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """Empty; nothing but its own routes was asked for in the end."""
    from tests.helpers.hub import serving  # huggingface_hub reads the environment when it is imported, which comes later

    with serving(monkeypatch, tmp_path / "hub-cache") as made:
        yield made
        assert made.unknown == []
