"""After a change of a model's weights the next call uses the current ones: on every engine and for every kept copy.

The reference is a deep copy of the changed model, which skipstone has never seen.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any
from weakref import ref

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import skipstone
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.native import library
from skipstone.methods.adadecode.heads import ExitHeads, heads_fitting, new_card, original_heads
from skipstone.models.fingerprint import fingerprint
from skipstone.models.weight_version import model_version
from tests.helpers import families
from tests.helpers.native import chain, text

NATIVE = pytest.param("native", marks=pytest.mark.skipif(library.missing() is not None, reason=str(library.missing())))
ENGINES = ["eager", NATIVE]
Change = Callable[[Any], object]


def logits(model: Any, engine: str | None = None, quantize: str | None = None) -> Tensor:
    with torch.no_grad():
        return chain(ModelRunner(model, engine, quantize), text(12), 5)[0]


def assert_current(model: Any, change: Change, engine: str | None = None, quantize: str | None = None) -> None:
    """What is kept of a model before a change is not used behind it."""
    before, _ = logits(model, engine, quantize), fingerprint(model)
    change(model)
    after, fresh = logits(model, engine, quantize), copy.deepcopy(model)
    assert torch.equal(after, logits(fresh, engine, quantize))
    assert not torch.equal(after, before)
    assert fingerprint(model) == fingerprint(fresh)


def weight(model: Any) -> Any:
    return model.model.layers[1].mlp.down_proj.weight


def other(model: Any) -> Any:
    return model.model.layers[2].mlp.down_proj.weight


def steps(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> Change:
    def change(model: Any) -> None:
        optimizer = kind(model.parameters(), lr=1e-2, **options)
        with torch.enable_grad():
            model(text(12)[None], labels=text(12)[None]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return change


def set_data_twice(model: Any) -> None:
    """The allocator may give the second one the address of the first."""
    for factor in (3.0, -1.0):
        weight(model).data = weight(model).data * factor


def as_vector(model: Any) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()) * 1.5, model.parameters())


def swap(model: Any) -> None:
    first, second = model.model.layers[1].mlp, model.model.layers[2].mlp
    first.down_proj.weight, second.down_proj.weight = second.down_proj.weight, first.down_proj.weight


def transpose(model: Any) -> None:
    matrix = model.model.layers[1].self_attn.q_proj.weight
    matrix.data = matrix.data.t()


def load(assign: bool) -> Change:
    return lambda model: model.load_state_dict({name: one * 1.5 for name, one in model.state_dict().items()}, assign=assign)


def merge_adapter(model: Any) -> None:
    """PEFT writes through `.data` and puts the modules back that were there before."""
    config = peft.LoraConfig(r=2, target_modules=["down_proj"], init_lora_weights=False)
    assert peft.get_peft_model(model, config).merge_and_unload() is model  # pyright: ignore[reportCallIssue]


def other_layers(model: Any) -> None:
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]


def new_module(model: Any) -> None:
    model.model.layers[1].mlp = copy.deepcopy(model.model.layers[3].mlp)


def by_index(model: Any) -> None:
    model.model.layers[1] = copy.deepcopy(model.model.layers[3])
    model.model.layers[1].self_attn.layer_idx = 1


def in_dict(model: Any) -> None:
    """torch calls no hook."""
    model.model.layers[1]._modules["mlp"] = copy.deepcopy(model.model.layers[3].mlp)


def another_dict(model: Any) -> None:
    """The dict that was looked at is nobody's any more."""
    part = model.model.layers[1]
    part.__dict__["_modules"] = {**part._modules, "mlp": copy.deepcopy(model.model.layers[3].mlp)}


