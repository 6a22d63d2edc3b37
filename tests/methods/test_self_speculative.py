"""Drafting with the target's own layers in fewer bits: the text stays the target's, drafts are the rounded copy's."""

import gc
from typing import Any

import pytest
import torch

import skipstone
from skipstone import SelfSpeculative
from skipstone.decoding.draft import RowVerdict
from skipstone.decoding.request import Request
from skipstone.engines import choose_engine as choice
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.native.engine import MAX_SKIP_SETS, NativeEngine
from skipstone.engines.native.weights import quantised_bytes
from skipstone.lab.bench import speedup_predictions
from skipstone.methods import resolve
from skipstone.methods.auto.auto import Auto
from skipstone.methods.speculative import Speculative
from skipstone.models.passes import SkipSet
from tests.helpers import families, support
from tests.helpers.machine import decode, llama, prompt, start
from tests.helpers.native import NATIVE_ONLY
from tests.helpers.pairwise import round_robin

pytestmark = [*NATIVE_ONLY, pytest.mark.filterwarnings("ignore:.*x the speed of plain decoding:RuntimeWarning")]
DRAFTS = 4
NAMES = ("llama", "gemma2", "phi3", "qwen3", "granite", "mistral")


def sharper(model: Any) -> Any:
    """The model with larger weights, whose rounding then changes some of its choices."""
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.mul_(1.5).add_(0.02 * torch.randn_like(weight))
    return model


