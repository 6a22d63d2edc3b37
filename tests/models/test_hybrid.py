"""Models that mix attention with layers whose states have no positions: their texts are `generate`'s own whatever is drafted
and rejected, and a state that is not rolled back is found."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import skipstone
from skipstone import Autoregressive, LayerSkip, PromptLookup, Speculative
from skipstone.decoding.method import Method
from skipstone.decoding.request import Request
from skipstone.engines import recurrent_states as recurrent
from skipstone.engines.agreement import disagreement
from skipstone.engines.eager.eager import EagerEngine
from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.recurrent_states import StateHistory
from skipstone.methods import METHODS, resolve
from skipstone.models.decoder_model import DecoderModel
from skipstone.models.families import RECURRENT, layer_types, text_config
from skipstone.models.passes import Pass, SkipSet, Tree
from skipstone.models.trace import Trace, trace
from tests.helpers import families, support
from tests.helpers.pairwise import round_robin, slow_except
from tests.helpers.planted import assert_found, found_by
from tests.helpers.settings import QUIET

NEW = 24  # tokens of a text
MAIN = ("qwen3_next", "lfm2")
pytestmark = QUIET


METHOD: dict[str, Callable[[str], Method]] = {
    "autoregressive": lambda _: Autoregressive(),
    "prompt_lookup": lambda _: PromptLookup(num_speculative_tokens=4),
    "layerskip": lambda _: LayerSkip(exit_layer=2, num_speculative_tokens=4),
    "layerskip that scores anew": lambda _: LayerSkip(exit_layer=2, num_speculative_tokens=3, reuse_cache=False),
    "speculative": lambda _: Speculative(draft_model=families.cached("llama")),
    "speculative with a hybrid": lambda name: Speculative(draft_model=families.near(name), num_speculative_tokens=3),
}


@functools.cache
def asked(name: str, rows: int = 3) -> tuple[list[Tensor], list[list[int]]]:
    """Prompts that say something twice, of different lengths, and `generate`'s texts, none of them a near-tie."""
    prompts, expected = [], []
    for prompt in families.prompts(rows + 3):
        said = torch.cat([prompt, prompt[: len(prompt) // 2 + 1]])
        tokens, smallest = support.margin(families.cached(name), said, max_new_tokens=NEW)
        if smallest >= support.TIE and len(prompts) < rows:
            prompts.append(said)
            expected.append(tokens)
    assert len(prompts) == rows, "too many near-ties among the references"
    return prompts, expected


@round_robin(method=METHOD, name=slow_except(["lfm2"], MAIN))
def test_the_text_is_that_of_generate(name: str, method: str) -> None:
    prompts, expected = asked(name)
    assert {*layer_types(families.cached(name).config)} & {*RECURRENT}
    for rows in (1, 3):
        out = support.decode(families.cached(name), prompts[:rows], METHOD[method](name), max_new_tokens=NEW)
        assert out.new_tokens == expected[:rows]
        stats = out.stats
        assert stats is not None
        assert (stats.drafted > stats.accepted) == (method != "autoregressive")
    if "layerskip" in method or "hybrid" in method:
        assert stats.accepted > 10, "nothing was accepted that could have gone wrong"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in families.HYBRIDS if name not in MAIN])
def test_further_hybrids_give_the_text_of_generate(name: str) -> None:
    prompts, expected = asked(name, 2)
    for method in ("autoregressive", "prompt_lookup", "layerskip", "speculative"):
        out = support.decode(families.cached(name), prompts, METHOD[method](name), max_new_tokens=NEW)
        assert out.new_tokens == expected


@pytest.mark.parametrize("name", slow_except(["lfm2"], MAIN))
def test_a_sampled_text_does_not_depend_on_what_was_drafted(name: str) -> None:
    prompts, _ = asked(name)
    coupled = LayerSkip(exit_layer=2, num_speculative_tokens=4, rejection_sample_method="coupled")
    texts = [
        support.decode(families.cached(name), prompts, method, do_sample=True, seed=5, max_new_tokens=16).new_tokens
        for method in (Autoregressive(), coupled)
    ]
    assert texts[0] == texts[1]


@torch.inference_mode()
def audited(name: str, method: Method, steps: int = 6) -> int:
    """Decode the rows of `asked` and check the store of every row after every step. Returns tokens that were accepted."""
    from skipstone.decoding.loop import DecodingLoop

    runner, (prompts, _) = ModelRunner(families.cached(name)), asked(name)
    decoder = DecodingLoop(method.start(runner, len(prompts), 200))
    texts = [prompt.tolist() for prompt in prompts]
    for row, prompt in enumerate(prompts):
        decoder.admit(row, Request(prompt, 100))
    accepted = 0
    for _ in range(steps):
        step = decoder.step()
        accepted += sum(step.accepted)
        for row, tokens in enumerate(step.tokens):
            texts[row] += tokens
        if not step.prefill:
            for row, text in enumerate(texts):
                decoder.session.check(row, torch.tensor(text))
    return accepted


@torch.inference_mode()
def verified(name: str) -> None:
    """The verification of a model finds no difference."""
    facts, found = traced(name)
    difference = disagreement(EagerEngine(families.cached(name), facts), facts, found)
    assert difference.share <= difference.allowed, difference


def traced(name: str) -> tuple[DecoderModel, Trace]:
    model = families.cached(name)
    facts = DecoderModel(model)
    return facts, trace(model, facts.decoder, torch.nn.ModuleList(facts.layers), text_config(model), facts.max_positions)


def rolled_back(name: str) -> None:
    """Many steps with rejections leave states that equal those of the committed text."""
    assert audited(name, METHOD["layerskip"](name), 10) > 3


@pytest.mark.parametrize("name", slow_except(["lfm2"], MAIN))
def test_states_are_those_of_the_committed_text(name: str) -> None:
    assert audited(name, METHOD["layerskip"](name), 10) > 3, "steps with rejections"
    verified(name)


def not_restored(patch: pytest.MonkeyPatch) -> None:
    """A pass goes on from the state behind the rejected drafts."""
    own = StateHistory.begin

    def begin(self: StateHistory, first: int, committed: int, call: Any) -> Any:
        after = self.after
        again, states = own(self, first, committed, call)
        return (None, after) if again is not None else (again, states)

    patch.setattr(StateHistory, "begin", begin)


def not_replayed(patch: pytest.MonkeyPatch) -> None:
    """A pass behind a rejection begins at the base and forgets what was accepted since."""
    own = StateHistory.begin

    def begin(self: StateHistory, first: int, committed: int, call: Any) -> Any:
        return None, own(self, first, committed, call)[1]

    patch.setattr(StateHistory, "begin", begin)


CASES = [
    (plant, lambda proof=proof, name=name: proof(name))
    for plant in (not_restored, not_replayed)
    for proof in (rolled_back, verified)
    for name in MAIN
]


@found_by(*CASES)
def test_a_state_that_is_not_rolled_back_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], proof: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in MAIN:
        ModelRunner(families.cached(name))  # verified without the bug
    assert_found(plant, proof, monkeypatch)