def new_bias(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.bias = nn.Parameter(torch.ones(32))


def dtype(model: Any) -> None:
    model.to(torch.bfloat16).to(torch.float32)


def no_grad_copy(model: Any) -> None:
    with torch.no_grad():
        other(model).copy_(weight(model))


def shared_memory(model: Any) -> None:
    model.share_memory()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(2)


SEEN: dict[str, Change] = {
    "fused AdamW": steps(torch.optim.AdamW, fused=True),
    "fused Adam": steps(torch.optim.Adam, fused=True),
    "fused SGD": steps(torch.optim.SGD, fused=True),
    "foreach AdamW": steps(torch.optim.AdamW, foreach=True),
    "plain SGD": steps(torch.optim.SGD, foreach=False),
    "set data": lambda model: setattr(weight(model), "data", weight(model).data * 2),
    "set data twice": set_data_twice,
    "transpose": transpose,
    "vector_to_parameters": as_vector,
    "swapped parameters": swap,
    "swap_tensors": lambda model: torch.utils.swap_tensors(weight(model), other(model)),
    "load_state_dict": load(assign=False),
    "load_state_dict assign": load(assign=True),
    "new parameter": lambda model: setattr(model.lm_head, "weight", nn.Parameter(torch.randn(97, 32))),
    "in place": no_grad_copy,
    "bias": new_bias,
    "merged adapter": merge_adapter,
    "layers": other_layers,
    "module": new_module,
    "module by index": by_index,
    "module in the dict": in_dict,
    "activation": lambda model: setattr(model.model.layers[1].mlp, "act_fn", nn.GELU(approximate="tanh")),
    "dtype": dtype,
    "shared memory": shared_memory,
    "epsilon": lambda model: setattr(model.model.norm, "variance_epsilon", 0.5),
    "scaling": lambda model: setattr(model.model.layers[1].self_attn, "scaling", 0.9),
    "inv_freq": lambda model: model.model.rotary_emb.inv_freq.mul_(0.5),
    "other inv_freq": lambda model: setattr(model.model.rotary_emb, "inv_freq", model.model.rotary_emb.inv_freq * 0.5),
    "attention_scaling": lambda model: setattr(model.model.rotary_emb, "attention_scaling", 1.5),
}
"""Changes that the next call sees by itself."""


def through_numpy(model: Any) -> None:
    weight(model).detach().numpy()[:] *= 2


UNSEEN: dict[str, Change] = {
    "data": lambda model: weight(model).data.mul_(2),
    "data copy": lambda model: weight(model).data.copy_(other(model)),
    "numpy": through_numpy,
    "storage": lambda model: weight(model).untyped_storage().copy_(other(model).clone().untyped_storage()),
    "inv_freq": lambda model: model.model.rotary_emb.inv_freq.data.mul_(0.5),
    "another dict of modules": another_dict,
}
"""Changes that need `refresh`."""


def refreshed(change: Change) -> Change:
    def both(model: Any) -> None:
        change(model)
        skipstone.refresh(model)

    return both


ALL = SEEN | {f"{name}, refreshed": refreshed(change) for name, change in UNSEEN.items()}


@pytest.mark.parametrize("change", ALL)
def test_the_next_call_uses_the_weights_as_they_are(change: str) -> None:
    assert_current(families.build("llama"), ALL[change])


@pytest.mark.parametrize(
    "change", ["fused AdamW", "set data twice", "inv_freq", "attention_scaling", "module in the dict", "data, refreshed"]
)
def test_eager_keeps_no_copy_either(change: str) -> None:
    assert_current(families.build("llama"), ALL[change], "eager")


@pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))
@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("change", ["fused AdamW", "set data", "swapped parameters", "data, refreshed"])
def test_quantised_copies_are_made_again(change: str, quantize: str) -> None:
    model = families.build("llama")
    few = ModelRunner(model, "native").in_fewer_bits(quantize).engine
    assert_current(model, ALL[change], "native", quantize)
    assert ModelRunner(model, "native").in_fewer_bits(quantize).engine is not few


@pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))
def test_a_step_of_another_models_optimizer_copies_nothing() -> None:
    model, stranger = families.build("llama"), families.build("llama")
    engine, version = ModelRunner(model, "native").engine, model_version(model)
    steps(torch.optim.AdamW, fused=True)(stranger)
    skipstone.refresh(stranger)
    assert ModelRunner(model, "native").engine is engine
    assert model_version(model) == version


def test_a_step_through_accelerate_is_seen() -> None:
    from accelerate import Accelerator

    def change(model: Any) -> None:
        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))
        accelerator.backward(model(text(12)[None], labels=text(12)[None]).loss)
        optimizer.step()

    assert_current(families.build("llama"), change)


@pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gemma2", lambda model: model.get_input_embeddings().embed_scale.mul_(2)),
        ("gemma2", lambda model: setattr(model.model.layers[0].self_attn, "attn_logit_softcapping", 0.1)),
        ("gemma2", lambda model: setattr(model.config, "final_logit_softcapping", 0.5)),
        ("granite", lambda model: setattr(model.model.layers[0], "residual_multiplier", 0.1)),
        ("granite", lambda model: setattr(model.model, "embedding_multiplier", 0.1)),
        ("granite", lambda model: setattr(model.config, "logits_scaling", 5.0)),
    ],
    ids=["embed_scale", "softcap", "last softcap", "residual", "embeddings", "logits"],
)
def test_numbers_that_a_family_computes_with_are_the_modules_own(name: str, change: Change) -> None:
    model = families.build(name)
    before = logits(model, "native")
    change(model)
    ids = text(12)[None]
    with torch.no_grad():
        expected = model(ids).logits
    assert not torch.allclose(before, expected[0], rtol=1e-2)
    for engine in ("native", "eager"):
        assert torch.allclose(logits(model, engine)[-1], expected[0, -1], rtol=1e-3, atol=1e-4), engine


@pytest.mark.parametrize("name", ["llama", "gemma"])
@pytest.mark.parametrize("place", ["norm", "activation", "epsilon"])
def test_modules_of_another_kind_run_as_they_are(name: str, place: str) -> None:
    model = families.build(name)
    logits(model)
    layer = model.model.layers[0]
    if place == "norm":
        layer.input_layernorm = nn.RMSNorm(32)
    elif place == "activation":
        layer.mlp.act_fn = nn.ReLU()
    else:
        setattr(layer.input_layernorm, "eps" if name == "gemma" else "variance_epsilon", 0.5)
    with torch.no_grad():
        expected = model(text(12)[None]).logits
    assert torch.allclose(logits(model)[-1], expected[0, -1], rtol=1e-3, atol=1e-4)


def test_a_trained_draft_model_drafts_with_its_current_weights() -> None:
    target, draft = families.build("llama"), families.build("llama")
    ids = families.prompts(1)[0][None]

    def found(model: Any) -> Any:
        method = skipstone.Speculative(draft_model=model, num_speculative_tokens=3)
        output: Any = skipstone.generate(target, ids, method, max_new_tokens=12, do_sample=False)
        return output.stats.accepted

    before = found(draft)
    for _ in range(3):
        steps(torch.optim.AdamW, fused=True)(draft)
    trained = found(draft)
    assert trained == found(copy.deepcopy(draft)) != before
    draft.lm_head.weight.data.copy_(target.lm_head.weight.roll(1, 0))
    skipstone.refresh(draft)
    assert found(draft) == found(copy.deepcopy(draft)) != trained


def heads_of(model: ModelRunner) -> ExitHeads:
    return ExitHeads(new_card(model, (1, 2), "square"))


@pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))
@pytest.mark.parametrize("change", ["step", "refresh"])
def test_trained_exit_heads_are_packed_again(change: str) -> None:
    model = ModelRunner(families.build("llama"), "native")
    heads, states = heads_of(model), torch.randn(1, 3, 32)
    transform: Any = heads.transform(0)
    model.engine.score_exit(states, transform.detach().requires_grad_(False))
    before = model.engine.score_exit(states, transform)
    if change == "step":
        transform.grad = torch.randn(32, 32)
        torch.optim.AdamW(heads.parameters(), lr=1.0, fused=True).step()
    else:
        transform.data.copy_(torch.randn(32, 32))
        skipstone.refresh(heads)
    found, expected = (model.engine.score_exit(states, transform), model.engine.score_exit(states, transform.detach().clone()))
    assert torch.equal(found[1], expected[1])
    assert not torch.equal(found[1], before[1])


