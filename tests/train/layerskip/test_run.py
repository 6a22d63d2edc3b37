"""One run from one file, from the recipe to a model that decodes: finished, interrupted, continued, adapted."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import skipstone
from skipstone.hf.generate_call import resolve_for
from skipstone.methods import LayerSkip
from skipstone.train.layerskip.metrics import curves, draw
from skipstone.train.layerskip.run import run
from skipstone.train.layerskip.trainer import LayerSkipTrainer
from skipstone.utils.files import read_lines
from tests.helpers.parcels import everything as content
from tests.helpers.training import DECODING, EVALUATED, Interrupted, finished_run, losses, quiet, recipe, stop_at


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe of a finished run; the run is in `out` beside it. Tests that change it change a copy."""
    return finished_run(tmp_path_factory.mktemp("finished"))


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished.parent, tmp_path / "copy")
    text = (tmp_path / "copy" / "recipe.yaml").read_text()
    (tmp_path / "copy" / "recipe.yaml").write_text(text.replace(str(finished.parent), str(tmp_path / "copy")))
    return tmp_path / "copy" / "recipe.yaml"


class TestFinished:
    def test_the_model_loads_and_decodes_with_its_own_defaults(self, finished: Path) -> None:
        model, tokenizer = skipstone.load(finished.parent / "out" / "model")
        assert resolve_for(model, None) == LayerSkip(exit_layer=2, num_speculative_tokens=3)
        assert model.config.use_cache, "transformers' Trainer turns it off"
        files = {path.name for path in (finished.parent / "out" / "model").iterdir()}
        assert {"model.safetensors", "tokenizer.json", "generation_config.json", "data.json"} <= files
        assert "training_args.bin" not in files
        output = skipstone.generate(model, "def f3(x)", tokenizer=tokenizer, max_new_tokens=12, do_sample=False)
        plain = skipstone.generate(
            model, "def f3(x)", "autoregressive", tokenizer=tokenizer, max_new_tokens=12, do_sample=False
        )
        assert output.new_tokens == plain.new_tokens
        assert output.stats.drafted > 0

    def test_every_evaluation_reports_every_exit_of_every_source(self, finished: Path) -> None:
        found = [entry for entry in read_lines(finished.parent / "out" / "metrics.jsonl") if "eval_code_loss" in entry]
        assert [entry["step"] for entry in found] == [2, 4], "once a step: the last one is not measured twice"
        for entry in found:
            for source in ("code", "sums"):
                assert entry[f"eval_{source}_perplexity"] == entry[f"eval_{source}_perplexity_exit_3"] > 1
                assert all(0 <= entry[f"eval_{source}_agreement_exit_{layer}"] <= 1 for layer in (1, 2))
                assert entry[f"eval_{source}_agreement_exit_3"] == 1

    def test_the_curves_are_those_of_the_log(self, finished: Path, tmp_path: Path) -> None:
        assert (finished.parent / "out" / "curves.png").read_bytes().startswith(b"\x89PNG")
        history = read_lines(finished.parent / "out" / "metrics.jsonl")
        named = [{line.get_label(): line.get_xydata().tolist() for line in axis.lines} for axis in curves(history).axes]
        assert named[0]["loss"] == [[entry["step"], entry["loss"]] for entry in history if "loss" in entry]
        measured = [entry for entry in history if "eval_sums_loss" in entry]
        assert named[2]["sums E=2"] == [[entry["step"], entry["eval_sums_agreement_exit_2"]] for entry in measured]
        draw([], tmp_path / "empty.png")  # before anything was logged
        assert (tmp_path / "empty.png").exists()

    def test_without_matplotlib_a_warning_says_what_is_missing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.warns(UserWarning, match=r"curves.png is not drawn without matplotlib: pip install \"skipstone\[train\]"):
            draw([], tmp_path / "curves.png")
        assert not (tmp_path / "curves.png").exists()

    def test_again_neither_trains_nor_changes_anything(self, copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        before, said = content(copied.parent), []
        with monkeypatch.context() as patch:
            patch.setattr(LayerSkipTrainer, "train", None)
            patch.setattr(LayerSkipTrainer, "evaluate", None)
            assert run(copied, say=said.append) == copied.parent / "out" / "model"
        assert content(copied.parent) == before
        assert "is finished: nothing is left to train" in said[-1]
        shutil.rmtree(copied.parent / "out" / "model")  # killed after the last step, before the model was written
        stop_at(monkeypatch, 4)
        run(copied, say=quiet)
        written = content(copied.parent / "out" / "model")
        assert {f"out/model/{name}": value for name, value in written.items()}.items() <= before.items()
        with pytest.raises(ValueError, match="is not empty: remove it, or let the run resume"):
            run(copied, fresh=True, say=quiet)

    def test_a_finished_model_takes_new_decoding_defaults_and_nothing_else(self, copied: Path) -> None:
        """The best ones are known only once it is trained."""
        before = content(copied.parent / "out")
        made = yaml.safe_load(copied.read_text())
        copied.write_text(yaml.safe_dump({**made, "decoding": {**DECODING, "exit_layer": 1}}))
        model, _ = skipstone.load(run(copied, say=quiet))
        assert model.generation_config.skipstone == {**DECODING, "exit_layer": 1}
        after = content(copied.parent / "out")
        assert {name for name in after if after[name] != before.get(name)} == {"model/generation_config.json"}
        assert after.keys() == before.keys()
        copied.write_text(yaml.safe_dump({key: value for key, value in made.items() if key != "decoding"}))
        assert not hasattr(skipstone.load(run(copied, say=quiet))[0].generation_config, "skipstone"), "taken back"

    def test_a_finished_model_is_saved_again_in_another_dtype(self, copied: Path) -> None:
        made, before = yaml.safe_load(copied.read_text()), content(copied.parent / "out")
        copied.write_text(yaml.safe_dump({**made, "dtype": "bfloat16"}))
        assert skipstone.load(run(copied, say=quiet))[0].dtype == torch.bfloat16
        copied.write_text(yaml.safe_dump(made))
        assert skipstone.load(run(copied, say=quiet))[0].dtype == torch.float32
        assert content(copied.parent / "out") == before, "from the checkpoint, not from the rounded weights"

    @pytest.mark.parametrize(
        ("change", "part"),
        [
            ({"training__learning_rate": 0.5}, "training.learning_rate differ"),
            ({"seed": 1}, r"was made from something else \(seed differ\)"),
            ({"tokenizer__vocab_size": 280}, r"was made from something else \(vocab_size differ\)"),
        ],
    )
    def test_a_changed_recipe_is_another_run(self, copied: Path, change: dict[str, Any], part: str) -> None:
        before = content(copied.parent / "out")
        path = recipe(copied.parent, **EVALUATED, **change)
        with pytest.raises(ValueError, match=part):
            run(path, say=quiet)
        after = content(copied.parent / "out")
        assert before.items() <= after.items(), "nothing is lost"
        assert {name.split("/")[0] for name in after.keys() - before.keys()} <= {"data"}


class TestInterrupted:
    def test_a_run_resumes_to_the_same_end(self, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = recipe(tmp_path, **EVALUATED)
        with monkeypatch.context() as patch:
            stop_at(patch, 3)
            with pytest.raises(Interrupted):
                run(path, say=quiet)
        with (tmp_path / "out" / "metrics.jsonl").open("a") as file:
            file.write('{"step": 3, "lo')
        run(path, say=quiet)
        one, other = (folder / "out" for folder in (finished.parent, tmp_path))
        assert (one / "model" / "model.safetensors").read_bytes() == (other / "model" / "model.safetensors").read_bytes()
        assert losses(one) == losses(other)


def test_a_tokenizer_stays_the_same_wherever_the_documents_lie(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished.parent, tmp_path / "moved")
    made = yaml.safe_load(finished.read_text())
    for source in made["data"]["sources"]:
        source["path"] = str(tmp_path / "moved" / source["path"])
    made["output"] = str(tmp_path / "moved" / "out")
    (tmp_path / "elsewhere.yaml").write_text(yaml.safe_dump(made))
    said: list[str] = []
    run(tmp_path / "elsewhere.yaml", say=said.append)
    assert said[-1].endswith("is finished: nothing is left to train")
    (tmp_path / "moved" / "sums.jsonl").write_text('{"text": "other"}\n' * 9 + '{"text": "another text"}\n')
    with pytest.raises(ValueError, match=r"was made from something else \(documents differ\)"):
        run(tmp_path / "elsewhere.yaml", say=quiet)


def test_a_single_document_trains_without_evaluation(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("It was a dark night. " * 60)
    said: list[str] = []
    source = {"data__sources": [{"kind": "text", "path": "book.txt"}]}
    run(recipe(tmp_path, **source), say=said.append)
    assert said[-1].startswith("nothing was held out, so nothing is evaluated")
    assert json.loads((tmp_path / "out" / "model" / "data.json").read_text())["held_rows"] == {}
    with pytest.raises(ValueError, match=r"eval_strategy asks for evaluations, but nothing is held out"):
        run(
            recipe(
                tmp_path / "other",
                training__eval_strategy="steps",
                data__sources=[{"kind": "text", "path": str(tmp_path / "book.txt")}],
            ),
            say=quiet,
        )
