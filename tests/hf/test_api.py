"""The public API: text and token ids of any dtype in and out, streams, and how a wish becomes a method."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import BatchEncoding, PreTrainedModel

import skipstone
from skipstone import Autoregressive, EarlyExit, LayerSkip
from skipstone.engines.native import library
from skipstone.methods import resolve
from tests.helpers import families
from tests.helpers.support import alone, tokenizer

SKIP = LayerSkip(exit_layer=2, num_speculative_tokens=4)
# how fast a tiny model runs is no matter here, but where the warning itself is tested
pytestmark = pytest.mark.filterwarnings("ignore:.*x the speed of plain decoding:RuntimeWarning")
CHAT = [{"role": "user", "content": "hello the"}]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return families.cached("llama")


def text_of(model: PreTrainedModel, ids: list[int], new: int = 10) -> str:
    return tokenizer().decode(alone(model, torch.tensor(ids), max_new_tokens=new), skip_special_tokens=True)


class TestInputs:
    def test_a_text_gives_a_text_and_goes_into_a_stream(self, model: PreTrainedModel) -> None:
        options: dict[str, Any] = {"tokenizer": tokenizer(), "max_new_tokens": 10}
        output = skipstone.generate(model, "hello the", SKIP, **options)
        assert output.text == text_of(model, tokenizer()("hello the")["input_ids"])
        assert len(output.text) > 5
        steps = skipstone.stream(model, "hello the", SKIP, **options)
        assert [[token for step in steps for token in step.tokens[0]]] == output.new_tokens

    @pytest.mark.parametrize("texts", [["hello the", "a", "some words of the text"], ["abc"]], ids=len)
    @pytest.mark.parametrize("pads", [True, False], ids=["a pad token", "no pad token"])
    def test_texts_give_a_list(self, model: PreTrainedModel, texts: list[str], pads: bool) -> None:
        words = tokenizer() if pads else type(tokenizer())(tokenizer_object=tokenizer().backend_tokenizer)
        assert (words.pad_token_id is not None) is pads
        output = skipstone.generate(model, texts, SKIP, tokenizer=words, max_new_tokens=10)
        assert output.text == [text_of(model, words(text)["input_ids"]) for text in texts]
        several = skipstone.generate(
            model, texts[0], SKIP, tokenizer=words, do_sample=True, num_return_sequences=2, seed=1, max_new_tokens=4
        )
        assert [type(text) for text in several.text] == [str, str]

    def test_chats_go_through_the_template(self, model: PreTrainedModel) -> None:
        words, chats = tokenizer(), [CHAT, [*CHAT, {"role": "assistant", "content": "hm"}, {"role": "user", "content": "abc"}]]
        prompts = [words.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
        output = skipstone.generate(model, CHAT, SKIP, tokenizer=words, max_new_tokens=10)
        assert output.sequences[0, : len(prompts[0])].tolist() == prompts[0]
        several = skipstone.generate(model, chats, SKIP, tokenizer=words, max_new_tokens=10)
        assert [output.text, *several.text[1:]] == several.text == [text_of(model, ids) for ids in prompts]
        bare = type(words)(tokenizer_object=words.backend_tokenizer)
        with pytest.raises(ValueError, match="no chat template; pass the prompt as text"):
            skipstone.generate(model, CHAT, SKIP, tokenizer=bare, max_new_tokens=3)

    @pytest.mark.parametrize("kind", ["ids", "one row", "mapping", "batch encoding"])
    def test_ids_in_every_shape_give_ids(self, kind: str, model: PreTrainedModel) -> None:
        prompt = families.prompts(1)[0]
        inputs: Any = {
            "ids": prompt[None],
            "one row": prompt,
            "mapping": {"input_ids": prompt[None]},
            "batch encoding": BatchEncoding(families.padded([prompt])),
        }[kind]
        output = skipstone.generate(model, inputs, SKIP, max_new_tokens=10)
        assert output.new_tokens == [alone(model, prompt, max_new_tokens=10)]
        assert torch.equal(output.sequences, torch.cat([prompt, torch.tensor(output.new_tokens[0])])[None])
        assert output.sequences.dtype == torch.long
        assert output.text is None

    def test_special_tokens_are_left_out_of_the_text(self, model: PreTrainedModel) -> None:
        words = tokenizer()
        bias = [[[words.eos_token_id], 60.0]]
        options: dict[str, Any] = {"sequence_bias": bias, "eos_token_id": words.eos_token_id, "max_new_tokens": 5}
        output = skipstone.generate(model, "abc", SKIP, tokenizer=words, **options)
        assert output.new_tokens == [[words.eos_token_id]]
        assert output.text == ""


class TestStream:
    def test_the_steps_hold_the_text_in_order(self, model: PreTrainedModel) -> None:
        prompts, texts = families.prompts(3), [list[int]() for _ in range(3)]
        steps = list(skipstone.stream(model, families.padded(prompts), SKIP, max_new_tokens=20))
        for step in steps:
            for row, (text, tokens) in enumerate(zip(texts, step.tokens, strict=True)):
                text += tokens
                assert len(step.origin[row]) == len(tokens)
                assert step.accepted[row] == step.origin[row].count("draft")
        assert texts == [alone(model, prompt, max_new_tokens=20) for prompt in prompts]
        assert sorted(row for step in steps for row in step.finished) == [0, 1, 2]


class TestResolve:
    def test_an_object_a_name_and_a_mapping_mean_the_same_and_defaults_fill_in_for_the_method_they_name(self) -> None:
        wish = {"method": "layerskip", "exit_layer": 2, "num_speculative_tokens": 4}
        assert resolve(wish) == resolve(SKIP) == SKIP
        assert wish["method"] == "layerskip", "the user's mapping was changed"
        defaults = {"method": "layerskip", "exit_layer": 3, "num_speculative_tokens": 9, "confidence_threshold": 0.3}
        assert resolve(None, defaults) == resolve("layerskip", defaults) == LayerSkip(3, 9, 0.3)
        assert resolve({"method": "layerskip", "exit_layer": 1}, defaults) == LayerSkip(1, 9, 0.3)
        assert resolve({"exit_layer": 1}, defaults) == LayerSkip(1, 9, 0.3)
        assert resolve("early_exit", defaults) == EarlyExit()
        assert resolve(None, "autoregressive") == Autoregressive()
        # an object leaves only what has no other default to the model
        assert resolve(LayerSkip(num_speculative_tokens=5), defaults) == LayerSkip(3, 5, None)
        assert resolve(LayerSkip(2), defaults) == LayerSkip(2)
        assert resolve(EarlyExit(), defaults) == EarlyExit()
        assert resolve(LayerSkip(), "layerskip") == LayerSkip()
        with pytest.raises(ValueError, match=r"the key 'method' is missing in method=\{'exit_layer': 1\}"):
            resolve({"exit_layer": 1})

    def test_an_object_takes_its_exit_layer_from_the_model_on_every_path(self) -> None:
        model, ids = families.build("llama"), families.prompts(1)[0][None]
        model.generation_config.skipstone = {"method": "layerskip", "exit_layer": 2}
        method = LayerSkip(num_speculative_tokens=4)
        expected = skipstone.generate(model, ids, SKIP, max_new_tokens=8).sequences
        assert torch.equal(skipstone.generate(model, ids, method, max_new_tokens=8).sequences, expected)
        assert torch.equal(model.generate(ids, custom_generate=skipstone.custom_generate(method), max_new_tokens=8), expected)
        assert torch.equal(skipstone.enable(model, method).generate(ids, max_new_tokens=8), expected)

    def test_other_packages_names_are_taken_with_a_warning_and_once(self) -> None:
        with pytest.warns(FutureWarning, match="num_assistant_tokens is called num_speculative_tokens in skipstone"):
            assert resolve({"method": "layerskip", "num_assistant_tokens": 3}) == LayerSkip(None, 3)
        with pytest.warns(FutureWarning, match="assistant_early_exit is called exit_layer"):
            assert resolve("layerskip", {"method": "layerskip", "assistant_early_exit": 3}) == LayerSkip(3)
        with pytest.warns(FutureWarning), pytest.raises(ValueError, match="exit_layer is given twice"):
            resolve({"method": "layerskip", "exit_layer": 2, "assistant_early_exit": 2})


ENGINES = ["eager", *([] if library.missing() else ["native"])]
METHOD = LayerSkip(2, 3)
OPTIONS: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
KINDS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
ARRAYS = [np.int8, np.uint16, np.int32, np.int64, np.uint64, ">i4"]


@pytest.mark.parametrize(("engine", "kind"), [(ENGINES[i % len(ENGINES)], kind) for i, kind in enumerate(KINDS)], ids=str)
def test_tensors_of_any_integer_dtype(engine: str, kind: torch.dtype) -> None:
    model, batch = families.cached("llama"), families.padded(families.prompts(2))
    expected = skipstone.generate(model, batch, METHOD, engine=engine, **OPTIONS).sequences
    given = {name: value.to(kind) for name, value in batch.items()}
    result = skipstone.generate(model, given, METHOD, engine=engine, **OPTIONS).sequences
    assert result.dtype is torch.int64
    assert torch.equal(result, expected)
    alone = skipstone.generate(model, families.prompts(1)[0].to(kind), METHOD, engine=engine, **OPTIONS).sequences
    assert torch.equal(alone, expected[:1])


@pytest.mark.parametrize("kind", ARRAYS, ids=str)
def test_numpy_arrays(kind: Any) -> None:
    model, batch = families.cached("llama"), families.padded(families.prompts(2))
    expected = skipstone.generate(model, batch, METHOD, **OPTIONS).sequences
    arrays = {name: value.numpy().astype(kind) for name, value in batch.items()}
    assert torch.equal(skipstone.generate(model, arrays, METHOD, **OPTIONS).sequences, expected)
    ids, mask = arrays["input_ids"], arrays["attention_mask"]
    assert torch.equal(skipstone.generate(model, ids, METHOD, attention_mask=mask, **OPTIONS).sequences, expected)


@pytest.mark.parametrize("kind", [torch.int32, torch.uint8], ids=str)
def test_an_enabled_model_and_custom_generate(kind: torch.dtype) -> None:
    model: Any = families.build("llama")
    ids = families.prompts(1)[0][None]
    expected = skipstone.generate(model, ids, METHOD, **OPTIONS).sequences
    called = model.generate(ids.to(torch.int32), custom_generate=skipstone.custom_generate(METHOD), **OPTIONS)
    assert torch.equal(called, expected)
    skipstone.enable(model, METHOD)
    assert torch.equal(model.generate(ids.to(kind), **OPTIONS), expected)
