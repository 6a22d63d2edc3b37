"""Sources of documents: what is read, in which order, and what is said where something is wrong."""

import json
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from skipstone.train.data.sources import HubDataset, JsonLines, ScriptSource, Source, SourceText, TextFiles, resolve


def texts(source: Any, base: Path) -> list[str]:
    return [one.text for one in source.read(base)]


def lines(path: Path, *records: Any) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def script(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"kind": "parquet", "path": "a"}, "'text', 'jsonl', 'hub', 'script'"),
        ({"kind": "text", "path": "a", "weight": float("inf")}, "finite"),
        ({"kind": "text", "path": "a", "glob": "/etc/*"}, "expected a pattern within the folder"),
        ({"kind": "jsonl", "path": "a", "template": "fixed"}, "names no key in braces"),
        ({"kind": "jsonl", "path": "a", "template": "{a.b!r}"}, "plain keys"),
        ({"kind": "jsonl", "path": "a", "where": {"split": []}}, "at least one value"),
        ({"kind": "jsonl", "path": "a", "where": {"id": [[9, 3]]}}, r"expected \[low, high\].*found \[9, 3\]"),
    ],
)
def test_an_entry_that_makes_no_sense_is_refused(entry: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        TypeAdapter(Source).validate_python(entry)


def test_text_files_come_sorted_without_what_is_excluded(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a/test/deep/y.txt", "a.txt", "c.md"):
        (tmp_path / "books" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "books" / name).write_text(f"text of {name}", encoding="utf-8-sig")  # a byte order mark is no text
    source = TextFiles(path="books", exclude=("*/test/*",))
    assert list(source.read(tmp_path)) == [SourceText(name, f"text of {name}") for name in ("a.txt", "a/z.txt", "b.txt")]
    assert texts(TextFiles(path="books", glob="*.md"), tmp_path) == ["text of c.md"]
    assert list(TextFiles(path="books/c.md").read(tmp_path)) == [SourceText("c.md", "text of c.md")]


def test_paths_belong_to_the_recipe_then_to_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, here = tmp_path / "recipe", tmp_path / "here"
    for folder, names in ((recipe, ("both",)), (here, ("both", "only"))):
        folder.mkdir()
        for name in names:
            (folder / name).touch()
    monkeypatch.chdir(here)
    assert resolve("both", recipe) == recipe / "both"
    assert resolve("only", recipe) == here / "only"
    assert resolve(str(here / "both"), recipe) == here / "both"
    assert resolve("{stdlib}/json", recipe) == Path(sysconfig.get_paths()["stdlib"]) / "json"
    with pytest.raises(FileNotFoundError, match=f"nowhere does not exist: tried {recipe}/nowhere and {here}/nowhere"):
        resolve("nowhere", recipe)


def test_what_is_not_found_or_not_utf8_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"a\.txt is not UTF-8 text \(byte 3\): convert it, or leave it out"):
        texts(TextFiles(path="."), tmp_path)
    with pytest.raises(FileNotFoundError, match=r"source 'books': no file in .* fits glob '\*\*/\*\.py'$"):
        texts(TextFiles(path=".", name="books", glob="**/*.py"), tmp_path)
    with pytest.raises(FileNotFoundError, match="and exclude leaves out all 1"):
        texts(TextFiles(path=".", exclude=("*",)), tmp_path)
    with pytest.raises(FileNotFoundError, match="expected a file of JSON lines, found the folder"):
        texts(JsonLines(path="."), tmp_path)
    with pytest.raises(FileNotFoundError, match="expected a Python file, found the folder"):
        texts(ScriptSource(path="."), tmp_path)


def test_json_lines_fill_the_template(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"q": "1 + 1?", "n": 2, "tests": ["a", "b"]}, {"q": "{x}", "n": 0.5, "tests": []})
    source = JsonLines(path=path, template="{q} {{{n}}}\n{tests}")
    assert texts(source, tmp_path) == ["1 + 1? {2}\na\nb", "{x} {0.5}\n"]
    path = lines(tmp_path / "b.jsonl", {"question": "why\u2028?", "answer": "so"})
    assert texts(JsonLines(path=path), tmp_path) == ["why\u2028?\nso"]


