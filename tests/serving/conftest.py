"""What tests of the server share."""

from __future__ import annotations

from typing import Any

import pytest

import skipstone


@pytest.fixture(scope="module")
def loaded() -> Any:
    """The bundled model and its tokenizer."""
    return skipstone.load(None)
