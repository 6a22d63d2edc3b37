"""A batch in one process: the server's answers, line by line, and the same bytes whatever interrupts it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import skipstone
from skipstone.serving.batch_files import batch
from skipstone.serving.batch_files.answer_line import ModelThreadError
from skipstone.serving.batch_files.batch import REQUESTS_PER_ROW, LoadedModel, ModelSettings
from skipstone.serving.batch_files.journal import Journal, is_error, journal_of
from skipstone.serving.batch_files.request_lines import RequestFile
from skipstone.serving.scheduler import Scheduler
from tests.helpers.batches import CHATS, RESPONSES, greedy, many, read, request, texts, write
from tests.helpers.pairwise import slow_except
from tests.helpers.served import in_thread, with_template

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
"""All of them with a seed or without need of one."""
FAULTS = {
    "hot": (request("hot", greedy("x", temperature=9)), 400, "temperature: Input should be less than or equal to 2"),
    "unknown": (request("unknown", greedy("x", zap=1)), 400, "zap: this field is not supported"),
    "long": (request("long", greedy("x " * 5000)), 400, "the maximum context length is 2048 tokens"),
    "template": (request("template", {"messages": TURNS}, CHATS), 400, "this model has no chat template"),
    "turns": (request("turns", {"input": [{"role": "user", "content": "x"}]}, RESPONSES), 400, "no chat template"),
    "url": (request("url", greedy("x"), "/v1/embeddings"), 404, "there is no /v1/embeddings in a batch"),
    "strange": (request("strange", greedy("x"), ["a"]), 404, "there is no ['a'] in a batch"),
    "verb": (request("verb", greedy("x"), method="GET"), 405, "GET is not what /v1/completions takes"),
    "list": (request("list", [1]), 400, "the body is no JSON object"),
    "model": (request("model", greedy("x", model="gpt-7")), 404, "there is no model 'gpt-7' here, but 'skipstone-nano'"),
    "stream": (request("stream", greedy("x", stream=True)), 400, "stream: a batch has none"),
    "times": (request("times", greedy("x", return_metrics=True)), 400, "return_metrics: a batch has none"),
    "letters": (request("letters", greedy("\ud800")), 400, "no valid Unicode"),
    "method": (request("method", greedy("x"), method="\ud83d"), 400, "no valid Unicode"),
    "place": (request("place", greedy("x"), "/v1/\ud83d"), 400, "no valid Unicode"),
    "key": (request("key", greedy("x", **{"\ud800": 1})), 400, "no valid Unicode"),
}
"""Name -> a request that cannot be answered, the status, and what is said."""


@pytest.fixture(scope="module")
def nano() -> LoadedModel:
    return ModelSettings(max_num_seqs=3).load()


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """The same with a chat template."""
    folder = with_template(tmp_path_factory.mktemp("chats"))
    return ModelSettings(str(folder), served_name="nano", max_num_seqs=3).load()


def answer(loaded: LoadedModel, folder: Path, requests: list[Any], name: str = "out") -> Path:
    """The output, in a folder."""
    lines, output = RequestFile(write(folder / f"{name}.in", requests)), folder / f"{name}.jsonl"
    batch.run(loaded, output, lines, lambda *_: None)
    return output


def moment(value: Any) -> Any:
    """The same without what belongs to one run of a server."""
    if isinstance(value, list):
        return [moment(one) for one in value]
    if not isinstance(value, dict):
        return value
    run = ("id", "created", "created_at", "prompt_tokens_details", "completion_tokens_details", "cached_tokens")
    return {key: moment(inner) for key, inner in value.items() if key not in run}


def test_answers_are_those_of_the_server(chats: LoadedModel, tmp_path: Path) -> None:
    found = read(answer(chats, tmp_path, KINDS))
    assert [one["custom_id"] for one in found] == [one["custom_id"] for one in KINDS]
    with in_thread(lambda: (chats.model, chats.tokenizer), name="nano", max_num_seqs=3) as served:
        for asked, one in zip(KINDS, found, strict=True):
            expected = served.http.post(asked["url"], json=asked["body"])
            assert expected.status_code == one["response"]["status_code"] == 200, one
            assert moment(one["response"]["body"]) == moment(expected.json())
            assert one["error"] is None
    called = found[6]["response"]["body"]["choices"][0]["message"]["tool_calls"]
    assert called[0]["id"].startswith("call_")


def test_the_same_input_gives_the_same_bytes(chats: LoadedModel, tmp_path: Path) -> None:
    """In another order beside other lines, too, line by line: ids, times and figures are functions of the line."""
    first = answer(chats, tmp_path, KINDS, "first").read_text().splitlines()
    mixed = answer(chats, tmp_path, many(7) + KINDS[::-1], "second").read_text().splitlines()
    assert mixed[7:][::-1] == first
    assert len(set(first)) == len(KINDS)


def test_greedy_texts_are_those_of_generate_and_a_line_without_a_seed_has_its_own(nano: LoadedModel, tmp_path: Path) -> None:
    requests = many(24)
    written = texts(answer(nano, tmp_path, requests))
    for one in requests:
        body = one["body"]
        options: dict[str, Any] = {"max_new_tokens": body["max_tokens"], "do_sample": False, "seed": body.get("seed")}
        if body["temperature"]:
            options |= {"do_sample": True, "temperature": body["temperature"]}
        if body["temperature"] == 0 or "seed" in body:
            expected = skipstone.generate(nano.model, body["prompt"], tokenizer=nano.tokenizer, **options).text
            assert written[one["custom_id"]] == expected
    same = {"prompt": "def", "max_tokens": 12, "temperature": 1.5}
    drawn = texts(answer(nano, tmp_path, [request(f"draw-{place}", same) for place in range(4)], "draws"))
    assert len(set(drawn.values())) > 1, "lines with one body draw apart"


def test_a_line_that_cannot_be_answered_says_why_and_hurts_no_other(nano: LoadedModel, tmp_path: Path) -> None:
    good = [request(f"good-{place}", greedy(f"def f{place}(")) for place in range(len(FAULTS))]
    mixed = list(itertools.chain.from_iterable(zip(good, (one for one, _, _ in FAULTS.values()), strict=True)))
    found = read(answer(nano, tmp_path, mixed))
    assert [one["custom_id"] for one in found] == [one["custom_id"] for one in mixed]
    for one in found:
        response = one["response"]
        if one["custom_id"] in FAULTS:
            _, status, said = FAULTS[one["custom_id"]]
            error = response["body"]["error"]
            assert response["status_code"] == status, one
            assert error["code"] == ("context_length_exceeded" if one["custom_id"] == "long" else status), one
            assert said in error["message"]
            assert set(error) == {"message", "type", "param", "code"}
        assert is_error(one) == (one["custom_id"] in FAULTS)


class Stopped(Exception):
    """What ends a run in these tests."""


@pytest.mark.parametrize("after", slow_except([5], [0, 1, 2, 5, 11]))
def test_a_run_that_was_interrupted_goes_on_and_gives_the_same_bytes(
    nano: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    requests = many(12)
    expected = answer(nano, tmp_path, requests, "whole").read_bytes()
    lines, output = RequestFile(write(tmp_path / "in.jsonl", requests)), tmp_path / "cut.jsonl"
    add, written = Journal.add, 0

    def some(self: Journal, *several: Any) -> int:
        nonlocal written
        for one in several:
            if written == after:
                raise Stopped
            written += add(self, one)
        return len(several)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", some)
        with pytest.raises(Stopped):
            batch.run(nano, output, lines, lambda *_: None)
    assert not output.exists()
    assert journal_of(output).exists() == bool(after)
    told: list[tuple[int, int]] = []
    assert batch.run(nano, output, lines, lambda *done: told.append(done)) == 0
    assert output.read_bytes() == expected
    assert told[0] == (after, 0), "what was there is not answered again"
    assert told[-1] == (12, 0)
    assert not journal_of(output).exists()


def test_a_model_whose_thread_dies_ends_the_run_and_fails_no_line(
    nano: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    assert all(not is_error(one["answer"]) for one in read(journal_of(output))[1:])
    assert batch.run(nano, output, lines, lambda *_: None) == 0
    assert output.read_bytes() == answer(nano, tmp_path, requests, "whole").read_bytes()


def test_a_step_that_fails_for_one_line_fails_no_other(
    nano: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step of several texts is ended by one of them: each is asked once more by itself."""
    requests, step = [request(f"r{place}", greedy(f"def f{place}(")) for place in range(6)], Scheduler._run_step
    poison = nano.tokenizer(requests[3]["body"]["prompt"])["input_ids"]

    def failing(self: Scheduler, group: Any) -> Any:
        if any(pending is not None and pending.prompt_ids == poison for pending in group.requests):
            monkeypatch.setattr(group.loop, "step", _broken)
        return step(self, group)

    monkeypatch.setattr(Scheduler, "_run_step", failing)
    found = read(answer(nano, tmp_path, requests))
    assert [is_error(one) for one in found] == [place == 3 for place in range(6)]
    assert found[3]["response"]["status_code"] == 500


