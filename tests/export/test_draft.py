"""An exported draft is a checkpoint that computes what skipstone drafts from: the first layers, or those that a set leaves."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

import skipstone
from skipstone.engines.model_runner import ModelRunner
from skipstone.export import draft as exporting
from skipstone.export.draft import DraftLayers, select_draft_layers, write_draft
from skipstone.methods.drafting.layer_sets import save_profile
from skipstone.models.passes import SkipSet
from tests.helpers import conformance, families, machine, support, wrapped
from tests.helpers.pairwise import round_robin, slow_except

EXIT = conformance.EXIT
FAMILIES = ("llama", "qwen2", "qwen3", "gemma", "mistral", "gemma2", "gemma3_text", "smollm3")
"""Among them windows in all layers, in some, and layers without rotary phases."""
IDS = torch.randint(1, 97, (1, 3 * families.WINDOW), generator=torch.Generator().manual_seed(4))
FIRST = DraftLayers(tuple(range(EXIT)), 4, drafts=5)


def exported(model: PreTrainedModel, keeps: DraftLayers, folder: Path) -> PreTrainedModel:
    write_draft(ModelRunner(model, "eager"), support.tokenizer(), keeps, folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", attn_implementation=model.config._attn_implementation)


@torch.no_grad()
def early(model: PreTrainedModel, layers: int) -> Tensor:
    """Logits of transformers' own early exit: its forward runs as many layers as the config says."""
    cut = copy.deepcopy(model)
    cut.config.num_hidden_layers = layers
    return cut(IDS, use_cache=False).logits


@torch.no_grad()
def silenced(model: PreTrainedModel, layers: tuple[int, ...]) -> Tensor:
    """Logits of a model in which some layers add nothing, by their weights."""
    quiet = machine.silenced(model, SkipSet(frozenset(layers), frozenset(layers)))
    return quiet(IDS, use_cache=False).logits


@round_robin(name=slow_except(("llama", "qwen2", "gemma3_text", "smollm3"), FAMILIES), tied=[False, True])
@torch.no_grad()
def test_its_logits_are_those_of_the_early_exit(name: str, tied: bool, tmp_path: Path) -> None:
    model = families.build(name, tie_word_embeddings=tied)
    found = exported(model, FIRST, tmp_path / "draft")
    logits = found(IDS, use_cache=False).logits
    ours = exporting.exit_logits(ModelRunner(model, "eager"), FIRST, IDS)
    torch.testing.assert_close(logits, early(model, EXIT), rtol=0, atol=0)
    torch.testing.assert_close(logits, ours, rtol=1e-5, atol=1e-5)
    assert (logits - model(IDS).logits).abs().max() > 0.1, "the layers that were left out do nothing"
    assert found.config.num_hidden_layers == EXIT
    assert (found.get_output_embeddings().weight is found.get_input_embeddings().weight) == tied
    for field in ("layer_types", "no_rope_layers"):
        if (every := getattr(model.config, field, None)) is not None:
            assert getattr(found.config, field) == every[:EXIT]
    if name == "qwen2":
        assert (model.config.max_window_layers, found.config.max_window_layers) == (1, 1)


@pytest.mark.parametrize("name", ["qwen2", "gpt2", "qwen3_moe"])
@torch.no_grad()
def test_it_is_the_model_that_was_built_short(name: str, tmp_path: Path) -> None:
    expected = conformance.truncated(name)
    found = exported(families.cached(name), FIRST, tmp_path / "draft")
    assert found.state_dict().keys() == expected.state_dict().keys()
    assert all(torch.equal(weight, expected.state_dict()[key]) for key, weight in found.state_dict().items())
    assert torch.equal(found(IDS, use_cache=False).logits, expected(IDS, use_cache=False).logits)


@round_robin(name=slow_except(("llama", "qwen2"), ("llama", "mistral", "qwen2", "smollm3")), left_out=[(1,), (3,), (1, 2)])
@torch.no_grad()
def test_a_layer_set_is_the_model_whose_layers_add_nothing(name: str, left_out: tuple[int, ...], tmp_path: Path) -> None:
    model = families.build(name, layers=5)
    method = skipstone.SelfSpeculative(left_out, left_out)
    keeps = select_draft_layers(ModelRunner(model, "eager"), method)
    assert keeps.layers == tuple(sorted({0, 1, 2, 3, 4} - {*left_out}))
    found = exported(model, keeps, tmp_path / "draft")
    logits = found(IDS, use_cache=False).logits
    torch.testing.assert_close(logits, silenced(model, left_out), rtol=1e-5, atol=1e-5)
    assert (logits - model(IDS).logits).abs().max() > 0.1
    if name == "qwen2":
        assert found.config.max_window_layers == 1, "the first layer alone sees everything, and it is there"
        assert found.config.layer_types == [model.config.layer_types[layer] for layer in keeps.layers]


