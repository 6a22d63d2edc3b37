"""A model's engine and the dtype of its keys and values: chosen by a call, attached, from the environment or automatic."""

import copy
import gc
import itertools
import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import torch

import skipstone
from skipstone.cli import option_groups
from skipstone.engines import choose_engine as choice
from skipstone.engines.compiled import BACKEND_VARIABLE
from skipstone.engines.eager.eager import EagerEngine
from skipstone.engines.engine import COMPUTE_DTYPES, ENGINES, QUANTIZED
from skipstone.engines.kv_cache import KVCache
from skipstone.engines.loading import load
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.native import library
from skipstone.methods import Speculative
from skipstone.models.packed_weight import is_packed
from tests.helpers import families

IDS = families.prompts(1)[0][None]
NATIVE = pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))
REASON = "it has no wheels"


class Native(EagerEngine):
    """Stands for the native engine, and computes as the eager one does."""

    name = "native"

    def __init__(self, model: Any, facts: Any, quantize: str | None = None, keep_weights: bool = True, **_: Any) -> None:
        super().__init__(model, facts)
        self.quantize, self.threads = quantize, 1


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    monkeypatch.delenv(choice.KV_VARIABLE, raising=False)


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "why_not", lambda *_: None)
    monkeypatch.setattr(choice, "NativeEngine", Native)


@pytest.fixture
def unable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "why_not", lambda *_: REASON)


def decode(model: Any, method: str = "layerskip exit_layer=2", max_new_tokens: int = 4, **more: Any) -> skipstone.Output:
    return skipstone.generate(model, IDS, method, max_new_tokens=max_new_tokens, do_sample=False, **more)


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
    model: Any = families.build("llama")
    found, asked = ModelRunner(model), ModelRunner(model, "native")
    assert (found.engine.name, found.engine_reason) == ("native", None)
    assert asked.engine is found.engine is ModelRunner(model).engine
    output = decode(model)
    assert (output.engine, output.engine_reason) == ("native", None)
    assert decode(model, engine="eager").engine == "eager", "for one call"
    for name in ("eager", "native"):
        assert Speculative(families.build("llama"), 2).draft_model_for(ModelRunner(model, name)).engine.name == name
    skipstone.enable(model, "autoregressive")
    assert model.generate(IDS, max_new_tokens=2, return_dict_in_generate=True).engine == "native"
    model.to(torch.bfloat16)
    assert ModelRunner(model).engine is not found.engine
    assert ModelRunner(model).engine.dtype == torch.bfloat16


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


@pytest.mark.usefixtures("unable")
def test_float32_products_are_allowed_on_every_engine() -> None:
    model = families.build("llama")
    found = ModelRunner(model, compute_dtype="float32")
    assert (found.engine.name, found.engine_reason) == ("eager", REASON)
    assert found.engine is ModelRunner(model, "eager").engine, "engines are made once per model"
    with pytest.raises(ValueError, match="compute_dtype must be one of float32, bfloat16, found 'int8'"):
        ModelRunner(model, compute_dtype="int8")
    loaded = load(compute_dtype="float32")[0]
    assert ModelRunner(loaded, "eager").engine.name == "eager"


def test_rounding_that_no_product_would_do_is_refused_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    model, needs = families.build("llama").bfloat16(), "compute_dtype='bfloat16', asked .*, needs"
    rounds = {"compute_dtype": "bfloat16"}
    for name in ("eager", "compiled"):
        with pytest.raises(ValueError, match=f"{needs} the native engine, found engine='{name}'"):
            ModelRunner(model, name, **rounds)
    with monkeypatch.context() as patch:
        patch.setattr(choice, "why_not", lambda *_: REASON)
        for name in ("auto", "native"):
            with pytest.raises(ValueError, match=f"{needs} the native engine, which cannot run this model: {REASON}"):
                ModelRunner(model, name, **rounds)
    monkeypatch.setattr(choice, "why_not", lambda *_: None)
    monkeypatch.setattr(choice, "NativeEngine", lambda *_, **__: pytest.fail("the weights are packed"))
    with pytest.raises(ValueError, match=f"{needs} weights that are not quantised, found quantize='int8'"):
        ModelRunner(model, "native", "int8", **rounds)
    with pytest.raises(ValueError, match=f"{needs} bfloat16 weights, and this model has none"):
        ModelRunner(families.build("llama"), "native", **rounds)


