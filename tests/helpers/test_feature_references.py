"""The references of heads that draft from states, and the tiny heads: every fault that a head can have shows in the logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import families
from tests.helpers.feature_heads import LLAMA3_ROPE, eagle3_folder, edit_weights
from tests.helpers.feature_references import (
    Eagle3Reference,
    HeadReference,
    normed_states,
    rms_norm,
    speculators_oracles,
    target_states,
)

DEPTHS = [2, 4, 5]
"""Of a target with 8 layers: 2, N // 2 and N - 3."""
VISIBLE = 0.1
"""Logits that differ by this share of their deviation differ by far more than rounding."""


class Text:
    """A target with 8 layers, a text, and drafts. states: [T, 3 * D]. tokens: [T + 1]. drafts: [T, 2]."""

    def __init__(self) -> None:
        self.model: Any = families.build("llama", layers=8).double()
        generator = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(1, 97, (11,), generator=generator)
        self.drafts = torch.randint(1, 97, (10, 2), generator=generator)
        self.states = target_states(self.model, self.tokens[:-1], DEPTHS)
        self.embedding: Tensor = self.model.get_input_embeddings().weight


@pytest.fixture(scope="module")
def text() -> Text:
    return Text()


def differences(text: Text, right: HeadReference, wrong: HeadReference, states: Tensor | None = None) -> list[float]:
    """The largest difference of the logits at each depth, as a share of their deviation. states: what `wrong` reads."""
    ours = right.draft_logits(text.states, text.tokens, text.drafts)
    others = wrong.draft_logits(text.states if states is None else states, text.tokens, text.drafts)
    apart = torch.where(ours == others, torch.zeros((), dtype=torch.float64), (ours - others).abs())
    return (apart.amax((0, 2)) / ours[ours.isfinite()].std()).tolist()


class WithoutNorm(Eagle3Reference):
    missing = ""

    def norm(self, values: Tensor, name: str) -> Tensor:
        return values if self.missing in name else super().norm(values, name)


class WithoutHiddenNorm(WithoutNorm):
    missing = "hidden_norm"


class WithoutInputNorm(WithoutNorm):
    missing = "input_layernorm"


class WithoutMiddleNorm(WithoutNorm):
    missing = "post_attention_layernorm"


class StateBeforeEmbedding(Eagle3Reference):
    def layer(self, entering: Tensor, positions: Tensor) -> Tensor:
        embedded, state = entering.chunk(2, -1)
        return super().layer(torch.cat([state, embedded], -1), positions)


class OwnToken(Eagle3Reference):
    def enter(self, tokens: Tensor, states: Tensor) -> Tensor:
        return super().enter(tokens.roll(1), states)


class ShiftedDrafts(Eagle3Reference):
    def draft_positions(self, columns: int, drafts: int) -> Tensor:
        return torch.cat([torch.arange(columns), columns + 1 + torch.arange(drafts)])


class OtherFeedBack(Eagle3Reference):
    def feed_back(self, hidden: Tensor) -> Tensor:
        return hidden if self.flags.get("norm_output") else self.norm(hidden, "norm")


class ProjectedTwice(Eagle3Reference):
    def feed_back(self, hidden: Tensor) -> Tensor:
        return self.read_states(hidden.repeat(3))


@pytest.mark.parametrize("fault", [WithoutHiddenNorm, WithoutInputNorm, WithoutMiddleNorm, StateBeforeEmbedding, OwnToken])
def test_faults_of_all_columns_show(text: Text, tmp_path: Path, fault: Any) -> None:
    folder = eagle3_folder(tmp_path, text.model.config)
    found = differences(text, Eagle3Reference(folder, text.embedding), fault(folder, text.embedding))
    assert min(found) > VISIBLE


@pytest.mark.parametrize("norm_output", [False, True])
@pytest.mark.parametrize("fault", [ShiftedDrafts, OtherFeedBack, ProjectedTwice])
def test_faults_of_drafted_columns_show(text: Text, tmp_path: Path, fault: Any, norm_output: bool) -> None:
    folder = eagle3_folder(tmp_path, text.model.config, norm_output=norm_output)
    first, *later = differences(text, Eagle3Reference(folder, text.embedding), fault(folder, text.embedding))
    assert first == 0
    assert min(later) > VISIBLE


