"""How the figures of skipstone-nano are counted: what parses, and which beginnings are continued."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from skipstone.train.documents import Document

FILE = Path(__file__).parents[1] / "recipes" / "nano_results.py"


@pytest.fixture(scope="module")
def results() -> Any:
    spec = importlib.util.spec_from_file_location("nano_results", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = [*sys.path]
    sys.modules["nano_results"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


GOOD = {
    "a line being written is left out": "    return x\n    foo(ba",
    "a bracket left open": "    y = 1\n    z = foo(1,\n        2,",
    "a string left open": '    y = 1\n    """All about\nnothing',
    "a block without a body": "    y = 1\n    if y:\n",
    "nested blocks without a body": "    for y in x:\n        if y:\n            pass\n    while x:\n        if x:\n",
    "try without except": "    y = 1\n    try:\n        y = 2\n",
    "a decorator": "    return x\n\n\n@cache\n",
    "comments and blank lines": "    # nothing\n\n    return x\n    # more\n",
}
BAD = {
    "a plain mistake": "    return x x\n    y = 1\n",
    "a mistake in the middle": "    y = = 1\n    z = 2\n    w = 3\n    v = 4\n    u = 5\n    t = 6\n",
    "an unindent that matches nothing": "    if x:\n        y = 1\n      z = 2\n    return y\n",
    "an indent out of nowhere": "    y = 1\n        z = 2\n    return y\n",
    "nothing complete": '    """All about',
    "nothing new at all": "",
    "a bracket closed that was not open": "    y = 1)\n    z = 2\n",
}


@pytest.mark.parametrize("name", GOOD)
def test_python_up_to_the_last_full_statement(results: Any, name: str) -> None:
    assert results.parses("def f(x):\n", GOOD[name])


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_python_or_says_nothing(results: Any, name: str) -> None:
    assert not results.parses("def f(x):\n", BAD[name])


def test_prefixes_are_beginnings_of_definitions_without_indentation(results: Any) -> None:
    body = "".join(f"        y{n} = {n}\n" for n in range(9))
    text = "import os\n\x0c\nclass A:\n    def f(self):\n" + body + "\n    def short(self):\n        pass\n"
    found = results.prefixes([Document(text, "code", "a.py")], 2, seed=0)
    assert sorted(found) == [
        "class A:\n    def f(self):\n        y0 = 0\n        y1 = 1\n",
        "def f(self):\n    y0 = 0\n    y1 = 1\n    y2 = 2\n",
    ]
    with pytest.raises(ValueError, match="2 functions and classes long enough, 3 are needed"):
        results.prefixes([Document(text, "code", "a.py")], 3, seed=0)
