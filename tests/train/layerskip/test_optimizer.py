"""Muon and AdamW as one optimiser: who gets which parameter, and that together they do what they do apart."""

import io
from typing import Any

import peft
import pytest
import torch
from torch import nn

from skipstone.train.layerskip.trainer import CombinedOptimizer, muon_with_adamw
from tests.helpers import families

MUON, RATE, BETAS, DECAY = 0.02, 3e-3, (0.9, 0.95), 0.07  # none of them torch's default
CASES = [("llama", False), ("gpt2", True), ("qwen3_moe", False)]


def optimiser(model: nn.Module) -> CombinedOptimizer:
    return muon_with_adamw(model, MUON, RATE, BETAS, DECAY)


def build(name: str = "llama", tied: bool = True) -> Any:
    return families.build(name, layers=2, tie_word_embeddings=tied)


def give_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=generator)


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def expected_split(model: nn.Module) -> tuple[list[str], list[str], list[str]]:
    """(Muon's, AdamW's with decay, AdamW's without), by name."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    muon = [name for name, p in named.items() if (".layers." in name or ".h." in name) and p.ndim == 2]
    return (
        muon,
        [name for name, p in named.items() if p.ndim > 1 and name not in muon],
        [name for name, p in named.items() if p.ndim == 1],
    )


@pytest.mark.parametrize(("name", "tied"), CASES)
def test_matrices_of_the_layers_go_to_muon_and_everything_else_to_adamw_each_once(name: str, tied: bool) -> None:
    model = build(name, tied)
    names = {id(p): name for name, p in model.named_parameters()}
    found = optimiser(model)
    groups = [[names[id(p)] for p in group["params"]] for group in found.param_groups]
    assert [type(part).__name__ for part in found.parts] == ["Muon", "AdamW"]
    assert groups == list(expected_split(model))
    assert sorted(name for group in groups for name in group) == sorted(names.values())
    assert any("embed" in name or "wte" in name for name in groups[1])
    assert any("norm" in name or "ln" in name for name in groups[2])
    assert any("experts" in name for name in groups[1]) == (name == "qwen3_moe")
    settings = [{key: group[key] for key in ("lr", "weight_decay")} for group in found.param_groups]
    assert settings == [
        {"lr": MUON, "weight_decay": DECAY},
        {"lr": RATE, "weight_decay": DECAY},
        {"lr": RATE, "weight_decay": 0.0},
    ]
    assert found.param_groups[1]["betas"] == found.param_groups[2]["betas"] == BETAS


def test_a_step_under_a_schedule_is_a_step_of_both() -> None:
    model, twin = build(), build()
    names = dict(twin.named_parameters())
    matrices, others, vectors = ([names[name] for name in group] for group in expected_split(twin))
    apart = [
        torch.optim.Muon(matrices, lr=MUON, weight_decay=DECAY),
        torch.optim.AdamW(
            [{"params": others, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0}], lr=RATE, betas=BETAS
        ),
    ]
    together, before = optimiser(model), state(model)
    schedules = [torch.optim.lr_scheduler.LambdaLR(one, lambda step: 1 / (1 + step)) for one in (together, *apart)]
    for step in range(3):
        for one in (model, twin):
            give_gradients(one, step)
        for one in (together, *apart, *schedules):
            one.step()
    for name, parameter in state(model).items():
        assert parameter.equal(names[name]), name
        assert not parameter.equal(before[name]), name
    together.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    give_gradients(model, 0)
    together.zero_grad(set_to_none=False)
    assert all(p.grad.abs().max() == 0 for p in model.parameters())


def advance(model: nn.Module, together: CombinedOptimizer, schedule: Any, steps: range) -> None:
    for step in steps:
        give_gradients(model, step)
        together.step()
        schedule.step()


def scheduled(model: nn.Module) -> tuple[CombinedOptimizer, Any]:
    together = optimiser(model)
    return together, torch.optim.lr_scheduler.LambdaLR(together, lambda step: 1 / (1 + step))


def test_a_saved_state_goes_on_bit_by_bit() -> None:
    model = build()
    parts = scheduled(model)
    advance(model, *parts, range(2))
    file = io.BytesIO()
    torch.save((model.state_dict(), [part.state_dict() for part in parts]), file)
    advance(model, *parts, range(2, 5))
    for restored in ([0, 1], [1]):  # the second time without the optimiser's state: it does matter
        file.seek(0)
        weights, states = torch.load(file)
        fresh = build()
        fresh.load_state_dict(weights)
        others = scheduled(fresh)
        for index in restored:
            others[index].load_state_dict(states[index])
        advance(fresh, *others, range(2, 5))
        assert [group["lr"] for group in others[0].param_groups] == [group["lr"] for group in parts[0].param_groups]
        same = [one.equal(other) for one, other in zip(model.parameters(), fresh.parameters(), strict=True)]
        assert all(same) if 0 in restored else not any(same)


def test_adapters_of_the_layers_are_muons_and_need_no_adamw() -> None:
    settings = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "down_proj"], r=4)
    model: Any = peft.get_peft_model(build(), settings)
    together, before = optimiser(model), state(model)
    assert [type(part).__name__ for part in together.parts] == ["Muon"]
    give_gradients(model, 0)
    together.step()
    changed = [name for name, after in state(model).items() if not after.equal(before[name])]
    assert changed == [name for name in before if "lora" in name]
    other = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["lm_head"], r=4)
    with pytest.raises(ValueError, match="no matrix inside the layers is trained"):
        optimiser(peft.get_peft_model(build(tied=False), other))


def test_the_state_of_another_optimiser_is_refused() -> None:
    model = build()
    together = optimiser(model)
    for foreign in (torch.optim.AdamW(model.parameters()).state_dict(), {"parts": []}, {}):
        with pytest.raises(ValueError, match="not that of Muon with AdamW: was the run started with another optimiser"):
            together.load_state_dict(foreign)
    with pytest.raises(ValueError, match="group"):
        together.load_state_dict(optimiser(build("gpt2")).state_dict())


def test_what_is_not_supported_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="takes no closure"):
        optimiser(build()).step(lambda: 0.0)
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ValueError, match=r"needs torch\.optim\.Muon, which torch .* does not have"):
        optimiser(build())
