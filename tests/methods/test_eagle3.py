"""EAGLE-3 in the loop: draft logits at every depth are those of the reference, whatever the head's files look like."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper

from skipstone import Autoregressive, Eagle3, Request, Sampling
from skipstone.decoding.noise import TARGET
from skipstone.decoding.sampling import Sampler
from skipstone.engines import eagle3_head
from skipstone.engines.eagle3_head import Eagle3Head, load_eagle3
from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.native import library
from skipstone.models.eagle3 import feature_depths, read_files
from skipstone.models.passes import Pass
from tests.helpers import families, machine, planted
from tests.helpers.enumeration import VOCAB, Pushing, proves
from tests.helpers.feature_heads import LLAMA3_ROPE, eagle3_folder, edit_weights
from tests.helpers.feature_loop import DraftRecord, Run, finish, of_eagle3, prompts, record, requests, start
from tests.helpers.feature_references import speculators_oracles
from tests.helpers.native import NATIVE_ONLY
from tests.helpers.pairwise import round_robin, slow_except
from tests.helpers.right_heads import right_pair

LAYERS, DRAFTS = 8, 3
DEPTHS = (2, 4, 5)
"""2, N // 2 and N - 3."""


@pytest.fixture(scope="module")
def model() -> Any:
    return families.build("llama", layers=LAYERS)


@pytest.fixture(scope="module")
def plain(model: Any) -> list[list[int]]:
    """Greedy texts of `requests()`, prompts included."""
    return finish(start(Autoregressive(), ModelRunner(model, "eager"), requests()), requests()).texts


EAGLE: dict[str, dict[str, Any]] = {
    "eagle": {},
    "eagle, bin": {"file": "bin", "prefix": "model."},
    "eagle, own embedding": {"embedding": "own"},
    "eagle, LM head of the target": {"draft_vocab": None, "lm_head": False},
    "eagle, own LM head of all tokens": {"draft_vocab": None},
    "eagle, qwen3": {"kind": "qwen3", "norm_output": True},
    "eagle, qwen2": {"kind": "qwen2", "fc_norm": True},
    "eagle, other size": {"hidden_size": 40, "embedding": "own", "norm_before_fc": True},
    "eagle, scaled frequencies": {"rope_scaling": LLAMA3_ROPE, "norm_before_residual": True},
    "eagle, other frequencies": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "old_rope": False},
    "eagle, all": {
        **{"kind": "qwen3", "fc_norm": True, "norm_output": True, "norm_before_residual": True, "embedding": "own"},
        **{"rope_scaling": LLAMA3_ROPE, "old_rope": False, "file": "bin"},
    },
}
SPECULATORS: dict[str, dict[str, Any]] = {
    "speculators": {},
    "speculators, residual": {"norm_before_residual": True, "fc_norm": True},
    "speculators, output": {"norm_output": True, "norm_before_fc": True, "embedding": "own"},
    "speculators, qwen3": {"kind": "qwen3", "rope_scaling": LLAMA3_ROPE, "norm_output": True},
    "speculators, all tokens": {"draft_vocab": None, "kind": "qwen2"},
    "speculators, other size": {"hidden_size": 40, "embedding": "own", "norm_before_residual": True, "old_rope": False},
}
LAYOUTS = {**EAGLE, **{name: {"layout": "speculators", **options} for name, options in SPECULATORS.items()}}
LISTED: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "outputs, as SpecForge lists them": ({"layer_ids": [1, 3, 4]}, (2, 4, 5)),
    "outputs from the first layer on": ({"layer_ids": [0, 3, 6]}, (1, 4, 7)),
    "inputs, because the last is listed": ({"layer_ids": [1, 4, 8]}, (1, 4, 8)),
    "inputs, because the first are not": ({"layer_ids": [2, 4, 6]}, (2, 4, 6)),
    "inputs, as speculators lists them": ({"layout": "speculators", "layer_ids": [1, 3, 4]}, (1, 3, 4)),
    "the last state": ({"layout": "speculators", "layer_ids": [2, 4, 8]}, (2, 4, 8)),
    "four states": ({"layout": "speculators", "layer_ids": [1, 2, 4, 7], "fc_norm": True}, (1, 2, 4, 7)),
}


