"""What is on the disk while a batch runs: wherever it is killed, nothing is lost and nothing is twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from skipstone.serving.batch_files import journal as journals
from skipstone.serving.batch_files.journal import Journal, count_errors, expect_free, is_error, journal_of
from skipstone.serving.batch_files.request_lines import RequestFile
from tests.helpers.batches import greedy, read, request, write

ABOUT = {"model": "nano", "weights": "abc", "method": None}
COUNT = 5


@pytest.fixture
def lines(tmp_path: Path) -> RequestFile:
    return RequestFile(write(tmp_path / "in.jsonl", [request(f"r{place}", greedy("x")) for place in range(COUNT)]))


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def answer(lines: RequestFile, index: int, status: int = 200) -> dict[str, Any]:
    line = lines[index]
    response = {"status_code": status, "request_id": "req", "body": {"said": f"é {index}"}}
    return {"id": line.id, "custom_id": line.custom_id, "response": response, "error": None}


def test_the_output_has_the_order_of_the_input_and_the_journal_goes(lines: RequestFile, output: Path) -> None:
    with Journal(output, lines, ABOUT) as journal:
        for index in (3, 1, 4):
            journal.add((index, answer(lines, index)))
        assert (journal.num_done, journal.missing) == (3, [0, 2])
        written = [line["index"] for line in read(journal_of(output))[1:]]
        assert written == [3, 1, 4], "in the order in which they came"
        assert not output.exists()
        journal.add((2, answer(lines, 2, status=400)), (0, answer(lines, 0)))
        journal.finish()
    assert read(output) == [answer(lines, index, 400 if index == 2 else 200) for index in range(COUNT)]
    assert [path.name for path in output.parent.iterdir() if path != lines.path] == ["out.jsonl"]
    assert count_errors(output, lines) == 1


def test_an_answer_that_comes_twice_is_kept_once(lines: RequestFile, output: Path) -> None:
    with Journal(output, lines, ABOUT) as journal:
        assert journal.add((0, answer(lines, 0))) == 1
        assert journal.add((0, answer(lines, 0, 500)), (1, answer(lines, 1))) == 1
        journal.add(*((index, answer(lines, index)) for index in range(COUNT)))
        assert journal.num_errors == 0
        journal.finish()
    assert [one["custom_id"] for one in read(output)] == [f"r{place}" for place in range(COUNT)]


def test_a_run_goes_on_wherever_its_journal_was_cut_off(lines: RequestFile, output: Path) -> None:
    """Around every end of a line and at places between them, as a process may be killed anywhere."""
    with Journal(output, lines, ABOUT) as journal:
        journal.add(*((index, answer(lines, index)) for index in (4, 2, 0)))
    content = journal_of(output).read_bytes()
    ends = [place + 1 for place, byte in enumerate(content) if byte == ord("\n")]
    for cut in sorted({*range(0, len(content), 29), *(end - shift for end in ends for shift in (0, 1, 2))}):
        journal_of(output).write_bytes(content[:cut])
        with Journal(output, lines, ABOUT) as journal:
            kept = max(sum(end <= cut for end in ends) - 1, 0)
            assert journal.num_done == kept, cut
            journal.add(*((index, answer(lines, index)) for index in journal.missing))
            journal.finish()
        assert read(output) == [answer(lines, index) for index in range(COUNT)]
        output.unlink()


def test_a_run_that_was_killed_while_the_output_appeared_is_whole(lines: RequestFile, output: Path, monkeypatch: Any) -> None:
    with Journal(output, lines, ABOUT) as journal:
        journal.add(*((index, answer(lines, index)) for index in range(COUNT)))
        with monkeypatch.context() as patch:
            patch.setattr(journals, "publish", _killed)
            with pytest.raises(KeyboardInterrupt):
                journal.finish()
    assert not output.exists()
    with Journal(output, lines, ABOUT) as journal:
        assert journal.missing == []
        kept = journal_of(output).read_bytes()
        journal.finish()
    journal_of(output).write_bytes(kept)  # killed behind the output's appearance, before the journal went
    assert count_errors(output, lines) == 0
    assert not journal_of(output).exists()


def _killed(*_: Any) -> None:
    raise KeyboardInterrupt


def test_what_is_there_is_never_overwritten(lines: RequestFile, output: Path, tmp_path: Path) -> None:
    expect_free(output, resume=False)
    with Journal(output, lines, ABOUT) as journal:
        journal.add((0, answer(lines, 0)))
    with pytest.raises(ValueError, match="of a run that was interrupted: --resume goes on with it"):
        expect_free(output, resume=False)
    expect_free(output, resume=True)
    output.write_text("something\n")
    with pytest.raises(ValueError, match="exists already, and is never overwritten"):
        expect_free(output, resume=False)
    for content in ("something\n", json.dumps(answer(lines, 1)) + "\n", json.dumps(answer(lines, 0)) + "\n"):
        output.write_text(content)
        with pytest.raises(ValueError, match=r"is not the output of .*in\.jsonl"):
            count_errors(output, lines)
        assert output.read_text() == content
    with Journal(output, lines, ABOUT) as journal:
        journal.add(*((index, answer(lines, index)) for index in journal.missing))
        with pytest.raises(ValueError, match="has come meanwhile"):
            journal.finish()
    assert output.read_text() == content
    with pytest.raises(FileNotFoundError):
        expect_free(tmp_path / "no" / "out.jsonl", resume=False)
    with pytest.raises(ValueError, match="is no file"):
        expect_free(tmp_path, resume=True)


def test_a_journal_of_another_run_is_refused_with_what_differs(lines: RequestFile, output: Path, tmp_path: Path) -> None:
    with Journal(output, lines, ABOUT) as journal:
        journal.add((0, answer(lines, 0)))
    content = journal_of(output).read_bytes()
    with pytest.raises(ValueError, match="weights is 'abc' there, 'xyz' here"):
        Journal(output, lines, ABOUT | {"weights": "xyz"})
    other = RequestFile(write(tmp_path / "other.jsonl", [request("r0", greedy("y"))]))
    with pytest.raises(ValueError, match=r"is of another input than .*other\.jsonl"):
        Journal(output, other, ABOUT)
    assert journal_of(output).read_bytes() == content
    with Journal(output, lines, {"model": "nano"}) as journal:
        assert journal.num_done == 1, "what one side does not know is not compared"
        with pytest.raises(ValueError, match="is being written by another run"):
            Journal(output, lines, ABOUT)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("poems\n", "is no journal of a batch"),
        ("a poem without an end", "is no journal of a batch"),
        ('{"kind": "skipstone-batch", "version": 99}\n', "is of version 99"),
    ],
)
def test_what_is_no_journal_is_left_as_it_is(lines: RequestFile, output: Path, content: str, said: str) -> None:
    journal_of(output).write_text(content)
    with pytest.raises(ValueError, match=said):
        Journal(output, lines, ABOUT)
    assert journal_of(output).read_text() == content


def test_a_damaged_line_is_named_and_a_journal_without_an_answer_goes(lines: RequestFile, output: Path) -> None:
    with Journal(output, lines, ABOUT):
        pass
    assert not journal_of(output).exists()
    with Journal(output, lines, ABOUT) as journal:
        journal.add((0, answer(lines, 0)))
    with journal_of(output).open("a") as file:
        file.write('{"index": 99, "answer": {}}\n')
    with pytest.raises(ValueError, match="line 3 is damaged"):
        Journal(output, lines, ABOUT)


def test_an_error_is_one_of_whatever_kind(lines: RequestFile) -> None:
    assert not is_error(answer(lines, 0))
    assert is_error(answer(lines, 0, 400))
    assert is_error({**answer(lines, 0), "response": None, "error": {"code": "worker_died", "message": "x"}})
