"""`check` measures which quantised kernels give a row another sum beside others, and still tells ties from bugs there."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from skipstone import LayerSkip, Method
from skipstone.engines.model_runner import ModelRunner
from skipstone.lab.check.batch_invariance import KERNEL_WIDTHS, ROWS, compare_kernels
from skipstone.lab.check.check import CheckReport, TieDetector
from skipstone.models import quantised_checkpoints
from tests.helpers import quantised
from tests.helpers.checking import run_probe
from tests.helpers.machine import prompt

PROMPTS = [prompt(length, seed=length) for length in (9, 14, 6, 11)]
SUMS = "the sums of quantised layers, a row alone and beside others"
SKIP = LayerSkip(exit_layer=2, num_speculative_tokens=3)
APART = 1e-3  # by which the sums of `Beside` differ from those of a row alone


class Alone(nn.Linear):
    """A kernel in which every row is by itself, as the engine's patch for a few rows would not have it."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.cat([super(Alone, self).forward(row) for row in input.split(1, 1)], 1)


class Beside(Alone):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + (APART if input.shape[1] > 1 else 0.0)


Alone.__module__ = Beside.__module__ = "torchao.made.up"


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    """Its first layer has `Beside`, the others have `Alone`."""
    monkeypatch.setitem(
        quantised_checkpoints.METHODS,
        "torchao",
        quantised_checkpoints.Quantisation("torchao", ("torchao Alone", "torchao Beside")),
    )
    made = quantised.plain()
    for name, module in made.named_modules():
        if name.endswith("_proj"):
            module.__class__ = Beside if ".0." in name else Alone
    return made


def test_sums_are_compared_kernel_by_kernel(model: PreTrainedModel) -> None:
    found = compare_kernels(ModelRunner(model), torch.cat(PROMPTS))
    assert {name: (one.layers, one.different) for name, one in found.items()} == {
        "torchao Beside": (7, 7),
        "torchao Alone": (21, 0),
    }
    assert found["torchao Beside"].largest == pytest.approx(APART, rel=0.01)
    assert found["torchao Alone"].largest == 0.0
    assert found["torchao Beside"].sums == ROWS * len(KERNEL_WIDTHS) * (64 + 32 + 32 + 64 + 128 + 128 + 64)
    assert not any(module._forward_pre_hooks for module in model.modules())


def probed(model: PreTrainedModel, method: Method, only: str) -> CheckReport:
    return run_probe(model, method, PROMPTS, only, samples=50)


@pytest.mark.slow
def test_the_audit_allows_what_the_kernels_differ_by(model: PreTrainedModel) -> None:
    report = probed(model, SKIP, "every step: drafts and the key/value store")
    assert report.passed, report.findings
    assert "keys and values of quantised layers differ by up to" in report.findings[1].note


def test_texts_that_part_at_two_near_scores_are_a_tie(model: PreTrainedModel) -> None:
    """Two tokens get one column of the head, but for less than the kernels differ by."""
    head: Any = model.get_output_embeddings()
    with torch.no_grad():
        best = int(model(PROMPTS[0][None]).logits[0, -1].argmax())
        other = (best + 1) % 97
        head.weight[other] = head.weight[best] * (1 - 1e-5)
    parted = TieDetector(model).compare(PROMPTS[0], [best], [other])
    assert parted is not None
    assert parted.tie, str(parted)
    far = int(model(PROMPTS[0][None]).logits[0, -1].argmin())
    parted = TieDetector(model).compare(PROMPTS[0], [best], [far])
    assert parted is not None
    assert not parted.tie


def test_outliers_of_other_rows_change_the_sums_of_bitsandbytes() -> None:
    """A column of inputs beyond 6 in any row of a pass is computed in float16 for all of them."""
    model: Any = quantised.build("bitsandbytes 8 bit")
    (found,) = compare_kernels(ModelRunner(model), torch.cat(PROMPTS)).values()
    assert 0 < found.different <= found.layers
    for module in model.modules():
        if hasattr(module, "state"):
            module.state.threshold = 0.0
    (found,) = compare_kernels(ModelRunner(model), torch.cat(PROMPTS)).values()
    assert found.different == 0
