"""AdaDecode beyond the conformance suite: Algorithm 1's schedule, the law, what is learnt, what is refused."""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import skipstone
from skipstone import AdaDecode, Autoregressive, ExitHeads, LayerSkip
from skipstone.decoding.draft import Draft, RowVerdict
from skipstone.decoding.drafter import SessionView
from skipstone.decoding.loop import DecodingLoop
from skipstone.decoding.request import Request
from skipstone.decoding.sampling import Scores
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.native import library
from skipstone.engines.partial_forward import PartialForward
from skipstone.methods.adadecode import adadecode
from skipstone.methods.adadecode.adadecode import AdaDecodeCounts, AdaDecodeDrafter
from skipstone.methods.adadecode.heads import HeadsCard, new_card, usual_layers
from tests.helpers import families, support
from tests.helpers.enumeration import VOCAB, proves
from tests.helpers.machine import decode, llama, prompt
from tests.helpers.pairwise import slow_except

pytestmark = pytest.mark.filterwarnings("ignore:.*x the speed of plain decoding:RuntimeWarning")


class Scripted(ExitHeads):
    """Heads that give token 1 the probabilities of a script. Its next entry is that of every row, or of each row."""

    def __init__(self, card: HeadsCard, script: Sequence[Any]) -> None:
        super().__init__(card)
        self.script = iter(script)

    def logits(self, model: ModelRunner, index: int, hidden: Tensor, shortlist: Tensor | None = None) -> Tensor:
        """[B, n, V]."""
        said = torch.zeros(*hidden.shape[:2], model.head.weight.shape[0])
        p = torch.tensor(next(self.script), dtype=torch.double)
        said[..., 1] = (torch.logit(p, 1e-9) + math.log(said.shape[2] - 1)).view(-1, 1)
        return said


def scripted(layers: tuple[int, ...], script: Sequence[Any], model: Any = None) -> Scripted:
    return Scripted(new_card(ModelRunner(model or figure2()), layers, "original"), script)


@pytest.fixture
def calls(request: pytest.FixtureRequest) -> Iterator[list[tuple[int, int]]]:
    """(layer, tokens) of every call of a layer of the model `figure2`, while the list is not cleared."""
    model = figure2()
    seen: list[tuple[int, int]] = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, given, index=index: seen.append((index + 1, given[0].shape[1])))
        for index, layer in enumerate(model.model.layers)
    ]
    yield seen
    for hook in hooks:
        hook.remove()


@functools.cache
def figure2() -> Any:
    return llama(layers=3)


def drafted(method: AdaDecode, calls: list[tuple[int, int]], limits: list[int], ended: Sequence[int] = ()) -> Any:
    """The draft of a step after the prefill of one row for each limit, and of rows that have ended by then; it is scored."""
    decoder = DecodingLoop(method.start(ModelRunner(figure2()), 2, 40))
    for row, new in enumerate([20] * len(limits) + [*ended]):
        decoder.admit(row, Request(prompt(7 - 3 * row, row), new))
    while decoder.session.prefilling:
        decoder.step()
    calls.clear()
    session: Any = decoder.session
    with torch.inference_mode():
        draft = session.drafter.propose_draft([*limits, *([0] * (2 - len(limits)))])
        scores = session.score(draft)
        session.commit(draft, session.verify(draft, scores).tolist(draft))
    return draft


@pytest.mark.parametrize("ended", [False, True])
def test_deferred_layers_run_jointly_as_in_figure_2(ended: bool, calls: list[tuple[int, int]]) -> None:
    """t1 predicts t2 at layer 2, t2 predicts t3 at layer 1, t3 goes to the top: layer 2 of t2 and t3 is one call, and so is
    layer 3 of all three. A row that has ended costs no pass."""
    heads = scripted((1, 2), [False, True, True, False, False])
    draft = drafted(AdaDecode(heads), calls, [5], [1] if ended else [])
    assert calls == [(1, 1), (2, 1), (1, 1), (1, 1), (2, 2), (3, 3)]
    assert draft.exit_layer[0].tolist() == [2, 1]
    assert draft.forward.passes == [(0, 1, 1), (1, 2, 1), (0, 1, 1), (0, 1, 1), (1, 2, 2), (2, 3, 3)]


def test_with_as_many_predictions_as_are_allowed_the_newest_token_is_not_tested(calls: list[tuple[int, int]]) -> None:
    """After two predictions at layer 1 the third token goes up at once."""
    drafted(AdaDecode(scripted((1, 2), [True, True]), num_speculative_tokens=2), calls, [5])
    assert calls == [(1, 1), (1, 1), (1, 1), (2, 3), (3, 3)]


