"""Measures everything that docs/lab/results holds, one run after the other, and stores the results.

    python recipes/measure/store_results.py --data-dir FOLDER [NAME ...]

A name is a file of docs/lab/results without its ending; by default all are measured. docs/lab/results.md says what must be
there before. A killed run goes on when the same command is typed again. --record stores a run's prompts so far and measures
nothing. `python recipes/results.py` then writes the pages. Measure on an idle machine.
"""

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLANS = ROOT / "recipes" / "measure" / "results"
STORED = ROOT / "docs" / "lab" / "results"
RUNS: dict[str, tuple[str, ...]] = {
    "nano": ("nano.yaml",),
    "smollm2-float32": ("smollm2-float32.yaml",),
    "smollm2-bfloat16": ("smollm2-bfloat16.yaml",),
    "smollm2-int8": ("smollm2-int8.yaml",),
    "smollm2-prepared": ("smollm2-prepared.yaml",),
    "gemma": ("gemma.yaml",),
    "layerskip": ("layerskip.yaml", *(f"runs/smollm2/commands-{seed}/model" for seed in range(3))),
    "layerskip-control": ("layerskip.yaml", *(f"runs/smollm2/control-{seed}/model" for seed in range(3))),
}
"""Name -> its plan, and models or flags over it."""

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(RUNS))
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--record", action="store_true", help="measure nothing")
    args = parser.parse_args()
    for name in args.names or RUNS:
        plan, *flags = RUNS[name]
        out = f"runs/results/{name}.jsonl"
        skipstone = [sys.executable, "-m", "skipstone", "bench"]
        if not args.record:
            asked = ["--plan", str(PLANS / plan), *flags, "--data-dir", args.data_dir, "--out", out]
            subprocess.run([*skipstone, "run", *asked], check=True)
        subprocess.run([*skipstone, "record", out, "--out", str(STORED / f"{name}.jsonl")], check=True)
