"""Token ids of any integer dtype, as tensors and as numpy arrays, mean the same everywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import skipstone
from skipstone import LayerSkip
from skipstone.engines.native import library
from tests.helpers import families
from tests.helpers.settings import QUIET

pytestmark = QUIET
ENGINES = ["eager", *([] if library.missing() else ["native"])]
METHOD = LayerSkip(2, 3)
OPTIONS: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
KINDS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
ARRAYS = [np.int8, np.uint16, np.int32, np.int64, np.uint64, ">i4"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_tensors_of_any_integer_dtype(engine: str, kind: torch.dtype) -> None:
    model, batch = families.cached("llama"), families.padded(families.prompts(2))
    expected = skipstone.generate(model, batch, METHOD, engine=engine, **OPTIONS).sequences
    given = {name: value.to(kind) for name, value in batch.items()}
    found = skipstone.generate(model, given, METHOD, engine=engine, **OPTIONS).sequences
    assert found.dtype is torch.int64
    assert torch.equal(found, expected)
    alone = skipstone.generate(model, families.prompts(1)[0].to(kind), METHOD, engine=engine, **OPTIONS).sequences
    assert torch.equal(alone, expected[:1])


@pytest.mark.parametrize("kind", ARRAYS, ids=str)
def test_numpy_arrays(kind: Any) -> None:
    model, batch = families.cached("llama"), families.padded(families.prompts(2))
    expected = skipstone.generate(model, batch, METHOD, **OPTIONS).sequences
    arrays = {name: value.numpy().astype(kind) for name, value in batch.items()}
    assert torch.equal(skipstone.generate(model, arrays, METHOD, **OPTIONS).sequences, expected)
    ids, mask = arrays["input_ids"], arrays["attention_mask"]
    assert torch.equal(skipstone.generate(model, ids, METHOD, attention_mask=mask, **OPTIONS).sequences, expected)


@pytest.mark.parametrize("kind", [torch.int32, torch.uint8], ids=str)
def test_an_enabled_model_and_custom_generate(kind: torch.dtype) -> None:
    model: Any = families.build("llama")
    ids = families.prompts(1)[0][None]
    expected = skipstone.generate(model, ids, METHOD, **OPTIONS).sequences
    called = model.generate(ids.to(torch.int32), custom_generate=skipstone.custom_generate(METHOD), **OPTIONS)
    assert torch.equal(called, expected)
    skipstone.enable(model, METHOD)
    assert torch.equal(model.generate(ids.to(kind), **OPTIONS), expected)