def test_rows_predict_on_their_own_and_wait_for_the_end_of_a_sweep(calls: list[tuple[int, int]]) -> None:
    """Row 0 predicts at layer 1, row 1 at layer 2; then row 0 nowhere, so that row 1 goes on alone."""
    script = [(True, False), (True, True), (False, True), (False, False), (True, False), (True, False)]
    draft = drafted(AdaDecode(scripted((1, 2), script)), calls, [5, 5])
    # sweep 1: both, then row 1 alone goes to layer 2. sweep 2: both at layer 1, where row 1 predicts; row 0's tokens go on to
    # layer 2, where it fails. sweep 3: row 1 alone predicts nowhere
    assert draft.valid.tolist() == [[True, False], [True, True]]
    assert draft.exit_layer[0, 0] == 1
    assert draft.exit_layer[1].tolist() == [2, 1]
    assert calls == [(1, 1), (2, 1), (1, 1), (2, 2), (1, 1), (2, 2), (3, 3)]


def test_algorithm_1_with_the_papers_constants() -> None:
    """By hand, for 8 layers: heads stand after L/4, L/2 and 3L/4, predict above .75, and five times at most."""
    model = llama(layers=8)
    assert usual_layers(8) == (2, 4, 6)
    tests = [
        *(0.7499, 0.7499, 0.7501),  # t1 predicts t2 at layer 6
        0.7501,  # t2 predicts t3 at layer 2
        *(0.7499, 0.7501),  # t3 predicts t4 at layer 4, to which it takes t2 along
        *(0.7501, 0.7501),  # t4 and t5 predict at layer 2; t6 is the fifth early prediction and goes to the top untested
    ]
    passes = [(0, 2, 1), (2, 4, 1), (4, 6, 1), (0, 2, 1), (0, 2, 1), (2, 4, 2), (0, 2, 1), (0, 2, 1), (0, 2, 1)]
    method = AdaDecode(scripted(usual_layers(8), tests, model), preset="paper")  # type: ignore[call-arg]
    assert replace(method, heads=None) == AdaDecode(), "the defaults are the paper's"
    assert (method.lossless, method.recheck, method.rejection_sample_method) == (True, False, "standard")
    decoder = DecodingLoop(method.start(ModelRunner(model), 1, 40))
    decoder.admit(0, Request(prompt(7), 20))
    decoder.step()
    session: Any = decoder.session
    with torch.inference_mode():
        draft = session.drafter.propose_draft([19])
        session.score(draft)
    assert draft.exit_layer[0].tolist() == [6, 2, 4, 2, 2]
    assert draft.forward.passes == [*passes, (2, 4, 3), (4, 6, 5), (6, 8, 6)]
    assert next(method.heads.script, None) is None, "every test took place"  # type: ignore[union-attr]


def test_one_original_head_at_threshold_0_is_layerskip() -> None:
    """The same drafts are accepted and rejected."""
    runner, found = ModelRunner(llama(layers=6)), []
    for method in (AdaDecode("original", 0.0, 4, exit_layers=(3,)), LayerSkip(3, 4)):
        _, _, steps = decode(method, runner, [Request(prompt(9), 60)])
        found.append([(step.tokens, step.drafted, step.accepted) for step in steps])
    assert found[0] == found[1]
    assert any(0 < accepted < drafted for _, (drafted,), (accepted,) in found[0])


@dataclass(frozen=True)
class Kind:
    """Heads of a family: T = sharpness * (I + noise)."""

    noise: float
    sharpness: float

    def heads(self, model: Any) -> ExitHeads:
        runner = ModelRunner(model)
        heads = ExitHeads(new_card(runner, (1, 2, 3), "square"))
        capped = getattr(model.config, "final_logit_softcapping", None)  # sharper logits would all be at the cap
        noise, sharpness = (self.noise / 3, 1.0) if capped else (self.noise, self.sharpness)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for head in heads.heads:
                weight: Any = head.weight
                weight += noise * torch.randn(weight.shape, generator=generator) / weight.shape[0] ** 0.5
                weight *= sharpness
        return heads


IDENTITY, RANDOM = Kind(0.0, 1.0), Kind(0.3, 3.0)
FEW_REJECTED = ("gemma2", "gemma3_text", "granite")
"""Families with heads that are hardly ever sure and wrong: they write more."""
CELLS = list(itertools.product(families.NAMES, (IDENTITY, RANDOM), (0.0, 0.3, 0.75)))


FAST, FULL = [("llama", RANDOM, 0.75)], [("llama", IDENTITY, 0.3), *CELLS[::11]]