def checked(model: Any, folder: Path, depths: Any, run: Run) -> list[int]:
    """Assert that all logits equal the reference, and that drafts were accepted and rejected. Returns their number by depth."""
    assert 0 < run.accepted < run.drafted
    counts = of_eagle3(model, folder, depths).assert_logits(run.records)
    assert len(counts) == DRAFTS
    assert min(counts) > 10
    return counts


@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_at_every_depth_are_those_of_the_reference(name: str, model: Any, plain: Any, tmp_path: Path) -> None:
    """A ragged batch, prompts in chunks, accepted and rejected drafts."""
    folder = eagle3_folder(tmp_path, model.config, **LAYOUTS[name])
    run = record(Eagle3(str(folder), num_speculative_tokens=DRAFTS), ModelRunner(model, "eager"), requests(), plain)
    assert run.texts == plain
    checked(model, folder, DEPTHS, run)


@pytest.mark.parametrize("name", LISTED)
def test_states_after_the_listed_layers_are_read(name: str, model: Any, plain: Any, tmp_path: Path) -> None:
    options, depths = LISTED[name]
    folder = eagle3_folder(tmp_path, model.config, **options)
    assert feature_depths(read_files(folder), LAYERS) == depths
    run = record(Eagle3(str(folder), num_speculative_tokens=DRAFTS), ModelRunner(model, "eager"), requests(), plain)
    checked(model, folder, depths, run)


@pytest.mark.parametrize("setting", ["feature_layers", "norm_before_residual", "feedback"])
def test_settings_replace_those_of_the_files(setting: str, model: Any, plain: Any, tmp_path: Path) -> None:
    options: Any = {
        "feature_layers": ({}, {"layer_ids": [1, 2, 6], "layout": "speculators"}),
        "norm_before_residual": ({"layout": "speculators"}, {"layout": "speculators", "norm_before_residual": True}),
        "feedback": ({"norm_output": True}, {}),
    }[setting]
    value: Any = {"feature_layers": (1, 2, 6), "norm_before_residual": True, "feedback": "raw"}[setting]
    given, expected = (eagle3_folder(tmp_path / str(number), model.config, **one) for number, one in enumerate(options))
    method = Eagle3(str(given), num_speculative_tokens=DRAFTS, **{setting: value})
    run = record(method, ModelRunner(model, "eager"), requests(), plain)
    depths = value if setting == "feature_layers" else DEPTHS
    checked(model, expected, depths, run)
    with pytest.raises(AssertionError, match="off by"):
        of_eagle3(model, given, DEPTHS).assert_logits(run.records)


RULES: dict[str, tuple[dict[str, Any], Sampling]] = {
    "greedy": ({}, Sampling()),
    "standard": ({}, Sampling(temperature=1.0, seed=4)),
    "coupled": ({"rejection_sample_method": "coupled"}, Sampling(temperature=1.0, seed=4)),
}
ENGINES = [
    "eager",
    pytest.param("native", marks=pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))),
]


