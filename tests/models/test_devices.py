"""Models over several (pretended) devices and offloaded ones write what the whole model writes."""

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
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.native import library
from skipstone.lab.bench import plan, run_file
from skipstone.lab.bench.run import run as bench
from skipstone.models import unsupported
from skipstone.models.device_map import input_device
from skipstone.models.fingerprint import fingerprint
from tests.helpers import families
from tests.helpers.conformance import COMMON
from tests.helpers.pairwise import slow_except
from tests.helpers.pretended import DEVICE_ROWS
from tests.helpers.several_devices import FIRST, SECOND, There, pretended_devices
from tests.helpers.support import save

FEW = 6  # tokens
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "seed": 5}
PLACES: dict[str, tuple[str, list[str]]] = {
    "tokens on the CPU": ("cpu", ["cpu", "cpu", "lazy:0", "lazy:0", "lazy:1", "lazy:1"]),
    "tokens elsewhere": ("lazy:0", ["lazy:0", "lazy:0", "lazy:1", "lazy:0", "lazy:1", "lazy:1"]),
}
"""Where offloaded parts compute; where the embedding is, each of four layers, and what is behind them."""
EVERY = [*COMMON, "layerskip, some tokens", "adasd, some tokens"]


@pytest.fixture
def pretending(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(unsupported, "KNOWN_TENSORS", (*unsupported.KNOWN_TENSORS, There))
    with pretended_devices():
        yield


def device_map(model: Any, places: list[str]) -> dict[str, str]:
    """The place of every part of a decoder: what is in front of the layers, each layer, and what is behind them."""
    first, *layers, last = places
    names, decoder = {module: name for name, module in model.named_modules()}, model.get_decoder()
    family = ModelRunner(model, "eager").family
    entering = [step.path for step in family.entering if step.how in ("tokens", "apply")]
    found = {names[part]: first if name in entering else last for name, part in decoder.named_children()}
    parts = decoder.get_submodule(family.layers)
    del found[names[parts]]
    found |= {names[layer]: place for layer, place in zip(parts, layers, strict=True)}
    return {**found, names[model.get_output_embeddings()]: last}


def spread(name: str, where: str) -> Any:
    model = families.build(name)
    model.config._experts_implementation = "eager"  # another one is chosen by the type of the device
    main_device, places = PLACES[where]
    return accelerate.dispatch_model(model, device_map(model, places), main_device=main_device)


def assert_same(model: Any, family: str, name: str, drawn: bool) -> None:
    """A ragged batch, or one row that is drawn, is what the whole model writes."""
    inputs, options, texts = families.padded(families.prompts(1 if drawn else 2)), SAMPLED if drawn else {}, []
    for one in (model, families.cached(family)):
        there = {key: value.to(input_device(one)) for key, value in inputs.items()}
        method = DEVICE_ROWS[name].method(family, 4, "coupled")
        output = skipstone.generate(one, there, method, max_new_tokens=FEW, engine="eager", **options)
        assert output.sequences.device == input_device(one)
        texts.append(output.new_tokens)
    assert texts[0] == texts[1], name


CELLS = [("llama", *cell) for cell in itertools.product(EVERY, PLACES, (False, True))]
OTHERS = [(family, "layerskip", "tokens on the CPU", False) for family in families.NAMES if family != "llama"]
FAST = [("llama", "layerskip", "tokens on the CPU", False)]


@pytest.mark.parametrize(
    ("family", "name", "where", "drawn"), slow_except(FAST, CELLS + OTHERS, full=[*CELLS[::5], *OTHERS[::6]])
)
def test_methods_write_the_same_over_several_devices(pretending: None, family: str, name: str, where: str, drawn: bool) -> None:
    model = spread(family, where)
    assert {str(one.device) for one in model.parameters()} == set(PLACES[where][1]) or family != "llama"
    assert_same(model, family, name, drawn)


def test_pretended_devices_refuse_what_is_on_two_of_them(pretending: None) -> None:
    """The tests above prove nothing otherwise."""
    here, there = torch.ones(2), torch.ones(2).to(FIRST)
    assert (there + 1).to("cpu").tolist() == [2, 2]
    for wrong in (lambda: here + there, lambda: there @ torch.ones(2).to(SECOND), lambda: here[torch.tensor([0]).to(FIRST)]):
        with pytest.raises(RuntimeError, match="same device"):
            wrong()


def test_weights_on_other_devices_without_hooks_are_refused(pretending: None) -> None:
    model = families.build("llama")
    projection = model.model.layers[2].mlp.up_proj
    projection.weight = torch.nn.Parameter(There(projection.weight.data, FIRST), requires_grad=False)
    with pytest.raises(ValueError, match=r"spread over cpu, lazy:0 without the hooks of accelerate's .* device_map="):
        ModelRunner(model)


def test_weights_that_nobody_has_are_refused(tmp_path: Path) -> None:
    model = offloaded(tmp_path)
    skipstone.generate(model, torch.tensor([[1, 2]]), "autoregressive", max_new_tokens=2)
    accelerate.hooks.remove_hook_from_submodules(model.model.layers[3])
    model.model.layers[3].to("meta")
    with pytest.raises(ValueError, match=r"meta device, and no hook of accelerate's loads them"):
        ModelRunner(model)


HALF = {
    **{f"model.{name}": "cpu" for name in ("embed_tokens", "rotary_emb", "layers.0", "layers.1", "norm")},
    **dict.fromkeys(("model.layers.2", "model.layers.3", "lm_head"), "disk"),
}
MAPS: dict[str, Any] = {"half of it": HALF, "all of it": {"": "disk"}, "the head": {"model": "cpu", "lm_head": "disk"}}


def offloaded(folder: Path, places: Any = HALF, **overrides: Any) -> Any:
    save(families.build("llama", **overrides), folder)
    return skipstone.load(folder, device_map=places, offload_folder=folder / "offloaded")[0]


@pytest.mark.parametrize(
    ("what", "step"), [("half of it", 6), *(pytest.param(what, 1, marks=pytest.mark.slow) for what in MAPS)]
)
def test_what_is_offloaded_to_disk_writes_the_same(tmp_path: Path, what: str, step: int) -> None:
    """step: 1 for every method, 6 for a sixth of them."""
    model = offloaded(tmp_path, MAPS[what])
    assert any(one.is_meta for one in model.parameters())
    engine = ModelRunner(model, "eager").engine
    for index, name in [*enumerate(COMMON)][::step]:
        assert_same(model, "llama", name, drawn=bool(index % 2))
    assert ModelRunner(model, "eager").engine is engine, "the facts hold although weights come and go"
    assert any(one.is_meta for one in model.parameters()), "and weights do go"


@pytest.mark.slow
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
    for places in ({**HALF, "lm_head": "cpu"} if tied else HALF, {"": "disk"}):
        model = offloaded(tmp_path, places, tie_word_embeddings=tied)
        assert fingerprint(model) == fingerprint(families.build("llama", tie_word_embeddings=tied))


@pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))
def test_the_native_engine_says_why_it_does_not_run_such_a_model(tmp_path: Path) -> None:
    model = offloaded(tmp_path)
    reason = "its weights are on cpu and offloaded, and the native engine wants all of them in this process's memory"
    assert ModelRunner(model, "auto").engine_reason == reason
    with pytest.raises(ValueError, match="engine='native' cannot run this model"):
        ModelRunner(model, "native")
    assert ModelRunner(model, "eager").engine.detail.endswith("cpu, weights on cpu and offloaded")


