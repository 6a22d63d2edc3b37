"""`check` compares the native engine's computation of GGUF's blocks with transformers' modules in float64."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from skipstone import LayerSkip
from skipstone.engines.mapped_loading import load_for_decoding
from skipstone.engines.native import library
from skipstone.engines.native.weights import BLOCKS
from skipstone.lab.check import reference
from skipstone.lab.check.check import Checker, CheckScale
from tests.helpers import quantized
from tests.helpers.gguf_files import BLOCK_MODELS, write_blocks
from tests.helpers.machine import prompt
from tests.helpers.native import NATIVE_ONLY
from tests.helpers.pairwise import slow_except

pytestmark = NATIVE_ONLY
PROMPTS = [prompt(length, seed=length) for length in (9, 14, 40)]
CASES = [(kind, [*BLOCK_MODELS][number % len(BLOCK_MODELS)]) for number, kind in enumerate([*BLOCKS, "F16", "Q5_1"])]


def checker(folder: Path, kind: str, name: str = "llama") -> Checker:
    model, _ = load_for_decoding(write_blocks(folder, name, kind).path)
    return Checker(model, LayerSkip(exit_layer=3, num_speculative_tokens=2), PROMPTS, CheckScale(max_new_tokens=16, samples=60))


@pytest.mark.parametrize(("kind", "name"), slow_except([("Q4_K", "llama")], CASES))
@pytest.mark.filterwarnings("ignore:.*are computed in float32:RuntimeWarning")
def test_every_type_of_blocks_passes_every_probe(kind: str, name: str, tmp_path: Path) -> None:
    report = checker(tmp_path, kind, name).run()
    assert report.passed, [finding.bugs for finding in report.findings]
    assert report.proves
    assert len(report.findings) == 15 + (len(library.levels()) > 1)
    assert all(finding.tested for finding in report.findings)
    assert not any(finding.ties for finding in report.findings[1:])


def scale(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight[5, 32:64] *= 1.1


def phases(model: Any) -> None:
    model.model.rotary_emb.inv_freq *= 1.01


def tokens(model: Any) -> None:
    model.lm_head.weight.copy_(model.lm_head.weight.roll(1, 0))


@pytest.mark.parametrize(("fault", "place"), [(scale, "layer 1 "), (phases, "layer 3 "), (tokens, "the logits ")])
def test_a_wrong_value_is_found(
    fault: Callable[[Any], None], place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpacked_model = reference.unpacked_model

    @torch.no_grad()
    def faulty(*args: Any, **options: Any) -> Any:
        model = unpacked_model(*args, **options)
        fault(model)
        return model

    checked = checker(tmp_path, "Q8_0")
    monkeypatch.setattr(reference, "unpacked_model", faulty)
    (_, compare_plain), (_, compare_layers), *_ = checked._probes()
    compare_layers()
    assert any(place in bug for bug in checked.finding.bugs), checked.finding.bugs
    if fault is tokens:
        compare_plain()
        assert any("expected token" in bug for bug in checked.finding.bugs)


def test_inputs_are_rounded_as_documented() -> None:
    values = torch.from_numpy(quantized.inputs_of(5, 256))
    assert torch.equal(reference.round_to_codes(values), quantized.rounded(None, (values,)))
