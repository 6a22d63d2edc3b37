"""Which engine runs a model: asked for, attached, from the environment or chosen; and what a user is told of it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import skipstone
from skipstone.cli import model_options
from skipstone.engines import choose_engine as choice
from skipstone.engines.eager.eager import EagerEngine
from skipstone.engines.engine import ENGINES
from skipstone.engines.loading import load
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.rotary import RotaryTables
from skipstone.methods import Speculative
from skipstone.models.families import RotarySource
from tests.helpers import families

IDS = families.prompts(1)[0][None]
REASON = "it has no wheels"


class Native(EagerEngine):
    """Stands for the native engine, and computes as the eager one does."""

    name = "native"

    def __init__(self, model: Any, facts: Any, quantize: str | None = None, keep_weights: bool = True) -> None:
        super().__init__(model, facts)
        self.quantize = quantize


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(choice.VARIABLE, raising=False)


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch) -> None:
    """The native engine runs every model."""
    monkeypatch.setattr(choice, "why_not", lambda *_: None)
    monkeypatch.setattr(choice, "NativeEngine", Native)


@pytest.fixture
def unable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The native engine runs no model."""
    monkeypatch.setattr(choice, "why_not", lambda *_: REASON)


def decode(model: Any, **more: Any) -> skipstone.Output:
    return skipstone.generate(model, IDS, "layerskip exit_layer=2", max_new_tokens=4, do_sample=False, **more)


@pytest.mark.usefixtures("unable")
def test_auto_falls_back_to_eager_and_says_why() -> None:
    model = families.build("llama")
    found = ModelRunner(model)
    assert (found.engine_options.engine, found.engine.name, found.engine_reason) == ("auto", "eager", REASON)
    assert found.engine.detail == "transformers' own modules, torch.float32, cpu"
    assert found.dtype == found.engine.dtype == torch.float32
    asked = ModelRunner(model, "eager")
    assert asked.engine_reason is None
    assert asked.engine is found.engine, "engines are made once per model"
    output = decode(model)
    assert (output.engine, output.engine_reason) == ("eager", REASON)


@pytest.mark.usefixtures("able")
def test_auto_is_native_where_that_can_run_the_model() -> None:
    model = families.build("llama")
    found, asked = ModelRunner(model), ModelRunner(model, "native")
    assert (found.engine.name, found.engine_reason) == ("native", None)
    assert asked.engine is found.engine is ModelRunner(model).engine
    output = decode(model)
    assert (output.engine, output.engine_reason) == ("native", None)
    assert decode(model, engine="eager").engine == "eager", "for one call"
    assert decode(model).engine == "native"


@pytest.mark.usefixtures("unable")
def test_native_asked_for_and_impossible_is_an_error_before_any_work() -> None:
    model = families.build("llama")
    for attempt in (
        lambda: ModelRunner(model, "native"),
        lambda: decode(model, engine="native"),
        lambda: skipstone.stream(model, IDS, "autoregressive", engine="native"),
        lambda: skipstone.enable(model, "autoregressive", engine="native"),
    ):
        with pytest.raises(ValueError, match=f"cannot run this model: {REASON}"):
            attempt()
    assert ModelRunner(model).engine.name == "eager", "what failed is not remembered"


def test_an_unknown_engine_is_named_with_the_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    model = families.build("llama")
    with pytest.raises(ValueError, match="engine must be one of auto, eager, native, compiled, found 'warp'"):
        ModelRunner(model, "warp")
    with pytest.raises(ValueError, match="one of auto, eager, native, compiled"):
        load(engine="warp")
    monkeypatch.setenv(choice.VARIABLE, "warp")
    with pytest.raises(ValueError, match=f"{choice.VARIABLE} must be one of auto, eager, native, compiled, found 'warp'"):
        ModelRunner(model)
    assert model_options.ENGINES == ENGINES


@pytest.mark.usefixtures("able")
def test_what_was_given_goes_over_what_was_attached_and_that_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    model = families.build("llama")
    monkeypatch.setenv(choice.VARIABLE, "eager")
    assert ModelRunner(model).engine.name == "eager"
    choice.attach(model, "native")
    assert ModelRunner(model).engine.name == "native"
    assert ModelRunner(model, "eager").engine.name == "eager"
    monkeypatch.setenv(choice.VARIABLE, "")
    assert ModelRunner(families.build("llama")).engine_options.engine == "auto", "an empty variable says nothing"


@pytest.mark.usefixtures("able")
def test_load_and_enable_remember_the_choice() -> None:
    model: Any = load(engine="eager")[0]
    assert ModelRunner(model).engine.name == "eager"
    assert ModelRunner(load()[0]).engine.name == "native"
    skipstone.enable(model, "autoregressive")
    assert ModelRunner(model).engine.name == "eager", "None leaves it as it is"
    skipstone.enable(model, "autoregressive", engine="native")
    assert model.generate(IDS, max_new_tokens=2, return_dict_in_generate=True).engine == "native"


@pytest.mark.usefixtures("able")
def test_a_draft_model_runs_on_the_engine_of_its_target() -> None:
    model, draft = families.build("llama"), families.build("llama")
    method = Speculative(draft, 2)
    for name in ("eager", "native"):
        assert method.draft_model_for(ModelRunner(model, name)).engine.name == name


@pytest.mark.usefixtures("able")
def test_engines_are_made_anew_when_the_model_has_changed() -> None:
    model: Any = families.build("llama")
    before = ModelRunner(model).engine
    model.to(torch.bfloat16)
    after = ModelRunner(model)
    assert after.engine is not before
    assert after.engine.dtype == torch.bfloat16


@pytest.mark.usefixtures("able")
def test_a_model_with_several_engines_is_freed_with_its_last_reference() -> None:
    model: Any = families.build("llama")
    choice.attach(model, "native")
    gc.collect()
    gc.disable()
    try:
        decode(model)
        decode(model, engine="eager")
        layer = weakref.ref(model.model.layers[1].mlp)
        del model
        assert layer() is None
    finally:
        gc.enable()


def test_rotary_tables_grow_and_hold_what_the_module_says() -> None:
    runner = ModelRunner(families.build("llama"))
    tables, like = RotaryTables(runner.decoder, 600), torch.zeros(1, 1, 8)
    small = tables.table(RotarySource("rotary_emb"), 3, like)
    assert small[0].shape[0] == 256
    assert tables.table(RotarySource("rotary_emb"), 256, like) is small
    cos, sin = tables.table(RotarySource("rotary_emb"), 10_000, like)
    assert cos.shape[0] == sin.shape[0] == 600
    expected: tuple[Tensor, Tensor] = runner.decoder.rotary_emb(like, torch.arange(600)[None])
    assert torch.equal(cos, expected[0][0])
    assert torch.equal(sin, expected[1][0])
