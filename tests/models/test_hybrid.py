"""Models that mix attention with recurrent layers give the texts of `generate`, with any draft."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import skipstone
from skipstone import AdaSD, Auto, Autoregressive, Eagle3, Jacobi, LayerSkip, PromptLookup, Speculative
from skipstone.decoding.method import Method
from skipstone.decoding.request import Request
from skipstone.engines import recurrent_states as recurrent
from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.recurrent_states import StateHistory
from skipstone.lab.search.search import SearchSettings, search
from skipstone.lab.timing.measure_costs import costs_of
from skipstone.methods import METHODS, resolve
from skipstone.models.families import RECURRENT, layer_types
from skipstone.models.passes import Pass, SkipSet, Tree
from tests.helpers import families, support
from tests.helpers.conformance import eagle3_head
from tests.helpers.machine import decode
from tests.helpers.pairwise import slow_except
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
    "jacobi": lambda _: Jacobi(),
    "eagle3": lambda name: Eagle3(head=eagle3_head(name)),
    "auto": lambda _: Auto(),
    "adasd": lambda _: AdaSD(draft_model=families.cached("llama")),
    "speculative with a hybrid": lambda name: Speculative(draft_model=families.near(name), num_speculative_tokens=3),
}


@functools.cache
def texts_of(name: str, rows: int = 3) -> tuple[list[Tensor], list[list[int]]]:
    """Prompts that say something twice, of different lengths, and `generate`'s texts, none of them a near-tie."""
    prompts = [torch.cat([prompt, prompt[: len(prompt) // 2 + 1]]) for prompt in families.prompts(rows + 3)]
    return support.without_ties(families.cached(name), prompts, rows, max_new_tokens=NEW)


FAST = ("prompt_lookup", "layerskip", "speculative with a hybrid")
OTHERS = [name for name in families.HYBRIDS if name not in MAIN]
CELLS = [
    *((name, method) for name in MAIN for method in METHOD),
    *((name, method) for name in OTHERS for method in ("autoregressive", "prompt_lookup", "layerskip", "speculative")),
]


@pytest.mark.parametrize(("name", "method"), slow_except([("lfm2", method) for method in FAST], CELLS))
def test_the_text_is_that_of_generate(name: str, method: str) -> None:
    prompts, expected = texts_of(name, 3 if name in MAIN else 2)
    for rows, options in ((1, {"prefill_chunk_size": 4}), (3, {})):
        out = support.decode(families.cached(name), prompts[:rows], METHOD[method](name), max_new_tokens=NEW, **options)
        assert out.new_tokens == expected[:rows]
    stats = out.stats
    assert stats is not None
    if name in MAIN and method != "auto":
        assert {*layer_types(families.cached(name).config)} & {*RECURRENT}
        assert (stats.drafted > stats.accepted) == (method != "autoregressive")
        assert stats.accepted > 10 or not ("layerskip" in method or "hybrid" in method), "nothing could have gone wrong"


@pytest.mark.parametrize("name", slow_except(["lfm2"], MAIN))
def test_a_sampled_text_does_not_depend_on_what_was_drafted(name: str) -> None:
    coupled = LayerSkip(exit_layer=2, num_speculative_tokens=4, rejection_sample_method="coupled")
    options: dict[str, Any] = {"do_sample": True, "seed": 5, "max_new_tokens": 16}
    plain, drafted = (
        support.decode(families.cached(name), texts_of(name)[0], method, **options) for method in (Autoregressive(), coupled)
    )
    assert drafted.new_tokens == plain.new_tokens


def rolled_back(name: str) -> None:
    runner, requests = ModelRunner(families.cached(name)), [Request(prompt, 20) for prompt in texts_of(name)[0]]
    with torch.inference_mode():
        _, stats, _ = decode(METHOD["layerskip"](name), runner, requests, check=True)
    assert stats.accepted > 3


def verified(name: str) -> None:
    assert support.differing_place(families.cached(name)) is None


@pytest.mark.parametrize("name", slow_except(["lfm2"], MAIN))
def test_states_are_those_of_the_committed_text(name: str) -> None:
    rolled_back(name)
    verified(name)


Begin = Callable[..., tuple[Any, Any]]


def planted(begin: Callable[[StateHistory, Begin, Any], tuple[Any, Any]]) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        own = StateHistory.begin
        patch.setattr(StateHistory, "begin", lambda self, *given: begin(self, own, given))

    plant.__name__ = begin.__name__
    return plant


def from_behind(self: StateHistory, own: Begin, given: Any) -> tuple[Any, Any]:
    """A pass goes on from the state behind the rejected drafts."""
    after = self.after
    again, states = own(self, *given)
    return (None, after) if again is not None else (again, states)


def forgetful(self: StateHistory, own: Begin, given: Any) -> tuple[Any, Any]:
    """A pass behind a rejection begins at the base and forgets what was accepted since."""
    return None, own(self, *given)[1]


CASES = [
    (planted(begin), lambda proof=proof, name=name: proof(name))
    for begin in (from_behind, forgetful)
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
        prompts, expected = texts_of(name)
        out = support.decode(families.cached(name), prompts, METHOD["layerskip"](name), max_new_tokens=NEW)
        assert out.new_tokens == expected


def test_a_base_never_lags_far_behind() -> None:
    model, store = ModelRunner(families.cached("lfm2")), KVCache(1, 4, 400)
    ids = torch.randint(1, 97, (1, 400), generator=torch.Generator().manual_seed(1))
    longest = 0
    for start in range(0, 390, 2):  # tokens come in threes, and two of three are accepted
        places = torch.arange(start, start + 3)[None]
        store.reserve(start + 3)
        with torch.inference_mode():
            hidden = model.embed(ids[:, start : start + 3], places)
            model.run(hidden, Pass(places, places, None, slice(0, 1), start + 3, start), store, range(4))
        store.length = [start + 2]
        history = store.state_histories.of(0, 0)
        assert history.inputs is not None
        longest = max(longest, len(history.inputs))
    assert recurrent.MAX_REPLAYED_TOKENS < longest <= recurrent.MAX_REPLAYED_TOKENS + 5


def test_what_cannot_be_continued_is_an_error() -> None:
    model, store = ModelRunner(families.cached("lfm2")), KVCache(1, 4, 64)
    store.reserve(64)

    @torch.inference_mode()
    def run(places: list[int], valid: list[bool] | None = None, tree: Tree | None = None, skip: SkipSet | None = None) -> None:
        at, mask = torch.tensor([places]), None if valid is None else torch.tensor([valid])
        model.run(model.embed(at, at), Pass(at, at, mask, slice(0, 1), 40, None, tree), store, range(4), skip)

    run([0, 1, 2])
    below = torch.ones(1, 2, 2, dtype=torch.bool).tril()
    for attempt, words in (
        (lambda: run([5, 6]), "begins behind 5 tokens, and there are recurrent states behind 0 to 3 only"),
        (lambda: run([3, 4, 5], [True, False, True]), "leaves some out"),
        (lambda: run([3, 5]), "leaves some out"),
        (lambda: run([3, 4], tree=Tree(torch.tensor([3]), below, torch.tensor([[3, 4]]))), "along chains"),
        (lambda: run([3, 4], skip=SkipSet(frozenset([1]))), "along chains"),
    ):
        with pytest.raises(ValueError, match=words):
            attempt()


REFUSED = ("swift", "self_speculative skip_attention=1", "adadecode", "lookahead", "recycle")


@pytest.mark.parametrize("text", REFUSED)
def test_methods_that_need_positions_are_refused_in_one_sentence(text: str) -> None:
    assert {*METHODS} == {name.split()[0] for name in (*REFUSED, *METHOD, "early_exit", "mtp")}
    method, ids = resolve(text), families.prompts(1)[0][None]
    for name in MAIN:
        match = rf"^{method.name} .* recurrent states of a {name} model do not allow.*layerskip, .*, eagle3 and mtp"
        with pytest.raises(ValueError, match=match):
            skipstone.generate(families.cached(name), ids, method, max_new_tokens=4)
        with pytest.raises(ValueError, match=match):
            skipstone.enable(families.cached(name), method)


def test_hybrids_without_attention_or_costs_are_refused(tmp_path: Path) -> None:
    model = families.cached("lfm2")
    for attempt, words in (
        (lambda: ModelRunner(families.build("lfm2", layer_types=["conv"] * 4)), "a recurrent state in every layer"),
        (lambda: costs_of(model, (1,)), "never run"),
        (lambda: search(model, SearchSettings(families.prompts(1)), 1.0, tmp_path / "trials"), "recurrent states"),
    ):
        with pytest.raises(ValueError, match=words):
            attempt()
