"""The recipe that measures how long a user waits."""

import shlex
import subprocess
import sys
from pathlib import Path

RECIPE = Path(__file__).parents[2] / "recipes" / "measure" / "start.py"


def row_of(program: str) -> list[float]:
    """The figures of a Python program's row: first token, last token, end and peak."""
    peer = shlex.join([sys.executable, "-c", program])
    command = [sys.executable, str(RECIPE), "--models", "--runs", "1", "--peer", peer]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    (row,) = (line for line in done.stdout.splitlines() if line.startswith(f"| {Path(sys.executable).name} |"))
    return [float(cell) for cell in row.strip("|").split("|")[3:]]


def test_a_peak_is_the_commands_own_and_a_long_error_stream_is_read() -> None:
    assert row_of("import sys; sys.stderr.write('x' * 200_000); print('text')")[-1] < 100


def test_the_last_token_is_not_the_end() -> None:
    first, last, end, _ = row_of("import time; print(1, flush=True); time.sleep(.5); print(2, flush=True); time.sleep(.5)")
    assert first + 0.1 < last
    assert last + 0.1 < end
