"""Checkpoints: whole or not there, verified before use, kept by step; a full disk; the metrics file after an interruption."""

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerControl, TrainerState

from skipstone.train import checkpoint
from skipstone.train.layerskip.metrics import JsonLog
from skipstone.train.layerskip.schedules import EarlyExitLoss
from skipstone.utils.files import read_lines
from tests.helpers.pairwise import slow_except
from tests.helpers.parcels import everything as content
from tests.helpers.training import Interrupted, arguments, interrupt_at, logged, rows, tiny, trainer

PRINT = {"recipe": "a", "model": '{"layers": 3,\n "transformers_version": "5.20.0"}', "training": {"max_steps": 4, "rate": 0.1}}


def written(run: Path, step: int, fingerprint: dict[str, Any] = PRINT, content: str = "weights") -> Path:
    folder = checkpoint.partial_folder(run) / f"checkpoint-{step}"
    (folder / "deep").mkdir(parents=True)
    (folder / "model").write_text(content * 100)
    (folder / "deep" / "state").write_text(f"{step}")
    return checkpoint.publish(folder, run, step, fingerprint)


class TestVerify:
    def test_what_was_written_is_found_again(self, tmp_path: Path) -> None:
        folder = written(tmp_path, 7)
        assert folder == checkpoint.latest(tmp_path) == tmp_path / "checkpoint-7"
        assert checkpoint.verify(folder, PRINT) == 7
        assert sorted(content(folder)) == ["deep/state", "manifest.json", "model"]
        assert os.listdir(tmp_path) == ["checkpoint-7"], "nothing else is left"
        newer = {**PRINT, "model": PRINT["model"].replace("5.20.0", "5.99.1")}  # of transformers, and tuples for lists
        assert checkpoint.verify(written(tmp_path, 9, {**PRINT, "exits": [1, 2]}), {**newer, "exits": (1, 2)}) == 9

    @pytest.mark.parametrize(
        ("damage", "part"),
        [
            (lambda folder: (folder / "model").write_bytes(b"x" + (folder / "model").read_bytes()[1:]), "model is damaged"),
            (lambda folder: (folder / "deep" / "state").unlink(), "state is damaged: .* found nothing"),
            (lambda folder: (folder / "manifest.json").unlink(), "no checkpoint of skipstone"),
            (lambda folder: (folder / "manifest.json").write_text('{"step": 4'), "missing or unreadable"),
        ],
    )
    def test_damage(self, tmp_path: Path, damage: Callable[[Path], Any], part: str) -> None:
        older, newer = written(tmp_path, 2), written(tmp_path, 4)
        damage(newer)
        before = content(tmp_path)
        with pytest.raises(ValueError, match=part):
            checkpoint.verify(newer, PRINT)
        assert checkpoint.latest_good(tmp_path, PRINT) == older
        assert content(tmp_path) == before, "nothing is removed"


class TestPublish:
    def test_the_latest_by_step_are_kept(self, tmp_path: Path) -> None:
        for step in (2, 10, 9):
            written(tmp_path, step)
        (tmp_path / "checkpoint-notes").mkdir()
        assert checkpoint.latest(tmp_path) == tmp_path / "checkpoint-10"
        checkpoint.keep_latest(tmp_path, 0)
        assert len(os.listdir(tmp_path)) == 4, "0 keeps all"
        checkpoint.keep_latest(tmp_path, 2)
        assert sorted(os.listdir(tmp_path)) == ["checkpoint-10", "checkpoint-9", "checkpoint-notes"]

    def test_leftovers_are_cleared_and_the_same_step_replaced(self, tmp_path: Path) -> None:
        written(tmp_path, 4, content="old")
        for name in (".partial/checkpoint-6", ".discarded/deep"):
            (tmp_path / name).mkdir(parents=True)
            (tmp_path / name / "junk").write_text("junk")
        folder = written(tmp_path, 4, content="new")
        assert (folder / "model").read_text() == "new" * 100
        assert checkpoint.verify(folder, PRINT) == 4
        assert os.listdir(tmp_path) == ["checkpoint-4"]


