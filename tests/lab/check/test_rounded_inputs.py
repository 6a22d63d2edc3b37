"""`check` compares products with bfloat16 inputs with transformers' modules in float64."""

from typing import Any

import pytest

from skipstone import LayerSkip
from skipstone.engines.choose_engine import EngineOptions, attach
from skipstone.lab.check import reference
from skipstone.lab.check.check import Checker, CheckScale
from tests.helpers import families
from tests.helpers.machine import prompt
from tests.helpers.native import FAMILIES, NATIVE_ONLY
from tests.helpers.pairwise import slow_except

pytestmark = NATIVE_ONLY
PROMPTS = [prompt(length, seed=length) for length in (9, 14, 40)]


def checker(name: str, **options: Any) -> Checker:
    model = families.build(name).bfloat16()
    attach(model, EngineOptions("native", **options))
    return Checker(model, LayerSkip(exit_layer=1, num_speculative_tokens=2), PROMPTS, CheckScale(max_new_tokens=16, samples=60))


@pytest.mark.parametrize("name", slow_except(["llama"], FAMILIES))
def test_every_family_passes_every_probe(name: str) -> None:
    report = checker(name).run()
    assert report.passed, [finding.bugs for finding in report.findings]
    assert all(finding.tested for finding in report.findings)
    assert not any(finding.ties for finding in report.findings[1:])


def test_a_reference_that_does_not_round_inputs_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "round_to_bfloat16", lambda values: values)
    checked = checker("llama")
    checked._probes()[1][1]()
    assert any("layer 0 " in bug for bug in checked.finding.bugs), checked.finding.note


def test_products_that_round_nothing_are_checked_without_rounding() -> None:
    report = checker("llama", compute_dtype="float32").run()
    assert report.passed, [finding.bugs for finding in report.findings]
