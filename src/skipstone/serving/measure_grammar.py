"""A process of its own that compiles one grammar of llguidance's, within SECONDS of a processor and BYTES of memory.

    python -P trial.py SECONDS BYTES < GRAMMAR

It writes how many bytes of memory that took, which llguidance does not say. It knows nothing of the rest of the package, which
would have to be loaded. Whether the grammar is right is not its business: it ends with 0 if that is found out in time, and is
ended by a signal else.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

STATM = Path("/proc/self/statm")
"""Where Linux says how many pages a process has in memory, second of all numbers."""

NICE = 5
"""How much less of the processors it gets than who writes texts."""


def main() -> None:
    """Compile what stdin has, after the limits are set."""
    seconds, size = (int(one) for one in sys.argv[1:])
    try:
        import resource
    except ImportError:  # there is none on Windows, where only the caller's limit holds
        pass
    else:
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
    """What the process has in memory; at most so far if the system does not say how much it is now, 0 if it says neither."""
    if STATM.exists():
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main()
