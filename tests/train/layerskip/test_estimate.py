"""What a run would take, before it starts: parameters against transformers' models, activations against what autograd keeps."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, MixtralConfig

from skipstone.train.layerskip.arguments import arguments, read
from skipstone.train.layerskip.estimate import SHAPES, MemoryEstimate, estimate, format_estimate, meta_model, shape_of
from skipstone.train.layerskip.objective import LayerSkipObjective
from skipstone.train.layerskip.schedules import EarlyExitLoss, LayerDropout, LayerSkipRecipe
from tests.helpers.training import recipe, tiny

PUBLISHED = {"1B": 1_235_814_400, "8B": 8_030_261_248, "70B": 70_553_706_496}
"""Parameters as the hub counts them in the checkpoints of Llama 3.2 1B, and of Llama 3.1 8B and 70B."""
WITHIN = 0.01  # tolerance of the activation formula, for what a layer adds
ALL = EarlyExitLoss(0.5, "none")


def by_hand(config: LlamaConfig) -> int:
    """Parameters of a Llama."""
    size = config.hidden_size // config.num_attention_heads
    attention = 2 * config.hidden_size**2 + 2 * config.hidden_size * size * (config.num_key_value_heads or 0)
    layer = attention + 3 * config.hidden_size * config.intermediate_size + 2 * config.hidden_size
    heads = 1 if config.tie_word_embeddings else 2
    return config.num_hidden_layers * layer + heads * config.vocab_size * config.hidden_size + config.hidden_size


@pytest.mark.parametrize("size", SHAPES)
def test_parameters_of_the_published_shapes(size: str) -> None:
    model = meta_model(SHAPES[size])
    assert shape_of(model).parameters == by_hand(SHAPES[size]) == PUBLISHED[size]
    assert all(parameter.is_meta for parameter in model.parameters())


def kept(model: Any, checkpointing: bool) -> int:
    """Bytes that autograd keeps of a forward pass for the backward pass, but for weights."""
    if checkpointing:
        model.activation_checkpointing_enable()
    loss = LayerSkipObjective(model, LayerSkipRecipe(LayerDropout(0.0), ALL), 10, 0)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage
        return tensor

    ids = torch.randint(0, 512, (2, 128))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), loss.installed():
        model.train()(input_ids=ids, labels=ids)
    return sum(storage.nbytes() for storage in found.values())


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_are_what_autograd_keeps(half: bool, checkpointing: bool) -> None:
    """Of what three layers more keep: their own, and the states that their exits read."""
    shape = {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
    found = []
    for layers in (3, 6):
        model: Any = tiny(num_hidden_layers=layers, max_position_embeddings=128, **shape)
        found.append(kept(model.bfloat16() if half else model, checkpointing))
    numbers = shape_of(model)
    layer, between = numbers.activations(half, False), numbers.stream(half, False)
    expected = 256 * 3 * ((between if checkpointing else layer) + between)
    assert found[1] - found[0] == pytest.approx(expected, rel=WITHIN)


def estimated(folder: Path, changes: dict[str, Any] | None = None, **given: Any) -> MemoryEstimate:
    path = recipe(folder, **(changes or {}))
    wish = read(path)
    return estimate(wish, path.parent, arguments(wish, folder / "out"), **given)


def test_an_estimate_adds_up(tmp_path: Path) -> None:
    exits = {"curriculum": "none", "e_scale": 0.5}
    one = estimated(tmp_path, {"exits": exits, "dropout": {"p_max": 0.0}, "training__loss_chunk": 8}, size="8B", gpus=8)
    shape, bytes_of = one.shape, one.bytes["plain"]
    assert bytes_of["parameters"] == bytes_of["gradients"] == 4 * PUBLISHED["8B"] // 8
    assert bytes_of["optimizer"] == 8 * PUBLISHED["8B"] // 8
    assert bytes_of["logits"] == 8 * 128256 * 4 * 3
    assert one.all_logits == 32 * 128256 * 4 * 31, "e(0) = 0: the first exit is not trained"
    assert one.tokens == 2 * 16
    assert one.step_tokens == 2 * 16 * 8
    work = 6 * shape.in_layers + 31 * 8 * 4096 * 128256
    assert one.seconds_a_step["plain"] == pytest.approx(work * one.tokens / (0.4 * 989e12))
    assert one.seconds_a_step["checkpointed"] == pytest.approx((work + 2 * shape.in_layers) * one.tokens / (0.4 * 989e12))
    assert 2 * bytes_of["total"] == sum(bytes_of.values())
    assert bytes_of["activations"] > 5 * one.bytes["checkpointed"]["activations"]
    twice = estimated(tmp_path, {"exits": exits}, size="8B", gpus=16, mfu=0.2)
    assert twice.bytes["plain"]["parameters"] == bytes_of["parameters"] // 2
    assert twice.bytes["plain"]["activations"] == bytes_of["activations"]
    assert json.loads(json.dumps(one.to_json()))["bytes"]["plain"]["total"] == bytes_of["total"]
    assert "32 layers; 8 GPUs" in format_estimate(one)[0]


def test_what_a_recipe_changes(tmp_path: Path) -> None:
    plain = estimated(tmp_path, size="1B")
    dropping = estimated(tmp_path, {"dropout": {"p_max": 1.0}}, size="1B")
    assert dropping.seconds_a_step["plain"] < 0.9 * plain.seconds_a_step["plain"]
    assert dropping.bytes == plain.bytes, "a step may keep all rows"
    half = estimated(tmp_path, {"training__bf16": True}, size="1B")
    assert half.bytes["plain"]["activations"] < 0.75 * plain.bytes["plain"]["activations"]
    assert half.bytes["plain"]["gathered"] == 2 * PUBLISHED["1B"], "autocast's copies"
    towards = estimated(tmp_path, {"exits": {"dilation": 2, "kl_weight": 1.0}}, size="1B")
    assert towards.bytes["plain"]["logits"] == plain.bytes["plain"]["logits"] * 4 // 3
    assert estimated(tmp_path, {"training__optim": "sgd"}, size="1B").bytes["plain"]["optimizer"] == 0
    own = estimated(tmp_path, {"preset": "continual", "exits": {"dilation": 2}, "training": {"max_steps": 9}})
    assert f"a step has {own.step_tokens // own.length} rows, 256 in the paper" in "\n".join(format_estimate(own))
    assert own.shape.vocabulary == 270
    assert own.shape.parameters == by_hand(LlamaConfig(**OWN))


OWN: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 270,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("changes", "given", "message"),
    [
        ({"exits": {"exit_layers": [1, 41]}}, {"size": "8B"}, r"exit_layers must lie between 1 and 32, found \[41\]"),
        ({}, {"size": "3B"}, "unknown shape '3B': expected one of"),
        ({}, {"mfu": 1.5}, "found 1, 1.5 and 989.0"),
        ({"training__muon_learning_rate": 0.02}, {"gpus": 2}, "Muon orthogonalises whole matrices"),
        ({"model": {"config": {"model_type": "llama"}, "lora": {"r": 2}}}, {}, "does not cover adapters"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, changes: Any, given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        estimated(tmp_path, changes, **given)
    assert not (tmp_path / "out").exists()


def test_a_folder_and_a_quantised_one(tmp_path: Path) -> None:
    """Only the config is read: there are no weights."""
    config = tiny().config
    config.save_pretrained(tmp_path / "model")
    changes = {"model": {"pretrained": "model", "layers": 2}, "tokenizer": {"pretrained": "model"}}
    assert estimated(tmp_path, changes).shape.layers == 2
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    config.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="the model is quantised: weights are trained in floating point"):
        estimated(tmp_path, changes)
    MixtralConfig(
        num_hidden_layers=2, num_attention_heads=2, hidden_size=16, intermediate_size=32, num_key_value_heads=2
    ).save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="does not cover mixtures of experts, which this mixtral model is"):
        estimated(tmp_path, {"model": {"pretrained": "model"}, "tokenizer": {"pretrained": "model"}})
    GPT2Config(n_layer=2).save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="does not know the sizes of this gpt2 model"):
        estimated(tmp_path, {"model": {"pretrained": "model"}, "tokenizer": {"pretrained": "model"}})