@NATIVE
def test_rounding_is_refused_although_the_engine_is_there_already() -> None:
    model = families.build("llama")
    for quantize in ("none", "int8"):
        ModelRunner(model, "native", quantize)
        with pytest.raises(ValueError, match=r"compute_dtype='bfloat16', asked .*, needs"):
            ModelRunner(model, "native", quantize, compute_dtype="bfloat16")


def packed_bytes(runner: ModelRunner) -> int:
    """Bytes that the native engine has packed for itself."""
    engine: Any = runner.engine
    return engine._weights.bytes


@NATIVE
@pytest.mark.parametrize("keep_weights", [True, False])
@pytest.mark.parametrize("name", ["llama", "phi3"])  # phi3: two matrices in one weight
def test_engines_of_both_compute_dtypes_have_one_copy_of_the_weights(name: str, keep_weights: bool) -> None:
    model = families.build(name).bfloat16()
    choice.attach(model, choice.EngineOptions("native", keep_weights=keep_weights))
    rounded, exact = ModelRunner(model), ModelRunner(model, compute_dtype="float32")
    assert ModelRunner(model, compute_dtype="bfloat16").engine is rounded.engine
    assert (rounded.engine.compute_dtype, exact.engine.compute_dtype) == ("bfloat16", "float32")
    assert packed_bytes(rounded) > 0 == packed_bytes(exact)
    expected = ModelRunner(families.build(name).bfloat16(), "native", compute_dtype="float32")
    assert torch.equal(exact.read(IDS), expected.read(IDS))
    assert not torch.equal(exact.read(IDS), rounded.read(IDS)), "nothing was rounded"


@NATIVE
@pytest.mark.usefixtures("no_gradients")
def test_panels_of_old_weights_are_not_shared() -> None:
    model: Any = families.build("llama").bfloat16()
    before = ModelRunner(model, "native").read(IDS)
    model.model.layers[1].mlp.up_proj.weight.mul_(2)
    changed, other = ModelRunner(model, "native", compute_dtype="float32"), ModelRunner(model, "native")
    assert packed_bytes(changed) > 0 == packed_bytes(other)
    assert not torch.equal(other.read(IDS), before)
    assert torch.equal(other.read(IDS), ModelRunner(copy.deepcopy(model), "native").read(IDS))


@NATIVE
def test_a_model_is_given_up_for_panels_that_another_engine_has() -> None:
    model = families.build("llama").bfloat16()
    ModelRunner(model, "native", compute_dtype="float32")
    choice.attach(model, choice.EngineOptions("native", keep_weights=False))
    ModelRunner(model)
    assert is_packed(model)


@NATIVE
def test_a_target_that_rounds_has_draft_models_that_cannot() -> None:
    target, drafter = families.build("llama").bfloat16(), families.build("llama")
    for compute_dtype, quantize in itertools.product(("bfloat16", "float32"), ("none", "int8")):
        choice.attach(drafter, choice.EngineOptions(quantize=quantize))
        found = Speculative(drafter).draft_model_for(ModelRunner(target, "native", compute_dtype=compute_dtype))
        assert found.engine.compute_dtype == "float32"
    eager = families.build("llama").bfloat16()
    choice.attach(eager, choice.EngineOptions("eager"))
    assert Speculative(eager).draft_model_for(ModelRunner(target, "native", compute_dtype="bfloat16")).engine.name == "eager"
    fewer = ModelRunner(target, "native", compute_dtype="bfloat16").in_fewer_bits("int4")
    assert (fewer.engine.quantize, fewer.engine.compute_dtype) == ("int4", "float32")


