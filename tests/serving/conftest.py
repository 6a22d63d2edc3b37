"""The model that tests of the server share."""

from collections.abc import Iterator
from typing import Any

import pytest

import skipstone
from tests.helpers.served import InThread, in_thread


@pytest.fixture(scope="session")
def loaded() -> Any:
    """The bundled model and its tokenizer."""
    return skipstone.load(None)


@pytest.fixture(scope="session")
def nano(loaded: Any) -> Iterator[InThread]:
    """A server of it. Its requests name every setting that a test depends on."""
    with in_thread(lambda: loaded, max_num_seqs=4, max_waiting=64, drain_seconds=5) as running:
        yield running
