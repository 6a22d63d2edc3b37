"""A token's logits alone and beside others: every claim of `check` holds, and an engine that breaks one is found out by it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from skipstone import LayerSkip
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.native import library
from skipstone.engines.native.engine import NativeEngine
from skipstone.lab.check.batch_invariance import BatchInvarianceCheck
from skipstone.lab.check.check import Checker, CheckScale, ProbeResult
from tests.helpers import families
from tests.helpers.machine import prompt
from tests.helpers.pairwise import round_robin, slow_except

TEXTS = [prompt(length, seed=length) for length in (9, 14, 6)]
CLAIMS = ["passes", "exit", "trees", "batch", "thread", *["instructions"][: len(library.levels()) - 1]]
"""A word of every claim. Only a machine with several levels has the last one."""
needs_native = pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))
pytestmark = pytest.mark.usefixtures("no_gradients")


def broken(runner: ModelRunner) -> set[str]:
    return {short(title) for title, claim in BatchInvarianceCheck(runner, TEXTS).claims() if claim().fault is not None}


def short(title: str) -> str:
    return next(word for word in CLAIMS if word in title)


class BitsOnly(Checker):
    def _probes(self) -> list[tuple[str, Callable[[], None]]]:
        return self._bits()


def checked(engine: str, monkeypatch: pytest.MonkeyPatch) -> list[ProbeResult]:
    monkeypatch.setenv("SKIPSTONE_ENGINE", engine)
    return BitsOnly(families.build("llama"), LayerSkip(exit_layer=1), TEXTS, CheckScale(8, 100)).run().findings


@needs_native
@round_robin(
    name=["llama", "gemma3_text"], dtype=[pytest.param(dtype, id=str(dtype)) for dtype in (torch.float32, torch.bfloat16)]
)
def test_every_claim_holds_on_the_native_engine(name: str, dtype: torch.dtype) -> None:
    runner = ModelRunner(families.build(name).to(dtype), "native")
    claims = BatchInvarianceCheck(runner, TEXTS).claims()
    assert [short(title) for title, _ in claims] == CLAIMS
    for title, claim in claims:
        found = claim()
        assert found.fault is None, title
        assert found.logits > 50 * 97, "so many logits of a vocabulary of 97"
    assert claims[0][1]().logits == 7 * 80 * 97


Wrong = Callable[[Any, Tensor, Any, range], bool]
"""Of (engine, hidden states [b, n, d], pass, layers): whether this pass comes out wrong."""

MISTAKES: dict[str, tuple[Wrong, set[str]]] = {
    "a neighbour": (lambda _, hidden, *__: hidden.shape[1] > 1, {*CLAIMS}),
    "many neighbours": (lambda _, hidden, *__: hidden.shape[1] == 33, {"passes"}),
    "another row": (lambda _, hidden, *__: hidden.shape[0] > 1, {"batch"}),
    "a sibling": (lambda _, __, at, ___: at.tree is not None, {"trees"}),
    "late layers in wide passes": (lambda _, hidden, __, layers: hidden.shape[1] > 1 and layers.start > 0, {"exit"}),
    "a second thread": (lambda engine, *_: engine.threads > 1, {"thread"}),
    "other instructions": (lambda engine, *_: engine.level != library.levels()[-1], {"instructions"} & {*CLAIMS}),
}
"""What the row of an engine depends on though it must not, and the claims that this breaks."""


@needs_native
@pytest.mark.parametrize("mistake", slow_except([*MISTAKES][::2], MISTAKES))
def test_an_engine_whose_rows_depend_on_something_is_found_out(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (wrong, claims), right = MISTAKES[mistake], NativeEngine.run

    def run(self: Any, hidden: Tensor, at: Any, store: Any, layers: range, *skip: Any) -> Tensor:
        out = right(self, hidden, at, store, layers, *skip)
        return out + 1e-7 if wrong(self, hidden, at, layers) else out

    monkeypatch.setattr(NativeEngine, "run", run)
    runner = ModelRunner(families.build("llama"), "native")
    runner.engine.threads = 1  # pyright: ignore[reportAttributeAccessIssue]
    assert broken(runner) == claims
    if mistake == "a neighbour":
        findings = checked("native", monkeypatch)
        assert all(finding.bugs for finding in findings)
        assert "logits have other bits, they differ by up to" in findings[0].bugs[0]


@pytest.mark.slow
def test_without_a_promise_a_difference_is_said_and_is_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = checked("eager", monkeypatch)
    assert finding.name == "bits of a token in a batch (eager does not promise them)"
    assert not finding.bugs
    assert finding.tested == 3 * 80 * 97
    assert 0 < float(finding.note.removeprefix("they differ by up to ").partition(";")[0]) < 1e-2
