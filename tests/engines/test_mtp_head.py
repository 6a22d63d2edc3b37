"""The MTP layers of checkpoints: found by their tensors, read as heads, equal to transformers' own MTP."""

import gc
import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

import skipstone
from skipstone.engines.feature_head import FeatureHead
from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.mtp_head import MtpHead, attached_mtp, load_mtp, mtp_notes
from skipstone.models.mtp_layouts import NoMtpError, find_mtp
from skipstone.models.passes import Pass
from skipstone.models.quantised_checkpoints import kernels
from tests.helpers import families, quantised
from tests.helpers.feature_heads import edit_weights, random_matrix, random_norm
from tests.helpers.feature_references import MtpReference, normed_states
from tests.helpers.mtp_checkpoints import MTP_KINDS, mtp_checkpoint
from tests.helpers.support import save, tokenizer

TEXT = torch.randint(1, 97, (1, 13), generator=torch.Generator().manual_seed(3))
DRAFTS = (5, 41, 17)
Change = Callable[[dict[str, Tensor]], Any]


def checkpoint(folder: Path, kind: str, change: Change = lambda _: None, **options: Any) -> Path:
    """A tiny target with an MTP layer, and a tokenizer. change: alters the tensors. options: of `MtpOptions`."""
    mtp_checkpoint(folder, kind, **options)
    if (folder / "model.safetensors").exists():
        edit_weights(folder, change)
    tokenizer().save_pretrained(folder)
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
    """The same by transformers' own MTP. Its one layer runs again for every draft."""
    config = model.config
    if getattr(config, "mtp_layer_types", None) is None:
        config.num_mtp_layers, config.mtp_layer_types, config.mtp_mlp_layer_types = 1, ["full_attention"], ["sparse"]
    mtp = MtpModel.from_pretrained(model)
    cache, given, logits, start = MtpCache(config=model.config.get_mtp_config()), tokens, [], 1
    for step in range(len(drafts) + 1):
        positions = torch.arange(start, start + given.shape[1])[None]
        states = mtp.forward_layer(0, states, positions, cache, input_ids=given)[:, -given.shape[1] :]
        logits.append(mtp._project_to_logits(states)[0, -1])
        states, start = states[:, -1:], start + given.shape[1]
        given = torch.tensor([list(drafts[step : step + 1])])
    return torch.stack(logits)


VARIANTS: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in MTP_KINDS},
    **{f"{kind} again": {"copies": "same", "files": 3} for kind in ("deepseek_v3", "glm4_moe")},
    **{f"{kind} with its own embedding": {"copies": "other"} for kind in ("deepseek_v3", "glm4_moe_lite")},
    **{f"{kind} without a norm": {"shared_norm": False} for kind in ("deepseek_v3", "glm4_moe")},
    **{f"{kind} fused": {"fused": True} for kind in ("glm4_moe", "qwen3_next", "qwen3_5_moe_text")},
    **{f"{kind} wrapped": {"wrapped": True, "files": 2} for kind in ("qwen3_5_text", "qwen3_5_moe_text")},
    **{f"{kind} of two": {"mtp_layers": 2} for kind in ("deepseek_v3", "qwen3_5_text")},
}


