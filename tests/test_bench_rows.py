"""The parts of the benchmark: prompts, timed calls, transformers' peers."""

import random

import pytest
import torch

import skipstone
from skipstone.bench import measure, prompts
from skipstone.bench.measure import Emitted, Row, Skipstone, neutral_defaults, options_for
from skipstone.bench.peers import HFEarlyExit, HFGenerate, HFPromptLookup, early_exit_refusal
from skipstone.bench.prompts import Document
from tests import families, support

ENGINES = [
    HFGenerate(),
    HFEarlyExit(2, 3, 0.4),
    HFPromptLookup(3),
    Skipstone(skipstone.Autoregressive()),
    Skipstone(skipstone.LayerSkip(exit_layer=2, num_speculative_tokens=3)),
]
WORDS = ["stop", "abc", " the", "ab", "bc", "xst", *"defghijklm"]


@pytest.fixture
def llama():
    model = families.build("llama")
    yield model
    assert model.config.num_hidden_layers == 4, "a peer left the model cut"


def documents(count, words=60):
    rng = random.Random(1)
    return [Document(f"text {i}", "".join(rng.choices(WORDS, k=words))) for i in range(count)]


def digests(chosen):
    return [prompt.digest for prompt in chosen]


def test_prompts_are_reproducible_from_the_seed_and_all_different():
    texts, tokenizer = documents(4), support.tokenizer()
    chosen = prompts.choose(texts, tokenizer, 9, 12, seed=3)
    assert digests(chosen) == digests(prompts.choose(texts, tokenizer, 9, 12, seed=3))
    assert digests(chosen) != digests(prompts.choose(texts, tokenizer, 9, 12, seed=4))
    assert len(set(digests(chosen))) == 9
    assert {len(prompt.ids) for prompt in chosen} == {12}
    assert len({prompt.source for prompt in chosen[:4]}) == 4, "every document gives one prompt before any gives a second"
    for prompt in chosen:
        text = next(text for text in texts if text.name == prompt.source)
        ids = tokenizer(text.text)["input_ids"]
        assert any(ids[i : i + 12] == prompt.ids.tolist() for i in range(len(ids))), "a prompt is a piece of its document"


def test_too_little_text_is_an_error_that_says_how_much_there_is():
    with pytest.raises(ValueError, match=r"only 0 different prompts of 500 tokens .* 2 documents, 3 are needed"):
        prompts.choose(documents(2), support.tokenizer(), 3, 500, seed=0)
    whole = [Document("one", "abc stop", whole=True)] * 3
    with pytest.raises(ValueError, match="only 1 different prompts"):
        prompts.choose(whole, support.tokenizer(), 2, 12, seed=0)


def test_prompts_from_json_lines_are_taken_whole(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "abc stop"}\n\n{"text": "stop the", "id": 4}\n')
    read = prompts.read(str(file))
    assert [(d.text, d.whole) for d in read] == [("abc stop", True), ("stop the", True)]
    tokenizer = support.tokenizer()
    chosen = prompts.choose(read, tokenizer, 2, 100, seed=0)
    assert {tuple(p.ids.tolist()) for p in chosen} == {tuple(tokenizer(d.text)["input_ids"]) for d in read}
    shortened = prompts.choose(read, tokenizer, 2, 3, seed=0)
    assert {tuple(p.ids.tolist()) for p in shortened} == {tuple(tokenizer(d.text)["input_ids"][-3:]) for d in read}
    file.write_text('{"prompt": "abc"}\n{"question": "abc"}\n')
    with pytest.raises(ValueError, match="line 2: expected a text under the key prompt or text, found question"):
        prompts.read(str(file))
    file.write_text("{broken\n")
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        prompts.read(str(file))


