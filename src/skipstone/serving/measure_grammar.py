"""A process that compiles one llguidance grammar within SECONDS of processor time and BYTES of memory.

    python -P measure_grammar.py SECONDS BYTES < GRAMMAR

It prints how many bytes the grammar took, which llguidance does not report. It imports nothing else of the package, to start
fast. It does not check the grammar: it exits with 0 if compiling ends in time, else a signal ends it."""

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer

resource: Any = None
with suppress(ImportError):  # there is none on Windows, where only the caller's limit holds
    import resource

STATM = Path("/proc/self/statm")
"""Linux' file with the size of a process. Its second number is pages in memory."""

NICE = 5
"""Its niceness, so that texts are written first."""


def main() -> None:
    """Set the limits and compile stdin."""
    seconds, size = (int(one) for one in sys.argv[1:])
    if resource is not None:
        with suppress(OSError):  # a sandbox may forbid it
            os.nice(NICE)
        for kind, most in ((resource.RLIMIT_AS, size), (resource.RLIMIT_CPU, seconds)):
            with suppress(OSError, ValueError):  # the same; or the limit is lower already
                resource.setrlimit(kind, (most, most))
    tokenizer, grammar = LLTokenizer("byte"), sys.stdin.buffer.read().decode()
    before = resident_bytes()
    kept = LLMatcher(tokenizer, grammar, log_level=0)
    print(resident_bytes() - before)
    del kept


def resident_bytes() -> int:
    """Bytes of the process in memory; the maximum so far if the system does not report the present size, 0 if neither."""
    if STATM.exists():
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main()