@pytest.mark.parametrize(
    ("field", "variable", "known"), [("engine", choice.VARIABLE, ENGINES), ("kv_dtype", choice.KV_VARIABLE, choice.KV_DTYPES)]
)
def test_an_unknown_name_is_refused_with_the_choices(
    field: str, variable: str, known: Iterable[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, words = families.build("llama"), f"must be one of {', '.join(known)}, found 'warp'"
    options: Any = {field: "warp"}
    for attempt in (lambda: ModelRunner(model, **options), lambda: load(**options), lambda: decode(model, **options)):
        with pytest.raises(ValueError, match=f"{field} {words}"):
            attempt()
    monkeypatch.setenv(variable, "warp")
    with pytest.raises(ValueError, match=f"{variable} {words}"):
        ModelRunner(model)
    assert (ENGINES, tuple(choice.KV_DTYPES)) == (option_groups.ENGINES, option_groups.KV_DTYPES)
    assert (QUANTIZED, COMPUTE_DTYPES) == (option_groups.QUANTIZED, option_groups.COMPUTE_DTYPES)


SETTINGS = {  # the variable of the environment, its value and default, another value
    "engine": (choice.VARIABLE, "eager", "auto", "native"),
    "kv_dtype": (choice.KV_VARIABLE, "bfloat16", "float32", "float32"),
    "quantize": ("SKIPSTONE_NOTHING", "int8", "none", "none"),
}


@pytest.mark.usefixtures("able")
@pytest.mark.parametrize("field", SETTINGS)
def test_a_call_s_setting_goes_over_the_attached_one_and_that_over_the_environment(
    field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable, first, default, second = SETTINGS[field]

    def setting(model: Any, **options: Any) -> str:
        return getattr(ModelRunner(model, **options).engine_options, field)

    model: Any = families.build("llama")
    assert setting(model) == default
    monkeypatch.setenv(variable, first)
    assert setting(model) == (default if field == "quantize" else first)
    choice.attach(model, choice.EngineOptions(**{field: second}))
    assert setting(model) == second
    assert setting(model, **{field: first}) == first, "for one call"
    assert setting(model) == second
    monkeypatch.setenv(variable, "")
    assert setting(families.build("llama")) == default, "an empty variable says nothing"
    loaded: Any = load(**{field: first})[0]
    skipstone.enable(loaded, "autoregressive")
    assert setting(loaded) == first, "None leaves it as it is"
    skipstone.enable(loaded, "autoregressive", **{field: second})
    assert setting(loaded) == second
    runner = ModelRunner(loaded, **{field: first})
    assert first in (runner.engine.name, str(runner.kv_dtype).removeprefix("torch."), runner.engine.quantize)


@pytest.mark.parametrize(
    "engine", ["eager", pytest.param("native", marks=NATIVE), pytest.param("compiled", marks=pytest.mark.slow)]
)
def test_drafts_change_nothing_and_stores_hold_bfloat16(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, right = [], KVCache.__init__

    def note(self: KVCache, *given: Any) -> None:
        right(self, *given)
        made.append(self)

    model = families.build("llama")
    monkeypatch.setenv(BACKEND_VARIABLE, "eager")
    ModelRunner(model, engine)  # its threads are measured with a store of their own
    monkeypatch.setattr(KVCache, "__init__", note)
    texts = [
        decode(model, method, engine=engine, kv_dtype="bfloat16", max_new_tokens=40).sequences
        for method in ("autoregressive", "layerskip exit_layer=2", "prompt_lookup")
    ]
    assert len(made) >= len(texts)
    for store in made:
        assert {one.dtype for one in (*store.keys, *store.values) if one is not None} == {torch.bfloat16}
    assert all(torch.equal(texts[0], one) for one in texts[1:])


@pytest.mark.usefixtures("able")
def test_a_model_with_several_engines_is_freed_with_its_last_reference() -> None:
    model: Any = families.build("llama")
    choice.attach(model, choice.EngineOptions("native"))
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
