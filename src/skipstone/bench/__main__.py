"""`python -m skipstone.bench MODEL`: the table, and as the last line of stdout one JSON document."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers.utils import logging

from skipstone.bench import run, surrogate
from skipstone.bench.report import markdown, print_report
from skipstone.bench.run import Settings

WIDTH = 190  # where stdout is no terminal: the whole table on one line a row
QUICK: dict[str, Any] = {
    "num_prompts": 3,
    "tune_prompts": 2,
    "prompt_tokens": 48,
    "max_new_tokens": 24,
    "tune_tokens": 16,
    "lengths": (2, 4),
    "thresholds": (None, 0.4),
    "peer_thresholds": (0.0, 0.4),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code: 0, or 2 after one sentence on stderr for a mistake of the user's."""
    arguments = _parser().parse_args(argv)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        settings = settings_of(arguments)
        target = arguments.json
        if target is not None and not target.parent.is_dir():
            raise FileNotFoundError(f"--json {target}: there is no folder {target.parent}")
        document = run.run(settings, run.command_line() if argv is None else list(argv))
        if target is not None:
            run.write(target, document)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    console = Console(width=WIDTH) if not sys.stdout.isatty() else Console()
    if arguments.markdown:
        print(markdown(document))
    else:
        print_report(document, console)
    print(json.dumps(document))
    return 0


def settings_of(arguments: argparse.Namespace) -> Settings:
    """The run that was asked for: defaults, those of --quick and of a named surrogate, and what was given."""
    given = {
        name: value
        for name, value in vars(arguments).items()
        if value is not None and name not in ("json", "quick", "markdown")
    }
    chosen: dict[str, Any] = {}
    if given.get("surrogate") == surrogate.NAMED:  # its early exits mean nothing, and float32 would not be its own type
        chosen |= {"dtype": "bfloat16", "rows": (run.THEIRS, run.OURS), "temperature": 0.0}
    if arguments.quick:
        chosen |= QUICK
    settings = Settings(**{**chosen, **given})
    return replace(settings, rows=tuple(row for row in run.ROWS if row in settings.rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m skipstone.bench", description=__doc__)
    add, own = parser.add_argument, Settings(model="-")
    add("model", nargs="?", help="a folder or hub id [the bundled model]")
    add(
        "--surrogate",
        help=f"measure a synthetic model: {surrogate.NAMED}, or layers=24,hidden=192,exit=6,agreement=.85[,vocab=]",
    )
    add("--prompts", help="a .jsonl file (key prompt or text), a folder or a glob; default: sources of installed packages")
    add("--num-prompts", type=int, help=f"prompts that are reported [{own.num_prompts}]")
    add("--tune-prompts", type=int, help=f"other prompts, that settings are found on [{own.tune_prompts}]")
    add("--prompt-tokens", type=int, help=f"tokens of a prompt [{own.prompt_tokens}]")
    add("--max-new-tokens", type=int, help=f"new tokens of a prompt [{own.max_new_tokens}]")
    add("--tune-tokens", type=int, help=f"new tokens of a tuning call [{own.tune_tokens}]")
    add("--temperature", type=float, help=f"of the sampled rows, 0 for none [{own.temperature}]")
    add("--rows", type=_list(str), help=f"some of {','.join(run.ROWS)}")
    add("--exit-layers", type=_list(int), help="exit layers to try, for us and the peer [an eighth to a half of the layers]")
    add("--lengths", type=_list(int), help=f"draft lengths to try, for us and the peer [{_joined(own.lengths)}]")
    add("--thresholds", type=_list(_threshold), help=f"confidence thresholds to try [{_joined(own.thresholds)}]")
    add("--peer-thresholds", type=_list(float), help=f"those of the peer, 0 is none [{_joined(own.peer_thresholds)}]")
    add("--stop-at-eos", action="store_true", default=None, help="end a text at the end-of-sequence token")
    add("--dtype", choices=list(run.DTYPES), help=f"of the weights [{own.dtype}]")
    add("--device", help=f"[{own.device}]")
    add("--threads", type=int, help="CPU threads [torch's choice]")
    add("--seed", type=int, help=f"of prompts, sampling, tuning order and bootstrap [{own.seed}]")
    add("--json", type=Path, help="write the document to this file too")
    add("--markdown", action="store_true", help="print the table as Markdown, for a document")
    add("--quick", action="store_true", help="a small run, to see that everything works")
    return parser


def _list(kind: Any) -> Any:
    def parse(text: str) -> tuple[Any, ...]:
        return tuple(kind(part.strip()) for part in text.split(","))

    parse.__name__ = "list"
    return parse


def _threshold(text: str) -> float | None:
    return None if text.lower() == "none" else float(text)


def _joined(values: Sequence[Any]) -> str:
    return ",".join(str(value).lower() for value in values)


if __name__ == "__main__":
    sys.exit(main())
