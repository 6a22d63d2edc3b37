"""skipstone behind `model.generate`: types, streamers, scores, defaults, wrappers."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

import skipstone
from skipstone import Autoregressive, EarlyExit, LayerSkip
from tests import families
from tests.snippets import ROOT, run_python, table_rows, tiny_checkpoint
from tests.support import alone, forwards, left_padded, tokenizer

SKIP = LayerSkip(exit_layer=2, num_speculative_tokens=4)
COUPLED = LayerSkip(exit_layer=2, num_speculative_tokens=4, rejection_sample_method="coupled")
SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 2.0, "top_k": 30}
# how fast a tiny model runs is no matter here
pytestmark = pytest.mark.filterwarnings("ignore:.*x the speed of plain decoding:RuntimeWarning")


@pytest.fixture
def model() -> Iterator[PreTrainedModel]:
    """A shared model, given back without a method."""
    shared = families.cached("llama")
    yield shared
    skipstone.disable(shared)
    assert "generate" not in shared.__dict__


@pytest.fixture(scope="module")
def prompt() -> Tensor:
    return families.prompts(1)[0]


class Recorder:
    """A streamer that keeps what it is given."""

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
        extra = {} if enabled else {"custom_generate": SKIP}
        if enabled:
            skipstone.enable(model, SKIP)
        with forwards(model) as count:
            found = model.generate(prompt[None], max_new_tokens=12, **extra)
        assert count[0] > 0
        assert isinstance(found, Tensor)
        assert torch.equal(found, expected)
        output = model.generate(prompt[None], max_new_tokens=12, return_dict_in_generate=True, **extra)
        assert isinstance(output, GenerateDecoderOnlyOutput)
        assert isinstance(output, skipstone.Output)
        assert torch.equal(output.sequences, expected)
        assert output.stats is not None
        assert output.stats.accepted > 0
        assert (output.method, output.lossless) == ("layerskip", True)
        assert (output.scores, output.logits) == (None, None)

    def test_a_lossy_method_says_so_in_its_output(self, model: PreTrainedModel, prompt: Tensor) -> None:
        skipstone.enable(model, EarlyExit(exit_layer=2))
        output: Any = model.generate(prompt[None], max_new_tokens=4, return_dict_in_generate=True)
        assert (output.method, output.lossless) == ("early_exit", False)

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
        options = {"custom_generate": COUPLED, "max_new_tokens": 12, **SAMPLING}
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

    def test_disable_gives_back_what_was_there(self, model: PreTrainedModel) -> None:
        original = model.generate
        skipstone.enable(skipstone.enable(model, SKIP), Autoregressive())
        assert model.generate != original
        assert skipstone.disable(model) is model
        assert model.generate == original
        assert "generate" not in model.__dict__
        skipstone.disable(model)
        assert model.generate == original

    def test_disable_gives_back_an_instances_own_generate(self, prompt: Tensor) -> None:
        model = families.build("llama")
        calls = []

        def own(*args: Any, **kwargs: Any) -> str:
            calls.append((args, kwargs))
            return "own"

        model.generate = own  # type: ignore[method-assign]
        skipstone.enable(skipstone.enable(model, SKIP), SKIP)
        assert isinstance(model.generate(prompt[None], max_new_tokens=3), Tensor)
        assert model.generate(prompt[None], custom_generate="a/repo") == "own"
        assert skipstone.disable(model).generate is own
        assert len(calls) == 1

    def test_a_method_that_does_not_fit_is_refused_at_once(self, model: PreTrainedModel) -> None:
        with pytest.raises(ValueError, match="exit_layer must lie between 1 and 3 for a model of 4 layers, found 4"):
            skipstone.enable(model, LayerSkip(exit_layer=4))
        assert "generate" not in model.__dict__

    def test_another_custom_function_passes_through(self, model: PreTrainedModel, prompt: Tensor) -> None:
        given: dict[str, Any] = {}

        def custom(model: Any, input_ids: Tensor, generation_config: Any, **kwargs: Any) -> str:
            given.update(kwargs, length=generation_config.max_length)
            return "theirs"

        skipstone.enable(model, SKIP)
        assert model.generate(prompt[None], custom_generate=custom, max_new_tokens=7) == "theirs"
        assert given["length"] == len(prompt) + 7
        seeded = model.generate(prompt[None], custom_generate=COUPLED, seed=3, max_new_tokens=7, **SAMPLING)
        assert torch.equal(seeded, model.generate(prompt[None], custom_generate=COUPLED, seed=3, max_new_tokens=7, **SAMPLING))

    def test_an_assistant_model_passes_through(self, model: PreTrainedModel, prompt: Tensor) -> None:
        expected = model.generate(prompt[None], max_new_tokens=10)
        assistant = families.build("llama", layers=2)
        skipstone.enable(model, SKIP)
        with forwards(assistant) as count:
            found = model.generate(prompt[None], assistant_model=assistant, max_new_tokens=10)
        assert count[0] > 0
        assert torch.equal(found, expected)

    def test_a_deep_copy_decodes_with_its_own_weights(self, model: PreTrainedModel, prompt: Tensor) -> None:
        skipstone.enable(model, SKIP)
        before = model.generate(prompt[None], max_new_tokens=12)
        twin = copy.deepcopy(model)
        twin.lm_head.weight.data.neg_()
        changed = twin.generate(prompt[None], max_new_tokens=12)
        assert not torch.equal(changed, before)
        assert torch.equal(changed, skipstone.disable(twin).generate(prompt[None], max_new_tokens=12))
        assert torch.equal(model.generate(prompt[None], max_new_tokens=12), before)

    def test_an_enabled_model_survives_pickling(self, model: PreTrainedModel, prompt: Tensor) -> None:
        skipstone.enable(model, SKIP)
        stored = io.BytesIO()
        torch.save(model, stored)
        stored.seek(0)
        loaded = torch.load(stored, weights_only=False)
        output = loaded.generate(prompt[None], max_new_tokens=12, return_dict_in_generate=True)
        assert output.method == "layerskip"
        assert torch.equal(output.sequences, model.generate(prompt[None], max_new_tokens=12))

    def test_a_model_put_into_training_mode_later_is_refused(self, prompt: Tensor) -> None:
        model = skipstone.enable(families.build("llama"), SKIP).train()
        with pytest.raises(ValueError, match="training mode"):
            model.generate(prompt[None], max_new_tokens=3)


class TestStreamers:
    def test_the_prompt_first_then_the_tokens_in_order(self, model: PreTrainedModel, prompt: Tensor) -> None:
        expected = alone(model, prompt, max_new_tokens=20)
        skipstone.enable(model, SKIP)
        recorder = Recorder()
        model.generate(prompt[None], streamer=recorder, max_new_tokens=20)
        assert torch.equal(recorder.chunks[0], prompt[None])
        assert all(chunk.ndim == 1 and chunk.device.type == "cpu" for chunk in recorder.chunks[1:])
        assert torch.cat(recorder.chunks[1:]).tolist() == expected
        assert len(recorder.chunks[1]) == 1
        assert 2 < len(recorder.chunks) < 21, "some chunk should hold an accepted draft"
        assert recorder.ended == 1

    def test_nothing_after_eos_is_streamed(self, model: PreTrainedModel, prompt: Tensor) -> None:
        free = alone(model, prompt, max_new_tokens=20)
        recorder = Recorder()
        skipstone.generate(model, prompt, SKIP, streamer=recorder, eos_token_id=free[9], max_new_tokens=20)
        assert torch.cat(recorder.chunks[1:]).tolist() == free[: free.index(free[9]) + 1]

    @pytest.mark.parametrize("skip_prompt", [True, False])
    def test_a_text_streamer_prints_what_transformers_prints(
        self, skip_prompt: bool, model: PreTrainedModel, prompt: Tensor, capsys: pytest.CaptureFixture[str]
    ) -> None:
        model.generate(prompt[None], streamer=TextStreamer(tokenizer(), skip_prompt), max_new_tokens=20)
        expected = capsys.readouterr().out
        skipstone.enable(model, SKIP)
        model.generate(prompt[None], streamer=TextStreamer(tokenizer(), skip_prompt), max_new_tokens=20)
        assert capsys.readouterr().out == expected
        assert len(expected) > 20

    def test_a_text_iterator_streamer_in_another_thread(self, model: PreTrainedModel, prompt: Tensor) -> None:
        expected = tokenizer().decode(alone(model, prompt, max_new_tokens=20))
        skipstone.enable(model, SKIP)
        streamer = TextIteratorStreamer(tokenizer(), skip_prompt=True, timeout=20.0)
        options = {"streamer": streamer, "max_new_tokens": 20}
        thread = threading.Thread(target=model.generate, args=(prompt[None],), kwargs=options)
        thread.start()
        assert "".join(streamer) == expected
        thread.join()

    def test_a_batch_has_no_streamer(self, model: PreTrainedModel) -> None:
        inputs = left_padded(families.prompts(2))
        with forwards(model) as count, pytest.raises(ValueError, match="streamers take one row, found a batch of 2"):
            skipstone.generate(model, inputs, SKIP, streamer=Recorder(), max_new_tokens=3)
        assert count == [0]


class TestStopStrings:
    def test_they_work_through_enable(self, model: PreTrainedModel, prompt: Tensor) -> None:
        words = tokenizer()
        stop = words.decode(alone(model, prompt, max_new_tokens=20)[7:9])
        options: dict[str, Any] = {"stop_strings": stop, "tokenizer": words, "max_new_tokens": 20}
        expected = model.generate(prompt[None], **options)
        assert expected.shape[1] < len(prompt) + 20
        skipstone.enable(model, SKIP)
        assert torch.equal(model.generate(prompt[None], **options), expected)

    def test_without_a_tokenizer_they_are_an_error(self, model: PreTrainedModel, prompt: Tensor) -> None:
        skipstone.enable(model, SKIP)
        with pytest.raises(ValueError, match=r"stop_strings='abc' need the tokenizer: pass tokenizer="):
            model.generate(prompt[None], stop_strings="abc", max_new_tokens=3)


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
        output = skipstone.generate(model, left_padded(prompts), SKIP, **asked)
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
                sequences[:, : len(prompt) + place],
                **{**self.options, "max_new_tokens": 1, "output_scores": True, **SAMPLING},
            )
            torch.testing.assert_close(scores.exp(), law.scores[0].softmax(-1), atol=1e-5, rtol=1e-3)

    def test_what_is_not_asked_for_is_not_kept(self, model: PreTrainedModel, prompt: Tensor) -> None:
        output = skipstone.generate(model, prompt, SKIP, **self.options)
        assert (output.scores, output.logits, output.steps) == (None, None, None)


class TestSeeds:
    def test_torchs_generator_makes_sampling_reproducible(self, model: PreTrainedModel, prompt: Tensor) -> None:
        skipstone.enable(model, SKIP)
        texts = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            texts.append(model.generate(prompt[None], max_new_tokens=16, **SAMPLING).tolist())
        assert texts[0] == texts[1]
        assert texts[0] != texts[2]

    def test_two_calls_without_a_seed_differ(self, model: PreTrainedModel, prompt: Tensor) -> None:
        torch.manual_seed(0)
        texts = [skipstone.generate(model, prompt, SKIP, max_new_tokens=16, **SAMPLING).new_tokens for _ in range(2)]
        assert texts[0] != texts[1]

    def test_greedy_decoding_leaves_torchs_generator_alone(self, model: PreTrainedModel, prompt: Tensor) -> None:
        before = torch.get_rng_state()
        skipstone.generate(model, prompt, SKIP, max_new_tokens=8)
        assert torch.equal(torch.get_rng_state(), before)

    def test_num_return_sequences_through_enable(self, model: PreTrainedModel, prompt: Tensor) -> None:
        skipstone.enable(model, SKIP)
        found = model.generate(prompt[None], num_return_sequences=3, seed=9, max_new_tokens=12, **SAMPLING)
        assert found.shape == (3, len(prompt) + 12)
        alone = [skipstone.generate(model, prompt, SKIP, seed=9 + i, max_new_tokens=12, **SAMPLING) for i in range(3)]
        assert torch.equal(found, torch.cat([output.sequences for output in alone]))  # type: ignore[arg-type]


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

    def test_a_wish_keeps_the_defaults_it_leaves_open(self, prompt: Tensor) -> None:
        model = families.build("llama")
        model.generation_config.skipstone = {"method": "layerskip", "exit_layer": 2, "num_speculative_tokens": 3}
        wish = {"method": "layerskip", "num_speculative_tokens": 1}
        output = skipstone.generate(model, prompt, wish, max_new_tokens=12, record=True)
        assert output.steps is not None
        assert max(step.drafted[0] for step in output.steps) == 1
        assert skipstone.generate(model, prompt, "autoregressive", max_new_tokens=2).method == "autoregressive"

    def test_a_config_given_may_carry_the_method(self, model: PreTrainedModel, prompt: Tensor) -> None:
        config = GenerationConfig(max_new_tokens=4, skipstone={"method": "layerskip", "exit_layer": 1})
        assert skipstone.generate(model, prompt, generation_config=config).method == "layerskip"

    def test_assistant_early_exit_in_the_config_points_to_the_migration_page(self, prompt: Tensor) -> None:
        model = families.build("llama")
        model.generation_config.assistant_early_exit = 2
        skipstone.enable(model, SKIP)
        with pytest.raises(ValueError, match=r"assistant_early_exit=2 is not supported: use .*layerskip.*docs/migration\.md"):
            model.generate(prompt[None], max_new_tokens=3)

    def test_transformers_names_for_settings_are_taken_with_a_warning(self, model: PreTrainedModel, prompt: Tensor) -> None:
        wish = {"method": "layerskip", "assistant_early_exit": 2, "num_assistant_tokens": 3}
        with pytest.warns(
            FutureWarning, match=r"(assistant_early_exit|num_assistant_tokens) is called \w+ in skipstone"
        ) as caught:
            output = skipstone.generate(model, prompt, wish, max_new_tokens=12, record=True)
        assert len(caught) == 2
        assert output.steps is not None
        assert max(step.drafted[0] for step in output.steps) == 3


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
        passed_on = wrapper.generate(prompt[None], custom_generate=SKIP, max_new_tokens=16)
        assert torch.equal(passed_on, expected)
        skipstone.disable(wrapper)
        assert torch.equal(wrapper.generate(input_ids=prompt[None], max_new_tokens=16), expected)

    def test_a_prompt_adapter_is_refused_behind_custom_generate_too(self, prompt: Tensor) -> None:
        settings = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        wrapper: Any = peft.get_peft_model(families.build("llama"), settings).eval()
        with pytest.raises(ValueError, match=r"PROMPT_TUNING.* virtual tokens"):
            wrapper.generate(input_ids=prompt[None], custom_generate=SKIP, max_new_tokens=3)

    def test_a_device_map_on_one_device(self, prompt: Tensor, tmp_path: Path) -> None:
        families.cached("llama").save_pretrained(tmp_path)
        mapped = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="cpu")
        whole = AutoModelForCausalLM.from_pretrained(tmp_path, device_map={"": "cpu"})
        for loaded in (mapped, whole):
            output = skipstone.generate(loaded, prompt, SKIP, max_new_tokens=12)
            assert output.new_tokens == [alone(families.cached("llama"), prompt, max_new_tokens=12)]


class TestMigrationPage:
    """What docs/migration.md says, of transformers as much as of skipstone."""

    PAGE = ROOT / "docs" / "migration.md"

    def test_its_snippets_run_and_hold(self, tmp_path: Path) -> None:
        names = run_python(self.PAGE, tiny_checkpoint(tmp_path))
        assert names["after"].shape[1] > names["inputs"]["input_ids"].shape[1]

    def test_its_names_are_those_that_are_understood(self) -> None:
        rows = [[cell.strip("`") for cell in row] for row in table_rows(self.PAGE) if row[1] in ("transformers", "LayerSkip")]
        understood = {alias: name for kind in skipstone.METHODS.values() for alias, name in kind.aliases.items()}
        assert {row[0]: row[2] for row in rows} == understood

    @staticmethod
    def lengths(model: PreTrainedModel, **options: Any) -> list[int]:
        """Of `assistant_early_exit`: how many positions each scoring pass looks at (a draft pass looks at one)."""
        seen: list[int] = []
        handle = model.lm_head.register_forward_hook(lambda *args: seen.append(args[2].shape[1]))
        try:
            model.generate(families.prompts(1)[0][None], assistant_early_exit=2, max_new_tokens=24, **options)
        finally:
            handle.remove()
        return [length for length in seen if length > 1]

    def test_transformers_ignores_the_draft_length_as_a_keyword(self) -> None:
        model = families.build("llama")
        options = {"num_assistant_tokens": 4, "assistant_confidence_threshold": 0.0}
        assert set(self.lengths(model, **options)) != {5}
        model.generation_config.update(**options)
        assert max(self.lengths(model)) == 5
        assert self.lengths(model).count(5) >= 3

    def test_transformers_runs_the_early_layers_again(self) -> None:
        model, prompt = families.build("llama"), families.prompts(1)[0][None]
        model.generation_config.update(num_assistant_tokens=4, assistant_confidence_threshold=0.0)
        passed = [0, 0]
        for place, index in enumerate((0, 3)):
            hook = lambda _, args, place=place: passed.__setitem__(place, passed[place] + args[0].shape[1])  # noqa: E731
            model.model.layers[index].register_forward_pre_hook(hook)
        theirs = model.generate(prompt, assistant_early_exit=2, max_new_tokens=24)
        early, late = passed
        assert early > 1.5 * late
        passed[:] = [0, 0]
        model.generation_config.update(num_assistant_tokens=None, assistant_confidence_threshold=None)
        ours = skipstone.generate(model, prompt, LayerSkip(2, 4), max_new_tokens=24)
        assert passed[0] == passed[1]
        assert torch.equal(ours.sequences, theirs)  # type: ignore[arg-type]
