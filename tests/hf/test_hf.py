"""skipstone behind `model.generate`: types, streamers, scores, defaults, wrappers."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, TextStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

import skipstone
from skipstone import Autoregressive, EarlyExit
from skipstone.engines.native import library
from skipstone.hf.enable import _warn_once
from tests.helpers import families
from tests.helpers.settings import COUPLED, QUIET, SAMPLING, SKIP
from tests.helpers.support import alone, forwards, tokenizer

pytestmark = QUIET


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
        extra = {} if enabled else {"custom_generate": skipstone.custom_generate(SKIP)}
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

    def test_another_custom_function_passes_through(self, model: PreTrainedModel, prompt: Tensor) -> None:
        given: dict[str, Any] = {}

        def custom(model: Any, input_ids: Tensor, generation_config: Any, **kwargs: Any) -> str:
            given.update(kwargs, length=generation_config.max_length)
            return "theirs"

        skipstone.enable(model, SKIP)
        assert model.generate(prompt[None], custom_generate=custom, max_new_tokens=7) == "theirs"
        assert given["length"] == len(prompt) + 7
        seeded = model.generate(
            prompt[None], custom_generate=skipstone.custom_generate(COUPLED), seed=3, max_new_tokens=7, **SAMPLING
        )
        assert torch.equal(
            seeded,
            model.generate(
                prompt[None], custom_generate=skipstone.custom_generate(COUPLED), seed=3, max_new_tokens=7, **SAMPLING
            ),
        )

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

    def test_a_batch_has_no_streamer(self, model: PreTrainedModel) -> None:
        inputs = families.padded(families.prompts(2))
        with forwards(model) as count, pytest.raises(ValueError, match="streamers take one row, found a batch of 2"):
            skipstone.generate(model, inputs, SKIP, streamer=Recorder(), max_new_tokens=3)
        assert count == [0]


class TestAssistants:
    def test_an_assistant_that_is_enabled_too_is_named_with_what_to_do(self, model: PreTrainedModel, prompt: Tensor) -> None:
        skipstone.enable(model, SKIP)
        assistant = skipstone.enable(families.build("llama", layers=2), "autoregressive")
        with forwards(model) as count, pytest.raises(ValueError, match=r"assistant_model.*disable.*speculative"):
            model.generate(prompt[None], assistant_model=assistant, max_new_tokens=3)
        assert count == [0]
        skipstone.disable(assistant)
        model.generate(prompt[None], assistant_model=assistant, max_new_tokens=3)

    @pytest.mark.parametrize("name", ["assistant_model", "assistant_tokenizer"])
    def test_without_enable_the_method_that_does_it_is_named(self, model: PreTrainedModel, prompt: Tensor, name: str) -> None:
        with pytest.raises(ValueError, match=rf"{name} .*speculative"):
            skipstone.generate(model, prompt[None], SKIP, max_new_tokens=3, **{name: object()})

    @pytest.mark.parametrize("name", ["logits_to_keep", "labels", "cache_position"])
    def test_no_unrelated_option_is_blamed(self, model: PreTrainedModel, prompt: Tensor, name: str) -> None:
        with pytest.raises(ValueError, match=name) as refused:
            skipstone.generate(model, prompt[None], SKIP, max_new_tokens=3, **{name: 1})
        assert "did you mean" not in str(refused.value)


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


@pytest.mark.skipif(library.missing() is not None, reason="needs the native engine")
def test_enabling_a_model_that_transformers_computes_less_precisely_is_warned_of_once() -> None:
    _warn_once.cache_clear()
    skipstone.enable(families.build("llama"), SKIP, engine="native")  # float32: nothing to say
    skipstone.enable(families.build("llama").to(torch.bfloat16), SKIP, engine="eager")
    with pytest.warns(RuntimeWarning, match="bfloat16.*float32"):
        skipstone.enable(families.build("llama").to(torch.bfloat16), SKIP, engine="native")
    skipstone.enable(families.build("llama").to(torch.bfloat16), SKIP, engine="native")
