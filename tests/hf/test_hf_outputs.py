"""skipstone behind `model.generate`: scores, seeds, a model's default method, pipelines and wrappers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, pipeline

import skipstone
from tests.helpers import families
from tests.helpers.settings import COUPLED, QUIET, SAMPLING, SKIP
from tests.helpers.support import alone, forwards, tokenizer

pytestmark = QUIET


class TestScoresAndLogits:
    options: dict[str, Any] = {"max_new_tokens": 20, "return_dict_in_generate": True}  # noqa: RUF012

    @pytest.mark.parametrize("more", [{}, {"repetition_penalty": 1.4, "bad_words_ids": [[60]]}], ids=["raw", "processed"])
    def test_greedy_ones_are_those_of_transformers(self, more: dict[str, Any], model: PreTrainedModel, prompt: Tensor) -> None:
        asked = {"output_scores": True, "output_logits": True, **self.options, **more}
        theirs = model.generate(prompt[None], **asked)
        skipstone.enable(model, SKIP)
        ours: Any = model.generate(prompt[None], **asked)
        assert torch.equal(ours.sequences, theirs.sequences)
        assert len(ours.scores) == len(ours.logits) == 20
        torch.testing.assert_close(torch.stack(ours.logits), torch.stack(theirs.logits), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(torch.stack(ours.scores), torch.stack(theirs.scores), atol=1e-4, rtol=1e-4)
        if more:
            assert not torch.equal(torch.stack(ours.scores), torch.stack(ours.logits))

    def test_a_ragged_batch_has_every_rows_own(self, model: PreTrainedModel) -> None:
        prompts = families.prompts(3)
        free = [alone(model, prompt, max_new_tokens=20) for prompt in prompts]
        asked = {"output_scores": True, "output_logits": True, "eos_token_id": free[1][5], **self.options}
        output = skipstone.generate(model, families.padded(prompts), SKIP, **asked)
        assert output.new_tokens is not None
        assert len(set(map(len, output.new_tokens))) > 1
        for row, prompt in enumerate(prompts):
            theirs = model.generate(prompt[None], **asked)
            count = len(theirs.logits)
            for ours, reference in ((output.logits, theirs.logits), (output.scores, theirs.scores)):
                assert ours is not None
                mine = torch.stack(ours)[:, row]
                torch.testing.assert_close(mine[:count], torch.stack(reference)[:, 0], atol=1e-4, rtol=1e-4)
                assert mine[count:].count_nonzero() == 0

    def test_sampled_scores_are_the_log_law_of_every_token(self, model: PreTrainedModel, prompt: Tensor) -> None:
        output = skipstone.generate(model, prompt, COUPLED, seed=1, output_scores=True, **self.options, **SAMPLING)
        assert output.scores is not None
        sequences: Any = output.sequences
        for place, scores in enumerate(output.scores):
            law = model.generate(
                sequences[:, : len(prompt) + place], **{**self.options, "max_new_tokens": 1, "output_scores": True, **SAMPLING}
            )
            torch.testing.assert_close(scores.exp(), law.scores[0].softmax(-1), atol=1e-5, rtol=1e-3)


class TestSeeds:
    def test_torchs_generator_makes_sampling_reproducible(self, model: PreTrainedModel, prompt: Tensor) -> None:
        skipstone.enable(model, SKIP)
        texts = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            texts.append(model.generate(prompt[None], max_new_tokens=16, **SAMPLING).tolist())
        assert texts[0] == texts[1]
        assert texts[0] != texts[2]

    def test_greedy_decoding_leaves_torchs_generator_alone(self, model: PreTrainedModel, prompt: Tensor) -> None:
        before = torch.get_rng_state()
        skipstone.generate(model, prompt, SKIP, max_new_tokens=8)
        assert torch.equal(torch.get_rng_state(), before)


class TestDefaults:
    def test_a_models_default_method_survives_saving_and_loading(self, prompt: Tensor, tmp_path: Path) -> None:
        model = families.build("llama")
        default = {"method": "layerskip", "exit_layer": 2, "num_speculative_tokens": 3}
        # a new config: transformers drops further fields of one that it derived from the model's config
        model.generation_config = GenerationConfig(pad_token_id=0, skipstone=default)
        skipstone.enable(model)  # an enabled model can be saved
        model.save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        output = skipstone.generate(loaded, prompt, max_new_tokens=12, record=True)
        assert output.method == "layerskip"
        assert output.steps is not None
        assert max(step.drafted[0] for step in output.steps) == 3
        assert output.new_tokens == [alone(loaded, prompt, max_new_tokens=12)]
        skipstone.enable(loaded)
        assert loaded.generate(prompt[None], max_new_tokens=2, return_dict_in_generate=True).method == "layerskip"

    def test_a_config_given_may_carry_the_method(self, model: PreTrainedModel, prompt: Tensor) -> None:
        config = GenerationConfig(max_new_tokens=4, skipstone={"method": "layerskip", "exit_layer": 1})
        assert skipstone.generate(model, prompt, generation_config=config).method == "layerskip"

    def test_assistant_early_exit_in_the_config_points_to_the_migration_page(self, prompt: Tensor) -> None:
        model = families.build("llama")
        model.generation_config.assistant_early_exit = 2
        skipstone.enable(model, SKIP)
        with pytest.raises(ValueError, match=r"assistant_early_exit=2 is not supported: use .*layerskip.*docs/migration\.md"):
            model.generate(prompt[None], max_new_tokens=3)


class TestWrappers:
    def test_a_pipeline_over_an_enabled_model(self, model: PreTrainedModel) -> None:
        pipe = pipeline("text-generation", model=model, tokenizer=tokenizer())
        options = {"max_new_tokens": 10, "do_sample": False}
        chat = [{"role": "user", "content": "hello the"}]
        expected = [pipe("hello the", **options), pipe(["hello the", "abc"], batch_size=2, **options), pipe(chat, **options)]
        skipstone.enable(model, SKIP)
        with forwards(model) as count:
            found = [pipe("hello the", **options), pipe(["hello the", "abc"], batch_size=2, **options), pipe(chat, **options)]
        assert count[0] > 0
        assert found == expected

    def test_a_peft_model_through_enable(self, prompt: Tensor) -> None:
        base = families.build("llama")
        plain = alone(base, prompt, max_new_tokens=16)
        settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        wrapper: Any = peft.get_peft_model(base, settings).eval()
        generator = torch.Generator().manual_seed(0)
        for name, parameter in wrapper.named_parameters():
            if "lora_B" in name:
                parameter.data = torch.randn(parameter.shape, generator=generator)
        expected = wrapper.generate(input_ids=prompt[None], max_new_tokens=16)
        assert expected[0, len(prompt) :].tolist() != plain
        skipstone.enable(wrapper, SKIP)
        output = wrapper.generate(input_ids=prompt[None], max_new_tokens=16, return_dict_in_generate=True)
        assert output.method == "layerskip"
        assert torch.equal(output.sequences, expected)
        passed_on = wrapper.generate(prompt[None], custom_generate=skipstone.custom_generate(SKIP), max_new_tokens=16)
        assert torch.equal(passed_on, expected)
        skipstone.disable(wrapper)
        assert torch.equal(wrapper.generate(input_ids=prompt[None], max_new_tokens=16), expected)

    def test_a_prompt_adapter_is_refused_behind_custom_generate_too(self, prompt: Tensor) -> None:
        settings = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        wrapper: Any = peft.get_peft_model(families.build("llama"), settings).eval()
        with pytest.raises(ValueError, match=r"PROMPT_TUNING.* virtual tokens"):
            wrapper.generate(input_ids=prompt[None], custom_generate=skipstone.custom_generate(SKIP), max_new_tokens=3)
