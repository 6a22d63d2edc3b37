"""The native engine's build and loader."""

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
    return build.build(names, folder, ["-O0"], csrc=folder / "csrc")


def found(folder: Path, requested: str | None = None) -> library.LibrarySearchResult:
    return library.find(folder, library.features(), requested)


@needs_compiler
@pytest.mark.skipif(not OWN, reason="this CPU has no level")
def test_the_best_built_level_of_the_cpu_is_loaded(folder: Path) -> None:
    assert [path.name for path in built(folder, *NAMES)] == [build.name_of(name) for name in NAMES]
    for requested, expected in [(None, OWN[-1]), *((name, name) for name in OWN)]:
        loaded, missing = found(folder, requested)
        assert missing is None
        assert loaded is not None
        assert loaded.sk_level() == expected.encode()
    assert library.find(folder, library.features() & build.levels()[0].features, None).library is not None
    (folder / "csrc" / build.SOURCE).write_text("#error no\n")
    with pytest.raises(build.BuildError, match="failed for"):
        built(folder, NAMES[0])
    assert not (folder / build.name_of(NAMES[0])).exists(), "an old library"
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


@needs_compiler
@pytest.mark.skipif(not OWN, reason="this CPU has no level")
@pytest.mark.parametrize("change", ["source", "header", "abi", "no function"])
def test_a_library_of_other_sources_is_stale(folder: Path, change: str) -> None:
    source = folder / "csrc" / build.SOURCE
    before = {"abi": STAND_IN.replace("ABI_OF_THE_TEST", str(library.ABI + 1)), "no function": ""}
    source.write_text(before.get(change, source.read_text()))
    built(folder, OWN[0])
    if change == "source":
        source.write_text(source.read_text() + "\n")
    if change == "header":
        (folder / "csrc" / "more.h").write_text("")
    assert found(folder) == library.LibrarySearchResult(None, library.STALE)
    if change in before:
        return
    assert build.stale(NAMES, folder, folder / "csrc") == NAMES
    built(folder, OWN[0])
    assert build.stale([OWN[0]], folder, folder / "csrc") == []
    # By its old path this process would get the library that it has loaded.
    assert found(folder.rename(folder.with_name(f"{folder.name}-again"))).missing is None


def test_a_library_that_is_missing_or_cannot_run_is_said_to_be(folder: Path) -> None:
    first = build.levels()[0].features
    unbuilt = str(library.find(folder, ALL, None).missing)
    assert unbuilt.startswith("the native engine is not built: ")
    assert build.COMMAND in unbuilt
    lacking = min(first)
    assert str(library.find(folder, ALL - {lacking}, None).missing).endswith(f"this one lacks {lacking}")
    with pytest.raises(ValueError, match=f"is 'sse2', and the levels of {platform.machine()} are {', '.join(NAMES)}"):
        library.find(folder, ALL, "sse2")
    with pytest.raises(ValueError, match=f"{library.VARIABLE} is {NAMES[-1]!r}, and this CPU lacks "):
        library.find(folder, frozenset(), NAMES[-1])
    if has_compiler():
        (damaged := folder / build.name_of(NAMES[0])).write_text("not a library")
        assert str(library.find(folder, first, None).missing).startswith("the native engine cannot be loaded: ")
        damaged.unlink()
    shutil.rmtree(folder / "csrc")
    assert "pip install" in str(library.find(folder, ALL, None).missing)


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
@needs_setuptools
@pytest.mark.parametrize(
    "kind", [pytest.param("libraries", marks=[needs_compiler, pytest.mark.product]), "no compiler", "sources"]
)
def test_wheels_and_source_distributions(kind: str, tmp_path: Path) -> None:
    """A wheel with libraries is for this platform and any Python, one that was made without a compiler for every platform."""
    if kind == "sources":
        with tarfile.open(package(tmp_path, "sdist")) as archive:
            names = {name.partition("/")[2] for name in archive.getnames()}
        assert {f"src/{NATIVE}/csrc/{build.SOURCE}", f"src/{NATIVE}/build.py", "setup.py"} <= names
        return
    wheel = package(tmp_path, "wheel", **({"CXX": "no-such-compiler"} if kind == "no compiler" else {}))
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (about,) = [archive.read(name).decode() for name in names if name.endswith(".dist-info/WHEEL")]
    libraries = {f"{NATIVE}/{build.name_of(name)}" for name in NAMES} if kind == "libraries" else set()
    assert {name for name in names if name.endswith(".so")} == libraries
    assert {f"{NATIVE}/csrc/{build.SOURCE}", f"{NATIVE}/library.py"} <= names
    platforms = f"-py3-none-linux_{platform.machine()}.whl" if libraries else "-py3-none-any.whl"
    assert wheel.name.endswith(platforms)
    assert f"Root-Is-Purelib: {str(not libraries).lower()}" in about
    assert ("Everything else works" in (tmp_path / "said").read_text()) == (not libraries)
