"""Builds the native engine with sanitizers into a temporary folder, and lets driver.cpp call it: `make test-native`.

Each level that this CPU has is run twice: with the address and undefined-behaviour sanitizers, and with the thread sanitizer.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from skipstone.models.engines.native import build, library

DRIVER = Path(__file__).with_name("driver.cpp")
COMMON = ("-std=c++20", "-g", "-O1", "-fno-omit-frame-pointer", "-pthread", "-Wall", "-Wextra")
SANITIZERS = {
    "address,undefined": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "thread": ("-fsanitize=thread",),
}
FIXED_ADDRESSES = ("setarch", "-R")  # the thread sanitizer of older compilers does not start where addresses are random


def main() -> int:
    """The number of runs that failed, as the exit status."""
    names = [level.name for level in build.levels() if level.features <= library.features()]
    if not names:
        print("this CPU has no level of the native engine")
        return 1
    failed = 0
    for sanitizer, flags in SANITIZERS.items():
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            driver = folder / "driver"
            subprocess.run([*build.compiler(), *COMMON, *flags, str(DRIVER), "-ldl", "-o", str(driver)], check=True)
            for name, built in zip(names, build.build(names, folder, [*COMMON, *flags]), strict=True):
                status = subprocess.run([*FIXED_ADDRESSES, str(driver), str(built), name]).returncode
                print(
                    f"{name}, sanitizers {sanitizer}: {'passed' if status == 0 else f'failed with status {status}'}", flush=True
                )
                failed += status != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
