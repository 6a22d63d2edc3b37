"""The references of MTP layers: they equal transformers' own, and every fault that a layer can have shows in the logits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from tests.helpers.feature_references import HeadReference, MtpReference, normed_states, rms_norm, target_states
from tests.helpers.mtp_checkpoints import MTP_KINDS, QWEN, mtp_checkpoint

VISIBLE = 0.1
"""Logits that differ by this share of their deviation differ by far more than rounding."""
ROUNDING = 1e-5
"""transformers' norms, routers and angles are computed in float32, in float64 models as well."""


def load(folder: Path) -> Any:
    """The target in float64, without its MTP layers."""
    options: dict[str, Any] = {"dtype": torch.float64, "experts_implementation": "eager", "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


class Text:
    """A target with an MTP layer, a text, and drafts. states: [T, D]. tokens: [T + 1]. drafts: [T, 2]."""

    def __init__(self, folder: Path, kind: str, **options: Any) -> None:
        self.kind, self.folder = kind, mtp_checkpoint(folder, kind, **options)
        self.model: Any = load(self.folder)
        generator = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(1, 97, (9,), generator=generator)
        self.drafts = torch.randint(1, 97, (8, 2), generator=generator)
        self.states = normed_states(self.model, self.tokens[:-1])
        self.expected = MtpReference(self.folder).draft_logits(self.states, self.tokens, self.drafts)

    def differences(self, head: HeadReference, states: Tensor | None = None) -> list[float]:
        """The largest difference of a head's logits at each depth, as a share of their deviation. states: what it reads."""
        found = head.draft_logits(self.states if states is None else states, self.tokens, self.drafts)
        return ((found - self.expected).abs().amax((0, 2)) / self.expected.std()).tolist()


@pytest.fixture(scope="module", params=MTP_KINDS)
def text(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Text:
    return Text(tmp_path_factory.mktemp(request.param), request.param)


def transformers_own(text: Text) -> MtpModel:
    """The MTP layer as transformers loads it from the folder. It knows 3 of the 6 types at the layer numbers of their large
    models only, and needs to be told where the layer is and what it is made of."""
    layers = text.model.config.num_hidden_layers
    if text.kind in QWEN:
        text.model.config.mtp_layer_types = ["full_attention"]
    else:
        text.model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{layers}\..*"]
    text.model.config.mtp_mlp_layer_types = ["sparse"]
    text.model.config.num_mtp_layers = 1
    own: Any = MtpModel.from_pretrained(text.model)
    return own.double().eval()


@torch.no_grad()
def recycled(own: Any, text: Text, column: int) -> Tensor:
    """Logits [3, V] of a chain that gives the layer its own output, with transformers' cache. Positions start at 1."""
    cache, found = MtpCache(config=own.config), []
    hidden, tokens = text.states[None, : column + 1], text.tokens[None, 1 : column + 2]
    positions = torch.arange(1, column + 2)[None]
    for draft in (*text.drafts[column], None):
        hidden = own.forward_layer(0, hidden, positions, cache, input_ids=tokens)[:, -1:]
        found.append(own.shared_head(hidden)[0, 0])
        if draft is not None:
            tokens, positions = draft[None, None], positions[:, -1:] + 1
    return torch.stack(found)


def test_equals_transformers_at_every_depth(text: Text) -> None:
    own = transformers_own(text)
    for column in (0, 4, 7):
        torch.testing.assert_close(recycled(own, text, column), text.expected[column], rtol=0, atol=ROUNDING)


class WithoutNorm(MtpReference):
    missing = ""

    def norm(self, values: Tensor, name: str) -> Tensor:
        return values if name == self.missing else super().norm(values, name)


class WithoutEnorm(WithoutNorm):
    missing = "enorm"


class WithoutHnorm(WithoutNorm):
    missing = "hnorm"


class WithoutFinalNorm(WithoutNorm):
    missing = "shared_head.norm"


class SwappedNorms(MtpReference):
    def norm(self, values: Tensor, name: str) -> Tensor:
        return super().norm(values, {"enorm": "hnorm", "hnorm": "enorm"}.get(name, name))


class StateBeforeEmbedding(MtpReference):
    def enter(self, tokens: Tensor, states: Tensor) -> Tensor:
        first, second = self.weights["eh_proj.weight"].chunk(2, 1)
        embedded = self.norm(self.weights["embed_tokens.weight"][tokens], "enorm")
        return self.norm(states, "hnorm") @ first.T + embedded @ second.T


class OtherOffset(MtpReference):
    """Norms that are offsets from one, read as they are, or the reverse."""

    def norm(self, values: Tensor, name: str) -> Tensor:
        return rms_norm(values, self.weights[f"{name}.weight"] + 1 - self.offset, self.config.rms_norm_eps)


class OwnToken(MtpReference):
    def enter(self, tokens: Tensor, states: Tensor) -> Tensor:
        return super().enter(tokens.roll(1), states)


class ShiftedDrafts(MtpReference):
    def draft_positions(self, columns: int, drafts: int) -> Tensor:
        return torch.cat([torch.arange(columns), columns + 1 + torch.arange(drafts)])


FAULTS = [WithoutEnorm, WithoutHnorm, WithoutFinalNorm, SwappedNorms, StateBeforeEmbedding, OtherOffset, OwnToken]


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_all_columns_show(text: Text, fault: Callable[..., MtpReference]) -> None:
    assert min(text.differences(fault(text.folder))) > VISIBLE


def test_faults_of_drafted_columns_show(text: Text) -> None:
    for head in (ShiftedDrafts(text.folder), MtpReference(text.folder, "raw")):
        first, *later = text.differences(head)
        assert first == 0
        assert min(later) > VISIBLE


def test_other_states_show(text: Text) -> None:
    head = MtpReference(text.folder)
    stale = text.states.clone()
    stale[-1] = stale[-2]
    assert min(text.differences(head, stale)) > VISIBLE
    layers = text.model.config.num_hidden_layers
    for depth in (layers - 1, layers):
        assert min(text.differences(head, target_states(text.model, text.tokens[:-1], [depth]))) > VISIBLE


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe_lite"])
def test_own_copies(tmp_path: Path, kind: str) -> None:
    text = Text(tmp_path / "absent", kind)
    assert text.differences(MtpReference(mtp_checkpoint(tmp_path / "same", kind, copies="same"))) == [0, 0, 0]
    assert min(text.differences(MtpReference(mtp_checkpoint(tmp_path / "other", kind, copies="other")))) > VISIBLE
    assert min(text.differences(MtpReference(mtp_checkpoint(tmp_path / "norm", kind, shared_norm=False)))) > VISIBLE


@pytest.mark.parametrize("options", [{"fused": True}, {"files": 3}], ids=str)
@pytest.mark.parametrize("kind", ["glm4_moe", "qwen3_next"])
def test_other_files_hold_the_same_layer(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    text = Text(tmp_path / "text", kind)
    other = mtp_checkpoint(tmp_path / "other", kind, **options)
    assert text.differences(MtpReference(other)) == [0, 0, 0]
    assert torch.equal(normed_states(load(other), text.tokens[:-1]), text.states)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_files_of_multimodal_models(tmp_path: Path, kind: str) -> None:
    text = Text(tmp_path / "text", kind)
    wrapped = mtp_checkpoint(tmp_path / "wrapped", kind, wrapped=True)
    assert text.differences(MtpReference(wrapped)) == [0, 0, 0]
    assert torch.equal(normed_states(load(wrapped), text.tokens[:-1]), text.states)


@pytest.mark.parametrize(("kind", "layers"), [("deepseek_v3", 61), ("glm4_moe", 46)])
def test_equals_transformers_at_the_layer_numbers_of_published_models(tmp_path: Path, kind: str, layers: int) -> None:
    """transformers finds the MTP layers by itself."""
    text = Text(tmp_path, kind, layers=layers)
    own: Any = MtpModel.from_pretrained(text.model)
    torch.testing.assert_close(recycled(own.double().eval(), text, 7), text.expected[7], rtol=0, atol=ROUNDING)
