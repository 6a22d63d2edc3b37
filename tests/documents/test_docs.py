"""The documents say what is so: their Python runs, their links resolve, their quotations of the code are in the code."""

import importlib
from pathlib import Path

import pytest

import skipstone
from tests.helpers.snippets import ROOT, anchors, blocks, links, pages, run_python, symbols, table_rows, tiny_checkpoint

DOCS = ROOT / "docs"
PACKAGE = ROOT / "src" / "skipstone"
ADD_A_METHOD = DOCS / "add-a-method.md"

# how fast a tiny model runs is no matter here, and the tutorial's method has no default of its own
pytestmark = pytest.mark.filterwarnings("ignore:.* x the speed of plain decoding:RuntimeWarning")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def _marked(mark: str) -> str:
    (code,) = (block.code for block in blocks(ADD_A_METHOD, "python") if block.mark == mark)
    return code


@pytest.fixture
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that docs/add-a-method.md shows, imported, and its registry line in force."""
    (tmp_path / "bigram.py").write_text(_marked("<!-- file -->"))
    monkeypatch.syspath_prepend(tmp_path)
    tutorial = importlib.import_module("bigram")
    entry = eval("{" + _marked("<!-- registry -->") + "}", vars(tutorial))
    assert set(entry) == {tutorial.BigramLookup.name}, "the registry key is the method's name"
    monkeypatch.setitem(skipstone.METHODS, *entry.popitem())


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_links_of_a_page_resolve(page):
    for target in links(page):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(other), f"{page.name} links to {target}, found {sorted(anchors(other))}"


def test_every_page_is_reachable_from_the_readme():
    seen, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in seen:
            continue
        seen.add(page)
        local = [target.partition("#")[0] for target in links(page) if "://" not in target]
        waiting += [(page.parent / path).resolve() for path in local if path.endswith(".md")]
    assert set(DOCS.rglob("*.md")) <= seen, sorted(page.name for page in set(DOCS.rglob("*.md")) - seen)


def test_concepts_snippets_hold(checkpoint):
    namespace = run_python(DOCS / "concepts.md", checkpoint)
    fast = namespace["fast"]
    assert fast.stats.accepted > 0
    assert fast.stats.drafted > fast.stats.accepted
    assert fast.text != namespace["alone"].text


def test_models_page_loads_a_model_over_devices(checkpoint):
    out = run_python(DOCS / "models.md", checkpoint)["out"]
    assert out.method == "layerskip"
    assert len(out.new_tokens[0]) == 8


@pytest.mark.parametrize(
    "page", [*sorted((DOCS / "methods").glob("*.md")), DOCS / "lab" / "training.md"], ids=lambda page: page.stem
)
def test_pages_name_functions_that_are_in_the_code(page):
    """A row says where in the code a line of the paper is: a function, class or constant, and its file."""
    named = [row for row in table_rows(page) if row[-1].endswith(".py`")]
    assert len(named) >= 3 or page.stem == "auto"
    for paper, symbol, file in named:
        assert symbol.strip("`") in symbols(PACKAGE / file.strip("`")), f"{paper}: {symbol} is not in {file}"


def test_every_method_page_belongs_to_a_method():
    assert {page.stem for page in (DOCS / "methods").glob("*.md")} <= set(skipstone.METHODS)


def test_design_page_names_every_package():
    named = {row[0].strip("`") for row in table_rows(DOCS / "design.md") if row[0].startswith("`") and "tests/" not in row[1]}
    present = {f"{path.name}/" if path.is_dir() else path.name for path in PACKAGE.iterdir() if not path.name.startswith("__")}
    assert named >= present - {"py.typed"}, sorted(present - named)
    assert [name for name in named if name.endswith(("/", ".py")) and not (PACKAGE / name).exists()] == []


def test_design_page_names_tests_that_exist():
    rows = [row for page in ("design.md", "lab/design-notes.md") for row in table_rows(DOCS / page)]
    names = [name.strip(" `") for row in rows for name in row[1].split(",") if "tests/" in name]
    assert len(names) >= 60
    assert [name for name in names if not (ROOT / name).exists()] == []


@pytest.mark.usefixtures("registered")
def test_tutorial_method_runs_under_its_name_and_its_snippet_holds(checkpoint):
    namespace = run_python(ADD_A_METHOD, checkpoint)
    assert namespace["out"].method == "bigram"


PAGE = ROOT / "docs" / "migration.md"


def test_migration_snippets_run_and_hold(checkpoint: Path) -> None:
    names = run_python(PAGE, checkpoint)
    assert names["after"].shape[1] > names["inputs"]["input_ids"].shape[1]


def test_migration_names_are_those_that_are_understood() -> None:
    rows = [[cell.strip("`") for cell in row] for row in table_rows(PAGE) if row[1] in ("transformers", "LayerSkip")]
    understood = {alias: name for kind in (skipstone.LayerSkip, skipstone.EarlyExit) for alias, name in kind.aliases.items()}
    assert {row[0]: row[2] for row in rows} == understood
