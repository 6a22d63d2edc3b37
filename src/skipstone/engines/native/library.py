"""Finds and loads the best native library for this CPU."""

import ctypes
import functools
import os
import platform
import sys
from pathlib import Path
from typing import NamedTuple

from skipstone.engines.native import build

ABI = 9  # sk_abi() of a compatible library
VARIABLE = "SKIPSTONE_NATIVE_LEVEL"  # environment variable that names a level instead of the best one
REINSTALL = "pip install --force-reinstall --no-deps --no-binary skipstone skipstone"
STALE = f"the native engine is stale, it was built from other sources: run `{build.COMMAND}`"


class LibrarySearchResult(NamedTuple):
    """A library, or one sentence about why there is none."""

    library: ctypes.CDLL | None
    missing: str | None


def load(level: str | None = None) -> ctypes.CDLL:
    """The native library of a level, by default of the best one or of the one that the environment names. Each is loaded once
    per process.

    RuntimeError with the sentence of `missing` if there is none. ValueError if the level is none of this CPU.
    """
    result = _search(level)
    if result.library is None:
        raise RuntimeError(result.missing)
    return result.library


def missing() -> str | None:
    """One sentence about why no native library can be used here; None if one can.

    ValueError if SKIPSTONE_NATIVE_LEVEL names no level of this CPU.
    """
    return _search().missing


def levels() -> list[str]:
    """The levels of this CPU with a library, the lowest first."""
    cpu = features()
    return [level.name for level in build.levels() if level.features <= cpu and _search(level.name).library is not None]


@functools.cache
def _search(level: str | None = None) -> LibrarySearchResult:
    return find(build.HERE, features(), level or os.environ.get(VARIABLE))


def features() -> frozenset[str]:
    """The feature flags of this CPU in /proc/cpuinfo; empty without that file."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return frozenset()
    named = (line.partition(":") for line in path.read_text(encoding="utf-8", errors="replace").splitlines())
    return next((frozenset(words.split()) for key, _, words in named if key.strip() in ("flags", "Features")), frozenset())


def find(folder: Path, cpu: frozenset[str], requested: str | None) -> LibrarySearchResult:
    """Find the library of the requested level, or of the best level for a CPU with these features.

    ValueError if no level has the requested name, or the CPU lacks one of its features.
    """
    features_of = {level.name: level.features for level in build.levels()}
    if not features_of:
        here = f"{sys.platform} on {platform.machine()}"
        reason = f"the native engine runs on Linux on {' and '.join(build.LEVELS)} only, and this is {here}"
        return LibrarySearchResult(None, reason)
    if requested and requested not in features_of:
        known = ", ".join(features_of)
        raise ValueError(f"{VARIABLE} is {requested!r}, and the levels of {platform.machine()} are {known}")
    able = [name for name, needed in features_of.items() if needed <= cpu and requested in (None, "", name)]
    if not able:
        name = requested or next(iter(features_of))
        lacking = ", ".join(sorted(features_of[name] - cpu))
        if requested:
            raise ValueError(f"{VARIABLE} is {requested!r}, and this CPU lacks {lacking}: unset it")
        return LibrarySearchResult(
            None, f"the native engine needs a CPU of level {name} at least, and this one lacks {lacking}"
        )
    for path in (folder / build.name_of(name) for name in reversed(able)):
        if path.exists():
            return _open(path)
    command = build.COMMAND if (folder / build.CSRC.name).is_dir() else REINSTALL
    reason = f"the native engine is not built: put a C++ compiler (g++ or clang++) on the PATH and run `{command}`"
    return LibrarySearchResult(None, reason)


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
