"""Checkpoints that are missing, truncated or do not fit: OSError or ValueError, never a half-loaded model."""

import errno
import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import skipstone
from skipstone import LayerSkip
from skipstone.engines.host_transfer import out_of_memory
from skipstone.engines.model_runner import ModelRunner
from skipstone.models.checkpoints import expect_fit
from tests.helpers import families, wrapped
from tests.helpers.pairwise import slow_except
from tests.helpers.settings import QUIET
from tests.helpers.support import alone, save

SKIP = LayerSkip(exit_layer=2)
Weights = dict[str, torch.Tensor]


def saved(model: Any, folder: Path, change: Callable[[Weights], Any] | None = None, **config: Any) -> Path:
    """A folder with a model and a tokenizer. change: alters the weights. config: other values in its config.json."""
    save(model, folder)
    if change is not None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    if config:
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(content | config))
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises((OSError, ValueError)) as caught:
        skipstone.load(folder)
    assert folder.name in str(caught.value)
    return str(caught.value)


class TestLoad:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return saved(families.cached("llama"), tmp_path)

    def test_a_sound_checkpoint_loads(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(folder.parent))
        model, words = skipstone.load(f"~/{folder.name}")
        assert not model.training
        assert words("hello the")["input_ids"]

    def test_a_missing_folder_one_without_weights_and_a_file_are_os_errors(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        for name in (tmp_path / "missing", "far/away/from/here", "./missing"):
            with pytest.raises(OSError, match=Path(name).name):
                skipstone.load(name)
        with pytest.raises(OSError, match=r"a model is a folder.*model\.safetensors"):
            skipstone.load(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        with pytest.raises(OSError, match=r"model\.safetensors"):
            skipstone.load(folder)

    def test_flash_attention_and_devices_that_are_not_here(self, folder: Path) -> None:
        cases = [
            ({"attn_implementation": "flash_attention_2"}, r"flash_attention_2.? is not supported: load with .*'sdpa'"),
            ({"device": "toaster"}, "device 'toaster' cannot be used here"),
            *([] if torch.cuda.is_available() else [({"device": "cuda"}, "device 'cuda' cannot be used here")]),
        ]
        for options, words in cases:
            with pytest.raises(ValueError, match=words):
                skipstone.load(folder, **options)

    @pytest.mark.parametrize(
        "change",
        [
            *({"num_key_value_heads": 3}, {"num_key_value_heads": 0}, {"num_attention_heads": -4}, {"vocab_size": 0}),
            *({"hidden_size": -32}, {"hidden_size": "32"}, {"num_hidden_layers": "24"}, {"num_hidden_layers": 0}),
            *({"max_position_embeddings": -5}, {"hidden_act": "wobble"}, {"rope_parameters": {"rope_type": "wobble"}}),
            *({"model_type": ["llama"]}, {"model_type": 3}, {"rope_parameters": 3}, {"dtype": "wobble"}),
            {"rope_parameters": {"rope_type": "wobble", "rope_theta": 1e4}},
        ],
        ids=str,
    )
    def test_a_wrong_value_of_the_config_is_named(self, change: dict[str, Any], tmp_path: Path) -> None:
        ((field, value),), message = change.items(), refusal(saved(families.cached("llama"), tmp_path, **change))
        unknown = value["rope_type"] if isinstance(value, dict) else value
        assert field in message or str(unknown) in message
        assert "config" in message
        if field == "hidden_act" or (isinstance(value, dict) and len(value) > 1):
            assert all(words in message for words in (field, "wobble", "correct its config.json"))

    @pytest.mark.parametrize(
        "damage",
        [{"pad_token_id": 10**6}, {"quantization_config": "x"}, {"text_config": "x"}, {"rms_norm_eps": -1.0}, {"head_dim": -8}],
        ids=str,
    )
    def test_what_makes_a_library_fail_in_any_way_is_a_sentence(self, damage: dict[str, Any], tmp_path: Path) -> None:
        folder = saved(families.cached("llama"), tmp_path, **damage)
        with pytest.raises(ValueError, match="correct"):
            ModelRunner(skipstone.load(folder)[0])

    @pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
    def test_truncated_weights(self, share: float, folder: Path) -> None:
        weights = folder / "model.safetensors"
        data = weights.read_bytes()
        weights.write_bytes(data[: int(len(data) * share)])
        assert "corrupt" in refusal(folder)

    @pytest.mark.parametrize("content", ["[1]", '"text"', "null", "3", "", '{"model_type": "lla', '{"a":' * 100_000])
    def test_a_config_that_is_no_object_or_cannot_be_read(self, content: str, folder: Path) -> None:
        (folder / "config.json").write_text(content)
        cut_off = not content or content.startswith("{")
        assert re.search(r"config\.json of .*correct it, or fetch it again" if cut_off else r"config\.json", refusal(folder))

    @pytest.mark.parametrize(
        "content", ["[]", "{}", '{"weight_map": {"a"', '{"metadata": {}, "weight_map": {"a": "b.safetensors"}}']
    )
    def test_an_index_that_is_none_or_names_missing_shards(self, content: str, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(content)
        assert "fetch its files again" in refusal(folder)

    @pytest.mark.parametrize("content", ["[1]", '{"a"', "", None])
    def test_a_missing_tokenizer_or_one_that_is_none_is_told_as_such(self, content: str | None, folder: Path) -> None:
        for file in folder.glob("*token*") if content is None else ():
            file.unlink()
        if content is not None:
            (folder / "tokenizer.json").write_text(content)
        assert ("tokenizer.json" if content is None else "tokenizer") in refusal(folder)

    def test_too_little_memory_is_said_with_what_takes_less(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def allocate(*_: Any, **__: Any) -> None:
            torch.empty(1 << 60, dtype=torch.uint8)  # more than any address space

        monkeypatch.setattr(type(families.cached("llama")), "from_pretrained", allocate)
        assert "quantize" in (out_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory")) or "")
        assert out_of_memory(OSError(errno.ENOENT, "No such file")) is None
        with pytest.raises(RuntimeError, match=r"not enough memory for [\d.]+ GiB.*bfloat16.*quantize"):
            skipstone.load(folder)


TYPES = {
    "refused by name": ({"model_type": "mamba"}, "mamba keeps a recurrent state"),
    "unknown": ({"model_type": "foo"}, "does not know the model type 'foo'; `skipstone families` lists"),
    "no type": ({"hidden_size": 32}, "has no model_type, expected a type that `skipstone families` lists"),
    "encoder-decoder": ({"model_type": "t5"}, "transformers loads t5 models by neither AutoModelForCausalLM nor Auto"),
    "encoder-decoder around pictures": ({"model_type": "florence2"}, "florence2 is an encoder-decoder"),
    "own code": ({"model_type": "foo", "auto_map": {"AutoConfig": "a.B"}}, "modelling code of its own for the type 'foo'"),
}


@pytest.mark.parametrize("case", TYPES)
def test_a_type_that_cannot_be_decoded_is_refused_before_its_weights_are_loaded(case: str, tmp_path: Path) -> None:
    said, words = TYPES[case]
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match=words):
        skipstone.load(tmp_path)


@QUIET
@pytest.mark.parametrize("kind", slow_except(("qwen2_vl", "llama4"), [*wrapped.WRAPPERS]))
def test_a_multimodal_checkpoint_writes_the_text_of_transformers(kind: str, tmp_path: Path) -> None:
    """Llama 4 among them, of which transformers loads the text model alone and leaves what sees."""
    own, prompt = wrapped.build(kind), families.prompts(1)[0]
    saved(own, tmp_path)
    with wrapped.without_timm():
        model, words = skipstone.load(tmp_path)
    assert words.eos_token == "<eos>"
    out = skipstone.generate(model, prompt[None], SKIP, max_new_tokens=24)
    assert out.new_tokens == [alone(own, prompt, max_new_tokens=24, do_sample=False)]
    assert out.stats is not None
    assert out.stats.drafted > 0


def added(**weights: torch.Tensor) -> Callable[[Weights], None]:
    """More weights; two underscores in a name stand for a dot."""
    return lambda state: state.update({name.replace("__", "."): weight for name, weight in weights.items()})


def again(weights: Weights) -> None:
    last = {key: one for key, one in weights.items() if ".layers.3." in key}
    weights.update({key.replace(".layers.3.", ".layers.4."): one.clone() for key, one in last.items()})


def predicting(*layers: int) -> Callable[[Weights], None]:
    return lambda state: state.update({f"model.layers.{layer}.eh_proj.weight": torch.ones(8, 16) for layer in layers})


MISFITS: dict[str, tuple[Callable[[Weights], Any], dict[str, Any], str]] = {
    "another shape": (
        lambda state: state.update({"model.layers.1.mlp.up_proj.weight": torch.zeros(64, 16)}), {},
        r"model.layers.1.mlp.up_proj.weight has shape \[64, 16\], expected \[64, 32\]",
    ),
    "a missing weight": (
        lambda state: state.pop("model.layers.2.self_attn.q_proj.weight"), {}, r"it lacks model\.layers\.2\.self_attn\.q_proj",
    ),
    "biases that the config denies": (
        lambda state: state.update({f"model.layers.{layer}.self_attn.q_proj.bias": torch.ones(32) for layer in range(4)}), {},
        "does not fit its config: it has model.layers.0.self_attn.q_proj.bias, model.layers.1.self_attn.q_proj.bias, "
        "model.layers.2.self_attn.q_proj.bias and 1 more, expected only what a LlamaForCausalLM of 4 layers",
    ),
    "a norm of another type": (added(model__layers__0__self_attn__q_norm__weight=torch.ones(8)), {}, "it has .*q_norm.weight"),
    "a weight of nobody": (added(foo__bar=torch.ones(8)), {}, "it has foo.bar, expected only"),
    "a vision tower": (added(vision_model__layernorm__weight=torch.ones(8)), {}, "it has vision_model.layernorm.weight, exp"),
    "a layer too many that predicts nothing": (
        again, {"num_nextn_predict_layers": 1}, r"it has model\.layers\.4\..* and \d+ more, expected only what",
    ),
    "a layer beyond those that predict further tokens": (
        predicting(2, 3), {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}, r"it has model\.layers\.3\..* of 2 layers",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISFITS)
def test_weights_that_do_not_fit_the_config_are_another_model_s(case: str, tmp_path: Path) -> None:
    change, config, words = MISFITS[case]
    assert re.search(words, refusal(saved(families.cached("llama"), tmp_path, change, **config)))


HARMLESS: dict[str, tuple[str, Callable[[Weights], Any], dict[str, Any]]] = {
    "rotary tables": ("llama", added(model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4)), {}),
    "masks": ("gptj", added(
        transformer__h__0__attn__bias=torch.ones(1, 1, 8, 8), transformer__h__0__attn__masked_bias=torch.ones(1)
    ), {}),
    "layers that predict further tokens": (
        "llama", lambda state: [again(state), predicting(4)(state)], {"num_nextn_predict_layers": 1},
    ),
    "a head of values": ("llama", added(v_head__summary__weight=torch.ones(1, 8)), {}),
    "the same under their own name": ("llama", added(mtp__layers__0__norm__weight=torch.ones(8)), {}),
    "the head of a tied model": (
        "llama", lambda state: state.update({"lm_head.weight": state["model.embed_tokens.weight"].clone()}),
        {"tie_word_embeddings": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HARMLESS)
def test_what_changes_no_text_may_be_there(case: str, tmp_path: Path) -> None:
    name, change, config = HARMLESS[case]
    own = families.build(name, **({"tie_word_embeddings": True} if "tied" in case else {}))
    folder, ids = saved(own, tmp_path, change, **config), families.prompts(1)[0][None]
    lacks = "MTP layer that cannot be used .it lacks model.layers.4.enorm.weight"
    with pytest.warns(RuntimeWarning, match=lacks) if "predict further" in case else nullcontext():
        loaded = skipstone.load(folder)[0]
    found, expected = (skipstone.generate(one, ids, SKIP, max_new_tokens=12).new_tokens for one in (loaded, own))
    assert found == expected


def test_what_quantisers_leave_behind_loads() -> None:
    """AutoGPTQ wrote biases of zeros; others the scales of keys and values that skipstone keeps in full."""
    model = SimpleNamespace(config=SimpleNamespace(quantization_config={"quant_method": "gptq"}))
    model.config.get_text_config = lambda **_: SimpleNamespace(num_hidden_layers=4)
    report = {"unexpected_keys": {"model.layers.0.mlp.up_proj.bias", "model.layers.0.self_attn.k_scale"}}
    expect_fit("here", "llama", model, report)
    model.config.quantization_config["quant_method"] = "awq"
    with pytest.raises(ValueError, match=r"it has model\.layers\.0\.mlp\.up_proj\.bias, expected only"):
        expect_fit("here", "llama", model, report)


@pytest.mark.usefixtures("untested")
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.2.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"]
)
def test_the_first_weight_that_is_not_finite_is_named(name: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model = families.build("llama", vocab=103)  # a shape that no other test has verified
    with torch.no_grad():
        model.get_parameter(name).fill_(value)
    with pytest.raises(ValueError, match=rf"not finite: {name}.*checkpoint"):
        ModelRunner(model)


@pytest.mark.usefixtures("untested")
@pytest.mark.parametrize(
    ("dtype", "factor", "remedy"), [(torch.float32, 1e30, "config"), (torch.float16, 1e4, "overflows.*bfloat16 or float32")]
)
def test_finite_weights_that_overflow_are_told_from_an_unknown_architecture(
    dtype: torch.dtype, factor: float, remedy: str
) -> None:
    model = families.build("llama", vocab=107).to(dtype)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.up_proj.weight.mul_(factor)
            layer.mlp.down_proj.weight.mul_(factor)
    with pytest.raises(ValueError, match=rf"weights are finite.*{remedy}"):
        ModelRunner(model, "eager")
