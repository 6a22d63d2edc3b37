"""A hub that the tests of this room push to and load from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.hub import Hub, serving


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """Empty; nothing but its own routes was asked for in the end."""
    with serving(monkeypatch, tmp_path / "hub-cache") as made:
        yield made
        assert made.unknown == []
