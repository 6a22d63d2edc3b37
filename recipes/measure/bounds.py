"""The bench's own two bounds: how much of a call no span covers, and how long a report of many lines takes.

    python recipes/measure/bounds.py RESULTS [--lines 10000]

RESULTS: a file of `skipstone bench run`. Its prompts are repeated until there are enough lines, and every format is written.
Exit code 1 where a bound is missed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path

from skipstone.lab.bench.report import report
from skipstone.lab.bench.report.aggregate import groups
from skipstone.lab.bench.run_file import read

UNTIMED, SECONDS = 0.01, 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--lines", type=int, default=10_000)
    given = parser.parse_args()
    lines, missed = read(given.results), 0
    print("| row | calls' time that no span covers |\n| --- | --- |")
    for group in groups(lines):
        for label in group.labels:
            figures = group.figures(label, group.lines)
            if figures and "untimed_share" in figures:
                missed += figures["untimed_share"] >= UNTIMED
                print(f"| {group.task}, T = {group.temperature:g}, {label} | {100 * figures['untimed_share']:.2f} % |")
    rest = [line for line in lines if line["kind"] != "prompt"]
    prompts = itertools.cycle(line for line in lines if line["kind"] == "prompt")
    with tempfile.TemporaryDirectory() as folder:
        many = Path(folder) / "many.jsonl"
        many.write_text("".join(json.dumps(line) + "\n" for line in [*rest, *itertools.islice(prompts, given.lines)]))
        print(f"\n| report of {given.lines} lines | seconds |\n| --- | --- |")
        for form in report.FORMATS:
            started = time.perf_counter()
            report.report([many], form)
            seconds = time.perf_counter() - started
            missed += seconds >= SECONDS
            print(f"| {form} | {seconds:.1f} |")
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
