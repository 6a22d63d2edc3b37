"""Drafts that are picked from a part of the vocabulary: what is drafted is on the list, what is written is as without one."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from skipstone import (
    AdaDecode,
    AdaSD,
    Autoregressive,
    LayerSkip,
    Method,
    Request,
    Sampling,
    SelfSpeculative,
    Speculative,
    Swift,
)
from skipstone.decoding.draft import Draft
from skipstone.engines.choose_engine import EngineOptions
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.native import library
from skipstone.methods.drafting.draft_model import DraftModel
from skipstone.methods.drafting.shortlist import ShortlistMethod
from tests.helpers.enumeration import VOCAB, Pushing, proves
from tests.helpers.machine import llama, near, prompt, start
from tests.helpers.pairwise import pairwise, round_robin, slow_except

pytestmark = pytest.mark.filterwarnings("ignore:.*x the speed of plain decoding:RuntimeWarning")

VOCABULARY = 97
LISTED = {id for id in range(VOCABULARY) if id % 3}
DRAFTS = 5
WITHOUT_LIBRARY = pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))
ENGINES = ["eager", pytest.param("native", marks=WITHOUT_LIBRARY)]
METHODS: dict[str, Callable[..., Any]] = {
    "layerskip": lambda draft, rule, **more: LayerSkip(2, DRAFTS, rejection_sample_method=rule, **more),
    "self_speculative": lambda draft, rule, **more: SelfSpeculative((1,), (2,), None, DRAFTS, None, **more),
    "swift": lambda draft, rule, **more: Swift(0.5, DRAFTS, None, context_window=6, **more),
    "speculative": lambda draft, rule, **more: Speculative(draft, DRAFTS, rejection_sample_method=rule, **more),
    "adasd": lambda draft, rule, **more: AdaSD(draft, DRAFTS, relaxed=False, rejection_sample_method=rule, **more),
    "adadecode": lambda draft, rule, **more: AdaDecode("original", 0.1, DRAFTS, (1, 2), rejection_sample_method=rule, **more),
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return llama(VOCABULARY)


@pytest.fixture(scope="module")
def draft(model: PreTrainedModel) -> PreTrainedModel:
    return near(model, 0.05)


def written(path: Path, ids: Any) -> str:
    path.write_text(json.dumps(ids))
    return str(path)


@pytest.fixture
def listed(tmp_path: Path) -> str:
    """A file of the listed ids, in no order and some of them twice."""
    return written(tmp_path / "ids.json", [*sorted(LISTED, reverse=True), 5, 5, 1])


def texts_and_drafts(method: Method, runner: ModelRunner, requests: list[Request]) -> tuple[list[list[int]], list[int], int]:
    """The texts, all tokens that were drafted, and how many of them were accepted."""
    decoder, drafted, accepted = start(method, runner, requests), [], 0
    session: Any = decoder.session
    own = session.drafter.propose_draft

    def noting(limit: list[int]) -> Draft:
        found = own(limit)
        drafted.extend(found.tokens[found.valid].tolist())
        return found

    session.drafter.propose_draft = noting
    texts: list[list[int]] = [[] for _ in requests]
    while decoder.busy:
        step = decoder.step()
        accepted += sum(step.accepted)
        for row, more in enumerate(step.tokens):
            texts[row] += more
    return texts, drafted, accepted


def requests(rows: int, sampling: Sampling | None = None, new: int = 24) -> list[Request]:
    """Ragged ones."""
    return [Request(prompt(5 + 4 * row, row), new - 5 * row, sampling=sampling or Sampling()) for row in range(rows)]


def plain(runner: ModelRunner, asked: list[Request]) -> list[list[int]]:
    return texts_and_drafts(Autoregressive(), runner, asked)[0]


# ------------------------------------------------------------------------------------------------- texts and drafts


@pairwise(name=METHODS, engine=ENGINES, rows=(1, 2))
def test_greedy_drafts_are_on_the_list_and_texts_stay(
    name: str, engine: str, rows: int, model: Any, draft: Any, listed: str
) -> None:
    runner, asked = ModelRunner(model, engine), requests(rows)
    expected = plain(runner, asked)
    texts, free, _ = texts_and_drafts(METHODS[name](draft, "standard"), runner, asked)
    assert texts == expected
    assert not set(free) <= LISTED, "without a list other tokens are drafted too"
    texts, drafted, accepted = texts_and_drafts(METHODS[name](draft, "standard", draft_vocabulary=listed), runner, asked)
    assert texts == expected
    assert drafted
    assert set(drafted) <= LISTED
    assert 0 < accepted < len(drafted)


@round_robin(name=slow_except(("layerskip", "speculative", "adadecode"), METHODS), engine=ENGINES)
def test_coupled_drafts_are_on_the_list_and_texts_stay(name: str, engine: str, model: Any, draft: Any, listed: str) -> None:
    runner = ModelRunner(model, engine)
    for warped in ({"top_p": 0.9}, {"top_k": 7, "min_p": 0.01}):
        asked = requests(2, Sampling(1.1, seed=3, **warped))
        texts, drafted, accepted = texts_and_drafts(METHODS[name](draft, "coupled", draft_vocabulary=listed), runner, asked)
        assert texts == plain(runner, asked)
        assert drafted
        assert set(drafted) <= LISTED
        assert 0 < accepted < len(drafted)


@round_robin(name=METHODS, engine=ENGINES)
def test_one_token_and_all_of_them_are_lists_too(name: str, engine: str, model: Any, draft: Any) -> None:
    runner, asked = ModelRunner(model, engine), requests(2, new=12)
    expected, free, _ = texts_and_drafts(METHODS[name](draft, "standard"), runner, asked)
    texts, drafted, _ = texts_and_drafts(METHODS[name](draft, "standard", draft_vocabulary=1), runner, asked)
    assert texts == expected
    assert set(drafted) == {0}
    everything = METHODS[name](draft, "standard", draft_vocabulary=VOCABULARY)
    if name != "swift":  # which has learnt something by now
        assert texts_and_drafts(everything, runner, asked)[:2] == (expected, free)


def test_the_likeliest_listed_token_is_drafted(model: Any, listed: str) -> None:
    """The first draft after a prompt is the best of the listed ones after two layers, where the best of all is not listed."""
    runner, known = ModelRunner(model, "eager"), torch.tensor(sorted(LISTED))
    method, others = LayerSkip(2, 1, draft_vocabulary=listed), 0
    for seed in range(12):
        request = Request(prompt(6, seed), 4)
        decoder = start(method, runner, [request])
        first = decoder.step().tokens[0]
        session: Any = decoder.session
        with torch.inference_mode():
            found = int(session.drafter.propose_draft([1]).tokens[0, 0])
            ids = torch.cat([request.prompt, torch.tensor(first)])[None]
            states = model.model(ids, output_hidden_states=True).hidden_states[2][:, -1]
            logits = model.lm_head(model.model.norm(states))[0]
        assert found == known[logits[known].argmax()]
        others += int(logits.argmax()) not in LISTED
    assert others > 0


def test_swift_offers_no_runners_up_beyond_a_short_list(model: Any, tmp_path: Path) -> None:
    """Fewer tokens are listed than a place of its tree would offer."""
    few = [2, 30, 77]
    method = METHODS["swift"](None, "", draft_vocabulary=written(tmp_path / "few.json", few))
    for sampling in (Sampling(), Sampling(1.0, seed=4)):
        runner, asked = ModelRunner(model, "eager"), requests(2, sampling)
        texts, drafted, _ = texts_and_drafts(method, runner, asked)
        assert texts == plain(runner, asked)
        assert set(drafted) == set(few)


class Forbidding:
    """Leaves a text nothing of the list at every third place."""

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] % 3:
            return scores
        barred = torch.tensor([id in LISTED for id in range(scores.shape[1])])
        return scores.masked_fill(barred, float("-inf"))


class Watching:
    """Sees what texts it is asked about."""

    def __init__(self) -> None:
        self.seen: set[tuple[int, ...]] = set()

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.add(tuple(ids[0].tolist()))
        return scores


@pytest.mark.parametrize(
    ("name", "rule"),
    slow_except(
        [("layerskip", "standard"), ("swift", "standard"), ("speculative", "coupled")],
        itertools.product(METHODS, ("standard", "coupled")),
    ),
)
def test_processors_may_leave_nothing_of_the_list(name: str, rule: str, model: Any, draft: Any, listed: str) -> None:
    """No draft goes on there, and no processor is asked about a text that it has forbidden."""
    runner, watching = ModelRunner(model, "eager"), Watching()
    processors = (Forbidding(), watching)
    method = METHODS[name](draft, rule, draft_vocabulary=listed)
    for temperature in (0.0, 1.0):
        asked = requests(2, Sampling(temperature, seed=2, processors=processors))
        texts, drafted, _ = texts_and_drafts(method, runner, asked)
        if temperature == 0 or rule == "coupled":
            assert texts == plain(runner, asked)
        assert drafted
        assert set(drafted) <= LISTED
        for ids in watching.seen:
            wrong = [place for place in range(13, len(ids)) if place % 3 == 0 and ids[place] in LISTED]
            assert not wrong, "a token was drafted that its processors forbid"


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_adasds_figures_are_numbers(temperature: float, model: Any, draft: Any, listed: str) -> None:
    """Entropies and distances where most of the draft model's probabilities are 0, and where nothing is left of the list."""
    for wanted, processors in ((1, ()), (listed, (Forbidding(),))):
        method = AdaSD(draft, draft_vocabulary=wanted)
        decoder = start(method, ModelRunner(model, "eager"), requests(2, Sampling(temperature, processors=processors)))
        while decoder.busy:
            decoder.step()
        report: Any = method.report(model)
        assert report["drafted"] > 0
        assert all(math.isfinite(mean["sum"]) for mean in report["means"].values())
        assert report["means"]["distance_rejected"]["sum"] > 0


