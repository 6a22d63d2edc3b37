"""AdaDecode's speed-up as its passes predict it, compared with its measured speed-up.

    python recipes/measure/adadecode_trace.py PROMPTS... [--model PATH] [--heads NAME] [--tokens 96] [--count 24]

PROMPTS: .jsonl files with a "prompt", taken round-robin. Each prompt is decoded plainly and by AdaDecode (the paper's). The
prediction adds up AdaDecode's passes, LM heads and exit heads at the median times of such passes, which are measured between
the prompts. In float32.
"""

import argparse
import itertools
import json
import time
import warnings
from collections import Counter, defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

import skipstone
from skipstone import AdaDecode, Autoregressive
from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_runner import ModelRunner
from skipstone.methods.adadecode.heads import load_heads
from skipstone.models.passes import Pass

PLACE = 200
"""Tokens before the timed passes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path, nargs="+")
    parser.add_argument("--model", default=None)
    parser.add_argument("--heads", default="nano-code")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--count", type=int, default=24)
    args = parser.parse_args()
    warnings.simplefilter("ignore", RuntimeWarning)
    model, tokenizer = skipstone.load(args.model, dtype=torch.float32)
    method = AdaDecode(args.heads)
    costs = Costs(ModelRunner(model), args.heads)
    files = [[json.loads(line)["prompt"] for line in path.read_text().splitlines()] for path in args.prompts]
    texts = [text for turn in itertools.zip_longest(*files) for text in turn if text is not None][: args.count]
    seconds, tokens, turns = defaultdict[str, float](float), Counter[str](), Counter[str]()
    for index, text in enumerate(texts):
        ids = tokenizer(text, return_tensors="pt")["input_ids"][0][:512]
        order: list[tuple[str, Any]] = [("plain", Autoregressive()), ("adadecode", method)]
        for name, chosen_method in order if index % 2 else reversed(order):
            stats = skipstone.generate(model, ids, chosen_method, max_new_tokens=args.tokens, do_sample=False).stats
            assert stats is not None
            seconds[name] += stats.seconds
            tokens[name] += stats.tokens
            turns[name] += stats.turns
        costs.time(method.report(model)["passes"])
    report = method.report(model)
    tests = sum(one["tests"] for one in report["exits"].values())
    scored: Counter[int] = Counter()
    predicted = tests * costs.of("test")
    for low, high, width, count in report["passes"]:
        predicted += count * costs.of((low, high, width))
        if high == model.config.num_hidden_layers:
            scored[width] += count
    predicted += sum(count * costs.of(("head", width)) for width, count in scored.items())
    plain = tokens["plain"] * (costs.of((0, model.config.num_hidden_layers, 1)) + costs.of(("head", 1)))
    measured = seconds["plain"] / tokens["plain"] * tokens["adadecode"] / seconds["adadecode"]
    expected = plain / tokens["plain"] * tokens["adadecode"] / predicted
    print("| tokens | tokens a step | tests a token | ms a test | ms LM head | predicted | measured | reached |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    print(
        f"| {tokens['adadecode']} | {tokens['adadecode'] / turns['adadecode']:.2f} | {tests / tokens['adadecode']:.2f} "
        f"| {1000 * costs.of('test'):.3f} | {1000 * costs.of(('head', 1)):.3f} | {expected:.2f} | {measured:.2f} "
        f"| {measured / expected:.2f} |"
    )


class Costs:
    """Seconds of passes by their kind."""

    def __init__(self, model: ModelRunner, heads: str) -> None:
        self.model, self.heads = model, load_heads(heads, model)
        self.store = KVCache(1, model.depth, PLACE + 32)
        self.store.reserve(PLACE + 32)
        self.seconds: dict[Any, list[float]] = defaultdict(list)

    @torch.inference_mode()
    def time(self, passes: list[list[int]]) -> None:
        """Time every kind of pass once."""
        kinds = {(low, high, width) for low, high, width, _ in passes} | {(0, self.model.depth, 1)}
        hidden = self.model.embed(torch.zeros((1, 1), dtype=torch.int64), torch.zeros((1, 1), dtype=torch.int64))
        for low, high, width in sorted(kinds):
            places = torch.arange(PLACE, PLACE + width)[None]
            at = Pass(places, places, None, slice(0, 1), PLACE + width, PLACE)
            hidden = self.model.embed(places % self.model.embeddings, places)
            began = time.perf_counter()
            out = self.model.run(hidden, at, self.store, range(low, high))
            self.seconds[low, high, width].append(time.perf_counter() - began)
            if high == self.model.depth:
                began = time.perf_counter()
                self.model.logits(out)
                self.seconds["head", width].append(time.perf_counter() - began)
        began = time.perf_counter()
        self.heads.logits(self.model, 0, hidden[:, -1:]).softmax(-1).amax(-1).tolist()
        self.seconds["test"].append(time.perf_counter() - began)

    def of(self, kind: Any) -> float:
        return median(self.seconds[kind])


if __name__ == "__main__":
    main()
