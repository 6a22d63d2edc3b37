"""`skipstone demo`: the same prompts decoded plainly and with LayerSkip, side by side, in one process."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skipstone.cli import options, terminal
from skipstone.files import write_whole

if TYPE_CHECKING:
    from rich.console import Console

    from skipstone.cli.runs import Comparison, Job
    from skipstone.decoding.draft import Step
    from skipstone.decoding.method import Method

FRAME = 1 / 15  # seconds between two pictures
CODE = '''import json
from pathlib import Path


def read_config(path):
    """Read a JSON file and return its contents as a dictionary."""
'''


@dataclass(frozen=True)
class Scene:
    """One prompt of the demo."""

    title: str
    prompt: str
    max_new_tokens: int


SCENES = (
    Scene("a request, as JSON", "> please wake me up at half past 6 tomorrow morning\n", 96),
    Scene("another", "> text marlo that the keys are under the red pot\n", 96),
    Scene("Python", CODE, 160),
)
NEXT = """
What to type next:
  {program} generate --prompt $'> play some quiet jazz in the kitchen\\n' --compare
  {program} generate MODEL --prompt "..." --method "layerskip exit_layer=4" --compare
docs/training.md tells how early exits are trained into a model of your own.
"""


def demo(
    model: options.Model = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON document instead.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Save the picture to this file too.", show_default=False)] = None,
    debug: options.Debug = False,
) -> None:
    """The same text twice, plainly and with LayerSkip: live, side by side, with what each cost."""
    show(model, as_json, svg)


def show(model: str | None, as_json: bool, svg: Path | None) -> None:
    """Decode every scene both ways, show it, and say what came out."""
    if as_json and svg is not None:
        raise ValueError("--svg saves the picture, --json shows none: give one of them")
    options.check_folder_of(svg)
    from rich.console import Console

    from skipstone.api import resolve_for
    from skipstone.cli.runs import compared
    from skipstone.decoding.method import OWN_FIELD

    loaded, tokenizer = options.load(model, "auto", "cpu")
    if not getattr(loaded.generation_config, OWN_FIELD, None):
        raise ValueError(
            "this model names no method of its own (generation_config.skipstone); use `skipstone generate --compare`"
        )
    method = resolve_for(loaded, None)
    console, camera, scenes = terminal.console(), None, []
    if svg is not None:  # records what is there at the end of each scene: a live display is printed many times
        camera = Console(record=True, file=StringIO(), width=console.width, force_terminal=True, highlight=False, markup=False)
    for scene in SCENES:
        job = _job(loaded, tokenizer, scene)
        comparison = compared(job, method)[1] if as_json else _shown(console, job, method, scene, camera)
        if comparison is None:
            raise KeyboardInterrupt
        scenes.append({**asdict(scene), **comparison.document()})
    if svg is not None and camera is not None:
        picture = camera.export_svg(title="skipstone demo")
        write_whole(svg, re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL))  # fonts would be fetched
    if as_json:
        print(json.dumps({"method": {"method": method.name, **method.settings}, "scenes": scenes}))
    else:
        console.print(NEXT.format(program=_program()), soft_wrap=True)


def _program() -> str:
    """How this program was started, as the reader would type it."""
    if shutil.which("skipstone"):
        return "skipstone"
    started = Path(sys.argv[0])
    return f"{Path(sys.executable).name} -m skipstone" if started.name == "__main__.py" else os.path.relpath(started)


def _job(model: Any, tokenizer: Any, scene: Scene) -> Job:
    import torch

    from skipstone.cli.runs import Job

    ids = torch.tensor([tokenizer.encode(scene.prompt)], device=model.device)
    return Job(model, tokenizer, ids, {"max_new_tokens": scene.max_new_tokens, "do_sample": False}, seed=0)


class Column:
    """One side of the stage: the text so far, accepted drafts marked."""

    def __init__(self, job: Job, title: str) -> None:
        from rich.text import Text

        from skipstone.api import Detokenizer

        self.title, self.text, self.detokenizer = title, Text(), Detokenizer(job.tokenizer)
        self.text.append(terminal.harmless(job.text(job.ids[0].tolist())), style="dim")

    def add(self, step: Step) -> None:
        from skipstone.cli.showing import ACCEPTED

        for token, origin in zip(step.tokens[0], step.origin[0], strict=True):
            piece = terminal.harmless(self.detokenizer.add(token))
            self.text.append(piece, style=ACCEPTED if origin == "draft" else None)

    def end(self) -> None:
        self.text.append(terminal.harmless(self.detokenizer.rest()))

    def panel(self) -> Any:
        from rich.panel import Panel

        return Panel(self.text, title=self.title, title_align="left")


class Stage:
    """Both sides of a scene, beside each other."""

    def __init__(self, job: Job, method: Method) -> None:
        self.sides = [Column(job, "plain"), Column(job, f"{method.name}: accepted drafts underlined")]

    def picture(self) -> Any:
        from rich.table import Table

        table = Table.grid(expand=True)
        for _ in self.sides:
            table.add_column(ratio=1)
        table.add_row(*(side.panel() for side in self.sides))
        return table

    def play(self, job: Job, method: Method, show: Callable[[], None]) -> Comparison:
        """Decode both ways. show: called as the picture changes, but not for every token. Neither side's time has it in it."""
        from skipstone.cli.runs import compared

        last = 0.0

        def seen(side: Column) -> Callable[[Step], None]:
            def add(step: Step) -> None:
                nonlocal last
                side.add(step)
                if (now := time.monotonic()) - last >= FRAME:
                    show()
                    last = now

            return add

        plain, drafted = map(seen, self.sides)
        _, comparison = compared(job, method, show=drafted, show_plain=plain)
        if comparison is None:
            raise KeyboardInterrupt
        for side in self.sides:
            side.end()
        return comparison


def _shown(console: Console, job: Job, method: Method, scene: Scene, camera: Console | None) -> Comparison:
    """Both sides, live where there is a terminal, then the figures. camera: a console that is shown the end only."""
    from rich.live import Live

    stage = Stage(job, method)
    console.rule(scene.title)
    if console.is_terminal:
        with Live(stage.picture(), console=console, auto_refresh=False) as live:
            comparison = stage.play(job, method, lambda: live.update(stage.picture(), refresh=True))
            live.update(stage.picture(), refresh=True)
    else:
        comparison = stage.play(job, method, lambda: None)
        console.print(stage.picture())
    console.print(verdict(comparison))
    if camera is not None:
        camera.rule(scene.title)
        camera.print(stage.picture(), verdict(comparison), sep="\n")
    return comparison


def verdict(comparison: Comparison) -> str:
    """The scene's figures in one line, all of them of this run."""
    plain, own = comparison.plain.figures(), comparison.other.figures()
    pace = f"{plain['tokens_per_second']:.0f} -> {own['tokens_per_second']:.0f} tokens/s, {comparison.speed_up:.2f} x"
    drafts = "nothing drafted"
    if own["acceptance_rate"] is not None:
        drafts = f"M {own['mean_acceptance_length']:.2f} tokens a step, alpha {own['acceptance_rate']:.2f}"
    return f"{pace}; {drafts}; {comparison.verdict()}"