def test_heads_in_another_dtype_are_copied_again_after_training() -> None:
    raw: Any = families.build("llama")
    model = ModelRunner(raw.to(torch.bfloat16), "eager")
    heads = heads_of(model)
    first = heads_fitting(heads, model)
    assert heads_fitting(heads, model) is first
    for one in heads.parameters():
        one.grad = torch.ones_like(one)
    torch.optim.AdamW(heads.parameters(), lr=0.5, fused=True).step()
    second: Any = heads_fitting(heads, model).transform(0)
    assert torch.equal(second, heads.transform(0).to(torch.bfloat16))  # pyright: ignore[reportOptionalMemberAccess]


def test_a_models_own_heads_are_those_of_its_current_weights() -> None:
    raw = families.build("llama")
    first = original_heads(ModelRunner(raw))
    steps(torch.optim.SGD, fused=True)(raw)
    second = original_heads(ModelRunner(raw))
    assert second is first
    assert second.card.model == fingerprint(copy.deepcopy(raw))


def test_rows_of_the_head_are_copied_again() -> None:
    raw, ids, states = families.build("llama"), torch.tensor([3, 5, 9]), torch.randn(1, 2, 32)
    runner = ModelRunner(raw, "eager")
    with torch.no_grad():
        runner.project(states, None, ids)
    steps(torch.optim.SGD, fused=True)(raw)
    with torch.no_grad():
        found, whole = (runner.project(states, None, some)[..., ids] for some in (ids, None))
    assert torch.allclose(found, whole, atol=1e-5)


def test_a_compiled_step_of_a_fused_optimizer_is_seen() -> None:
    def change(model: Any) -> None:
        weight(model).grad = torch.ones_like(weight(model))
        torch.compile(torch.optim.SGD([weight(model)], lr=0.1, fused=True).step, backend="aot_eager")()

    assert_current(families.build("llama"), change)


def test_compiled_layers_are_compiled_again_for_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKIPSTONE_COMPILE_BACKEND", "eager")
    model = families.build("llama")

    def found(model: Any) -> Tensor:
        ids = families.prompts(1)[0][None]
        output: Any = skipstone.generate(
            model, ids, "autoregressive", engine="compiled", max_new_tokens=4, return_dict_in_generate=True, output_logits=True
        )
        return torch.stack(output.logits)

    before, engine = found(model), ModelRunner(model, "compiled").engine
    steps(torch.optim.AdamW, fused=True)(model)
    trained = found(model)
    assert ModelRunner(model, "compiled").engine is engine, "layers that read the weights themselves stay compiled"
    model.model.layers[1].self_attn.scaling = 0.9
    scaled = found(model)
    assert torch.allclose(scaled, found(copy.deepcopy(model)), atol=1e-5)
    assert not torch.allclose(before, trained, atol=1e-4)
    assert not torch.allclose(trained, scaled, atol=1e-4)


def test_versions_keep_neither_models_nor_old_weights_alive() -> None:
    model = families.build("llama")
    model_version(model)
    old, gone = ref(weight(model)), ref(model)
    model.load_state_dict({name: one.clone() for name, one in model.state_dict().items()}, assign=True)
    gc.collect()
    assert old() is None
    del model
    gc.collect()
    assert gone() is None


def test_weights_that_were_loaded_in_inference_mode_need_refresh() -> None:
    with torch.inference_mode():
        model = families.build("llama")

    def change(model: Any) -> None:
        with torch.inference_mode():
            weight(model).mul_(2)
        skipstone.refresh(model)

    assert_current(model, change)
