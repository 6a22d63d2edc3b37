"""`check` passes what is right and finds what is wrong, on a model of a few thousand parameters."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from skipstone import Autoregressive, EarlyExit, LayerSkip, Method
from skipstone.bench.check import Checker
from skipstone.bench.findings import Report, Scale
from skipstone.methods.layerskip import LayerSkipSession
from tests import bugs
from tests.bugs.base import broken
from tests.machine import prompt, sharpened, small

PROMPTS = [prompt(length, seed=length) for length in (9, 14, 6, 11)]


def agreeing() -> PreTrainedModel:
    """A model whose early exits are right more often than not, and wrong often enough: with drafts that are nearly all
    rejected, a method may do with them what it likes."""
    torch.manual_seed(0)
    return sharpened(LlamaForCausalLM(small(LlamaConfig, vocab=97, hidden=32, layers=4)), 2, head=6.0, later=0.2)


def checked(method: Method, dtype: torch.dtype = torch.float32) -> Report:
    return Checker(agreeing().to(dtype), method, PROMPTS, Scale(max_new_tokens=24, samples=200)).run()


@pytest.mark.parametrize(
    "method",
    [
        Autoregressive(),
        LayerSkip(exit_layer=2, num_speculative_tokens=3),
        LayerSkip(exit_layer=2, num_speculative_tokens=4, rejection_sample_method="coupled"),
        LayerSkip(exit_layer=1, num_speculative_tokens=4, confidence_threshold="adaptive", reuse_cache=False),
    ],
    ids=str,
)
def test_a_right_method_passes_every_probe(method: Method) -> None:
    report = checked(method)
    assert report.passed, [finding.bugs for finding in report.findings]
    assert len(report.findings) == 9
    assert all(finding.tested for finding in report.findings)
    assert report.proves
    assert (sum(finding.drafted for finding in report.findings) > 0) == (method.name == "layerskip")


def test_a_lossy_method_is_found_out() -> None:
    report = checked(EarlyExit(exit_layer=2))
    assert not report.passed
    assert report.findings[0].bugs == [], "plain decoding is right"
    assert report.findings[1].bugs


BUGS = sorted(module.name for module in pkgutil.iter_modules(bugs.__path__) if module.name != "base")


def test_there_are_ten_bugs_and_what_they_are_built_on_is_right() -> None:
    assert len(BUGS) == 10
    assert checked(broken(LayerSkipSession)).passed


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    report = checked(importlib.import_module(f"tests.bugs.{name}").METHOD)
    found = {finding.name: finding.bugs[:1] for finding in report.findings if finding.bugs}
    assert found, name
    print(name, found)
