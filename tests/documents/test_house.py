"""The shape of the code: which module may import which, how long files and functions are, what is public and documented."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import skipstone

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "skipstone"
RANKS = {"core": 0, "methods": 1, "loading": 0, "records": 1, "forms": 0, "assets": -1, "api": 2, "hf": 3}
RANKS |= {"train": 5, "bench": 5, "serve": 5, "cli": 6, "__main__": 7}
PUBLIC_API = 4  # `import skipstone` itself: below those that use it, above what it re-exports
LOOP = ("skipstone.decoding.loop", "skipstone.hf.generation")
PUBLIC = (
    *("Autoregressive", "Decoder", "Detokenizer", "Draft", "EarlyExit", "LayerSkip", "LayeredModel", "METHODS", "Method"),
    *(
        "Output",
        "Request",
        "Sampling",
        "SelfSpeculative",
        "Session",
        "Stats",
        "Step",
        "Swift",
        "AdaDecode",
        "AdaSD",
        "ExitHeads",
        "Jacobi",
        "Lookahead",
        "PromptLookup",
        "Speculative",
        "disable",
        "enable",
        "generate",
        "load",
        "stream",
    ),
)


def module_name(path: Path, package: Path) -> str:
    parts = [package.name, *path.relative_to(package).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.Module, known: set[str]) -> Iterator[str]:
    """Modules of the package that are imported at run time, anywhere in a file: not those under TYPE_CHECKING."""
    skipped = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:  # `from package import module` is an import of the module
                name = f"{node.module}.{alias.name}"
                yield from ([name] if name in known else [str(node.module)] if node.module in known else [])


def graph(package: Path) -> dict[str, set[str]]:
    """Module -> modules of the same package that it imports."""
    paths = {module_name(path, package): path for path in sorted(package.rglob("*.py"))}
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in paths.items()}
    assert not [n for t in trees.values() for n in ast.walk(t) if isinstance(n, ast.ImportFrom) and n.level], "relative import"
    return {name: set(imports(tree, set(paths))) - {name} for name, tree in trees.items()}


def rank(module: str) -> int:
    parts = module.split(".")
    return PUBLIC_API if len(parts) == 1 else RANKS[parts[1]]


def wrong_way(edges: dict[str, set[str]]) -> list[str]:
    """Imports that go up, or across between packages of the same rank."""
    return [
        f"{source} -> {target}"
        for source, targets in edges.items()
        for target in sorted(targets)
        if rank(target) > rank(source) or (rank(target) == rank(source) and source.split(".")[1:2] != target.split(".")[1:2])
    ]


def circles(edges: dict[str, set[str]]) -> list[str]:
    """Modules that take part in an import circle."""
    left = dict(edges)
    while free := [name for name, targets in left.items() if not targets & left.keys()]:
        for name in free:
            del left[name]
    while loose := [name for name in left if not any(name in targets for other, targets in left.items() if other != name)]:
        for name in loose:
            del left[name]
    return sorted(left)


def test_imports_run_one_way_only() -> None:
    edges = graph(PACKAGE)
    assert len(edges) > 20
    assert wrong_way(edges) == []


def test_there_are_no_import_circles() -> None:
    assert circles(graph(PACKAGE)) == []


def test_a_method_imports_no_loop() -> None:
    edges = graph(PACKAGE)
    methods = {name: targets for name, targets in edges.items() if name.startswith("skipstone.methods")}
    assert len(methods) >= 4
    assert [f"{name} -> {loop}" for name, targets in methods.items() for loop in LOOP if loop in targets] == []


def test_the_loop_knows_no_method() -> None:
    targets = graph(PACKAGE)["skipstone.decoding.loop"]
    assert "skipstone.decoding.session" in targets
    assert not {target for target in targets if target.startswith("skipstone.methods") or target == "skipstone.decoding.method"}


@pytest.mark.parametrize(
    ("files", "wrong", "circle"),
    [
        ({"core/a": "import skipstone.methods.b", "methods/b": ""}, ["skipstone.core.a -> skipstone.methods.b"], []),
        ({"core/a": "def f():\n    from skipstone import hf", "hf": ""}, ["skipstone.core.a -> skipstone.hf"], []),
        ({"bench/a": "from skipstone.serve.b import c", "serve/b": ""}, ["skipstone.bench.a -> skipstone.serve.b"], []),
        ({"hf": "import skipstone"}, ["skipstone.hf -> skipstone"], []),
        (
            {
                "core/a": "from skipstone.core import b",
                "core/b": "import skipstone.core.c",
                "core/c": "import skipstone.core.a",
            },
            [],
            ["skipstone.core.a", "skipstone.core.b", "skipstone.core.c"],
        ),
        (
            {"core/a": "if TYPE_CHECKING:\n    import skipstone.core.b", "core/b": "import skipstone.core.a"},
            [],
            [],
        ),
    ],
    ids=["upwards", "upwards within a function", "across", "the public API from below", "a circle", "types only"],
)
def test_the_checks_above_find_what_they_look_for(
    files: dict[str, str], wrong: list[str], circle: list[str], tmp_path: Path
) -> None:
    package = tmp_path / "skipstone"
    for name, text in {"__init__": "", **files}.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / f"{name}.py").write_text(text)
    edges = graph(package)
    assert wrong_way(edges) == wrong
    assert circles(edges) == circle


def python_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", python_files(), ids=lambda path: str(path.relative_to(PACKAGE)))
class TestEveryFile:
    def test_is_no_longer_than_300_lines(self, path: Path) -> None:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 300

    def test_has_no_function_of_more_than_50_lines(self, path: Path) -> None:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        too_long = {node.name: lines for node in functions if (lines := (node.end_lineno or 0) - node.lineno + 1) > 50}
        assert too_long == {}

    def test_documents_itself_and_everything_public(self, path: Path) -> None:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        undocumented = [
            node.name
            for node in tree.body
            if isinstance(node, (ast.FunctionDef, ast.ClassDef))
            and not node.name.startswith("_")
            and not ast.get_docstring(node)
            and not any(ast.unparse(one).startswith("app.callback") for one in node.decorator_list)  # typer would print it
        ]
        assert undocumented == []
        assert ast.get_docstring(tree) or not tree.body

    def test_catches_no_errors_wholesale_and_leaves_nothing_to_do(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        handlers = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ExceptHandler)]
        assert [node.lineno for node in handlers if node.type is None] == []
        assert re.findall(r"\b(TODO|FIXME|XXX|HACK)\b", text) == []


def test_the_public_names_are_these() -> None:
    """A name more or less is a decision: change this list, the README and the change log together."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    typed = [
        alias.asname for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names if alias.asname
    ]
    assert sorted(typed) == sorted(PUBLIC)
    assert {name for name in dir(skipstone) if not name.startswith("_")} >= set(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_there_and_says_what_it_is(name: str) -> None:
    value = getattr(skipstone, name)
    if name == "METHODS":
        assert set(value) == {
            *("adadecode", "adasd", "autoregressive", "early_exit", "jacobi", "layerskip", "lookahead", "prompt_lookup"),
            *("self_speculative", "speculative", "swift"),
        }
        return
    own = value.__doc__ or ""
    assert len(own.split()) > 3
    assert not own.startswith(f"{name}("), "only the docstring that dataclass made up"


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        skipstone.nothing_of_the_kind  # noqa: B018
