"""Faults of heads cost speed and change no text: each of these, planted into the running code, is found by the logits."""

import functools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from skipstone import Autoregressive, Eagle3, Mtp
from skipstone.decoding import session
from skipstone.decoding.loop import DecodingLoop
from skipstone.decoding.prefill import Prefill
from skipstone.decoding.request import Request
from skipstone.engines import eagle3_head
from skipstone.engines.eagle3_head import Eagle3Head
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.mtp_head import MtpHead
from skipstone.engines.partial_forward import PartialForward
from skipstone.methods.drafting.feature_drafter import ColumnReader, FeatureDrafter
from skipstone.models import eagle3
from tests.helpers import families, planted
from tests.helpers.feature_heads import eagle3_folder
from tests.helpers.feature_loop import DraftRecorder, Expected, finish, of_eagle3, prompts, record, requests, start
from tests.helpers.feature_references import MtpReference
from tests.helpers.mtp_checkpoints import MtpOptions, add_mtp_layers, tiny_target
from tests.helpers.right_heads import right_pair

Patch = pytest.MonkeyPatch
FOLDERS = tempfile.TemporaryDirectory()
"""Deleted at the end of the process."""


@functools.cache
def target(kind: str) -> tuple[ModelRunner, list[list[int]]]:
    """A target, of EAGLE-3 or with an MTP layer, and its texts of `requests()`."""
    if kind == "eagle3":
        model: Any = families.build("llama", layers=8)
    else:
        model = tiny_target("glm4_moe")
        model.config.name_or_path = str(add_mtp_layers(Path(FOLDERS.name) / kind, model, MtpOptions()))
    runner = ModelRunner(model, "eager")
    return runner, finish(start(Autoregressive(), runner, requests()), requests()).texts


def with_head(kind: str) -> tuple[Any, Expected]:
    """A method that has not read its head yet, and the reference."""
    model: Any = target(kind)[0].model
    if kind == "mtp":
        return Mtp(num_speculative_tokens=3), Expected(model, MtpReference(Path(model.config.name_or_path)))
    folder = eagle3_folder(Path(tempfile.mkdtemp(dir=FOLDERS.name)), model.config)
    return Eagle3(str(folder), num_speculative_tokens=3), of_eagle3(model, folder, (2, 4, 5))


def by_logits(kind: str) -> None:
    """A ragged batch with chunked prompts; drafts are accepted and rejected."""
    (runner, plain), (method, expected) = target(kind), with_head(kind)
    run = record(method, runner, requests(), plain)
    assert run.texts == plain
    assert len(expected.assert_logits(run.records)) == 3


def by_rows(kind: str) -> None:
    """Rows that are used again, one of them with a prefix of the other."""
    (runner, _), (method, expected) = target(kind), with_head(kind)
    loop = DecodingLoop(method.start(runner, 2, 160), chunk=16)
    drafter: Any = loop.session.drafter
    recorder, prompt = DraftRecorder(drafter), prompts((70,), seed=4)[0]
    loop.admit(0, Request(prompt, 20))
    for _ in range(9):
        loop.step()
    loop.release(0)
    loop.admit(0, Request(prompt.flip(0), 20))
    assert loop.admit(1, Request(torch.cat([prompt[:40], prompt[:9]]), 20), 0) == 0
    while loop.busy:
        loop.step()
    loop.release(1)  # a server does so with rows whose text has ended
    assert loop.admit(0, Request(torch.cat([prompt[:40], prompt[:9].flip(0)]), 20), 40, 1) == 39
    while loop.busy:
        loop.step()
    expected.assert_logits(recorder.records)


def by_acceptance() -> None:
    """All drafts of a right head are accepted."""
    target, folder = right_pair(Path(tempfile.mkdtemp(dir=FOLDERS.name)))
    asked = requests(new=(40, 40, 40))
    run = finish(start(Eagle3(str(folder), num_speculative_tokens=3), ModelRunner(target, "eager"), asked), asked)
    assert min(run.acceptance()) > 0.99


def d2t_off_by_one(patch: Patch) -> None:
    own: Any = eagle3._ids
    patch.setattr(eagle3, "_ids", lambda *given: own(*given) + 1)


def features_of_the_last_columns(patch: Patch) -> None:
    """After a rejection these are not the accepted ones."""
    patch.setattr(session, "_picked", lambda states, columns: states[len(states) - len(columns) :])


def a_rejected_column_kept(patch: Patch) -> None:
    patch.setattr(session, "_picked", lambda states, columns: states[: len(columns) + 1])


def features_of_the_step_before(patch: Patch) -> None:
    own: Any = PartialForward.features.fget
    kept: list[Tensor] = []

    def features(self: PartialForward) -> Tensor:
        kept.append(own(self))
        width = kept[-1].shape[1]
        before = kept[-2] if len(kept) > 1 else kept[-1]
        return before if before.shape[1] >= width else kept[-1]

    patch.setattr(PartialForward, "features", property(features))


def drafted_positions_off_by_one(patch: Patch) -> None:
    own = FeatureDrafter._pass

    def shifted(self: FeatureDrafter, *given: Any) -> Any:
        at = own(self, *given)
        return replace(at, positions=at.positions + 1)

    patch.setattr(FeatureDrafter, "_pass", shifted)


def without_norm(name: str) -> planted.Plant:
    def plant(patch: Patch) -> None:
        own: Any = eagle3.Eagle3Model._layer

        def layer(self: Any, *given: Any) -> Any:
            made = own(self, *given)
            setattr(made, name, nn.Identity())
            return made

        patch.setattr(eagle3.Eagle3Model, "_layer", layer)

    plant.__name__ = f"without_{name}"
    return plant


