"""The recipe that measures how long a user waits."""

import shlex
import subprocess
import sys
from pathlib import Path

RECIPE = Path(__file__).parents[2] / "recipes" / "measure" / "start.py"


def test_a_peak_is_the_commands_own_and_a_long_error_stream_is_read() -> None:
    peer = shlex.join([sys.executable, "-c", "import sys; sys.stderr.write('x' * 200_000); print('text')"])
    command = [sys.executable, str(RECIPE), "--models", "--runs", "1", "--peer", peer]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    (row,) = (line for line in done.stdout.splitlines() if line.startswith(f"| {Path(sys.executable).name} |"))
    assert float(row.split(" | ")[-1].strip(" |")) < 100
