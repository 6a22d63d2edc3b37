"""`skipstone batch`: files in, files out, refusals in one sentence, and a process that is killed with -9."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from skipstone.cli import batch
from skipstone.serving.batch_files.journal import journal_of
from skipstone.utils import processor_watch
from tests.helpers.batches import greedy, journal_answers, many, read, request, texts, write
from tests.helpers.commandline import assert_refused, expected, run, succeed
from tests.helpers.served import SLOW

PROMPT = "def add(a, b):"


def test_texts_are_those_of_transformers_and_the_exit_code_tells_that_lines_failed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor_watch, "MAX_WAITED_SHARE", 1.0)  # other tests may run meanwhile
    bodies = [greedy(PROMPT, 12), greedy("import", 20), greedy(PROMPT, 5, model="mine")]
    requests = [request(f"r{place}", body) for place, body in enumerate(bodies)]
    path, output = write(tmp_path / "in.jsonl", requests), tmp_path / "out.jsonl"
    result = succeed("batch", path, output, "--model", folder, "--served-model-name", "mine", "--max-num-seqs", 2)
    assert re.fullmatch(r"\S*out\.jsonl: 3 lines, 0 of them errors, in [\d.]+ s\n", result.stdout)
    assert result.stderr == "", "nothing is drawn where nobody looks"
    assert list(texts(output).values()) == [expected(folder, body["prompt"], body["max_tokens"])[1] for body in bodies]
    content = output.read_bytes()
    assert_refused(run("batch", path, output, "--model", folder), "exists already, and is never overwritten")
    succeed("batch", path, output, "--model", folder, "--resume")
    assert output.read_bytes() == content
    path = write(tmp_path / "bad.jsonl", [request("good", greedy("x", 2)), request("bad", greedy("x", temperature=9))])
    result = run("batch", path, tmp_path / "other.jsonl", "--model", folder)
    assert result.exit_code == batch.SOME_FAILED
    assert "2 lines, 1 of them errors" in result.stdout


def test_bad_input_is_one_sentence_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    output, good = tmp_path / "out.jsonl", request("a", greedy("x"))
    path = write(tmp_path / "bad.jsonl", [good, "{"])
    assert_refused(run("batch", path, output, "--model", folder), "bad.jsonl, line 2: it is no JSON")
    path = write(tmp_path / "in.jsonl", [good])
    assert_refused(run("batch", path, output, "--method", "layerskip exit_layer=99", "--model", folder), "exit_layer")
    assert_refused(run("batch", path, output, "--address", "localhost:1"), "need --ray")
    assert_refused(run("batch", path, output, "--ray", "--address", "somewhere"), "a Ray address is HOST:PORT or ray://")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["bad.jsonl", "in.jsonl"]


@pytest.mark.slow
def test_a_process_that_is_killed_loses_nothing_and_does_nothing_twice(tmp_path: Path) -> None:
    path, output = write(tmp_path / "in.jsonl", many(30, tokens=40)), tmp_path / "out.jsonl"
    succeed("batch", path, tmp_path / "whole.jsonl")
    command = [sys.executable, "-m", "skipstone", "batch", str(path), str(output), "--max-num-seqs", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    began = time.monotonic()
    while not (journal_of(output).exists() and journal_of(output).stat().st_size > 5 * 4096):  # pages of SQLite
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() - began < SLOW
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    assert not output.exists(), "it was killed before its end"
    assert len(journal_answers(output)) >= 4
    assert_refused(run("batch", path, output), "of a run that was interrupted: --resume goes on with it")
    before = journal_of(output).read_bytes()
    assert_refused(run("batch", path, output, "--resume", "--served-model-name", "other"), "called is 'skipstone-nano' there")
    assert journal_of(output).read_bytes() == before
    succeed("batch", path, output, "--resume")
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert [one["custom_id"] for one in read(output)] == [f"request-{place}" for place in range(30)]
    assert not journal_of(output).exists()
