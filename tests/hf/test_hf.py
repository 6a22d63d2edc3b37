"""skipstone behind `model.generate`: types, streamers, scores, seeds, defaults, wrappers."""

import copy
import io
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, pipeline
from transformers.generation.utils import GenerateDecoderOnlyOutput

import skipstone
from skipstone import Autoregressive, EarlyExit, LayerSkip
from skipstone.engines.native import library
from skipstone.hf.enable import _warn_once
from tests.helpers import families
from tests.helpers.settings import COUPLED, QUIET, SAMPLING, SKIP
from tests.helpers.support import alone, forwards, tokenizer

pytestmark = QUIET


class Recorder:
    def __init__(self) -> None:
        self.chunks: list[Tensor] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        assert not self.ended
        self.chunks.append(value)

    def end(self) -> None:
        self.ended += 1


class TestReturnTypes:
    @pytest.mark.parametrize("enabled", [False, True], ids=["custom_generate", "enabled"])
    def test_a_tensor_by_default_and_an_output_on_request(self, enabled: bool, model: PreTrainedModel, prompt: Tensor) -> None:
        expected = model.generate(prompt[None], max_new_tokens=12)
        extra = {} if enabled else {"custom_generate": skipstone.custom_generate(SKIP)}
        if enabled:
            skipstone.enable(model, SKIP)
        with forwards(model) as count:
            result = model.generate(prompt[None], max_new_tokens=12, **extra)
        assert count[0] > 0
        assert isinstance(result, Tensor)
        assert torch.equal(result, expected)
        output = model.generate(prompt[None], max_new_tokens=12, return_dict_in_generate=True, **extra)
        assert isinstance(output, GenerateDecoderOnlyOutput)
        assert isinstance(output, skipstone.Output)
        assert torch.equal(output.sequences, expected)
        assert output.stats is not None
        assert output.stats.accepted > 0
        assert (output.method, output.lossless) == ("layerskip", True)
        assert (output.scores, output.logits) == (None, None)

    def test_arguments_may_be_given_by_place_as_in_transformers(self, model: PreTrainedModel, prompt: Tensor) -> None:
        config = GenerationConfig(max_new_tokens=9)
        seen = []

        def look(ids: Tensor, scores: Tensor) -> Tensor:
            seen.append(ids.shape[1])
            return scores

        expected = model.generate(prompt[None], config)
        skipstone.enable(model, SKIP)
        assert torch.equal(model.generate(prompt[None], config, [look]), expected)
        assert seen

    def test_the_methods_seed_passes_through_custom_generate(self, model: PreTrainedModel, prompt: Tensor) -> None:
        options = {"custom_generate": skipstone.custom_generate(COUPLED), "max_new_tokens": 12, **SAMPLING}
        first = model.generate(prompt[None], seed=5, **options)
        assert torch.equal(first, model.generate(prompt[None], seed=5, **options))
        assert not torch.equal(first, model.generate(prompt[None], seed=6, **options))
        ours = skipstone.generate(model, prompt, Autoregressive(), seed=5, max_new_tokens=12, **SAMPLING)
        assert torch.equal(first, ours.sequences)


