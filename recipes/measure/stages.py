"""Times of a bench run that the report does not show: of requests by stage, and of a plain step as `auto` believed it.

    python recipes/measure/stages.py RUN.jsonl

For every task and method: milliseconds per request for setup, prefill, drafting, scoring and the rest, and the number of
requests with 100 tokens or more below .93 of the speed of plain decoding. For `auto`: its belief of a plain step's time over
the time of the row "autoregressive" on the same prompt (median), and its speed over the best fixed row of the task, for each
quarter of the prompts, as it learns.
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
    timed = [row["setup_seconds"], *(row["stats"][f"seconds_{stage}"] for stage in STAGES[1:])]
    return [1000 * one for one in (*timed, row["seconds"] - sum(timed))]


def plain_step(row: dict[str, Any]) -> float:
    """Seconds of a step of plain decoding."""
    stats = row["stats"]
    return (stats["seconds_draft"] + stats["seconds_score"] + stats["seconds_other"]) / max(stats["steps"], 1)


def by_quarters(lines: list[dict[str, Any]]) -> list[float]:
    """Speed of `auto` relative to the best fixed row of a task, for each quarter of its lines."""
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
        if (state := line["rows"].get("auto", {}).get("known")) and plain["stats"]["steps"]:
            believed[task].append(state["plain_seconds"] / plain_step(plain))
    print(f"| task | method | {' | '.join(STAGES)} | else | slow of long |\n| --- | --- |{' --- |' * (len(STAGES) + 2)}")
    for (task, name), each in spent.items():
        means = " | ".join(f"{sum(column) / len(each):.1f}" for column in zip(*each, strict=True))
        print(f"| {task} | {name} | {means} | {sum(slow[task, name])} of {len(slow[task, name])} |")
    for task, ratios in believed.items():
        print(f"{task}: auto believes a plain step to take {median(ratios):.2f} of its measured time")
    auto_lines = [line for line in lines if line["kind"] == "prompt" and "auto" in line["rows"]]
    for task in dict.fromkeys((line["task"], line["temperature"]) for line in auto_lines):
        quarters = by_quarters([line for line in auto_lines if (line["task"], line["temperature"]) == task])
        print(f"{task[0]}, T = {task[1]:g}: of the best fixed row {', '.join(f'{one:.2f}' for one in quarters)} by quarters")


if __name__ == "__main__":
    main()
