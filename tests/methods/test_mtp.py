"""MTP layers in the loop: draft logits at every depth are those of the reference, and auto drafts with them by itself."""

from pathlib import Path
from typing import Any

import pytest

import skipstone
from skipstone import Autoregressive, Mtp
from skipstone.engines.model_runner import ModelRunner
from tests.helpers import families
from tests.helpers.feature_loop import Expected, finish, record, requests, start
from tests.helpers.feature_references import MtpReference
from tests.helpers.mtp_checkpoints import MTP_KINDS, mtp_checkpoint
from tests.helpers.pairwise import slow_except
from tests.helpers.support import tokenizer

DRAFTS = 3
SIZES: dict[str, Any] = {"lengths": (9, 80, 3), "new": (16, 14, 12)}


def loaded(folder: Path, kind: str, **options: Any) -> Any:
    mtp_checkpoint(folder, kind, **options)
    tokenizer().save_pretrained(folder)
    return skipstone.load(folder)[0]


CASES = [
    *((kind, "normed", {}) for kind in MTP_KINDS),
    ("deepseek_v3", "raw", {"copies": "other"}),
    ("glm4_moe", "raw", {"shared_norm": False, "fused": True}),
    ("glm4_moe_lite", "raw", {}),
    ("qwen3_next", "raw", {"fused": True}),
    ("qwen3_5_text", "raw", {"wrapped": True}),
    ("qwen3_5_moe_text", "raw", {"wrapped": True, "files": 2}),
]


@pytest.mark.parametrize(("kind", "feedback", "options"), slow_except(CASES[:6], CASES))
def test_logits_at_every_depth_are_those_of_the_reference(
    kind: str, feedback: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    """A ragged batch, prompts in chunks, accepted and rejected drafts."""
    model, asked = loaded(tmp_path, kind, **options), requests(**SIZES)
    runner = ModelRunner(model, "eager")
    plain = finish(start(Autoregressive(), runner, asked), asked).texts
    run = record(Mtp(num_speculative_tokens=DRAFTS, feedback=feedback), runner, asked, plain)
    assert run.texts == plain
    assert 0 < run.accepted < run.drafted
    counts = Expected(model, MtpReference(tmp_path, feedback)).assert_logits(run.records)
    assert len(counts) == DRAFTS
    assert min(counts) > 8


@pytest.mark.parametrize("kind", slow_except(["glm4_moe", "qwen3_5_text"], MTP_KINDS))
def test_auto_drafts_with_the_layer_without_any_setting(kind: str, tmp_path: Path) -> None:
    model = loaded(tmp_path, kind)
    assert "mtp" in skipstone.Auto().start(ModelRunner(model), 1, 64).drafter.candidates  # type: ignore[attr-defined]
    prompts = families.padded([one.prompt for one in requests((9, 3), (40, 40))])
    for settings in ({}, {"do_sample": True, "seed": 3}):
        options: dict[str, Any] = {"max_new_tokens": 40, **settings}
        plain = skipstone.generate(model, prompts, Autoregressive(), **options)
        assert skipstone.generate(model, prompts, **options).new_tokens == plain.new_tokens
    without = skipstone.load(tmp_path, mtp=False)[0]
    assert "mtp" not in skipstone.Auto().start(ModelRunner(without), 1, 64).drafter.candidates  # type: ignore[attr-defined]
    assert skipstone.generate(without, prompts, **options).new_tokens == plain.new_tokens
