"""What these tests decode with."""

from __future__ import annotations

import pytest
from torch import Tensor
from transformers import PreTrainedModel

from tests.helpers import families


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return families.cached("llama")


@pytest.fixture(scope="module")
def batch() -> list[Tensor]:
    return families.prompts(3)