class TestEnable:
    def test_the_method_that_decodes_is_the_one_enabled_last(self, model: PreTrainedModel, prompt: Tensor) -> None:
        expected = model.generate(prompt[None], max_new_tokens=12)
        assert skipstone.enable(model, EarlyExit(exit_layer=1)) is model
        skipstone.enable(model, {"method": "layerskip", "exit_layer": 2, "num_speculative_tokens": 3})
        output: Any = model.generate(prompt[None], max_new_tokens=12, return_dict_in_generate=True)
        assert output.method == "layerskip"
        assert torch.equal(output.sequences, expected)

    def test_disable_gives_back_what_was_there_and_enable_refuses_what_does_not_fit(self, model: PreTrainedModel) -> None:
        original = model.generate
        with pytest.raises(ValueError, match="exit_layer must lie between 1 and 3 for a model of 4 layers, found 4"):
            skipstone.enable(model, LayerSkip(exit_layer=4))
        assert model.generate == original
        skipstone.enable(skipstone.enable(model, SKIP), Autoregressive())
        assert model.generate != original
        for _ in range(2):
            assert skipstone.disable(model) is model
            assert model.generate == original
            assert "generate" not in model.__dict__

    def test_disable_gives_back_an_instances_own_generate(self, prompt: Tensor) -> None:
        model, calls = families.build("llama"), []

        def own(*args: Any, **kwargs: Any) -> str:
            calls.append((args, kwargs))
            return "own"

        model.generate = own  # type: ignore[method-assign]
        skipstone.enable(skipstone.enable(model, SKIP), SKIP)
        assert isinstance(model.generate(prompt[None], max_new_tokens=3), Tensor)
        assert model.generate(prompt[None], custom_generate="a/repo") == "own"
        assert skipstone.disable(model).generate is own
        assert len(calls) == 1

    def test_another_custom_function_passes_through(self, model: PreTrainedModel, prompt: Tensor) -> None:
        given: dict[str, Any] = {}

        def custom(model: Any, input_ids: Tensor, generation_config: Any, **kwargs: Any) -> str:
            given.update(kwargs, length=generation_config.max_length)
            return "theirs"

        skipstone.enable(model, SKIP)
        assert model.generate(prompt[None], custom_generate=custom, max_new_tokens=7) == "theirs"
        assert given["length"] == len(prompt) + 7

    def test_an_assistant_model_passes_through_unless_it_is_enabled_too(self, model: PreTrainedModel, prompt: Tensor) -> None:
        expected = model.generate(prompt[None], max_new_tokens=10)
        assistant = skipstone.enable(families.build("llama", layers=2), "autoregressive")
        skipstone.enable(model, SKIP)
        with forwards(model) as count, pytest.raises(ValueError, match=r"assistant_model.*disable.*speculative"):
            model.generate(prompt[None], assistant_model=assistant, max_new_tokens=10)
        assert count == [0]
        skipstone.disable(assistant)
        with forwards(assistant) as count:
            assert torch.equal(model.generate(prompt[None], assistant_model=assistant, max_new_tokens=10), expected)
        assert count[0] > 0

    def test_a_copy_decodes_with_its_own_weights_and_a_pickled_one_as_before(
        self, model: PreTrainedModel, prompt: Tensor
    ) -> None:
        skipstone.enable(model, SKIP)
        before, twin, stored = model.generate(prompt[None], max_new_tokens=12), copy.deepcopy(model), io.BytesIO()
        twin.lm_head.weight.data.neg_()
        changed = twin.generate(prompt[None], max_new_tokens=12)
        assert not torch.equal(changed, before)
        assert torch.equal(changed, skipstone.disable(twin).generate(prompt[None], max_new_tokens=12))
        torch.save(model, stored)
        stored.seek(0)
        loaded = torch.load(stored, weights_only=False)
        for one in (model, loaded):
            output = one.generate(prompt[None], max_new_tokens=12, return_dict_in_generate=True)
            assert output.method == "layerskip"
            assert torch.equal(output.sequences, before)


class TestStreamers:
    def test_the_prompt_first_then_the_tokens_in_order_and_nothing_after_eos(
        self, model: PreTrainedModel, prompt: Tensor
    ) -> None:
        expected = alone(model, prompt, max_new_tokens=20)
        skipstone.enable(model, SKIP)
        recorder, ended = Recorder(), Recorder()
        model.generate(prompt[None], streamer=recorder, max_new_tokens=20)
        assert torch.equal(recorder.chunks[0], prompt[None])
        assert all(chunk.ndim == 1 and chunk.device.type == "cpu" for chunk in recorder.chunks[1:])
        assert torch.cat(recorder.chunks[1:]).tolist() == expected
        assert len(recorder.chunks[1]) == 1
        assert 2 < len(recorder.chunks) < 21, "some chunk should hold an accepted draft"
        assert recorder.ended == 1
        model.generate(prompt[None], streamer=ended, eos_token_id=expected[9], max_new_tokens=20)
        assert torch.cat(ended.chunks[1:]).tolist() == expected[: expected.index(expected[9]) + 1]

    def test_a_batch_has_no_streamer(self, model: PreTrainedModel) -> None:
        inputs = families.padded(families.prompts(2))
        with forwards(model) as count, pytest.raises(ValueError, match="streamers take one row, found a batch of 2"):
            skipstone.generate(model, inputs, SKIP, streamer=Recorder(), max_new_tokens=3)
        assert count == [0]


class TestAssistants:
    @pytest.mark.parametrize("name", ["assistant_model", "assistant_tokenizer", "logits_to_keep", "labels", "cache_position"])
    def test_an_argument_is_refused_by_its_own_name(self, model: PreTrainedModel, prompt: Tensor, name: str) -> None:
        remedy = "speculative" if name.startswith("assistant") else ""
        with pytest.raises(ValueError, match=rf"{name}.*{remedy}") as refused:
            skipstone.generate(model, prompt[None], SKIP, max_new_tokens=3, **{name: object()})
        assert "did you mean" not in str(refused.value)


def test_stop_strings_work_through_enable_and_need_a_tokenizer(model: PreTrainedModel, prompt: Tensor) -> None:
    words = tokenizer()
    stop = words.decode(alone(model, prompt, max_new_tokens=20)[7:9])
    options: dict[str, Any] = {"stop_strings": stop, "tokenizer": words, "max_new_tokens": 20}
    expected = model.generate(prompt[None], **options)
    assert expected.shape[1] < len(prompt) + 20
    skipstone.enable(model, SKIP)
    assert torch.equal(model.generate(prompt[None], **options), expected)
    with pytest.raises(ValueError, match=r"stop_strings='abc' need the tokenizer: pass tokenizer="):
        model.generate(prompt[None], stop_strings="abc", max_new_tokens=3)


