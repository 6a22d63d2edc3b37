"""Speed of the compiled engine compared with the eager and the native one, and the time of its warm-up.

    python recipes/measure/compiled.py [MODEL] [--rounds 5] [--new 90] [--prompt 24] [--columns 8] [--method "layerskip ..."]

Prints one JSON document: tokens per second (one row, including the prefill, medians over rounds, engines alternating), whether
the texts are the eager engine's, the number of graphs before the first and after the last round, and the seconds of the
warm-up. Measure on an idle machine.
"""

import argparse
import json
import statistics
import time
from typing import Any

import torch

import skipstone
from skipstone.engines.model_runner import ModelRunner

ENGINES = ("eager", "native", "compiled")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new", type=int, default=90)
    parser.add_argument("--prompt", type=int, default=24)
    parser.add_argument("--columns", type=int, default=8)
    parser.add_argument("--method", action="append", default=[])
    args = parser.parse_args()
    model, _ = skipstone.load(args.model)
    compiled: Any = ModelRunner(model, "compiled").engine
    began = time.perf_counter()
    compiled.warm_up(1, args.prompt + args.new, args.columns)
    warm_up, graphs = time.perf_counter() - began, compiled.graphs.count
    ids = torch.randint(1, 500, (1, args.prompt), generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"max_new_tokens": args.new, "do_sample": False, "eos_token_id": None}
    speeds: dict[str, list[float]] = {}
    texts: dict[str, Any] = {}
    for turn in range(args.rounds + 1):  # the first one is not counted
        for method in ("autoregressive", *args.method):
            for engine in ENGINES:
                began = time.perf_counter()
                output = skipstone.generate(model, ids, method, engine=engine, **options)
                seconds = time.perf_counter() - began
                key = f"{method}, {engine}"
                texts[key] = output.new_tokens
                if turn and output.new_tokens is not None:
                    speeds.setdefault(key, []).append(len(output.new_tokens[0]) / seconds)
    same = {key: text == texts[f"{key.rpartition(', ')[0]}, eager"] for key, text in texts.items()}
    result: dict[str, Any] = {"warm_up_s": round(warm_up, 1), "graphs_before": graphs, "graphs_after": compiled.graphs.count}
    medians = {key: round(statistics.median(values), 1) for key, values in speeds.items()}
    result |= {"threads": torch.get_num_threads(), "tokens_per_second": medians, "text_of_eager": same}
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
