"""Figures of a draft model: how often it agrees with its target on held-out text, and the time of its step.

    python recipes/measure/draft_results.py [--data-dir FOLDER] [--target MODEL --draft MODEL]

Default: skipstone-nano and its draft model. Prints tables in Markdown and, as its last line, one JSON document. Same first
choice: share of positions at which both models have the same likeliest token. Accepted: the mean of sum min(p, q), the share of
drafts that Leviathan's rule accepts at temperature 1. The held-out data are recipes/train/nano.yaml's (see nano_results.py).
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

import skipstone
from skipstone.assets import DRAFTS, NANO
from skipstone.train.data.rows import pack

sys.path.insert(0, str(Path(__file__).parent))
from nano_results import check_unseen, held_out

TURNS, TOKENS = 15, 40


@torch.inference_mode()
def agreement(target: Any, draft: Any, rows: torch.Tensor) -> dict[str, float]:
    """Means over the predicted positions of packed rows [R, T] (~id if a token is not predicted)."""
    same = kept = kl = count = 0.0
    for row in rows:
        predicted = row[1:] >= 0
        ids = torch.where(row < 0, ~row, row)[None]
        p, q = (model(ids).logits[0, :-1][predicted].double().log_softmax(-1) for model in (target, draft))
        same += float((p.argmax(-1) == q.argmax(-1)).sum())
        kept += float(torch.minimum(p, q).exp().sum())
        kl += float((p.exp() * (p - q)).sum())
        count += float(predicted.sum())
    return {"tokens": count, "same_first_choice": same / count, "accepted": kept / count, "kl": kl / count}


def step_seconds(models: dict[str, Any]) -> dict[str, float]:
    """Median seconds of a plain decoding step; the models alternate."""
    results: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(TURNS):
        for name, model in models.items():
            began = time.perf_counter()
            skipstone.generate(
                model, torch.arange(1, 33), "autoregressive", max_new_tokens=TOKENS, do_sample=False, eos_token_id=None
            )
            results[name].append((time.perf_counter() - began) / TOKENS)
    return {name: statistics.median(seconds) for name, seconds in results.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=NANO)
    parser.add_argument("--draft", type=Path, default=DRAFTS["nano-draft"])
    parser.add_argument("--recipe", type=Path, default=Path(__file__).parents[1] / "train" / "nano.yaml")
    parser.add_argument("--data-dir", type=Path, help="JSON lines for the data sets of the hub, as in training")
    parser.add_argument("--rows", type=int, default=32, help="rows of held-out text a source")
    args = parser.parse_args()
    recipe, documents = held_out(args.recipe, args.data_dir)
    for folder in (args.target, args.draft):
        check_unseen(folder, documents)
    target, tokenizer = skipstone.load(args.target, dtype=torch.float32)
    draft, _ = skipstone.load(args.draft, dtype=torch.float32)
    results: dict[str, Any] = {}
    print("| held-out | tokens | same first choice | accepted | KL (nats) |\n| --- | --- | --- | --- | --- |")
    eos: Any = tokenizer.eos_token_id
    for source, source_documents in documents.items():
        rows = pack(source_documents, tokenizer, recipe.data.length, recipe.seed, eos)[: args.rows]
        one = results[source] = agreement(target, draft, rows)
        print(f"| {source} | {one['tokens']:.0f} | {one['same_first_choice']:.2f} | {one['accepted']:.2f} | {one['kl']:.2f} |")
    seconds = step_seconds({"target": target, "draft": draft})
    print("\n| model | ms a step |\n| --- | --- |")
    for name, one in seconds.items():
        print(f"| {name} | {1000 * one:.2f} |")
    print(json.dumps({"kind": "draft-model", "held_out": results, "step_seconds": seconds}))


if __name__ == "__main__":
    main()
