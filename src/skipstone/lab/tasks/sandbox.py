"""Model code, executed: in processes of its own with limits on everything, and nothing that it can reach (sandboxed.py).

Only `--allow-code-execution` comes here. It is a fence against accidents of generated code, not against an attacker.
"""

import json
import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired

INSIDE = Path(__file__).with_name("sandboxed.py")
KILLS = 500  # how often the process group is killed again, a hundredth of a second apart, until nothing of it is left
GRACE = 5.0  # seconds for the sandbox itself, beyond the program's


@dataclass(frozen=True)
class SandboxLimits:
    """What a program may use."""

    seconds: float = 10.0  # of wall-clock
    memory_mb: int = 512  # address space of each process
    disk_mb: int = 4  # of each file, and of all files where the system allows a file system of its own
    processes: int = 16  # at once
    namespaces: bool = True  # whether the system is asked for namespaces of the program's own


USUAL = SandboxLimits()


@dataclass(frozen=True)
class SandboxOutcome:
    """What became of a program."""

    passed: bool
    reason: str  # "passed", the exception, or which limit ended it
    isolated: bool  # it had namespaces of its own (no network, a file system of its own), and not limits alone


def run(program: str, limits: SandboxLimits = USUAL) -> SandboxOutcome:
    """Execute a Python program. It passes when it runs to its last line; `sys.exit` before that is no pass. OSError where the
    sandbox itself does not work.

    Its streams are closed, its environment is empty, its folder is a new one that is gone afterwards.
    """
    with tempfile.TemporaryDirectory(prefix="skipstone-", ignore_cleanup_errors=True) as folder:
        command = [sys.executable, "-I", str(INSIDE), folder, json.dumps(asdict(limits))]
        process = Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, cwd=folder, env={}, start_new_session=True)
        try:
            told, _ = process.communicate(program.encode(errors="replace"), timeout=limits.seconds + GRACE)
        except TimeoutExpired:
            return SandboxOutcome(False, f"more than {limits.seconds:g} seconds", False)
        finally:
            _end(process)
    try:
        verdict = json.loads(told)
    except ValueError as error:
        raise OSError(f"the sandbox does not work here: it ended with {process.returncode} and said {told!r:.80}") from error
    return SandboxOutcome(verdict["reason"] == "passed", verdict["reason"], verdict["isolated"])


def _end(process: Popen[bytes]) -> None:
    """Kill the process group, and wait until nothing of it is left."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for _ in range(KILLS):
            os.killpg(process.pid, signal.SIGKILL)  # what was being forked meanwhile, and what has not died yet
            time.sleep(0.01)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