def test_the_command_line_takes_a_device_map(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(save(families.build("llama"), tmp_path))
    common = ["generate", folder, "--prompt", "ab the", "--max-new-tokens", "8", "--method", "layerskip exit_layer=2"]

    def run(*more: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as left:
            main([*common, "--engine", "eager", *more])
        return (left.value.code, *capsys.readouterr())

    whole = run()
    assert whole[0] == 0
    assert whole[1]
    halves = run("--device-map", json.dumps(HALF), "--offload-folder", str(tmp_path / "offloaded"))
    assert halves[:2] == run("--device-map", "auto")[:2] == whole[:2]
    assert "--device-map is neither a word nor JSON" in run("--device-map", "{half")[2]


def test_a_benchmark_takes_a_device_map(tmp_path: Path) -> None:
    folder = save(families.build("llama"), tmp_path / "model")
    (tmp_path / "mine.jsonl").write_text('{"prompt": "ab the"}\n{"prompt": "abc stop"}\n')
    common = {"models": [str(folder)], "tasks": [str(tmp_path / "mine.jsonl")], "max_new_tokens": 8}
    common["methods"] = ["hf-generate", "autoregressive", "prompt_lookup"]

    def measured(name: str, **more: Any) -> tuple[str, list[Any]]:
        lines = run_file.read(bench(plan.read(None, {**common, **more}), tmp_path / name, [], lambda _: None))
        (engine,) = (line["engine_reason"] for line in lines if line["kind"] == "model")
        prompts = [line for line in lines if line["kind"] == "prompt"]
        return engine, [{label: row["digests"] for label, row in line["rows"].items()} for line in prompts]

    places = {"model": "cpu", "lm_head": "disk"}
    reason, halves = measured("halves.jsonl", device_map=places)
    assert "on cpu and offloaded" in reason
    assert halves == measured("whole.jsonl", engine="eager")[1]
    with pytest.raises(ValueError, match="device_map places the weights, found device='meta' as well"):
        measured("both.jsonl", device_map=places, device="meta")
