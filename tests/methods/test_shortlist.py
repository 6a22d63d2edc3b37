"""Drafts that are picked from a part of the vocabulary: what is drafted is on the list, what is written is as without one."""

import itertools
import json
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
from skipstone.decoding.loop import run
from skipstone.engines.choose_engine import EngineOptions
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.native import library
from skipstone.methods.drafting.draft_model import DraftModel
from skipstone.methods.drafting.shortlist import ShortlistMethod
from tests.helpers.enumeration import VOCAB, Pushing, proves
from tests.helpers.machine import decode, llama, near, prompt, start
from tests.helpers.pairwise import round_robin, slow_except

pytestmark = pytest.mark.filterwarnings("ignore:.*x the speed of plain decoding:RuntimeWarning")

VOCABULARY = 97
LISTED = {id for id in range(VOCABULARY) if id % 3}
DRAFTS = 5
WITHOUT_LIBRARY = pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))
ENGINES = ["eager", pytest.param("native", marks=WITHOUT_LIBRARY)]
METHODS: dict[str, Callable[..., Any]] = {
    "layerskip": lambda draft, rule, **more: LayerSkip(2, DRAFTS, rejection_sample_method=rule, **more),
    "self_speculative": lambda draft, rule, **more: SelfSpeculative((1,), (2,), None, DRAFTS, None, **more),
    "swift": lambda draft, rule, **more: Swift(0.5, DRAFTS, None, context_window=6, rejection_sample_method=rule, **more),
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


def texts_and_drafts(method: Method, runner: ModelRunner, requests: list[Request]) -> tuple[list[list[int]], set[int], bool]:
    """The texts, all tokens that were drafted, and whether some were accepted and some rejected."""
    decoder, drafted, texts = start(method, runner, requests), set[int](), [list[int]() for _ in requests]
    session: Any = decoder.session
    own = session.drafter.propose_draft

    def noting(limit: list[int]) -> Draft:
        found = own(limit)
        drafted.update(found.tokens[found.valid].tolist())
        return found

    session.drafter.propose_draft = noting
    for step in run(decoder):
        for row, more in enumerate(step.tokens):
            texts[row] += more
    return texts, drafted, 0 < decoder.stats.accepted < decoder.stats.drafted


def requests(rows: int, sampling: Sampling | None = None, new: int = 24) -> list[Request]:
    """Ragged ones."""
    return [Request(prompt(5 + 4 * row, row), new - 5 * row, sampling=sampling or Sampling()) for row in range(rows)]


def plain(runner: ModelRunner, asked: list[Request]) -> list[list[int]]:
    return decode(Autoregressive(), runner, asked)[0]


@round_robin(name=slow_except(("layerskip", "swift", "adadecode"), METHODS), engine=ENGINES, rows=(2, 1))
def test_greedy_drafts_are_on_the_list_and_texts_stay(
    name: str, engine: str, rows: int, model: Any, draft: Any, listed: str
) -> None:
    """Lists of some, one or all tokens."""
    runner, asked = ModelRunner(model, engine), requests(rows)
    expected = plain(runner, asked)
    texts, free, _ = texts_and_drafts(METHODS[name](draft, "standard"), runner, asked)
    assert texts == expected
    assert not free <= LISTED, "without a list other tokens are drafted too"
    for wanted, allowed in ((listed, LISTED), (1, {0})):
        texts, drafted, both = texts_and_drafts(METHODS[name](draft, "standard", draft_vocabulary=wanted), runner, asked)
        assert texts == expected
        assert set() < drafted <= allowed
        assert both or wanted == 1
    everything = METHODS[name](draft, "standard", draft_vocabulary=VOCABULARY)
    if name != "swift":  # which has learnt something by now
        assert texts_and_drafts(everything, runner, asked)[:2] == (expected, free)


@round_robin(name=slow_except(("layerskip", "speculative"), METHODS), engine=ENGINES)
def test_coupled_drafts_are_on_the_list_and_texts_stay(name: str, engine: str, model: Any, draft: Any, listed: str) -> None:
    runner = ModelRunner(model, engine)
    for warped in ({"top_p": 0.9}, {"top_k": 7, "min_p": 0.01}):
        asked = requests(2, Sampling(1.1, seed=3, **warped))
        texts, drafted, both = texts_and_drafts(METHODS[name](draft, "coupled", draft_vocabulary=listed), runner, asked)
        assert texts == plain(runner, asked)
        assert set() < drafted <= LISTED
        assert both


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
    """A place of its tree would offer more tokens than are listed."""
    few = [2, 30, 77]
    method = METHODS["swift"](None, "coupled", draft_vocabulary=written(tmp_path / "few.json", few))
    runner = ModelRunner(model, "eager")
    for sampling in (Sampling(), Sampling(1.0, seed=4)):
        asked = requests(2, sampling, new=16)
        texts, drafted, _ = texts_and_drafts(method, runner, asked)
        assert (texts, drafted) == (plain(runner, asked), set(few))


class Forbidding:
    """Allows no listed token at every third place."""

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] % 3:
            return scores
        barred = torch.tensor([id in LISTED for id in range(scores.shape[1])])
        return scores.masked_fill(barred, float("-inf"))


class Watching:
    """Notes every text that it processes."""

    def __init__(self) -> None:
        self.seen: set[tuple[int, ...]] = set()

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.add(tuple(ids[0].tolist()))
        return scores


