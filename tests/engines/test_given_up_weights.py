"""Models that gave up their weights for the native engine's copy: their values, what still runs, and the memory saved."""

import copy
import gc
import io
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import skipstone
from skipstone.engines.choose_engine import EngineOptions, attach
from skipstone.engines.model_runner import ModelRunner
from skipstone.methods.speculative import Speculative
from skipstone.models.fingerprint import fingerprint
from skipstone.models.packed_weight import PackedWeight, is_packed
from tests.helpers import families
from tests.helpers.native import EACH_DTYPE, FAMILIES, NATIVE_ONLY, assert_same_bits, chain, text
from tests.helpers.pairwise import round_robin, slow_except

pytestmark = NATIVE_ONLY
IDS = families.prompts(1)[0][None]


def given_up(name: str = "llama", dtype: torch.dtype = torch.float32, quantize: str | None = None, **more: Any) -> Any:
    """A model after the native engine took its weights over."""
    model = families.build(name, **more).to(dtype)
    attach(model, EngineOptions(quantize=quantize, keep_weights=False))
    assert ModelRunner(model).engine.name == "native"
    assert is_packed(model)
    return model


def decode(model: Any, method: str = "autoregressive", **more: Any) -> torch.Tensor:
    return skipstone.generate(model, IDS, method, max_new_tokens=8, do_sample=False, **more).sequences


@round_robin(name=FAMILIES, dtype=EACH_DTYPE)
def test_every_parameter_still_says_what_it_was(name: str, dtype: torch.dtype) -> None:
    before, model = families.build(name).to(dtype), given_up(name, dtype)
    embedding = model.get_input_embeddings().weight
    for (key, was), (same_key, now) in zip(before.named_parameters(), model.named_parameters(), strict=True):
        assert key == same_key
        assert isinstance(now, torch.nn.Parameter)
        assert isinstance(now, PackedWeight) == (now.ndim == 2 and (now is not embedding or now is model.lm_head.weight)), key
        assert (was.shape, was.dtype, was.device, was.requires_grad) == (now.shape, now.dtype, now.device, now.requires_grad)
        assert torch.equal(was, now.detach()), key
    assert fingerprint(model) == fingerprint(before)
    assert_same_bits(chain(ModelRunner(model), text(), 5), chain(ModelRunner(before, "native"), text(), 5))


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_quantised_weights_say_what_their_codes_stand_for(name: str, kind: str) -> None:
    before, model = families.build(name), given_up(name, quantize=kind)
    steps = {"int8": 254, "int4": 15}
    for (key, was), now in zip(before.named_parameters(), model.parameters(), strict=True):
        if isinstance(now, PackedWeight):
            most = 1.1 * (was.max() - was.min()) / steps["int8" if now is model.lm_head.weight else kind]
            assert 0 < (was - now).abs().max() < most, key
    assert fingerprint(model) == fingerprint(before), "the model is the same"
    assert_same_bits(chain(ModelRunner(model), text(), 5), chain(ModelRunner(before, None, kind), text(), 5))
    with pytest.raises(ValueError, match="gave up when it was quantised: load it again"):
        ModelRunner(model, "native", "none")


def test_the_engine_is_made_once_and_its_panels_outlive_a_change_of_the_config() -> None:
    model = given_up(quantize="int8")
    engine = ModelRunner(model).engine
    assert ModelRunner(model).engine is engine
    expected = chain(ModelRunner(model), text(), 5)
    model.config.some_field = 1
    assert ModelRunner(model).engine is not engine
    del engine
    gc.collect()
    again: Any = ModelRunner(model).engine
    assert again._weights.bytes == 0, "the panels are copied again"
    assert_same_bits(chain(ModelRunner(model), text(), 5), expected)


@pytest.mark.parametrize(
    ("name", "threads"), slow_except([("phi3", 2)], itertools.product(["llama", "phi3", "gemma2"], [1, 2]))
)
def test_eager_and_transformers_run_unpacked_weights(name: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)  # into as many blocks a matrix is split for one row
    before, model = families.build(name), given_up(name)
    assert torch.equal(model(IDS).logits, before(IDS).logits)
    eager = ModelRunner(model, "eager")
    assert eager.engine.detail.endswith("slow: its weights are unpacked whenever they are read")
    assert_same_bits(chain(eager, text(), 5), chain(ModelRunner(before, "eager"), text(), 5))
    found, expected = (decode(one, "layerskip exit_layer=2", engine="eager") for one in (model, before))
    assert torch.equal(found, expected)
    with torch.inference_mode():
        assert torch.equal(chain(ModelRunner(model, "eager"), text(), 1)[0], chain(ModelRunner(before, "eager"), text(), 1)[0])


def test_texts_unpack_nothing_until_a_hook_sends_the_model_to_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    model, before = given_up(), families.build("llama")
    with monkeypatch.context() as patch:
        patch.setattr(PackedWeight, "__torch_dispatch__", lambda *_: pytest.fail("a weight was unpacked"))
        assert model.lm_head.weight.shape == (97, 32)
        assert model.num_parameters() == before.num_parameters()
        texts = [decode(model, method) for method in ("autoregressive", "layerskip exit_layer=2", "swift", "prompt_lookup")]
    hook = model.model.layers[1].register_forward_hook(lambda *_: None)
    found = skipstone.generate(model, IDS, "autoregressive", max_new_tokens=8, do_sample=False)
    assert (found.engine, found.engine_reason is None) == ("eager", False)
    hook.remove()
    assert ModelRunner(model).engine.name == "native"
    assert all(torch.equal(found.sequences, one) for one in texts)
    few = [chain(ModelRunner(one, None, "int8"), text(), 5) for one in (model, before)]
    assert_same_bits(*few)  # in another precision they are computed of the values that were there