@pytest.mark.skipif(library.missing() is not None, reason="needs the native engine")
def test_enabling_a_model_that_transformers_computes_less_precisely_is_warned_of_once() -> None:
    _warn_once.cache_clear()
    skipstone.enable(families.build("llama"), SKIP, engine="native")  # float32: nothing to say
    skipstone.enable(families.build("llama").to(torch.bfloat16), SKIP, engine="eager")
    with pytest.warns(RuntimeWarning, match="bfloat16.*float32"):
        skipstone.enable(families.build("llama").to(torch.bfloat16), SKIP, engine="native")
    skipstone.enable(families.build("llama").to(torch.bfloat16), SKIP, engine="native")


class TestScoresAndLogits:
    options: dict[str, Any] = {"max_new_tokens": 20, "return_dict_in_generate": True}  # noqa: RUF012

    def test_greedy_ones_are_those_of_transformers(self, model: PreTrainedModel, prompt: Tensor) -> None:
        processors = {"repetition_penalty": 1.4, "bad_words_ids": [[60]]}
        request = {"output_scores": True, "output_logits": True, **processors, **self.options}
        theirs = model.generate(prompt[None], **request)
        ours: Any = skipstone.enable(model, SKIP).generate(prompt[None], **request)
        assert torch.equal(ours.sequences, theirs.sequences)
        assert len(ours.scores) == len(ours.logits) == 20
        torch.testing.assert_close(torch.stack(ours.logits), torch.stack(theirs.logits), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(torch.stack(ours.scores), torch.stack(theirs.scores), atol=1e-4, rtol=1e-4)
        assert not torch.equal(torch.stack(ours.scores), torch.stack(ours.logits))

    def test_a_ragged_batch_has_every_rows_own(self, model: PreTrainedModel) -> None:
        prompts = families.prompts(3)
        free = [alone(model, prompt, max_new_tokens=20) for prompt in prompts]
        request = {"output_scores": True, "output_logits": True, "eos_token_id": free[1][5], **self.options}
        output = skipstone.generate(model, families.padded(prompts), SKIP, **request)
        assert output.new_tokens is not None
        assert len(set(map(len, output.new_tokens))) > 1
        for row, prompt in enumerate(prompts):
            theirs = model.generate(prompt[None], **request)
            count = len(theirs.logits)
            for ours, reference in ((output.logits, theirs.logits), (output.scores, theirs.scores)):
                assert ours is not None
                mine = torch.stack(ours)[:, row]
                torch.testing.assert_close(mine[:count], torch.stack(reference)[:, 0], atol=1e-4, rtol=1e-4)
                assert mine[count:].count_nonzero() == 0


class TestSeeds:
    def test_torchs_generator_makes_sampling_reproducible(self, model: PreTrainedModel, prompt: Tensor) -> None:
        skipstone.enable(model, SKIP)
        texts = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            texts.append([model.generate(prompt[None], max_new_tokens=16, **SAMPLING).tolist() for _ in range(2)])
        assert texts[0] == texts[1]
        assert len({str(text) for pair in texts[1:] for text in pair}) == 4, "two calls without a seed differ"

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

    def test_a_config_given_may_carry_the_method_and_one_of_early_exit_points_to_the_migration_page(
        self, model: PreTrainedModel, prompt: Tensor
    ) -> None:
        config = GenerationConfig(max_new_tokens=4, skipstone={"method": "layerskip", "exit_layer": 1})
        assert skipstone.generate(model, prompt, generation_config=config).method == "layerskip"
        config = GenerationConfig(max_new_tokens=4, assistant_early_exit=2)
        with pytest.raises(ValueError, match=r"assistant_early_exit=2 is not supported: use .*layerskip.*docs/migration\.md"):
            skipstone.generate(model, prompt, SKIP, generation_config=config)


class TestWrappers:
    def test_a_pipeline_over_an_enabled_model(self, model: PreTrainedModel) -> None:
        pipe = pipeline("text-generation", model=model, tokenizer=tokenizer())
        options = {"max_new_tokens": 10, "do_sample": False}
        chat = [{"role": "user", "content": "hello the"}]

        def answers() -> list[Any]:
            return [pipe("hello the", **options), pipe(["hello the", "abc"], batch_size=2, **options), pipe(chat, **options)]

        expected = answers()
        skipstone.enable(model, SKIP)
        with forwards(model) as count:
            assert answers() == expected
        assert count[0] > 0

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
