"""What a recipe may say: every unknown key and impossible value is an error that names it, before any work is done."""

from pathlib import Path
from typing import Any

import pytest

from skipstone.methods import resolve
from skipstone.train.heads import recipe as heads_recipe
from skipstone.train.layerskip import run as running
from skipstone.train.layerskip.arguments import arguments, read
from skipstone.train.layerskip.run import run
from skipstone.train.layerskip.schedules import PRESETS, EarlyExitLoss, LayerDropout
from tests.helpers.training import quiet, recipe

SHAPE = {"model_type": "llama", "num_hidden_layers": 3, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
SOURCE = {"name": "code", "kind": "jsonl", "path": "code.jsonl", "template": "{text}"}


@pytest.fixture(autouse=True)
def untrained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here may come so far."""

    def fail(*_: Any) -> None:
        raise AssertionError("it was trained")

    monkeypatch.setattr(running, "_train", fail)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"colour": 1}, "recipe.yaml: unknown setting 'colour': expected one of output, model, data"),
        ({"model__colour": 1}, "model: unknown setting 'colour': expected one of pretrained, recipe, config, layers, lora"),
        ({"data__sources": [{**SOURCE, "colour": 1}]}, r"data\.sources\.0\.jsonl: unknown setting 'colour': expected one"),
        ({"exits": {"colour": 1}}, "unknown exits setting 'colour': expected e_scale"),
        ({"training__dropout": {}}, r"training\.dropout is a part of its own"),
        ({"model__config": {**SHAPE, "num_hidden_layer": 3}}, "'num_hidden_layer' for llama .did you mean 'num_hidden_layers'"),
        ({"decoding": {"method": "layerskip", "exit_layers": 2}}, "layerskip has no setting 'exit_layers'"),
        ({"preset": "magic"}, "unknown preset 'magic': expected one of continual, continual-13b,"),
        ({"training__save_strategy": "no"}, "a run without checkpoints could not be resumed"),
        ({"training__muon_learning_rate": 0.1, "training__optim": "sgd"}, "optim=.*muon_learning_rate makes the optimiser"),
        ({"exits": {"curriculum": "none", "dilation": 2}}, r"exits\.dilation has no effect with curriculum none"),
        ({"training__num_train_epochs": 2}, r"training\.num_train_epochs has no effect"),
        ({"exits": {"dilation": 0}}, r"exits\.dilation: .* greater than or equal to 1 \(found 0\)"),
        ({"exits": {"dilation": 4}}, r"dilation \(R\) must be at most the 3 layers"),
        ({"dropout": {"p_max": True}}, r"dropout\.p_max: expected .*float.*, found True"),
        ({"model__config": {**SHAPE, "num_hidden_layers": 1}, "exits": {"dilation": 1}}, "at least 2 layers, found 1"),
        ({"training__max_steps": ...}, r"training\.max_steps must be given"),
        ({"training__eval_exits": [2, 9]}, r"eval_exits must lie between 1 and 3.*found \[9\]"),
        ({"decoding": {"method": "layerskip", "exit_layer": 3}}, "exit_layer must lie between 1 and 2"),
        ({"data__length": 2000}, "not one row of 2000"),
        ({"data__length": 5000}, "at most the model's 2048 positions, found 5000"),
        ({"data__length": ...}, "data.length is missing"),
        ({"model": {"pretrained": "x"}}, "tokenizer.vocab_size goes with model.config"),
        ({"model__pretrained": "x"}, "model: expected either `pretrained`"),
        ({"tokenizer__pretrained": "x"}, "expected either `pretrained` .* or `vocab_size`"),
        ({"model__config": {**SHAPE, "model_type": "lama"}}, "a model_type that transformers knows.*found 'lama'"),
        ({"model__config": {**SHAPE, "hidden_size": 15}}, "not a multiple of the number of attention heads"),
        ({"model__config": {**SHAPE, "vocab_size": 100}}, "the tokenizer gives ids up to 269, the model's vocab_size is 100"),
        ({"model__config": {**SHAPE, "dtype": "bfloat16"}}, "weights are trained in float32"),
        ({"model__lora": {"rank": 4}}, r"model\.lora: .*rank.*expected fields of PEFT's LoraConfig"),
    ],
)
def test_unknown_keys_impossible_values_and_what_would_be_ignored(tmp_path: Path, change: dict[str, Any], part: str) -> None:
    with pytest.raises(ValueError, match=part):
        run(recipe(tmp_path, **change), say=quiet)
    assert not (tmp_path / "out" / "model").exists()
    assert not list((tmp_path / "out").glob("checkpoint*"))


class TestFile:
    @pytest.mark.parametrize(
        ("text", "part"),
        [
            ("output: [", "is not valid YAML"),
            ("output: x\nseed: 1\nseed: 2", "'seed' is given twice"),
            ("output: !!python/object/apply:os.getcwd []", "is not valid YAML"),
        ],
    )
    def test_that_is_none(self, tmp_path: Path, text: str, part: str) -> None:
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(ValueError, match=f"bad.yaml.*{part}"):
            read(tmp_path / "bad.yaml")
        (tmp_path / "bad.yaml").write_bytes(b"output: \xff")
        with pytest.raises(ValueError, match=r"bad.yaml is not valid YAML"):
            read(tmp_path / "bad.yaml")

    @pytest.mark.parametrize("name", PRESETS)
    def test_presets_are_the_papers_settings_until_something_else_is_said(self, tmp_path: Path, name: str) -> None:
        preset = PRESETS[name]
        args = arguments(read(recipe(tmp_path, preset=name, training=..., exits=...)), tmp_path)
        assert (args.dropout, args.exits) == (preset.dropout, preset.exits)
        assert (args.learning_rate, args.max_steps) == (preset.learning_rate, preset.steps)
        assert args.per_device_train_batch_size == preset.batch_size
        changed = {"training": {"max_steps": 7}, "exits": {"keep_last": True}, "dropout": {"p_max": 0.05}}
        made = read(recipe(tmp_path, preset=name, **changed, data__length=...))
        args = arguments(made, tmp_path)
        assert (args.max_steps, args.exits.keep_last, args.dropout.p_max) == (7, True, 0.05)
        assert made.data.length == preset.context
        assert (args.learning_rate, args.exits.e_scale) == (preset.learning_rate, preset.exits.e_scale)
        undropped = {"training": ..., "exits": ..., "dropout": {"p_max": 0}}
        args = arguments(read(recipe(tmp_path, preset=name, **undropped)), tmp_path)
        assert args.learning_rate == (preset.undropped_rate or preset.learning_rate)
        args = arguments(read(recipe(tmp_path, preset=name, **undropped | {"training": {"learning_rate": 2e-3}})), tmp_path)
        assert args.learning_rate == 2e-3

    def test_without_a_preset_and_numbers_that_yaml_takes_for_texts(self, tmp_path: Path) -> None:
        path = recipe(tmp_path, exits=..., training__eval_exits=[1, 2])
        path.write_text(path.read_text().replace("training:", "training:\n  learning_rate: 3e-4\n  muon_learning_rate: 2e-2"))
        args = arguments(read(path), tmp_path / "x")
        assert (args.dropout, args.exits) == (LayerDropout(), EarlyExitLoss())
        assert (args.learning_rate, args.muon_learning_rate, args.eval_exits) == (3e-4, 2e-2, (1, 2))
        assert (args.save_total_limit, args.disable_tqdm, args.output_dir) == (2, False, str(tmp_path / "x"))


RECIPES = sorted((Path(__file__).parents[3] / "recipes" / "train").glob("*.yaml"))
WITHOUT_EXITS = ("nano-plain", "nano-draft", "small-none", "small-ld", "small-ld-constant")
HEADS = [path for path in RECIPES if "-heads-" in path.name]


@pytest.mark.parametrize("path", HEADS, ids=lambda path: path.name)
def test_the_recipes_of_exit_heads_are_in_order(path: Path, tmp_path: Path) -> None:
    made = heads_recipe.read(path, data_dir=tmp_path if "kind: hub" in path.read_text(encoding="utf-8") else None)
    assert made.answers.batch_size >= 16
    assert f"skipstone train heads --recipe recipes/train/{path.name}" in path.read_text(encoding="utf-8")
    assert made.output == f"runs/{path.stem}"


@pytest.mark.parametrize("path", [path for path in RECIPES if path not in HEADS], ids=lambda path: path.name)
def test_the_recipes_of_the_repository_are_in_order(path: Path) -> None:
    made = read(path)
    args = arguments(made, Path("x"))
    assert args.max_steps >= 1000
    assert resolve(made.decoding).name == ("autoregressive" if path.stem in WITHOUT_EXITS else "layerskip")
    named = f"skipstone train layerskip recipes/train/{path.name}"
    assert named in path.read_text(encoding="utf-8")
    assert f"recipes/train/{path.name}" in (path.parents[2] / "docs" / "training.md").read_text(encoding="utf-8")


def test_a_recipe_extends_another_part_by_part(tmp_path: Path) -> None:
    base = recipe(tmp_path, exits={"e_scale": 0.5, "dilation": 2}, training__learning_rate=1e-3)
    own = tmp_path / "own.yaml"
    own.write_text(f"extends: {base.name}\noutput: elsewhere\nexits: {{dilation: 1}}\ntraining: {{max_steps: 7}}\n")
    made, old = read(own), read(base)
    assert made.exits == {"e_scale": 0.5, "dilation": 1}
    assert made.training == {**old.training, "max_steps": 7}
    assert (made.output, made.data, made.model) == ("elsewhere", old.data, old.model)
    own.write_text("extends: own.yaml\n")
    with pytest.raises(ValueError, match="extends itself"):
        read(own)
    own.write_text("extends: ../other/base.yaml\n")
    with pytest.raises(ValueError, match=r"extends \.\./other/base\.yaml: expected a recipe of the same folder"):
        read(own)
    own.write_text("extends: nothing.yaml\n")
    with pytest.raises(FileNotFoundError, match=r"nothing\.yaml"):
        read(own)


def test_a_recipe_that_goes_on_from_itself_and_a_data_folder_that_no_source_reads(tmp_path: Path) -> None:
    one, other = (recipe(tmp_path / name, model={"recipe": "../two/recipe.yaml"}, tokenizer=...) for name in ("one", "two"))
    other.write_text(other.read_text().replace("../two/", "../one/"))
    with pytest.raises(ValueError, match=r"two/recipe\.yaml goes on from \.\./one/recipe\.yaml again"):
        read(one)
    with pytest.raises(ValueError, match=r"--data-dir .* has no effect"):
        read(recipe(tmp_path), tmp_path)


def test_the_older_key_of_exits_keeps_its_meaning_also_under_another_recipe(tmp_path: Path) -> None:
    """It counts layers from 0, `exit_layers` and decoding count from 1."""
    base = recipe(tmp_path, exits={"exits": [0, 1], "curriculum": "none"})
    with pytest.warns(FutureWarning, match=r"exit_layers: \[1, 2\]"):
        older = arguments(read(base), tmp_path).exits
    assert older.exit_layers == (1, 2)
    (tmp_path / "next.yaml").write_text(f"extends: {base.name}\nexits: {{exit_layers: [2]}}\n")
    with pytest.warns(FutureWarning):
        assert arguments(read(tmp_path / "next.yaml"), tmp_path).exits.exit_layers == (2,)
    (tmp_path / "last.yaml").write_text("extends: next.yaml\nexits: {exits: null}\n")
    with pytest.warns(FutureWarning):
        assert arguments(read(tmp_path / "last.yaml"), tmp_path).exits.exit_layers is None
