"""The progress on stderr."""

import io
import sys

import pytest

from skipstone.utils.progress import progress_bar


def test_a_bar_leaves_stderr_alone_until_its_first_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a terminal shows a bar, lines of progress that are printed next to it would stay."""
    monkeypatch.setattr(sys, "stderr", written := io.StringIO())
    monkeypatch.setattr(written, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar("answers", 4) as update:
        assert (sys.stderr, written.getvalue()) == (written, "")
        update(2)
        assert sys.stderr is not written
    assert sys.stderr is written
    assert "answers" in written.getvalue()
