"""AdaSD against the paper's algorithm written out once more, with lists, float64 and transformers' own forward."""

import copy
import math
import random
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Any

import pytest
import torch
from scipy.spatial.distance import jensenshannon
from scipy.stats import entropy as scipy_entropy
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, RepetitionPenaltyLogitsProcessor

import skipstone
from skipstone import AdaSD, Autoregressive, Speculative
from skipstone.decoding import verify
from skipstone.decoding.draft import Draft
from skipstone.decoding.noise import Noise
from skipstone.methods.adasd.thresholds import GenerationThreshold, Variant, VerificationThreshold
from tests.helpers import families
from tests.helpers.machine import llama, near, prompt
from tests.helpers.pairwise import slow_except

pytestmark = pytest.mark.filterwarnings("ignore:.*x the speed of plain decoding:RuntimeWarning")
NEW = 40


@pytest.fixture(scope="module")
def model() -> Any:
    return llama()


@pytest.fixture(scope="module")
def draft(model: Any) -> Any:
    return near(model, 0.12)


@dataclass
class Trace:
    """Algorithm 1 for one greedy request: three lists, two thresholds."""

    target: Any
    draft: Any
    method: AdaSD
    window: int = 20
    processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    rejected_entropy: list[float] = field(default_factory=list)
    accepted_distance: list[float] = field(default_factory=list)
    rejected_distance: list[float] = field(default_factory=list)
    drafts_with: list[int] = field(default_factory=lambda: [0, 0])
    overruled: int = 0
    drafted: int = 0
    accepted: int = 0

    def scores(self, model: Any, text: list[int]) -> Tensor:
        ids = torch.tensor([text])
        return self.processors(ids, model(ids).logits[:, -1].float())[0]  # type: ignore[arg-type]

    def tau_v(self) -> float | None:
        a, r = self.accepted_distance, self.rejected_distance
        if not self.method.relaxed or not a or not r:
            return None
        if self.method.variant == "A":
            return mean(a)
        if self.method.variant == "B":
            return mean(a + r)
        s_a, s_r = self.drafts_with if self.method.variant == "C" else (1, 1)
        return (s_a * mean(a) + s_r * mean(r)) / (s_a + s_r)

    def step(self, text: list[int], room: int) -> list[int]:
        """Generation, verification, update. Returns what is committed."""
        tokens, entropies, said = list[int](), list[float](), list[Tensor]()
        while len(tokens) < min(self.window, room):
            said.append(self.scores(self.draft, text + tokens))
            entropies.append(float(scipy_entropy(said[-1].double().softmax(-1), base=2)))
            tokens.append(int(said[-1].argmax()))
            if self.method.adaptive_length and self.rejected_entropy and entropies[-1] > mean(self.rejected_entropy):
                break
        self.drafted += len(tokens)
        threshold, final, kept = self.tau_v(), None, 0
        gone, distances = list[tuple[float, float]](), list[float]()
        for place, token in enumerate(tokens):
            p = self.scores(self.target, text + tokens[:place])
            distance = float(jensenshannon(p.double().softmax(-1), said[place].double().softmax(-1), base=2))
            near_enough = threshold is not None and distance < threshold
            if not near_enough and int(p.argmax()) != token:
                final = int(p.argmax())
                gone.append((entropies[place], distance))
                break
            self.overruled += int(p.argmax()) != token
            distances.append(distance)
            kept += 1
        if final is None:
            final = int(self.scores(self.target, text + tokens).argmax())
        self.accepted += kept
        self.accepted_distance += distances
        self.rejected_entropy += [one for one, _ in gone]
        self.rejected_distance += [one for _, one in gone]
        self.drafts_with = [self.drafts_with[0] + bool(distances), self.drafts_with[1] + bool(gone)]
        return [*tokens[:kept], final]

    def write(self, text: list[int], new: int) -> list[int]:
        said: list[int] = [int(self.scores(self.target, text).argmax())]
        while len(said) < new:
            said += self.step(text + said, new - len(said) - 1)
        return said


SETTINGS: list[tuple[dict[str, Any], int]] = [
    *(({"preset": "paper"}, 20), ({"variant": "A"}, 20), ({"variant": "B"}, 20), ({"preset": "paper", "variant": "C"}, 20)),
    *(({"adaptive_length": False}, 5), ({"num_speculative_tokens": 4}, 4), ({"relaxed": False}, 20)),
    *(({"preset": "gen-only"}, 20), ({"preset": "verify-only"}, 5)),
]
"""Settings, and most draft tokens a step."""


