"""LayerSkipTrainer used from Python: the logged loss against one by hand, accumulation, collators, precision, refusals."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import default_data_collator

from skipstone.train.data.rows import IGNORED
from skipstone.train.layerskip import objective
from skipstone.train.layerskip.schedules import EarlyExitLoss, LayerDropout, exit_scale
from skipstone.train.layerskip.trainer import LayerSkipTrainer
from tests.helpers.training import LAYERS, OFF, arguments, digest, logged, losses, rows, tiny, trainer, weights


def by_hand(model: Any, data: list[dict[str, Tensor]]) -> tuple[float, float]:
    """(the early-exit loss with every exit on, the last layer's) of some rows, from transformers' own hidden states."""
    ids, labels = (torch.stack([row[name] for row in data]) for name in ("input_ids", "labels"))
    with torch.no_grad():
        states = model.eval().model(ids, output_hidden_states=True).hidden_states[1:]
    normed = [*(model.model.norm(state) for state in states[:-1]), states[-1]]  # transformers has normed the last
    each = [F.cross_entropy(model.lm_head(s)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).item() for s in normed]
    scales = [exit_scale(layer, LAYERS, 0.5) for layer in range(LAYERS)]
    return sum(s * loss for s, loss in zip(scales, each, strict=True)) / sum(scales), each[-1]


class TestLoss:
    def test_the_logged_loss_is_the_one_by_hand(self, tmp_path: Path) -> None:
        """Over all accumulated rows at once, which differ in how much of them is learned."""
        trainer(tmp_path, max_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=2, dropout=OFF).train()
        entry = logged(tmp_path)[0]
        total, last = by_hand(tiny(), rows(16)[:4])
        assert entry["loss"] == pytest.approx(total, rel=1e-5)
        assert entry["loss_last_layer"] == pytest.approx(last, rel=1e-5)
        assert abs(total - last) > 0.01

    def test_accumulated_gradients_are_those_of_the_whole_batch(self, tmp_path: Path) -> None:
        found = []
        for name, size, accumulate in (("whole", 4, 1), ("parts", 2, 2), ("rows", 1, 4)):
            changes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulate, "dropout": OFF}
            one = trainer(tmp_path / name, optim="sgd", learning_rate=0.5, **changes)
            one.train()
            found.append((losses(tmp_path / name), losses(tmp_path / name, "grad_norm"), weights(one.model)))
        assert found[0][0][0] > found[0][0][-1] + 0.01, "it learned nothing"
        for other in found[1:]:
            assert other[0] == pytest.approx(found[0][0], rel=1e-5)
            assert other[1] == pytest.approx(found[0][1], rel=1e-4)
            for name, value in found[0][2].items():
                torch.testing.assert_close(other[2][name], value, rtol=1e-4, atol=1e-5)

    @pytest.mark.slow
    def test_several_steps_log_the_mean_of_their_parts(self, tmp_path: Path) -> None:
        for name, every in (("each", 1), ("all", 4)):
            trainer(
                tmp_path / name, logging_steps=every, exits=EarlyExitLoss(kl_weight=0.5, dilation=3, keep_last=True)
            ).train()
        for part in ("loss", "loss_last_layer"):
            assert losses(tmp_path / "all", part) == pytest.approx([sum(losses(tmp_path / "each", part)) / 4], rel=1e-6)
        apart = losses(tmp_path / "each", "divergence")
        assert len(apart) == 3, "step 2 trains no exit but the last layer"
        assert losses(tmp_path / "all", "divergence") == pytest.approx([sum(apart) / 3], rel=1e-6)


class TestDroppedRows:
    def seen(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[list[int]]]]:
        """Of every forward pass: its number, and the rows that each layer keeps."""
        found: list[tuple[int, list[list[int]]]] = []
        real = objective.kept_rows

        def kept_rows(count: int, rates: Any, seed: int, step: int) -> list[list[int]]:
            found.append((step, real(count, rates, seed, step)))
            return found[-1][1]

        monkeypatch.setattr(objective, "kept_rows", kept_rows)
        return found

    def test_every_pass_of_an_accumulated_step_drops_others(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        found = self.seen(monkeypatch)
        trainer(tmp_path, data=rows(48), gradient_accumulation_steps=3).train()
        assert [step for step, _ in found] == list(range(12))
        assert len({str(kept) for _, kept in found}) > 8
        assert all(kept[0] == [0, 1, 2, 3] for _, kept in found), "D(0) = 0"
        assert any(len(kept[-1]) < 4 for _, kept in found)

    @pytest.mark.slow
    def test_the_curriculum_ends_with_the_run(self, tmp_path: Path) -> None:
        """T is known without max_steps: two epochs of 16 rows, 4 at a time."""
        one = trainer(tmp_path, max_steps=-1, num_train_epochs=2, dropout=LayerDropout(0.5, "exponential"))
        one.train()
        assert one.objective is not None
        assert (one.objective.step, one.objective.steps) == (7, 8)


class TestUse:
    @pytest.mark.slow
    def test_rows_of_plain_lists_and_transformers_own_collator(self, tmp_path: Path) -> None:
        data = [{name: value.tolist() for name, value in row.items()} for row in rows(8)]
        one = trainer(tmp_path, data=data, eval_dataset={"a": data[:3], "b": data[3:]}, eval_strategy="steps", eval_steps=2)
        assert one.data_collator is default_data_collator
        one.train()
        found = [entry for entry in logged(tmp_path) if "eval_a_loss" in entry]
        assert [entry["step"] for entry in found] == [2, 4]
        kinds = ("perplexity", "agreement")
        assert {f"eval_{s}_{kind}_exit_{layer}" for s in "ab" for kind in kinds for layer in (1, 2, 3)} <= set(found[0])
        assert found[-1] == found[-1] | one.evaluate()
        expected = by_hand(one.model, rows(8)[:3])[1]
        assert found[-1]["eval_a_loss"] == pytest.approx(expected, rel=1e-5)
        assert found[-1]["eval_a_perplexity_exit_3"] == pytest.approx(math.exp(expected), rel=1e-5)
        assert found[-1]["eval_a_agreement_exit_3"] == 1.0

    def test_a_collator_may_pad_on_either_side(self, tmp_path: Path) -> None:
        data = [{name: value[: 12 - i % 3] for name, value in row.items()} for i, row in enumerate(rows(8))]
        for row in data:  # the padding in front would predict it
            row["labels"][0] = IGNORED

        def collated(batch: list[dict[str, Tensor]], left: bool) -> dict[str, Tensor]:
            fills = {"input_ids": 0, "labels": IGNORED, "attention_mask": 0}
            whole = [{**row, "attention_mask": torch.ones_like(row["labels"])} for row in batch]

            def padded(name: str, value: Tensor) -> Tensor:
                gap = 12 - len(value)
                return F.pad(value, (gap, 0) if left else (0, gap), value=fills[name])

            return {name: torch.stack([padded(name, row[name]) for row in whole]) for name in fills}

        found = []
        for left in (True, False):
            own = {"eval_dataset": data, "data_collator": partial(collated, left=left)}
            one = trainer(tmp_path / str(left), data=data, dropout=OFF, max_steps=2, eval_exits=(2,), **own)
            one.train()
            found.append([*losses(tmp_path / str(left)), one.evaluate()["eval_perplexity_exit_2"]])
        assert found[0] == pytest.approx(found[1], rel=1e-4)

    @pytest.mark.slow
    def test_bfloat16_computes_in_it_and_keeps_float32_weights(self, tmp_path: Path) -> None:
        for name, bf16 in (("float32", False), ("bfloat16", True)):
            one = trainer(tmp_path / name, bf16=bf16)
            one.train()
        assert {value.dtype for value in weights(one.model).values()} == {torch.float32}
        assert losses(tmp_path / "bfloat16") == pytest.approx(losses(tmp_path / "float32"), rel=0.02)
        assert losses(tmp_path / "bfloat16") != losses(tmp_path / "float32")

    @pytest.mark.slow
    def test_trained_twice(self, tmp_path: Path) -> None:
        """Without checkpoints the second run goes on from the first's weights; with them it would mix runs, and is refused."""
        one = trainer(tmp_path / "free")
        one.train()
        first = losses(tmp_path / "free")
        one.train()
        assert losses(tmp_path / "free")[-1] < first[-1]
        assert one.model.forward.__qualname__ == "LlamaForCausalLM.forward", "the forward is the model's own again"

        one = trainer(tmp_path / "kept", save_strategy="steps", save_steps=2)
        one.train()
        before, there = digest(one.model), sorted(path.name for path in (tmp_path / "kept").iterdir())
        with pytest.raises(
            ValueError, match=r"holds checkpoint-4 of an earlier run: resume from it, or choose another output_dir"
        ):
            one.train()
        one.train(resume_from_checkpoint=True)
        assert digest(one.model) == before
        assert (
            sorted(path.name for path in (tmp_path / "kept").iterdir())
            == there
            == ["checkpoint-2", "checkpoint-4", "metrics.jsonl"]
        )

    @pytest.mark.parametrize("logging_steps", [1, pytest.param(100, marks=pytest.mark.slow)])
    def test_a_loss_that_is_no_number_stops_the_run_before_it_is_saved(self, tmp_path: Path, logging_steps: int) -> None:
        one = trainer(tmp_path, save_strategy="steps", save_steps=1, logging_steps=logging_steps)
        poison, usual = one.model.lm_head.weight, one.training_step

        def step(*given: Any) -> Tensor:
            if one.state.global_step == 2:
                poison.data[0, 0] = math.nan
            return usual(*given)

        one.training_step = step  # type: ignore[method-assign]
        with pytest.raises(
            ValueError, match=r"the loss is nan at step 3: lower the learning rate.*checkpoint-2 is from before"
        ):
            one.train()
        assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]


