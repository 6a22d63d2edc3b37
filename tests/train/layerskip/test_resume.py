"""kill -9 during training: what resumes ends with the same losses and the same weights, bit by bit, as if nothing had happened.

The processes kill themselves by SIGKILL at chosen moments: before a step, and before any file of the run is opened, made,
renamed or removed, which is where a save is between two files, before its rename, and in the rotation after it.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from skipstone.train import checkpoint
from skipstone.train.layerskip.schedules import EarlyExitLoss, LayerDropout
from tests.helpers.training import (
    Interrupted,
    Steps,
    digest,
    in_processes,
    interrupt_at,
    kill_when,
    logged,
    rows,
    tiny,
    trainer,
)

STEPS = 10
KINDS: dict[str, dict[str, Any]] = {
    "adamw, rotational": {"dropout": LayerDropout(0.5, "exponential"), "exits": EarlyExitLoss(0.5, "rotational", 2)},
    "muon, gradual": {
        "dropout": LayerDropout(0.5),
        "exits": EarlyExitLoss(0.5, "gradual", kl_weight=0.5),
        "muon_learning_rate": 0.02,
        "lr_scheduler_type": "linear",
        "warmup_steps": 3,
        "weight_decay": 0.1,
    },
}
BEFORE_THE_RENAME = "os.rename RUN/.partial/checkpoint-"
AFTER_THE_RENAME = "open RUN None"  # the run's folder is flushed
IN_THE_ROTATION = "os.rename RUN/checkpoint-"
START = "forkserver" if torch.cuda.is_available() else "fork"
"""A fork costs little. With CUDA torch computes no gradients in a fork of a process that has computed some."""
NAMED = (IN_THE_ROTATION, BEFORE_THE_RENAME, AFTER_THE_RENAME)


def made(folder: Path, kind: str, **more: Any) -> Any:
    """13 rows in a shuffled order, four a step in two passes: an epoch ends within a step, and a run has three."""
    return trainer(
        folder,
        tiny(attention_dropout=0.1),
        rows(13),
        **{
            "max_steps": STEPS,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "train_sampling_strategy": "random",
            "save_strategy": "steps",
            "save_steps": 2,
            "save_total_limit": 2,
            "eval_strategy": "steps",
            "eval_steps": 3,
            "eval_exits": (2,),
            "eval_dataset": {"held": rows(3, seed=1)},
            **KINDS[kind],
            **more,
        },
    )


def train(folder: Path, kind: str, moment: int | str | None) -> None:
    """A process: train, and be killed at that moment. What is left at the end is written beside the run's folder."""
    import sys

    one = made(folder, kind, callbacks=[Steps(lambda _: sys.audit("training.step"))])
    if moment is not None:
        kill_when(folder, moment, folder.with_suffix(".killed"))
    one.train(resume_from_checkpoint=True)
    folder.with_suffix(".json").write_text(json.dumps({"digest": digest(one.model), "step": one.state.global_step}))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_random_moments(tmp_path: Path, kind: str) -> None:
    """At some that are chosen, so that no run of the dice misses them, and at others that are drawn."""
    dice = random.Random(kind)
    moments: list[int | str] = [*NAMED, *(dice.randrange(1, 50) for _ in range(7))]
    dice.shuffle(moments)
    whole, run = tmp_path / "whole", tmp_path / "run"
    train(whole, kind, None)
    assert len({entry["loss"] for entry in logged(whole) if "loss" in entry}) == STEPS
    for moment in moments:
        assert in_processes(train, (run, kind, moment), start=START) == [-9], moment
        for folder in run.glob("checkpoint-*"):
            checkpoint.verify(folder, made(run, kind).fingerprint)
    reached = checkpoint.latest(run)
    assert reached is not None, "every process began anew"
    assert in_processes(train, (run, kind, None), start=START) == [0]
    killed = (tmp_path / "run.killed").read_text().splitlines()
    assert len(killed) == len(moments)
    assert all(any(event.startswith(name) for event in killed) for name in NAMED), killed
    assert (tmp_path / "run.json").read_text() == (tmp_path / "whole.json").read_text()
    assert logged(run) == logged(whole)
    names = sorted(path.name for path in run.iterdir())
    assert names == ["checkpoint-10", "checkpoint-8", "metrics.jsonl"], "nothing is left lying about"


class TestInterrupted:
    """By an exception, in this process."""

    @pytest.mark.slow
    def test_a_run_that_is_saved_by_epochs_ends_the_same(self, tmp_path: Path) -> None:
        more = {"save_strategy": "epoch", "max_steps": -1, "num_train_epochs": 3, "save_total_limit": None, "logging_steps": 3}
        whole = made(tmp_path / "whole", "adamw, rotational", **more)
        whole.train()
        for step in (4, 8):
            with pytest.raises(Interrupted):
                made(tmp_path / "run", "adamw, rotational", callbacks=[interrupt_at(step)], **more).train(True)
        one = made(tmp_path / "run", "adamw, rotational", **more)
        one.train(resume_from_checkpoint=True)
        assert one.state.global_step == whole.state.global_step >= STEPS
        assert digest(one.model) == digest(whole.model)
        assert logged(tmp_path / "run") == logged(tmp_path / "whole")
        assert len(logged(tmp_path / "run")) >= STEPS // 3

    @pytest.mark.slow
    def test_resuming_depends_on_every_part_of_the_checkpoint(self, tmp_path: Path) -> None:
        """What proves that the tests above could fail: without random numbers or the optimiser's state all is different."""
        whole = made(tmp_path / "whole", "muon, gradual")
        whole.train()
        for name, lost in (("rng", "rng_state.pth"), ("optimiser", "optimizer.pt")):
            folder = tmp_path / name
            with pytest.raises(Interrupted):
                made(folder, "muon, gradual", callbacks=[interrupt_at(5)]).train()
            last = checkpoint.latest(folder)
            assert last is not None
            (last / lost).unlink()
            manifest = json.loads((last / checkpoint.MANIFEST).read_text())
            del manifest["files"][lost]
            (last / checkpoint.MANIFEST).write_text(json.dumps(manifest))
            one = made(folder, "muon, gradual")
            one.train(resume_from_checkpoint=True)
            assert digest(one.model) != digest(whole.model), name
