"""FSDP2 on two processes on the CPU (gloo) against one process, and runs that go on with another number of processes."""

import json
import os
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from traceback import StackSummary
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

import skipstone
from skipstone.train import sharding
from skipstone.train.layerskip import objective
from skipstone.train.layerskip.dropout import BatchLayout, kept_elsewhere
from skipstone.train.layerskip.run import run
from skipstone.train.layerskip.schedules import EarlyExitLoss, LayerDropout
from skipstone.train.layerskip.trainer import LayerSkipTrainer
from tests.helpers.training import in_two_processes, logged, losses, recipe, rows, tiny, trainer, weights

STEPS = 6
RUN: dict[str, Any] = {
    "max_steps": STEPS,
    "per_device_train_batch_size": 2,
    "save_strategy": "steps",
    "save_steps": 2,
    "save_total_limit": 3,
    "weight_decay": 0.1,
    "lr_scheduler_type": "linear",
    "warmup_steps": 2,
    "dropout": LayerDropout(0.9),
    "exits": EarlyExitLoss(0.5, "rotational", 2),
    "eval_exits": (2,),
}
SGD: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.5}  # unlike Adam it doesn't divide gradients that are nearly 0
ONE: dict[str, Any] = {**RUN, "gradient_accumulation_steps": 2}  # as many rows a step


TOWARDS_LAST = EarlyExitLoss(0.5, "rotational", 2, kl_weight=0.5)
EVALUATING: dict[str, Any] = {
    "tied": True,
    "exits": TOWARDS_LAST,
    "eval_strategy": "steps",
    "eval_steps": 3,
    "eval_on_start": True,
}


def made(folder: Path, **changes: Any) -> LayerSkipTrainer:
    tied = {"tie_word_embeddings": changes.pop("tied", False)}
    return trainer(folder, tiny(**tied), rows(4 * STEPS), eval_dataset={"held": rows(3, 1)}, **{**RUN, **changes})


def found(one: LayerSkipTrainer) -> dict[str, Any]:
    """The weights in the end, whole, and how many parameters are cut."""
    cut = sum(isinstance(parameter, DTensor) for parameter in one.model.parameters())
    whole = sharding.whole_weights(one.model) if cut else weights(one.model)
    return {"cut": cut, "weights": {name: value.tolist() for name, value in whole.items()}}


def trained(folder: Path, resume: bool = False, **changes: Any) -> dict[str, Any]:
    one = made(folder, **changes)
    one.train(resume_from_checkpoint=resume)
    return found(one)


def evaluating(folder: Path) -> dict[str, Any]:
    """Evaluations before, between and after the steps, of a model with tied embeddings, with activations computed again."""
    one = made(folder, **EVALUATING, activation_checkpointing=True)
    one.train()
    return {**found(one), "metrics": one.evaluate()}


def from_file(folder: Path) -> dict[str, Any]:
    said: list[str] = []
    path = recipe(folder.with_name(f"from_file-{os.environ['RANK']}"), dtype="bfloat16")
    return {"model": str(run(path, folder, say=said.append)), "said": said}


def again(folder: Path) -> dict[str, Any]:
    """Two processes resume a run that two began."""
    if os.environ["RANK"] == "0":
        halfway(folder.with_name("steps"), folder)
    torch.distributed.barrier()
    return trained(folder, True)


def halfway(source: Path, target: Path) -> Path:
    """A copy of a run as it was after two steps."""
    shutil.copytree(source, target)
    for step in (4, 6):
        shutil.rmtree(target / f"checkpoint-{step}")
    return target


WORK: dict[str, Callable[[Path], dict[str, Any]]] = {
    "steps": trained,
    "again": again,
    "from_one": partial(trained, resume=True),
    "evaluating": evaluating,
    "accumulated": partial(trained, per_device_train_batch_size=1, gradient_accumulation_steps=2, **SGD),
    "from_file": from_file,
}


def work(name: str, folder: Path) -> dict[str, Any]:
    return WORK[name](folder)