def _broken() -> Any:
    raise RuntimeError("no memory")


def given(rows: int) -> Any:
    """As much of a server as decides how many requests are under way."""
    return SimpleNamespace(settings=SimpleNamespace(max_num_seqs=rows))


def reply(status: int = 200) -> dict[str, Any]:
    return {"response": {"status_code": status}}


def collected(monkeypatch: pytest.MonkeyPatch, one: Callable[..., Any], count: int, rows: int) -> list[int]:
    async def all_of_it() -> list[int]:
        pairs: Any = ((index, index) for index in range(count))
        return [index async for several in batch.answer_lines(given(rows), pairs) for index, _ in several]

    monkeypatch.setattr(batch, "answer_line", one)
    return asyncio.run(all_of_it())


def test_rows_are_kept_busy_and_no_more_requests_are_under_way_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    running, most, waiting = set[int](), 0, set[int]()

    async def one(_: Any, index: int) -> Any:
        nonlocal most
        running.add(index)
        most = max(most, len(running))
        await asyncio.sleep(0.05 if index == 0 else 0)  # a long text
        running.discard(index)
        if index == 0:
            waiting.update(set(range(40)) - done)
        done.add(index)
        return reply()

    done: set[int] = set()
    found = collected(monkeypatch, one, 40, rows=4)
    assert sorted(found) == list(range(40))
    assert most == REQUESTS_PER_ROW * 4
    assert found[-1] == 0, "nobody waited for the long text"
    assert waiting == {0}


def test_what_a_defect_has_ended_is_asked_once_more_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    running = 0

    async def one(_: Any, index: int) -> Any:
        nonlocal running
        again = index in asked
        asked.append(index)
        assert not again or running == 0
        running += 1
        await asyncio.sleep(0)
        running -= 1
        return reply(500 if index == 2 or (index == 5 and not again) else 200)

    found = collected(monkeypatch, one, 8, rows=2)
    assert found[-2:] == [2, 5]
    assert sorted(found) == list(range(8))
    assert sorted(asked) == sorted([*range(8), 2, 5])