@pytest.mark.parametrize("feedback", ["normed", "raw"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_at_every_depth_are_those_of_the_reference(variant: str, feedback: Any, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, variant.split()[0], **VARIANTS[variant])
    target = ModelRunner(skipstone.load(folder)[0], "eager")
    states = normed_states(target.model, TEXT[0])
    head, drafts = load_mtp(target, feedback), torch.tensor(DRAFTS)
    torch.testing.assert_close(
        head.read_states(target.read_layers(TEXT, [range(4)])[-1])[0].double(), states, rtol=0, atol=1e-4
    )
    expected, _ = MtpReference(folder, feedback).chain(states[:-1], TEXT[0], len(DRAFTS) + 1, drafts)
    found = chain_logits(head, TEXT[:, 1:], states[None, :-1].float(), DRAFTS).double()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
    other, _ = MtpReference(folder, {"normed": "raw", "raw": "normed"}[feedback]).chain(states[:-1], TEXT[0], 2, drafts)
    assert (other[1] - expected[1]).abs().max() > 0.1, "the feedback makes no difference, so nothing is proved"


@pytest.mark.parametrize(("kind", "layers"), [("deepseek_v3", 61), ("glm4_moe", 46), ("glm4_moe_lite", 47), ("qwen3_next", 4)])
def test_logits_at_every_depth_are_those_of_transformers(kind: str, layers: int, tmp_path: Path) -> None:
    """transformers knows the MTP layer of three types by its number in published checkpoints."""
    model = target_of(checkpoint(tmp_path, kind, layers=layers))
    with torch.no_grad():
        states = model(TEXT, output_hidden_states=True).hidden_states[-1]  # after the final norm
    head = load_mtp(ModelRunner(model, "eager"))
    assert head.depths == (layers,)
    expected = transformers_logits(model, TEXT[:, 1:], states[:, :-1], DRAFTS)
    torch.testing.assert_close(chain_logits(head, TEXT[:, 1:], states[:, :-1], DRAFTS), expected, rtol=0, atol=1e-4)


def test_a_layer_with_a_window_is_that_of_transformers(tmp_path: Path) -> None:
    """Mellum has Qwen's layout, and its config says that the layer has a window."""

    def add(weights: dict[str, Tensor]) -> None:
        generator = torch.Generator().manual_seed(0)
        block = {name.replace("model.layers.2.", "mtp.layers.0."): one for name, one in weights.items() if ".layers.2." in name}
        norms = ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight")
        weights |= block | {name: random_norm(generator, 32) for name in norms}
        weights["mtp.fc.weight"] = random_matrix(generator, 32, 64)

    model = target_of(edit_weights(save(families.build("mellum", num_mtp_layers=1), tmp_path), add))
    head, text = (
        load_mtp(ModelRunner(model, "eager")),
        torch.randint(1, 97, (1, 30), generator=torch.Generator().manual_seed(1)),
    )
    assert head.reaches[0].window == families.WINDOW
    with torch.no_grad():
        states = model(text, output_hidden_states=True).hidden_states[-1]
    expected = transformers_logits(model, text[:, 1:], states[:, :-1], DRAFTS)
    torch.testing.assert_close(chain_logits(head, text[:, 1:], states[:, :-1], DRAFTS), expected, rtol=0, atol=1e-4)


def test_the_embedding_and_the_lm_head_are_the_target_s(tmp_path: Path) -> None:
    model = target_of(checkpoint(tmp_path, "deepseek_v3", copies="same"))
    head = load_mtp(ModelRunner(model, "eager"))
    assert head.model.get_input_embeddings().weight is model.get_input_embeddings().weight
    assert head.model.get_output_embeddings().weight is model.get_output_embeddings().weight
    assert head.model.config.vocab_size == model.config.vocab_size
    assert all(one.requires_grad for one in model.parameters())
    assert not any(one.requires_grad for one in head.model.get_decoder().layers.parameters())
    own = [one for name, one in load_file(tmp_path / "model.safetensors").items() if ".layers.4." in name]
    assert head.nbytes == sum(one.nbytes for one in own) - 2 * model.lm_head.weight.nbytes


def test_a_tied_lm_head_is_shared_too(tmp_path: Path) -> None:
    folder = checkpoint(
        tmp_path, "qwen3_5_text", lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()})
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    target = ModelRunner(target_of(folder), "eager")
    head, embedding = load_mtp(target), target.model.get_input_embeddings().weight
    assert head.model.get_input_embeddings().weight is head.model.get_output_embeddings().weight is embedding
    expected, _ = MtpReference(folder).chain(torch.ones(12, 32, dtype=torch.float64), TEXT[0], 1)
    torch.testing.assert_close(chain_logits(head, TEXT[:, 1:], torch.ones(1, 12, 32), ()).double(), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("kind", MTP_KINDS)
def test_weights_have_the_dtypes_of_the_target_s(kind: str, tmp_path: Path) -> None:
    target = ModelRunner(skipstone.load(checkpoint(tmp_path, kind, dtype=torch.bfloat16))[0])
    head = attached_mtp(target)
    assert head is not None
    own, known = (one.model.get_decoder().layers[-1].state_dict() for one in (head, target))
    assert {name: one.dtype for name, one in own.items()} == {name: one.dtype for name, one in known.items()}
    assert head.dtype == torch.bfloat16
    assert chain_logits(head, TEXT, torch.ones(1, TEXT.shape[1], 32).bfloat16(), DRAFTS).isfinite().all()


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe_lite"])
def test_a_layer_without_experts_is_dense(kind: str, tmp_path: Path) -> None:
    def dense(weights: dict[str, Tensor]) -> None:
        for name in [name for name in weights if name.startswith("model.layers.4.mlp.")]:
            del weights[name]
        mlp = {name: one for name, one in weights.items() if name.startswith("model.layers.0.mlp.")}
        weights |= {name.replace(".0.", ".4."): one for name, one in mlp.items()}

    model = target_of(checkpoint(tmp_path, kind, dense))
    own, first = (one.get_decoder().layers[0].mlp for one in (load_mtp(ModelRunner(model)).model, model))
    assert type(own) is type(first)
    assert all(torch.equal(one, other) for one, other in zip(own.parameters(), first.parameters(), strict=True))


def test_an_embedding_and_an_lm_head_of_its_own_are_kept_if_they_differ(tmp_path: Path) -> None:
    folder, names = (
        checkpoint(tmp_path, "deepseek_v3", copies="other"),
        [f"model.layers.4.{part}.weight" for part in ("embed_tokens", "shared_head.head")],
    )
    target = ModelRunner(target_of(folder), "eager")
    head, stored = load_mtp(target), load_file(folder / "model.safetensors")
    assert torch.equal(head.model.get_input_embeddings().weight, stored[names[0]])
    assert torch.equal(head.model.get_output_embeddings().weight, stored[names[1]])
    assert head.nbytes == sum(one.nbytes for name, one in stored.items() if ".layers.4." in name)


OTHER_LAYOUTS = {
    "the layout of MiMo, which skipstone does not run": ["model.mtp_layers.0.input_proj.weight"],
    "the layout of MiMo-V2 and LongCat": ["model.mtp.layers.0.eh_proj.weight", "model.mtp.layers.0.enorm.weight"],
    "the layout of Step": ["model.layers.4.eh_proj.weight", "model.layers.4.transformer.shared_head.norm.weight"],
    "the layout of Ling and Hunyuan": ["model.layers.4.eh_proj.weight", "model.layers.4.final_layernorm.weight"],
    "the layout of ERNIE": ["model.mtp_block.0.mlp.up_proj.weight", "model.mtp_linear_proj.0.weight"],
    r"a layout that skipstone does not know \(mtp.0.e_proj.weight\)": ["mtp.0.e_proj.weight", "mtp.0.h_proj.weight"],
}


@pytest.mark.parametrize("layout", OTHER_LAYOUTS)
def test_other_layouts_are_named(layout: str) -> None:
    names = ["model.embed_tokens.weight", "model.layers.3.input_layernorm.weight", *OTHER_LAYOUTS[layout]]
    with pytest.raises(NoMtpError, match=f"^has MTP layers in {layout}"):
        find_mtp(names)


def test_a_checkpoint_with_another_layout_loads_without_a_warning(tmp_path: Path) -> None:
    plain = save(families.build("llama"), tmp_path / "plain")
    weights = load_file(plain / "model.safetensors")
    weights["model.mtp_layers.0.input_proj.weight"] = torch.ones(8)
    save_file(weights, plain / "model.safetensors", {"format": "pt"})
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        target = ModelRunner(skipstone.load(plain)[0])
    assert attached_mtp(target) is None
    with pytest.raises(ValueError, match=f"^{plain} has MTP layers in the layout of MiMo, which skipstone does not run$"):
        load_mtp(target)


def test_the_first_of_several_layers_is_taken_and_a_note_says_so(tmp_path: Path) -> None:
    assert find_mtp([f"model.language_model.layers.{layer}.eh_proj.weight" for layer in (10, 9)]).names == {
        "eh_proj.weight": "model.language_model.layers.9.eh_proj.weight"
    }
    qwen = find_mtp(["mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight", "mtp.layers.1.mlp.up_proj.weight"])
    assert (qwen.names["model.layers.0.mlp.up_proj.weight"], qwen.num_layers) == ("mtp.layers.0.mlp.up_proj.weight", 2)
    target = ModelRunner(target_of(checkpoint(tmp_path, "deepseek_v3", mtp_layers=2)), "eager")
    assert mtp_notes(target) == []
    own = load_file(tmp_path / "model.safetensors")["model.layers.4.eh_proj.weight"]
    assert torch.equal(load_mtp(target).layer.eh_proj.weight, own)
    assert mtp_notes(target)[1:] == ["the checkpoint has 2 MTP layers, and skipstone runs the first"]


BLOCK = "model.layers.4."
MISFITS: dict[str, tuple[str, Change]] = {
    f"it lacks {BLOCK}enorm.weight": ("deepseek_v3", lambda weights: weights.pop(f"{BLOCK}enorm.weight")),
    f"it lacks {BLOCK}self_attn.o_proj.weight": ("glm4_moe", lambda weights: weights.pop(f"{BLOCK}self_attn.o_proj.weight")),
    f"it lacks {BLOCK}mlp.experts.1.up_proj.weight": (
        "deepseek_v3", lambda weights: weights.pop(f"{BLOCK}mlp.experts.1.up_proj.weight")
    ),
    f"{BLOCK}mlp.experts.down_proj has shape": (
        "glm4_moe", lambda weights: [weights.pop(name) for name in [*weights] if f"{BLOCK}mlp.experts.3." in name]
    ),
    "it lacks mtp.norm.weight": ("qwen3_5_text", lambda weights: weights.pop("mtp.norm.weight")),
    "it lacks mtp.layers.0.mlp.up_proj.weight": (
        "qwen3_5_text", lambda weights: weights.pop("mtp.layers.0.mlp.up_proj.weight")
    ),
    rf"{BLOCK}eh_proj.weight has shape \[32, 48\], expected \[32, 64\]": (
        "glm4_moe", lambda weights: weights.update({f"{BLOCK}eh_proj.weight": torch.ones(32, 48)})
    ),
    r"mtp.layers.0.mlp.up_proj.weight has shape \[40, 32\], expected \[48, 32\]": (
        "qwen3_5_text", lambda weights: weights.update({"mtp.layers.0.mlp.up_proj.weight": torch.ones(40, 32)})
    ),
    rf"{BLOCK}embed_tokens.weight has shape \[96, 32\], expected \[97, 32\]": (
        "glm4_moe", lambda weights: weights.update({f"{BLOCK}embed_tokens.weight": torch.ones(96, 32)})
    ),
    "it has mtp.further.weight, which a layer of qwen3_5_text does not have": (
        "qwen3_5_text", lambda weights: weights.update({"mtp.further.weight": torch.ones(8)})
    ),
    f"{BLOCK}mlp.experts.0.down_proj.weight is F8_E4M3, expected one of .*: it is quantised": (
        "deepseek_v3", lambda weights: weights.update(
            {name: one.to(torch.float8_e4m3fn) for name, one in weights.items() if f"{BLOCK}mlp.experts.0" in name}
        )
    ),
    f"{BLOCK}self_attn.q_proj.weight_packed is I32": (
        "glm4_moe", lambda weights: weights.update({f"{BLOCK}self_attn.q_proj.weight_packed": torch.ones(32, 4).int()})
    ),
}  # fmt: skip


@pytest.mark.parametrize("reason", MISFITS)
def test_a_layer_that_cannot_be_used_is_left_out_with_one_warning(reason: str, tmp_path: Path) -> None:
    kind, change = MISFITS[reason]
    folder, prompt = checkpoint(tmp_path, kind, change=change), families.prompts(1)[0]
    with pytest.warns(
        RuntimeWarning, match=rf"^{folder} has an MTP layer that cannot be used \({reason}.*\): texts are"
    ) as caught:
        model = skipstone.load(folder)[0]
    assert len([one for one in caught if one.category is RuntimeWarning]) == 1
    target = ModelRunner(model)
    assert attached_mtp(target) is None
    with pytest.raises(ValueError, match=reason):
        load_mtp(target)
    new_tokens = skipstone.generate(model, prompt[None], skipstone.Autoregressive(), max_new_tokens=4).new_tokens
    assert new_tokens == [model.generate(prompt[None], max_new_tokens=4, do_sample=False)[0, len(prompt) :].tolist()]


def test_load_reads_the_layer_unless_it_is_not_wanted(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "glm4_moe")
    target, without = (ModelRunner(skipstone.load(folder, mtp=wanted)[0]) for wanted in (True, False))
    head = attached_mtp(target)
    assert isinstance(head, MtpHead)
    assert mtp_notes(target) == [f"MTP layer, extra memory: {head.nbytes / 1e6:.1f} MB; --no-mtp leaves it out"]
    assert attached_mtp(without) is None
    assert mtp_notes(without) == []
    with pytest.raises(ValueError, match=f"^{folder} was loaded without its MTP layer "):
        load_mtp(without)


def test_a_model_of_transformers_has_its_layer_read_when_it_is_asked_for(tmp_path: Path) -> None:
    target = ModelRunner(target_of(checkpoint(tmp_path, "glm4_moe")))
    assert attached_mtp(target) is None
    head = load_mtp(target)
    again = attached_mtp(target)
    assert again is not None
    assert again.layer is head.layer
    target.model.to(torch.bfloat16)
    moved = load_mtp(ModelRunner(target.model))
    assert (moved.dtype, moved.layer.eh_proj.weight.dtype) == (torch.bfloat16, torch.bfloat16)
    assert moved.model.get_input_embeddings().weight is target.model.get_input_embeddings().weight


def test_without_files_or_mtp_layers_the_reason_is_said(tmp_path: Path) -> None:
    target = ModelRunner(families.build("glm4_moe"))
    with pytest.raises(OSError, match="no folder with its files, which have its MTP layer"):
        load_mtp(target)
    plain = ModelRunner(target_of(save(families.build("glm4_moe"), tmp_path)))
    with pytest.raises(ValueError, match=f"^{tmp_path} has no MTP layers$"):
        load_mtp(plain)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(OSError, match=r"model\.safetensors"):
        load_mtp(plain)


def test_two_models_of_a_class_have_their_own_layers_and_are_freed(tmp_path: Path) -> None:
    def other(weights: dict[str, Tensor]) -> None:
        weights["mtp.fc.weight"] = -weights["mtp.fc.weight"]

    folders = checkpoint(tmp_path / "one", "qwen3_5_text"), checkpoint(tmp_path / "other", "qwen3_5_text", change=other)
    models = [skipstone.load(folder)[0] for folder in folders]
    heads = [attached_mtp(ModelRunner(model, "eager")) for model in models]
    assert heads[0] is not None
    assert heads[1] is not None
    assert torch.equal(heads[0].layer.eh_proj.weight, -heads[1].layer.eh_proj.weight)
    alive, layers = [ref(model) for model in models], [ref(head.layer) for head in heads if head]
    models.clear()
    gc.collect()
    assert [model() for model in alive] == [None, None], "a head keeps its target"
    heads.clear()
    gc.collect()
    assert [layer() for layer in layers] == [None, None]


def test_a_plain_layer_of_a_quantised_checkpoint_is_read_and_a_quantised_one_is_not(tmp_path: Path) -> None:
    folder, plain = quantised.compressed_checkpoint(4, "pack-quantized"), quantised.plain()
    tokenizer().save_pretrained(folder)
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    size = plain.config.hidden_size
    norms = {f"model.layers.4.{name}.weight": torch.ones(size) for name in ("enorm", "hnorm", "shared_head.norm")}
    own = {name.replace(".3.", ".4."): one for name, one in plain.state_dict().items() if ".layers.3." in name}
    own |= {"model.layers.4.eh_proj.weight": torch.eye(size).repeat(1, 2), **norms}
    save_file({**weights, **own}, folder / "model.safetensors", {"format": "pt"})
    model = skipstone.load(folder)[0]
    assert kernels(model)
    head = attached_mtp(ModelRunner(model))
    assert head is not None
    assert not kernels(head.model)
    assert torch.equal(head.model.model.layers[0].mlp.up_proj.weight, plain.model.layers[3].mlp.up_proj.weight)
    assert chain_logits(head, TEXT, torch.randn(1, TEXT.shape[1], size), DRAFTS).isfinite().all()
    own |= {
        name.replace(".3.", ".4."): one.clone() for name, one in weights.items() if ".layers.3." in name and "packed" in name
    }
    save_file({**weights, **own}, folder / "model.safetensors", {"format": "pt"})
    with pytest.warns(RuntimeWarning, match=r"has an MTP layer that cannot be used .*weight_packed is I32.*it is quantised"):
        model = skipstone.load(folder)[0]
    assert skipstone.generate(model, TEXT, max_new_tokens=2).new_tokens


def test_a_target_with_weights_on_the_disk_is_loaded_without_its_layer(tmp_path: Path) -> None:
    folder, plain = checkpoint(tmp_path / "mtp", "glm4_moe"), save(families.build("glm4_moe"), tmp_path / "plain")
    options: dict[str, Any] = {"device_map": {"model": "cpu", "lm_head": "disk"}, "offload_folder": tmp_path / "offloaded"}
    with pytest.warns(RuntimeWarning, match="cannot be used .the model's weights are on cpu and disk, expected one device"):
        model = skipstone.load(folder, **options)[0]
    assert skipstone.generate(model, TEXT, max_new_tokens=2).new_tokens
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        skipstone.load(plain, **options)