def alike(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Weights are the same to rounding."""
    assert one["weights"].keys() >= other["weights"].keys()
    for name, value in other["weights"].items():
        found, expected = torch.tensor(one["weights"][name]), torch.tensor(value)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=2e-5, msg=lambda said, name=name: f"{name}: {said}")


@pytest.fixture
def as_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process with four rows drops what two with two rows each drop: both the same rows."""
    real = objective.kept_rows

    def tiled(count: int, *rest: Any) -> list[list[int]]:
        return [[*kept, *(row + 2 for row in kept)] for kept in real(count // 2, *rest)]

    monkeypatch.setattr(objective, "kept_rows", tiled)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of all work. "one" is a run of one process, "from_one" the same run after two steps."""
    place = tmp_path_factory.mktemp("fsdp")
    trained(place / "one", **ONE)
    halfway(place / "one", place / "from_one")
    return place


@pytest.fixture(scope="module")
def two(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Results of both processes, by the name of the work."""
    launch = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "OMP_NUM_THREADS": "1"}
    return in_two_processes(work, folder, list(WORK), **launch)


@pytest.mark.slow
def test_two_processes_train_what_one_does(two: Any, folder: Path, tmp_path: Path, as_two: None) -> None:
    alone = trained(tmp_path, per_device_train_batch_size=4)
    first, second = two["steps"]
    assert first["cut"] == second["cut"] == len(list(tiny().parameters()))
    alike(first, alone)
    for part in ("loss", "loss_last_layer", "grad_norm", "learning_rate"):
        assert losses(folder / "steps", part) == pytest.approx(losses(tmp_path, part), rel=1e-4), part
    assert two["again"][0]["weights"] == first["weights"], "a run that two processes resume goes on exactly"
    assert logged(folder / "again") == logged(folder / "steps")


@pytest.mark.slow
def test_one_process_goes_on_with_what_two_began(two: Any, folder: Path, tmp_path: Path) -> None:
    run = halfway(folder / "steps", tmp_path / "run")
    one = trained(run, True, **ONE)
    assert one["cut"] == 0
    alike(one, two["steps"][0])
    assert losses(run) == pytest.approx(losses(folder / "steps"), rel=1e-4)
    assert not (run / "checkpoint-6" / "shards").exists()
    assert (run / "checkpoint-4" / "model.safetensors").exists()


@pytest.mark.slow
def test_two_processes_go_on_with_what_one_began(two: Any, folder: Path, tmp_path: Path) -> None:
    """In one pass of two processes lie rows of two passes of one, which drop other layers."""
    alone = trained(tmp_path, **ONE)
    alike(two["from_one"][0], alone)
    assert losses(folder / "from_one") == pytest.approx(losses(folder / "one"), rel=1e-4)
    assert (folder / "from_one" / "checkpoint-6" / "shards").exists()


@pytest.mark.slow
def test_evaluations_before_between_and_after(two: Any, folder: Path, tmp_path: Path, as_two: None) -> None:
    alone = made(tmp_path, **EVALUATING, per_device_train_batch_size=4)
    alone.train()
    first, second = two["evaluating"]
    assert first["metrics"] == second["metrics"] == pytest.approx(alone.evaluate(), rel=1e-4)
    alike(first, found(alone))
    assert len(losses(folder / "evaluating", "eval_held_perplexity")) == 4


@pytest.mark.slow
def test_accumulated_passes(two: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two passes of two processes with a row each: rows 0 and 1 of a step are of the first pass."""
    real = objective.kept_rows

    def passes(_: int, rates: Any, seed: int, step: int) -> list[list[int]]:
        first, second = (real(1, rates, seed, 2 * step + number) for number in (0, 1))
        return [[0, 1] * len(one) + [2, 3] * len(two) for one, two in zip(first, second, strict=True)]

    monkeypatch.setattr(objective, "kept_rows", passes)
    alike(two["accumulated"][0], trained(tmp_path, per_device_train_batch_size=4, **SGD))
    assert losses(folder / "accumulated") == pytest.approx(losses(tmp_path), rel=1e-4)


@pytest.mark.slow
def test_a_run_from_one_file_and_its_end_on_one_process(two: Any, folder: Path) -> None:
    """The finished model is whole, in the recipe's dtype, and an ordinary one; one process finds that nothing is left to do."""
    first, second = two["from_file"]
    assert first["model"] == second["model"] == str(folder / "from_file" / "model")
    assert first["said"] != second["said"] == []
    model, tokenizer = skipstone.load(first["model"])
    assert model.config.architectures == ["LlamaForCausalLM"]
    assert model.dtype == torch.bfloat16
    assert model.config.vocab_size == len(tokenizer) == 270
    said: list[str] = []
    file = folder / "from_file-0" / "recipe.yaml"
    assert run(file, folder / "from_file", say=said.append) == Path(first["model"])
    assert "gradient_accumulation_steps=2" in said[0]
    assert "is finished" in said[-1]
    file.write_text(file.read_text().replace("bfloat16", "float32"))
    run(file, folder / "from_file", say=said.append)
    again, _ = skipstone.load(first["model"], dtype="auto")
    assert again.dtype == torch.float32
    for (name, one), other in zip(again.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(one.bfloat16(), other), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"muon": True}, "Muon orthogonalises whole matrices, which FSDP cuts"),
        ({"fp16": True}, "fp16 is not supported under FSDP"),
        ({"version": 1}, "FSDP 1 is not supported: launch with --fsdp_version 2"),
        ({"quantized": True}, "the model is quantised: FSDP cuts trained weights"),
        ({"lora": True}, "adapters .* are not trained under FSDP"),
        ({"activation_checkpointing": True}, "would run layers again without the recipe's dropped rows"),
    ],
)
def test_what_cannot_be_cut_is_refused_in_a_sentence(change: dict[str, Any], message: str) -> None:
    model: Any = tiny()
    if "quantized" in change:
        model.config.quantization_config = {"quant_method": "gptq"}
    if "lora" in change:
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    checkpointing, precision = "activation_checkpointing" in change, "fp16" if "fp16" in change else "no"
    plugin = SimpleNamespace(fsdp_version=change.get("version", 2), activation_checkpointing=checkpointing)
    accelerator: Any = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin), mixed_precision=precision)
    with pytest.raises(ValueError, match=message):
        sharding.check(model, accelerator, "muon" in change)


