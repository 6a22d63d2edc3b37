"""The shape of the code: what is public and documented, what tests may import."""

import ast
import functools
import re
from pathlib import Path

import pytest

import skipstone

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "skipstone"
TESTS = ROOT / "tests"
PUBLIC = {
    *("Autoregressive", "EarlyExit", "LayerSkip", "SelfSpeculative", "Swift", "AdaDecode", "AdaSD", "Auto", "ExitHeads"),
    *("Eagle3", "Mtp"),
    *("Speculative", "PromptLookup", "Recycle", "RowError", "refresh", "Jacobi", "Lookahead", "METHODS", "Method", "Draft"),
    *("Session", "Step", "Stats"),
    *("generate", "stream", "load", "push", "enable", "disable", "custom_generate", "Output", "Detokenizer"),
    *("Decoder", "DecodingLoop", "ModelRunner", "Request", "Sampling"),
}


@functools.cache
def files() -> dict[str, tuple[str, ast.Module]]:
    """Path within the package -> text and syntax tree of every file of the package."""
    texts = {str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
    return {path: (text, ast.parse(text)) for path, text in texts.items()}


def test_every_file_documents_itself_and_everything_public() -> None:
    undocumented = [
        f"{path}: {node.name}"
        for path, (_, tree) in files().items()
        for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
        and not any(ast.unparse(one).startswith("app.callback") for one in node.decorator_list)  # typer would print it
    ]
    assert undocumented == []
    assert [path for path, (_, tree) in files().items() if tree.body and not ast.get_docstring(tree)] == []


def test_the_public_names_are_these() -> None:
    """A name more or less is a decision: change this list, the README and the change log together."""
    _, tree = files()["__init__.py"]
    typed = {
        alias.asname for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names if alias.asname
    }
    assert typed == PUBLIC
    assert {name for name in dir(skipstone) if not name.startswith("_")} >= PUBLIC


def test_every_public_name_is_there_and_says_what_it_is() -> None:
    silent = []
    for name in PUBLIC - {"METHODS"}:
        own = getattr(skipstone, name).__doc__ or ""
        if len(own.split()) <= 3 or own.startswith(f"{name}("):  # the docstring that dataclass makes up
            silent.append(name)
    assert silent == []
    assert [kind.name for kind in skipstone.METHODS.values()] == list(skipstone.METHODS)


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        skipstone.nothing_of_the_kind  # noqa: B018


def test_no_test_imports_another() -> None:
    foreign = re.compile(r"^ *(?:from \.|(?:from|import) tests\b(?!\.helpers\b))", re.MULTILINE)
    paths = [path for path in sorted(TESTS.rglob("*.py")) if foreign.search(path.read_text(encoding="utf-8"))]
    assert [path.relative_to(ROOT) for path in paths] == []