def test_where_and_limit_choose_records(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", *({"id": i, "text": f"t{i}", "split": "odd" if i % 2 else "even"} for i in range(10)))

    def chosen(**options: Any) -> list[str]:
        return texts(JsonLines(path=path, template="{text}", **options), tmp_path)

    assert chosen(where={"id": [[2, 4], 7, True]}) == ["t2", "t3", "t4", "t7"]  # True is not 1
    assert chosen(where={"id": [[2, 8]], "split": ["odd"]}) == ["t3", "t5", "t7"]
    assert chosen(where={"split": ["odd"]}, limit=2) == ["t1", "t3"]
    with pytest.raises(ValueError, match=r"source 'a' .* none of its 10 records fits where={'split': \['train'\]}"):
        chosen(where={"split": ["train"]})
    with pytest.raises(ValueError, match="line 1: the where asks for the key 'part', found id, text, split"):
        chosen(where={"part": [1]})


def test_the_name_of_a_line_does_not_depend_on_its_place(tmp_path: Path) -> None:
    one, other = {"text": "one"}, {"text": "other"}
    first = set(JsonLines(path=lines(tmp_path / "a.jsonl", one, other), template="{text}").read(tmp_path))
    assert first == set(JsonLines(path=lines(tmp_path / "b.jsonl", other, one), template="{text}").read(tmp_path))


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b'{"text": "a"}\n\n{"text": "b"\n', r"a\.jsonl, line 3 is not JSON"),
        (b'{"text": "a"}\n["b"]\n', r"a\.jsonl, line 2: expected an object with the key 'text', found \['b'\]"),
        (b'{"txt": "a", "n": 1}\n', r"a\.jsonl, line 1: the template asks for the key 'text', found txt, n"),
        (b'{"text": "a"}\n{"text": null}\n', r"line 2: expected a text, a number or a list of texts under 'text', found None"),
        (b'{"text": "\xff"}\n', r"a\.jsonl, line 1 is not UTF-8 text \(byte 10\)"),
        (b"\n", r"source 'a' .* has no documents: none of its 0 records"),
    ],
)
def test_a_broken_line_is_named(content: bytes, error: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=error):
        texts(JsonLines(path="a.jsonl", template="{text}"), tmp_path)


def test_a_hub_data_set_is_loaded_and_read_like_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = []

    def load_dataset(*args: Any, **options: Any) -> list[dict[str, str]]:
        calls.append((args, options))
        return [{"text": "a"}, {"text": "b"}, {"no": "c"}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    source = HubDataset(path="owner/set", split="train", config="main", revision="abc", limit=2)
    assert texts(source, tmp_path) == ["a", "b"]
    assert calls == [(("owner/set",), {"name": "main", "split": "train", "revision": "abc", "streaming": True})]
    with pytest.raises(ValueError, match="owner/set, train, record 2: the template asks for the key 'text', found no"):
        texts(HubDataset(path="owner/set", split="train"), tmp_path)


def test_a_hub_data_set_from_a_local_file(tmp_path: Path) -> None:
    lines(tmp_path / "set.jsonl", *({"text": t, "n": n} for n, t in enumerate("abc")))
    settings: dict[str, Any] = {"template": "<{text}>", "where": {"n": [[1, 2]]}, "limit": 1, "weight": 3, "name": "mine"}
    source = HubDataset(path="owner/set", split="train", file="set.jsonl", **settings)
    local = source.local(tmp_path)
    assert texts(local, tmp_path) == ["<b>"]
    assert local == JsonLines(path=str(tmp_path / "set.jsonl"), **settings)
    with pytest.raises(FileNotFoundError, match=r"set\.jsonl does not exist"):
        texts(source.local(tmp_path / "elsewhere"), tmp_path)


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def load_dataset(*_args: Any, **_options: Any) -> None:
        raise ConnectionError("no route")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(OSError, match=r"owner/set could not be had .*no route.* the folder of a\.jsonl with --data-dir"):
        texts(HubDataset(path="owner/set", split="train", file="a.jsonl"), tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r'openai/gsm8k .* not installed: pip install "skipstone\[train\]"'):
        texts(HubDataset(path="openai/gsm8k", split="train"), tmp_path)


def test_a_script_is_run_with_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "words_beside_it.py").write_text("WORD = 'hi'\n", encoding="utf-8")
    code = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom words_beside_it import WORD\n"
        "@dataclass\nclass A:\n    n: int\ndef documents(count, word=WORD):\n"
        "    for i in range(count):\n        yield f'{word} {A(i).n}'\n"
    )
    script(tmp_path / "s.py", code)
    before = list(sys.path)
    assert texts(ScriptSource(path="s.py", arguments={"count": 2}), tmp_path) == ["hi 0", "hi 1"]
    assert texts(ScriptSource(path="s.py", arguments={"count": 1, "word": "ho"}), tmp_path) == ["ho 0"]
    assert sys.path == before
    script(tmp_path / "pairs.py", "def documents():\n    yield 'q', 'a'\n    yield 'b'\n")
    assert [(one.prompt, one.text) for one in ScriptSource(path="pairs.py").read(tmp_path)] == [("q", "a"), ("", "b")]
    (tmp_path / "s.py").write_text(code.replace("f'{word}", "f'{WORD}"), encoding="utf-8")  # no stale compiled file
    assert texts(ScriptSource(path="s.py", arguments={"count": 1, "word": "ho"}), tmp_path) == ["hi 0"]


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("def documents(a): yield 'x'", r"documents\(a\) does not take arguments={'count': 2}: "),
        ("def documents(count): return 'x'", r"must give an iterable of texts, found str"),
        ("def documents(count): yield from ['x', 2]", r"s\.py: document 1 is int, expected str"),
    ],
)
def test_a_script_that_gives_no_texts_is_refused(code: str, error: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=error):
        texts(ScriptSource(path=script(tmp_path / "s.py", code), arguments={"count": 2}), tmp_path)