@pytest.mark.parametrize("tie", [False, True])
def test_copies_checkpoints_and_moved_models_are_plain(tie: bool, tmp_path: Path) -> None:
    before, model = families.build("llama", tie_word_embeddings=tie), given_up(tie_word_embeddings=tie)
    model.save_pretrained(tmp_path)
    torch.save(model, pickled := io.BytesIO())
    pickled.seek(0)
    state = model.state_dict()
    assert all(type(one) is torch.Tensor for one in state.values())
    fresh = families.build("llama", seed=3, tie_word_embeddings=tie)
    fresh.load_state_dict(state)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path), torch.load(pickled, weights_only=False)
    for made in (copy.deepcopy(model), fresh, *loaded):
        assert not is_packed(made)
        assert (made.lm_head.weight is made.model.embed_tokens.weight) == tie
        for name, one in made.named_parameters():
            assert torch.equal(one, before.get_parameter(name)), name
    assert is_packed(model.to("cpu"))
    model.to(torch.bfloat16)
    before.to(torch.bfloat16)
    assert not is_packed(model)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tie
    assert torch.equal(model(IDS).logits, before(IDS).logits)
    attach(model, EngineOptions(keep_weights=True))
    assert_same_bits(chain(ModelRunner(model), text(), 5), chain(ModelRunner(before, "native"), text(), 5))


def test_adapters_run_on_eager_and_are_merged_into_the_values() -> None:
    texts, merged = [], []
    for model in (given_up(), families.build("llama")):
        torch.manual_seed(0)
        wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)).eval()
        texts.append(decode(wrapped, engine="eager"))
        merged.append(wrapped.merge_and_unload())  # pyright: ignore
    assert torch.equal(*texts)
    assert is_packed(merged[0])
    for (name, one), other in zip(merged[0].named_parameters(), merged[1].parameters(), strict=True):
        assert torch.equal(one.detach(), other), name
    assert torch.equal(decode(merged[0]), decode(merged[1]))


def test_changes_are_refused_in_one_sentence() -> None:
    model = given_up()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with torch.enable_grad():
        model.train()(IDS, labels=IDS).loss.backward()
    for change in (
        lambda: model.lm_head.weight.add_(1),
        lambda: torch.nn.init.zeros_(model.lm_head.weight),
        lambda: model.load_state_dict(families.build("llama").state_dict()),
        optimizer.step,
    ):
        with pytest.raises(RuntimeError, match="weights of this model were given up"):
            change()
    assert not bool(torch.isnan(model.lm_head.weight.detach()).any())


def test_load_gives_up_what_it_is_told_to() -> None:
    plain, _ = skipstone.load()
    model, _ = skipstone.load(keep_weights=False)
    assert not is_packed(plain)
    assert is_packed(model)
    assert not is_packed(skipstone.load(engine="eager", keep_weights=False)[0]), "eager needs them"
    assert fingerprint(model) == fingerprint(plain)
    for method in ("layerskip", "speculative"):
        assert torch.equal(decode(plain, method), decode(model, method)), method
    draft = Speculative().draft_model_for(ModelRunner(plain))
    assert is_packed(draft.model), "a draft model that was named is nobody's but ours"
    assert not is_packed(Speculative(copy.deepcopy(draft.model)).draft_model_for(ModelRunner(plain)).model)


MEASURE = """
import json, sys
import torch, skipstone
from transformers import LlamaForCausalLM  # what loading imports is there before
from skipstone.engines.model_runner import ModelRunner

def status(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))

skipstone.load(keep_weights=False)  # the same code, with a small model
torch.set_num_threads(1)
before = status("VmRSS")
from skipstone.engines.loading import load_model
from skipstone.engines.choose_engine import EngineOptions, attach
model = load_model(sys.argv[1])
attach(model, EngineOptions("native", None if sys.argv[3] == "none" else sys.argv[3], keep_weights=sys.argv[2] == "True"))
if sys.argv[4] == "True":
    for one in model.parameters():
        one.data = one.data.clone()  # no longer in the file's mapping
runner = ModelRunner(model)
assert runner.engine.name == "native"
sizes = {"after": status("VmRSS") - before, "largest": status("VmHWM") - before}
print(json.dumps({**sizes, "panels": runner.engine._weights.bytes / 2**20}))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of some 120 MB, a quarter of it the tied embedding."""
    folder = tmp_path_factory.mktemp("large")
    shape: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 8}
    config = LlamaConfig(vocab_size=16000, num_key_value_heads=4, tie_word_embeddings=True, **shape)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def measured(folder: Path, keep: bool, quantize: str = "none", cloned: bool = False) -> dict[str, float]:
    """Megabytes beyond those before: the process's memory after loading and the largest, and the panels."""
    command = [sys.executable, "-c", MEASURE, str(folder), str(keep), quantize, str(cloned)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return json.loads(ran.stdout)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc")
@pytest.mark.slow
@pytest.mark.parametrize(
    "cloned", [pytest.param(False, id="mapped"), pytest.param(True, id="allocated", marks=pytest.mark.product)]
)
def test_weights_are_in_memory_once(large: Path, cloned: bool) -> None:
    found, twice = measured(large, False, cloned=cloned), measured(large, True, cloned=cloned)
    weights = found["panels"]
    assert 100 < weights < 140
    slack = 20  # MB: blocks that the allocator keeps, huge pages that are not full
    assert twice["after"] > 2 * weights - slack, "two copies are not seen"
    assert found["after"] < weights + slack
    if not cloned:  # clones are made before the file is closed
        assert found["largest"] < weights + 16000 * 512 * 4 / 2**20 + slack
        few = measured(large, False, "int4")
        assert few["panels"] < 30
        assert few["after"] < few["panels"] + slack
