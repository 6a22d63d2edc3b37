"""A batch of 2,000 lines that is killed three times writes what an undisturbed one writes."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from skipstone.serving.batch_files.journal import journal_of
from tests.helpers.batches import many, read, write
from tests.helpers.served import SLOW

pytestmark = pytest.mark.soak

COUNT = 2000
KILLED_AT = (300, 900, 1500)
"""Lines that have an answer when the process is killed, at least."""


def started(path: Path, output: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "skipstone", "batch", str(path), str(output), "--resume"])


def done(output: Path) -> int:
    """Answers in the journal, about."""
    journal = journal_of(output)
    return journal.read_bytes().count(b'"custom_id": ') if journal.exists() else 0


def test_three_kills_change_no_byte(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", many(COUNT))
    whole, output = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    began = time.monotonic()
    assert started(path, whole).wait(3 * SLOW) == 0
    took = time.monotonic() - began
    there = []
    for wanted in KILLED_AT:
        process, began = started(path, output), time.monotonic()
        while done(output) < wanted:
            assert process.poll() is None, "it was killed before its end"
            assert time.monotonic() - began < 3 * SLOW
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        there.append(done(output))
        assert not output.exists()
    assert started(path, output).wait(3 * SLOW) == 0
    assert output.read_bytes() == whole.read_bytes()
    assert [one["custom_id"] for one in read(output)] == [f"request-{place}" for place in range(COUNT)]
    assert not journal_of(output).exists()
    print(
        f"\n{COUNT} lines in {took:.0f} s; killed with -9 when {', '.join(map(str, there))} lines had an answer: the same bytes"
    )