@pytest.mark.parametrize("name", ["fc_norm", "norm_before_fc", "norm_before_residual", "norm_output"])
def test_flags_count(text: Text, tmp_path: Path, name: str) -> None:
    folder = eagle3_folder(tmp_path, text.model.config, **{name: True})
    without = Eagle3Reference(folder, text.embedding)
    without.flags[name] = False
    assert min(differences(text, Eagle3Reference(folder, text.embedding), without)[1:]) > VISIBLE


@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])
def test_norms_and_biases_of_queries_and_keys_count(text: Text, tmp_path: Path, kind: str) -> None:
    folder = eagle3_folder(tmp_path, text.model.config, kind=kind)
    without = Eagle3Reference(folder, text.embedding)
    names = [name for name in without.weights if "q_norm" in name or "k_norm" in name or name.endswith("bias")]
    assert len(names) == {"qwen3": 2, "qwen2": 3}[kind]
    for name in names:
        del without.weights[name]
    assert min(differences(text, Eagle3Reference(folder, text.embedding), without)) > VISIBLE


def test_own_embedding_and_frequencies_count(text: Text, tmp_path: Path) -> None:
    folder = eagle3_folder(tmp_path, text.model.config, embedding="own", rope_scaling=LLAMA3_ROPE)
    right, embedding, plain = (Eagle3Reference(folder) for _ in range(3))
    embedding.embedding = text.embedding.double()
    plain.config = {**plain.config, "rope_scaling": None}
    assert min(differences(text, right, embedding)) > VISIBLE
    assert min(differences(text, right, plain)) > VISIBLE


def test_other_states_show(text: Text, tmp_path: Path) -> None:
    head = Eagle3Reference(eagle3_folder(tmp_path, text.model.config), text.embedding)
    for depths in ([3, 4, 5], [2, 3, 5], [2, 4, 6], [4, 2, 5]):
        assert min(differences(text, head, head, target_states(text.model, text.tokens[:-1], depths))) > VISIBLE
    stale = text.states.clone()
    stale[-1] = stale[-2]
    assert min(differences(text, head, head, stale)) > VISIBLE


def test_draft_ids_off_by_one_show(text: Text, tmp_path: Path) -> None:
    folder = eagle3_folder(tmp_path, text.model.config)
    right = Eagle3Reference(folder, text.embedding)
    edit_weights(folder, lambda weights: weights["d2t"].add_(1))
    assert min(differences(text, right, Eagle3Reference(folder, text.embedding))) > VISIBLE


def test_both_layouts_and_files_hold_the_same_head(text: Text, tmp_path: Path) -> None:
    expected = Eagle3Reference(eagle3_folder(tmp_path / "one", text.model.config), text.embedding)
    for number, options in enumerate(({"layout": "speculators"}, {"file": "bin"}, {"prefix": "model."}, {"old_rope": False})):
        folder = eagle3_folder(tmp_path / str(number), text.model.config, **options)
        assert differences(text, expected, Eagle3Reference(folder, text.embedding)) == [0, 0, 0]


def test_the_last_depth_is_before_the_final_norm(text: Text) -> None:
    before = target_states(text.model, text.tokens, [8])
    norm: Any = text.model.model.norm
    expected = rms_norm(before, norm.weight.detach(), text.model.config.rms_norm_eps)
    torch.testing.assert_close(normed_states(text.model, text.tokens), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "llama_scaled", "qwen3", "qwen3_normed"])
def test_equals_speculators_at_every_depth(name: str) -> None:
    """Its norms and angles are computed in float32."""
    oracle = speculators_oracles()[name]
    head = Eagle3Reference(oracle.folder)
    logits = head.draft_logits(oracle.states, oracle.tokens, oracle.drafts)
    torch.testing.assert_close(logits[..., head.ids], oracle.logits, rtol=0, atol=5e-5)