@round_robin(
    rule=RULES, engine=ENGINES, options=[{"draft_vocab": None}, {"norm_before_residual": True, "layout": "speculators"}, {}]
)
def test_drafts_of_a_right_head_are_accepted_at_every_depth(
    rule: str, engine: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """With noise on the head's logits, some are rejected."""
    (settings, sampling), runs = RULES[rule], list[Run]()
    for noise in (0.0, 0.4):
        target, folder = right_pair(tmp_path / str(noise), noise=noise, **options)
        asked = [Request(prompt, 60, sampling=sampling) for prompt in prompts()]
        method = Eagle3(str(folder), num_speculative_tokens=4, **settings)
        runs.append(finish(start(method, ModelRunner(target, engine), asked), asked))
    right, noisy = runs[0].acceptance(), runs[1].accepted / runs[1].drafted
    assert len(right) == 4
    assert min(right) > (0.999 if rule == "greedy" else 0.9), right
    assert 0 < noisy < 0.7


TEXTS: dict[str, tuple[Sampling, Any]] = {
    "greedy": (Sampling(), "standard"),
    "coupled": (Sampling(temperature=1.2, seed=8), "coupled"),
    "coupled, trimmed": (Sampling(temperature=1.2, top_k=8, top_p=0.9, seed=8), "coupled"),
}


@round_robin(name=TEXTS, engine=ENGINES, decodes_during_prefill=[False, True], chunk=[16, 5])
def test_texts_are_those_of_plain_decoding(
    name: str, engine: str, decodes_during_prefill: bool, chunk: int, tmp_path: Path
) -> None:
    sampling, rule = TEXTS[name]
    target, folder = right_pair(tmp_path, noise=0.3)
    runner, asked = ModelRunner(target, engine), [Request(one, 40 + len(one) % 7, sampling=sampling) for one in prompts()]
    plain = finish(start(Autoregressive(), runner, asked), asked)
    method: Any = Eagle3(str(folder), num_speculative_tokens=4, rejection_sample_method=rule)
    run = finish(start(method, runner, asked, chunk, decodes_during_prefill=decodes_during_prefill), asked)
    assert run.texts == plain.texts
    assert 0 < run.accepted < run.drafted


def test_a_text_may_fill_the_session(tmp_path: Path) -> None:
    target, folder = right_pair(tmp_path)
    asked = [Request(one, 512 - len(one)) for one in prompts((480, 500))]
    for engine in ("eager", "native") if library.missing() is None else ("eager",):
        runner = ModelRunner(target, engine)
        plain = finish(start(Autoregressive(), runner, asked), asked)
        assert finish(start(Eagle3(str(folder)), runner, asked), asked).texts == plain.texts


@pytest.mark.parametrize("engine", ENGINES)
def test_a_row_at_its_limit_does_not_end_the_drafts_of_others(engine: str, tmp_path: Path) -> None:
    """The longest row ends first, and fills the session."""
    target, folder = right_pair(tmp_path)
    runner = ModelRunner(target, engine)
    asked = [Request(one, new) for one, new in zip(prompts((60, 3)), (9, 60), strict=True)]
    plain = finish(start(Autoregressive(), runner, asked), asked)
    run = record(Eagle3(str(folder), num_speculative_tokens=6), runner, asked)
    assert run.texts == plain.texts
    assert any(step.tokens[0] and step.drafted[0] < step.drafted[1] for step in run.steps), "both rows had the same limits"


def coupled_acceptance(p: Tensor, q: Tensor) -> float:
    """Probability that Gumbel-max draws on the same noise agree: sum_i 1 / sum_j max(p_j / p_i, q_j / q_i). p, q: [V]."""
    ratios = torch.maximum(p[None, :] / p[:, None], q[None, :] / q[:, None])
    return float((1 / ratios.sum(-1)).nan_to_num(0.0).sum())


def test_coupled_drafts_are_accepted_as_often_as_theory_says(tmp_path: Path) -> None:
    """Draws of the target and of a head with its own vocabulary share the noise of each target token."""
    rows, prompt = 400, prompts((4,))[0]
    target, folder = right_pair(tmp_path, noise=0.5, sharpness=0.5)
    asked = [Request(prompt, 3, sampling=Sampling(temperature=1.0, seed=seed)) for seed in range(rows)]
    method = Eagle3(str(folder), num_speculative_tokens=1, rejection_sample_method="coupled")
    run = finish(start(method, ModelRunner(target, "eager"), asked), asked)
    expected, chances = of_eagle3(target, folder, DEPTHS), dict[int, float]()
    for first in {text[4] for text in run.texts}:
        text = [*prompt.tolist(), first]
        p = target(torch.tensor([text])).logits[0, -1].double().softmax(-1)
        q = expected.logits(DraftRecord(0, text, [], [torch.empty(0)]))[0].softmax(-1)
        assert bool((q == 0).any())
        chances[first] = coupled_acceptance(p, q)
    drafted = [step for step in run.steps if any(step.drafted)]
    known = torch.tensor([chances[text[4]] for text in run.texts])
    spread = float((known * (1 - known)).sum().sqrt())
    assert drafted[0].drafted == [1] * rows
    assert 0.2 * rows < float(known.sum()) < 0.8 * rows
    assert abs(sum(drafted[0].accepted) - float(known.sum())) < 5 * spread


def noise_of_draft_ids(patch: pytest.MonkeyPatch) -> None:
    """Drafts are drawn with the noise of the head's own ids, which are not the target's."""

    def drawn(self: Sampler, scores: Tensor, position: Tensor, *_: Any) -> tuple[Tensor, None]:
        ids = scores[0].isfinite().nonzero()[:, 0]
        return ids[self.noise.draw(scores[:, ids].softmax(-1), position, TARGET)], None

    patch.setattr(Sampler, "drawn", drawn)


def test_noise_of_other_ids_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proof = partial(test_coupled_drafts_are_accepted_as_often_as_theory_says, tmp_path)
    planted.assert_found(noise_of_draft_ids, proof, monkeypatch)


class Head64(Eagle3Head):
    """Its logits are float64, so that laws are exact."""

    def project(self, normed: Tensor, head: Any = None, shortlist: Tensor | None = None) -> Tensor:
        return super().project(normed, head, shortlist).double()


LAWS: dict[str, tuple[dict[str, Any], set[tuple[int, int]]]] = {
    "plain": ({}, {(2, 0), (2, 1), (2, 2), (1, 0), (1, 1)}),
    "short": ({"new": 3}, {(1, 0), (1, 1)}),
    "warpers": (
        {"warpers": [TemperatureLogitsWarper(0.75), TopKLogitsWarper(2)], "temperature": 0.75, "top_k": 2},
        {(2, 0), (2, 1)},
    ),
    "processors": ({"processors": [RepetitionPenaltyLogitsProcessor(1.7), Pushing()]}, {(2, 0), (2, 1)}),
    "native": ({"native": True}, {(2, 0), (2, 1), (2, 2)}),
}


def law(folder: Path, settings: dict[str, Any], patch: pytest.MonkeyPatch) -> Any:
    """Check the exact law of a text of three tokens; the last one is never drafted. Returns drafted and accepted counts."""
    patch.setattr(eagle3_head, "Eagle3Head", Head64)
    target: Any = machine.llama(vocab=VOCAB, hidden=8, layers=4, head=2.0, seed=2)
    target = target if settings.get("native") else target.double()
    options: Any = {"draft_vocab": 2, "seed": 3, "dtype": torch.float32 if settings.get("native") else torch.float64}
    eagle3_folder(folder, target.config, **options)
    return proves(target, Eagle3(str(folder), num_speculative_tokens=2, feature_layers=(1, 2, 4)), **settings)


@pytest.mark.parametrize("name", slow_except(["short", "plain", "native"], LAWS))
def test_the_law_is_exact_with_a_vocabulary_of_its_own(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leviathan's rule with a q that is zero for tokens that the target may say."""
    settings, steps = LAWS[name]
    if settings.get("native") and library.missing() is not None:
        pytest.skip(str(library.missing()))
    assert steps <= set(law(tmp_path, settings, monkeypatch).steps)


def test_a_residual_without_q_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.assert_found(planted.recovered_from_p, lambda: law(tmp_path, {"new": 3}, monkeypatch), monkeypatch)


@pytest.mark.parametrize("name", slow_except(["llama"], speculators_oracles()))
@pytest.mark.parametrize("engine", ENGINES)
def test_heads_that_speculators_saved_have_its_logits(name: str, engine: str) -> None:
    oracle = speculators_oracles()[name]
    target = ModelRunner(machine.llama(vocab=40, hidden=16, layers=8), engine)
    head = load_eagle3(oracle.folder, target)
    columns, depths = len(oracle.states), oracle.logits.shape[1]
    states = head.read_states(oracle.states.float())
    for column in range(columns):
        store, hidden, tokens, first = KVCache(1, 1, 64), states[None, : column + 1], oracle.tokens[None, 1 : column + 2], 0
        store.reserve(64)
        for depth in range(depths):
            stop = first + tokens.shape[1]
            positions = torch.arange(first, stop)[None]
            at = Pass(positions, positions, None, slice(0, 1), stop, first)
            with torch.inference_mode():
                hidden = head.run(head.enter(tokens, hidden), at, store, range(1))[:, -1:]
                logits = head.logits(hidden)[0, 0]
                hidden = head.feed_back(hidden)
            drafted = torch.arange(40) if head.ids is None else head.ids
            torch.testing.assert_close(logits[drafted].double(), oracle.logits[column, depth], rtol=0, atol=2e-4)
            assert int(logits.isfinite().sum()) == len(drafted)
            tokens, first = oracle.drafts[column, depth : depth + 1][None], stop


class TestNative:
    """The native engine computes the logits of sampled drafts one by one, and greedy chains in one call."""

    pytestmark = NATIVE_ONLY

    @pytest.mark.parametrize("name", LAYOUTS)
    def test_logits_at_every_depth_are_those_of_the_reference(self, name: str, model: Any, plain: Any, tmp_path: Path) -> None:
        folder = eagle3_folder(tmp_path, model.config, **LAYOUTS[name])
        method = Eagle3(str(folder), num_speculative_tokens=DRAFTS)
        runner = ModelRunner(model, "native")
        assert method.head_for(runner).engine.name == "native"
        checked(model, folder, DEPTHS, record(method, runner, requests(), plain))

    @pytest.mark.parametrize("name", LAYOUTS)
    def test_one_call_drafts_what_the_reference_drafts(self, name: str, model: Any, tmp_path: Path) -> None:
        """Confidences are softmax probabilities of the drafts."""
        folder = eagle3_folder(tmp_path, model.config, **LAYOUTS[name])
        method = Eagle3(str(folder), num_speculative_tokens=DRAFTS, confidence_threshold=0.02)
        loop = start(method, ModelRunner(model, "native"), requests())
        drafter: Any = loop.session.drafter
        own, drafts, records = drafter.propose_draft, [], []

        def propose(*given: Any) -> Any:
            texts = [[*text] for text in drafter.text]
            draft = own(*given)
            for row, text in enumerate(texts):
                if draft.width and loop.session.alive[row] and bool(draft.valid[row, 0]):
                    count = int(draft.valid[row].sum())
                    tokens = draft.tokens[row, :count].tolist()
                    records.append(DraftRecord(row, text, tokens, [torch.zeros(97)] * count))
                    drafts.append(draft.confidence[row, :count])
            return draft

        drafter.propose_draft = propose
        drafter.next_logits = None
        finish(loop, requests())
        expected, deep = of_eagle3(model, folder, DEPTHS), 0
        for one, confidence in zip(records, drafts, strict=True):
            chances = expected.logits(one).softmax(-1)
            assert one.tokens == chances.argmax(-1).tolist()
            torch.testing.assert_close(confidence.double(), chances.amax(-1), rtol=1e-3, atol=1e-5)
            deep += len(one.tokens) == DRAFTS
        assert len(records) > 40
        assert deep > 10

    @pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.2, seed=8)], ids=["greedy", "sampled"])
    def test_logits_of_a_ragged_batch_have_the_bits_of_each_row_alone(self, sampling: Sampling, tmp_path: Path) -> None:
        target, folder = right_pair(tmp_path, noise=0.3)
        runner, method = (
            ModelRunner(target, "native"),
            Eagle3(str(folder), num_speculative_tokens=4, rejection_sample_method="coupled"),
        )
        asked = [Request(one, 30, sampling=sampling) for one in prompts()]
        batch = record(method, runner, asked)
        for row, request in enumerate(asked):
            alone, own = record(method, runner, [request]), {len(one.text): one for one in batch.records if one.row == row}
            assert alone.texts[0] == batch.texts[row]
            assert len(alone.records) > 5
            for theirs in alone.records:
                mine, count = own[len(theirs.text)], len(theirs.logits)  # in a batch it may read its last draft, too
                assert (mine.text, mine.tokens[: count - 1]) == (theirs.text, theirs.tokens[: count - 1])
                assert len(mine.logits) >= count
                assert all(map(torch.equal, mine.logits[:count], theirs.logits))

    @pytest.mark.parametrize(("engine", "bits"), [("native", "int8"), ("native", "int4"), ("eager", "int8")])
    def test_a_quantised_head_drafts_well_and_changes_no_text(self, engine: str, bits: Any, tmp_path: Path) -> None:
        """Also next to a target on another engine."""
        target, folder = right_pair(tmp_path, norm_before_residual=True)
        runner, asked = ModelRunner(target, engine), requests(new=(40, 40, 40), sampling=Sampling(temperature=1.0, seed=5))
        plain = finish(start(Autoregressive(), runner, asked), asked)
        method = Eagle3(str(folder), head_quantize=bits, rejection_sample_method="coupled")
        assert method.head_for(runner).engine.quantize == bits
        run = finish(start(method, runner, asked), asked)
        assert run.texts == plain.texts
        assert run.accepted / run.drafted > 0.5

    def test_rounded_keys_and_values_change_no_text(self, tmp_path: Path) -> None:
        target, folder = right_pair(tmp_path, noise=0.3)
        runner, asked = ModelRunner(target, "native", kv_dtype="bfloat16"), requests(new=(40, 40, 40))
        plain = finish(start(Autoregressive(), runner, asked), asked)
        loop = start(Eagle3(str(folder)), runner, asked)
        run = finish(loop, asked)
        assert run.texts == plain.texts
        assert 0 < run.accepted < run.drafted
        assert {store.dtype for _, store in loop.session.stores} == {torch.bfloat16}

    def test_one_call_has_the_bits_of_single_tokens(self, tmp_path: Path) -> None:
        """Confidences stop drafts, so that chains are ragged."""
        target, folder = right_pair(tmp_path, noise=0.3)
        method = Eagle3(str(folder), num_speculative_tokens=5, confidence_threshold=0.5)
        runner, asked = ModelRunner(target, "native"), requests(new=(60, 50, 40))
        one_call, singly = start(method, runner, asked), start(method, runner, asked)
        patched: Any = singly.session.drafter
        patched.draft_in_one_call = lambda *_: None
        lengths = set[int]()
        while singly.busy:
            step, other = one_call.step(), singly.step()
            assert (step.tokens, step.drafted, step.accepted) == (other.tokens, other.drafted, other.accepted)
            lengths |= {*step.drafted}
            for row, alive in enumerate(singly.session.alive):
                stores: Any = [loop.session.drafter.caches[0][1] for loop in (one_call, singly)]  # type: ignore[attr-defined]
                count = stores[0].length[row]
                assert count == stores[1].length[row] or not alive
                if alive and count:
                    first, second = ([one.keys[0][row, :, :count], one.values[0][row, :, :count]] for one in stores)
                    assert all(map(torch.equal, first, second))
        assert {0, 1, 5} <= lengths