def mtp_without_enorm(patch: Patch) -> None:
    def enter(self: MtpHead, tokens: Tensor, states: Tensor) -> Tensor:
        return self.layer.eh_proj(torch.cat([self._embed(tokens), self.layer.hnorm(states)], -1))

    patch.setattr(MtpHead, "enter", enter)


def mtp_of_raw_states(patch: Patch) -> None:
    patch.setattr(MtpHead, "read_states", lambda self, states: states)


def depths_off_by_one(patch: Patch) -> None:
    own = eagle3_head.feature_depths
    patch.setattr(eagle3_head, "feature_depths", lambda *given: tuple(depth + 1 for depth in own(*given)))


def one_depth_off_by_one(patch: Patch) -> None:
    own = eagle3_head.feature_depths
    patch.setattr(eagle3_head, "feature_depths", lambda *given: (*own(*given)[:2], own(*given)[2] - 1))


def normed_feedback(patch: Patch) -> None:
    patch.setattr(Eagle3Head, "feed_back", lambda self, hidden: self.normed(hidden))


def raw_feedback(patch: Patch) -> None:
    patch.setattr(MtpHead, "feed_back", lambda self, hidden: hidden)


def projected_twice(patch: Patch) -> None:
    patch.setattr(Eagle3Head, "feed_back", lambda self, hidden: self.read_states(hidden.repeat(1, 1, 3)))


def state_before_embedding(patch: Patch) -> None:
    own = Eagle3Head.enter

    def enter(self: Eagle3Head, tokens: Tensor, states: Tensor) -> Tensor:
        return torch.cat(own(self, tokens, states).chunk(2, -1)[::-1], -1)

    patch.setattr(Eagle3Head, "enter", enter)


def mtp_state_before_embedding(patch: Patch) -> None:
    def enter(self: MtpHead, tokens: Tensor, states: Tensor) -> Tensor:
        layer = self.layer
        return layer.eh_proj(torch.cat([layer.hnorm(states), layer.enorm(self._embed(tokens))], -1))

    patch.setattr(MtpHead, "enter", enter)


def own_token_in_a_column(patch: Patch) -> None:
    """Column p has token p, not p + 1."""
    own = FeatureDrafter._take

    def take(self: FeatureDrafter, counts: dict[int, int]) -> Any:
        text, self.text = self.text, [[0, *one] for one in self.text]
        try:
            return own(self, counts)
        finally:
            self.text = text

    patch.setattr(FeatureDrafter, "_take", take)


def a_column_left_out(patch: Patch) -> None:
    def add(self: ColumnReader, row: int, tokens: Tensor) -> None:
        Prefill.add(self, row, tokens[1:] if len(tokens) > 2 else tokens)

    patch.setattr(ColumnReader, "add", add)


def a_column_read_twice(patch: Patch) -> None:
    own = FeatureDrafter._take

    def take(self: FeatureDrafter, counts: dict[int, int]) -> Any:
        tokens, states = own(self, counts)
        return tokens, torch.cat([states[:1], states[:-1]]) if len(states) > 1 else states

    patch.setattr(FeatureDrafter, "_take", take)


def states_of_the_last_request(patch: Patch) -> None:
    def reuse(self: FeatureDrafter, row: int, source_row: int, count: int) -> None:
        self.store.length[row] = count

    patch.setattr(FeatureDrafter, "reuse_tokens", reuse)


def whole_prefix_reused(patch: Patch) -> None:
    patch.setattr(FeatureDrafter, "reusable_tokens", lambda self, row, count: count)


def prefix_not_copied(patch: Patch) -> None:
    def reuse(self: FeatureDrafter, row: int, source_row: int, count: int) -> None:
        self.store.length[row] = count
        self.unread[row].clear()

    patch.setattr(FeatureDrafter, "reuse_tokens", reuse)


PROOFS: dict[str, Any] = {
    "by_acceptance": by_acceptance,
    **{f"{one.__name__}, {kind}": functools.partial(one, kind) for one in (by_logits, by_rows) for kind in ("eagle3", "mtp")},
}
OF_HEADS: dict[str, tuple[planted.Plant, ...]] = {
    "eagle3": (
        *(d2t_off_by_one, depths_off_by_one, one_depth_off_by_one, normed_feedback, projected_twice, state_before_embedding),
        *map(without_norm, ("hidden_norm", "input_layernorm", "post_attention_layernorm")),
    ),
    "mtp": (mtp_without_enorm, mtp_of_raw_states, raw_feedback, mtp_state_before_embedding),
}
OF_RIGHT_HEADS = (d2t_off_by_one, normed_feedback, state_before_embedding, own_token_in_a_column)
OF_COLUMNS = (
    *(features_of_the_last_columns, features_of_the_step_before, a_rejected_column_kept, drafted_positions_off_by_one),
    *(own_token_in_a_column, a_column_left_out, a_column_read_twice),
)
OF_ROWS = (states_of_the_last_request, whole_prefix_reused, prefix_not_copied)
CASES = [
    *((plant, PROOFS[f"by_logits, {kind}"]) for kind, plants in OF_HEADS.items() for plant in (*plants, *OF_COLUMNS)),
    *((plant, PROOFS[f"by_rows, {kind}"]) for kind in OF_HEADS for plant in OF_ROWS),
    *((plant, by_acceptance) for plant in OF_RIGHT_HEADS),
]


@pytest.mark.parametrize("proof", PROOFS)
def test_nothing_is_found_without_a_fault(proof: str) -> None:
    PROOFS[proof]()


@planted.found_by(*CASES, every=2)
def test_planted_faults_are_found(plant: Any, proof: Any, monkeypatch: Patch) -> None:
    planted.assert_found(plant, proof, monkeypatch)
