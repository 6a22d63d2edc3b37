"""Results of training exit heads, from their cards: divergence from the last layer and agreement with it on held-out answers,
by the model's own head at the exit (before) and by the exit head (after), and the time of every part of the training.

    python recipes/measure/heads_results.py FOLDER... [--out docs/lab/results/NAME.jsonl]

FOLDER is a run of `skipstone train heads` or a folder of heads. --out stores a record for each exit, labelled "FOLDER, LAYER",
for the pages of docs/lab (recipes/results.py).
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from skipstone.lab.bench import records
from skipstone.lab.timing.machine import provenance
from skipstone.methods.adadecode.heads import CARD, ExitHeads, HeadsCard


def card(folder: Path) -> HeadsCard:
    """The card of a run's heads, or of the heads in a folder."""
    place = next(one for one in (folder / "heads" / CARD, folder / CARD) if one.is_file())
    return HeadsCard.model_validate(json.loads(place.read_text(encoding="utf-8")))


def table(columns: list[str], rows: list[list[Any]]) -> str:
    """Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def stored(cards: dict[Path, HeadsCard]) -> list[records.Record]:
    """A record for each exit. What only measured decoding has is null."""
    about = provenance(sys.argv, 0)
    return [
        {
            **dict.fromkeys(records.KEYS),
            "model": one.name,
            "weights": one.model,
            "task": "held-out",
            "temperature": 0.0,
            "label": f"{folder.name}, {layer}",
            "method": "adadecode",
            "settings": one.training,
            "lossless": True,
            "places": [],
            "left_out": 0,
            "figures": {"speedups": {}, **figures},
            "time": about["time"],
            "commits": [about["git"]["sha"][:12]],
        }
        for folder, one in cards.items()
        for layer, figures in one.metrics.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, help="a file of JSON lines")
    args = parser.parse_args()
    cards = {folder: card(folder) for folder in args.folders}
    if args.out:
        records.write(args.out, stored(cards))
    quality, times = [], []
    for folder, one in cards.items():
        size = sum(weight.numel() for weight in ExitHeads(one).parameters())
        for layer, after in one.metrics.items():
            before = after["before"]
            pairs = [f"{before[name]:.3f} -> {after[name]:.3f}" for name in ("divergence", "agreement", "sure", "right")]
            quality.append([folder, layer, *pairs])
        spent = one.training["seconds"]
        about = [one.training[name] for name in ("answers", "held_out_answers", "tokens", "epochs_trained")]
        times.append([folder, one.kind, size, *about, *(f"{spent[part]:.0f}" for part in ("answers", "features", "training"))])
    print(table(["heads", "exit", "KL", "top-1", "sure (> .75)", "right where sure"], quality))
    print()
    answers = ["answers", "held out", "tokens", "epochs"]
    print(table(["heads", "kind", "parameters", *answers, "s answers", "s features", "s training"], times))


if __name__ == "__main__":
    main()