@pytest.mark.parametrize("engine", ENGINES)
def test_a_head_without_finite_logits_changes_no_text(engine: str, model: Any, plain: Any, tmp_path: Path) -> None:
    """Its rows decode on without drafts; the next request in a row has drafts again."""
    folder = eagle3_folder(tmp_path, model.config, embedding="own")
    token = plain[0][11]
    edit_weights(folder, lambda weights: weights["embed_tokens.weight"][token].fill_(float("nan")))
    runner = ModelRunner(model, engine)
    loop = start(Eagle3(str(folder), num_speculative_tokens=DRAFTS), runner, requests())
    run = finish(loop, requests())
    assert run.texts == plain
    clean = next(row for row, text in enumerate(plain) if token not in text)
    assert sum(step.drafted[clean] for step in run.steps) > 20
    assert sum(step.drafted[0] for step in run.steps[-8:]) == 0
    prompt, drafted = torch.tensor(plain[clean]), 0
    loop.admit(0, Request(prompt[:8], 20))
    while loop.busy:
        drafted += loop.step().drafted[0]
    assert drafted > 10


@torch.no_grad()
def second_tokens_are_the_target_s(path: Path) -> None:
    """Chi-square of 4,000 second tokens, which the head drafts, against the target's own probabilities."""
    target, folder = right_pair(path, noise=0.8, sharpness=0.4)
    ids, runner, rows = prompts((6,), seed=2)[0], ModelRunner(target), 500
    first = target(ids[None]).logits[0, -1].double().softmax(-1)
    texts = torch.cat([ids.expand(97, -1), torch.arange(97)[:, None]], 1)
    expected = 8 * rows * first @ target(texts).logits[:, -1].double().softmax(-1)
    counts, accepted, method = torch.zeros(97, dtype=torch.float64), 0, Eagle3(str(folder), num_speculative_tokens=2)
    for start_seed in range(0, 8 * rows, rows):
        asked = [Request(ids, 3, sampling=Sampling(1.0, seed=start_seed + row)) for row in range(rows)]
        found, figures, _ = machine.decode(method, runner, asked)
        counts += torch.bincount(torch.tensor([text[1] for text in found]), minlength=97)
        accepted += figures.accepted
    assert 0.2 < accepted / (8 * rows) < 0.95
    assert float(expected.min()) > 5
    found_square, degrees = float(((counts - expected) ** 2 / expected).sum()), 96
    assert found_square < degrees + 5 * (2 * degrees) ** 0.5, (found_square, degrees)


def test_drawn_texts_have_the_target_s_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    second_tokens_are_the_target_s(tmp_path / "right")
    planted.assert_found(planted.recovered_from_p, lambda: second_tokens_are_the_target_s(tmp_path / "wrong"), monkeypatch)
