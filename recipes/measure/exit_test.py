"""Time of an exit test compared with an LM-head pass of plain decoding, at the shapes of real models (random weights).

    python recipes/measure/exit_test.py nano llama-3.2-1b,layers=2 llama-3-8b,layers=2 [--dtype bfloat16]

LM-head pass: final norm, LM head, likeliest token, transfer to the host. Test: final norm, transform, LM head, largest
probability, comparison, transfer to the host. Both alternate; medians.
"""

import argparse
import time
from statistics import median
from typing import Any

import torch

import skipstone
from skipstone.engines.model_runner import ModelRunner
from skipstone.lab.synthetic import surrogate
from skipstone.methods.adadecode.heads import ExitHeads, new_card

TURNS = 60


@torch.inference_mode()
def costs(model: Any) -> tuple[float, float]:
    """Seconds of an LM-head pass and of a test, of one row."""
    runner = ModelRunner(model)
    heads = ExitHeads(new_card(runner, (1,), "square")).to(runner.device, runner.dtype)
    token = torch.zeros((1, 1), dtype=torch.int64, device=runner.device)
    hidden = runner.embed(token, token)
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(TURNS):
        began = time.perf_counter()
        runner.logits(hidden)[:, 0].argmax(-1).tolist()
        between = time.perf_counter()
        (heads.logits(runner, 0, hidden)[:, 0].softmax(-1).amax(-1) > 0.75).tolist()
        seconds[0].append(between - began)
        seconds[1].append(time.perf_counter() - between)
    return median(seconds[0]), median(seconds[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", help='"nano", or as in `skipstone bench surrogate`')
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    print("| shape | ms LM-head pass | ms test | ratio |\n| --- | --- | --- | --- |")
    for name in args.shapes:
        if name == "nano":
            model: Any = skipstone.load()[0]
        else:
            model = surrogate.build(surrogate.parse(name), 0, getattr(torch, args.dtype), "cpu")
        head, test = costs(model)
        print(f"| {name} | {1000 * head:.3f} | {1000 * test:.3f} | {test / head:.2f} |")


if __name__ == "__main__":
    main()
