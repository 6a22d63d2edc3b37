"""Checks two limits of the bench: the share of a call that no span covers, and the time of a report of many lines.

    python recipes/measure/bounds.py RESULTS [--lines 10000]

RESULTS: a file of `skipstone bench run`. Its prompts are repeated until there are enough lines, and every format is written.
Exit code 1 if a limit is exceeded.
"""

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
    args = parser.parse_args()
    results_lines, num_missed = read(args.results), 0
    print("| row | calls' time that no span covers |\n| --- | --- |")
    for group in groups(results_lines):
        for label in group.labels:
            figures = group.figures(label, group.lines)
            if figures and "untimed_share" in figures:
                num_missed += figures["untimed_share"] >= UNTIMED
                print(f"| {group.task}, T = {group.temperature:g}, {label} | {100 * figures['untimed_share']:.2f} % |")
    rest = [line for line in results_lines if line["kind"] != "prompt"]
    prompts = itertools.cycle(line for line in results_lines if line["kind"] == "prompt")
    with tempfile.TemporaryDirectory() as folder:
        repeated = Path(folder) / "many.jsonl"
        repeated.write_text("".join(json.dumps(line) + "\n" for line in [*rest, *itertools.islice(prompts, args.lines)]))
        print(f"\n| report of {args.lines} lines | seconds |\n| --- | --- |")
        for report_format in report.FORMATS:
            started = time.perf_counter()
            report.report([repeated], report_format)
            seconds = time.perf_counter() - started
            num_missed += seconds >= SECONDS
            print(f"| {report_format} | {seconds:.1f} |")
    sys.exit(num_missed > 0)


if __name__ == "__main__":
    main()
