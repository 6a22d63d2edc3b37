"""Models on several devices and offloaded ones write what the whole model writes: with accelerate's hooks, by `device_map`.

Several devices are pretended (tests/helpers/several_devices.py): what is on two of them cannot be computed with.
"""

from __future__ import annotations

import functools
import itertools
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch

import skipstone
from skipstone.cli import main
from skipstone.engines.choose_engine import attach
from skipstone.engines.eager.patches import ForwardPatch
from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_runner import ModelRunner
from skipstone.methods import METHODS
from skipstone.models import unsupported
from skipstone.models.device_map import input_device
from skipstone.models.fingerprint import fingerprint
from skipstone.models.passes import Pass
from tests.helpers import families
from tests.helpers.conformance import ROWS
from tests.helpers.pairwise import slow_except
from tests.helpers.several_devices import FIRST, SECOND, There, pretended_devices
from tests.helpers.support import tokenizer

FEW, NEW = 7, 24  # tokens
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "seed": 5}
PLACES: dict[str, tuple[str, list[str]]] = {
    "tokens on the CPU": ("cpu", ["cpu", "cpu", "lazy:0", "lazy:0", "lazy:1", "lazy:1"]),
    "tokens elsewhere": ("lazy:0", ["lazy:0", "lazy:0", "lazy:1", "lazy:0", "lazy:1", "lazy:1"]),
}
"""Where offloaded parts compute; where the embedding is, each of four layers, and what is behind them."""
USUAL = {"tokens on the CPU": ("layerskip", "speculative"), "tokens elsewhere": ("swift", "adadecode")}
"""Methods that decode greedily, and those whose tokens are drawn, in the fast run."""
EVERY = [*METHODS, "layerskip, some tokens", "adasd, some tokens"]


