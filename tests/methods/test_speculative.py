"""Speculative decoding with a draft model: its exact law, its two stores, its schedules, and which pairs it refuses."""

import copy
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import skipstone
from skipstone import AdaSD, Autoregressive, Method, Speculative
from skipstone.decoding.draft import Step
from skipstone.decoding.loop import DecodingLoop, run
from skipstone.decoding.prefill import Prefill
from skipstone.decoding.request import Request
from skipstone.decoding.sampling import Sampling
from skipstone.decoding.session import Session
from skipstone.engines.choose_engine import EngineOptions, attach
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.native import library
from skipstone.engines.native.engine import NativeEngine
from skipstone.methods.adasd.thresholds import VerificationThreshold
from skipstone.methods.drafting import draft_model as draft_models
from skipstone.methods.drafting.draft_model import DraftModel, DraftModelDrafter
from tests.helpers import families, support
from tests.helpers.enumeration import VOCAB, proves
from tests.helpers.machine import decode, llama, mistral, near, prompt, small, start
from tests.helpers.support import assert_as_plain

pytestmark = pytest.mark.filterwarnings("ignore:.*x the speed of plain decoding:RuntimeWarning")
NATIVE = pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return llama()


@pytest.fixture(scope="module")
def draft(model: PreTrainedModel) -> PreTrainedModel:
    return near(model, 0.1)