class TestRefused:
    @pytest.mark.parametrize(
        ("changes", "part"),
        [
            (
                {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"},
                "load_best_model_at_end=True",
            ),
            ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"}, "metric_for_best_model='loss'"),
            ({"save_only_model": True}, "cannot be resumed from"),
            ({"use_liger_kernel": True}, "replaces the forward"),
            ({"logging_nan_inf_filter": True}, "a loss that is not finite stops the run"),
            ({"dropout": {"p_max": 0.1}}, "dropout must be a LayerDropout"),
            ({"muon_learning_rate": -0.1}, "muon_learning_rate must be a finite number"),
            ({"eval_exits": (1, 4)}, r"eval_exits must lie between 1 and 3, the model's layers, found \[4\]"),
            ({"exits": EarlyExitLoss(dilation=4)}, r"dilation \(R\) must be at most the 3 layers"),
        ],
    )
    def test_arguments_and_what_does_not_fit_the_model(self, tmp_path: Path, changes: dict[str, Any], part: str) -> None:
        with pytest.raises(ValueError, match=part):
            trainer(tmp_path, **changes)

    @pytest.mark.parametrize("name", ["compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics", "optimizers"])
    def test_parts_of_a_trainer_that_would_not_be_used(self, tmp_path: Path, name: str) -> None:
        model, args = tiny(), arguments(tmp_path, muon_learning_rate=0.02)
        value = (torch.optim.SGD(model.parameters(), 0.1), None) if name == "optimizers" else print
        with pytest.raises(ValueError, match="muon_learning_rate" if name == "optimizers" else f"{name} is not supported"):
            LayerSkipTrainer(model, args, train_dataset=rows(4), **{name: value})

    def test_arguments_of_transformers_and_an_evaluation_of_nothing(self, tmp_path: Path) -> None:
        from transformers import TrainingArguments

        with pytest.raises(ValueError, match="args must be LayerSkipArguments, found TrainingArguments"):
            LayerSkipTrainer(tiny(), TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="needs an eval_dataset"):
            trainer(tmp_path).evaluate()


def test_the_model_says_which_exits_were_trained(tmp_path: Path) -> None:
    """Counted as decoding counts them, so that it can warn of others."""
    model = tiny()
    trainer(tmp_path, model, exits=EarlyExitLoss(0.5, "none", exit_layers=(2,))).train()
    assert model.config.trained_exit_layers == [2]
