"""The public API: text and tensors in and out, streams, figures, how a wish becomes a method, the warning about speed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import BatchEncoding, PreTrainedModel

import skipstone
from skipstone import Autoregressive, EarlyExit, LayerSkip
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
    def test_a_text_gives_a_text(self, model: PreTrainedModel) -> None:
        output = skipstone.generate(model, "hello the", SKIP, tokenizer=tokenizer(), max_new_tokens=10)
        assert output.text == text_of(model, tokenizer()("hello the")["input_ids"])
        assert len(output.text) > 5

    def test_texts_of_several_lengths_give_a_list(self, model: PreTrainedModel) -> None:
        texts = ["hello the", "a", "some words of the text"]
        output = skipstone.generate(model, texts, SKIP, tokenizer=tokenizer(), max_new_tokens=10)
        assert output.text == [text_of(model, tokenizer()(text)["input_ids"]) for text in texts]

    def test_a_list_of_one_text_gives_a_list(self, model: PreTrainedModel) -> None:
        output = skipstone.generate(model, ["abc"], SKIP, tokenizer=tokenizer(), max_new_tokens=3)
        assert output.text == [text_of(model, tokenizer()("abc")["input_ids"], 3)]

    def test_a_text_with_several_continuations_gives_a_list(self, model: PreTrainedModel) -> None:
        options: dict[str, Any] = {"do_sample": True, "num_return_sequences": 2, "seed": 1, "max_new_tokens": 4}
        output = skipstone.generate(model, "abc", SKIP, tokenizer=tokenizer(), **options)
        assert isinstance(output.text, list)
        assert len(output.text) == 2

    def test_a_chat_goes_through_the_template(self, model: PreTrainedModel) -> None:
        ids = tokenizer().apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
        output = skipstone.generate(model, CHAT, SKIP, tokenizer=tokenizer(), max_new_tokens=10)
        assert output.text == text_of(model, ids)
        assert output.sequences[0, : len(ids)].tolist() == ids

    def test_chats_of_several_lengths_give_a_list(self, model: PreTrainedModel) -> None:
        chats = [CHAT, [*CHAT, {"role": "assistant", "content": "hm"}, {"role": "user", "content": "abc"}]]
        output = skipstone.generate(model, chats, SKIP, tokenizer=tokenizer(), max_new_tokens=10)
        prompts = [tokenizer().apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
        assert output.text == [text_of(model, ids) for ids in prompts]

    def test_a_chat_without_a_template_is_an_error(self, model: PreTrainedModel) -> None:
        words = type(tokenizer())(tokenizer_object=tokenizer().backend_tokenizer)
        with pytest.raises(ValueError, match="no chat template; pass the prompt as text"):
            skipstone.generate(model, CHAT, SKIP, tokenizer=words, max_new_tokens=3)

    def test_a_tokenizer_without_a_pad_token_can_pad_too(self, model: PreTrainedModel) -> None:
        words = type(tokenizer())(tokenizer_object=tokenizer().backend_tokenizer)
        assert words.pad_token_id is None
        texts = ["hello the", "a"]
        output = skipstone.generate(model, texts, SKIP, tokenizer=words, max_new_tokens=6)
        assert output.text == [text_of(model, words(text)["input_ids"], 6) for text in texts]

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
        prompts = families.prompts(3)
        texts: list[list[int]] = [[], [], []]
        steps = list(skipstone.stream(model, families.padded(prompts), SKIP, max_new_tokens=20))
        for step in steps:
            for row, (text, tokens) in enumerate(zip(texts, step.tokens, strict=True)):
                text += tokens
                assert len(step.origin[row]) == len(tokens)
                assert step.accepted[row] == step.origin[row].count("draft")
        assert texts == [alone(model, prompt, max_new_tokens=20) for prompt in prompts]
        assert sorted(row for step in steps for row in step.finished) == [0, 1, 2]

    def test_origins_say_where_every_token_comes_from(self, model: PreTrainedModel) -> None:
        steps = list(skipstone.stream(model, families.prompts(1)[0], SKIP, max_new_tokens=30))
        assert steps[0].origin == [["prefill"]]
        seen = set()
        for step in steps[1:]:
            *drafts, last = step.origin[0]
            assert set(drafts) <= {"draft"}
            full = len(step.tokens[0]) == step.drafted[0] + 1
            if not step.finished:
                assert last == ("bonus" if full else "recovered")
            seen.add(last)
        assert {"bonus", "recovered"} <= seen


class TestResolve:
    def test_an_object_a_name_and_a_mapping_mean_the_same(self) -> None:
        assert resolve(SKIP) is SKIP
        assert resolve("autoregressive") == Autoregressive()
        wish = {"method": "layerskip", "exit_layer": 2, "num_speculative_tokens": 4}
        assert resolve(wish) == SKIP
        assert wish["method"] == "layerskip", "the user's mapping was changed"

    def test_defaults_fill_in_for_the_method_they_name_only(self) -> None:
        defaults = {"method": "layerskip", "exit_layer": 3, "num_speculative_tokens": 9}
        assert resolve(None, defaults) == LayerSkip(3, 9)
        assert resolve("layerskip", defaults) == LayerSkip(3, 9)
        assert resolve({"method": "layerskip", "exit_layer": 1}, defaults) == LayerSkip(1, 9)
        assert resolve("early_exit", defaults) == EarlyExit()
        assert resolve(None, "autoregressive") == Autoregressive()

    def test_a_wish_without_a_method_changes_the_default_one(self) -> None:
        defaults = {"method": "layerskip", "exit_layer": 3, "num_speculative_tokens": 9}
        assert resolve({"exit_layer": 1}, defaults) == LayerSkip(1, 9)
        with pytest.raises(ValueError, match=r"the key 'method' is missing in method=\{'exit_layer': 1\}"):
            resolve({"exit_layer": 1})

    def test_an_object_leaves_only_what_has_no_other_default_to_the_model(self) -> None:
        defaults = {"method": "layerskip", "exit_layer": 3, "num_speculative_tokens": 9, "confidence_threshold": 0.3}
        assert resolve(LayerSkip(num_speculative_tokens=5), defaults) == LayerSkip(3, 5, None)
        assert resolve(LayerSkip(2), defaults) == LayerSkip(2)
        assert resolve(EarlyExit(), defaults) == EarlyExit()
        assert resolve(LayerSkip(), "layerskip") == LayerSkip()

    def test_an_object_takes_its_exit_layer_from_the_model_on_every_path(self) -> None:
        model, ids = families.build("llama"), families.prompts(1)[0][None]
        model.generation_config.skipstone = {"method": "layerskip", "exit_layer": 2}
        method = LayerSkip(num_speculative_tokens=4)
        expected = skipstone.generate(model, ids, SKIP, max_new_tokens=8).sequences
        assert torch.equal(skipstone.generate(model, ids, method, max_new_tokens=8).sequences, expected)
        assert torch.equal(model.generate(ids, custom_generate=skipstone.custom_generate(method), max_new_tokens=8), expected)
        assert torch.equal(skipstone.enable(model, method).generate(ids, max_new_tokens=8), expected)

    def test_other_packages_names_are_taken_with_a_warning_in_wishes_and_defaults(self) -> None:
        with pytest.warns(FutureWarning, match="num_assistant_tokens is called num_speculative_tokens in skipstone"):
            assert resolve({"method": "layerskip", "num_assistant_tokens": 3}) == LayerSkip(None, 3)
        with pytest.warns(FutureWarning, match="assistant_early_exit is called exit_layer"):
            assert resolve("layerskip", {"method": "layerskip", "assistant_early_exit": 3}) == LayerSkip(3)

    def test_a_setting_given_under_two_names_is_an_error(self) -> None:
        wish = {"method": "layerskip", "exit_layer": 2, "assistant_early_exit": 2}
        with pytest.warns(FutureWarning), pytest.raises(ValueError, match="exit_layer is given twice"):
            resolve(wish)
