"""The promise to every family: its text is transformers' own `generate`'s, for each row alone and unpadded."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import skipstone
from skipstone import Autoregressive, LayerSkip
from skipstone.decoding.noise import TARGET, Noise, row_seed
from skipstone.engines.model_runner import ModelRunner
from skipstone.models.families import RECURRENT, layer_types
from tests.helpers import families, support
from tests.helpers.pairwise import slow_except
from tests.helpers.settings import QUIET

NEW = 4 * families.WINDOW
METHOD = LayerSkip(exit_layer=2, num_speculative_tokens=4)
pytestmark = QUIET
# facts that only some models of a family show
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3 RoPE": ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}}),
    "yarn RoPE": ("qwen3", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0,
        "original_max_position_embeddings": 512}}),
    "linear RoPE on full layers": ("gemma3_text", {"rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}),
    "no window": ("mistral", {"sliding_window": None}),
    "one key/value head per query head": ("llama", {"num_key_value_heads": 4}),
    "tied Gemma": ("gemma", {"tie_word_embeddings": True}),
    "tied GPT-2": ("gpt2", {"tie_word_embeddings": True}),
    "tied OPT": ("opt_projected", {"tie_word_embeddings": True}),
    "scaled GPT-2": ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}),
    "upcast GPT-2": ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True,
        "attn_implementation": "eager"}),
    "uncapped Gemma 2": ("gemma2", {"final_logit_softcapping": None, "attn_logit_softcapping": None}),
    "one norm in Falcon": ("falcon_new", {"num_ln_in_parallel_attn": 1}),
    "all layers sparse": ("qwen3_moe", {"mlp_only_layers": [], "decoder_sparse_step": 2}),
}  # fmt: skip


def greedy(model: PreTrainedModel, rows: int = 3, new: int = NEW, longest: int = 21) -> skipstone.Output:
    """A ragged left-padded batch by layerskip. Each row is asserted to be `model.generate`'s own."""
    prompts, expected = support.without_ties(model, families.prompts(rows + 2, longest=longest), rows, max_new_tokens=new)
    out = skipstone.generate(model, families.padded(prompts), METHOD, max_new_tokens=new)
    assert out.new_tokens == expected
    return out


def assert_speculated(out: skipstone.Output) -> None:
    stats = out.stats
    assert stats is not None
    assert stats.drafted > stats.accepted > 0, "nothing was accepted, or nothing rejected: the equality proves little"


@pytest.mark.parametrize("name", slow_except(("gemma3_text",), families.NAMES))
def test_greedy_layerskip_gives_the_text_of_generate_far_beyond_the_window(name: str) -> None:
    out = greedy(families.cached(name))
    assert_speculated(out)
    assert out.sequences.shape[1] > 5 * families.WINDOW


SCALED = ("llama", "gemma2", "cohere")
"""Families whose logits are scaled or capped in a way of their own, beside the plain one."""


def sampled(model: PreTrainedModel, prompt: Tensor, seed: int, temperature: float, new: int) -> list[int]:
    ids, noise = prompt[None], Noise(torch.tensor([seed]))
    for _ in range(new):
        with torch.no_grad():
            p = (model(ids, use_cache=False).logits[:, -1].float() / temperature).softmax(-1)
        ids = torch.cat([ids, noise.draw(p, torch.tensor([ids.shape[1]]), TARGET)[:, None]], 1)
    return ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", slow_except(SCALED, families.NAMES))
def test_sampled_text_is_what_the_models_own_distributions_and_the_seed_give(name: str) -> None:
    model, prompts, new, temperature = families.cached(name), families.prompts(2), 16, 2.0
    expected = [sampled(model, prompt, row_seed(5, row), temperature, new) for row, prompt in enumerate(prompts)]
    options: dict[str, Any] = {"max_new_tokens": new, "do_sample": True, "temperature": temperature, "top_k": 0, "seed": 5}
    plain = skipstone.generate(model, families.padded(prompts), Autoregressive(), **options)
    coupled = LayerSkip(exit_layer=2, num_speculative_tokens=4, rejection_sample_method="coupled")
    drafted = skipstone.generate(model, families.padded(prompts), coupled, **options)
    assert plain.new_tokens == expected
    assert drafted.new_tokens == expected
    assert_speculated(drafted)


EAGER = {
    f"{name}, eager attention": (name, {"attn_implementation": "eager"})
    for name in families.NAMES
    if name not in families.EAGER_ONLY
}
FAST = ("llama3 RoPE", "tied OPT", "mistral, eager attention", "falcon, eager attention")


@pytest.mark.parametrize("variant", slow_except(FAST, [*VARIANTS, *EAGER], full=[*VARIANTS, *[*EAGER][::3]]))
def test_what_only_some_models_of_a_family_show_is_exact_too(variant: str) -> None:
    name, overrides = (VARIANTS | EAGER)[variant]
    assert_speculated(greedy(families.build(name, **overrides), rows=2, new=16))


LONG = [("mistral", {"sliding_window": 700}), ("llama", {}), ("mistral", {}), ("gemma3_text", {"sliding_window": 300})]


@pytest.mark.parametrize(("name", "fields"), slow_except(LONG[:1], LONG))
def test_a_prompt_of_1500_tokens_in_chunks_gives_the_text_of_generate(name: str, fields: dict[str, Any]) -> None:
    out = greedy(families.build(name, **fields), rows=2, new=16, longest=1500)
    assert_speculated(out)
    assert out.stats is not None
    assert out.stats.prefill_tokens == 2


# RoPE whose phases change once a sequence passes a length; 64 tokens here
SWITCHING: dict[str, tuple[str, dict[str, Any], str]] = {
    "longrope": ("phi3", {"original_max_position_embeddings": 64, "rope_parameters": {"rope_type": "longrope",
        "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0]}}, "longrope"),
    "dynamic": ("llama", {"max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}, "dynamic RoPE"),
}  # fmt: skip


@pytest.mark.parametrize("case", SWITCHING)
def test_rope_that_switches_is_exact_up_to_the_length_below_which_nothing_switches(case: str) -> None:
    name, overrides, words = SWITCHING[case]
    model, prompt = families.build(name, **overrides), families.prompts(1, longest=40)[0]
    expected = support.alone(model, prompt, max_new_tokens=24, do_sample=False)
    long = torch.randint(1, 97, (1, 150), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():  # leaves the rotary module with the phases of a long sequence
        assert (model(long).logits[:, :40] - model(long[:, :40]).logits).abs().max() > 0.1, "nothing switches"
        model(long)
    out = skipstone.generate(model, prompt, METHOD, max_new_tokens=24)
    assert out.new_tokens == [expected]
    with pytest.raises(ValueError, match=rf"40 tokens .*=25 .*64 positions .*{words} would switch"):
        skipstone.generate(model, prompt, Autoregressive(), max_new_tokens=25)


QUICK = ("deepseek_v3", "gpt_oss")
"""Types in which something is unlike all others."""


@pytest.mark.parametrize("name", slow_except(QUICK[:1], families.FURTHER, full=QUICK))
def test_a_further_type_gives_the_text_of_generate(name: str) -> None:
    runner = ModelRunner(families.cached(name), "eager")
    assert len(runner.reaches) == runner.depth == len(runner.family.rotary)
    mixed = len(set(runner.reaches)) == 2
    assert mixed == (len({*layer_types(runner.config)} - {*RECURRENT}) == 2 or name == "gpt_neo")
    out = greedy(families.cached(name), rows=2)
    assert out.stats is not None
    assert out.stats.drafted > 0
