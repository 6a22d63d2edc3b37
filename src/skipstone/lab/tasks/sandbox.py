"""Runs a model's code in processes of its own, with limits on everything and no access to the machine (sandboxed.py).

Only `--allow-code-execution` uses it. It protects against accidents of generated code, not against an attacker.
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
MAX_KILLS = 500  # attempts to kill the process group, a hundredth of a second apart
GRACE = 5.0  # seconds for the sandbox itself, beyond the program's


@dataclass(frozen=True)
class SandboxLimits:
    """Resources that a program may use."""

    seconds: float = 10.0  # of wall-clock
    memory_mb: int = 512  # address space of each process
    disk_mb: int = 4  # of each file, and of all files where the system allows a file system of its own
    processes: int = 16  # at once
    namespaces: bool = True  # run in separate namespaces if the system allows it


USUAL = SandboxLimits()


@dataclass(frozen=True)
class SandboxOutcome:
    """The result of a program."""

    passed: bool
    reason: str  # "passed", the exception, or the limit that ended it
    isolated: bool  # it had its own namespaces (no network, its own file system), and not limits alone


def run(program: str, limits: SandboxLimits = USUAL) -> SandboxOutcome:
    """Execute a Python program. It passes if it runs to its last line; `sys.exit` before that is no pass.

    Its streams are closed, its environment is empty, its folder is new and deleted afterwards. OSError if the sandbox itself
    does not work.
    """
    with tempfile.TemporaryDirectory(prefix="skipstone-", ignore_cleanup_errors=True) as folder:
        command = [sys.executable, "-I", str(INSIDE), folder, json.dumps(asdict(limits))]
        process = Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, cwd=folder, env={}, start_new_session=True)
        try:
            output, _ = process.communicate(program.encode(errors="replace"), timeout=limits.seconds + GRACE)
        except TimeoutExpired:
            return SandboxOutcome(False, f"more than {limits.seconds:g} seconds", False)
        finally:
            _end(process)
    try:
        verdict = json.loads(output)
    except ValueError as error:
        raise OSError(f"the sandbox does not work here: it ended with {process.returncode} and said {output!r:.80}") from error
    return SandboxOutcome(verdict["reason"] == "passed", verdict["reason"], verdict["isolated"])


def _end(process: Popen[bytes]) -> None:
    """Kill the process group, and wait until it is empty."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for _ in range(MAX_KILLS):
            os.killpg(process.pid, signal.SIGKILL)  # processes that were being forked, or have not died yet
            time.sleep(0.01)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