@pytest.mark.parametrize(("family", "kind", "threshold"), slow_except(FAST, CELLS, full=FULL))
def test_every_family_keeps_its_text(family: str, kind: Kind, threshold: float) -> None:
    """At least 30 % of the tokens are predicted early, 20 predictions accepted and 20 rejected."""
    new = 200 if family in FEW_REJECTED and threshold == 0.75 else 80
    asked, expected = support.references(family, 3, max_new_tokens=new)
    model = families.cached(family)
    method = AdaDecode(kind.heads(model), threshold, exit_layers=(2, 3))
    out: Any = support.decode(model, asked, method, max_new_tokens=new)
    assert out.new_tokens == expected
    found = method.report(model)["exits"].values()
    accepted, rejected = (sum(one[what] for one in found) for what in ("accepted", "rejected"))
    assert sum(one["predicted"] for one in found) >= 0.3 * out.stats.tokens
    assert accepted >= 20
    assert rejected >= 20


@pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))
@pytest.mark.parametrize(
    ("kind", "threshold", "limit"), slow_except([(RANDOM, 0.6, 2)], [(IDENTITY, 0.3, 5), (RANDOM, 0.6, 2)])
)
def test_one_call_of_the_first_exit_does_what_sweeps_do(
    kind: Kind, threshold: float, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same predictions at the same layers, tests, passes and text, with ends of texts on the way."""
    calls: list[int] = []
    at_once = PartialForward.draft_greedily

    def counted(self: PartialForward, *arguments: Any, **more: Any) -> Any:
        found = at_once(self, *arguments, **more)
        calls.append(-1 if found is None else found.counts[0])
        return found

    monkeypatch.setattr(PartialForward, "draft_greedily", counted)
    seen = []
    for engine in ("eager", "native"):
        model, texts = families.build("llama"), []  # a model of its own: a report is that of the model's busiest state
        method = AdaDecode(kind.heads(model), threshold, limit, exit_layers=(1, 2, 3))
        for row, asked in enumerate(families.prompts(3)):
            more = {"eos_token_id": [5, 17, 33]} if row == 2 else {}
            out = skipstone.generate(model, asked[None], method, engine=engine, max_new_tokens=60, do_sample=False, **more)
            texts.append(out.new_tokens)
        report = method.report(model)
        seen.append((texts, [report[name] for name in ("tests", "exits", "passes", "steps", "drafted_steps")]))
    assert seen[0] == seen[1]
    assert {0, 1, limit} <= set(calls), "some chains ended at once, some later, some went all the way"
    tests, exits, *_ = seen[0][1]
    assert exits["2"]["predicted"] > 0, "no prediction came after a chain"
    assert tests > 50


@pytest.mark.parametrize(("threshold", "new"), slow_except([(0.5, 3)], [(0.5, 3), (0.0, 4), (0.5, 4), (0.7, 4)]))
def test_the_law_is_exact(threshold: float, new: int) -> None:
    model = llama(vocab=VOCAB, hidden=8, layers=3, head=2.0, seed=2).double()
    seen = proves(model, AdaDecode("original", threshold, 2, exit_layers=(1, 2)), new=new)
    assert any(accepted for _, accepted in seen.steps)
    assert any(accepted < drafted for drafted, accepted in seen.steps)


def test_without_verification_the_text_is_what_sure_heads_say() -> None:
    """Against transformers' hidden states: the first exit that is sure, otherwise, and after three pending tokens, the last
    layer."""
    model, asked = llama(layers=6), prompt(9)
    method = AdaDecode("original", 0.6, 3, exit_layers=(2, 4), verification=False)
    assert not method.lossless
    out: Any = skipstone.generate(model, asked, method, max_new_tokens=40, do_sample=False)
    assert out.lossless is False
    plain = skipstone.generate(model, asked, Autoregressive(), max_new_tokens=40, do_sample=False).new_tokens[0]
    ids, pending, wanted = asked, 0, []
    for place in range(40):
        with torch.no_grad():
            states = model(ids[None], output_hidden_states=True).hidden_states
        said = [model.lm_head(model.model.norm(states[layer][0, -1])).softmax(-1) for layer in (2, 4)]
        last = model.lm_head(states[6][0, -1])
        early = next((one for one in said if one.max() > 0.6), None)
        if place == 0 or pending == min(3, 39 - place + pending) or early is None:
            token, pending = last.argmax().item(), 0
        else:
            token, pending = early.argmax().item(), pending + 1
        wanted.append(token)
        ids = torch.cat([ids, torch.tensor([token])])
    assert out.new_tokens[0] == wanted
    assert wanted != plain
    assert out.stats.accepted == out.stats.drafted > 0


class WaivingDrafter(AdaDecodeDrafter):
    """Keeps every draft as AdaSD keeps near ones: the target draws its own token at every place, and loses."""

    def bind(self, view: SessionView) -> None:
        super().bind(view)
        self.needs_verification = True

    def waive_tokens(self, draft: Draft, scores: Scores) -> Tensor:
        return draft.valid


@pytest.mark.parametrize("rule", ["standard", "coupled"])
@pytest.mark.parametrize(
    "wish",
    [{"do_sample": False}, {"do_sample": True, "temperature": 0.9}, {"do_sample": True, "repetition_penalty": 1.3}],
    ids=str,
)
def test_without_verification_one_place_of_a_step_is_scored(
    wish: dict[str, Any], rule: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts of two rows are those of `WaivingDrafter`. Outputs have the target's probabilities all the same."""
    model, asked = llama(layers=6), families.padded([prompt(9), prompt(4, 1)])
    method = AdaDecode("original", 0.4, 3, exit_layers=(2, 4), verification=False, rejection_sample_method=rule)
    wish = {"max_new_tokens": 40, "seed": 3, "eos_token_id": [5, 17, 33], "engine": "eager", **wish}
    places: list[int] = []
    for name in ("finish", "greedy_tokens"):
        score = getattr(PartialForward, name)
        monkeypatch.setattr(PartialForward, name, lambda self, score=score: places.append(self.width) or score(self))
    out: Any = skipstone.generate(model, asked, method, **wish)
    assert max(places, default=1) == 1, "only steps without a draft score all of their places"
    assert out.stats.mean_acceptance_length > 1.5
    recorded: Any = skipstone.generate(model, asked, method, record=True, **wish)
    assert recorded.new_tokens == out.new_tokens
    monkeypatch.setattr(adadecode, "AdaDecodeDrafter", WaivingDrafter)
    expected: Any = skipstone.generate(model, asked, method, record=True, **wish)
    assert out.new_tokens == expected.new_tokens
    assert expected.stats.overruled > 0
    found, wanted = (
        [token.p for step in one.steps for row in step.records or [] for token in row] for one in (recorded, expected)
    )
    assert found == pytest.approx(wanted)


def test_deeper_heads_that_are_sure_of_another_token_end_predicting() -> None:
    model = llama(layers=6)
    base = AdaDecode("original", 0.6, 5, exit_layers=(1, 3, 5))
    plain = skipstone.generate(model, prompt(9), Autoregressive(), max_new_tokens=60, do_sample=False)
    found = {}
    for recheck in (False, True):
        out: Any = skipstone.generate(model, prompt(9), replace(base, recheck=recheck), max_new_tokens=60, do_sample=False)
        assert out.new_tokens == plain.new_tokens
        found[recheck] = out.stats
    assert found[True].drafted < found[False].drafted
    assert found[True].acceptance_rate > found[False].acceptance_rate


def test_heads_have_as_many_parameters_as_the_paper_says() -> None:
    """Llama-3.1-8B has d = 4096: three T make 48 M, in units of 1024^2 (section 2.1). Here d = 64."""
    shape: dict[str, Any] = {"model": "x", "layers": (8, 16, 24), "hidden_size": 64, "vocab_size": 1000}
    for card, count in ((HeadsCard(**shape), 48 * 1024**2 // 64**2), (HeadsCard(**shape, kind="full"), 3 * 64 * 1000)):
        assert sum(weight.numel() for weight in ExitHeads(card).parameters()) == count
    assert (usual_layers(32), usual_layers(4)) == ((8, 16, 24), (1, 2, 3))


def verdict(accepted: int, drafted: int, finished: bool = False) -> RowVerdict:
    final = "bonus" if accepted == drafted else "recovered"
    found = RowVerdict(list(range(accepted)), [0] * (accepted + 1), final, drafted, 0, drafted, drafted)
    found.finished = finished
    return found


def test_a_prediction_behind_a_rejected_one_is_neither_right_nor_wrong() -> None:
    tallies = AdaDecodeCounts([2, 4])
    tallies.record([[2, 4, 2, 4]], [verdict(1, 4)], [(0, 2, 1), (0, 8, 5)])
    tallies.record([[4], []], [verdict(0, 1, finished=True), verdict(0, 0)], [(0, 8, 2)])
    found = tallies.report()
    assert (found["exits"]["2"]["accepted"], found["exits"]["2"]["rejected"]) == (1, 0)
    assert (found["exits"]["4"]["accepted"], found["exits"]["4"]["rejected"]) == (0, 1), "where a text ends nothing is rejected"
    assert found["passes"] == {"0, 2, 1": 1, "0, 8, 2": 1, "0, 8, 5": 1}
    assert (found["steps"], found["drafted_steps"]) == (2, 2)
    tallies.tested(2, [True, False])
    tallies.tested(2, [True], stopped=False)
    found = tallies.report()
    assert (found["exits"]["2"]["tests"], found["exits"]["2"]["predicted"]) == (3, 2)
    assert (found["tests"], found["stops"]) == (2, 1)
