"""The inside of the sandbox: `python -I sandboxed.py FOLDER LIMITS`, the program on stdin, one JSON line of verdict on stdout.

It uses the standard library only, because the interpreter is isolated. On Linux, if the system allows it, the program gets its
own namespaces: all file systems are read-only except its own empty one, there is no network, and other processes are invisible.
Everywhere it gets resource limits and a supervisor that kills all of its processes.
"""

import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
from typing import Any, NoReturn

# CLONE_NEWUSER, CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWNET, CLONE_NEWPID
NAMESPACES = 0x10000000 | 0x00020000 | 0x08000000 | 0x40000000 | 0x20000000  # unshare(2): user, mounts, IPC, network, PIDs
MOUNT_SETATTR = 442  # number of the system call
AT_FDCWD = -100  # paths are relative to the working directory
AT_RECURSIVE = 0x8000  # all mounts below, too
READ_ONLY = 1  # MOUNT_ATTR_RDONLY
PRIVATE = 1 << 18  # MS_PRIVATE: mounts are not passed on to other namespaces
DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)
POLL = 0.05  # seconds between two checks of the program
MEBIBYTE = 1 << 20  # bytes


class MountAttributes(ctypes.Structure):
    """struct mount_attr of mount_setattr(2)."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]


def isolate(folder: str, limits: dict[str, Any]) -> bool:
    """Enter new namespaces. False if this system does not allow it; the limits hold in any case."""
    if not sys.platform.startswith("linux"):
        return False
    libc, uid, gid = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
    if libc.unshare(NAMESPACES):
        return False
    try:
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    except OSError:
        return False
    closed = MountAttributes(READ_ONLY, 0, PRIVATE, 0)
    size = f"size={limits['disk_mb']}m".encode()
    failed = libc.syscall(MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, ctypes.byref(closed), ctypes.sizeof(closed))
    return not (failed or libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, size))


def limit(limits: dict[str, Any]) -> None:
    """Set the resource limits. Child processes inherit them."""
    memory, file, seconds = limits["memory_mb"] * MEBIBYTE, limits["disk_mb"] * MEBIBYTE, int(limits["seconds"]) + 1
    wanted = {"CPU": seconds, "AS": memory, "FSIZE": file, "NPROC": limits["processes"], "NOFILE": 64, "CORE": 0}
    for name, value in wanted.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def execute(program: str, folder: str, limits: dict[str, Any], said: int) -> NoReturn:
    """Run the program in this process. Writes its result to the pipe `said`, or nothing if it exits early."""
    own, nothing = os.getpid(), os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    os.chdir(folder)
    os.nice(19)  # a fork bomb must not starve its supervisor
    try:
        limit(limits)
        exec(compile(program, "program", "exec"), {"__name__": "__main__"})
        verdict = "passed"
    except BaseException as error:
        verdict = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if os.getpid() == own:  # a child of the program's has nothing to say
        os.write(said, verdict.encode(errors="replace")[:400])
    os._exit(0)


def supervise(program: str, folder: str, limits: dict[str, Any], isolated: bool) -> str:
    """Run the program. Kill it and its children when it ends, takes too long or has too many processes. Returns the reason."""
    heard, said = os.pipe()
    child = os.fork()
    if not child:
        os.close(heard)
        execute(program, folder, limits, said)
    os.close(said)
    end, reason = time.monotonic() + limits["seconds"], "left early, without an error"
    while not reason.startswith("more than"):
        ready, _, _ = select.select([heard], [], [], POLL)
        if ready:
            reason = os.read(heard, 400).decode(errors="replace") or reason
            break
        if time.monotonic() > end:
            reason = f"more than {limits['seconds']:g} seconds"
        elif len(started(isolated)) > limits["processes"]:
            reason = f"more than {limits['processes']} processes"
    kill(child, isolated)
    _, status = os.waitpid(child, 0)
    if reason.startswith("left early") and os.WIFSIGNALED(status):
        reason = f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return reason


def started(isolated: bool) -> list[int]:
    """The program's processes: all others of the namespace, or all descendants. Empty without /proc."""
    own = os.getpid()
    names = [int(name) for name in os.listdir("/proc") if name.isdigit()] if os.path.isdir("/proc/self") else []
    if isolated:
        return [name for name in names if name != own]
    parents = {}
    for name in names:
        try:
            with open(f"/proc/{name}/stat", "rb") as file:  # pid (name) state parent ...
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except OSError:
            continue
        if state != b"Z":
            parents[name] = int(parent)
    found: list[int] = []
    above = {own}
    while above := {name for name, parent in parents.items() if parent in above}:
        found += above
    return found


def kill(child: int, isolated: bool) -> None:
    """Kill all processes of the program."""
    for _ in range(100):
        for process in {-1} if isolated else {child, *started(False)}:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if isolated or not started(False):
            return


def main() -> None:
    """Isolate and supervise the program, and print the verdict."""
    folder, limits = sys.argv[1], json.loads(sys.argv[2])
    program = sys.stdin.read()
    isolated = limits["namespaces"] and isolate(folder, limits)
    libc = ctypes.CDLL(None, use_errno=True)
    if sys.platform.startswith("linux"):
        libc.prctl(SUBREAPER, 1)  # orphans become our children, so that they are found
    if isolated:
        first = os.fork()  # the first process of the namespace: when it ends, the kernel ends all others there
        if first:
            os._exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]))
        libc.prctl(DEATH_SIGNAL, signal.SIGKILL)
        isolated = libc.mount(b"proc", b"/proc", b"proc", 0, None) == 0  # so that /proc shows this namespace only
    print(json.dumps({"reason": supervise(program, folder, limits, isolated), "isolated": isolated}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
