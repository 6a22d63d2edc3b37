"""After a change of a model's weights the next call uses the current ones, like a deep copy that skipstone has never seen."""

import copy
import functools
import gc
from collections.abc import Callable
from typing import Any
from weakref import ref

import peft
import pytest
import torch
from accelerate import Accelerator
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
from tests.helpers.pairwise import slow_except

NATIVE_ONLY = pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))
Change = Callable[[Any], object]


def logits(model: Any, engine: str | None = None, quantize: str | None = None) -> Tensor:
    with torch.no_grad():
        return chain(ModelRunner(model, engine, quantize), text(12), 5)[0]


@torch.no_grad()
def own_logits(model: Any) -> Tensor:
    return model(text(12)[None]).logits[0]


def assert_current(model: Any, change: Change, engine: str | None = None, quantize: str | None = None) -> None:
    before, _ = logits(model, engine, quantize), fingerprint(model)
    change(model)
    after, fresh = logits(model, engine, quantize), copy.deepcopy(model)
    assert torch.equal(after, logits(fresh, engine, quantize))
    assert not torch.equal(after, before)
    assert fingerprint(model) == fingerprint(fresh)


def loss(model: Any) -> Any:
    return model(text(12)[None], labels=text(12)[None]).loss


def weight(model: Any) -> Any:
    return model.model.layers[1].mlp.down_proj.weight


def other(model: Any) -> Any:
    return model.model.layers[2].mlp.down_proj.weight


def query(model: Any) -> Any:
    return model.model.layers[1].self_attn.q_proj.weight


def steps(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> Change:
    def change(model: Any) -> None:
        optimizer = kind(model.parameters(), lr=1e-2, **options)
        with torch.enable_grad():
            loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    return change


train = steps(torch.optim.AdamW, fused=True)


def accelerated(model: Any) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))
    accelerator.backward(loss(model))
    optimizer.step()


def compiled_step(model: Any) -> None:
    weight(model).grad = torch.ones_like(weight(model))
    torch.compile(torch.optim.SGD([weight(model)], lr=0.1, fused=True).step, backend="aot_eager")()


def set_data_twice(model: Any) -> None:
    """The allocator may give the second one the address of the first."""
    for factor in (3.0, -1.0):
        weight(model).data = weight(model).data * factor


def swap(model: Any) -> None:
    first, second = model.model.layers[1].mlp, model.model.layers[2].mlp
    first.down_proj.weight, second.down_proj.weight = second.down_proj.weight, first.down_proj.weight


def load(assign: bool) -> Change:
    return lambda model: model.load_state_dict({name: one * 1.5 for name, one in model.state_dict().items()}, assign=assign)


def merge_adapter(model: Any) -> None:
    """PEFT writes through `.data` and puts the modules back that were there before."""
    config = peft.LoraConfig(r=2, target_modules=["down_proj"], init_lora_weights=False)
    assert peft.get_peft_model(model, config).merge_and_unload() is model  # pyright: ignore[reportCallIssue]


def other_layers(model: Any) -> None:
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]


def another_module(model: Any, how: str) -> None:
    """The MLP or the layer of another one. torch calls no hook for a change of the dict of modules."""
    part, mlp = model.model.layers[1], copy.deepcopy(model.model.layers[3].mlp)
    if how == "attribute":
        part.mlp = mlp
    elif how == "in the dict":
        part._modules["mlp"] = mlp
    elif how == "in another dict":
        part.__dict__["_modules"] = {**part._modules, "mlp": mlp}
    else:
        model.model.layers[1] = copy.deepcopy(model.model.layers[3])
        model.model.layers[1].self_attn.layer_idx = 1


@torch.no_grad()
def in_place(model: Any) -> None:
    other(model).copy_(weight(model))


@torch.no_grad()
def shared_memory(model: Any) -> None:
    model.share_memory().get_input_embeddings().weight.mul_(2)