@pytest.fixture
def exactly(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Target and draft model of three tokens in float64, the draft model's logits too."""
    monkeypatch.setattr(DraftModel, "project", lambda self, normed, head=None, shortlist=None: self.head(normed))
    target = llama(vocab=VOCAB, hidden=8, layers=2, head=2.0, seed=2).double()
    return target, near(target, 0.6)


LAWFUL: list[Any] = [
    pytest.param(lambda draft: Speculative(draft, 2), 3, id="constant"),
    pytest.param(lambda draft: Speculative(draft, 2, "confidence", 0.55), 4, id="confidence", marks=pytest.mark.slow),
    pytest.param(lambda draft: AdaSD(draft, 2, relaxed=False), 4, id="adasd", marks=pytest.mark.slow),  # may stop sooner
]


@pytest.mark.parametrize(("make", "new"), LAWFUL)
def test_the_law_is_exact(make: Any, new: int, exactly: tuple[Any, Any]) -> None:
    model, draft = exactly
    seen = proves(model, make(draft), new=new)
    most = new - 2
    assert {(most, accepted) for accepted in range(most + 1)} <= set(seen.steps)
    assert {1, most} <= seen.lengths


def test_a_relaxed_rule_has_another_law(exactly: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof can fail: tokens that AdaSD accepts against the target move the law."""
    monkeypatch.setattr(VerificationThreshold, "value", 0.9)
    with pytest.raises(AssertionError, match="the loop's law is the target's"):
        proves(exactly[0], AdaSD(exactly[1], 1, adaptive_length=False), new=3)


def check_side(drafter: DraftModelDrafter, row: int, text: list[int]) -> int:
    """The draft model's store holds what a fresh forward over the row's text gives. Returns how many tokens it lacks."""
    assert drafter.text[row] == text
    known = drafter.store.length[row]
    fresh = Session(drafter.draft_model, 1, len(text) + 1)
    fresh.admit(0, Request(torch.tensor(text), 1))
    fresh.prefill(len(text))
    drafter.store.check(fresh.store, row)
    return len(text) - known


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_after_every_commit_the_draft_models_store_is_that_of_a_fresh_forward(model: Any, temperature: float) -> None:
    """Ragged rows, some drafts accepted whole and some not: the store lacks one token or two."""
    requests = [Request(prompt(n, n), 30, sampling=Sampling(temperature, seed=n)) for n in (4, 9, 600 // 12)]
    decoder = start(Speculative(near(model, 0.02), 3), ModelRunner(model), requests, chunk=7)
    texts, lags = [request.prompt.tolist() for request in requests], set()
    while decoder.busy:
        step = decoder.step()
        for row, tokens in enumerate(step.tokens):
            texts[row] += tokens
            if tokens and row not in step.finished and not step.prefill:
                lags.add(check_side(decoder.session.drafter, row, texts[row]))  # type: ignore[arg-type]
    assert lags == {1, 2}


def test_steps_without_drafts_are_caught_up_with(model: Any, draft: Any) -> None:
    """Plain steps leave the draft model behind; a row may be four tokens behind and its neighbour one."""
    method, runner = Speculative(draft, 3), ModelRunner(model)
    requests = [Request(prompt(5), 40), Request(prompt(8, 1), 40)]
    decoder = start(method, runner, requests)
    session: Any = decoder.session
    drafter = session.drafter
    drafts, turn = drafter.propose_draft, 0
    drafter.propose_draft = lambda limits: drafts([0 if turn % 5 else limits[0], limits[1]])
    texts: list[list[int]] = [[], []]
    behind: set[int] = set()
    while decoder.busy:
        turn += 1
        behind |= {len(drafter.text[row]) - drafter.store.length[row] for row in range(2) if session.alive[row]}
        for row, tokens in enumerate(decoder.step().tokens):
            texts[row] += tokens
            if session.alive[row]:
                check_side(drafter, row, drafter.text[row])
    assert texts == [decode(method, runner, [request])[0][0] for request in requests]
    assert {1, 2, 3, 4, 5} <= behind


def decoded(decoder: DecodingLoop, texts: dict[int, list[int]], steps: int | None = None) -> Iterator[Step]:
    """Some steps, or all, with their tokens added to the texts of the rows."""
    while decoder.busy and steps != 0:
        step, steps = decoder.step(), None if steps is None else steps - 1
        for row in texts:
            texts[row] += step.tokens[row]
        yield step


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "standard"])
def test_a_prompt_that_the_target_has_run_and_the_draft_model_has_not_is_read_once(model: Any, temperature: float) -> None:
    """The target's cache has all of a prompt but its last token. The draft model reads 8 tokens of 9, then drafts, then goes on
    with another prompt."""
    decoder = DecodingLoop(
        Speculative(near(model, 0.05)).start(ModelRunner(model), 2, 64), chunk=8, decodes_during_prefill=True
    )
    drafter: Any = decoder.session.drafter
    texts = {row: prompt(9).tolist() for row in range(2)}
    decoder.admit(0, Request(prompt(9), 3))
    all(decoded(decoder, texts))
    texts[0] = prompt(9).tolist()
    decoder.admit(0, Request(prompt(9), 40, sampling=Sampling(temperature)), num_cached_tokens=8)
    assert drafter.store.length[0] == 0, "the draft model has forgotten it"
    all(decoded(decoder, texts, steps=2))
    decoder.admit(1, Request(prompt(20, 1), 30))
    texts[1] = prompt(20, 1).tolist()
    for step in decoded(decoder, texts):
        for row in {0, 1} - {*step.finished}:
            if decoder.session.alive[row]:
                check_side(drafter, row, texts[row])
    assert [len(text) for text in texts.values()] == [49, 50]


@NATIVE
def test_after_passes_with_prompts_the_draft_model_reads_what_all_rows_lack_in_one_pass(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, limit = ModelRunner(model, "native"), 10
    shape: Any = {"chunk": 8, "max_prompt_tokens_per_pass": limit, "decodes_during_prefill": True}
    decoder = DecodingLoop(Speculative(near(model, 0.05)).start(runner, 5, 128), **shape)
    drafter: Any = decoder.session.drafter
    requests = [Request(prompt(5 + row, row), 60) for row in range(3)] + [Request(prompt(50, row), 60) for row in (3, 4)]
    texts: dict[int, list[int]] = {row: [] for row in range(5)}
    for row in range(3):
        decoder.admit(row, requests[row])
    for step in decoded(decoder, texts):
        if not step.prefill:
            break
    for row in (3, 4):
        decoder.admit(row, requests[row])
    num_steps = 0
    while decoder.session.prefilling:
        before = sum(drafter.store.length)
        all(decoded(decoder, texts, steps=1))
        num_steps += 1
        assert 0 < sum(drafter.store.length) - before <= limit, "the limit is the draft model's, too"
    assert num_steps >= 10, "decoding rows lack as many tokens"
    passes, own = [], Prefill.run
    monkeypatch.setattr(Prefill, "run", lambda self, *given: passes.append(self) or own(self, *given))
    all(decoded(decoder, texts, steps=1))
    assert len(passes) == 1
    for row in range(5):
        check_side(drafter, row, drafter.text[row])
    all(decoded(decoder, texts))
    assert [*texts.values()] == [decode(Autoregressive(), runner, [request])[0][0] for request in requests]


def test_the_first_pass_feeds_what_is_lacking_and_no_more(model: Any) -> None:
    """With a draft model that is always right: two tokens, then one by one; the last draft token is never fed."""
    same, fed = copy.deepcopy(model), []
    same.model.layers[0].register_forward_pre_hook(lambda _, given: fed.append(given[0].shape[1]))
    _, stats, _ = decode(Speculative(same, 3), ModelRunner(model), [Request(prompt(9), 13)])
    assert stats.accepted == stats.drafted == 9
    assert fed == [9, 1, 1, 1, 2, 1, 1, 2, 1, 1]


@NATIVE
def test_a_draft_model_keeps_its_own_options(model: Any) -> None:
    """An object that was quantised, and has given its weights up, drafts for a target that was not."""
    drafter = llama(seed=1)
    attach(drafter, EngineOptions(quantize="int8", keep_weights=False))
    ModelRunner(drafter)
    found = Speculative(drafter).draft_model_for(ModelRunner(model, kv_dtype="bfloat16"))
    assert (found.engine.quantize, found.engine_options.kv_dtype) == ("int8", "bfloat16")
    assert_as_plain(model, prompt(9), Speculative(drafter, 3), max_new_tokens=20)


CHAINS: dict[str, Any] = {
    "constant": lambda draft: Speculative(draft, 4),
    "heuristic": lambda draft: Speculative(draft, 4, "heuristic"),
    "confidence": lambda draft: Speculative(draft, 4, "confidence", confidence_threshold=0.2),
    "adasd": AdaSD,
    "adasd, exact": lambda draft: AdaSD(draft, relaxed=False),
    "adasd, fixed": lambda draft: AdaSD(draft, adaptive_length=False),
    "adasd, some tokens": lambda draft: AdaSD(draft, draft_vocabulary=60),
}


@NATIVE
@pytest.mark.parametrize("settings", CHAINS)
def test_a_chain_in_one_call_is_that_of_single_tokens(
    settings: str, model: Any, draft: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ragged rows that end at different times, drafts of different lengths, ends of texts inside drafts."""
    eos, method = frozenset({3, 50, 60}), CHAINS[settings](draft)
    calls: list[int] = []
    own = NativeEngine.chain
    monkeypatch.setattr(NativeEngine, "chain", lambda self, *given: calls.append(1) or own(self, *given))
    found: list[Any] = []
    for chains in (True, False):
        monkeypatch.setattr(NativeEngine, "supports_chains", chains)
        requests = [Request(prompt(n, n), 10 + 9 * n, eos=eos) for n in (4, 9, 6)]
        decoder = start(method, ModelRunner(model, "native"), requests)
        steps = list(run(decoder))
        found.append([(step.tokens, step.drafted, step.draft_steps, step.accepted) for step in steps])
        assert (len(calls) > 5) == chains
        calls.clear()
    assert found[0] == found[1]
    assert any(len(set(drafted)) > 1 for _, drafted, _, _ in found[0])


def test_the_heuristic_schedule_is_transformers(model: Any, draft: Any) -> None:
    """Two more after a draft that was accepted whole, one fewer after any other, never below one (candidate_generator.py)."""
    _, _, steps = decode(Speculative(draft, 2, "heuristic"), ModelRunner(model), [Request(prompt(9), 300)])
    length, left, seen = 2, 300, set()
    for step in steps:
        if step.drafted[0]:
            assert step.drafted[0] == min(length, left - 1)
            length = length + 2 if step.accepted[0] == step.drafted[0] else max(1, length - 1)
            seen.add(step.drafted[0])
        left -= len(step.tokens[0])
    assert len(seen) > 4


def test_the_confidence_schedule_stops_behind_an_unsure_token(model: Any, draft: Any) -> None:
    """Against the draft model's own probabilities."""
    method = Speculative(draft, 6, "confidence", 0.5)
    out: Any = skipstone.generate(model, prompt(9), method, max_new_tokens=30, do_sample=False, record=True)
    text, stopped = prompt(9).tolist(), 0
    for step in out.steps:
        chain = [one.token for one in step.records[0] if one.q is not None]
        for place, token in enumerate(chain):
            said = draft(torch.tensor([text + chain[:place]])).logits[0, -1]
            assert int(said.argmax()) == token
            sure = float(said.softmax(-1).max()) >= 0.5
            assert sure or place == len(chain) - 1, "it stops behind the first unsure one"
            stopped += not sure
        text += step.tokens[0]
    assert stopped > 3


@pytest.mark.parametrize("sampled", [{}, {"do_sample": True, "temperature": 0.8, "seed": 4}], ids=str)
def test_another_family_in_another_dtype_drafts(model: Any, sampled: dict[str, Any]) -> None:
    helper = mistral(window=6, seed=0).to(torch.bfloat16)
    asked = families.padded([prompt(9), prompt(4, 1), prompt(14, 2)])
    method = Speculative(helper, 3, rejection_sample_method="coupled")
    stats = assert_as_plain(model, asked, method, max_new_tokens=40, **sampled).stats
    assert stats.drafted > stats.accepted > 0
    assert helper.dtype == torch.bfloat16


def saved(folder: Path, vocab: int, size: int, layers: int = 2, seed: int = 0, positions: int = 512) -> Path:
    """A model with a tokenizer of `vocab` tokens and `size` logits."""
    torch.manual_seed(seed)
    config = small(LlamaConfig, size, 32, layers)
    config.max_position_embeddings = positions
    LlamaForCausalLM(config).save_pretrained(folder)
    support.tokenizer(vocab).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("target_size", "draft_size", "ids"), [(97, 128, [3, 9, 4]), (128, 97, [3, 120, 4, 127])])
def test_padding_of_the_embedding_does_not_matter(tmp_path: Path, target_size: int, draft_size: int, ids: list[int]) -> None:
    """The same tokenizer, other numbers of logits (Qwen2.5 0.5B has 151936, 7B 152064). Ids that the draft model does not have
    may be in the prompt and in the text."""
    model, _ = skipstone.load(saved(tmp_path / "target", 97, target_size, 4))
    method = Speculative(str(saved(tmp_path / "draft", 97, draft_size)), 3, rejection_sample_method="coupled")
    for wish in ({}, {"do_sample": True, "temperature": 2.0, "seed": 3}):
        assert_as_plain(model, torch.tensor(ids), method, max_new_tokens=30, **wish)


def test_a_named_draft_model_is_loaded_once_where_it_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = skipstone.load(saved(tmp_path / "target", 97, 97, 4))
    name, loaded = str(saved(tmp_path / "draft", 97, 97)), []
    real = draft_models.load_named
    monkeypatch.setattr(draft_models, "load_named", lambda *given: loaded.append(given[1]) or real(*given))
    for method in (Speculative(name), Speculative(name, 3), AdaSD(name), Speculative(name, draft_dtype="bfloat16")):
        skipstone.generate(model, prompt(9), method, max_new_tokens=8)
    assert loaded == [torch.float32, torch.bfloat16]
    model.generation_config.skipstone = {"method": "speculative", "draft_model": name}
    assert skipstone.generate(model, prompt(9), max_new_tokens=8).method == "speculative"
    assert skipstone.generate(model, prompt(9), Speculative(), max_new_tokens=8).stats.drafted > 0  # type: ignore[union-attr]


@NATIVE
@pytest.mark.parametrize("kind", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_a_draft_model_may_be_quantised_where_its_target_is_not(tmp_path: Path, kind: str) -> None:
    """The text stays the target's own; drafts are the quantised model's, on an engine of its own."""
    folder, name = saved(tmp_path / "target", 97, 97, 4), str(saved(tmp_path / "draft", 97, 97))
    model, _ = skipstone.load(folder, engine="native")
    for method in (Speculative(name, draft_quantize=kind), AdaSD(name, relaxed=False, draft_quantize=kind)):
        assert assert_as_plain(model, prompt(9), method, max_new_tokens=24).quantize is None
        assert method.draft_model_for(ModelRunner(model)).engine.quantize == kind
    assert Speculative(name).draft_model_for(ModelRunner(model)).engine.quantize is None, "another setting, another model"
    quantised = ModelRunner(model, quantize="int8")
    assert Speculative(name).draft_model_for(quantised).engine.quantize == "int8", "as the target, unless it is set"
    eager, _ = skipstone.load(folder, engine="eager")
    method = Speculative(name, draft_quantize=kind)
    assert assert_as_plain(eager, prompt(9), method, max_new_tokens=24).engine == "eager", "the two need no engine in common"


def test_pairs_that_cannot_be_are_one_sentence(tmp_path: Path, model: Any, draft: Any) -> None:
    here = saved(tmp_path / "target", 97, 97, 4)
    target, _ = skipstone.load(here)
    renamed, smaller = saved(tmp_path / "renamed", 97, 97), saved(tmp_path / "smaller", 90, 90)
    short = saved(tmp_path / "short", 97, 97, positions=32)
    (renamed / "tokenizer.json").write_text((renamed / "tokenizer.json").read_text().replace('"stop"', '"halt"'))

    def refused(method: Method, words: str, kind: type[Exception] = ValueError, new: int = 8) -> None:
        with pytest.raises(kind, match=words) as found:
            skipstone.generate(target, prompt(9), method, max_new_tokens=new)
        assert "Traceback" not in str(found.value)

    positions = r"9 tokens \+ max_new_tokens=30 is more than the 32 positions of the draft model .*short.*target has 512"
    for make in (Speculative, AdaSD):
        refused(make(str(renamed)), r"renamed and the target .*/target have different vocabularies \(97 and 97 tokens, 1 of")
        refused(make(str(smaller)), r"smaller and the target .*target have different vocabularies \(90 and 97 tokens")
        refused(make(llama(vocab=50)), "LlamaForCausalLM and the target .* have vocabularies of different sizes, 50 and 97")
        refused(make(str(short)), positions, new=30)
        refused(make("no/such/folder"), "the draft model no/such/folder for .*target is not there", OSError)
        refused(make(), "no draft model for .*target: pass draft_model=")
        refused(make(7), "draft_model must be a folder, a hub id, one of nano-draft or a model of transformers, found 7")
        refused(make(draft, draft_device="cpu"), "one that is given as an object stays")
        refused(make(draft, draft_quantize="int8"), "one that is given as an object stays")
        refused(make(str(here), draft_quantize="int2"), 'draft_quantize must be "int8", "int4" or None, found \'int2\'')
        nowhere = rf"draft model {here} for .*target cannot be loaded: device 'nowhere' cannot be"
        refused(make(str(here), draft_device="nowhere"), nowhere)
        dtypes = 'draft_dtype must be "float32", "bfloat16", "float16" or None, found \'int8\''
        refused(make(str(here), draft_dtype="int8"), dtypes)
    refused(Speculative(target.model), r"for .*target has no LM head \(LlamaModel\): load it with AutoModelForCausalLM")


def test_a_method_keeps_no_model_alive(model: Any) -> None:
    helper = near(model, 0.1)
    alive = weakref.ref(helper)
    out: Any = skipstone.generate(model, prompt(9), AdaSD(helper), max_new_tokens=20)
    assert AdaSD(helper).report(model)["drafted"] == out.stats.drafted > 0
    assert AdaSD(helper).settings["draft_model"] == "LlamaForCausalLM"
    del helper
    gc.collect()
    assert alive() is None
