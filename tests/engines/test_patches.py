"""skipstone's patches on a model's modules: nothing shows outside a pass, copies have their own, `disable` removes them."""

import copy
import gc
import io
import itertools
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

import skipstone
from skipstone import LayerSkip, SelfSpeculative
from skipstone.engines.eager import linear
from skipstone.engines.model_runner import ModelRunner
from tests.helpers import families
from tests.helpers.pairwise import slow_except

IDS = families.prompts(1)[0][None]
SKIP = SelfSpeculative(skip_attention=(1, 2), skip_mlp=(2,))
NAMES = ["llama", "opt", "falcon", "gpt2", "gemma3_text", "gemma2", "qwen3_next"]

pytestmark = pytest.mark.usefixtures("eager_engine")


def decode(model: Any, method: Any = None) -> list[list[int]] | None:
    return skipstone.generate(model, IDS, method or method_for(model), max_new_tokens=12, do_sample=False).new_tokens


def method_for(model: Any) -> Any:
    """Sublayers of a hybrid model cannot be skipped."""
    return LayerSkip(exit_layer=2) if model.config.model_type in families.HYBRIDS else SKIP


def own(model: Any) -> tuple[Tensor, Tensor]:
    """(what the model's own forward says of a text, what its own `generate` makes of a prompt)."""
    with torch.no_grad():
        found = type(model).generate(model, IDS, max_new_tokens=12, output_logits=True, return_dict_in_generate=True)
        return model(IDS).logits, torch.stack(found.logits)


def attributes(model: Any) -> dict[str, dict[str, Any]]:
    """The attributes of every module's instance, by their identity where they can be replaced."""
    return {path: {name: id(value) for name, value in vars(module).items()} for path, module in model.named_modules()}


def same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", slow_except(("llama", "gemma2"), NAMES))
def test_the_models_own_forward_is_bit_for_bit_the_same_before_while_and_after(name: str, tmp_path: Path) -> None:
    model = families.build(name)
    before, modules = own(model), attributes(model)
    model.save_pretrained(tmp_path / "before")
    text = decode(model)
    assert attributes(model) != modules
    assert same(own(model), before)
    model.save_pretrained(tmp_path / "after")
    for file in ("config.json", "generation_config.json"):
        assert (tmp_path / "before" / file).read_bytes() == (tmp_path / "after" / file).read_bytes()
    skipstone.enable(model, method_for(model))
    assert same(own(model), before)
    steps = skipstone.stream(model, IDS, method_for(model), max_new_tokens=12, do_sample=False)
    tokens = list(next(steps).tokens[0])
    assert same(own(model), before), "between the steps of a text"
    skipstone.disable(model)
    assert attributes(model) == modules
    assert same(own(model), before)
    for step in steps:
        tokens += step.tokens[0]
    assert [tokens] == text, "it was disabled in the middle of the text"
    assert decode(model) == text, "decoding again puts the patches on again"


def test_what_changes_a_model_is_seen() -> None:
    """Its attention, layers, dtype, embeddings and adapters."""
    model: Any = families.build("llama")
    text, layers = decode(model), ModelRunner(model).layers
    model.set_attn_implementation("eager")
    assert decode(model) == text
    model.set_attn_implementation("sdpa")
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers = 2
    assert ModelRunner(model).layers == layers[:2]
    model.to(torch.bfloat16)
    assert ModelRunner(model).dtype == torch.bfloat16
    assert not any("forward" in vars(module) for module in model.modules())
    model.resize_token_embeddings(120, mean_resizing=False)
    assert ModelRunner(model).embeddings == 120
    assert decode(model.float(), "autoregressive") != text
    adapted: Any = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    ModelRunner(adapted.eval())
    added = model.model.layers[0].self_attn.q_proj.lora_A["default"]
    assert "forward" in vars(added) or not linear.pays(added)


@pytest.mark.parametrize(
    ("name", "how"),
    slow_except([("llama", "deepcopy"), ("opt", "pickle")], itertools.product(("llama", "opt"), ("deepcopy", "pickle"))),
)
def test_a_copy_has_its_own_weights_and_patches(how: str, name: str) -> None:
    model = families.build(name)
    text, before = decode(model), own(model)
    if how == "deepcopy":
        other = copy.deepcopy(model)
    else:
        torch.save(model, buffer := io.BytesIO())
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    assert same(own(other), before)
    assert decode(other) == text
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    assert decode(other) != text
    assert not same(own(other), before)
    assert decode(model) == text
    skipstone.disable(other)
    assert same(own(model), before)
    assert decode(model) == text
    del model
    gc.collect()
    decode(other)


def test_two_models_may_share_their_layers() -> None:
    model: Any = families.build("llama")
    other: Any = copy.copy(model)
    other._modules = {**model._modules, "lm_head": copy.deepcopy(model.lm_head)}
    with torch.no_grad():
        other.lm_head.weight.neg_()
    texts = decode(model), decode(other)
    assert texts[0] != texts[1]
    assert (decode(model), decode(other)) == texts
    skipstone.disable(other)
    assert (decode(model), decode(other)) == texts


@pytest.mark.slow  # importing the compiler takes longer than any other test of a model
def test_a_models_own_forward_can_still_be_compiled_whole() -> None:
    model = families.build("llama")
    before = own(model)
    decode(model)
    with torch.no_grad():
        compiled = torch.compile(model.model, backend="eager", fullgraph=True)
        assert torch.equal(model.lm_head(compiled(IDS, use_cache=False).last_hidden_state), before[0])


@pytest.mark.parametrize("name", slow_except(("llama", "gemma2"), ("llama", "opt", "falcon", "gemma2")))
def test_an_exception_inside_a_pass_leaves_the_models_forward_intact(name: str) -> None:
    model: Any = families.build(name)
    before, modules, runner = own(model), attributes(model), ModelRunner(model)
    wrapped = getattr(runner.layers[1], runner.family.attention)
    inner = wrapped.forward
    wrapped.forward = cover = lambda *args, **kwargs: inner(*args, **kwargs)  # as accelerate's hooks do

    calls = itertools.count()

    def fail(*_: Any) -> None:
        if next(calls) == 1:  # in the first draft, behind sublayers that are skipped
            raise RuntimeError("a full disk, say")

    handle = runner.layers[3].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="full disk"):
        decode(model)
    handle.remove()
    assert same(own(model), before)
    skipstone.disable(model)
    assert wrapped.forward is cover
    del wrapped.forward
    assert attributes(model) == modules


def test_a_pass_inside_of_another_is_refused() -> None:
    """Other threads wait for their turn; a hook of this one would wait for itself."""
    model: Any = families.build("llama")
    text = decode(model)
    handle = model.model.layers[2].register_forward_pre_hook(lambda *_: decode(model))
    with pytest.raises(RuntimeError, match="in the middle of a pass"):
        decode(model)
    handle.remove()
    assert decode(model) == text