# ------------------------------------------------------------------------------------------------- the law


@pytest.mark.slow
@pytest.mark.parametrize("listed", [1, 2])
def test_the_law_is_exact(listed: int) -> None:
    small = llama(vocab=VOCAB, hidden=8, layers=2, head=2.0).double()
    seen = proves(small, LayerSkip(1, 2, draft_vocabulary=listed))
    assert {(2, 0), (2, 1), (2, 2)} <= set(seen.steps)


def test_warpers_and_processors_keep_the_law() -> None:
    small = llama(vocab=VOCAB, hidden=8, layers=2, head=2.0).double()
    seen = proves(small, LayerSkip(1, 2, draft_vocabulary=2), processors=[Pushing()], new=3)
    assert {(1, 0), (1, 1)} <= set(seen.steps)


@WITHOUT_LIBRARY
def test_the_law_is_exact_on_the_native_engine() -> None:
    small = llama(vocab=VOCAB, hidden=8, layers=2, head=2.0)
    seen = proves(small, LayerSkip(1, 2, draft_vocabulary=2), native=True, new=3)
    assert {(1, 0), (1, 1)} <= set(seen.steps)


# ------------------------------------------------------------------------------------------------- which ids


def of(wanted: Any) -> ShortlistMethod:
    return LayerSkip(2, draft_vocabulary=wanted)


