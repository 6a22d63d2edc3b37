"""Every plan of recipes/measure can be read, names methods and settings that exist, and labels that differ."""

from pathlib import Path

import pytest

from skipstone import methods
from skipstone.decoding.method import PRESET
from skipstone.decoding.settings import settings_of
from skipstone.lab.bench import plan as plans
from skipstone.utils.yaml_files import mapping

FOLDER = Path(__file__).parents[2] / "recipes" / "measure"
PLANS = sorted(FOLDER.rglob("*.yaml"))
assert PLANS, "there are plans"


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_a_plan_names_what_exists(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for task in mapping(path)["tasks"]:
        name = task if isinstance(task, str) else task["task"]
        if name.endswith(".jsonl"):  # prompts that another command makes
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text('{"prompt": "a"}\n')
    plan = plans.read(path, {})
    labels = [plans.label(spec) for spec in plan.methods]
    assert len(labels) == len(set(labels)) > (0 if plan.perplexity else 1), "a plan compares methods, or exits"
    for spec in plan.methods:
        kind = plans.KINDS[spec["method"]]
        given = {name: value for name, value in spec.items() if name not in plans.NAMING}
        for one in plans.choices(given, kind):
            if spec["method"] in plans.PEERS:
                kind(**one)
            else:
                assert one.keys() <= {*settings_of(kind), PRESET}
                methods.resolve({"method": spec["method"], **without_files(one)})


def without_files(settings: plans.MethodSpec) -> plans.MethodSpec:
    """Settings but for those that are a file of a run that this machine may not have."""
    return {name: value for name, value in settings.items() if not str(value).startswith("runs/")}