@pytest.mark.parametrize(("settings", "window"), slow_except([SETTINGS[0], SETTINGS[-2]], SETTINGS), ids=str)
@pytest.mark.parametrize("engine", ["eager", "auto"])
def test_text_counts_and_means_are_the_papers(settings: dict[str, Any], window: int, engine: str) -> None:
    """Two rows of different lengths at once; every row has its own thresholds."""
    model: Any = llama()  # of its own, so that its report is of this run
    method = AdaSD(near(model, 0.12), **settings)
    if not method.relaxed:  # a better draft model, as the text cannot depend on it
        method = replace(method, draft_model=near(model, 0.04))
    asked = [prompt(9), prompt(4, 1)]
    traces = [Trace(model, method.draft_model, method, window) for _ in asked]
    expected = [trace.write(one.tolist(), NEW) for trace, one in zip(traces, asked, strict=True)]
    wish: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "engine": engine}
    out = skipstone.generate(model, families.padded(asked), method, **wish)
    assert out.new_tokens == expected
    assert out.lossless is not method.relaxed
    stats: Any = out.stats
    for name in ("drafted", "accepted", "overruled"):
        assert getattr(stats, name) == sum(getattr(trace, name) for trace in traces)
    means = method.report(model)["means"]
    if method.relaxed:
        together = [one for trace in traces for one in trace.accepted_distance]
        assert means["distance_accepted"]["count"] == len(together)
        assert means["distance_accepted"]["sum"] == pytest.approx(sum(together), abs=1e-3)
        assert means["distance_threshold"]["count"] > 0
    if method.adaptive_length:
        gone = [one for trace in traces for one in trace.rejected_entropy]
        assert means["entropy_rejected"]["sum"] == pytest.approx(sum(gone), abs=1e-3)
    plain = skipstone.generate(
        model, families.padded(asked), Autoregressive(), max_new_tokens=NEW, do_sample=False, eos_token_id=None
    )
    same = plain.new_tokens == out.new_tokens
    assert same == (stats.overruled == 0)
    assert (stats.overruled > 0) == (method.relaxed and method.variant != "A"), "A hardly relaxes at all"
    assert stats.accepted > 20
    assert stats.drafted > stats.accepted


def test_processors_are_part_of_what_is_compared_and_a_request_begins_anew(model: Any, draft: Any) -> None:
    method = AdaSD(draft)
    skipstone.generate(model, prompt(7, 5), method, max_new_tokens=NEW, do_sample=False)
    trace = Trace(model, draft, method, processors=LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3)]))
    expected = trace.write(prompt(9).tolist(), NEW)
    out: Any = skipstone.generate(
        model, prompt(9), method, max_new_tokens=NEW, do_sample=False, repetition_penalty=1.3, eos_token_id=None
    )
    assert out.new_tokens == [expected]
    assert (out.stats.overruled, out.stats.accepted) == (trace.overruled, trace.accepted)
    assert trace.accepted > 5


def test_sampled_texts_keep_what_is_near_and_say_so(model: Any, draft: Any) -> None:
    """Only the relaxed rule overrules the target, and not where the draft model is the target."""
    for relaxed, helper in ((True, draft), (False, draft), (True, copy.deepcopy(model))):
        overruled = accepted = 0
        for seed in range(3):
            wish = {"max_new_tokens": NEW, "do_sample": True, "temperature": 0.9, "seed": seed}
            out: Any = skipstone.generate(model, prompt(9), AdaSD(helper, relaxed=relaxed), **wish)
            overruled, accepted = overruled + out.stats.overruled, accepted + out.stats.accepted
        assert (overruled > 0) == (relaxed and helper is draft)
        assert accepted > 20


def test_presets_are_the_rows_of_the_papers_table_1() -> None:
    """Vanilla drafts five tokens (section 5.1), AssistedGen has transformers' defaults, and all verify as in Eq. 2."""
    vanilla, assisted = (Speculative(preset=name) for name in ("vanilla", "assistedgen"))  # type: ignore[call-arg]
    assert vanilla == Speculative() == Speculative(None, 5, "constant", None)
    theirs = GenerationConfig()._get_default_generation_params()
    assert theirs["num_assistant_tokens_schedule"] == "constant"
    counts = theirs["num_assistant_tokens"], theirs["assistant_confidence_threshold"]
    assert (assisted.num_speculative_tokens, assisted.confidence_threshold) == counts == (20, 0.4)
    assert assisted.schedule == "confidence"
    ours = [AdaSD(preset=name) for name in AdaSD.presets]  # type: ignore[call-arg]
    assert {method.rejection_sample_method for method in (vanilla, assisted, *ours)} == {"standard"}


class Scripted(Noise):
    """Accepts what is likely; draws the likeliest token."""

    def __init__(self) -> None:
        super().__init__(torch.zeros(1, dtype=torch.long))

    def accept(self, probability: Tensor, position: Tensor, stream: Any) -> Tensor:
        return probability >= 0.5

    def draw(self, p: Tensor, position: Tensor, stream: int) -> Tensor:
        return p.argmax(-1)