SEEN: dict[str, Change] = {
    "fused AdamW": train,
    "fused Adam": steps(torch.optim.Adam, fused=True),
    "fused SGD": steps(torch.optim.SGD, fused=True),
    "foreach AdamW": steps(torch.optim.AdamW, foreach=True),
    "plain SGD": steps(torch.optim.SGD, foreach=False),
    "accelerate": accelerated,
    "compiled SGD": compiled_step,
    "set data": lambda model: setattr(weight(model), "data", weight(model).data * 2),
    "set data twice": set_data_twice,
    "transpose": lambda model: setattr(query(model), "data", query(model).data.t()),
    "vector_to_parameters": lambda model: vector_to_parameters(
        parameters_to_vector(model.parameters()) * 1.5, model.parameters()
    ),
    "swapped parameters": swap,
    "swap_tensors": lambda model: torch.utils.swap_tensors(weight(model), other(model)),
    "load_state_dict": load(assign=False),
    "load_state_dict assign": load(assign=True),
    "new parameter": lambda model: setattr(model.lm_head, "weight", nn.Parameter(torch.randn(97, 32))),
    "in place": in_place,
    "bias": lambda model: setattr(model.model.layers[1].mlp.down_proj, "bias", nn.Parameter(torch.ones(32))),
    "merged adapter": merge_adapter,
    "layers": other_layers,
    **{f"module {how}": functools.partial(another_module, how=how) for how in ("attribute", "in the dict", "by index")},
    "activation": lambda model: setattr(model.model.layers[1].mlp, "act_fn", nn.GELU(approximate="tanh")),
    "dtype": lambda model: model.to(torch.bfloat16).to(torch.float32),
    "shared memory": shared_memory,
    "epsilon": lambda model: setattr(model.model.norm, "variance_epsilon", 0.5),
    "scaling": lambda model: setattr(model.model.layers[1].self_attn, "scaling", 0.9),
    "inv_freq": lambda model: model.model.rotary_emb.inv_freq.mul_(0.5),
    "other inv_freq": lambda model: setattr(model.model.rotary_emb, "inv_freq", model.model.rotary_emb.inv_freq * 0.5),
    "attention_scaling": lambda model: setattr(model.model.rotary_emb, "attention_scaling", 1.5),
}
"""Changes that the next call sees by itself."""


def from_inference_mode(model: Any) -> None:
    with torch.inference_mode():
        weight(model).mul_(2)


def through_numpy(model: Any) -> None:
    weight(model).detach().numpy()[:] *= 2


UNSEEN: dict[str, Change] = {
    "data": lambda model: weight(model).data.mul_(2),
    "data copy": lambda model: weight(model).data.copy_(other(model)),
    "numpy": through_numpy,
    "storage": lambda model: weight(model).untyped_storage().copy_(other(model).clone().untyped_storage()),
    "inv_freq": lambda model: model.model.rotary_emb.inv_freq.data.mul_(0.5),
    "another dict of modules": functools.partial(another_module, how="in another dict"),
}
"""Changes that need `refresh`."""


def refreshed(change: Change) -> Change:
    def both(model: Any) -> None:
        change(model)
        skipstone.refresh(model)

    return both


ALL = SEEN | {f"{name}, refreshed": refreshed(change) for name, change in UNSEEN.items()}


@pytest.mark.parametrize("change", slow_except([name for name in ALL if name != "compiled SGD"], ALL))
def test_the_next_call_uses_the_weights_as_they_are(change: str) -> None:
    assert_current(families.build("llama"), ALL[change])


EAGER = ["fused AdamW", "set data twice", "inv_freq", "attention_scaling", "module in the dict", "data, refreshed"]


@pytest.mark.parametrize("change", EAGER)
def test_eager_keeps_no_copy_either(change: str) -> None:
    assert_current(families.build("llama"), ALL[change], "eager")


@NATIVE_ONLY
@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("change", ["fused AdamW", "set data", "swapped parameters", "data, refreshed"])
def test_quantised_copies_are_made_again(change: str, quantize: str) -> None:
    model = families.build("llama")
    few = ModelRunner(model, "native").in_fewer_bits(quantize).engine
    assert few.quantize == quantize
    assert ModelRunner(model, "native").in_fewer_bits(quantize).engine is few
    assert_current(model, ALL[change], "native", quantize)
    assert ModelRunner(model, "native").in_fewer_bits(quantize).engine is not few


@NATIVE_ONLY
def test_a_step_of_another_models_optimizer_copies_nothing() -> None:
    model, stranger = families.build("llama"), families.build("llama")
    engine, version = ModelRunner(model, "native").engine, model_version(model)
    train(stranger)
    skipstone.refresh(stranger)
    assert ModelRunner(model, "native").engine is engine
    assert model_version(model) == version


