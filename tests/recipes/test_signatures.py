"""MBPP's tasks as beginnings of functions: what is taken from a task, and which tasks are left out."""

from __future__ import annotations

import pytest

from recipes.data.signatures import signature


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