@pytest.mark.parametrize(
    ("name", "rule"),
    slow_except([("swift", "standard"), ("speculative", "coupled")], itertools.product(METHODS, ("standard", "coupled"))),
)
def test_processors_may_leave_nothing_of_the_list(name: str, rule: str, model: Any, draft: Any, listed: str) -> None:
    """No draft goes on there, and processors see no text that they have forbidden."""
    runner, watching = ModelRunner(model, "eager"), Watching()
    processors = (Forbidding(), watching)
    method = METHODS[name](draft, rule, draft_vocabulary=listed)
    for temperature in (0.0, 1.0):
        asked = requests(2, Sampling(temperature, seed=2, processors=processors), new=18)
        texts, drafted, _ = texts_and_drafts(method, runner, asked)
        if temperature == 0 or rule == "coupled":
            assert texts == plain(runner, asked)
        assert set() < drafted <= LISTED
        for ids in watching.seen:
            wrong = [place for place in range(13, len(ids)) if place % 3 == 0 and ids[place] in LISTED]
            assert not wrong, "a token was drafted that its processors forbid"


@pytest.mark.parametrize(
    ("listed", "more"),
    [
        pytest.param(1, {}, marks=pytest.mark.slow),
        pytest.param(2, {}, marks=pytest.mark.slow),
        (2, {"processors": [Pushing()], "new": 3}),
        pytest.param(2, {"native": True, "new": 3}, marks=WITHOUT_LIBRARY),
    ],
)
def test_the_law_is_exact(listed: int, more: dict[str, Any]) -> None:
    small = llama(vocab=VOCAB, hidden=8, layers=2, head=2.0)
    seen = proves(small if more.get("native") else small.double(), LayerSkip(1, 2, draft_vocabulary=listed), **more)
    drafts = more.get("new", 4) - 2
    assert {(drafts, accepted) for accepted in range(drafts + 1)} <= set(seen.steps)


def of(wanted: Any) -> ShortlistMethod:
    return LayerSkip(2, draft_vocabulary=wanted)


def test_what_is_listed(model: Any, listed: str, tmp_path: Path) -> None:
    runner = ModelRunner(model)
    assert of(None).shortlist(runner) is of(VOCABULARY).shortlist(runner) is None
    for wanted, expected in ((3, [0, 1, 2]), (listed, sorted(LISTED)), (Path(listed), sorted(LISTED))):
        found: Any = of(wanted).shortlist(runner)
        assert found.tolist() == expected
        assert of(wanted).shortlist(runner) is found, "made once"
    written(Path(listed), [8])
    found = of(listed).shortlist(runner)
    assert found.tolist() == [8]
    resized = llama(VOCABULARY)
    assert of(90).shortlist(ModelRunner(resized)) is not None
    resized.resize_token_embeddings(80)
    with pytest.raises(ValueError, match="at most 80"):
        of(90).shortlist(ModelRunner(resized))


REFUSED: list[tuple[Any, str]] = [
    (0, "draft_vocabulary must be at least 1, found 0"),
    (98, "draft_vocabulary must be at most 97, the ids that can be drafted, found 98"),
    (True, "draft_vocabulary must be an integer, found True"),
    (3.0, r"draft_vocabulary must be an integer, found 3\.0"),
    ("[1, 2", r"ids\.json is no JSON"),
    (b"\xff\xfe\x00", r"ids\.json is no JSON"),
    ('{"ids": [1]}', "must hold a list of token ids, such as"),
    ("[1, true]", "must hold a list of token ids, such as"),
    ("[1, 97, 98]", "must name ids from 0 to 96, found 97"),
    ("[1, -1]", "must name ids from 0 to 96, found -1"),
]


@pytest.mark.parametrize(("wanted", "words"), REFUSED)
def test_other_lists_are_refused(wanted: Any, words: str, model: Any, tmp_path: Path) -> None:
    if isinstance(wanted, (str, bytes)):
        file = tmp_path / "ids.json"
        file.write_bytes(wanted if isinstance(wanted, bytes) else wanted.encode())
        wanted = str(file)
    runner = ModelRunner(model)
    for known in (1, 3):  # equal to a bool and a float of the table
        of(known).check(runner)
    with pytest.raises(ValueError, match=words):
        of(wanted).check(runner)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_refuses_before_any_work(name: str, model: Any, draft: Any, tmp_path: Path) -> None:
    for wanted, kind, words in ((98, ValueError, "at most 97"), (str(tmp_path / "nowhere.json"), OSError, r"nowhere\.json")):
        with pytest.raises(kind, match=words):
            METHODS[name](draft, "standard", draft_vocabulary=wanted).check(ModelRunner(model))


@pytest.mark.parametrize(("size", "engine"), [(120, "eager"), (80, "eager"), pytest.param(80, "native", marks=WITHOUT_LIBRARY)])
def test_a_draft_model_drafts_no_id_that_its_target_has_not(size: int, engine: str) -> None:
    own, states, known = llama(size), torch.randn(1, 1, 32), min(size, VOCABULARY)
    drafter = DraftModel(own, VOCABULARY, EngineOptions(engine))
    assert drafter.num_draftable_tokens == known
    with pytest.raises(ValueError, match=f"at most {known}"):
        Speculative("x", draft_vocabulary=98).shortlist(drafter)
    for ids in (None, *(Speculative("x", draft_vocabulary=wanted).shortlist(drafter) for wanted in (40, known))):
        logits, count = drafter.logits(states, ids)[0, 0], known if ids is None else len(ids)
        assert logits.shape == (VOCABULARY,)
        assert logits.isfinite().nonzero()[:, 0].tolist() == list(range(count))
        torch.testing.assert_close(logits[:count], ModelRunner(own, engine).logits(states)[0, 0, :count])