def test_a_base_that_lags_is_moved_and_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for two tokens only, bases are moved by runs of their own all the time."""
    monkeypatch.setattr(recurrent, "MAX_REPLAYED_TOKENS", 2)
    for name in MAIN:
        prompts, expected = asked(name)
        out = support.decode(families.cached(name), prompts, METHOD["layerskip"](name), max_new_tokens=NEW)
        assert out.new_tokens == expected


def test_a_base_never_lags_far_behind() -> None:
    """Whatever is rejected, a trail holds a bounded number of tokens."""
    model, store = ModelRunner(families.cached("lfm2")), KVCache(1, 4, 400)
    ids = torch.randint(1, 97, (1, 400), generator=torch.Generator().manual_seed(1))
    longest = 0
    for start in range(0, 390, 2):  # tokens come in threes of which two are accepted
        places = torch.arange(start, start + 3)[None]
        store.reserve(start + 3)
        with torch.inference_mode():
            hidden = model.embed(ids[:, start : start + 3], places)
            model.run(hidden, Pass(places, places, None, slice(0, 1), start + 3, start), store, range(4))
        store.length = [start + 2]
        trail = store.state_histories.of(0, 0)
        assert trail.inputs is not None
        longest = max(longest, len(trail.inputs))
    assert recurrent.MAX_REPLAYED_TOKENS < longest <= recurrent.MAX_REPLAYED_TOKENS + 5


def test_what_cannot_be_continued_is_an_error() -> None:
    model, store = ModelRunner(families.cached("lfm2")), KVCache(1, 4, 64)
    store.reserve(64)

    def run(places: list[int], valid: list[bool] | None = None, tree: Tree | None = None, skip: SkipSet | None = None) -> None:
        at = torch.tensor([places])
        mask = None if valid is None else torch.tensor([valid])
        with torch.inference_mode():
            model.run(model.embed(at, at), Pass(at, at, mask, slice(0, 1), 40, None, tree), store, range(4), skip)

    run([0, 1, 2])
    with pytest.raises(ValueError, match="begins behind 5 tokens, and there are recurrent states behind 0 to 3 only"):
        run([5, 6])
    with pytest.raises(ValueError, match="leaves some out"):
        run([3, 4, 5], [True, False, True])
    with pytest.raises(ValueError, match="leaves some out"):
        run([3, 5])
    below = torch.ones(1, 2, 2, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match="along chains"):
        run([3, 4], tree=Tree(torch.tensor([3]), below, torch.tensor([[3, 4]])))
    with pytest.raises(ValueError, match="along chains"):
        run([3, 4], skip=SkipSet(frozenset([1])))


REFUSED = ("swift", "self_speculative skip_attention=1", "adadecode", "lookahead", "recycle")


@pytest.mark.parametrize("text", REFUSED)
@pytest.mark.parametrize("name", MAIN)
def test_methods_that_need_positions_are_refused_in_one_sentence(name: str, text: str) -> None:
    method = resolve(text)
    match = rf"^{method.name} .* recurrent states of a {name} model do not allow.*layerskip, prompt_lookup and speculative"
    with pytest.raises(ValueError, match=match):
        skipstone.generate(families.cached(name), families.prompts(1)[0][None], method, max_new_tokens=4)
    with pytest.raises(ValueError, match=match):
        skipstone.enable(families.cached(name), method)


def test_every_other_method_decodes_a_hybrid() -> None:
    """early_exit apart, whose text is another one."""
    known = {text.split()[0] for text in REFUSED} | {method.split()[0] for method in METHOD} | {"early_exit"}
    settings = {"adasd": {"draft_model": families.cached("llama")}}
    for kind in {*METHODS} - known:
        for name in MAIN:
            prompts, expected = asked(name)
            out = support.decode(families.cached(name), prompts, METHODS[kind](**settings.get(kind, {})), max_new_tokens=NEW)
            assert out.new_tokens == expected, kind


def test_hybrids_without_attention_or_costs_are_refused(tmp_path: Any) -> None:
    from skipstone.lab.search.search import SearchSettings, search
    from skipstone.lab.timing.measure_costs import costs_of

    with pytest.raises(ValueError, match="a recurrent state in every layer"):
        ModelRunner(families.build("lfm2", layer_types=["conv"] * 4))
    with pytest.raises(ValueError, match="never run"):
        costs_of(families.cached("lfm2"), (1,))
    with pytest.raises(ValueError, match="recurrent states"):
        search(families.cached("lfm2"), SearchSettings(families.prompts(1)), 1.0, tmp_path / "trials")


def test_transformers_own_generate_is_unchanged_by_the_patches() -> None:
    model = families.build("qwen3_next")
    prompt = families.prompts(1)[0]
    before = support.alone(model, prompt, max_new_tokens=8, do_sample=False)
    skipstone.generate(model, prompt[None], Autoregressive(), max_new_tokens=4)
    with torch.no_grad():
        logits = model(prompt[None]).logits
    assert support.alone(model, prompt, max_new_tokens=8, do_sample=False) == before
    assert torch.equal(logits, families.build("qwen3_next")(prompt[None]).logits)
