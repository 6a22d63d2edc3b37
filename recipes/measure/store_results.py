"""Measures everything that docs/lab/results holds, one run after the other, and stores the results.

    python recipes/measure/store_results.py --data-dir FOLDER [NAME ...]

A name is a file of docs/lab/results without its ending; by default all are measured. docs/lab/results.md says what must be
there before. A killed run goes on when the same command is typed again. --again 2 measures a second run of a few prompts for
the intervals: some hours later, because a machine's speed changes. --record measures nothing and stores the runs so far.
`python recipes/results.py` then writes the pages. Measure on an idle machine.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
PLANS = ROOT / "recipes" / "measure" / "results"
STORED = ROOT / "docs" / "lab" / "results"
RUN_FILES = Path("runs", "results")
PROMPTS_AGAIN = 8  # of each task in a second run
RUNS: dict[str, tuple[str, ...]] = {
    "nano": ("nano.yaml",),
    "nano-commands": ("nano-commands.yaml",),
    "nano-layerskip": ("nano-layerskip.yaml",),
    "nano-adadecode": ("nano-adadecode.yaml",),
    "nano-adasd": ("nano-adasd.yaml",),
    "nano-layer-sets": ("nano-layer-sets.yaml",),
    "nano-bayesian-sets": ("nano-bayesian-sets.yaml",),
    "smollm2-float32": ("smollm2-float32.yaml",),
    "smollm2-bfloat16": ("smollm2-bfloat16.yaml",),
    "smollm2-int8": ("smollm2-int8.yaml",),
    "smollm2-prepared": ("smollm2-prepared.yaml",),
    "smollm2-adadecode": ("smollm2-adadecode.yaml",),
    "smollm2-swift": ("smollm2-swift.yaml",),
    "smollm2-swift-paper": ("smollm2-swift-paper.yaml",),
    "smollm2-stream": ("smollm2-stream.yaml",),
    "gemma": ("gemma.yaml",),
    "gemma-peers": ("gemma-peers.yaml",),
    "exits-smollm2": ("exits.yaml", "runs/smollm2/rotated"),
    "exits-gemma": ("exits.yaml", "runs/gemma/gemma-3-270m-Q4_K_M.gguf"),
    "layerskip": ("layerskip.yaml", *(f"runs/smollm2/commands-{seed}/model" for seed in range(3))),
    "layerskip-control": ("layerskip.yaml", "runs/smollm2/control-0/model"),
}
"""Name -> its plan, and models or flags over it."""


def measure(name: str, number: int, data_dir: str) -> None:
    """Measure a run, or go on with it. number: 1 for the one with all prompts."""
    plan, *flags = RUNS[name]
    wanted, out = PLANS / plan, RUN_FILES / f"{name}.jsonl"
    if number > 1:
        asked = yaml.safe_load(wanted.read_text(encoding="utf-8")) | {"num_prompts": PROMPTS_AGAIN}
        asked["tasks"] = [{key: value for key, value in task.items() if key != "num_prompts"} for task in asked["tasks"]]
        wanted, out = RUN_FILES / f"{name}.{number}.yaml", RUN_FILES / f"{name}.{number}.jsonl"
        wanted.write_text(yaml.safe_dump(asked), encoding="utf-8")
    command = ["bench", "run", "--plan", str(wanted), *flags, "--data-dir", data_dir, "--out", str(out)]
    nothing_saved = os.environ | {"SKIPSTONE_CACHE": str(RUN_FILES / "cache")}  # no profile of `skipstone tune` takes part
    subprocess.run([sys.executable, "-m", "skipstone", *command], check=True, env=nothing_saved)


def store(name: str) -> None:
    """Write the records of all runs, if there are any."""
    if not (RUN_FILES / f"{name}.jsonl").exists():
        return
    again = sorted(RUN_FILES.glob(f"{name}.*.jsonl"))
    files = map(str, [RUN_FILES / f"{name}.jsonl", *again])
    command = ["bench", "record", *files, "--out", str(STORED / f"{name}.jsonl")]
    subprocess.run([sys.executable, "-m", "skipstone", *command], check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(RUNS))
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--again", type=int, default=1, metavar="NUMBER", help="measure this run")
    parser.add_argument("--record", action="store_true", help="measure nothing")
    args = parser.parse_args()
    for name in args.names or RUNS:
        if not args.record:
            measure(name, args.again, args.data_dir)
        store(name)
