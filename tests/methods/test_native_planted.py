"""The proofs can fail on the native engine: mistakes in what is handed to the library, and in the library, are found."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from skipstone import LayerSkip
from skipstone.engines.engine import ChainOutputs
from skipstone.engines.native import build, library
from skipstone.engines.native.engine import NativeEngine
from skipstone.models.passes import Pass
from tests.helpers import planted
from tests.helpers.conformance import ROWS, assert_greedy_equals_alone
from tests.helpers.enumeration import VOCAB, proves
from tests.helpers.machine import llama
from tests.helpers.native import NATIVE_ONLY
from tests.helpers.pairwise import slow_except
from tests.helpers.trees import Trees

pytestmark = [*NATIVE_ONLY, pytest.mark.filterwarnings("ignore:.*x the speed of plain decoding:RuntimeWarning")]
Patch = pytest.MonkeyPatch


def scores_drafts(at: Pass) -> bool:
    """Whether a pass is of drafts: neither of one token nor of a prompt."""
    return 1 < at.shape[1] < 9


def key_in_the_wrong_slot(patch: Patch) -> None:
    own = NativeEngine.run

    def run(self: Any, hidden: Tensor, at: Pass, *given: Any) -> Tensor:
        if scores_drafts(at):
            slots = at.slots.clone()
            slots[:, [0, 1]] = at.slots[:, [1, 0]]
            at = replace(at, slots=slots)
        return own(self, hidden, at, *given)

    patch.setattr(NativeEngine, "run", run)


def rotary_position_off_by_one(patch: Patch) -> None:
    own = NativeEngine.run

    def run(self: Any, hidden: Tensor, at: Pass, *given: Any) -> Tensor:
        self._fill_rotary(at.extent + 1)
        shift = 4 * int(scores_drafts(at))  # bytes of a float
        for table in self._pass.rotary:
            table.cos, table.sin = (table.cos or 0) + shift * table.size, (table.sin or 0) + shift * table.size
        out = own(self, hidden, at, *given)
        for table in self._pass.rotary:
            table.cos, table.sin = (table.cos or 0) - shift * table.size, (table.sin or 0) - shift * table.size
        return out

    patch.setattr(NativeEngine, "run", run)


def head_reads_the_state_before(patch: Patch) -> None:
    for name in ("project", "greedy_tokens"):
        own = getattr(NativeEngine, name)
        patch.setattr(NativeEngine, name, lambda self, states, *more, own=own: own(self, states.roll(1, 1), *more))


def skip_set_ignored(patch: Patch) -> None:
    patch.setattr(NativeEngine, "_skip_bits", lambda self, skip: None)


def state_of_the_last_draft(patch: Patch) -> None:
    own = NativeEngine.chain

    def chain(self: Any, *given: Any) -> ChainOutputs:
        end = own(self, *given)
        for row, count in enumerate(end.counts):
            end.states[row, count] = end.states[row, max(0, count - 1)]
        return end

    patch.setattr(NativeEngine, "chain", chain)


def one_bit_in_wide_passes(patch: Patch) -> None:
    own = NativeEngine.run

    def run(self: Any, hidden: Tensor, at: Pass, *given: Any) -> Tensor:
        out = own(self, hidden, at, *given)
        return out.nextafter(out + 1) if scores_drafts(at) and at.shape[1] < 3 else out

    patch.setattr(NativeEngine, "run", run)


def greedily(method: str) -> planted.Proof:
    return lambda: assert_greedy_equals_alone(ROWS[method], "llama", 2, 4, 16, {})


def by_law(method: Any) -> planted.Proof:
    def proof() -> None:
        proves(llama(vocab=VOCAB, hidden=8, layers=2, head=2.0, seed=2), method, new=3, native=True)

    return proof


TREES = Trees(nodes=5, branching=0.7, seed=5)
SKIP = LayerSkip(exit_layer=1, num_speculative_tokens=2)


@planted.found_by(
    (planted.siblings_see_one_another, by_law(TREES)),
    (planted.accepted_path_not_moved, greedily("swift")),
    (key_in_the_wrong_slot, greedily("layerskip")),
    (rotary_position_off_by_one, greedily("swift")),
    (head_reads_the_state_before, greedily("adadecode")),
    (skip_set_ignored, greedily("self_speculative")),
    (state_of_the_last_draft, greedily("layerskip")),
    (one_bit_in_wide_passes, by_law(SKIP)),
    every=3,
)
def test_planted_bugs_are_found(plant: Any, proof: Any, monkeypatch: Patch) -> None:
    monkeypatch.setenv("SKIPSTONE_ENGINE", "native")
    proof()
    planted.assert_found(plant, proof, monkeypatch)


BROKEN: dict[str, tuple[str, str, planted.Proof]] = {
    "siblings seen": (" != 0 || slot < seen;", " != 2;", by_law(TREES)),
    "key in the neighbour's slot": ("+ entry.slot) * padded", "+ (entry.slot ^ 1)) * padded", by_law(SKIP)),
    "a bit that depends on the rows beside": ("y * layer.residual", "y * (layer.residual + (n > 1) * 2e-7f)", by_law(SKIP)),
}


@pytest.mark.parametrize("mistake", slow_except((), BROKEN, full=["siblings seen"]))
def test_mistakes_in_the_library_are_found(mistake: str, monkeypatch: Patch, tmp_path: Path) -> None:
    right, wrong, proof = BROKEN[mistake]
    shutil.copytree(build.CSRC, tmp_path / "csrc")
    source = tmp_path / "csrc" / build.SOURCE
    text = source.read_text(encoding="utf-8")
    assert text.count(right) == 1
    source.write_text(text.replace(right, wrong), encoding="utf-8")
    level = next(one.name for one in build.levels() if one.features <= library.features())
    build.build([level], tmp_path, ["-O1"], tmp_path / "csrc")
    broken = library.find(tmp_path, library.features(), level)
    assert broken.library is not None, broken.missing
    proof()
    planted.assert_found(lambda patch: patch.setattr(library, "load", lambda: broken.library), proof, monkeypatch)
