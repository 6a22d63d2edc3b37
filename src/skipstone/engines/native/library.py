"""Finds and loads the best native library for this CPU."""

import ctypes
import functools
import os
import platform
import sys
import threading
from pathlib import Path
from typing import NamedTuple

from skipstone.engines.native import build

ABI = 3  # sk_abi() of a compatible library
VARIABLE = "SKIPSTONE_NATIVE_LEVEL"  # environment variable that names a level instead of the best one
STALE = f"the native engine is stale, it was built from other sources: run `{build.COMMAND}`"
_LOCK = threading.Lock()
if hasattr(os, "register_at_fork"):  # another thread may hold it, and would not exist in the child to release it
    os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)


class LibrarySearchResult(NamedTuple):
    """A library, or one sentence about why there is none."""

    library: ctypes.CDLL | None
    missing: str | None


def load() -> ctypes.CDLL:
    """The native library, loaded once per process.

    RuntimeError with the sentence of `missing` if there is none. ValueError if SKIPSTONE_NATIVE_LEVEL names no level of this
    CPU.
    """
    result = _cached_search()
    if result.library is None:
        raise RuntimeError(result.missing)
    return result.library


def missing() -> str | None:
    """One sentence about why no native library can be used here; None if one can.

    ValueError if SKIPSTONE_NATIVE_LEVEL names no level of this CPU.
    """
    return _cached_search().missing


def features() -> frozenset[str]:
    """The feature flags of this CPU in /proc/cpuinfo; empty without that file."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return frozenset()
    named = (line.partition(":") for line in path.read_text(encoding="utf-8", errors="replace").splitlines())
    return next((frozenset(words.split()) for key, _, words in named if key.strip() in ("flags", "Features")), frozenset())


def find(folder: Path, cpu: frozenset[str], wanted: str | None) -> LibrarySearchResult:
    """Find the library of the level `wanted`, or of the best level for a CPU with these features.

    ValueError if no level is named `wanted`, or the CPU lacks one of its features.
    """
    levels = build.levels()
    if not levels:
        here = f"{sys.platform} on {platform.machine()}"
        reason = f"the native engine runs on Linux on {' and '.join(build.LEVELS)} only, and this is {here}"
        return LibrarySearchResult(None, reason)
    if wanted:
        levels = (_named(wanted, cpu),)
    able = [level.name for level in reversed(levels) if level.features <= cpu]
    if not able:
        lacking = ", ".join(sorted(levels[0].features - cpu))
        reason = f"the native engine needs a CPU of level {levels[0].name} at least, and this one lacks {lacking}"
        return LibrarySearchResult(None, reason)
    path = next((path for path in (folder / build.name_of(name) for name in able) if path.exists()), None)
    return LibrarySearchResult(None, _not_built(folder)) if path is None else _open(path)


@functools.cache
def _search() -> LibrarySearchResult:
    return find(build.HERE, features(), os.environ.get(VARIABLE))


def _cached_search() -> LibrarySearchResult:
    with _LOCK:
        return _search()


def _named(wanted: str, cpu: frozenset[str]) -> build.CpuLevel:
    known = {level.name: level for level in build.levels()}
    if wanted not in known:
        raise ValueError(f"{VARIABLE} is {wanted!r}, and the levels of {platform.machine()} are {', '.join(known)}")
    if lacking := known[wanted].features - cpu:
        raise ValueError(f"{VARIABLE} is {wanted!r}, and this CPU lacks {', '.join(sorted(lacking))}: unset it")
    return known[wanted]


def _open(path: Path) -> LibrarySearchResult:
    """Load a library and check that it was built from the current sources."""
    try:
        library = ctypes.CDLL(str(path))
        library.sk_level.restype = ctypes.c_char_p
        library.sk_source_hash.restype = ctypes.c_char_p
    except OSError as error:
        return LibrarySearchResult(None, f"the native engine cannot be loaded: {error}")
    except AttributeError:  # too old to have these functions
        return LibrarySearchResult(None, STALE)
    csrc = path.parent / build.CSRC.name
    if library.sk_abi() != ABI or (csrc.is_dir() and library.sk_source_hash().decode() != build.source_hash(csrc)):
        return LibrarySearchResult(None, STALE)
    return LibrarySearchResult(library, None)


def _not_built(folder: Path) -> str:
    if (folder / build.CSRC.name).is_dir():
        return f"the native engine is not built: put a C++ compiler (g++ or clang++) on the PATH and run `{build.COMMAND}`"
    again = "pip install --force-reinstall --no-deps --no-binary skipstone skipstone"
    return f"the native engine is not built: put a C++ compiler (g++ or clang++) on the PATH and run `{again}`"
