"""Compiles the native engine's C++ into one shared library per level of the instruction set.

`python -m skipstone.engines.native.build` builds in place, which is needed after the C++ has changed. setup.py loads
this file by its path in an environment without torch and numpy: it imports the standard library only, and nothing of skipstone.
"""

import argparse
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
CSRC = HERE / "csrc"
SOURCE = "engine.cpp"  # the only translation unit; it includes the headers
COMPILERS = ("c++", "g++", "clang++")  # searched in this order if $CXX is not set
COMMAND = "python -m skipstone.engines.native.build"
FLAGS = (
    *("-std=c++20", "-O3", "-ffp-contract=off", "-fno-math-errno"),
    *("-fPIC", "-shared", "-pthread", "-fvisibility=hidden"),
)


class CpuLevel(NamedTuple):
    """One level of an instruction set. features: flags in /proc/cpuinfo that it needs."""

    name: str
    flags: tuple[str, ...]
    features: frozenset[str]


_V3 = frozenset({"avx2", "fma", "bmi1", "bmi2", "f16c", "abm", "movbe"})  # abm is the kernel's word for lzcnt
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"}
_FLAGS_V4 = ("-march=x86-64-v4", "-mavx512vnni", "-mprefer-vector-width=512")
LEVELS: dict[str, tuple[CpuLevel, ...]] = {  # by platform.machine(), the lowest level first
    "x86_64": (
        CpuLevel("x86-64-v3", ("-march=x86-64-v3",), _V3),
        CpuLevel("x86-64-v4", _FLAGS_V4, _V4),
        CpuLevel("x86-64-v4-bf16", (*_FLAGS_V4, "-mavx512bf16"), _V4 | {"avx512_bf16"}),
    ),
    "aarch64": (
        CpuLevel("aarch64-neon", ("-march=armv8-a",), frozenset({"asimd"})),
        CpuLevel("aarch64-dotprod", ("-march=armv8.2-a+dotprod+fp16",), frozenset({"asimd", "asimddp", "asimdhp", "fphp"})),
    ),
}


class BuildError(RuntimeError):
    """No compiler was found, or it failed. The text is one sentence, then the compiler's output if it ran."""


def levels() -> tuple[CpuLevel, ...]:
    """The levels of this machine's architecture, the lowest first; empty if the native engine does not support it."""
    return LEVELS.get(platform.machine(), ()) if sys.platform == "linux" else ()


def name_of(level: str) -> str:
    """The file name of the library of a level."""
    return f"skipstone_native-{level}.so"


def source_hash(csrc: Path = CSRC) -> str:
    """A hash of the sources of a library: every .h and .cpp file of a folder, and the compiler flags."""
    digest = hashlib.sha256(repr((FLAGS, [(one.name, one.flags) for some in LEVELS.values() for one in some])).encode())
    for path in sorted(path for path in csrc.iterdir() if path.suffix in (".h", ".cpp")):
        text = path.read_bytes()
        digest.update(f"\0{path.name}\0{len(text)}\0".encode() + text)
    return digest.hexdigest()[:16]


def compiler() -> list[str]:
    """The command of the C++ compiler: $CXX if set, else the first of COMPILERS on the PATH. BuildError without one."""
    chosen = shlex.split(os.environ.get("CXX", "")) or [*filter(shutil.which, COMPILERS)][:1]
    if not chosen:
        raise BuildError(f"there is no C++ compiler: $CXX is not set, and none of {', '.join(COMPILERS)} is on the PATH")
    if shutil.which(chosen[0]) is None:
        raise BuildError(f"there is no C++ compiler: $CXX is {shlex.join(chosen)!r}, and {chosen[0]!r} is not on the PATH")
    return chosen


def stale(names: Sequence[str], folder: Path, csrc: Path = CSRC) -> list[str]:
    """The levels without a library in the folder, or with one that was built from other sources."""
    source = source_hash(csrc).encode()
    paths = {name: folder / name_of(name) for name in names}
    return [name for name, path in paths.items() if not path.exists() or source not in path.read_bytes()]


def build(
    names: Sequence[str],
    out_folder: Path,
    extra_flags: Sequence[str] = (),
    csrc: Path = CSRC,
    command: Sequence[str] | None = None,
) -> list[Path]:
    """Compile the libraries of these levels into a folder, and return their paths.

    extra_flags come last on the command line, so they win over FLAGS. command: another compiler than `compiler` finds, as for
    another architecture. A library is replaced in one step: a process that has the old one open keeps it. BuildError if there
    is no compiler, or if it fails for a level. The other levels are still built, and the failed level's old library is removed.
    """
    command = command or compiler()
    by_name = {one.name: one for some in LEVELS.values() for one in some}
    out_folder.mkdir(parents=True, exist_ok=True)
    built: list[Path] = []
    failed: dict[str, str] = {}
    for name in names:
        target = out_folder / name_of(name)
        unfinished = target.with_name(f".{target.name}.{os.getpid()}")
        defines = (f'-DSK_LEVEL="{name}"', f'-DSK_SOURCE_HASH="{source_hash(csrc)}"')
        flags = [*FLAGS, *by_name[name].flags, *defines, *extra_flags]
        run = subprocess.run([*command, *flags, str(csrc / SOURCE), "-o", str(unfinished)], capture_output=True, text=True)
        if run.returncode == 0:
            unfinished.replace(target)
            built.append(target)
        else:
            failed[name] = run.stderr.strip()
            unfinished.unlink(missing_ok=True)
            target.unlink(missing_ok=True)
    if failed:
        raise BuildError(f"{shlex.join(command)} failed for {' and '.join(failed)}\n" + "\n".join(failed.values()))
    return built


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status: 1 if a requested library was not built."""
    known = [one.name for one in levels()]
    parser = argparse.ArgumentParser(prog=COMMAND, description="Compile skipstone's native engine.")
    parser.add_argument("--level", action="append", choices=known, help="build this level only; may be given several times")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the libraries; default: next to library.py")
    parser.add_argument("--flags", default="", help='more compiler flags, as in --flags="-g -fsanitize=address"')
    parser.add_argument("--if-stale", action="store_true", help="keep libraries of the current sources")
    options = parser.parse_args(arguments)
    names = options.level or known
    if not names:
        print(f"the native engine is not built: it runs on Linux on {' and '.join(LEVELS)} only", file=sys.stderr)
        return 1
    try:
        for path in build(stale(names, options.out) if options.if_stale else names, options.out, shlex.split(options.flags)):
            print(path)
    except BuildError as error:
        print(f"the native engine is not built: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
