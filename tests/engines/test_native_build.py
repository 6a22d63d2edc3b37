"""The native engine's build and loader: what is compiled, what is found, and what is said where there is nothing to find."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from skipstone.engines.native import build, library

ROOT = Path(__file__).parents[2]
NATIVE = "skipstone/engines/native"
STAND_IN = """
#define SK_EXPORT extern "C" __attribute__((visibility("default")))
SK_EXPORT int sk_abi() { return ABI_OF_THE_TEST; }
SK_EXPORT const char* sk_level() { return SK_LEVEL; }
SK_EXPORT const char* sk_source_hash() { return SK_SOURCE_HASH; }
"""


def has_compiler() -> bool:
    """Whether libraries can be built here."""
    try:
        build.compiler()
    except build.BuildError:
        return False
    return True


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="there is no C++ compiler")
needs_levels = pytest.mark.skipif(not build.levels(), reason="the native engine does not run on this system")
pytestmark = needs_levels
NAMES = [level.name for level in build.levels()]
ALL = frozenset().union(*(level.features for level in build.levels()))  # of a CPU that has every level
OWN = [level.name for level in build.levels() if level.features <= library.features()]  # the levels that can run here


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the sources of a small engine, as they lie beside library.py."""
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / build.SOURCE).write_text(STAND_IN.replace("ABI_OF_THE_TEST", str(library.ABI)))
    return tmp_path


def built(folder: Path, *names: str) -> list[Path]:
    """Build the folder's sources beside them."""
    return build.build(names, folder, ["-O0"], csrc=folder / "csrc")


def found(folder: Path, wanted: str | None = None) -> library.LibrarySearchResult:
    """What this machine's CPU finds in a folder."""
    return library.find(folder, library.features(), wanted)


@needs_compiler
@pytest.mark.skipif(not OWN, reason="this CPU has no level")
def test_the_best_built_level_of_the_cpu_is_loaded(folder: Path) -> None:
    assert [path.name for path in built(folder, *NAMES)] == [build.name_of(name) for name in NAMES]
    loaded, missing = found(folder)
    assert missing is None
    assert loaded is not None
    assert loaded.sk_level() == OWN[-1].encode()
    assert library.find(folder, library.features() & build.levels()[0].features, None).library is not None
    for name in OWN:
        asked = found(folder, name).library
        assert asked is not None
        assert asked.sk_level() == name.encode()


@needs_compiler
@pytest.mark.skipif(not OWN, reason="this CPU has no level")
@pytest.mark.parametrize("change", ["source", "header", "abi", "no function"])
def test_a_library_of_other_sources_is_stale(folder: Path, change: str) -> None:
    source = folder / "csrc" / build.SOURCE
    if change == "abi":
        source.write_text(STAND_IN.replace("ABI_OF_THE_TEST", str(library.ABI + 1)))
    if change == "no function":
        source.write_text("")
    built(folder, OWN[0])
    if change == "source":
        source.write_text(source.read_text() + "\n")
    if change == "header":
        (folder / "csrc" / "more.h").write_text("")
    assert found(folder) == library.LibrarySearchResult(None, library.STALE)
    if change in ("source", "header"):
        assert build.stale(NAMES, folder, folder / "csrc") == NAMES
        built(folder, OWN[0])
        assert build.stale([OWN[0]], folder, folder / "csrc") == []
        # By its old path this process would get the library that it has loaded.
        again = folder.rename(folder.with_name(f"{folder.name}-again"))
        assert found(again).missing is None


def test_what_is_not_built_is_said_with_the_command_that_builds_it(folder: Path) -> None:
    missing = library.find(folder, ALL, None).missing
    assert missing is not None
    assert missing.startswith("the native engine is not built: ")
    assert build.COMMAND in missing
    shutil.rmtree(folder / "csrc")
    without_sources = library.find(folder, ALL, None).missing
    assert without_sources is not None
    assert "pip install" in without_sources


