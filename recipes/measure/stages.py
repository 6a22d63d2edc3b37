"""What a bench run's requests took, stage by stage, and what `auto` took a plain step for: in no table of the report.

    python recipes/measure/stages.py RUN.jsonl

Of every task and method: milliseconds a request, of setup, prefill, drafting, scoring and all else, and requests of 100 tokens
or more that were slower than .93 of plain decoding. Of `auto`: a plain step as it believed it to be, over one of the row
"autoregressive" on the same prompt, the median; and its speed over that of the fixed row that was fastest on all prompts of
the task, by quarters of the prompts, as it learns.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

STAGES = ("setup", "prefill", "draft", "score")
LONG, SLOW = 100, 0.93


def stages(row: dict[str, Any]) -> list[float]:
    """Milliseconds of each stage and of the rest."""
    known = [row["setup_seconds"], *(row["stats"][f"seconds_{stage}"] for stage in STAGES[1:])]
    return [1000 * one for one in (*known, row["seconds"] - sum(known))]


def plain_step(row: dict[str, Any]) -> float:
    """Seconds of a step of plain decoding."""
    stats = row["stats"]
    return (stats["seconds_draft"] + stats["seconds_score"] + stats["seconds_other"]) / max(stats["steps"], 1)


def by_quarters(lines: list[dict[str, Any]]) -> list[float]:
    """`auto` over the best fixed row of a task's lines."""
    fixed = [name for name in lines[0]["rows"] if not name.startswith(("auto", "plain"))]
    best = min(fixed, key=lambda name: sum(line["rows"][name]["seconds"] for line in lines))
    parts = [lines[len(lines) * part // 4 : len(lines) * (part + 1) // 4] for part in range(4)]
    seconds = [[sum(line["rows"][name]["seconds"] for line in part) for name in (best, "auto")] for part in parts]
    return [fast / own for fast, own in seconds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    lines = [json.loads(line) for line in parser.parse_args().run.read_text(encoding="utf-8").splitlines()]
    spent, slow, believed = defaultdict[Any, list](list), defaultdict[Any, list](list), defaultdict[str, list[float]](list)
    for line in (line for line in lines if line["kind"] == "prompt"):
        task, plain = f"{line['task']}, T = {line['temperature']:g}", line["rows"]["autoregressive"]
        for name, row in line["rows"].items():
            spent[task, name].append(stages(row))
            if row["tokens"] >= LONG:
                speed_up = plain["seconds"] / plain["tokens"] * row["tokens"] / row["seconds"]
                slow[task, name].append(speed_up < SLOW)
        if (known := line["rows"].get("auto", {}).get("known")) and plain["stats"]["steps"]:
            believed[task].append(known["plain_seconds"] / plain_step(plain))
    print(f"| task | method | {' | '.join(STAGES)} | else | slow of long |\n| --- | --- |{' --- |' * (len(STAGES) + 2)}")
    for (task, name), each in spent.items():
        means = " | ".join(f"{sum(column) / len(each):.1f}" for column in zip(*each, strict=True))
        print(f"| {task} | {name} | {means} | {sum(slow[task, name])} of {len(slow[task, name])} |")
    for task, ratios in believed.items():
        print(f"{task}: auto takes a plain step to be {median(ratios):.2f} of what it is")
    known = [line for line in lines if line["kind"] == "prompt" and "auto" in line["rows"]]
    for task in dict.fromkeys((line["task"], line["temperature"]) for line in known):
        quarters = by_quarters([line for line in known if (line["task"], line["temperature"]) == task])
        print(f"{task[0]}, T = {task[1]:g}: of the best fixed row {', '.join(f'{one:.2f}' for one in quarters)} by quarters")


if __name__ == "__main__":
    main()
