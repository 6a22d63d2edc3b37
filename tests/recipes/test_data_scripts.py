"""The scripts that make documents, requests and shortlists."""

import hashlib
import importlib.util
import json
import platform
import runpy
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import yaml

import skipstone
from recipes.data.edits import edits
from recipes.data.signatures import signature
from skipstone.assets import NANO
from skipstone.train.data.sources import ScriptSource


def test_programs_of_the_asked_length_stand_in_the_requests() -> None:
    short, long = "\r\n".join(["a = 1"] * 7), "\r\n".join(["def f():", *["\tx = 1"] * 8, "\treturn x"])
    found = edits([{"code": short}, {"code": long}])
    assert len(found) == 1
    (turn,) = found[0]["turns"]
    assert turn.endswith("```python\ndef f():\n" + "    x = 1\n" * 8 + "    return x\n```")


def test_a_beginning_has_the_tested_functions_arguments_the_task_and_an_example() -> None:
    code = "def helper(a):\r\n\treturn a\r\ndef add(a, *rest, start=0):\r\n\treturn helper(a) + sum(rest, start)\r\n"
    record = {"text": "Add numbers.", "code": code, "test_list": ["assert add(1, 2) == 3", "assert add(1) == 1"]}
    assert signature(record) == 'def add(a, *rest, start=0):\n    """ Add numbers.\n    >>> add(1, 2)\n    3\n    """\n'


@pytest.mark.parametrize(
    ("code", "test"),
    [
        ("def other(a): pass", "assert add(1) == 1"),
        ("def add(a): pass", "assert add(1)"),
        ("def add(a: pass", "assert add(1) == 1"),
        ("def add(a): pass", "print(1)"),
    ],
)
def test_tasks_that_show_no_example_are_left_out(code: str, test: str) -> None:
    assert signature({"text": "", "code": code, "test_list": [test]}) is None


FOLDER = Path(__file__).parents[2] / "recipes" / "smollm2"


def script(name: str) -> Any:
    """A script of the folder as a module."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_shortlist_is_the_commonest_tokens_ascending() -> None:
    shortlist, said = script("shortlist"), [[5, 9, 5], [9, 5, 2], [7]]
    assert shortlist.commonest(said, 2) == [5, 9]
    assert shortlist.commonest(said, 9) == [2, 5, 7, 9]


def test_a_shortlist_of_texts_counts_all_texts_of_the_lines_and_is_filled_up(tmp_path: Path) -> None:
    shortlist, tokenizer = script("shortlist"), skipstone.load()[1]
    records = [{"question": "Who?", "turns": ["One.", "Two."], "number": 3}, {"answer": "Who?"}]
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    found = list(shortlist.texts_of_lines(str(NANO), [tmp_path / "lines.jsonl"]))
    assert [tokenizer.decode(ids) for ids in found] == ["Who?", "One.", "Two.", "Who?"]
    assert shortlist.fill_up([1, 9], 5) == [0, 1, 2, 3, 9]
    assert shortlist.fill_up([7, 8, 9], 3) == [7, 8, 9]


def test_what_is_measured_on_was_not_trained_on() -> None:
    """Spec-Bench: eight categories of ten questions, then five of eighty."""
    sizes = [10] * 8 + [80] * 5
    kinds = [f"kind {number}" for number, size in enumerate(sizes) for _ in range(size)]
    records = [{"question_id": 81 + place, "category": kind, "turns": [str(place)]} for place, kind in enumerate(kinds)]
    (source,) = yaml.safe_load((FOLDER / "heads-instructions.yaml").read_text())["prompts"]
    seen = source["where"]["question_id"]
    left = script("questions").left_out(records, seen)
    trained = {str(number - 81) for first, last in seen for number in range(first, last + 1)}
    measured = {one["turns"][0] for one in left}
    assert len(trained) == len(measured) == len(left) == 240
    assert not trained & measured
    assert [one["category"] for one in left[:13]] == [f"kind {number}" for number in range(13)]
    assert {kind: kinds.count(kind) / 2 for kind in kinds} == {
        kind: sum(one["category"] == kind for one in left) for kind in kinds
    }


PATH = Path(__file__).parents[2] / "recipes" / "data" / "stdlib.py"
LIBRARY = Path(sysconfig.get_paths()["stdlib"])
STDLIB = runpy.run_path(str(PATH))


@pytest.fixture(scope="module")
def listed() -> dict[str, str]:
    return STDLIB["manifest"]()["sha256"]


@pytest.mark.slow
def test_what_people_wrote_is_in_and_tests_tables_and_generated_files_are_out(listed: dict[str, str]) -> None:
    assert {"os.py", "json/decoder.py", "asyncio/base_events.py", "unittest/mock.py", "argparse.py", "turtle.py"} <= set(listed)
    assert len(listed) > 400
    assert (LIBRARY / "pydoc_data" / "topics.py").is_file()
    out = ("pydoc_data/topics.py", "encodings/cp1252.py", "encodings/aliases.py", "html/entities.py", "token.py", "locale.py")
    assert not set(out) & set(listed)
    folders = {folder for name in listed for folder in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "site-packages", "idlelib", "idle_test", "__pycache__"}


@pytest.mark.slow
def test_the_manifest_lists_the_documents_with_hashes_and_a_share_is_a_part_of_them(
    tmp_path: Path, listed: dict[str, str]
) -> None:
    subprocess.run([sys.executable, str(PATH), str(tmp_path / "manifest.json")], check=True)
    assert json.loads((tmp_path / "manifest.json").read_text(encoding="utf-8"))["sha256"] == listed
    manifest = STDLIB["manifest"](exclude=["[!j]*"])
    names = [name for name in sorted(listed) if name.startswith("j")]
    assert manifest["python"] == f"CPython {platform.python_version()}"
    assert list(manifest["sha256"]) == names
    assert (manifest["count"], manifest["bytes"]) == (len(names), sum((LIBRARY / name).stat().st_size for name in names))
    assert all(hashlib.sha256((LIBRARY / name).read_bytes()).hexdigest() == listed[name] for name in names)
    source = ScriptSource(path=str(PATH), arguments={"exclude": ["[!j]*"]})
    assert [one.text for one in source.read(Path())] == [(LIBRARY / name).read_text(encoding="utf-8") for name in names]
    part = STDLIB["manifest"](share=0.3)["sha256"]
    assert part.items() < listed.items()
    assert 0.2 < len(part) / len(listed) < 0.4
    with pytest.raises(ValueError, match=r"expected 0 < share <= 1, found 0"):
        list(STDLIB["documents"](share=0))


def test_a_python_without_sources_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(FileNotFoundError, match="holds no sources of the standard library"):
        list(STDLIB["documents"]())
