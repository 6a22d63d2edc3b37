"""`skipstone train layerskip`: one line for every mistake, a bar on stderr, the model's folder on stdout."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from skipstone.train.layerskip import metrics
from tests.helpers.commandline import assert_refused, run, succeed
from tests.helpers.training import recipe


def train(*arguments: Any) -> Any:
    return run("train", "layerskip", *arguments)


@pytest.mark.slow
def test_a_run_says_what_it_does_on_stderr_and_where_the_model_is_on_stdout(tmp_path: Path) -> None:
    evaluated = {"training__eval_strategy": "steps", "training__eval_steps": 2}
    path = recipe(tmp_path, decoding={"method": "layerskip", "exit_layer": 1}, **evaluated)
    first = succeed("train", "layerskip", path)
    assert first.stdout == f"{tmp_path / 'out' / 'model'}\n"
    assert re.search(r"4/4 \[\d\d:\d\d<\d\d:\d\d, .*loss=\d", first.stderr)
    assert re.search(r"step 2: sums: perplexity [\d.]+, agreement E=1 0.\d\d E=2 0.\d\d E=3 1.00", first.stderr)
    assert "{" not in first.stderr, "no raw entries of the log"
    assert len(json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[0])) > 5
    generated = succeed("generate", tmp_path / "out" / "model", "--prompt", "def f3(x)", "--max-new-tokens", 5, "--stats")
    assert "layerskip" in generated.stderr

    again = succeed("train", "layerskip", path)
    assert again.stdout == first.stdout
    assert "is finished: nothing is left to train" in again.stderr
    other = succeed("train", "layerskip", path, "--output", tmp_path / "other", "--fresh")
    assert other.stdout == f"{tmp_path / 'other' / 'model'}\n"
    model = "model/model.safetensors"
    assert (tmp_path / "other" / model).read_bytes() == (tmp_path / "out" / model).read_bytes()
    succeed("train", "layerskip", path, "--output", tmp_path / "seed", "--seed", 5)
    whole = recipe(tmp_path, decoding={"method": "layerskip", "exit_layer": 1}, seed=5, **evaluated)
    succeed("train", "layerskip", whole, "--output", tmp_path / "same", "--fresh")
    assert (tmp_path / "seed" / model).read_bytes() == (tmp_path / "same" / model).read_bytes()
    assert (tmp_path / "seed" / model).read_bytes() != (tmp_path / "out" / model).read_bytes()


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"colour": 1}, "recipe.yaml: unknown setting 'colour': expected one of output"),
        ({"training__fsdp": True}, "training.fsdp belongs to the launch"),
        ({"data__sources": [{"kind": "text", "path": "nowhere"}]}, "nowhere does not exist"),
        ({"model": {"pretrained": "./nowhere"}, "tokenizer": ...}, "no such folder"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, change: dict[str, Any], part: str) -> None:
    assert_refused(train(recipe(tmp_path, **change)), part)


def test_a_recipe_or_a_package_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_refused(train(tmp_path), "no such recipe")
    assert_refused(train(), "Missing argument 'recipe'")
    assert_refused(train(recipe(tmp_path), "--data-dir", tmp_path / "nowhere"), "nowhere: no such folder")
    monkeypatch.setitem(sys.modules, "peft", None)
    assert_refused(train(recipe(tmp_path, model__lora={"r": 2})), 'model.lora needs peft: pip install "skipstone[train]"')


def test_an_error_in_the_middle_has_a_line_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> bool:
        raise OSError(28, "No space left on device", "curves.png")

    monkeypatch.setattr(metrics, "draw", full)
    result = train(recipe(tmp_path, training__eval_strategy="steps", training__eval_steps=2))
    assert result.exit_code == 2
    assert result.stderr.endswith("\nskipstone: curves.png: No space left on device\n")
    assert "Traceback" not in result.stderr


def test_a_dry_run_says_what_a_run_would_take_and_starts_nothing(tmp_path: Path) -> None:
    path = recipe(tmp_path)
    said = succeed("train", "layerskip", path, "--dry-run", "--shape", "8B", "--gpus", 8).stdout
    assert said.startswith("8,030,261,248 parameters, 6,979,584,000 of them in 32 layers; 8 GPUs, ")
    result = json.loads(succeed("train", "layerskip", path, "--dry-run", "--json").stdout)
    assert (result["gpus"], result["shape"]["layers"]) == (1, 3)
    assert not (tmp_path / "out").exists()
    faster = succeed("train", "layerskip", path, "--dry-run", "--json", "--mfu", 0.2, "--peak-tflops", 989 * 2).stdout
    assert json.loads(faster)["seconds_a_step"] == pytest.approx(result["seconds_a_step"])
    assert_refused(train(path, "--gpus", 2), "are about --dry-run: give it, too")
    assert_refused(train(path, "--dry-run", "--shape", "3B"), "one of 1B, 8B, 70B, found '3B'")
    assert_refused(train(path, "--dry-run", "--gpus", 0), "expected 1 GPU or more")
    deep = recipe(tmp_path / "two", exits={"exit_layers": [1, 8]})
    assert_refused(train(deep, "--dry-run"), "exit_layers must lie between 1 and 3")
