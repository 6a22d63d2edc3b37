"""Two processes on the CPU (gloo), as `accelerate launch` starts them, against one process with batches of twice the size."""

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from skipstone.train.layerskip.schedules import LayerDropout
from tests.helpers.training import (
    OFF,
    Interrupted,
    heads_base,
    heads_recipe,
    in_two_processes,
    interrupt_at,
    logged,
    losses,
    rows,
    trainer,
    weights,
)

pytestmark = pytest.mark.slow
SGD: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.5, "dropout": OFF}
KEPT: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "train_sampling_strategy": "random", "max_steps": 6}


def plain(folder: Path, batch: int, accumulate: int) -> dict[str, Any]:
    one = trainer(folder, per_device_train_batch_size=batch, gradient_accumulation_steps=accumulate, **SGD)
    one.train()
    return {"weights": {name: value.tolist() for name, value in weights(one.model).items()}}


def dropping(folder: Path) -> dict[str, Any]:
    """The rows that every layer kept, forward by forward; the metrics of an evaluation; how many logits the loss saw."""
    from skipstone.train.layerskip import objective

    found: list[list[list[int]]] = []
    real = objective.kept_rows
    objective.kept_rows = lambda *args: found.append(real(*args)) or found[-1]  # type: ignore[assignment]
    changes = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "eval_dataset": {"a": rows(5, 1)}}
    one = trainer(folder, data=rows(36), eval_strategy="steps", eval_steps=2, dropout=LayerDropout(0.9), **changes)
    try:
        one.train()
    finally:
        objective.kept_rows = real
    return {"kept": found, "metrics": one.evaluate()}


def resumed(folder: Path) -> dict[str, Any]:
    """Interrupted in every process after a checkpoint, in the middle of a log entry's steps, and gone on with."""
    changes = {**KEPT, "per_device_train_batch_size": 2, "logging_steps": 3}
    trainer(folder / "whole", **changes).train()
    try:
        trainer(folder / "run", callbacks=[interrupt_at(3)], **changes).train()
    except Interrupted:
        trainer(folder / "run", **changes).train(resume_from_checkpoint=True)
    return {}


def heads(folder: Path) -> dict[str, Any]:
    """AdaDecode's exit heads: the first process writes answers and features, both train."""
    from skipstone.train.heads.training import run as run_heads

    if os.environ.get("RANK", "0") == "0":
        heads_base(folder / "base")
        (folder / "ready").touch()
    while not (folder / "ready").exists():
        time.sleep(0.05)
    said: list[str] = []
    return {
        "heads": str(run_heads(heads_recipe(folder / "base", folder / "run"), folder / "base", say=said.append)),
        "said": said,
    }


WORK: dict[str, Callable[[Path], dict[str, Any]]] = {
    "accumulated": partial(plain, batch=1, accumulate=2),
    "dropping": dropping,
    "resumed": resumed,
    "heads": heads,
}


def work(name: str, folder: Path) -> dict[str, Any]:
    return {"folder": str(folder), **WORK[name](folder)}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Results of both processes, by the name of the work."""
    return in_two_processes(work, tmp_path_factory.mktemp("two"), list(WORK))


def test_the_loss_is_that_of_one_process_with_twice_the_batch(two: Any, tmp_path: Path) -> None:
    """Rows differ in how many of their tokens are learned: a mean of the processes' means would be another loss."""
    first, second = two["accumulated"]
    expected = plain(tmp_path, 4, 1)
    for part in ("loss", "loss_last_layer", "grad_norm"):
        assert losses(Path(first["folder"]), part) == pytest.approx(losses(tmp_path, part), rel=1e-4), part
    assert losses(tmp_path)[0] > losses(tmp_path)[-1] + 0.01
    assert first["weights"] == second["weights"]
    for weight, value in expected["weights"].items():
        torch.testing.assert_close(torch.tensor(first["weights"][weight]), torch.tensor(value), rtol=1e-3, atol=1e-5)


def test_both_processes_drop_the_same_rows_at_every_layer_and_step(two: Any) -> None:
    first, second = two["dropping"]
    counts = [[[len(rows) for rows in kept] for kept in one["kept"]] for one in (first, second)]
    assert counts[0] == counts[1]
    assert first["kept"] == second["kept"]
    assert len(first["kept"]) == 8
    assert len({str(kept) for kept in first["kept"]}) > 4, "passes drop other rows"
    assert min(count for each in counts[0] for count in each) < 3
    assert any(each[-1] == 0 for each in counts[0]), "a layer without any row is part of the test"


def test_every_process_evaluates_and_finds_what_one_would(two: Any) -> None:
    first, second = two["dropping"]
    assert first["metrics"] == second["metrics"]
    steps = [entry["step"] for entry in logged(Path(first["folder"])) if "eval_a_loss" in entry]
    assert steps == [2, 4, 4], "twice in training, once asked for"
    assert first["metrics"]["eval_a_agreement_exit_3"] == 1.0


def test_an_interrupted_run_resumes_exactly(two: Any) -> None:
    folder = Path(two["resumed"][0]["folder"])
    assert losses(folder / "run") == pytest.approx(losses(folder / "whole"), rel=1e-6)
    assert losses(folder / "run", "loss_last_layer") == pytest.approx(losses(folder / "whole", "loss_last_layer"), rel=1e-6)
    assert len(losses(folder / "whole")) == 2
    latest = folder / "run" / "checkpoint-6"
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= {path.name for path in latest.iterdir()}
    assert (latest / "model.safetensors").read_bytes() == (folder / "whole" / "checkpoint-6" / "model.safetensors").read_bytes()


def test_exit_heads_are_those_of_one_process(two: Any, tmp_path: Path) -> None:
    first, second = two["heads"]
    assert first["heads"] == second["heads"]
    assert first["said"] != second["said"] == []
    alone = heads(tmp_path)
    for name in ("heads.0.weight", "heads.1.weight"):
        one, other = (load_file(Path(each["heads"]) / "exit_heads.safetensors")[name] for each in (first, alone))
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
        assert not torch.equal(one, torch.eye(len(one))), "something was learnt"