@pytest.fixture
def pretending(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The pretended devices, and weights on them."""
    monkeypatch.setattr(unsupported, "KNOWN_TENSORS", (*unsupported.KNOWN_TENSORS, There))
    with pretended_devices():
        yield


def device_map(model: Any, places: list[str]) -> dict[str, str]:
    """Every part of a decoder where `places` says: the layers and all that is in front of and behind them."""
    first, *layers, last = places
    names, decoder = {module: name for name, module in model.named_modules()}, model.get_decoder()
    family = ModelRunner(model, "eager").family
    found = {}
    for name, part in decoder.named_children():
        if name == family.layers:
            found |= {f"{names[layer]}": place for layer, place in zip(part, layers, strict=True)}
        else:
            entering = [step.path for step in family.entering if step.how in ("tokens", "apply")]
            found[names[part]] = first if name in entering else last
    return {**found, names[model.get_output_embeddings()]: last}


def spread(name: str, where: str, **overrides: Any) -> Any:
    """A family's model over several pretended devices."""
    model = families.build(name, **overrides)
    model.config._experts_implementation = "eager"  # another one is chosen by the type of the device
    main_device, places = PLACES[where]
    return accelerate.dispatch_model(model, device_map(model, places), main_device=main_device)


def written(model: Any, method: Any, drawn: bool, new: int) -> list[list[int]]:
    """The new tokens of a ragged batch, or of one row that is drawn."""
    inputs = {"input_ids": families.prompts(1)[0][None]} if drawn else families.padded(families.prompts(2))
    there = {name: value.to(input_device(model)) for name, value in inputs.items()}
    output = skipstone.generate(model, there, method, max_new_tokens=new, engine="eager", **(SAMPLED if drawn else {}))
    assert output.sequences.device == input_device(model)
    return output.new_tokens or []


def assert_same(model: Any, family: str, name: str, drawn: bool, new: int = FEW) -> None:
    method = ROWS[name].method(family, 4, "coupled")
    assert written(model, method, drawn, new) == written(families.cached(family), method, drawn, new), name


@pytest.mark.parametrize("drawn", [False, True], ids=["greedy", "drawn"])
@pytest.mark.parametrize("where", PLACES)
def test_methods_write_the_same_over_several_devices(pretending: None, where: str, drawn: bool) -> None:
    """One method in each of the four ways; all of them in all ways below."""
    model = spread("llama", where)
    assert {str(one.device) for one in model.parameters()} == set(PLACES[where][1])
    assert_same(model, "llama", USUAL[where][drawn], drawn)


CELLS = list(itertools.product(EVERY, PLACES, (False, True)))


@pytest.mark.parametrize(("name", "where", "drawn"), slow_except((), CELLS, full=CELLS[::5]))
def test_every_method_writes_the_same_over_several_devices(pretending: None, where: str, drawn: bool, name: str) -> None:
    assert_same(spread("llama", where), "llama", name, drawn, NEW)


@pytest.mark.slow
@pytest.mark.parametrize("family", families.NAMES)
def test_families_write_the_same_over_several_devices(pretending: None, family: str) -> None:
    model = spread(family, "tokens on the CPU")
    assert_same(model, family, "layerskip", drawn=False)


@pytest.mark.parametrize("where", slow_except(["tokens elsewhere"], PLACES))
def test_states_and_logits_are_where_the_tokens_are(pretending: None, where: str) -> None:
    """From whatever layer they come: what is done between passes mixes them."""
    model = ModelRunner(spread("llama", where))
    assert str(model.device) == PLACES[where][1][0]
    places = torch.arange(3, device=model.device)[None]
    store = KVCache(1, model.depth, 8)
    store.reserve(3)
    hidden = model.embed(places, places)
    for stop in range(1, model.depth + 1):
        hidden = model.run(hidden, Pass(places, places, None, slice(0, 1), 3, 0), store, range(stop - 1, stop))
        assert hidden.device == model.normed(hidden).device == model.logits(hidden).device == model.device


def test_the_store_keeps_keys_where_they_were_computed(pretending: None) -> None:
    """Slices and indices, and a tree's path that is moved: every layer on its own device."""
    store = KVCache(rows=2, layers=2, limit=100)
    store.reserve(8)
    keys = {FIRST: torch.randn(2, 1, 3, 4), SECOND: torch.randn(2, 1, 3, 4)}
    slots = torch.tensor([[0, 1, 2], [4, 5, 6]])
    view = store.view(Pass(slots, slots, torch.tensor([[True] * 3, [True, True, False]]), slice(0, 2), 8))
    for layer, (device, values) in enumerate(keys.items()):
        view.update(values.to(device), values.to(device), layer)
    store.move(0, [2], [1])
    store.reserve(70)
    for layer, (device, values) in enumerate(keys.items()):
        buffer = store.keys[layer]
        assert buffer is not None
        assert buffer.device == device
        held = buffer.to("cpu")
        assert torch.equal(held[0, :, :2], values[0, :, [0, 2]])
        assert torch.equal(held[1, :, 4:6], values[1, :, :2])
        assert not held[1, :, 6].any(), "an invalid entry is written to the trash"


def test_pretended_devices_refuse_what_is_on_two_of_them(pretending: None) -> None:
    """The tests above prove nothing otherwise."""
    here, there = torch.ones(2), torch.ones(2).to(FIRST)
    assert (there + 1).to("cpu").tolist() == [2, 2]
    for wrong in (lambda: here + there, lambda: there @ torch.ones(2).to(SECOND), lambda: here[torch.tensor([0]).to(FIRST)]):
        with pytest.raises(RuntimeError, match="same device"):
            wrong()


def test_layers_on_another_device_without_hooks_are_refused(pretending: None) -> None:
    model = families.build("llama")
    projection = model.model.layers[2].mlp.up_proj
    projection.weight = torch.nn.Parameter(There(projection.weight.data, FIRST), requires_grad=False)
    with pytest.raises(ValueError, match=r"spread over cpu, lazy:0 without the hooks of accelerate's .* device_map="):
        ModelRunner(model)


# --------------------------------------------------------------------------------------------------------- offloading


@functools.cache
def saved(folder: Path, family: str = "llama", **overrides: Any) -> Path:
    families.build(family, **overrides).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


HALF = {
    **{f"model.{name}": "cpu" for name in ("embed_tokens", "rotary_emb", "layers.0", "layers.1", "norm")},
    **dict.fromkeys(("model.layers.2", "model.layers.3", "lm_head"), "disk"),
}
MAPS: dict[str, Any] = {"half of it": HALF, "all of it": {"": "disk"}, "the head": {"model": "cpu", "lm_head": "disk"}}


def offloaded(folder: Path, places: Any) -> Any:
    return skipstone.load(saved(folder), device_map=places, offload_folder=folder / "offloaded")[0]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "every"])