@round_robin(kind=["int8", "int4"], name=NAMES)
def test_texts_are_the_targets_own_in_a_ragged_batch(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most drafts of int8 are right only if the copy reads the target's keys and values at the right places."""
    model = sharper(families.build(name))
    requests = [Request(prompt(n, n), 10 + 5 * n) for n in (4, 9, 6)]
    runner = ModelRunner(model, "native")
    plain, *_ = decode(skipstone.Autoregressive(), runner, requests)
    drafting: set[str | None] = set()
    own = NativeEngine.chain
    monkeypatch.setattr(NativeEngine, "chain", lambda self, *given: drafting.add(self.quantize) or own(self, *given))
    for threshold in (None, 0.2, "adaptive"):
        drafted, stats, _ = decode(SelfSpeculative((), (), None, DRAFTS, threshold, draft_quantize=kind), runner, requests)
        assert drafted == plain
        assert drafting == {kind}, "the copy drafts, and it alone"
        assert stats.drafted > 0
        assert stats.acceptance_rate > (0.6 if kind == "int8" else 0.1)


@pytest.mark.parametrize("skip", [((), ()), ((1,), (2,))], ids=["all layers", "a layer set"])
def test_sampled_texts_are_those_of_the_same_seed_without_drafts(skip: Any) -> None:
    model, method = sharper(llama()), SelfSpeculative(*skip, None, DRAFTS, None, draft_quantize="int4")
    for seed in range(3):
        options: dict[str, Any] = {"do_sample": True, "temperature": 1.3, "top_k": 0, "seed": seed, "engine": "native"}
        assert support.assert_as_plain(model, prompt(9), method, max_new_tokens=24, **options).stats.accepted > 0


@pytest.mark.parametrize("tied", [False, True])
def test_a_chain_in_one_call_is_that_of_single_tokens(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both begin with the copy's own embeddings, which are rounded if they are tied to its LM head."""
    model = sharper(families.build("llama", tie_word_embeddings=tied))
    found, engines, own = [], set(), NativeEngine.run
    monkeypatch.setattr(NativeEngine, "run", lambda self, *given: engines.add(self.quantize) or own(self, *given))
    for chains in (True, False):
        monkeypatch.setattr(NativeEngine, "supports_chains", chains)
        method = SelfSpeculative((), (), None, DRAFTS, 0.1, draft_vocabulary=60, draft_quantize="int4")
        requests, runner = [Request(prompt(n, n), 20) for n in (4, 9)], ModelRunner(model, "native")
        texts, stats, _ = decode(method, runner, requests)
        decoder = start(method, runner, requests)
        decoder.step()
        confidence = decoder.session.drafter.propose_draft([DRAFTS] * 2).confidence
        found.append(((texts, stats.drafted, stats.draft_steps, stats.accepted), confidence))
    assert found[0][0] == found[1][0]
    assert torch.allclose(found[0][1], found[1][1], rtol=1e-4)
    assert found[0][0][3] > 0
    assert engines == {None, "int4"}, "token by token the copy drafts, too"


def test_a_model_that_gave_its_weights_up_is_quantised_from_what_the_engine_has(tmp_path: Any) -> None:
    llama(layers=4).save_pretrained(tmp_path)
    support.tokenizer().save_pretrained(tmp_path)
    method, found = SelfSpeculative((), (), None, DRAFTS, draft_quantize="int4"), []
    for keeps in (True, False):
        model, _ = skipstone.load(tmp_path, engine="native", keep_weights=keeps)
        output: Any = skipstone.generate(model, prompt(9), method, max_new_tokens=24, do_sample=False)
        found.append((output.new_tokens, output.stats.accepted))
    assert found[0] == found[1]


def test_measured_costs_predict_nothing_for_drafts_in_fewer_bits() -> None:
    runner = ModelRunner(llama(layers=4), "native")
    assert speedup_predictions.described(SelfSpeculative((1,), draft_quantize="int8"), runner) is None
    assert speedup_predictions.described(SelfSpeculative((1,)), runner) is not None
    assert speedup_predictions.draft_model(Speculative("nowhere", draft_quantize="int8"), runner) is None


def test_copies_in_fewer_bits_have_a_limit_together_and_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = families.build("llama", hidden_size=64)
    model = ModelRunner(raw, "native")
    before, int4 = model.in_fewer_bits("int4"), SelfSpeculative(draft_quantize="int4")
    size = before.engine._weights.bytes  # type: ignore[attr-defined]
    monkeypatch.setattr(choice, "available_memory_bytes", lambda: int(1.2 * size / choice.COPIES_SHARE))
    for _ in range(3):
        assert model.in_fewer_bits("int4").engine is before.engine
    int4.check(model)
    with pytest.raises(ValueError, match=r"in int8 needs .* bytes, .* load the model with quantize"):
        SelfSpeculative(draft_quantize="int8").check(model)
    monkeypatch.setattr(choice, "available_memory_bytes", lambda: size // 2)
    assert int4 in Auto().methods(model), "a copy that exists takes no further room"
    other = ModelRunner(families.build("llama", hidden_size=64), "native")
    assert int4 not in Auto().methods(other), "auto makes no copy"


@round_robin(name=["llama", "gemma2", "phi3"], kind=["int8", "int4"])
def test_copies_take_about_what_was_expected(name: str, kind: str) -> None:
    raw = families.build(name, hidden_size=64, intermediate_size=256)
    taken = ModelRunner(raw, "native").in_fewer_bits(kind).engine._weights.bytes  # type: ignore[attr-defined]
    assert 0.9 * taken < quantised_bytes(raw, kind) < 1.1 * taken


def test_skip_sets_that_requests_name_are_not_kept_without_end() -> None:
    """A model of n layers has 4 ** n of them. A forgotten one is made again, and drafts the same."""
    model, texts = ModelRunner(llama(layers=12)), []
    sets = [tuple(one for one in range(1, 11) if number >> one & 1) for number in range(2, 2 * MAX_SKIP_SETS + 162, 2)]
    gc.collect()
    before = sum(isinstance(one, SkipSet) for one in gc.get_objects())
    for skip in (sets[-1], *sets):
        texts.append(decode(SelfSpeculative(skip, (), None, DRAFTS), model, [Request(prompt(6), 3)])[0])
    gc.collect()
    assert sum(isinstance(one, SkipSet) for one in gc.get_objects()) - before <= MAX_SKIP_SETS
    assert texts[0] == texts[-1]


ADAPTIVE = {  # -> (K, the first gamma)
    "self_speculative skip_attention=1": (12, 0.6),
    "self_speculative skip_attention=1 preset=paper": (12, 0.6),  # of the released notebooks
    "self_speculative skip_attention=1 preset=release": (8, 0.8),  # the defaults of the released function
    "self_speculative skip_attention=1 preset=adadecode": (12, 0.6),  # AdaDecode, appendix C
    "layerskip exit_layer=2 num_speculative_tokens=10 confidence_threshold=adaptive": (10, 0.6),
}
K = -1  # as many drafts as there may be
TRACE = [  # (accepted drafts, drafts, the change of gamma in thousandths): AR <- .5 AR + .5 accepted / drafts, from 0
    *((2, 2, 1), (1, 1, 1), (3, 3, 1)),  # AR = .5, .75, .875
    *((1, 1, -1), (K, K, 0)),  # .9375, .9688: not after a draft of K
    *((5, 6, -1), (6, 7, 1), (1, 1, -1), (6, 7, 1)),  # .9010, .8791, .9395, .8983
    (0, K, 1),  # .4492: too low after a draft of K as well
]


@pytest.mark.parametrize("text", ADAPTIVE)
def test_the_adaptive_threshold_is_that_of_the_released_code(text: str) -> None:
    """By hand: gamma <- .9 gamma + .1 gamma'. gamma' is gamma + .01 if AR < .9, gamma after a draft of K, else gamma - .01."""
    most, first = ADAPTIVE[text]
    rule = resolve(text).create_drafter(ModelRunner(llama(layers=4)), 2, 64).confidence  # type: ignore[attr-defined]
    for _ in range(2):  # the second request starts anew
        rule.reset(0)
        rule.reset(1)
        expected = first
        assert rule.thresholds == [first, first]
        for accepted, drafted, thousandths in TRACE:
            counts = [most if count == K else count for count in (accepted, drafted)]
            drafting = RowVerdict([*range(counts[0])], [], "", counts[1], 0, draft_steps=counts[1])
            rule.update([drafting, RowVerdict([], [], "", 0, 0)])
            expected += thousandths / 1000
            assert rule.thresholds == pytest.approx([expected, first], abs=1e-12), "the other row drafted nothing"