def test_prompts_from_folders_globs_and_installed_packages(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.py").write_text("a")
    (tmp_path / "sub" / "b.txt").write_text("b")
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe\x00\xff")
    assert [d.text for d in prompts.read(str(tmp_path))] == ["a", "b"]
    assert [d.text for d in prompts.read(str(tmp_path / "*.py"))] == ["a"]
    with pytest.raises(FileNotFoundError, match=r"no text file found at .*nothing"):
        prompts.read(str(tmp_path / "nothing"))
    installed = prompts.read(None)
    assert {d.name.partition("/")[0] for d in installed} == {"rich", "typer", "pydantic"}
    assert sum(len(d.text) for d in installed) > 500_000


def test_all_greedy_rows_emit_the_same_ids_and_ignore_eos_alike(llama):
    prompt = families.prompts(1)[0]
    with neutral_defaults(llama):
        plain = HFGenerate().generate(llama, prompt[None], options_for(0.0, 24), 0).tokens
    llama.generation_config.eos_token_id = plain[7]
    stop = plain.index(plain[7]) + 1
    for ends, expected in ((False, plain), (True, plain[:stop])):
        with neutral_defaults(llama, stop_at_eos=ends):
            for engine in ENGINES:
                got = measure.measure(llama, Row("row", engine), prompt, 0, 24, seed=0)
                assert got.tokens == expected, (engine, ends)


def test_rows_ignore_a_models_own_sampling_defaults_and_give_them_back(llama):
    own = llama.generation_config
    own.do_sample, own.temperature, own.top_k, own.repetition_penalty = True, 5.0, 2, 3.0
    prompt, results = families.prompts(1)[0], []
    with neutral_defaults(llama):
        results = [measure.measure(llama, Row("row", engine), prompt, 0, 16, seed=0).tokens for engine in ENGINES]
    assert all(
        tokens == support.alone(families.cached("llama"), prompt, max_new_tokens=16, do_sample=False) for tokens in results
    )
    assert llama.generation_config is own
    with pytest.raises(KeyError), neutral_defaults(llama):
        raise KeyError
    assert llama.generation_config is own


def test_sampled_rows_draw_from_the_whole_distribution_and_repeat_with_the_seed(llama):
    prompt = families.prompts(1)[0]
    with neutral_defaults(llama):
        for engine in (HFGenerate(), ENGINES[-1]):
            state = torch.get_rng_state()
            first, again, other = (
                measure.measure(llama, Row("row", engine, 30.0), prompt, 0, 120, seed).tokens for seed in (1, 1, 2)
            )
            assert first == again != other
            assert len(set(first)) > 57, "at temperature 30 nearly every token is as likely; top-k or top-p would show"
            assert torch.equal(state, torch.get_rng_state())


def test_rows_take_turns_prompt_by_prompt_in_rotating_order(llama):
    calls = []

    class Spy:
        def __init__(self, name):
            self.name, self.settings = name, {}

        def generate(self, model, prompt, options, seed):
            calls.append((self.name, int(prompt[0, 0]), seed))
            return Emitted([1])

    rows = [Row(name, Spy(name)) for name in "abc"]
    done = []
    measured = measure.interleave(llama, rows, [torch.tensor([10]), torch.tensor([20])], 4, 7, lambda: done.append(1))
    assert calls == [("a", 10, 7), ("b", 10, 7), ("c", 10, 7), ("b", 20, 8), ("c", 20, 8), ("a", 20, 8)]
    assert [(m.row, m.prompt) for m in measured] == [("a", 0), ("b", 0), ("c", 0), ("b", 1), ("c", 1), ("a", 1)]
    assert len(done) == 6


@pytest.mark.parametrize(("drafts", "threshold", "widest"), [(3, 0.0, 4), (6, 0.0, 7), (6, 1.0, 2)])
def test_early_exit_of_transformers_really_uses_the_settings_given(llama, drafts, threshold, widest):
    widths, prompt = [], families.prompts(1)[0]
    last = llama.model.layers[-1].register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
    with neutral_defaults(llama):
        HFEarlyExit(2, drafts, threshold).generate(llama, prompt[None], options_for(0.0, 24), 0)
    last.remove()
    # only scoring passes reach the last layer: the root and its drafts, and the first time the prompt too
    assert max(widths[1:]) == widest
    assert widths[0] == len(prompt) + widest - 1


def test_early_exit_of_transformers_leaves_the_model_as_it_was_even_after_an_error(llama):
    own = llama.generation_config

    def fail(ids, scores):
        assert llama.config.num_hidden_layers == 2, "the error happens while drafting, with the model cut"
        raise RuntimeError("from a processor")

    before = own.to_dict()
    engine, options = HFEarlyExit(2, 3, 0.0), {**options_for(0.0, 8), "logits_processor": [fail]}
    with pytest.raises(RuntimeError, match="from a processor"):
        engine.generate(llama, families.prompts(1)[0][None], options, 0)
    assert llama.config.num_hidden_layers == 4
    engine.generate(llama, families.prompts(1)[0][None], options_for(0.0, 8), 0)
    assert llama.config.num_hidden_layers == 4
    assert llama.generation_config is own
    assert own.to_dict() == before


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt2", "opt", "gpt_neox", "falcon"])
def test_early_exit_of_transformers_is_refused_where_the_family_does_not_slice_its_layers(name):
    model = families.cached(name)
    reason = early_exit_refusal(model)
    assert model.config.num_hidden_layers == 4
    if name in ("llama", "gemma3_text"):
        assert reason is None
    else:
        assert "config.num_hidden_layers" in str(reason)
        with pytest.raises((IndexError, RuntimeError, AttributeError, ValueError)), neutral_defaults(model):
            HFEarlyExit(3).generate(model, families.prompts(1)[0][None], options_for(0.0, 8), 0)
        assert model.config.num_hidden_layers == 4
