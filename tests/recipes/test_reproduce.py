"""Every plan of docs/lab/reproduce runs: tiny random models lie where the plans look for the papers' models."""

from pathlib import Path
from typing import Any

import pytest
import torch

from skipstone.engines.loading import load_model
from skipstone.lab.bench import plan as plans
from skipstone.lab.bench import records, run_file
from skipstone.lab.bench import run as running
from skipstone.methods.drafting.layer_sets import save_profile
from skipstone.train.layerskip.arguments import arguments, read
from skipstone.train.layerskip.schedules import PRESETS
from skipstone.utils.yaml_files import mapping
from tests.helpers import families, support
from tests.helpers.commandline import run, succeed
from tests.helpers.pairwise import slow_except

FOLDER = Path(__file__).parents[2] / "docs" / "lab" / "reproduce"
PLANS, RECIPES = sorted(FOLDER.glob("*.yaml")), sorted((FOLDER / "recipes").glob("*.yaml"))
FAST = [FOLDER / f"{name}.yaml" for name in ("layerskip-table5", "swift-table10")]
RECORDS = Path(__file__).parents[1] / "helpers" / "records"
LAYERS = 32  # of AdaDecode's target; no plan needs more
CHAT_TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<a>"
TOKENS = 4
CODE = "--allow-code-execution"


def named_models(path: Path) -> tuple[set[str], set[str]]:
    """The models that a plan measures, and its draft models."""
    values = mapping(path)
    return set(values["models"]), {spec["draft_model"] for spec in values["methods"] if "draft_model" in spec}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny models, exit heads and layer sets at the paths that the plans name."""
    place = tmp_path_factory.mktemp("reproduce")
    tokenizer = support.tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    for name, layers in (("target", LAYERS), ("draft", 2)):
        model: Any = families.build("llama", layers=layers)
        model.to(torch.bfloat16).save_pretrained(place / name)
        tokenizer.save_pretrained(place / name)
    targets, drafts = (set[str]().union(*names) for names in zip(*map(named_models, PLANS), strict=True))
    for name in targets | drafts:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).symlink_to(place / ("target" if name in targets else "draft"))
    for iterations in (5, 1000):
        path = place / "runs" / "reproduce" / f"llama-2-13b-{iterations}.json"
        save_profile(path, load_model(place / "target", dtype=torch.float16), {}, (3, 5), (4,))
    return place


@pytest.fixture(scope="module")
def trained(folder: Path) -> Path:
    """The same folder with exit heads that the recipes have trained."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for recipe in RECIPES:
            if recipe.stem.startswith("heads-"):
                succeed("train", "heads", "--recipe", recipe, "--device", "cpu", "--data-dir", RECORDS)
    return folder


def dry_run(path: Path, out: Path) -> Any:
    """Run a plan on one prompt and a few tokens, in its own dtype and on the engine that a GPU has."""
    dry = ("--num-prompts", 1, "--max-new-tokens", TOKENS, "--device", "cpu", "--engine", "eager", "--data-dir", RECORDS)
    return run("bench", "run", "--plan", path, "--out", out, *dry, *(flag for flag in [CODE] if flag in path.read_text()))


@pytest.mark.parametrize("path", slow_except(FAST, PLANS), ids=lambda path: path.stem)
def test_a_plan_measures_all_its_methods(
    path: Path, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(request.getfixturevalue("trained" if path.stem.startswith("adadecode") else "folder"))
    monkeypatch.setattr(running, "measure_prices", lambda *_: {})  # they take most of the time and do not depend on a plan
    out = tmp_path / "results.jsonl"
    result = dry_run(path, out)
    assert result.exit_code == 0, result.stderr
    lines, plan = run_file.read(out), plans.read(path, {})
    assert [line["refused"] for line in lines if line["kind"] == "model"] == [{}] * len(plan.models)
    labels = {plans.label(spec) for spec in plan.methods}
    assert all(row["tokens"] > 0 for line in lines if line["kind"] == "prompt" for row in line["rows"].values())
    succeed("bench", "record", out, "--out", tmp_path / "records.jsonl")
    stored = records.read(tmp_path / "records.jsonl")
    rows = {(one["model"], one["task"], one["temperature"], one["label"]) for one in stored}
    tasks = {(task.name, settings.temperature) for task, settings in plans.resolved(plan)}
    assert rows == {(model, *task, name) for model in plan.models for task in tasks for name in labels}
    assert len(stored) == len(rows)
    before = out.read_bytes()
    assert dry_run(path, out).exit_code == 0
    assert out.read_bytes().startswith(before)
    assert [line["kind"] for line in run_file.read(out)[len(lines) :]] == ["resumed"], "nothing is left to measure"


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("layerskip-table3-13b", "exit_layer: 15", "exit_layer: 40", "between 1 and 31"),
        ("swift-table10", "llama-2-13b-5.json", "another.json", "another.json"),
        ("adadecode-table2-xsum", "heads-xsum", "heads-missing", "heads-missing"),
        ("adasd-llama-1b", "Llama-3.2-1B-Instruct", "missing", "meta-llama/missing"),
    ],
)
def test_a_method_that_does_not_fit_the_model_is_refused(
    name: str, old: str, new: str, said: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    text = (FOLDER / f"{name}.yaml").read_text()
    (tmp_path / "plan.yaml").write_text(text.replace(old, new))
    result = dry_run(tmp_path / "plan.yaml", tmp_path / "results.jsonl")
    assert result.exit_code != 0
    assert said in result.stderr


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_a_plan_says_its_commands(path: Path) -> None:
    text = path.read_text()
    assert f"skipstone bench run --plan docs/lab/reproduce/{path.name} --out runs/reproduce/{path.stem}.jsonl" in text
    for recipe in RECIPES:
        output = mapping(recipe)["output"]
        assert (f"{output}/" in text) == (f"docs/lab/reproduce/recipes/{recipe.name}" in text), recipe.name


def test_the_page_has_every_plan() -> None:
    page = (FOLDER / "README.md").read_text()
    assert [path.name for path in PLANS if f"]({path.name})" not in page] == []


def test_topv2_is_trained_by_the_papers_settings(tmp_path: Path) -> None:
    recipe = read(FOLDER / "recipes" / "topv2.yaml")
    found, preset = arguments(recipe, tmp_path), PRESETS["task"]
    assert (found.max_steps, found.learning_rate, recipe.data.length) == (preset.steps, preset.learning_rate, preset.context)