def test_what_is_listed(model: Any, listed: str, tmp_path: Path) -> None:
    runner = ModelRunner(model)
    assert of(None).shortlist(runner) is None
    assert of(VOCABULARY).shortlist(runner) is None
    for wanted, expected in ((3, [0, 1, 2]), (listed, sorted(LISTED)), (Path(listed), sorted(LISTED))):
        found = of(wanted).shortlist(runner)
        assert found is not None
        assert found.tolist() == expected
        assert of(wanted).shortlist(runner) is found, "made once"
    written(Path(listed), [8])
    found = of(listed).shortlist(runner)
    assert found is not None
    assert found.tolist() == [8]
    resized = llama(VOCABULARY)
    assert of(90).shortlist(ModelRunner(resized)) is not None
    resized.resize_token_embeddings(80)
    with pytest.raises(ValueError, match="at most 80"):
        of(90).shortlist(ModelRunner(resized))


REFUSED: dict[str, tuple[Any, str]] = {
    "zero": (0, "draft_vocabulary must be at least 1, found 0"),
    "negative": (-4, "draft_vocabulary must be at least 1, found -4"),
    "too many": (98, "draft_vocabulary must be at most 97, the ids that can be drafted, found 98"),
    "far too many": (10**15, "at most 97"),
    "a bool": (True, "draft_vocabulary must be an integer, found True"),
    "a float": (3.0, r"draft_vocabulary must be an integer, found 3\.0"),
    "no JSON": ("[1, 2", r"ids\.json is no JSON"),
    "bytes": (b"\xff\xfe\x00", r"ids\.json is no JSON"),
    "no list": ('{"ids": [1]}', "must hold a list of token ids, such as"),
    "an empty list": ("[]", "must hold a list of token ids, such as"),
    "texts": ('["1"]', "must hold a list of token ids, such as"),
    "bools": ("[1, true]", "must hold a list of token ids, such as"),
    "an id too high": ("[1, 97, 98]", "must name ids from 0 to 96, found 97"),
    "a negative id": ("[1, -1]", "must name ids from 0 to 96, found -1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_listed_is_refused(case: str, model: Any, tmp_path: Path) -> None:
    wanted, expected = REFUSED[case]
    if isinstance(wanted, (str, bytes)):
        file = tmp_path / "ids.json"
        file.write_bytes(wanted if isinstance(wanted, bytes) else wanted.encode())
        wanted = str(file)
    runner = ModelRunner(model)
    for known in (1, 3):  # what was asked before, and is equal to a bool and a float
        of(known).check(runner)
    with pytest.raises(ValueError, match=expected):
        of(wanted).check(runner)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_refuses_before_any_work(name: str, model: Any, draft: Any, tmp_path: Path) -> None:
    runner = ModelRunner(model)
    with pytest.raises(ValueError, match="draft_vocabulary must be at most 97"):
        METHODS[name](draft, "standard", draft_vocabulary=98).check(runner)
    with pytest.raises(OSError, match=r"nowhere\.json"):
        METHODS[name](draft, "standard", draft_vocabulary=str(tmp_path / "nowhere.json")).check(runner)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_draft_model_drafts_no_id_that_its_target_has_not(engine: str) -> None:
    larger, states = DraftModel(llama(120), VOCABULARY, EngineOptions(engine)), torch.randn(1, 1, 32)
    assert larger.num_draftable_tokens == VOCABULARY
    with pytest.raises(ValueError, match="at most 97"):
        Speculative("x", draft_vocabulary=98).shortlist(larger)
    smaller = DraftModel(llama(80), VOCABULARY, EngineOptions(engine))
    assert smaller.num_draftable_tokens == 80
    for drafter in (larger, smaller):
        for wanted in (40, drafter.num_draftable_tokens):
            ids = Speculative("x", draft_vocabulary=wanted).shortlist(drafter)
            logits = drafter.logits(states, ids)[0, 0]
            assert logits.shape == (VOCABULARY,)
            assert logits.isfinite().nonzero()[:, 0].tolist() == list(range(wanted))
            torch.testing.assert_close(logits[:wanted], drafter.logits(states)[0, 0, :wanted])