OF_MODULES: dict[str, tuple[str, Change]] = {
    "embed_scale": ("gemma2", lambda model: model.get_input_embeddings().embed_scale.mul_(2)),
    "softcap": ("gemma2", lambda model: setattr(model.model.layers[0].self_attn, "attn_logit_softcapping", 0.1)),
    "last softcap": ("gemma2", lambda model: setattr(model.config, "final_logit_softcapping", 0.5)),
    "residual": ("granite", lambda model: setattr(model.model.layers[0], "residual_multiplier", 0.1)),
    "embeddings": ("granite", lambda model: setattr(model.model, "embedding_multiplier", 0.1)),
    "logits": ("granite", lambda model: setattr(model.config, "logits_scaling", 5.0)),
    "eps of gemma": ("gemma", lambda model: setattr(model.model.layers[0].input_layernorm, "eps", 0.5)),
    "epsilon of llama": ("llama", lambda model: setattr(model.model.layers[0].input_layernorm, "variance_epsilon", 0.5)),
    **{f"norm of {name}": (name, lambda model: setattr(model.model.layers[0], "input_layernorm", nn.RMSNorm(32)))
       for name in ("llama", "gemma")},
    **{f"activation of {name}": (name, lambda model: setattr(model.model.layers[0].mlp, "act_fn", nn.ReLU()))
       for name in ("llama", "gemma")},
}  # fmt: skip


@NATIVE_ONLY
@pytest.mark.parametrize("number", OF_MODULES)
def test_numbers_that_a_family_computes_with_are_the_modules_own(number: str) -> None:
    name, change = OF_MODULES[number]
    model = families.build(name)
    before = logits(model, "native")
    change(model)
    expected, other_kind = own_logits(model), number.startswith(("norm", "activation", "eps"))
    assert not torch.allclose(before, expected, rtol=1e-2)
    assert ModelRunner(model).engine.name == ("eager" if other_kind else "native")
    for engine in (None, "eager"):
        assert torch.allclose(logits(model, engine)[-1], expected[-1], rtol=1e-3, atol=1e-4), engine


def test_a_trained_draft_model_drafts_with_its_current_weights() -> None:
    target, draft = families.build("llama"), families.build("llama")

    def accepted(model: Any) -> Any:
        method = skipstone.Speculative(draft_model=model, num_speculative_tokens=3)
        ids = families.prompts(1)[0][None]
        output: Any = skipstone.generate(target, ids, method, max_new_tokens=12, do_sample=False)
        return output.stats.accepted

    before = accepted(draft)
    for _ in range(3):
        train(draft)
    trained = accepted(draft)
    assert trained == accepted(copy.deepcopy(draft)) != before
    draft.lm_head.weight.data.copy_(target.lm_head.weight.roll(1, 0))
    skipstone.refresh(draft)
    assert accepted(draft) == accepted(copy.deepcopy(draft)) != trained


@NATIVE_ONLY
def test_trained_exit_heads_are_packed_again() -> None:
    model, states = ModelRunner(families.build("llama"), "native"), torch.randn(1, 3, 32)
    heads = ExitHeads(new_card(model, (1, 2), "square"))
    transform: Any = heads.transform(0)
    before = model.engine.score_exit(states, transform)[1]
    for change in ("step", "refresh"):
        if change == "step":
            transform.grad = torch.randn(32, 32)
            torch.optim.AdamW(heads.parameters(), lr=1.0, fused=True).step()
        else:
            transform.data.copy_(torch.randn(32, 32))
            skipstone.refresh(heads)
        found, expected = (model.engine.score_exit(states, one)[1] for one in (transform, transform.detach().clone()))
        assert torch.equal(found, expected)
        assert not torch.equal(found, before)
        before = found


def test_heads_in_another_dtype_are_copied_again_after_training() -> None:
    model = ModelRunner(families.build("llama").to(torch.bfloat16), "eager")  # pyright: ignore
    heads: Any = ExitHeads(new_card(model, (1, 2), "square"))
    assert heads_fitting(heads, model) is heads_fitting(heads, model)
    heads.transform(0).grad = torch.ones(32, 32)
    torch.optim.AdamW(heads.parameters(), lr=0.5, fused=True).step()
    copied: Any = heads_fitting(heads, model)
    assert torch.equal(copied.transform(0), heads.transform(0).to(torch.bfloat16))


def test_a_models_own_heads_and_rows_of_its_head_are_those_of_its_current_weights() -> None:
    raw, ids, states = families.build("llama"), torch.tensor([3, 5, 9]), torch.randn(1, 2, 32)
    runner = ModelRunner(raw, "eager")
    first = original_heads(runner)
    with torch.no_grad():
        runner.project(states, None, ids)
    train(raw)
    second = original_heads(ModelRunner(raw, "eager"))
    assert second is first
    assert second.card.model == fingerprint(copy.deepcopy(raw))
    with torch.no_grad():
        found, whole = (runner.project(states, None, some)[..., ids] for some in (ids, None))
    assert torch.allclose(found, whole, atol=1e-5)


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
    assert_current(model, refreshed(from_inference_mode))
