"""The input of a batch: what is a request, and what is said of a line that is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from skipstone.serving.batch_files.request_lines import RequestFile
from tests.helpers.batches import greedy, request, write

GOOD = request("one", greedy("def a("))
OTHER = request("two", greedy("def b("))


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in GOOD.items() if name != key}


def test_lines_are_read_in_their_order_and_empty_ones_are_none(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", [GOOD, "", "   ", OTHER])
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    lines = RequestFile(path)
    assert [lines[index].custom_id for index in range(len(lines))] == ["one", "two"]
    assert lines[1].body == OTHER["body"]
    assert json.loads(lines.raw(0)) == GOOD


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ('{"custom_id": "x"', "it is no JSON"),
        ("[1, 2]", "it is no JSON object"),
        ("[" * 100_000, "it is no JSON"),
        (without("body"), "body is missing; a line has custom_id, method, url, body"),
        (without("custom_id"), "custom_id is missing"),
        ({**GOOD, "custom_id": 7}, "custom_id must be a text that is not empty"),
        ({**GOOD, "custom_id": ""}, "custom_id must be a text that is not empty"),
        ({**GOOD, "custom_id": "\ud800"}, "custom_id is no valid Unicode"),
        ({**GOOD, "custom_id": "x", "priority": 1}, "there is no 'priority'"),
        (GOOD, "line 1 has the custom_id 'one', too"),
    ],
)
def test_a_line_that_is_no_request_is_named_before_any_work(tmp_path: Path, bad: Any, said: str) -> None:
    path = write(tmp_path / "in.jsonl", [GOOD, OTHER, bad, '{"another": "fault"}'])
    with pytest.raises(ValueError) as refused:
        RequestFile(path)
    assert str(refused.value).startswith(f"{path}, line 3: ")
    assert said in str(refused.value)
    assert "1 more lines are wrong" in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_a_file_of_other_bytes_or_of_nothing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\xff\xfe\x00\n")
    with pytest.raises(ValueError, match="line 1: it is no UTF-8"):
        RequestFile(path)
    path.write_text("\n\n")
    with pytest.raises(ValueError, match="has no request"):
        RequestFile(path)
    with pytest.raises(FileNotFoundError):
        RequestFile(tmp_path / "missing.jsonl")


def test_ids_and_seeds_are_made_of_what_a_line_says_and_not_of_how_it_is_set(tmp_path: Path) -> None:
    spaced = json.dumps(dict(reversed(GOOD.items())), indent=None, separators=(" , ", " : "))
    first, second = RequestFile(write(tmp_path / "a", [GOOD])), RequestFile(write(tmp_path / "b", [spaced]))
    assert first.digest != second.digest
    assert (first[0].id, first[0].seed) == (second[0].id, second[0].seed)
    changed = RequestFile(write(tmp_path / "c", [request("one", greedy("def a(", seed=1))]))[0]
    renamed = RequestFile(write(tmp_path / "d", [request("uno", GOOD["body"])]))[0]
    assert len({first[0].id, changed.id, renamed.id}) == 3
    assert 0 <= first[0].seed < 1 << 63


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"".join(json.dumps({**GOOD, "custom_id": name}).encode() + b"\n" for name in "ab"))
    lines = RequestFile(path)
    assert [lines[index].custom_id for index in range(len(lines))] == ["a", "b"]
    path.write_bytes(b"\xef\xbb\xbf\n" + json.dumps(GOOD).encode())
    assert len(RequestFile(path)) == 1
    path.write_bytes(json.dumps(GOOD).encode() + b"\n\xef\xbb\xbf" + json.dumps(GOOD).encode())
    with pytest.raises(ValueError, match="line 2"):
        RequestFile(path)
