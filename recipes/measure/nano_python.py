"""Held-out Python: beginnings of functions, and whether their continuations parse."""

import ast
import io
import random
import tokenize
from collections.abc import Sequence

from skipstone.train.data.documents import Document

PREFIX_LINES, MAX_OPEN_LINES = 4, 4


def logical_lines(text: str) -> list[int]:
    """Positions of the ends of complete logical lines. An unfinished bracket, string or line at the end of the text is ignored.
    IndentationError or SyntaxError for an earlier mistake."""
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
    """Whether prefix and continuation are Python up to the last full statement. At least one statement must be new.

    The text was cut at a number of tokens. So up to MAX_OPEN_LINES logical lines are removed from its end until it parses: the
    unfinished line, and block openers above it without a body (`if x:`, `try:`, a decorator).
    """
    text = prefix + continuation.rpartition("\n")[0] + "\n"
    try:
        ends = logical_lines(text)
    except (IndentationError, SyntaxError):
        return False
    for end in ends[: -MAX_OPEN_LINES - 1 : -1]:
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
    """Whether the last logical line needs further lines: a block opener, a decorator, a `try` without `except`."""
    try:
        ast.parse(text)
    except SyntaxError as error:
        message = str(error.msg)
        return message.startswith(("expected an indented block", "expected 'except' or 'finally' block")) or (
            message == "invalid syntax" and text.splitlines()[-1].lstrip().startswith("@")
        )
    except ValueError:
        return False
    return False


def beginnings(documents: Sequence[Document], count: int, seed: int) -> list[tuple[str, str]]:
    """(a few lines, the rest) of functions, methods and classes of held-out files, without their indentation.

    The rest begins with the line break. The tokenizer, as most for code, has one token for a line break and the indentation
    after it. A line break at a prompt's end would end the text.
    """
    beginnings_found = {}
    for document in documents:
        lines = io.StringIO(document.text).readlines()
        for node in ast.walk(ast.parse(document.text)):
            kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
            if isinstance(node, kinds) and (node.end_lineno or 0) - node.lineno > 2 * PREFIX_LINES:
                outdented = [_outdented(line, node.col_offset) for line in lines[node.lineno - 1 : node.end_lineno]]
                prefix = "".join(outdented[:PREFIX_LINES]).rstrip("\n")
                beginnings_found[prefix] = "".join(outdented)[len(prefix) :]
    pairs = sorted(beginnings_found.items())
    random.Random(seed).shuffle(pairs)
    if len(pairs) < count:
        raise ValueError(f"the held-out files have {len(pairs)} functions and classes long enough, {count} are needed")
    return pairs[:count]


def _outdented(line: str, columns: int) -> str:
    return line[min(columns, len(line) - len(line.lstrip(" "))) :]
