"""The MTP layers of checkpoints: found by their tensors, read as heads, equal to transformers' own MTP."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from skipstone.engines.feature_head import FeatureHead
from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.mtp_head import load_mtp
from skipstone.models.passes import Pass
from tests.helpers import families
from tests.helpers.support import save

TEXT = torch.randint(1, 97, (1, 13), generator=torch.Generator().manual_seed(3))
DRAFTS = (5, 41, 17)


def checkpoint(folder: Path, kind: str, layers: int = 4, change: Callable[[dict[str, Tensor]], Any] = lambda _: None) -> Path:
    """A tiny target with an MTP layer. kind: model type. change: alters the tensors."""
    save(families.build(kind, layers=2, seed=7), folder)
    block = {name: one for name, one in load_file(folder / "model.safetensors").items() if ".layers.1." in name}
    save(families.build(kind, layers=layers), folder)
    weights, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(1)
    size = weights["model.norm.weight"].shape[0]

    def norm(offset: float) -> Tensor:
        return 1 + 0.3 * torch.randn(size, generator=generator) - offset

    if kind.startswith("qwen"):
        place, names = "mtp.layers.0.", {"mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"}
        weights |= {f"{name}.weight": norm(1) for name in sorted(names)}
    else:
        place, names = f"model.layers.{layers}.", {"enorm", "hnorm", "shared_head.norm"}
        weights |= {f"{place}{name}.weight": norm(0) for name in sorted(names)}
        weights[f"{place}shared_head.head.weight"] = weights["lm_head.weight"].clone()
        weights[f"{place}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    fc = "mtp.fc.weight" if kind.startswith("qwen") else f"{place}eh_proj.weight"
    weights[fc] = torch.randn(size, 2 * size, generator=generator) * (2 * size) ** -0.5
    weights |= {name.replace("model.layers.1.", place): one for name, one in block.items()}
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def target_of(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@torch.no_grad()
def chain_logits(head: FeatureHead, tokens: Tensor, states: Tensor, drafts: Sequence[int]) -> Tensor:
    """Logits [len(drafts) + 1, V] of the last column of a text and of the drafts' columns after it.

    tokens: [1, n]. states: [1, n, d], those of columns. drafts: their tokens.
    """
    store, given, logits, start = KVCache(1, 1, 64), tokens, [], 0
    store.reserve(64)
    for step in range(len(drafts) + 1):
        stop = start + given.shape[1]
        positions = torch.arange(start, stop)[None]
        hidden = head.run(
            head.enter(given, states), Pass(positions, positions, None, slice(0, 1), stop, start), store, range(1)
        )
        logits.append(head.logits(hidden[:, -1:])[0, 0])
        states, start = head.feed_back(hidden[:, -1:]), stop
        given = torch.tensor([list(drafts[step : step + 1])])
    return torch.stack(logits)


@torch.no_grad()
def transformers_logits(model: Any, tokens: Tensor, states: Tensor, drafts: Sequence[int]) -> Tensor:
    """The same by transformers' own MTP, whose one layer runs again for every draft."""
    mtp = MtpModel.from_pretrained(model)
    cache, given, logits, start = MtpCache(config=model.config.get_mtp_config()), tokens, [], 1
    for step in range(len(drafts) + 1):
        positions = torch.arange(start, start + given.shape[1])[None]
        states = mtp.forward_layer(0, states, positions, cache, input_ids=given)[:, -given.shape[1] :]
        logits.append(mtp._project_to_logits(states)[0, -1])
        states, start = states[:, -1:], start + given.shape[1]
        given = torch.tensor([list(drafts[step : step + 1])])
    return torch.stack(logits)


@pytest.mark.parametrize(("kind", "layers"), [("deepseek_v3", 61), ("glm4_moe", 46)])
def test_logits_at_every_depth_are_those_of_transformers(kind: str, layers: int, tmp_path: Path) -> None:
    """transformers knows the MTP layer of these types by its number in published checkpoints."""
    model = target_of(checkpoint(tmp_path, kind, layers))
    target = ModelRunner(model, "eager")
    with torch.no_grad():
        states = model(TEXT, output_hidden_states=True).hidden_states[-1]  # after the final norm
        own = target.read_layers(TEXT, [range(layers)])[-1]
    head = load_mtp(target)
    assert head.depths == (layers,)
    torch.testing.assert_close(head.read_states(own), states)
    expected = transformers_logits(model, TEXT[:, 1:], states[:, :-1], DRAFTS)
    torch.testing.assert_close(chain_logits(head, TEXT[:, 1:], states[:, :-1], DRAFTS), expected, rtol=1e-4, atol=1e-4)
    raw = load_mtp(target, "raw")
    different = chain_logits(raw, TEXT[:, 1:], states[:, :-1], DRAFTS)
    assert torch.equal(different[0], chain_logits(head, TEXT[:, 1:], states[:, :-1], ())[0])
    assert not torch.allclose(different[1:], expected[1:], rtol=1e-2, atol=1e-2)


def test_the_embedding_and_the_lm_head_are_the_target_s(tmp_path: Path) -> None:
    model = target_of(checkpoint(tmp_path, "deepseek_v3"))
    head = load_mtp(ModelRunner(model, "eager"))
    assert head.model.get_input_embeddings().weight is model.get_input_embeddings().weight
    assert head.model.get_output_embeddings().weight is model.get_output_embeddings().weight
    assert all(one.requires_grad for one in model.parameters())
    own = [one for name, one in load_file(tmp_path / "model.safetensors").items() if ".layers.4." in name]
    assert head.nbytes == sum(one.nbytes for one in own) - 2 * model.lm_head.weight.nbytes


def test_an_embedding_and_an_lm_head_of_its_own_are_kept_if_they_differ(tmp_path: Path) -> None:
    names = [f"model.layers.4.{part}.weight" for part in ("embed_tokens", "shared_head.head")]
    folder = checkpoint(tmp_path, "deepseek_v3", change=lambda weights: [weights[name].mul_(1.5) for name in names])
    target = ModelRunner(target_of(folder), "eager")
    head, stored = load_mtp(target), load_file(folder / "model.safetensors")
    assert torch.equal(head.model.get_input_embeddings().weight, stored[names[0]])
    assert torch.equal(head.model.get_output_embeddings().weight, stored[names[1]])
    assert head.nbytes == sum(one.nbytes for name, one in stored.items() if ".layers.4." in name)