@pytest.mark.parametrize("what", MAPS)
def test_what_is_offloaded_to_disk_writes_the_same(tmp_path: Path, what: str, every: bool) -> None:
    """By every method, or by a third of them, which is another one for another map."""
    model = offloaded(tmp_path, MAPS[what])
    assert any(one.is_meta for one in model.parameters())
    engine = ModelRunner(model, "eager").engine
    for index, name in enumerate(METHODS):
        if every or index % len(MAPS) == list(MAPS).index(what):
            assert_same(model, "llama", name, drawn=bool(index % 2))
    assert ModelRunner(model, "eager").engine is engine, "the facts hold although weights come and go"
    assert any(one.is_meta for one in model.parameters()), "and weights do go"


def test_weights_in_the_cpus_memory_are_brought_to_the_device_that_computes(pretending: None) -> None:
    model = families.build("llama")
    places = device_map(model, ["cpu", "cpu", "cpu", "lazy:0", "lazy:0", "lazy:0"])
    model = accelerate.dispatch_model(model, places, main_device="lazy:0")
    assert model.model.embed_tokens.weight.is_meta
    assert input_device(model) == FIRST
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "You are calling .generate")  # with the ids on another device than the model
        assert_same(model, "llama", "layerskip", drawn=True)


@pytest.mark.parametrize("tied", [False, True])
def test_an_offloaded_model_has_its_fingerprint(tmp_path: Path, tied: bool) -> None:
    whole = families.build("llama", tie_word_embeddings=tied)
    whole.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    for places in (HALF, {"": "disk"}):
        if tied and "lm_head" in places:
            places = {**places, "lm_head": "cpu"}
        model, _ = skipstone.load(tmp_path, device_map=places, offload_folder=tmp_path / "offloaded")
        assert fingerprint(model) == fingerprint(whole)


def test_the_native_engine_says_why_it_does_not_run_such_a_model(tmp_path: Path) -> None:
    model = offloaded(tmp_path, HALF)
    reason = ModelRunner(model, "auto").engine_reason
    assert reason is not None
    if "its weights are" in reason:  # else the library is not built here
        assert (
            reason == "its weights are on cpu and offloaded, and the native engine wants all of them in this process's memory"
        )
    with pytest.raises(ValueError, match="engine='native' cannot run this model"):
        ModelRunner(model, "native")
    assert ModelRunner(model, "eager").engine.detail.endswith("cpu, weights on cpu and offloaded")


def test_disable_leaves_accelerates_hooks_where_they_were(tmp_path: Path) -> None:
    model = offloaded(tmp_path, HALF)
    before = {name: module.__dict__.get("forward") for name, module in model.named_modules() if name}
    attach(model, "eager")
    skipstone.enable(model, "self_speculative skip_attention=1 skip_mlp=2")
    ids = families.prompts(1)[0][None]
    text = model.generate(ids, max_new_tokens=FEW, do_sample=False)
    assert any(isinstance(module.__dict__.get("forward"), ForwardPatch) for module in model.modules())
    skipstone.disable(model)
    assert {name: module.__dict__.get("forward") for name, module in model.named_modules() if name} == before
    assert torch.equal(model.generate(ids, max_new_tokens=FEW, do_sample=False), text)


def test_weights_that_nobody_has_are_refused(tmp_path: Path) -> None:
    model = offloaded(tmp_path, HALF)
    skipstone.generate(model, torch.tensor([[1, 2]]), "autoregressive", max_new_tokens=2)
    accelerate.hooks.remove_hook_from_submodules(model.model.layers[3])
    model.model.layers[3].to("meta")
    with pytest.raises(ValueError, match=r"meta device, and no hook of accelerate's loads them"):
        ModelRunner(model)


def test_the_command_line_takes_a_device_map(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["generate", str(saved(tmp_path)), "--prompt", "ab the", "--max-new-tokens", "8", "--engine", "eager"]
    common += ["--method", "layerskip exit_layer=2"]
    texts = []
    halves = ["--device-map", json.dumps(HALF), "--offload-folder", str(tmp_path / "offloaded")]
    for more in ([], halves, ["--device-map", "auto"]):
        with pytest.raises(SystemExit) as left:
            main([*common, *more])
        assert left.value.code == 0
        texts.append(capsys.readouterr().out)
    assert texts[0]
    assert texts == texts[:1] * 3
    with pytest.raises(SystemExit):
        main([*common, "--device-map", "{half"])
    assert "--device-map is neither a word nor JSON" in capsys.readouterr().err
