"""Builds the native engine with sanitizers into a temporary folder, and lets driver.cpp call it: `make test-native`.

Each level that this CPU has is run twice over random models, passes and hostile values: with the address and undefined-behaviour
sanitizers, and with the thread sanitizer.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from skipstone.models.engines.native import build, library

DRIVER = Path(__file__).with_name("driver.cpp")
DEBUG = ("-g", "-O1", "-fno-omit-frame-pointer", "-Wall", "-Wextra")
SANITIZERS = {
    "address,undefined": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "thread": ("-fsanitize=thread",),
}
STOP = {name: "abort_on_error=1:halt_on_error=1" for name in ("ASAN_OPTIONS", "UBSAN_OPTIONS", "TSAN_OPTIONS")}
FIXED_ADDRESSES = ("setarch", "-R")  # the thread sanitizer of older compilers does not start where addresses are random
SEED = 1
SECONDS = 20  # of random cases, for every level and sanitizer


def main() -> int:
    """The number of runs that failed, as the exit status."""
    levels = [level for level in build.levels() if level.features <= library.features()]
    if not levels:
        print("this CPU has no level of the native engine")
        return 1
    return sum(fuzz(levels, sanitizer, flags) for sanitizer, flags in SANITIZERS.items())


def fuzz(levels: list[build.Level], sanitizer: str, flags: tuple[str, ...]) -> int:
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


def driver_for(level: build.Level, compiler: list[str], folder: Path, flags: tuple[str, ...] = ()) -> Path:
    """The driver, compiled for CPUs of a level."""
    driver = folder / f"driver-{level.name}"
    here = ("-std=c++20", "-pthread", *level.flags, *flags, f"-I{build.CSRC}")
    subprocess.run([*compiler, *here, str(DRIVER), "-ldl", "-o", str(driver)], check=True)
    return driver


if __name__ == "__main__":
    sys.exit(main())
