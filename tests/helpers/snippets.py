"""Reads the documents (code blocks, tables, links); builds the tiny checkpoint that stands in for a reader's model."""

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.helpers import families

ROOT = Path(__file__).resolve().parents[2]
MODEL = "facebook/layerskip-llama3.2-1B"
MARKS = ("", "<!-- fragment -->", "<!-- file -->", "<!-- registry -->", "<!-- test row -->")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page. line: of its first code line. mark: an HTML comment right above the fence, or ""."""

    page: Path
    line: int
    language: str
    code: str
    mark: str


def pages() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, language: str) -> list[Block]:
    found = []
    lines = page.read_text().splitlines()
    fences = [number for number, line in enumerate(lines) if line.startswith("```")]
    assert len(fences) % 2 == 0, f"{page.name} leaves a fence open"
    for start, stop in zip(fences[::2], fences[1::2], strict=True):
        above = lines[start - 1].strip() if start else ""
        mark = above if above.startswith("<!--") else ""
        if lines[start] == f"```{language}":
            found.append(Block(page, start + 2, language, "\n".join(lines[start + 1 : stop]), mark))
    return found


def run_python(page: Path, checkpoint: Path) -> dict[str, Any]:
    """Execute a page's unmarked Python blocks one after the other in one namespace, on the tiny checkpoint."""
    namespace: dict[str, Any] = {"__name__": "snippet"}
    for block in blocks(page, "python"):
        assert block.mark in MARKS, f"{page.name}:{block.line} is marked {block.mark}"
        if not block.mark:
            code = "\n" * (block.line - 1) + block.code.replace(MODEL, str(checkpoint))
            exec(compile(code, str(page), "exec"), namespace)
    return namespace


def tiny_checkpoint(folder: Path) -> Path:
    """A random Llama of eight layers whose drafts are sometimes right, with a tokenizer of single bytes, saved to a folder."""
    end = "<|end|>"
    vocabulary = {end: 0} | {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()), 1)}
    bytes_only = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=bytes_only, eos_token=end, pad_token=end).save_pretrained(folder)
    families.build("llama", layers=8, vocab=len(vocabulary)).save_pretrained(folder)
    return folder


def links(page: Path) -> list[str]:
    """Targets of a page's Markdown links outside code blocks."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"\]\(([^)\s]+)\)", text)


def anchors(page: Path) -> set[str]:
    """What a link into the page may end in, made from its headings as GitHub does."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def table_rows(page: Path) -> list[list[str]]:
    """The cells of every Markdown table row of a page, header and rule lines included."""
    rows = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


def symbols(path: Path) -> set[str]:
    """What a module defines at its top level and in its classes, dotted: `Session`, `Session.score`, `METHODS`."""
    found: set[str] = set()

    def visit(body: list[ast.stmt], above: str) -> None:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(above + node.name)
                visit(node.body if isinstance(node, ast.ClassDef) else [], f"{above}{node.name}.")
            elif isinstance(node, ast.AnnAssign):
                found.add(above + ast.unparse(node.target))
            elif isinstance(node, ast.Assign):
                found.update(
                    above + name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)
                )

    visit(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return found
