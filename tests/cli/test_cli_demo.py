"""`skipstone demo`: both sides, what it says of them, and that it computes what it says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from skipstone.cli import demo, demo_view, terminal
from tests.helpers.commandline import assert_refused, document, expected, run, succeed

DEFAULT = {"method": "layerskip", "exit_layer": 2, "num_speculative_tokens": 3}


@pytest.fixture
def own(variant: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint with a method of its own, and scenes short enough for it."""
    monkeypatch.setattr(demo, "SCENES", (demo.DemoPrompt("first", "> wake me\n", 24), demo.DemoPrompt("second", "def f(", 16)))
    return variant("generation_config.json", skipstone=DEFAULT, _from_model_config=False)


def test_figures_are_those_of_both_runs(own: Path) -> None:
    found = document("demo", own)
    assert found["method"]["exit_layer"] == 2
    assert [scene["title"] for scene in found["scenes"]] == ["first", "second"]
    for scene in found["scenes"]:
        assert scene["identical"] is True
        assert scene["plain"]["tokens"] == scene["method"]["tokens"] > 0
        assert scene["plain"]["acceptance_rate"] is None
        assert 0 < scene["method"]["acceptance_rate"] <= 1
        theirs = scene["transformers"]
        assert theirs["identical"] is True
        assert theirs["tokens"] == scene["plain"]["tokens"]
        assert theirs["tokens_per_second"] == pytest.approx(theirs["tokens"] / theirs["seconds"])
        pace = scene["method"]["tokens_per_second"] / scene["plain"]["tokens_per_second"]
        assert scene["speed_up"] == pytest.approx(pace)


def test_both_sides_show_the_same_text(own: Path) -> None:
    shown = succeed("demo", own).stdout
    columns = ["", ""]
    for line in shown.splitlines():
        cells = re.findall(r"│ (.*?) *│", line)
        columns = [column + cell for column, cell in zip(columns, cells, strict=True)] if len(cells) == 2 else columns
    for scene in demo.SCENES:
        _, text = expected(own, scene.prompt, scene.max_new_tokens)
        for column in columns:
            assert "".join((scene.prompt + text).split()) in "".join(column.split())
    told = " ".join(shown.split())
    assert len(re.findall(r"tokens/s: transformers \d+, plain \d+, layerskip \d+; .*?; texts identical: yes", told)) == 2
    assert "accepted drafts underlined" in shown
    assert "What to type next" in shown


def test_on_a_terminal_it_is_live_and_the_picture_holds_the_end_of_it(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frame by frame, accepted drafts underlined; the picture has every scene once."""
    made: list[Console] = []

    def console() -> Console:
        made.append(Console(file=StringIO(), force_terminal=True, width=100, highlight=False, markup=False))
        return made[-1]

    monkeypatch.setattr(terminal, "console", console)
    monkeypatch.setattr(demo_view, "FRAME_SECONDS", 0)
    demo.demo(str(own), False, tmp_path / "demo.svg", "auto", "none")
    shown = made[0].file.getvalue()  # type: ignore[attr-defined]
    steps = len(re.findall(r"─ plain ─", shown))
    assert steps > 30, "a frame for every step"
    assert re.search(r"\x1b\[[0-9;]*4[;m]", shown), "underlined"
    picture = (tmp_path / "demo.svg").read_text()
    assert picture.count("plain&#160;─") == len(demo.SCENES)
    assert picture.startswith("<svg")
    assert "@font-face" not in picture
    assert "cdn" not in picture


def test_what_cannot_be_shown_is_refused(own: Path, folder: Path, tmp_path: Path) -> None:
    assert_refused(run("demo", own, "--svg", tmp_path / "nowhere" / "demo.svg"), "nowhere: no such folder")
    assert_refused(run("demo", own, "--json", "--svg", tmp_path / "demo.svg"), "give one of them")
    assert_refused(run("demo", folder), "names no method of its own")


def test_without_a_model_the_bundled_one_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "SCENES", demo.SCENES[:1])
    found = document("demo")
    assert found["method"]["method"] == "layerskip"
    assert len(found["scenes"]) == len(demo.SCENES)
    for scene in found["scenes"]:
        assert scene["identical"] is True
        assert scene["method"]["mean_acceptance_length"] > 1.5
    first = document("generate", "--prompt", demo.SCENES[0].prompt)
    assert first["text"] == succeed("generate", "--prompt", demo.SCENES[0].prompt, "--method", "autoregressive").stdout
    assert json.loads(first["text"])["intent"] == "set_alarm"
