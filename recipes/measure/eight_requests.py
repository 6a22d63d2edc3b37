"""Tokens per second of the first requests of a fresh process, loading apart.

    python recipes/measure/eight_requests.py [--model FOLDER] [--method auto] [--first 0] [--field prompt] --data FILE.jsonl

Eight greedy requests of 64 new tokens are decoded one after the other. The time runs from the first call to the last token, so
it includes what the first request sets up. Two checkouts are compared by running the script in turns with PYTHONPATH=OTHER/src
and a cache folder (SKIPSTONE_CACHE) each. Prints one JSON document.
"""

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import skipstone

REQUESTS, NEW_TOKENS = 8, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, decoded in float32; the bundled model if none is named")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--data", type=Path, required=True, help="a file of JSON lines with prompts")
    parser.add_argument("--field", default="prompt", help="field of the prompt")
    parser.add_argument("--chat", action="store_true", help="prompts are messages of a user")
    parser.add_argument("--first", type=int, default=0, help="number of the first line to take")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    options: dict[str, Any] = {} if arguments.model is None else {"dtype": torch.float32}
    model, tokenizer = skipstone.load(arguments.model, **options)
    lines = arguments.data.read_text(encoding="utf-8").splitlines()[arguments.first : arguments.first + REQUESTS]
    texts = [json.loads(line)[arguments.field] for line in lines]
    prompts = [[{"role": "user", "content": text}] if arguments.chat else text for text in texts]
    began, tokens = time.perf_counter(), 0
    for prompt in prompts:
        output = skipstone.generate(
            model, prompt, arguments.method, tokenizer=tokenizer, max_new_tokens=NEW_TOKENS, do_sample=False
        )
        tokens += sum(len(row) for row in output.new_tokens or [])
    seconds = time.perf_counter() - began
    print(json.dumps({"method": arguments.method, "tokens": tokens, "tokens_per_second": round(tokens / seconds, 1)}))


if __name__ == "__main__":
    main()
