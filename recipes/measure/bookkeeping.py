"""A method's own work as a share of its step, without the models' passes, at the shapes of real models (random weights).

    python recipes/measure/bookkeeping.py adasd llama-3.2-1b [--draft llama-3.2-1b,layers=1 --dtype bfloat16]
    python recipes/measure/bookkeeping.py lookups llama-3.2-1b [--dtype bfloat16]

adasd: entropies, Jensen-Shannon distances and thresholds with windows of 20 drafts. A step is 20 passes of the draft model and
one of the target. lookups: drafting and committing of prompt lookup and lookahead after 4096 tokens, including tensors and
embeddings of the drafts, minus the same work of plain decoding.
"""

import argparse
import random
import time
from typing import Any

import torch

from skipstone import AdaSD, Autoregressive, DecodingLoop, Lookahead, Method, ModelRunner, PromptLookup, Request
from skipstone.lab.synthetic import surrogate
from skipstone.methods.adasd import adasd

WINDOW, STEPS, WARM, CONTEXT, WORDS = 20, 6, 6, 4096, 300


class Stopwatch:
    """Seconds spent in functions of modules or objects since the last reading."""

    def __init__(self, *places: tuple[Any, str]) -> None:
        self.seconds = 0.0
        for owner, name in places:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began

        return run

    def read(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def start_decoder(model: ModelRunner, method: Method, prompt: list[int]) -> DecodingLoop:
    """A decoder that has read its prompt."""
    decoder = DecodingLoop(method.start(model, 1, len(prompt) + 1000))
    decoder.admit(0, Request(torch.tensor(prompt), 1000))
    while decoder.session.prefilling:
        decoder.step()
    return decoder


def measure_steps(decoder: DecodingLoop, stopwatch: Stopwatch) -> tuple[float, float, float]:
    """Means over STEPS: (seconds of a step, watched seconds of it, draft tokens scored)."""
    for _ in range(WARM):
        decoder.step()
    stopwatch.read()
    began, draft_tokens = time.perf_counter(), 0
    for _ in range(STEPS):
        draft_tokens += decoder.step().verified_nodes
    return (time.perf_counter() - began) / STEPS, stopwatch.read() / STEPS, draft_tokens / STEPS


def measure_adasd(target: Any, draft: Any, vocab: int) -> None:
    """Print the share of AdaSD's figures."""
    method = AdaSD(draft, num_speculative_tokens=WINDOW, adaptive_length=False)
    stopwatch = Stopwatch((adasd, "spread"), (adasd, "js_distances"), (adasd.AdaSDDrafter, "observe_scores"))
    decoder = start_decoder(ModelRunner(target), method, [random.randrange(vocab) for _ in range(64)])
    step_seconds, watched_seconds, draft_tokens = measure_steps(decoder, stopwatch)
    print(
        "| method | drafts a step | ms a step | ms entropies, distances, thresholds | share |\n| --- | --- | --- | --- | --- |"
    )
    share = watched_seconds / step_seconds
    print(f"| adasd | {draft_tokens:.0f} | {1000 * step_seconds:.0f} | {1000 * watched_seconds:.1f} | {share:.1%} |")


def measure_lookups(target: Any) -> None:
    """Print the share of lookups' own work. The model writes only words of the prompt, so that lookups find some."""
    with torch.no_grad():
        target.get_output_embeddings().weight[WORDS:] = 0
    words = [random.randrange(WORDS) for _ in range(CONTEXT // 8)]
    prompt, model = (words * 8)[:CONTEXT], ModelRunner(target)
    print("| method | draft tokens scored | ms a step | ms drafting and committing | share |\n| --- | --- | --- | --- | --- |")
    plain = 0.0
    for method in (Autoregressive(), PromptLookup(), Lookahead()):
        decoder = start_decoder(model, method, prompt)
        stopwatch = Stopwatch((decoder.session.drafter, "propose_draft"), (decoder.session, "commit"))
        step_seconds, watched_seconds, draft_tokens = measure_steps(decoder, stopwatch)
        plain = watched_seconds if method.name == "autoregressive" else plain
        own = watched_seconds - plain
        figures = f"{1000 * step_seconds:.1f} | {1000 * own:.2f} | {own / step_seconds:.1%}"
        print(f"| {method.name} | {draft_tokens:.0f} | {figures} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("adasd", "lookups"))
    parser.add_argument("shape", help="as in `skipstone bench surrogate`")
    parser.add_argument("--draft", default="llama-3.2-1b,layers=1", help="the draft model's shape")
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    random.seed(0)
    dtype, shape = getattr(torch, args.dtype), surrogate.parse(args.shape)
    target = surrogate.build(shape, 0, dtype, "cpu")
    if args.what == "lookups":
        measure_lookups(target)
    else:
        measure_adasd(target, surrogate.build(surrogate.parse(args.draft), 1, dtype, "cpu"), shape.config["vocab_size"])


if __name__ == "__main__":
    main()
