"""`skipstone demo`: the same prompts decoded plainly and with LayerSkip, side by side, and by transformers, in one process."""

import os
import re
import shutil
import sys
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path

from skipstone.cli import terminal
from skipstone.cli.option_groups import ENGINE, MODEL, QUANTIZE, expect_model, expect_writable
from skipstone.cli.options import AS_JSON, option
from skipstone.utils.files import write_whole

CODE = '''import json
from pathlib import Path


def read_config(path):
    """Read a JSON file and return its contents as a dictionary."""
'''


@dataclass(frozen=True)
class DemoPrompt:
    """One prompt of the demo."""

    title: str
    prompt: str
    max_new_tokens: int


SCENES = (
    DemoPrompt("a request, as JSON", "> please wake me up at half past 6 tomorrow morning\n", 96),
    DemoPrompt("another", "> text marlo that the keys are under the red pot\n", 96),
    DemoPrompt("Python", CODE, 160),
)
NEXT = """
What to type next:
  {program} generate --prompt $'> play some quiet jazz in the kitchen\\n' --compare
  {program} generate MODEL --prompt "..." --method "layerskip exit_layer=4" --compare
docs/training.md tells how to train early exits into a model of your own.
"""


def demo(
    model: str | None = MODEL,
    as_json: bool = AS_JSON,
    svg: Path | None = option(None, "Save the picture to this file too."),
    engine: str = ENGINE,
    quantize: str = QUANTIZE,
) -> None:
    """The same text twice, plainly and with LayerSkip: live, side by side, with the costs of each, and by transformers."""
    if as_json and svg is not None:
        raise ValueError("--svg saves the picture, --json shows none: give one of them")
    expect_writable(svg)
    expect_model(model)
    import torch
    from rich.console import Console

    from skipstone.cli.runs import RunInput, show_side_by_side
    from skipstone.engines import loading
    from skipstone.hf.generate_call import resolve_for
    from skipstone.models.generation_config import OWN_FIELD
    from skipstone.utils.processor_watch import busy_warning

    loaded, tokenizer = loading.load(model, engine=engine, quantize=quantize)
    if not getattr(loaded.generation_config, OWN_FIELD, None):
        raise ValueError("this model names no method of its own (generation_config.skipstone): use `generate --compare`")
    method = resolve_for(loaded, None)
    console, recorder, scenes = terminal.console(quiet=as_json), None, []
    if svg is not None:  # it records the end of each scene only, because a live display is printed many times
        width = console.width
        recorder = Console(record=True, file=StringIO(), width=width, force_terminal=True, highlight=False, markup=False)
    for scene in SCENES:
        ids = torch.tensor([tokenizer(scene.prompt)["input_ids"]], dtype=torch.int64, device=loaded.device)
        job = RunInput(loaded, tokenizer, ids, {"max_new_tokens": scene.max_new_tokens, "do_sample": False}, seed=0)
        comparison, theirs = show_side_by_side(console, job, method, scene.title, recorder)
        warning = busy_warning(comparison.waited_share, theirs["waited_share"])
        scenes.append({**asdict(scene), **comparison.document(), "transformers": theirs, "warning": warning})
    if svg is not None and recorder is not None:
        picture = recorder.export_svg(title="skipstone demo")
        write_whole(svg, re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL))  # fonts would be fetched
    console.print(NEXT.format(program=_program()), soft_wrap=True)
    if as_json:
        terminal.print_json({"method": {"method": method.name, **method.settings}, "scenes": scenes})


def _program() -> str:
    """The command that the reader would type to start this program."""
    if shutil.which("skipstone"):
        return "skipstone"
    script = Path(sys.argv[0])
    return f"{Path(sys.executable).name} -m skipstone" if script.name == "__main__.py" else os.path.relpath(script)
