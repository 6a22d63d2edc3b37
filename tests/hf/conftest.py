"""What these tests decode with."""

from collections.abc import Iterator

import pytest
from torch import Tensor
from transformers import PreTrainedModel

import skipstone
from tests.helpers import families


@pytest.fixture
def model() -> Iterator[PreTrainedModel]:
    """A shared model, given back without a method."""
    shared = families.cached("llama")
    yield shared
    skipstone.disable(shared)
    assert "generate" not in shared.__dict__


@pytest.fixture(scope="module")
def prompt() -> Tensor:
    return families.prompts(1)[0]