@pytest.mark.parametrize("lazily", [False, True])
@pytest.mark.parametrize("stochastic", [False, True])
def test_a_waived_token_stands_where_the_walk_gets_to_it(lazily: bool, stochastic: bool) -> None:
    """The target's tokens are 1 2 3 4 5, the draft's 1 7 3 8 5: only a waived second token makes the fourth reachable."""
    p = torch.full((1, 6, 9), 0.01)
    for place in range(6):
        p[0, place, place + 1] = 1.0
    p = p / p.sum(-1, keepdim=True)
    tokens = [1, 7, 3, 8, 5]
    q = torch.nn.functional.one_hot(torch.tensor([tokens]), 9).float() if stochastic else None

    def at(node: Tensor, *_: Tensor) -> Tensor:
        return p[:, int(node) + 1]

    for waived, kept, final, against in (
        ([], [1], 2, 0),
        ([1], [1, 7, 3], 4, 1),
        ([3], [1], 2, 0),
        ([1, 3], [1, 7, 3, 8, 5], 6, 2),
        ([0, 1, 2, 3, 4], [1, 7, 3, 8, 5], 6, 2),
    ):
        mask = torch.tensor([[place in waived for place in range(5)]])
        ids, position = torch.tensor([tokens]), torch.tensor([10])
        draft = Draft(ids, torch.ones_like(ids, dtype=torch.bool), None, q=q)
        if stochastic:
            verdict = verify.leviathan(draft, at if lazily else p, position, Scripted(), mask)
        elif lazily:
            verdict = verify.match(draft, at, position, Scripted(), mask)
        else:
            verdict = verify.match_greedy(draft, p.argmax(-1), mask)
        assert int(verdict.accepted) == len(kept)
        (row,) = verdict.tolist(draft)
        assert (row.overruled, row.tokens) == (against, [*kept, final])
        row.cut(2)
        assert row.overruled == sum(token != place + 1 for place, token in enumerate(kept[:2])), "cut tokens do not count"


@pytest.mark.parametrize("at_once", [1, 1100, 10**9])
def test_entropy_and_distance_of_logits_are_scipys(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "CACHED", at_once)
    dice = torch.Generator().manual_seed(0)
    one, other = (torch.randn(4, 3, 500, generator=dice) * 4 for _ in range(2))
    other[0, 0] = one[0, 0]
    one[1, 1, 40:] = float("-inf")
    p, q = one.double().softmax(-1), other.double().softmax(-1)
    expected = jensenshannon(p, q, base=2, axis=-1)
    said, entropies = verify.spread(other)
    assert said.double().numpy() == pytest.approx(q.numpy(), abs=1e-6)
    assert entropies.double().numpy() == pytest.approx(scipy_entropy(q, base=2, axis=-1), abs=1e-4)
    assert verify.js_distances(one, said, entropies).double().numpy() == pytest.approx(expected, abs=2e-3)
    assert verify.spread(one)[1].double().numpy() == pytest.approx(scipy_entropy(p, base=2, axis=-1), abs=1e-4)
    assert torch.equal(verify.spread(other)[0], said), "the arguments are left as they are"


@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_entropy_and_distance_of_many_large_or_nearly_equal_logits_are_scipys(offset: float) -> None:
    dice = torch.Generator().manual_seed(1)
    one = torch.randn(1, 4, 128_256, generator=dice) * 3
    other = one + torch.tensor([0.0, 0.001, 0.05, 0.8])[None, :, None] * torch.randn(1, 4, 128_256, generator=dice)
    p, q = one.double().softmax(-1), other.double().softmax(-1)
    said, entropies = verify.spread(other + offset)
    assert entropies.double().numpy() == pytest.approx(scipy_entropy(q, base=2, axis=-1), abs=1e-3)
    distances = verify.js_distances(one + offset, said, entropies).double().numpy()
    assert distances == pytest.approx(jensenshannon(p, q, base=2, axis=-1), abs=3e-3)


def test_the_papers_own_example_and_drafts_of_one_kind() -> None:
    """Twenty accepted drafts of mean distance .15 and twenty rejected ones of mean .49: the threshold is .32 (section 4.4)."""
    near = VerificationThreshold()
    for number in range(20):
        shift = 0.05 if number % 2 else -0.05
        near.add([0.15 + shift], [0.49 - shift])
    assert near.value == pytest.approx(0.32, abs=1e-7)
    for accepted, rejected in (([0.2, 0.4], []), ([], [0.2])):
        near = VerificationThreshold()
        assert near.value == 0, "no distance is below 0"
        near.add(accepted, rejected)
        assert near.value == 0, "accepted or rejected drafts alone are no threshold"


@pytest.mark.parametrize("variant", [None, "A", "B", "C"])
def test_thresholds_are_the_formulas_over_plain_lists(variant: Variant | None) -> None:
    dice, near, enough = random.Random(4), VerificationThreshold(variant), GenerationThreshold()
    assert enough.value == math.inf, "a new request begins without a threshold"
    a, r, drafts = list[float](), list[float](), [0, 0]
    for _ in range(31):
        distances, end = [dice.random() for _ in range(5)], dice.randrange(6)  # 5: all accepted
        near.add(distances[:end], distances[end : end + 1])
        enough.add(distances[end : end + 1])
        a, r, drafts = a + distances[:end], r + distances[end : end + 1], [drafts[0] + (end > 0), drafts[1] + (end < 5)]
    weights = {"A": (1, 0), "B": (len(a), len(r)), "C": tuple(drafts), None: (1, 1)}[variant]
    assert near.value == pytest.approx((weights[0] * mean(a) + weights[1] * mean(r)) / sum(weights), abs=1e-12)
    assert enough.value == pytest.approx(mean(r), abs=1e-12)
