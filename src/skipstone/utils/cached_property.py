"""`functools.cached_property` without the lock that Python 3.12 removed.

Python 3.11 has one lock per property for all instances. A process that is forked while another thread holds the lock
waits forever.
Pydantic's models accept only the property of functools.
"""

import functools
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property as cached_property
else:

    class cached_property(functools.cached_property):
        """Computed at first use. Two threads that use it first at the same time both compute it."""

        def __init__(self, func: Any) -> None:
            super().__init__(func)
            self.lock = nullcontext()
