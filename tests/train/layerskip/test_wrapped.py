"""What goes around a model in training leaves LayerSkip's loss as it is: autocast, activation checkpointing, LoRA."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F

from skipstone.train.data.rows import IGNORED
from skipstone.train.layerskip.dropout import kept_rows
from skipstone.train.layerskip.schedules import EarlyExitLoss
from tests.helpers.objectives import (
    CE,
    RATE,
    RATES,
    SEED,
    TOWARDS_LAST,
    assert_same,
    build,
    gradients,
    inputs,
    naive,
    objective,
)


def test_under_bfloat16_autocast_the_loss_is_close_and_its_gradients_are_finite() -> None:
    model, batch = build("llama").float(), inputs(4)
    recipe = objective(model, CE, RATE)
    recipe.micro = 9
    with recipe.installed():
        exact = model(**batch).loss
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch).loss
    assert loss.dtype == torch.float32
    assert loss.item() != exact.item()
    assert loss.item() == pytest.approx(exact.item(), rel=0.05)
    found, expected = gradients(model, loss), gradients(model, exact)
    for name in ("lm_head.weight", "model.layers.0.mlp.up_proj.weight"):
        assert F.cosine_similarity(found[name].flatten(), expected[name].flatten(), 0) > 0.95
    assert all(gradient.isfinite().all() for gradient in found.values())


@pytest.mark.parametrize("name", ["llama", "falcon"])
@pytest.mark.parametrize("exits", [CE, TOWARDS_LAST])
def test_activation_checkpointing_changes_nothing(name: str, exits: EarlyExitLoss) -> None:
    model, batch = build(name), inputs(4)
    recipe = objective(model, exits, RATE)
    recipe.micro = 9
    runs: list[int] = []
    mlp: Any = recipe.modules.layers[2].mlp
    mlp.register_forward_pre_hook(lambda _module, args: runs.append(len(args[0])))
    results = []
    for enable in (None, getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)):
        if enable is not None:
            enable()
        with recipe.installed():
            loss = model(**batch).loss
            results.append((loss.detach(), gradients(model, loss)))
    assert runs == 3 * [len(kept_rows(4, RATES, SEED, 9)[2])], "once plainly, then for the loss and again for its gradient"
    assert 0 < runs[0] < 4
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-9, atol=0)
    torch.testing.assert_close(results[1][1], results[0][1], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["q_proj", "down_proj", "lm_head"]])
def test_a_lora_model_is_trained_through_its_wrapper(targets: list[str]) -> None:
    settings = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=targets, r=4)
    wrapper: Any = peft.get_peft_model(build("llama"), settings).double().train()
    generator = torch.Generator().manual_seed(0)
    trained = {name: p for name, p in wrapper.named_parameters() if p.requires_grad}
    for parameter in trained.values():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    batch = inputs()
    count = int((batch["labels"][:, 1:] != IGNORED).sum())
    for exits, kl in ((CE, False), (TOWARDS_LAST, True)):
        recipe = objective(wrapper, exits)
        recipe.step = 1
        with recipe.installed():
            loss = wrapper(**batch).loss
        assert_same(wrapper, loss, naive("llama", wrapper.get_base_model(), batch, 1, kl) / count)
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in trained.values())
        assert all(p.grad is None for name, p in wrapper.named_parameters() if name not in trained)
    assert "forward" not in wrapper.get_base_model().__dict__
