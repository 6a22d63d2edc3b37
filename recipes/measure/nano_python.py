"""Held-out Python: beginnings of functions to continue, and whether what came parses."""

from __future__ import annotations

import ast
import io
import random
import tokenize
from collections.abc import Sequence

from skipstone.train.data.documents import Document

PREFIX_LINES, MOST_OPEN = 4, 4


def logical_lines(text: str) -> list[int]:
    """Where complete logical lines end, as character positions. What the text is in the midst of at its end (a bracket, a
    string, a line) counts for nothing; a mistake before that is an IndentationError or SyntaxError."""
    starts = [0]
    for line in io.StringIO(text):
        starts.append(starts[-1] + len(line))
    ends = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NEWLINE and token.string:
                ends.append(starts[token.start[0]])
    except tokenize.TokenError as error:
        if not any(part in str(error) for part in ("EOF", "triple-quoted")):
            raise SyntaxError(str(error)) from error
    return ends


def parses(prefix: str, continuation: str) -> bool:
    """Whether prefix and continuation are Python up to the last full statement, of which at least one must be new.

    The text ends where its tokens ran out, so up to MOST_OPEN logical lines are taken back until it parses: the line that
    was being written, and block openers above it that have no body yet (`if x:`, `try:`, a decorator).
    """
    text = prefix + continuation.rpartition("\n")[0] + "\n"
    try:
        ends = logical_lines(text)
    except (IndentationError, SyntaxError):
        return False
    for end in ends[: -MOST_OPEN - 1 : -1]:
        if end <= len(prefix):
            return False
        try:
            ast.parse(text[:end])
        except (SyntaxError, ValueError):
            if not _opens(text[:end]):
                return False
            continue
        return True
    return False


def _opens(text: str) -> bool:
    """Whether the last logical line can only be followed by more: a block opener, a decorator, a `try` without `except`."""
    try:
        ast.parse(text)
    except SyntaxError as error:
        said = str(error.msg)
        return said.startswith(("expected an indented block", "expected 'except' or 'finally' block")) or (
            said == "invalid syntax" and text.splitlines()[-1].lstrip().startswith("@")
        )
    except ValueError:
        return False
    return False


def beginnings(documents: Sequence[Document], count: int, seed: int) -> list[tuple[str, str]]:
    """(a few lines, the rest) of functions, methods and classes of held-out files, without their indentation.

    The first part ends before its line break, which the rest begins with: the tokenizer, as most for code, knows a line break
    and the indentation after it as one token, and a lone line break at a prompt's end as what ends a text.
    """
    found = {}
    for document in documents:
        lines = io.StringIO(document.text).readlines()
        for node in ast.walk(ast.parse(document.text)):
            kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
            if isinstance(node, kinds) and (node.end_lineno or 0) - node.lineno > 2 * PREFIX_LINES:
                own = [_outdented(line, node.col_offset) for line in lines[node.lineno - 1 : node.end_lineno]]
                prefix = "".join(own[:PREFIX_LINES]).rstrip("\n")
                found[prefix] = "".join(own)[len(prefix) :]
    chosen = sorted(found.items())
    random.Random(seed).shuffle(chosen)
    if len(chosen) < count:
        raise ValueError(f"the held-out files have {len(chosen)} functions and classes long enough, {count} are needed")
    return chosen[:count]


def _outdented(line: str, columns: int) -> str:
    return line[min(columns, len(line) - len(line.lstrip(" "))) :]
