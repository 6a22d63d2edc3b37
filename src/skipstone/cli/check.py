"""`skipstone check`: does a method write what the model alone would write, here and now?"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skipstone.cli import terminal
from skipstone.cli.options import DTYPES

if TYPE_CHECKING:
    from skipstone.check.check import Finding

HELP = "Prove on your model, machine and dtype that a method is lossless, or show where it is not. Exit code 1 for a bug."


def _option(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, **more)


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags that belong to no method."""

    model: Annotated[str | None, typer.Argument(help="A folder or a hub id. Default: the bundled model.", metavar="MODEL")] = (
        None
    )
    method: Annotated[str | None, _option("See `skipstone methods`. Default: the model's own.")] = None
    speculative_config: Annotated[str | None, _option("The method as JSON, as in vLLM.")] = None
    prompts: Annotated[Path | None, _option("Your own prompts, JSON lines with the key prompt. Default: bundled ones.")] = None
    num_prompts: Annotated[int, _option("How many of them.", min=2)] = 8
    prompt_tokens: Annotated[int, _option("Longer prompts lose their beginning.", min=4)] = 128
    max_new_tokens: Annotated[int, _option("Of every greedy text.", min=8)] = 64
    samples: Annotated[int, _option("Sampled texts of each law, and as many plain ones.", min=100)] = 400
    seed: Annotated[int, _option("Of all draws.", min=0)] = 0
    dtype: Annotated[str, _option(f"One of {', '.join(DTYPES)}; auto is the checkpoint's.")] = "auto"
    device: Annotated[str, _option("auto is cuda where there is one, else cpu.")] = "auto"
    json: Annotated[bool, _option("Print one JSON document instead.", "--json")] = False
    debug: Annotated[bool, _option("Show tracebacks.", "--debug", hidden=True)] = False


def described() -> None:
    """Stands for the verb in the list of verbs; `command` makes the real one."""
    raise AssertionError("resolved in skipstone.cli.Verbs")


def command() -> Any:
    """The verb with the flags of every method."""
    from skipstone.cli import flags

    return flags.command("check", HELP, Options, run)


def run(options: Options, given: dict[str, str | None]) -> None:
    """Load, check, tell; leave with 1 for a bug."""
    import torch

    from skipstone.api import resolve_for
    from skipstone.check.check import Checker, Scale
    from skipstone.cli import flags
    from skipstone.loading import load, usable
    from skipstone.tasks.dialogue import Conversation, Reader
    from skipstone.tasks.sets import named

    if options.dtype not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, found {options.dtype!r}")
    task = named("self" if options.prompts is None else str(options.prompts))
    rows = task.records(None)
    if len(rows) < options.num_prompts:
        raise ValueError(f"--num-prompts {options.num_prompts}: there are {len(rows)} prompts")
    wanted = flags.wish(options.method, given, options.speculative_config)
    dtype = options.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
    model, tokenizer = load(options.model, dtype=dtype, device=usable(options.device))
    method = resolve_for(model, wanted or None)
    reader = Reader(tokenizer, False, options.prompt_tokens)
    spread = rows[:: len(rows) // options.num_prompts][: options.num_prompts]
    prompts = [reader.ids(Conversation(task.name, (task.ask(row)[0],))) for row in spread]
    checker = Checker(model, method, prompts, Scale(options.max_new_tokens, options.samples, options.seed))
    report = checker.run((lambda _: None) if options.json else tell)
    if options.json:
        found = [finding.report() for finding in report.findings]
        document = {"kind": "skipstone-check", "passed": report.passed, "proves": report.proves, "method": report.method}
        print(json.dumps({**document, "dtype": report.dtype, "device": report.device, "findings": found}))
    else:
        verdict = "no bug found" if report.passed else "NOT LOSSLESS"
        print(f"{report.method['method']}, {report.dtype} on {report.device}: {verdict}")
    if not report.proves:
        print(
            "skipstone: warning: drafts were never accepted or never rejected, so this proves little", file=terminal.sys.stderr
        )
    if not report.passed:
        raise typer.Exit(terminal.DEFECT)


def tell(finding: Finding) -> None:
    """One probe in one line, and a line for each of its first bugs and ties."""
    state = "BUG " if finding.bugs else "tie " if finding.ties else "ok  "
    drafts = f", {finding.accepted} of {finding.drafted} drafts accepted" if finding.drafted else ""
    note = f" ({finding.note})" if finding.note else ""
    print(f"{state} {finding.name}: {finding.tested} compared{drafts}{note}", flush=True)
    for bug in finding.bugs[:3]:
        print(f"       {terminal.one_line(bug)}")
    for tie in finding.ties[:3]:
        print(
            f"       prompt {tie.prompt}, new token {tie.position}: {tie.found} for {tie.expected}, {tie.gap:.2g} apart where "
            f"rounding explains {tie.allowed:.2g}"
        )
