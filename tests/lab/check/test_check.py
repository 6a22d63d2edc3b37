"""`check` passes what is right and finds what is wrong, on a model of a few thousand parameters."""

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from skipstone import Autoregressive, EarlyExit, LayerSkip, Method, enable
from skipstone.engines.native import library
from skipstone.lab.check import distribution_tests
from skipstone.lab.check.check import Checker, CheckReport, CheckScale, TieDetector
from skipstone.models import recognition
from tests.helpers import families
from tests.helpers.broken_methods import METHODS, broken
from tests.helpers.checking import run_probe
from tests.helpers.machine import prompt, sharpened, small
from tests.helpers.pairwise import slow_except
from tests.helpers.support import alone, message

SCALE = CheckScale(max_new_tokens=24, samples=200)
LAYERS = "the layers, one by one, are transformers' own"
PROMPTS = [prompt(length, seed=length) for length in (9, 14, 6, 11)]


def agreeing() -> PreTrainedModel:
    """A model whose early exits are right more often than not, and wrong often enough: with drafts that are nearly all
    rejected, a method may do with them what it likes."""
    torch.manual_seed(0)
    return sharpened(LlamaForCausalLM(small(LlamaConfig, vocab=97, hidden=32, layers=4)), 2, head=6.0, later=0.2)


def checked(method: Method, dtype: torch.dtype = torch.float32) -> CheckReport:
    return Checker(agreeing().to(dtype), method, PROMPTS, SCALE).run()


def probed(method: Method, only: str, dtype: torch.dtype = torch.float32) -> CheckReport:
    return run_probe(agreeing().to(dtype), method, PROMPTS, only)


def assert_right(report: CheckReport) -> None:
    assert report.passed, [finding.bugs for finding in report.findings]
    assert len(report.findings) == (11 if library.missing() else 15 + (len(library.levels()) > 1))
    assert all(finding.tested for finding in report.findings)
    assert report.proves
    assert sum(finding.drafted for finding in report.findings) > 0


@pytest.mark.slow  # the bugs' control is a right method
@pytest.mark.parametrize(
    "method",
    [
        LayerSkip(exit_layer=2, num_speculative_tokens=4, rejection_sample_method="coupled"),
        LayerSkip(exit_layer=1, num_speculative_tokens=4, confidence_threshold="adaptive", reuse_cache=False),
        broken(),  # that the bugs are built on
    ],
    ids=str,
)
def test_a_right_method_passes_every_probe(method: Method) -> None:
    assert_right(checked(method))


def test_a_lossy_method_is_found_out() -> None:
    report = probed(EarlyExit(exit_layer=2), "greedy texts")
    assert not report.passed
    assert report.findings[0].bugs == [], "plain decoding is right"
    assert report.findings[1].bugs