def test_the_bundled_model_exports_its_own_exit(tmp_path: Path) -> None:
    model, tokenizer = skipstone.load(engine="eager")
    runner = ModelRunner(model, "eager")
    keeps = select_draft_layers(runner)
    assert (keeps.layers, keeps.drafts, keeps.threshold) == (tuple(range(6)), 8, 0.5)
    write_draft(runner, tokenizer, keeps, tmp_path / "draft")
    found, other = AutoModelForCausalLM.from_pretrained(tmp_path / "draft"), AutoTokenizer.from_pretrained(tmp_path / "draft")
    ids = tokenizer("def add(a, b):\n    return a", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(found(ids).logits, exporting.exit_logits(runner, keeps, ids), rtol=1e-5, atol=1e-4)
    assert other("def add(a, b):")["input_ids"] == tokenizer("def add(a, b):")["input_ids"]
    saved = json.loads((tmp_path / "draft" / "generation_config.json").read_text())
    assert "skipstone" not in saved
    assert (saved["num_assistant_tokens"], saved["assistant_confidence_threshold"]) == (8, 0.5)
    assert model.generation_config.skipstone["exit_layer"] == 6, "the target keeps its own"


def test_transformers_takes_it_as_an_assistant(tmp_path: Path) -> None:
    model = families.build("llama")
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=None)
    assistant = exported(model, FIRST, tmp_path / "draft")
    options: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False}
    plain = support.alone(model, IDS[0], **options)
    with support.forwards(model) as whole:
        support.alone(model, IDS[0], **options)
    with support.forwards(model) as assisted:
        accepted = support.alone(model, IDS[0], assistant_model=assistant, **options)
    assert accepted == plain
    assert assisted[0] < whole[0], "no draft was accepted"


def test_what_the_model_says_of_itself_is_the_default() -> None:
    model = families.build("llama")
    runner = ModelRunner(model, "eager")
    with pytest.raises(ValueError, match="names no method of its own: say which layers draft by --exit-layer"):
        select_draft_layers(runner)
    model.generation_config.skipstone = {"method": "layerskip", "exit_layer": 1, "num_speculative_tokens": 3}
    assert select_draft_layers(runner) == DraftLayers((0,), 4, 3)
    assert select_draft_layers(runner, exit_layer=3) == DraftLayers((0, 1, 2), 4, 3)
    assert select_draft_layers(runner, "early_exit exit_layer=2").layers == (0, 1)
    with pytest.raises(ValueError, match="either an exit layer or a method"):
        select_draft_layers(runner, "early_exit exit_layer=2", 2)


def test_a_profile_says_which_layers_are_left(tmp_path: Path) -> None:
    model = families.build("llama", layers=6)
    runner = ModelRunner(model, "eager")
    save_profile(tmp_path / "set.json", model, {}, (2, 3), (2, 3))
    for name in ("self_speculative", "swift"):
        found = select_draft_layers(runner, f"{name} profile={tmp_path / 'set.json'}")
        assert (found.layers, found.described) == ((0, 1, 4, 5), "layers 0 to 1 and 4 to 5 of 6")
    save_profile(tmp_path / "empty.json", model, {}, (), ())
    with pytest.raises(ValueError, match="the layer set of swift's profile is empty"):
        select_draft_layers(runner, f"swift profile={tmp_path / 'empty.json'}")
    save_profile(tmp_path / "half.json", model, {}, (2, 3), (3, 4))
    with pytest.raises(ValueError, match=r"skips the attention of layer 2 and the MLP of layer 4 alone.*whole layers"):
        select_draft_layers(runner, f"self_speculative profile={tmp_path / 'half.json'}")


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("swift", "swift finds its layers while it decodes"),
        ("adadecode heads=nowhere", "adadecode does not draft with layers of the model alone"),
        ("self_speculative draft_quantize=int4", "drafts with all layers in fewer bits"),
        ("self_speculative", "no layer set is given"),
        ("layerskip exit_layer=4", "exit_layer must lie between 1 and 3"),
    ],
)
def test_methods_without_whole_layers_are_refused(method: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        select_draft_layers(ModelRunner(families.cached("llama"), "eager"), method)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lfm2", "keep states that have no positions"),
        ("gemma3n_text", "more than its norm and its head"),
        ("opt_projected", "is not norm and head"),
        ("gemma3", "this model wraps a gemma3_text model: export takes text models by themselves"),
    ],
)
def test_families_without_such_an_exit_are_refused(name: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        exported((wrapped if name == "gemma3" else families).build(name), FIRST, tmp_path / "draft")
    assert list(tmp_path.iterdir()) == []


def test_a_set_of_layers_that_are_never_empty_is_refused(tmp_path: Path) -> None:
    """Doge scales the residual stream itself: a layer that skips both sublayers is not as if it were not there."""
    model = families.build("doge")
    with pytest.raises(ValueError, match="changes its input even where both of its sublayers are skipped"):
        exported(model, DraftLayers((0, 2, 3), 4), tmp_path / "draft")
    assert list(tmp_path.iterdir()) == []
    with torch.no_grad():
        torch.testing.assert_close(exported(model, FIRST, tmp_path / "draft")(IDS).logits, early(model, EXIT), rtol=0, atol=0)


@pytest.mark.parametrize("fault", ["windows", "weights"])
def test_an_export_that_computes_something_else_is_not_written(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows longer than the text that is compared change no logit there: they are found by what the config says."""
    if fault == "windows":
        real = exporting.shortened
        wide = {"sliding_window": 500}
        model = families.build("gemma2", **wide)

        def shortened(config: Any, layers: tuple[int, ...]) -> Any:
            found = real(config, layers)
            found.layer_types = found.layer_types[::-1]
            return found

        monkeypatch.setattr(exporting, "shortened", shortened)
    else:
        model, real_weights = families.build("llama"), exporting._renumbered
        monkeypatch.setattr(exporting, "_renumbered", lambda model, _: real_weights(model, (2, 3)))
    with pytest.raises(ValueError, match="does not compute what these layers do"):
        exported(model, FIRST, tmp_path / "draft")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_is_left_alone_and_quantised_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    model = families.build("llama")
    with pytest.raises(FileExistsError, match="overwrites nothing"):
        exported(model, FIRST, tmp_path)
    assert (tmp_path / "notes").read_text() == "mine"
    runner = ModelRunner(model, "eager")
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    with pytest.raises(ValueError, match="the weights are quantised"):
        write_draft(runner, support.tokenizer(), FIRST, tmp_path / "draft")