def test_a_cpu_below_the_least_level_is_told_what_it_lacks(folder: Path) -> None:
    lacking = min(build.levels()[0].features)
    missing = library.find(folder, ALL - {lacking}, None).missing
    assert missing is not None
    assert missing.endswith(f"this one lacks {lacking}")


def test_a_level_that_is_not_there_or_not_of_this_cpu_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=f"is 'sse2', and the levels of {platform.machine()} are {', '.join(NAMES)}"):
        library.find(folder, ALL, "sse2")
    with pytest.raises(ValueError, match=f"{library.VARIABLE} is {NAMES[-1]!r}, and this CPU lacks "):
        library.find(folder, frozenset(), NAMES[-1])


@needs_compiler
def test_a_file_that_is_no_library_is_said_to_be_none(folder: Path) -> None:
    (folder / build.name_of(NAMES[0])).write_text("not a library")
    missing = library.find(folder, build.levels()[0].features, None).missing
    assert missing is not None
    assert missing.startswith("the native engine cannot be loaded: ")


def test_without_a_compiler_one_sentence_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(build.BuildError, match="'no-such-compiler' is not on the PATH"):
        built(folder, NAMES[0])
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(build.BuildError, match=r"none of c\+\+, g\+\+, clang\+\+ is on the PATH"):
        built(folder, NAMES[0])
    assert build.main(["--out", str(folder)]) == 1
    assert "not built: there is no C++ compiler" in capsys.readouterr().err


@needs_compiler
def test_a_level_that_does_not_compile_leaves_no_old_library(folder: Path) -> None:
    built(folder, *NAMES)
    (folder / "csrc" / build.SOURCE).write_text("#error no\n")
    with pytest.raises(build.BuildError, match="failed for"):
        built(folder, NAMES[0])
    assert not (folder / build.name_of(NAMES[0])).exists()
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def package(tmp_path: Path, kind: str, **environment: str) -> Path:
    """The wheel or source distribution that setuptools makes of a copy of the repository without its large assets."""
    copy = tmp_path / "repository"
    leave_out = shutil.ignore_patterns("__pycache__", "assets", "*.egg-info", "*.so")
    shutil.copytree(ROOT / "src", copy / "src", ignore=leave_out)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    code = f"import setuptools.build_meta as backend; print(backend.build_{kind}({str(tmp_path)!r}))"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=copy, env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    (tmp_path / "said").write_text(run.stderr)
    return tmp_path / run.stdout.splitlines()[-1]


needs_setuptools = pytest.mark.skipif(
    not any(Path(one, "setuptools", "command", "bdist_wheel.py").exists() for one in sys.path), reason="setuptools is too old"
)


@pytest.mark.slow
@needs_compiler
@needs_setuptools
def test_a_wheel_with_libraries_is_for_this_platform_and_any_python(tmp_path: Path) -> None:
    wheel = package(tmp_path, "wheel")
    assert wheel.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (about,) = [archive.read(name).decode() for name in names if name.endswith(".dist-info/WHEEL")]
    assert {f"{NATIVE}/{build.name_of(name)}" for name in NAMES} <= names
    assert {f"{NATIVE}/csrc/{build.SOURCE}", f"{NATIVE}/library.py"} <= names
    assert "Root-Is-Purelib: false" in about


@pytest.mark.slow
@needs_setuptools
def test_a_wheel_made_without_a_compiler_is_for_every_platform(tmp_path: Path) -> None:
    wheel = package(tmp_path, "wheel", CXX="no-such-compiler")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert [name for name in archive.namelist() if name.endswith(".so")] == []
    assert "Everything else works" in (tmp_path / "said").read_text()


@pytest.mark.slow
@needs_setuptools
def test_a_source_distribution_has_the_sources(tmp_path: Path) -> None:
    with tarfile.open(package(tmp_path, "sdist")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{NATIVE}/csrc/{build.SOURCE}", f"src/{NATIVE}/build.py", "setup.py"} <= names
