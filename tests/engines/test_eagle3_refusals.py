"""Files of EAGLE-3 heads that are damaged, of another kind or for another model: one sentence says which and why."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from skipstone.engines.eagle3_head import load_eagle3
from skipstone.engines.model_runner import ModelRunner
from tests.helpers import families
from tests.helpers.feature_heads import eagle3_folder, edit_weights

Weights = dict[str, Tensor]


@cache
def target(engine: str = "eager") -> ModelRunner:
    return ModelRunner(families.build("llama", num_hidden_layers=8), engine)


def edit_config(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    edit(config)
    (folder / "config.json").write_text(json.dumps(config))


WEIGHTS: dict[str, tuple[Callable[[Weights], Any], str]] = {
    "a tensor less": (lambda w: w.pop("midlayer.self_attn.q_proj.weight"), r"lacks midlayer\.self_attn\.q_proj\.weight"),
    "a tensor more": (lambda w: w.update(more=torch.ones(1)), r"has tensors that are not in its config, such as more"),
    "no LM head": (lambda w: w.pop("lm_head.weight"), r"lacks lm_head\.weight, and d2t says"),
    "d2t too short": (lambda w: w.update(d2t=w["d2t"][1:]), r"has a d2t of 39 tokens and an lm_head\.weight of 40"),
    "d2t off by one": (lambda w: w.update(d2t=w["d2t"] + 1), r"a d2t and a t2d that name different tokens"),
    "a token twice": (
        lambda w: (w.pop("t2d"), w["d2t"].__setitem__(5, w["d2t"][4] - 1)),
        r"a d2t that names a token twice, or one below 0",
    ),
    "a token below 0": (lambda w: (w.pop("t2d"), w["d2t"].sub_(99)), r"a d2t that names a token twice, or one below 0"),
    "a token of no target": (lambda w: (w.pop("t2d"), w["d2t"].add_(99)), r"drafts the token \d+, and the model has 97"),
    "no d2t": (lambda w: (w.pop("t2d"), w.pop("d2t")), r"lacks d2t: its config says that it drafts 40 of 97 tokens"),
    "a larger vocabulary": (
        lambda w: w.update(t2d=torch.cat([w["t2d"], torch.zeros(600, dtype=torch.bool)])),
        r"trained for another model than the target: it has 697 tokens, and the model 97",
    ),
    "another layer": (lambda w: w.update({"layers.1.mlp.up_proj.weight": torch.ones(1)}), r"EAGLE-3 head of several layers"),
    "EAGLE-1": (lambda w: w.pop("midlayer.hidden_norm.weight"), r"is an EAGLE-1 or EAGLE-2 head: skipstone runs EAGLE-3"),
    "a model": (
        lambda w: (
            *(w.pop("midlayer.hidden_norm.weight"), w.pop("fc.weight")),
            w.update({"model.layers.1.mlp.up_proj.weight": torch.ones(1)}),
        ),
        r"is no head that drafts",
    ),
    "P-EAGLE": (lambda w: w.update(mask_hidden=torch.ones(1)), r"is a P-EAGLE head"),
    "Medusa": (lambda w: w.update({"0.0.linear.weight": torch.ones(1)}), r"is a Medusa head"),
    "MLA": (lambda w: w.update({"midlayer.self_attn.kv_a_proj_with_mqa.weight": torch.ones(1)}), r"latent attention \(MLA\)"),
}
CONFIGS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "five layers": (
        lambda c: c.update(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4, 5]}),
        r"reads the states of 3 layers, and its config or feature_layers names 5",
    ),
    "a deeper target": (
        lambda c: c.update(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}),
        r"after layers 2, 16, 29, and the model has layers 1 to 8: feature_layers names others",
    ),
    "a wider target": (lambda c: c.update(target_hidden_size=64), r"hidden states of size 64, and the model's have 32"),
    "two layers": (lambda c: c.update(num_hidden_layers=2), r"has 2 layers, expected 1"),
    "a window": (lambda c: c.update(layer_types=["sliding_attention"]), r"attends to a sliding window"),
    "quantised": (lambda c: c.update(quantization_config={"bits": 4}), r"is quantised: name the one in full precision"),
    "the last state": (lambda c: c.update(eagle_config={"use_aux_hidden_state": False}), r"reads the last state only"),
    "a new kind": (lambda c: c.update(speculators_model_type="tomorrow"), r"is a head of the type tomorrow"),
    "DFlash": (lambda c: c.update(speculators_model_type="dflash"), r"is a DFlash head"),
}


@pytest.mark.parametrize("case", [*WEIGHTS, *CONFIGS])
def test_a_head_that_does_not_fit_is_refused_with_the_reason(case: str, tmp_path: Path) -> None:
    folder = eagle3_folder(tmp_path / "head", target().config, draft_vocab=40)
    load_eagle3(folder, target())
    if case in WEIGHTS:
        edit_weights(folder, WEIGHTS[case][0])
    else:
        edit_config(folder, CONFIGS[case][0])
    with pytest.raises(ValueError, match=f"^(the head )?{folder} .*{(WEIGHTS | CONFIGS)[case][1]}"):
        load_eagle3(folder, target())


def test_layers_of_the_user_must_be_those_of_the_model_and_as_many_as_the_head_reads(tmp_path: Path) -> None:
    folder = eagle3_folder(tmp_path / "head", target().config)
    assert load_eagle3(folder, target(), layers=(1, 4, 8)).depths == (1, 4, 8)
    for layers, said in (
        ((0, 4, 5), "layers 0, 4, 5, and the model has layers 1 to 8"),
        ((3,), "reads the states of 3 layers"),
    ):
        with pytest.raises(ValueError, match=said):
            load_eagle3(folder, target(), layers=layers)


def test_a_head_of_speculators_must_say_where_its_residual_begins(tmp_path: Path) -> None:
    folder = eagle3_folder(tmp_path / "head", target().config, layout="speculators")
    edit_config(folder, lambda config: config.pop("norm_before_residual"))
    with pytest.raises(
        ValueError, match=r"no norm_before_residual in its config.json: give norm_before_residual=true or false"
    ):
        load_eagle3(folder, target())
    assert load_eagle3(folder, target(), norm_before_residual=True).model.model.layers[0].norm_before_residual


@pytest.mark.parametrize(("layout", "name"), [("eagle", "midlayer"), ("speculators", "layers.0")])
def test_a_missing_tensor_has_the_name_of_its_layout(layout: str, name: str, tmp_path: Path) -> None:
    folder = eagle3_folder(tmp_path / "head", target().config, layout=layout, prefix="model.")
    edit_weights(folder, lambda weights: weights.pop(f"model.{name}.mlp.up_proj.weight"))
    with pytest.raises(ValueError, match=f"lacks {name}.mlp.up_proj.weight"):
        load_eagle3(folder, target())


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "pytorch_model.bin"])
def test_a_damaged_file_is_named(file: str, tmp_path: Path) -> None:
    folder = eagle3_folder(tmp_path / "head", target().config, file="bin" if file.endswith("bin") else "safetensors")
    (folder / file).write_bytes((folder / file).read_bytes()[:100])
    with pytest.raises(ValueError, match=rf"^the head {folder} has a damaged {file}, get it again: "):
        load_eagle3(folder, target())


def test_missing_files_are_named(tmp_path: Path) -> None:
    folder = eagle3_folder(tmp_path / "head", target().config)
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match=f"{folder} has neither model.safetensors nor pytorch_model.bin"):
        load_eagle3(folder, target())
    with pytest.raises(OSError, match=r"is a file: name its folder"):
        load_eagle3(folder / "config.json", target())
    (folder / "config.json").unlink()
    with pytest.raises(OSError, match=f"{folder} has no config.json"):
        load_eagle3(folder, target())


@pytest.mark.parametrize("engine", ["eager", "native"])
@pytest.mark.parametrize("has_embedding", [False, True])
def test_the_memory_of_a_head_is_that_of_its_own_weights(engine: str, has_embedding: bool, tmp_path: Path) -> None:
    """d = 32, of 4 bytes: fc [d, 3 d], q [48, 2 d], k and v [24, 2 d], o [d, 48], MLP of 2 d, 4 norms, LM head of 32. The
    native engine packs 16 rows at once, and its norms are not in panels."""
    model, size = target(engine), 32
    folder = eagle3_folder(tmp_path / "head", model.config, draft_vocab=32, embedding="own" if has_embedding else "target")
    head = load_eagle3(folder, model)
    head.read_states(torch.zeros(1, 3 * size))  # the native engine packs fc with its first use
    rows, norms = (32, 0) if engine == "native" else (24, 4 * size)
    weights = 3 * size * size + 3 * 48 * size + 4 * rows * size + 6 * size * size + norms + 32 * size
    assert head.nbytes == 4 * (weights + has_embedding * size * model.embeddings)
