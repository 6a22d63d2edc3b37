"""`skipstone check`: does a method write what the model alone would write, here and now?"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from skipstone.cli import terminal
from skipstone.cli.option_groups import MethodOptions, ModelOptions, expect_prompt_files
from skipstone.cli.options import AS_JSON, option
from skipstone.cli.terminal import DEFECT, one_line

if TYPE_CHECKING:
    from skipstone.lab.check.check import ProbeResult


def check(
    method: MethodOptions,
    prompts: Path | None = option(None, "Your own prompts, JSON lines with the key prompt. Default: bundled ones."),
    num_prompts: int = option(8, "How many of them.", min=2),
    prompt_tokens: int = option(128, "Longer prompts lose their beginning.", min=4),
    max_new_tokens: int = option(64, "Of every greedy text.", min=8),
    samples: int = option(400, "Sampled texts of each law, and as many plain ones.", min=100),
    seed: int = option(0, "Of all draws.", min=0),
    *,
    model: ModelOptions,
    as_json: bool = AS_JSON,
) -> None:
    """Prove on your model, machine and dtype that a method is lossless, or show where it is not. Exit code 1 for a bug."""
    from skipstone.lab.tasks.data_sets import named

    if prompts is not None:
        expect_prompt_files(prompts)
    task = named("self" if prompts is None else str(prompts))
    rows = task.records(None)
    if len(rows) < num_prompts:
        raise ValueError(f"--num-prompts {num_prompts}: there are {len(rows)} prompts")
    chosen = method.parse_for(model.model)
    from skipstone.engines.model_runner import ModelRunner
    from skipstone.hf.generate_call import resolve_for
    from skipstone.lab.check.check import Checker, CheckScale
    from skipstone.lab.tasks.dialogue import PromptBuilder, TaskConversation

    loaded, tokenizer = model.load(keep_weights=True)
    resolved = resolve_for(loaded, chosen)
    builder = PromptBuilder(tokenizer, False, prompt_tokens)
    selected = rows[:: len(rows) // num_prompts][:num_prompts]
    texts = [builder.ids(TaskConversation(task.name, (task.ask(row)[0],))) for row in selected]
    checker = Checker(loaded, resolved, texts, CheckScale(max_new_tokens, samples, seed))
    report = checker.run((lambda _: None) if as_json else show_probe)
    if as_json:
        document = {"kind": "skipstone-check", "passed": report.passed, "proves": report.proves, "method": report.method}
        engine = ModelRunner(loaded).engine
        document |= {"dtype": report.dtype, "device": report.device}
        document |= {"engine": engine.name, "quantize": engine.quantize, "compute_dtype": engine.compute_dtype}
        terminal.print_json({**document, "findings": [finding.report() for finding in report.findings]})
    else:
        verdict = "no bug found" if report.passed else "NOT LOSSLESS"
        print(f"{report.method['method']}, {report.dtype} on {report.device}: {verdict}")
    if not report.proves:
        print("skipstone: warning: drafts were never accepted or never rejected, so this proves little", file=sys.stderr)
    if not report.passed:
        raise typer.Exit(DEFECT)


def show_probe(finding: "ProbeResult") -> None:
    """One probe in one line, and a line for each of its first bugs and ties."""
    state = "BUG " if finding.bugs else "tie " if finding.ties else "ok  "
    drafts = f", {finding.accepted} of {finding.drafted} drafts accepted" if finding.drafted else ""
    note = f" ({finding.note})" if finding.note else ""
    unit = f"{finding.unit} " if finding.unit else ""
    print(f"{state} {finding.name}: {finding.tested:,} {unit}compared{drafts}{note}", flush=True)
    for bug in finding.bugs[:3]:
        print(f"       {one_line(bug)}")
    for tie in finding.ties[:3]:
        gap = f"{tie.gap:.2g} apart where rounding explains {tie.allowed:.2g}"
        print(f"       prompt {tie.prompt}, new token {tie.position}: {tie.found} for {tie.expected}, {gap}")
