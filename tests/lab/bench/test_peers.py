"""Timed calls, and transformers' own decoding beside ours."""

import pytest
import torch

import skipstone
from skipstone.engines.model_runner import ModelRunner
from skipstone.hf.generation_defaults import neutral_defaults
from skipstone.lab.bench.peers.hf import HFAssisted, HFEarlyExit, HFGenerate, HFGenerateStatic, HFPromptLookup
from skipstone.lab.timing import measure
from skipstone.lab.timing.measure import MethodBackend, options_for
from tests.helpers import families, support

pytestmark = pytest.mark.slow

ENGINES = [
    HFGenerate(),
    HFGenerateStatic(),
    HFEarlyExit(2, 3, 0.4),
    HFPromptLookup(3),
    MethodBackend(skipstone.Autoregressive()),
    MethodBackend(skipstone.LayerSkip(exit_layer=2, num_speculative_tokens=3)),
]


@pytest.fixture
def llama():
    model = families.build("llama")
    yield model
    assert model.config.num_hidden_layers == 4, "a peer left the model cut"


def test_all_greedy_engines_emit_the_same_ids_and_ignore_eos_alike(llama):
    prompt = families.prompts(1)[0]
    with neutral_defaults(llama):
        plain = HFGenerate().generate(llama, prompt[None], options_for(24), 0).tokens
    llama.generation_config.eos_token_id = plain[7]
    stop = plain.index(plain[7]) + 1
    for ends, expected in ((False, plain), (True, plain[:stop])):
        with neutral_defaults(llama, stop_at_eos=ends):
            for engine in ENGINES:
                got = measure.measure(llama, engine, prompt, options_for(24), seed=0)
                assert got.tokens == expected, (engine, ends)


@pytest.mark.slow
def test_engines_ignore_a_models_own_sampling_defaults_and_give_them_back(llama):
    own = llama.generation_config
    own.do_sample, own.temperature, own.top_k, own.repetition_penalty = True, 5.0, 2, 3.0
    prompt, results = families.prompts(1)[0], []
    with neutral_defaults(llama):
        results = [measure.measure(llama, engine, prompt, options_for(16), seed=0).tokens for engine in ENGINES]
    assert all(
        tokens == support.alone(families.cached("llama"), prompt, max_new_tokens=16, do_sample=False) for tokens in results
    )
    assert llama.generation_config is own
    with pytest.raises(KeyError), neutral_defaults(llama):
        raise KeyError
    assert llama.generation_config is own


@pytest.mark.slow
def test_sampled_engines_draw_from_the_whole_distribution_and_repeat_with_the_seed(llama):
    prompt = families.prompts(1)[0]
    with neutral_defaults(llama):
        for engine in (HFGenerate(), ENGINES[-1]):
            state = torch.get_rng_state()
            first, again, other = (
                measure.measure(llama, engine, prompt, options_for(120, 30.0), seed).tokens for seed in (1, 1, 2)
            )
            assert first == again != other
            assert len(set(first)) > 57, "at temperature 30 nearly every token is as likely; top-k or top-p would show"
            assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(("drafts", "threshold", "widest"), [(6, 0.0, 7), (6, 1.0, 2)])
def test_early_exit_of_transformers_really_uses_the_settings_given(llama, drafts, threshold, widest):
    widths, prompt = [], families.prompts(1)[0]
    last = llama.model.layers[-1].register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
    with neutral_defaults(llama):
        HFEarlyExit(2, drafts, threshold).generate(llama, prompt[None], options_for(24), 0)
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
    engine, options = HFEarlyExit(2, 3, 0.0), {**options_for(8), "logits_processor": [fail]}
    with pytest.raises(RuntimeError, match="from a processor"):
        engine.generate(llama, families.prompts(1)[0][None], options, 0)
    assert llama.config.num_hidden_layers == 4
    engine.generate(llama, families.prompts(1)[0][None], options_for(8), 0)
    assert llama.config.num_hidden_layers == 4
    assert llama.generation_config is own
    assert own.to_dict() == before


@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon"])
def test_early_exit_of_transformers_is_refused_where_the_family_does_not_slice_its_layers(name):
    model = families.cached(name)
    reason = HFEarlyExit(1).refusal(model)
    assert model.config.num_hidden_layers == 4
    if name == "llama":
        assert reason is None
    else:
        assert "config.num_hidden_layers" in str(reason)
        with pytest.raises((IndexError, RuntimeError, AttributeError, ValueError)), neutral_defaults(model):
            HFEarlyExit(3).generate(model, families.prompts(1)[0][None], options_for(8), 0)
        assert model.config.num_hidden_layers == 4


def test_what_our_engine_compiles_is_compiled_before_anything_is_timed(llama, monkeypatch):
    asked, engine = [], ModelRunner(llama).engine
    monkeypatch.setattr(measure, "measure", lambda *_, **__: None)
    monkeypatch.setattr(engine, "warm_up", lambda rows, slots, kv_dtype: asked.append((rows, slots, kv_dtype)), raising=False)
    measure.warm_up(llama, [HFGenerate()], torch.arange(7), options_for(20))
    assert asked == []
    measure.warm_up(llama, [MethodBackend(skipstone.LayerSkip(exit_layer=2)), HFGenerate()], torch.arange(7), options_for(20))
    assert asked == [(1, 7 + 20 + 64, None)]


def test_a_draft_model_of_transformers_gives_the_same_text_and_gets_its_settings_back(llama, tmp_path, monkeypatch):
    drafter = families.build("llama", seed=1)
    monkeypatch.setattr("skipstone.lab.bench.peers.hf.load_model", lambda name, **_: drafter)
    before, prompt = drafter.generation_config.to_dict(), families.prompts(1)[0]
    with neutral_defaults(llama):
        plain, assisted = (
            measure.measure(llama, engine, prompt, options_for(16), seed=0).tokens
            for engine in (HFGenerate(), HFAssisted(str(tmp_path), 3, 0.0))
        )
    assert assisted == plain
    assert drafter.generation_config.to_dict() == before


def test_without_scikit_learn_a_threshold_that_moves_is_refused(llama, monkeypatch):
    """transformers then leaves the threshold where it is, and says nothing."""
    monkeypatch.setattr("skipstone.lab.bench.peers.hf.find_spec", lambda name: None)
    assert "which is not installed" in HFAssisted("x", 5, 0.4).refusal(llama)
    assert HFAssisted("x", 5, 0.0).refusal(llama) is None
    monkeypatch.setattr("skipstone.lab.bench.peers.hf.find_spec", lambda name: name)
    assert HFAssisted("x", 5, 0.4).refusal(llama) is None
