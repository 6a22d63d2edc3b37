"""How far rounding moves the next token's distribution: the native engine's and transformers' in bfloat16, from float32's.

    python recipes/measure/rounding.py MODEL --prompts FILE.jsonl [--num-prompts 24] [--prompt-tokens 400]

MODEL: with bfloat16 weights. FILE: lines with a "prompt" or, as Spec-Bench has them, "turns". Prints the mean KL divergence to
transformers in float32 over all places of the prompts, and the share of places with the same best token.
"""

import argparse
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import skipstone
from skipstone.engines.model_runner import ModelRunner

DTYPES = torch.float32, torch.bfloat16


@torch.inference_mode()
def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--num-prompts", type=int, default=24)
    parser.add_argument("--prompt-tokens", type=int, default=400)
    args = parser.parse_args()
    model, tokenizer = skipstone.load(args.model, dtype=torch.bfloat16, engine="native")
    references: dict[torch.dtype, Any] = {
        one: AutoModelForCausalLM.from_pretrained(args.model, dtype=one).eval() for one in DTYPES
    }
    runners = {name: ModelRunner(model, "native", compute_dtype=name) for name in ("float32", "bfloat16")}
    lines = [json.loads(line) for line in args.prompts.read_text().splitlines()]
    divergence, same, places = defaultdict[str, float](float), Counter[str](), 0
    for line in lines[:: max(1, len(lines) // args.num_prompts)][: args.num_prompts]:
        ids = tokenizer(line.get("prompt") or line["turns"][0], return_tensors="pt").input_ids[:, : args.prompt_tokens]
        expected = references[torch.float32](ids).logits[0].double().log_softmax(-1)
        found = {f"native, inputs in {name}": runner.project(runner.read(ids))[0] for name, runner in runners.items()}
        found["transformers in bfloat16"] = references[torch.bfloat16](ids).logits[0]
        places += ids.shape[1]
        for name, logits in found.items():
            log_probabilities = logits.double().log_softmax(-1)
            divergence[name] += float((expected.exp() * (expected - log_probabilities)).sum())
            same[name] += int((log_probabilities.argmax(-1) == expected.argmax(-1)).sum())
    for name, total in divergence.items():
        print(f"{name}: KL {total / places:.3g}, same best token {same[name] / places:.4f}, {places} places")


if __name__ == "__main__":
    main()
