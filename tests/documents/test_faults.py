"""The table of faults names tests that exist."""

import functools
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
TABLE = TESTS / "faults.md"


@functools.cache
def names(path: Path) -> set[str]:
    return {*re.findall(r"^ *(?:def|class) (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)} if path.exists() else set()


def test_every_fault_has_tests_that_exist() -> None:
    rows = [line.split("|")[1:4] for line in TABLE.read_text(encoding="utf-8").splitlines() if re.match(r"\| \d", line)]
    assert len({row[0] for row in rows}) == len(rows) > 50
    missing = []
    for fault, _, cell in rows:
        files = re.findall(r"`(tests/[^`]+\.py)`: ([^<|]*)", cell)
        named = [(TESTS.parent / file, name) for file, rest in files for name in re.findall(r"`(\w+)`", rest)]
        if not named and "no test:" not in cell:
            missing.append(f"{fault}: none")
        missing += [f"{fault}: {path.name}::{name}" for path, name in named if name not in names(path)]
    assert not missing, missing
