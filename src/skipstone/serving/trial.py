"""A process of its own that compiles one grammar of llguidance's, within SECONDS of a processor and BYTES of memory.

    python -P trial.py SECONDS BYTES < GRAMMAR

It knows nothing of the rest of the package, which would have to be loaded. Whether the grammar is right is not its business: it
ends with 0 where that is found out in time, and is ended by a signal else.
"""

import os
import sys
from contextlib import suppress

from llguidance import LLMatcher

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
    LLMatcher.validate_grammar(sys.stdin.buffer.read().decode())


if __name__ == "__main__":
    main()
