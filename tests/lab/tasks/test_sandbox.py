"""What generated code can do: nothing that outlives it, nothing beyond its limits; and what counts as passed."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from skipstone.lab.tasks import sandbox
from skipstone.lab.tasks.sandbox import SandboxLimits, run

pytestmark = pytest.mark.slow

MARK = f"mark-{os.getpid()}"  # at most 15 letters; another one for every worker of pytest
NAMED = f"import ctypes, os\nctypes.CDLL(None).prctl(15, b'{MARK}')\n"


@pytest.fixture(params=[True, False], ids=["namespaces", "limits"])
def limits(request: pytest.FixtureRequest) -> SandboxLimits:
    if request.param and not run("pass").isolated:
        pytest.skip("this system allows no namespaces")
    return SandboxLimits(seconds=20, memory_mb=256, disk_mb=1, processes=8, namespaces=request.param)


NAMESPACES = pytest.mark.parametrize(
    "limits", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["namespaces", "limits"], indirect=True
)


@pytest.fixture
def short(limits: SandboxLimits) -> SandboxLimits:
    return replace(limits, seconds=1.0)


def marked() -> int:
    count = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            count += (folder / "comm").read_text().strip() == MARK and ") Z " not in (folder / "stat").read_text()
        except OSError:
            continue
    return count


def test_marked_processes_are_found() -> None:
    """The search that the tests rest on."""
    child = subprocess.Popen([sys.executable, "-c", NAMED + "print(1, flush=True)\ninput()"], stdin=-1, stdout=-1)
    assert child.stdout is not None
    child.stdout.readline()
    assert marked() == 1
    child.communicate(b"\n")
    assert marked() == 0


@pytest.mark.parametrize(
    ("program", "passed", "reason"),
    [
        ("def f(n):\n    return n if n < 2 else f(n - 1) + f(n - 2)\nassert f(15) == 610", True, "passed"),
        ("import math, random, collections, re, heapq, itertools\nassert math.gcd(4, 6) == 2", True, "passed"),
        ("if __name__ == '__main__':\n    raise KeyError('main')", False, "KeyError: 'main'"),
        ("assert 1 == 2, 'one'", False, "AssertionError: one"),
        ("def f(:", False, "SyntaxError"),
        ("import sys\nsys.exit(0)", False, "SystemExit: 0"),
        ("import os\nos._exit(0)", False, "left early"),
        ("print('passed')\nassert False", False, "AssertionError"),
        ("import ctypes\nctypes.string_at(0)", False, "killed by SIGSEGV"),
        ("'\\ud800'", True, "passed"),
    ],
)
def test_a_program_passes_when_it_runs_to_its_last_line(program: str, passed: bool, reason: str, limits: SandboxLimits) -> None:
    outcome = run(program, limits)
    assert (outcome.passed, outcome.reason.startswith(reason)) == (passed, True), outcome


def assert_ended(program: str, reason: str, limits: SandboxLimits) -> None:
    start = time.monotonic()
    outcome = run(NAMED + program, limits)
    assert not outcome.passed
    assert reason in outcome.reason, outcome
    assert time.monotonic() - start < 60, "a fork bomb starves its supervisor for a while, but not for good"
    assert marked() == 0


@NAMESPACES
def test_an_endless_loop_and_one_that_ignores_sigterm_are_killed(short: SandboxLimits) -> None:
    assert_ended("while True: pass", "more than 1 seconds", short)
    deaf = (
        "import signal, time\nfor s in (signal.SIGTERM, signal.SIGINT, signal.SIGXCPU):\n    signal.signal(s, signal.SIG_IGN)\n"
    )
    assert_ended(deaf + "while True:\n    try: time.sleep(9)\n    except BaseException: pass", "more than 1 seconds", short)


@NAMESPACES
def test_a_fork_bomb_is_put_out(short: SandboxLimits) -> None:
    assert_ended("while True:\n    try: os.fork()\n    except OSError: pass", "more than", short)


@NAMESPACES
def test_a_child_that_reaches_the_last_line_does_not_pass_for_its_parent(limits: SandboxLimits) -> None:
    assert run("import os\nif os.fork(): assert False, 'the parent'", limits).reason == "AssertionError: the parent"


@NAMESPACES
def test_what_a_program_leaves_behind_dies_with_it(limits: SandboxLimits) -> None:
    assert run(NAMED + "import time\nif not os.fork(): time.sleep(60)", limits).passed
    assert marked() == 0
    away = "import time\nif not os.fork():\n    os.setsid()\n    if not os.fork(): time.sleep(60)\n    time.sleep(60)"
    assert run(NAMED + away, limits).passed
    assert marked() == 0


def test_memory_is_limited(limits: SandboxLimits) -> None:
    assert_ended("x = bytearray(300 << 20)", "MemoryError", limits)
    assert run("x = bytearray(100 << 20)", limits).passed


def test_files_are_limited_and_gone(limits: SandboxLimits, tmp_path: Path) -> None:
    assert_ended("with open('big', 'wb') as f:\n    while True: f.write(bytes(1 << 16))", "OSError", limits)
    assert run("open('small', 'w').write('x')\nassert open('small').read() == 'x'", limits).passed
    outcome = run(f"open({str(tmp_path / 'escaped')!r}, 'w').write('x')", limits)
    assert outcome.isolated is limits.namespaces
    assert outcome.passed is not outcome.isolated
    assert (tmp_path / "escaped").exists() is not outcome.isolated
    many = "n = 0\nwhile True:\n    open(f'{n}', 'wb').write(bytes(1 << 18))\n    n += 1"
    if outcome.isolated:
        assert_ended(many, "OSError", limits)


def test_nothing_of_the_machine_is_seen(limits: SandboxLimits) -> None:
    alone = "import os\nassert set(os.environ) <= {'LC_CTYPE'}, dict(os.environ)\nassert os.listdir('.') == []"
    assert run(alone, limits).passed
    clean = "import sys\nassert not any('skipstone' in name for name in sys.modules)\nassert '' not in sys.path"
    assert run(clean, limits).passed
    assert run(f"import os\nos.kill({os.getpid()}, 0)", limits).passed is not limits.namespaces
    network = run("import socket\nsocket.create_connection(('127.0.0.1', 9), 1)", limits)
    assert ("unreachable" if limits.namespaces else "refused") in network.reason, "inside, not even the loopback is there"


def test_a_sandbox_that_does_not_answer_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stuck = tmp_path / "stuck.py"
    stuck.write_text("import time\ntime.sleep(60)")
    monkeypatch.setattr(sandbox, "INSIDE", stuck)
    monkeypatch.setattr(sandbox, "GRACE", 0.1)
    assert run("pass", SandboxLimits(seconds=0.3)) == sandbox.SandboxOutcome(False, "more than 0.3 seconds", False)
    stuck.write_text("import sys\nsys.exit(3)")
    with pytest.raises(OSError, match="the sandbox does not work here: it ended with 3"):
        run("pass", SandboxLimits(seconds=5))