def test_a_full_disk_is_an_error_in_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch raises no Exception but a BaseException, with what happened by process."""

    def full(*_: Any, **__: Any) -> None:
        raise CheckpointException("save", {1: (OSError(28, "No space left on device"), StackSummary())})

    model = tiny()
    monkeypatch.setattr(sharding, "save_shards", full)
    with pytest.raises(OSError, match=r"process 1: .*No space left on device"):
        sharding.save(tmp_path, model, torch.optim.AdamW(model.parameters()))


def test_parameters_without_states_have_none_after_a_resume(tmp_path: Path) -> None:
    """A layer that dropped all rows so far has no momentum; of others every number comes back."""
    model, other = tiny(), tiny(seed=1)
    optimizer, fresh = (torch.optim.AdamW(one.parameters(), lr=0.1) for one in (model, other))
    (model.lm_head.weight**2).sum().backward()
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sharding.save(tmp_path / "checkpoint-1" / sharding.SHARDS, model, optimizer)
    sharding.load_weights(tmp_path / "checkpoint-1", other)
    sharding.load_optimizer(tmp_path / "checkpoint-1", other, fresh)
    assert list(fresh.state) == [other.lm_head.weight]
    for name, value in optimizer.state[model.lm_head.weight].items():
        assert torch.equal(fresh.state[other.lm_head.weight][name], value), name
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


@pytest.mark.filterwarnings("ignore:the model draws random numbers:UserWarning")
def test_another_number_of_rows_is_another_run_and_random_numbers_of_a_model_are_warned_about(tmp_path: Path) -> None:
    """The manifest says that the run was started by two processes with one pass a step."""

    def again(**changes: Any) -> LayerSkipTrainer:
        return trainer(tmp_path, tiny(attention_dropout=0.1), rows(24), **{**RUN, "max_steps": 2, **changes})

    again(gradient_accumulation_steps=2).train()
    manifest = tmp_path / "checkpoint-2" / "manifest.json"
    content = json.loads(manifest.read_text())
    content["fingerprint"]["training"] |= {"world_size": 2, "gradient_accumulation_steps": 1}
    manifest.write_text(json.dumps(content))
    with pytest.warns(UserWarning, match=r"random numbers of its own \(attention_dropout\)"):
        one = again(gradient_accumulation_steps=2)
    assert (one.started.processes, one.started.passes) == (2, 1)
    one.train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match=r"belongs to another run, training\.world_size differ"):
        again().train(resume_from_checkpoint=True)


def dealt(layout: BatchLayout, step: int) -> list[tuple[int, int]]:
    """(pass within the run, row of its process) of every row of a step, by dealing them out one by one."""
    return [
        (step * layout.passes + number, row)
        for number in range(layout.passes)
        for _ in range(layout.processes)
        for row in range(layout.rows)
    ]


@pytest.mark.parametrize(
    "now", [BatchLayout(2, 2, 2), BatchLayout(2, 4, 1), BatchLayout(2, 1, 4), BatchLayout(4, 1, 2), BatchLayout(1, 2, 4)]
)
def test_the_same_rows_of_a_step_keep_the_same_layers(now: BatchLayout) -> None:
    started, step = BatchLayout(2, 2, 2), 3
    drawn = {6: [[0, 1], [1], []], 7: [[0, 1], [0], [0, 1]]}  # by pass of the run that was started: rows that layers keep
    wanted = [[own in drawn[at][layer] for at, own in dealt(started, step)] for layer in range(3)]
    found: list[list[bool]] = [[], [], []]
    for number in range(now.passes):
        each = [
            kept_elsewhere(started, now, process, step, number, lambda rows, at: drawn[at] if rows == 2 else [], now.rows)
            for process in range(now.processes)
        ]
        for kept, joining in each:
            for layer in range(3):
                found[layer] += [row in kept[layer] for row in range(now.rows)]
                assert joining[layer] == any(own[layer] for own, _ in each)
    assert found == wanted


def test_passes_on_other_processes() -> None:
    assert BatchLayout(2, 1, 8).passes_of(BatchLayout(2, 1, 2)) == 4
    with pytest.raises(ValueError, match="3 processes of 2 rows cannot share 16 rows equally"):
        BatchLayout(2, 1, 8).passes_of(BatchLayout(2, 1, 3))