@pytest.mark.parametrize("known", [{"post_norm": True}, {"logits": ("multiply", "hidden_size")}])
def test_a_family_that_is_known_wrongly_is_found_out(known: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert probed(Autoregressive(), LAYERS).passed
    known_family = recognition._known_family
    monkeypatch.setattr(recognition, "_known_family", lambda config: replace(known_family(config), **known))
    (bug, *_) = probed(Autoregressive(), LAYERS).findings[1].bugs
    assert next(iter(known)) in bug


FOUND_BY = {
    "bonus_from_raw_logits": "the law of sampled texts, temperature 0.7, top_p 0.9",
    "drawn_token_dropped": "the law of sampled texts, temperature 1",
    "duplicate_siblings": "every step: drafts and the key/value store",
    "eos_overrun": "texts that end inside a draft",
    "noise_coupled_between_rows": "the law of sampled texts, temperature 1",
    "processor_wrong_prefix": "greedy texts under a repetition penalty and without repeated trigrams",
    "skipped_position": "every step: drafts and the key/value store",
    "stale_kv": "every step: drafts and the key/value store",
    "threshold_on_the_drawn_token": "the law of sampled texts, temperature 1",
    "wrong_residual": "the law of sampled texts, temperature 0.7, top_p 0.9",
}
"""The probe that is there for the bug, among those that find it."""
assert FOUND_BY.keys() == METHODS.keys()


@pytest.mark.parametrize("name", slow_except([*FOUND_BY][::5], FOUND_BY))
def test_a_planted_bug_is_found_by_what_it_does(name: str) -> None:
    """An exception inside the method would be found too, and would prove nothing."""
    report = probed(METHODS[name], FOUND_BY[name])
    found = {finding.name: finding.bugs for finding in report.findings if finding.bugs}
    assert FOUND_BY[name] in found, found
    assert any("Error: " not in bug for bug in found[FOUND_BY[name]])
    assert "plain decoding is transformers' own" not in found


@pytest.mark.slow
def test_in_bfloat16_a_right_method_passes_and_a_wrong_one_does_not() -> None:
    report = probed(LayerSkip(exit_layer=2, num_speculative_tokens=3), FOUND_BY["stale_kv"], torch.bfloat16)
    assert report.passed, [(finding.name, finding.bugs) for finding in report.findings if finding.bugs]
    wrong = probed(METHODS["stale_kv"], FOUND_BY["stale_kv"], torch.bfloat16)
    assert any("layer" in bug for finding in wrong.findings for bug in finding.bugs)


def test_a_tie_is_told_from_a_bug() -> None:
    """A token whose row of the head is another's but for rounding ties with it; any other does not."""
    model = agreeing()
    with torch.no_grad():
        best = int(model(PROMPTS[0][None]).logits[0, -1].argmax())
        twin = (best + 1) % 97
        model.lm_head.weight[twin] = model.lm_head.weight[best] * (1 - 1e-7)
        ranked = model(PROMPTS[0][None]).logits[0, -1].argsort(descending=True).tolist()
    judge = TieDetector(model)
    for other, tie in ((twin, True), (ranked[2], False), (ranked[50], False)):
        parted = judge.compare(PROMPTS[0], [best, 1], [other, 1])
        assert parted is not None
        assert (parted.position, parted.expected, parted.found, parted.tie) == (0, best, other, tie)
    assert judge.compare(PROMPTS[0], [best], [best]) is None
    ended = judge.compare(PROMPTS[0], [best, 5], [best], number=3)
    assert ended is not None
    assert (ended.position, ended.found, ended.tie) == (1, None, False)
    assert message(ended).splitlines()[:2] == ["A BUG", "prompt 3, new token 1: expected token 5, found the end"]


def test_draws_from_their_law_pass_and_others_do_not() -> None:
    dice = torch.Generator().manual_seed(0)
    p = torch.rand(4000, 40, generator=dice).softmax(-1)
    right = torch.multinomial(p, 1, generator=dice).squeeze(1)
    for tokens, same in ((right, True), (torch.where(torch.rand(4000, generator=dice) < 0.1, p.argmax(1), right), False)):
        drawn = distribution_tests.TokenSample()
        drawn.add(p[:2000], tokens[:2000])
        drawn.add(p[2000:], tokens[2000:])
        assert drawn.law().same is same
    barred = p.clone()
    barred.scatter_(1, right[:, None], 0.0)
    drawn = distribution_tests.TokenSample()
    drawn.add(barred, right)
    assert "probability 0" in drawn.law().where


def test_samples_of_one_law_are_told_from_those_of_another() -> None:
    dice = torch.Generator().manual_seed(1)

    def texts(first: float) -> list[list[int]]:
        return [[int(torch.rand(1, generator=dice) < first), int(torch.rand(1, generator=dice) < 0.5)] for _ in range(1500)]

    assert distribution_tests.compare(texts(0.5), texts(0.5)).same
    assert not distribution_tests.compare(texts(0.5), texts(0.65)).same
    assert distribution_tests.compare([[1]] * 50, [[1]] * 50).tests == 0


def test_what_cannot_be_checked_is_said_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="between 1 and 3"):
        checked(LayerSkip(exit_layer=9))
    with pytest.raises(ValueError, match="more than the model's 512 positions"):
        Checker(agreeing(), Autoregressive(), PROMPTS, CheckScale(max_new_tokens=510))
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    with pytest.raises(ImportError, match=r"scipy: pip install \"skipstone\[bench\]"):
        checked(Autoregressive())


def test_a_judge_works_whatever_engine_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wider copy of a float32 model is in float64, which the native engine does not read."""
    if library.missing() is not None:
        pytest.skip(str(library.missing()))
    monkeypatch.setenv("SKIPSTONE_ENGINE", "native")
    model, prompt = families.cached("llama"), families.prompts(1)[0]
    text = alone(model, prompt, max_new_tokens=4)
    parted = TieDetector(model).compare(prompt, text, [*text[:2], (text[2] + 1) % 97, text[3]])
    assert parted is not None
    assert parted.position == 2
    assert not parted.tie


@pytest.mark.slow
@pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))
def test_a_quantised_model_is_compared_with_its_own_plain_decoding() -> None:
    model = enable(agreeing(), "autoregressive", engine="native", quantize="int4")
    scale = CheckScale(max_new_tokens=12, samples=60)
    report = Checker(model, LayerSkip(2, 3), PROMPTS[:2], scale).run()
    assert report.passed, [finding.bugs for finding in report.findings]
    assert report.findings[0].name == "plain decoding"
    assert "quantised to int4" in report.findings[0].note
    assert not any(finding.ties for finding in report.findings)
    wrong = TieDetector(model).compare(PROMPTS[0], [1, 2, 3], [1, 4, 3])
    assert wrong is not None
    assert not wrong.tie, "nothing is rounded differently in another pass"
