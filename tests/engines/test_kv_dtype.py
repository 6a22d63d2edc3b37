"""What keys and values are kept in: given, attached, from the environment; on both engines, in drafts and in stores."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import skipstone
from skipstone.engines import choose_engine as choice
from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.native import library
from tests.helpers import families

IDS = families.prompts(1)[0][None]
ENGINES = ["eager", pytest.param("native", marks=pytest.mark.skipif(library.missing() is not None, reason="not built"))]


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(choice.KV_VARIABLE, raising=False)


def test_what_was_given_goes_over_what_was_attached_and_that_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    model = families.build("llama")
    assert (ModelRunner(model).engine_options.kv_dtype, ModelRunner(model).kv_dtype) == ("float32", None)
    monkeypatch.setenv(choice.KV_VARIABLE, "bfloat16")
    assert ModelRunner(model).kv_dtype == torch.bfloat16
    choice.attach(model, kv_dtype="float32")
    assert ModelRunner(model).kv_dtype is None
    assert ModelRunner(model, kv_dtype="bfloat16").kv_dtype == torch.bfloat16
    assert ModelRunner(families.build("llama")).kv_dtype == torch.bfloat16
    monkeypatch.setenv(choice.KV_VARIABLE, "")
    assert ModelRunner(families.build("llama")).kv_dtype is None, "an empty variable says nothing"


@pytest.mark.parametrize("engine", ENGINES)
def test_drafts_change_nothing_and_stores_hold_bfloat16(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, right = [], KVCache.__init__

    def note(self: KVCache, *given: Any) -> None:
        right(self, *given)
        made.append(self)

    model = families.build("llama")
    ModelRunner(model, engine)  # its threads are measured with a store of their own
    monkeypatch.setattr(KVCache, "__init__", note)
    texts = [
        skipstone.generate(model, IDS, one, engine=engine, kv_dtype="bfloat16", max_new_tokens=40, do_sample=False).sequences
        for one in ("autoregressive", "layerskip exit_layer=2", "prompt_lookup")
    ]
    assert len(made) >= len(texts)
    for store in made:
        assert {one.dtype for one in (*store.keys, *store.values) if one is not None} == {torch.bfloat16}
    assert all(torch.equal(texts[0], one) for one in texts[1:])
