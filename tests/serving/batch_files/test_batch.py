"""A batch in one process: its input, its journal, and the server's answers, the same bytes whatever interrupts it."""

import asyncio
import itertools
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import skipstone
from skipstone.serving.batch_files import batch
from skipstone.serving.batch_files import journal as journals
from skipstone.serving.batch_files.answer_line import ModelThreadError
from skipstone.serving.batch_files.batch import REQUESTS_PER_ROW, BatchSettings
from skipstone.serving.batch_files.journal import Journal, count_errors, expect_free, is_error, journal_of
from skipstone.serving.batch_files.request_lines import RequestFile
from skipstone.serving.scheduler import Scheduler
from tests.helpers.batches import CHATS, RESPONSES, batch_settings, greedy, journal_answers, many, read, request, texts, write
from tests.helpers.served import in_thread, with_template, without_run

TURNS = [{"role": "user", "content": "add two numbers"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
KINDS = [
    request("one", greedy("def add(a, b):")),
    request("several", greedy(["def a(", "import"], n=2, seed=3, temperature=0.9, logprobs=2)),
    request("stopped", greedy("def add(a, b):", 40, stop=["return"])),
    request("ids", greedy([5, 6, 7], echo=True, logprobs=1)),
    request("chat", {"messages": TURNS, "max_tokens": 8, "temperature": 0, "logprobs": True}, CHATS),
    request("json", {"messages": TURNS, "max_tokens": 20, "seed": 5, "response_format": {"type": "json_object"}}, CHATS),
    request("called", {"messages": TURNS, "tools": [TOOL], "tool_choice": "required", "temperature": 0}, CHATS),
    request("response", {"input": "add", "max_output_tokens": 8, "temperature": 0, "metadata": {"a": "b"}}, RESPONSES),
    request(
        "predicted", greedy("x = 1\ny = 2\nx = 1\n", prediction={"type": "content", "content": "y = 2\n"}, speculative="auto")
    ),
]
FAULTS = {
    "hot": (request("hot", greedy("x", temperature=9)), 400, "temperature: Input should be less than or equal to 2"),
    "unknown": (request("unknown", greedy("x", zap=1)), 400, "zap: this field is not supported"),
    "long": (request("long", greedy("x " * 5000)), 400, "the maximum context length is 2048 tokens"),
    "template": (request("template", {"messages": TURNS}, CHATS), 400, "this model has no chat template"),
    "turns": (request("turns", {"input": [{"role": "user", "content": "x"}]}, RESPONSES), 400, "no chat template"),
    "url": (request("url", greedy("x"), "/v1/embeddings"), 404, "there is no '/v1/embeddings' in a batch"),
    "strange": (request("strange", greedy("x"), ["a"]), 404, "there is no ['a'] in a batch"),
    "verb": (request("verb", greedy("x"), method="GET"), 405, "'GET' is not what /v1/completions takes"),
    "list": (request("list", [1]), 400, "the body is no JSON object"),
    "model": (request("model", greedy("x", model="gpt-7")), 404, "there is no model 'gpt-7' here, but 'skipstone-nano'"),
    "stream": (request("stream", greedy("x", stream=True)), 400, "stream: a batch has none"),
    "times": (request("times", greedy("x", return_metrics=True)), 400, "return_metrics: a batch has none"),
    "letters": (request("letters", greedy("\ud800")), 400, "no valid Unicode"),
    "method": (request("method", greedy("x"), method="\ud83d"), 405, "is not what /v1/completions takes"),
    "place": (request("place", greedy("x"), "/v1/\ud83d"), 404, "there is no"),
    "key": (request("key", greedy("x", **{"\ud800": 1})), 400, "no valid Unicode"),
}


@pytest.fixture(scope="module")
def nano() -> BatchSettings:
    return batch_settings()


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> BatchSettings:
    return batch_settings(with_template(tmp_path_factory.mktemp("chats")), name="nano")


def answer(settings: BatchSettings, folder: Path, requests: list[Any], name: str = "out") -> Path:
    lines, output = RequestFile(write(folder / f"{name}.in", requests)), folder / f"{name}.jsonl"
    batch.run(settings, output, lines, lambda *_: None)
    return output


def test_answers_are_those_of_the_server(chats: BatchSettings, tmp_path: Path) -> None:
    result = read(answer(chats, tmp_path, KINDS))
    assert [one["custom_id"] for one in result] == [one["custom_id"] for one in KINDS]
    with in_thread(chats.load, name="nano", max_num_seqs=3) as served:
        for asked, one in zip(KINDS, result, strict=True):
            expected = served.http.post(asked["url"], json=asked["body"])
            assert expected.status_code == one["response"]["status_code"] == 200, one
            assert without_run(one["response"]["body"]) == without_run(expected.json())
            assert one["error"] is None
    called = result[6]["response"]["body"]["choices"][0]["message"]["tool_calls"]
    assert called[0]["id"].startswith("call_")


def test_the_same_input_gives_the_same_bytes(chats: BatchSettings, tmp_path: Path) -> None:
    """In another order beside other lines, too, line by line: ids, times and figures are functions of the line."""
    first = answer(chats, tmp_path, KINDS, "first").read_text().splitlines()
    mixed = answer(chats, tmp_path, many(7) + KINDS[::-1], "second").read_text().splitlines()
    assert mixed[7:][::-1] == first
    assert len(set(first)) == len(KINDS)


def test_greedy_texts_are_those_of_generate_and_a_line_without_a_seed_has_its_own(nano: BatchSettings, tmp_path: Path) -> None:
    requests, (model, tokenizer) = many(8), nano.load()
    written = texts(answer(nano, tmp_path, requests))
    for one in requests:
        body = one["body"]
        options: dict[str, Any] = {"max_new_tokens": body["max_tokens"], "do_sample": False, "seed": body.get("seed")}
        if body["temperature"]:
            options |= {"do_sample": True, "temperature": body["temperature"]}
        if body["temperature"] == 0 or "seed" in body:
            expected = skipstone.generate(model, body["prompt"], tokenizer=tokenizer, **options).text
            assert written[one["custom_id"]] == expected
    same = {"prompt": "def", "max_tokens": 12, "temperature": 1.5}
    drawn = texts(answer(nano, tmp_path, [request(f"draw-{place}", same) for place in range(4)], "draws"))
    assert len(set(drawn.values())) > 1, "lines with one body draw apart"


def test_a_line_that_cannot_be_answered_says_why_and_hurts_no_other(nano: BatchSettings, tmp_path: Path) -> None:
    good = [request(f"good-{place}", greedy(f"def f{place}(")) for place in range(len(FAULTS))]
    mixed = list(itertools.chain.from_iterable(zip(good, (one for one, _, _ in FAULTS.values()), strict=True)))
    result = read(answer(nano, tmp_path, mixed))
    assert [one["custom_id"] for one in result] == [one["custom_id"] for one in mixed]
    for one in result:
        response = one["response"]
        if one["custom_id"] in FAULTS:
            _, status, said = FAULTS[one["custom_id"]]
            error = response["body"]["error"]
            assert response["status_code"] == status, one
            assert error["code"] == ("context_length_exceeded" if one["custom_id"] == "long" else status), one
            assert said in error["message"]
            assert set(error) == {"message", "type", "param", "code"}
        assert is_error(one) == (one["custom_id"] in FAULTS)


def test_a_model_whose_thread_dies_ends_the_run_which_goes_on_to_the_same_bytes(
    nano: BatchSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, steps, step = many(12), itertools.count(), Scheduler._run_step
    lines, output = RequestFile(write(tmp_path / "in.jsonl", requests)), tmp_path / "out.jsonl"

    def dying(self: Scheduler, group: Any) -> Any:
        if next(steps) == 12:
            raise SystemExit
        return step(self, group)

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "_run_step", dying)
        with pytest.raises(ModelThreadError):
            batch.run(nano, output, lines, lambda *_: None)
    written = journal_answers(output)
    assert 0 < len(written) < 12
    assert not any(map(is_error, written.values()))
    info: list[tuple[int, int]] = []
    assert batch.run(nano, output, lines, lambda *done: info.append(done)) == 0
    assert output.read_bytes() == answer(nano, tmp_path, requests, "whole").read_bytes()
    assert (info[0], info[-1]) == ((len(written), 0), (12, 0)), "what was there is not answered again"
    assert not journal_of(output).exists()


def test_a_step_that_fails_for_one_line_fails_no_other(
    nano: BatchSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, step = [request(f"r{place}", greedy(f"def f{place}(")) for place in range(6)], Scheduler._run_step
    poison = nano.load()[1](requests[3]["body"]["prompt"])["input_ids"]

    def failing(self: Scheduler, group: Any) -> Any:
        if any(pending is not None and pending.prompt_ids == poison for pending in group.requests):
            monkeypatch.setattr(group.loop, "step", None)
        return step(self, group)

    monkeypatch.setattr(Scheduler, "_run_step", failing)
    result = read(answer(nano, tmp_path, requests))
    assert [is_error(one) for one in result] == [place == 3 for place in range(6)]
    assert result[3]["response"]["status_code"] == 500


def test_rows_are_kept_busy_and_no_more_requests_are_under_way_than_may_be() -> None:
    running, done, counts = set[int](), set[int](), list[int]()

    async def answer_line(index: Any) -> Any:
        running.add(index)
        counts.append(len(running))
        await asyncio.sleep(0.05 if index == 0 else 0)  # a long text
        running.discard(index)
        assert index or len(done) == 39, "nobody waited for the long text"
        done.add(index)
        return {"response": {"status_code": 200}}

    async def answered() -> list[int]:
        pairs: Any = ((index, index) for index in range(40))
        return [index async for several in batch.answer_lines(answer_line, pairs, 4 * REQUESTS_PER_ROW) for index, _ in several]

    result = asyncio.run(answered())
    assert (sorted(result), result[-1]) == ([*range(40)], 0)
    assert max(counts) == 4 * REQUESTS_PER_ROW


ABOUT = {"model": "nano", "weights": "abc", "method": None}
COUNT = 5


@pytest.fixture
def lines(tmp_path: Path) -> RequestFile:
    return RequestFile(write(tmp_path / "in.jsonl", [request(f"r{place}", greedy("x")) for place in range(COUNT)]))


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def line_answer(lines: RequestFile, index: int, status: int = 200) -> dict[str, Any]:
    line = lines[index]
    response = {"status_code": status, "request_id": "req", "body": {"said": f"é {index}"}}
    return {"id": line.id, "custom_id": line.custom_id, "response": response, "error": None}


def test_the_output_has_the_order_of_the_input_and_the_journal_goes(lines: RequestFile, output: Path) -> None:
    with Journal(output, lines, ABOUT):
        pass
    assert not journal_of(output).exists(), "one without an answer goes"
    with Journal(output, lines, ABOUT) as journal:
        for index in (3, 1, 4):
            assert journal.add((index, line_answer(lines, index))) == 1
        assert (journal.num_done, journal.missing) == (3, [0, 2])
        assert not output.exists()
        assert journal.add((3, line_answer(lines, 3, 500)), (2, line_answer(lines, 2, status=400))) == 1, "one came twice"
        journal.add((0, line_answer(lines, 0)))
        assert journal.num_errors == 1
        journal.finish()
    assert read(output) == [line_answer(lines, index, 400 if index == 2 else 200) for index in range(COUNT)]
    assert [path.name for path in output.parent.iterdir() if path != lines.path] == ["out.jsonl"]
    assert count_errors(output, lines) == 1
    assert is_error({**line_answer(lines, 0), "response": None, "error": {"code": "worker_died", "message": "x"}})


def test_a_run_that_was_killed_while_the_output_appeared_is_whole(
    lines: RequestFile, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with Journal(output, lines, ABOUT) as journal:
        journal.add(*((index, line_answer(lines, index)) for index in range(COUNT)))
        with monkeypatch.context() as patch:
            patch.setattr(journals, "publish", killed)
            with pytest.raises(KeyboardInterrupt):
                journal.finish()
    assert not output.exists()
    with Journal(output, lines, ABOUT) as journal:
        assert journal.missing == []
    kept = journal_of(output).read_bytes()
    with Journal(output, lines, ABOUT) as journal:
        journal.finish()
    journal_of(output).write_bytes(kept)  # killed behind the output's appearance, before the journal went
    assert count_errors(output, lines) == 0
    assert not journal_of(output).exists()


def test_what_is_there_is_never_overwritten(lines: RequestFile, output: Path, tmp_path: Path) -> None:
    expect_free(output, resume=False)
    with Journal(output, lines, ABOUT) as journal:
        journal.add((0, line_answer(lines, 0)))
    with pytest.raises(ValueError, match="of a run that was interrupted: --resume goes on with it"):
        expect_free(output, resume=False)
    expect_free(output, resume=True)
    output.write_text("something\n")
    with pytest.raises(ValueError, match="exists already, and is never overwritten"):
        expect_free(output, resume=False)
    for content in ("something\n", json.dumps(line_answer(lines, 1)) + "\n", json.dumps(line_answer(lines, 0)) + "\n"):
        output.write_text(content)
        with pytest.raises(ValueError, match=r"is not the output of .*in\.jsonl"):
            count_errors(output, lines)
        assert output.read_text() == content
    with Journal(output, lines, ABOUT) as journal:
        journal.add(*((index, line_answer(lines, index)) for index in journal.missing))
        with pytest.raises(ValueError, match="has come meanwhile"):
            journal.finish()
    assert output.read_text() == content
    with pytest.raises(FileNotFoundError):
        expect_free(tmp_path / "no" / "out.jsonl", resume=False)
    with pytest.raises(ValueError, match="is no file"):
        expect_free(tmp_path, resume=True)


def test_a_journal_of_another_run_is_refused_with_what_differs(lines: RequestFile, output: Path, tmp_path: Path) -> None:
    with Journal(output, lines, ABOUT) as journal:
        journal.add((0, line_answer(lines, 0)))
    content = journal_of(output).read_bytes()
    with pytest.raises(ValueError, match="weights is 'abc' there, 'xyz' here"):
        Journal(output, lines, ABOUT | {"weights": "xyz"})
    other = RequestFile(write(tmp_path / "other.jsonl", [request("r0", greedy("y"))]))
    with pytest.raises(ValueError, match="is of another run: input is"):
        Journal(output, other, ABOUT)
    assert journal_of(output).read_bytes() == content
    with Journal(output, lines, {"method": None}) as journal:
        assert journal.num_done == 1, "what one side does not know is not compared"
        with pytest.raises(ValueError, match="is being written by another run"):
            Journal(output, lines, ABOUT)


def test_what_is_no_journal_or_a_damaged_one_is_left_as_it_is(lines: RequestFile, output: Path) -> None:
    with Journal(output, lines, ABOUT) as journal:
        journal.add((0, line_answer(lines, 0)))
    whole = journal_of(output).read_bytes()
    for content in (b"poems\n", b"a poem without an end", whole[: len(whole) // 2]):
        journal_of(output).write_bytes(content)
        with pytest.raises(OSError, match="is no journal of a batch"):
            Journal(output, lines, ABOUT)
        assert journal_of(output).read_bytes() == content
    journal_of(output).unlink()
    with closing(sqlite3.connect(journal_of(output))) as database:
        database.execute("CREATE TABLE poems (line)")
    with pytest.raises(ValueError, match="of another program"):
        Journal(output, lines, ABOUT)
    assert journal_of(output).exists()


def test_a_damaged_answer_is_not_published(lines: RequestFile, output: Path) -> None:
    with Journal(output, lines, ABOUT) as journal:
        journal.add((0, line_answer(lines, 0)))
        stored = journal_of(output)
        stored.write_bytes(stored.read_bytes().replace(b'"custom_id":', b'"custom_id"?'))
    with Journal(output, lines, ABOUT) as journal, pytest.raises(ValueError, match="is damaged"):
        journal.finish()
    assert stored.exists()
    assert not output.exists()


GOOD = request("one", greedy("def a("))
OTHER = request("two", greedy("def b("))


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ('{"custom_id": "x"', "it is no JSON"),
        ("[1, 2]", "Input should be a valid dictionary"),
        ("[" * 100_000, "it is no JSON"),
        ({key: GOOD[key] for key in ("custom_id", "method", "url")}, "body: Field required; a line is an object of custom_id,"),
        ({key: GOOD[key] for key in ("method", "url", "body")}, "custom_id: Field required"),
        ({**GOOD, "custom_id": 7}, "custom_id: Input should be a valid string"),
        ({**GOOD, "custom_id": ""}, "custom_id: String should have at least 1 character"),
        ({**GOOD, "custom_id": "\ud800"}, "custom_id: Input should be a valid string"),
        ({**GOOD, "custom_id": "x", "priority": 1}, "priority: Extra inputs are not permitted"),
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
    with pytest.raises(ValueError, match=r"line 1: it is no JSON.*can.t decode"):
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
    path, mark, (one, two) = tmp_path / "in.jsonl", b"\xef\xbb\xbf", (json.dumps(line).encode() for line in (GOOD, OTHER))
    for content, ids in ((mark + one + b"\n\n   \n" + two, ["one", "two"]), (mark + b"\n" + one + b"\n", ["one"])):
        path.write_bytes(content)
        lines = RequestFile(path)
        assert [lines[index].custom_id for index in range(len(lines))] == ids
        assert lines[0].body == GOOD["body"]
    path.write_bytes(one + b"\n" + mark + two)
    with pytest.raises(ValueError, match="line 2"):
        RequestFile(path)