class TestFullDisk:
    @pytest.mark.parametrize("size", slow_except((60000,), (300, 60000)))
    def test_the_last_good_checkpoint_stays_and_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
    ) -> None:
        """No file may grow beyond so many bytes: 300 bytes are less than the config, 60000 less than the optimiser's state."""
        changes: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "exits": EarlyExitLoss(0.5, "none")}
        with pytest.raises(Interrupted):
            trainer(tmp_path, callbacks=[interrupt_at(3)], **changes).train()
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        one, real = trainer(tmp_path, **changes), checkpoint.partial_folder

        def partial_folder(run: Path) -> Path:
            folder = real(run)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
            return folder

        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "partial_folder", partial_folder)
            try:
                with pytest.raises(OSError, match=r"checkpoint of step 4 could not be .* the last good one is checkpoint-2$"):
                    one.train(resume_from_checkpoint=True)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        assert checkpoint.verify(tmp_path / "checkpoint-2", one.fingerprint) == 2
        assert sorted(os.listdir(tmp_path)) == ["checkpoint-2", "metrics.jsonl"], "what was half written is no longer there"
        trainer(tmp_path, **changes).train(resume_from_checkpoint=True)
        assert [entry["step"] for entry in logged(tmp_path)] == [1, 2, 3, 4]


class TestResume:
    def test_a_damaged_or_foreign_checkpoint_is_refused_and_nothing_is_touched(self, tmp_path: Path) -> None:
        changes: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
        trainer(tmp_path, fingerprint={"data": "x"}, **changes).train()
        before = content(tmp_path)
        others: list[tuple[dict[str, Any], str]] = [
            ({"exits": EarlyExitLoss(0.3, "none")}, "recipe"),
            ({"seed": 4}, "seed"),
            ({"model": tiny(intermediate_size=16)}, "model.intermediate_size"),
            ({"fingerprint": {"data": "y"}}, "data"),
            ({"learning_rate": 0.02}, "training.learning_rate"),
            ({"max_steps": 6}, "training.max_steps"),
            ({"per_device_train_batch_size": 2}, "training.per_device_train_batch_size"),
        ]
        for change, name in others:
            with pytest.raises(ValueError, match=f"belongs to another run, {name} differ .*the checkpoint has"):
                trainer(tmp_path, **({"fingerprint": {"data": "x"}} | changes | change)).train(resume_from_checkpoint=True)
        (tmp_path / "checkpoint-4" / "optimizer.pt").write_bytes(b"")
        before["checkpoint-4/optimizer.pt"] = b""
        one = trainer(tmp_path, fingerprint={"data": "x"}, **changes)
        with pytest.raises(ValueError, match=r"optimizer.pt is damaged.*remove checkpoint-4"):
            one.train(resume_from_checkpoint=True)
        with pytest.raises(ValueError, match="no checkpoint of skipstone"):
            one.train(resume_from_checkpoint=str(tmp_path / "nowhere"))
        assert content(tmp_path) == before
        one.train(resume_from_checkpoint=tmp_path / "checkpoint-2")
        assert one.state.global_step == 4

    @pytest.mark.slow
    def test_the_arguments_say_when_to_log_and_save_not_the_checkpoint(self, tmp_path: Path) -> None:
        with pytest.raises(Interrupted):
            trainer(tmp_path, save_strategy="steps", save_steps=2, max_steps=8, callbacks=[interrupt_at(3)]).train()
        one = trainer(tmp_path, save_strategy="steps", save_steps=3, max_steps=8, logging_steps=2, data=rows(16))
        one.train(resume_from_checkpoint=True)
        assert [entry["step"] for entry in logged(tmp_path)] == [1, 2, 4, 6, 8]
        assert sorted(path.name for path in tmp_path.glob("check*")) == [f"checkpoint-{step}" for step in (2, 3, 6, 8)]


class TestMetrics:
    def test_the_file_is_written_anew_from_the_checkpoints_history(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "metrics.jsonl"
        state = TrainerState(global_step=2, log_history=[{"loss": 2.5, "step": 1}, {"loss": 0.1 + 0.2, "step": 2}])
        for before in (None, '{"step": 1, "loss": 9}\n{"step": 3, "loss": 1}\n{"st'):
            if before is not None:
                path.write_text(before)
            JsonLog(path).on_train_begin(arguments(tmp_path), state, TrainerControl())
            JsonLog(path).on_log(arguments(tmp_path), state, TrainerControl(), {"loss": 1.5})
            assert path.read_text() == (
                '{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 0.30000000000000004}\n{"step": 2, "loss": 1.5}\n'
            )
        monkeypatch.setattr(os, "replace", lambda *_: None)  # killed before the rename: the file is as it was
        JsonLog(path).on_train_begin(arguments(tmp_path), TrainerState(), TrainerControl())
        assert len(read_lines(path)) == 3
