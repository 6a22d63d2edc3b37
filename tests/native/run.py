"""Builds the native engine into a temporary folder and lets driver.cpp call it: `make test-native`.

Each level that this CPU has runs over random models, passes and hostile values under two sets of sanitizers. Then hashes of the
levels' results must be the same, those of aarch64 too (on Debian: g++-aarch64-linux-gnu and qemu-user).
"""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from skipstone.engines.native import build, library

DRIVER = Path(__file__).with_name("driver.cpp")
DEBUG = ("-g", "-O1", "-fno-omit-frame-pointer", "-Wall", "-Wextra")
SANITIZERS = {
    "address,undefined": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "thread": ("-fsanitize=thread",),
}
STOP = dict.fromkeys(("ASAN_OPTIONS", "UBSAN_OPTIONS", "TSAN_OPTIONS"), "abort_on_error=1:halt_on_error=1")
FIXED_ADDRESSES = ("setarch", "-R")  # the thread sanitizer of older compilers does not start where addresses are random
SEED = 1
SECONDS = 20  # of random cases, for every level and sanitizer
HASHED = 1000  # random cases whose results are compared between levels
ARM = "aarch64"
CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")


def main() -> int:
    """The number of runs that failed, as the exit status."""
    levels = [level for level in build.levels() if level.features <= library.features()]
    if not levels:
        print("this CPU has no level of the native engine")
        return 1
    return sum(fuzz(levels, sanitizer, flags) for sanitizer, flags in SANITIZERS.items()) + compare(levels)


def fuzz(levels: list[build.CpuLevel], sanitizer: str, flags: tuple[str, ...]) -> int:
    """Random cases under one sanitizer. Returns the number of levels that failed."""
    failed = 0
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        driver = driver_for(levels[0], build.compiler(), folder, (*DEBUG, *flags))
        names = [level.name for level in levels]
        for name, built in zip(names, build.build(names, folder, [*DEBUG, *flags]), strict=True):
            command = [*FIXED_ADDRESSES, str(driver), str(built), name, "fuzz", str(SEED), str(SECONDS)]
            run = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ | STOP)
            became = f"passed, {run.stdout.strip()}" if run.returncode == 0 else f"failed with status {run.returncode}"
            print(f"{name}, sanitizers {sanitizer}: {became}", flush=True)
            failed += run.returncode != 0
    return failed


def compare(levels: list[build.CpuLevel]) -> int:
    """Whether all levels that can be run here give the same bits. Returns the number of those that do not, or fail."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        found = {level.name: hashed(level, build.compiler(), (), folder) for level in levels}
        if platform.machine() == ARM:
            emulated = {}
        elif lacking := [tool for tool in (CROSS_COMPILER, EMULATOR[0]) if shutil.which(tool) is None]:
            print(f"{ARM} is not tested: {' and '.join(lacking)} not on the PATH")
            emulated = {}
        else:
            emulated = {level.name: hashed(level, [CROSS_COMPILER], EMULATOR, folder) for level in build.LEVELS[ARM]}
    expected, failed = found[levels[0].name], 0
    for name, one in (found | emulated).items():
        same = one == expected and bool(one)
        failed += not same
        became = f"the same bits as {levels[0].name}" if same else f"found {one or 'nothing'}, expected {expected}"
        print(f"{name}{' under an emulator' if name in emulated else ''}, {HASHED} cases: {became}", flush=True)
    return failed


def hashed(level: build.CpuLevel, compiler: list[str], emulator: tuple[str, ...], folder: Path) -> str:
    """What the driver prints for a level; nothing where it fails."""
    driver = driver_for(level, compiler, folder, ("-O2",))
    (built,) = build.build([level.name], folder, command=compiler)
    command = [*emulator, str(driver), str(built), level.name, "hash", str(HASHED)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout.strip()


def driver_for(level: build.CpuLevel, compiler: list[str], folder: Path, flags: tuple[str, ...] = ()) -> Path:
    """The driver, compiled for CPUs of a level."""
    driver = folder / f"driver-{level.name}"
    here = ("-std=c++20", "-pthread", *level.flags, *flags, f"-I{build.CSRC}")
    subprocess.run([*compiler, *here, str(DRIVER), "-ldl", "-o", str(driver)], check=True)
    return driver


if __name__ == "__main__":
    sys.exit(main())
