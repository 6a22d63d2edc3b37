"""Adapters of PEFT: those that live in the modules decode exactly, all others are refused by name."""

from typing import Any

import peft
import pytest
import torch

import skipstone
from skipstone import LayerSkip
from skipstone.engines.model_runner import ModelRunner
from skipstone.models.decoder_model import ADAPTERS
from tests.helpers import families, support
from tests.helpers.pairwise import slow_except
from tests.helpers.settings import QUIET

pytestmark = QUIET
NEW, IDS = 12, torch.tensor([[1, 2, 3]])
METHOD = LayerSkip(exit_layer=2, num_speculative_tokens=4)
QV = ["q_proj", "v_proj"]
INSIDE: dict[str, peft.PeftConfig] = {
    "LoRA": peft.LoraConfig(target_modules=[*QV, "down_proj"], r=4),
    "LoRA on the head": peft.LoraConfig(target_modules=[*QV, "lm_head"], r=4),
    "LoRA with a head of its own": peft.LoraConfig(target_modules=QV, modules_to_save=["lm_head"]),
    "DoRA": peft.LoraConfig(target_modules=QV, use_dora=True),
    "IA3": peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "LoHa": peft.LoHaConfig(target_modules=QV),
    "LN tuning": peft.LNTuningConfig(target_modules=["input_layernorm"]),
    "VeRA": peft.VeraConfig(target_modules=["q_proj"]),
    "trainable tokens": peft.TrainableTokensConfig(token_indices=[1, 2, 3, 4, 5, 6]),
}
OUTSIDE: dict[str, tuple[peft.PeftConfig, str]] = {
    "prompt tuning": (peft.PromptTuningConfig(num_virtual_tokens=4), "PROMPT_TUNING.* virtual tokens"),
    "prefix tuning": (peft.PrefixTuningConfig(num_virtual_tokens=4), "PREFIX_TUNING.* virtual tokens"),
    "p-tuning": (peft.PromptEncoderConfig(num_virtual_tokens=4), "P_TUNING.* virtual tokens"),
    "activated LoRA": (peft.LoraConfig("CAUSAL_LM", target_modules=QV, alora_invocation_tokens=[5]), "LORA.* invocation tok"),
    "LLaMA-Adapter": (peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=2), "ADAPTION_PROMPT.* tested types .*LORA"),
    "Poly": (peft.PolyConfig(target_modules=["q_proj"], n_tasks=2), "POLY.* merge it"),
}


def adapted(config: peft.PeftConfig, name: str = "llama", by_transformers: bool = False) -> Any:
    """A tiny model with an adapter whose weights are random: fresh ones often do nothing."""
    config.task_type, model = peft.TaskType.CAUSAL_LM, families.build(name)
    if by_transformers:
        model.add_adapter(config)
    wrapper: Any = model if by_transformers else peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(0)
    for parameter in wrapper.parameters():
        if parameter.requires_grad:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return wrapper.eval()


TARGETS = {"gpt2": ["c_attn"], "opt": QV, "falcon": ["query_key_value"], "mixtral": QV, "llama": QV}
CASES: dict[str, tuple[str, peft.PeftConfig]] = {
    **{name: ("llama", config) for name, config in INSIDE.items()},
    **{
        f"LoRA in {name}": (name, peft.LoraConfig(target_modules=targets, fan_in_fan_out=name == "gpt2"))
        for name, targets in TARGETS.items()
    },
}


@pytest.mark.parametrize("case", slow_except([*[*INSIDE][::3], "LoRA in gpt2", "LoRA in llama"], CASES))
def test_an_adapter_inside_the_modules_decodes_as_its_own_generate_does(case: str) -> None:
    name, config = CASES[case]
    model = adapted(config, name, by_transformers=case == "LoRA in llama")
    prompts, expected = support.without_ties(model, families.prompts(4), 2, max_new_tokens=NEW)
    base = families.cached(name)
    without = [support.alone(base, prompt, max_new_tokens=NEW, do_sample=False) for prompt in prompts]
    assert without != expected, "the adapter does nothing"
    out = skipstone.generate(model, families.padded(prompts), METHOD, max_new_tokens=NEW)
    assert out.new_tokens == expected
    assert out.stats is not None
    assert out.stats.drafted > out.stats.accepted > 0 or case not in INSIDE


def test_every_admitted_adapter_type_has_a_row_here() -> None:
    assert {peft.PeftType(config.peft_type).value for config in INSIDE.values()} == set(ADAPTERS)


def test_an_enabled_lora_model_decodes_exactly_and_a_disabled_adapter_gives_the_base_model() -> None:
    model = adapted(INSIDE["LoRA"])
    (prompt, *_), (expected, *_) = support.without_ties(model, families.prompts(4), 1, max_new_tokens=NEW)
    base = support.alone(families.cached("llama"), prompt, max_new_tokens=NEW, do_sample=False)
    skipstone.enable(model, METHOD)
    try:
        assert support.alone(model, prompt, max_new_tokens=NEW, do_sample=False) == expected
        with model.disable_adapter():
            assert support.alone(model, prompt, max_new_tokens=NEW, do_sample=False) == base != expected
    finally:
        skipstone.disable(model)


@pytest.mark.parametrize("adapter", OUTSIDE)
def test_an_adapter_outside_the_modules_is_refused_by_name(adapter: str) -> None:
    config, words = OUTSIDE[adapter]
    model = adapted(config)
    for attempt in (
        lambda: ModelRunner(model),
        lambda: skipstone.generate(model, IDS, METHOD, max_new_tokens=2),
        lambda: skipstone.enable(model, METHOD),
    ):
        with pytest.raises(ValueError, match=words):
            attempt()
    if adapter.endswith("tuning"):
        with pytest.raises(ValueError, match=words):
            model.generate(input_ids=IDS, custom_generate=skipstone.custom_generate(METHOD), max_new_tokens=2)
