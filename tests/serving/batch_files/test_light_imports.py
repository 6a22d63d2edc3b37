"""What a process that keeps no model imports: torch takes seconds and hundreds of megabytes."""

from __future__ import annotations

import subprocess
import sys

import pytest

LIGHT = ["skipstone.serving.batch_files.attempts", "skipstone.serving.settings"]
HEAVY = ("torch", "transformers")


@pytest.mark.parametrize("module", [*LIGHT, pytest.param("skipstone.serving.batch_files.batch", marks=pytest.mark.slow)])
def test_no_torch_where_no_model_is(module: str) -> None:
    program = f"import sys, {module}; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert said == ([] if module in LIGHT else [*HEAVY])
